"""What a node remembers of the last round, also in its next process: `nodes.json` in the run directory.

Invariant: the file is whole or not there, and of this job; only its owner can read it. A full disk loses this memory,
never the job.

In: a `Roster`. Out: the same, to the next process of this node.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict
from pathlib import Path

from ..errors import ProtocolError
from ..recovery import sizes
from .gathering import Roster
from .station import read


class Memory:
    """The last round of job `run`; only in this process where there is no folder for it."""

    def __init__(self, run: str, folder: Path | None) -> None:
        self._run = run
        self._path = folder / "nodes.json" if folder else None
        self.roster = self._found()

    def keep(self, roster: Roster) -> None:
        """Remember `roster` if it is newer."""
        if roster.round <= self.roster.round:
            return
        self.roster = roster
        if self._path is None:
            return
        building = self._path.with_name(f"{self._path.name}.new")
        with contextlib.suppress(OSError):
            building.unlink(missing_ok=True)
            descriptor = os.open(building, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(descriptor, "w") as file:
                json.dump({"run": self._run, "roster": asdict(roster)}, file)
            building.replace(self._path)

    def sizes(self) -> sizes.Told:
        """With how many nodes the job can be trained, as its ranks have told; nothing while they have not."""
        return sizes.read(self._path.parent) if self._path else sizes.Told()

    def _found(self) -> Roster:
        try:
            found = json.loads(self._path.read_text()) if self._path else {}
            return read(Roster, found["roster"]) if found["run"] == self._run else Roster(0)
        except (OSError, ValueError, TypeError, KeyError, ProtocolError):
            return Roster(0)  # none, or not ours
