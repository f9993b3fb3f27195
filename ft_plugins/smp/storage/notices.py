"""Notices that the SMPs of several nodes exchange through their shared storage, next to the checkpoints.

Invariant: a notice is written whole or not at all, replaced by its author's next one, and removed when it no longer
applies. One that cannot be read, or is much older than this node's own, is ignored. Only the clock of the storage is
trusted.

    offer-<node>.json   the job has stopped: the versions that all ranks of that node hold, of a job of so many ranks
    wanted.json         the job trains: a checkpoint of this version is wanted, which no rank has begun to capture

In: a job's folder in storage. Out: `NodeOffer`s, a version.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field, TypeAdapter

from ...base.files import make_private, read_digested, write_digested
from ...base.intake import Count, Unfit, typed
from ...errors import StorageError
from ...snapshot.capture.retention import NodeOffer
from ...snapshot.segment.slots import Mark, Version

FRESH_SECONDS = 60.0  # maximum between two offers that belong together
_OFFERS = 65536  # maximum number of nodes

T = TypeVar("T")


@dataclass(frozen=True)
class _Offered:
    """What `offer` writes."""

    ranks: tuple[Count, ...]
    versions: tuple[tuple[Count, Count], ...]
    world_size: Count = 0  # absent in notices of older releases
    marks: tuple[tuple[Count, Count, Annotated[int, Field(strict=True, ge=min(Mark), le=max(Mark))]], ...] = ()


@dataclass(frozen=True)
class _Wanted:
    """What `want` writes."""

    lineage: Count
    iteration: Count


_OFFERED, _WANTED = TypeAdapter(_Offered), TypeAdapter(_Wanted)


class Notices:
    """The notices in the folder of one job, as the SMP of `node` sees them."""

    def __init__(self, folder: Path, node: str) -> None:
        self._folder = folder
        self._own = folder / f"offer-{node}.json"
        self._wanted = folder / "wanted.json"

    def offer(
        self,
        ranks: Collection[int],
        versions: Collection[Version],
        world_size: int,
        marks: Mapping[Version, Mark] | None = None,
    ) -> None:
        """Offer what the ranks of this node hold, of a job of `world_size`, with its verdicts. Raises OSError."""
        make_private(self._folder)
        pairs = [[version.lineage, version.iteration] for version in sorted(versions)]
        verdicts = [[version.lineage, version.iteration, int(mark)] for version, mark in sorted((marks or {}).items())]
        offer = {"ranks": sorted(ranks), "versions": pairs, "world_size": world_size, "marks": verdicts}
        write_digested(self._own, offer, shared=True)

    def offers(self, world_size: int) -> list[NodeOffer]:
        """The offers of all nodes for a job of `world_size` ranks, made at about the time of this node's own."""
        offers: list[NodeOffer] = []
        with suppress(OSError):
            now = self._own.stat().st_mtime
            for path in islice(self._folder.glob("offer-*.json"), _OFFERS):
                if abs(path.stat().st_mtime - now) <= FRESH_SECONDS:
                    offers += self._read(path, world_size)
        return offers

    def withdraw(self) -> None:
        """Remove this node's offer."""
        with suppress(OSError):
            self._own.unlink(missing_ok=True)

    def want(self, version: Version) -> None:
        """Announce which version is wanted. Raises OSError."""
        make_private(self._folder)
        write_digested(self._wanted, {"lineage": version.lineage, "iteration": version.iteration}, shared=True)

    def wanted(self) -> Version | None:
        """The version that a node wants."""
        wanted = _content(self._wanted, _WANTED)
        return Version(wanted.lineage, wanted.iteration) if wanted else None

    def have(self, version: Version) -> None:
        """Remove the notice that `version` is wanted: it was written, or no longer can be."""
        with suppress(OSError):
            if self.wanted() == version:
                self._wanted.unlink(missing_ok=True)

    def _read(self, path: Path, world_size: int) -> Iterator[NodeOffer]:
        offer = _content(path, _OFFERED)
        if offer and offer.world_size == world_size:
            marks = {Version(lineage, iteration): Mark(mark) for lineage, iteration, mark in offer.marks}
            yield NodeOffer(offer.ranks, tuple(Version(*pair) for pair in offer.versions), marks)


def _content(path: Path, adapter: TypeAdapter[T]) -> T | None:
    """The content of a notice; None if it is absent or damaged."""
    try:
        return typed(adapter, read_digested(path))
    except (FileNotFoundError, StorageError, Unfit):
        return None
