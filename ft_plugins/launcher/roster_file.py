"""What a node remembers of the last round, also in its next process: `nodes.json` in the run directory.

Invariant: the file is whole or not there, and of this job; only its owner can read it. A full disk or a damaged file
loses this memory, never the job.

In: a `Roster`. Out: the same, to the next process of this node.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from pathlib import Path

from .. import files
from ..events import say
from ..intake import json_value, read_bytes, typed
from ..recovery.resize import sizes
from .field_types import REMEMBERED
from .round_machine import Roster

_LIMIT = 4 << 20  # bytes of the file; the places of thousands of nodes


class RosterFile:
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
        with contextlib.suppress(OSError):
            files.write_json(self._path, {"run": self._run, "roster": asdict(roster)})

    def sizes(self) -> sizes.SizeReport:
        """With how many nodes the job can be trained, as its ranks report; empty until they do."""
        return sizes.read(self._path.parent) if self._path else sizes.SizeReport()

    def _found(self) -> Roster:
        """What a former process of this node has written; a file that makes no sense is set aside."""
        if self._path is None:
            return Roster(0)
        try:
            found = json_value(read_bytes(self._path, _LIMIT))
            if found["run"] != self._run:
                return Roster(0)
            roster = typed(Roster, found["roster"])
            if roster.round > REMEMBERED:
                raise ValueError(f"round {roster.round}")
            return roster
        except OSError:
            return Roster(0)
        except (ValueError, TypeError, KeyError) as error:
            aside = self._path.with_name(f"{self._path.name}.damaged")
            with contextlib.suppress(OSError):
                self._path.replace(aside)
            why = str(error) if isinstance(error, ValueError) else type(error).__name__
            say(
                f"{self._path}: expected the nodes of the last round, found something else ({why:.200}); set aside as "
                f"{aside.name}; this node takes part as one that comes for the first time",
                alarm=True,
                who="ft-run: ",
            )
            return Roster(0)
