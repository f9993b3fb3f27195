"""What the SMPs of several nodes tell each other through the storage that they share, beside checkpoints.

Invariant: a notice is written whole or not at all, replaced by its author's next one and removed when it is over; one
that cannot be read, or is much older than our own, says nothing. No clock but that of the storage is trusted.

    offer-<node>.json   nothing moves any more: the versions that all ranks of that node hold, of a job of so many ranks
    wanted.json         the job trains on: a checkpoint of this version is wanted, which nobody has begun to capture

In: a job's folder in storage. Out: `Offer`s, a version.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import StorageError
from ..snapshot.checkpoint import read_json, write_json
from ..snapshot.retention import Offer
from ..snapshot.slots import Mark, Version

FRESH_SECONDS = 60.0  # between two offers that belong to one moment


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
        """Say what the ranks of this node hold, of a job of `world_size`, and what is known of it. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        held = [[version.lineage, version.iteration] for version in sorted(versions)]
        said = [[version.lineage, version.iteration, int(mark)] for version, mark in sorted((marks or {}).items())]
        told = {"ranks": sorted(ranks), "versions": held, "world_size": world_size, "marks": said}
        write_json(self._own, told)

    def offers(self, world_size: int) -> list[Offer]:
        """The offers of all nodes for a job of `world_size` ranks, of about the time of our own."""
        found: list[Offer] = []
        with suppress(OSError):
            now = self._own.stat().st_mtime
            for path in self._folder.glob("offer-*.json"):
                if abs(path.stat().st_mtime - now) <= FRESH_SECONDS:
                    found += self._read(path, world_size)
        return found

    def withdraw(self) -> None:
        """Our own offer is over."""
        with suppress(OSError):
            self._own.unlink(missing_ok=True)

    def want(self, version: Version) -> None:
        """Say which version is wanted. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_json(self._wanted, {"lineage": version.lineage, "iteration": version.iteration})

    def wanted(self) -> Version | None:
        """The version that some node wants."""
        content = _content(self._wanted)
        return Version(content["lineage"], content["iteration"]) if content else None

    def have(self, version: Version) -> None:
        """It was written, or cannot be any more."""
        with suppress(OSError):
            if self.wanted() == version:
                self._wanted.unlink(missing_ok=True)

    def _read(self, path: Path, world_size: int) -> Iterator[Offer]:
        content = _content(path)
        if content and content.get("world_size") == world_size:  # older versions say no size
            marks = {Version(lineage, iteration): Mark(mark) for lineage, iteration, mark in content.get("marks", ())}
            yield Offer(tuple(content["ranks"]), tuple(Version(*pair) for pair in content["versions"]), marks)


def _content(path: Path) -> dict[str, Any]:
    """{} for a notice that is not there, or damaged."""
    try:
        return read_json(path)
    except (FileNotFoundError, StorageError):
        return {}
