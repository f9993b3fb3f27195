"""The last round's nodes, stored in `nodes.json` of the run directory for the next process of this node.

Invariant: the file is complete or absent, belongs to this job, and only its owner can read it. A full disk or a damaged
file loses this memory, never the job.

In: a `Roster`. Out: the same, to the next process of this node.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from pathlib import Path

from ...base import files
from ...base.intake import json_value, read_bytes, typed
from ...events import say
from ...recovery.resize import sizes
from ...smp.watch.job_history import ROUND_FILE, ROUND_LIMIT
from .field_types import REMEMBERED
from .roster import Roster


class RosterFile:
    """The last round of job `run`; not stored without a folder."""

    def __init__(self, run: str, folder: Path | None) -> None:
        self._run = run
        self._path = folder / ROUND_FILE if folder else None
        self.roster = self._read()

    def remember(self, roster: Roster) -> None:
        """Store `roster` if it is newer."""
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

    def _read(self) -> Roster:
        """What an earlier process of this node stored; a damaged file is renamed."""
        if self._path is None:
            return Roster(0)
        try:
            content = json_value(read_bytes(self._path, ROUND_LIMIT))
            if content["run"] != self._run:
                return Roster(0)
            roster = typed(Roster, content["roster"])
            if roster.round > REMEMBERED:
                raise ValueError(f"round {roster.round}")
            return roster
        except OSError:
            return Roster(0)
        except (ValueError, TypeError, KeyError) as error:
            renamed = self._path.with_name(f"{self._path.name}.damaged")
            with contextlib.suppress(OSError):
                self._path.replace(renamed)
            why = str(error) if isinstance(error, ValueError) else type(error).__name__
            say(
                f"{self._path}: expected the nodes of the last round, found something else ({why:.200}); renamed to "
                f"{renamed.name}; this node joins as a new one",
                alarm=True,
                who="ft-run: ",
            )
            return Roster(0)
