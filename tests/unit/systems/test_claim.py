"""All ranks have the same configuration, or the difference is named; equal ones are compared by a digest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from ft_plugins.config import Config, launch_context
from ft_plugins.errors import ConfigError
from ft_plugins.events import Events
from ft_plugins.systems.claim import join_ranks, require_one_job


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


def _joins(rank: int, world: int, files: list[str]) -> tuple[str, bool]:
    """What `rank`, which is given `files[rank]`, says of it; '' if it takes part."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    context = launch_context({name: str(value) for name, value in place.items()})
    try:
        join_ranks(Config(secret_file=files[rank] or None), context, Events()).close()
    except ConfigError as error:
        return str(error), error.echo
    return "", False


@pytest.mark.parametrize("absent", [[0, 1, 2], [2], [0]])
def test_a_secret_that_a_rank_cannot_read_is_refused_on_all_by_name_wherever_it_is(
    ranks: Callable[..., list[Any]], tmp_path: Path, absent: list[int]
) -> None:
    (secret := tmp_path / "secret").write_bytes(b"sixteen bytes or more")
    secret.chmod(0o600)
    assert ranks(_joins, 3, [str(secret)] * 3) == [("", False)] * 3
    found = ranks(_joins, 3, [str(tmp_path / "absent") if rank in absent else str(secret) for rank in range(3)])
    assert [echo for _, echo in found] == [rank != absent[0] for rank in range(3)]
    for words, _ in found:
        assert words.startswith(f"rank {absent[0]}: --ftp-secret-file {tmp_path}/absent: cannot be read (No such file")
        assert "put the same file on every node" in words


def test_a_secret_that_only_some_ranks_are_given_and_none_can_read_is_refused_too(
    ranks: Callable[..., list[Any]],
) -> None:
    found = ranks(_joins, 2, ["", "/absent"])
    assert [words[:38] for words, _ in found] == ["rank 1: --ftp-secret-file /absent: can"] * 2
    assert ranks(_joins, 2, ["", ""]) == [("", False)] * 2, "without one nothing is asked for"


def test_a_job_of_one_rank_is_refused_too() -> None:
    with pytest.raises(ConfigError, match="^rank 0: --ftp-secret-file /absent: cannot be read"):
        join_ranks(Config(secret_file="/absent"), launch_context({}), Events())
