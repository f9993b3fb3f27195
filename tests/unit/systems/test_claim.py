"""All ranks have the same configuration, or the difference is named; equal ones are compared by a digest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from ft_plugins.config import Config
from ft_plugins.errors import ConfigError
from ft_plugins.systems.claim import require_one_job


class Ranks:
    """The collective of rank 0; the other ranks have `others`, and send what that rank would."""

    rank = 0

    def __init__(self, others: list[Config]) -> None:
        self.world_size, self.others, self.sent = 1 + len(others), others, list[bytes]()

    def gather(self, payload: bytes) -> list[bytes]:
        self.sent.append(payload)
        return [payload, *(self._of(config, len(self.sent)) for config in self.others)]

    def _of(self, config: Config, number: int) -> bytes:
        other: Any = Ranks([])
        with pytest.raises(StopIteration):
            require_one_job(host(1), config, Stopping(other, number))  # type: ignore[arg-type]
        return other.sent[-1]

    @contextmanager
    def agreement(self) -> Iterator[None]:
        yield


class Stopping:
    """Records what is sent, and stops at the n-th."""

    def __init__(self, into: Ranks, number: int) -> None:
        self.world_size, self.rank, self.into, self.number = 1, 1, into, number
        self.agreement = into.agreement

    def gather(self, payload: bytes) -> list[bytes]:
        self.into.sent.append(payload)
        if len(self.into.sent) == self.number:
            raise StopIteration
        return [payload, b"another"]


def host(world_size: int) -> Any:
    return SimpleNamespace(rank=0, topology=lambda: SimpleNamespace(world_size=world_size))


def config(interval: int, node: str = "a") -> Config:
    return Config.from_json({"reft": {"interval": interval}, "node_name": node})


def test_equal_configurations_are_eight_bytes_of_each_rank() -> None:
    ranks: Any = Ranks([config(3, "b"), config(3, "c")])
    require_one_job(host(3), config(3), ranks)
    assert [len(payload) for payload in ranks.sent] == [8], "names of nodes may differ"


def test_a_difference_is_named() -> None:
    ranks: Any = Ranks([config(3), config(4)])
    with pytest.raises(ConfigError, match="reft of rank 2 is .*'interval': 4"):
        require_one_job(host(3), config(3), ranks)
    assert len(ranks.sent) == 2 and msgpack.unpackb(ranks.sent[1])["reft"]["interval"] == 3
