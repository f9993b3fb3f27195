"""A file for each incarnation of the ranks, as `nvrx-watch` of nvidia-resiliency-ext 0.7 reads them: off unless asked.

The names are its own: `cycle_info.JOB.ATTEMPT.CYCLE`, and `cycle_info.JOB.current`, a link to the newest one. JOB is
the Slurm array or job, else the name of the job; ATTEMPT counts starts of ft-run (Slurm's requeues, if it says so),
CYCLE its restarts. An incarnation without an end still runs.

Invariant: the node of the first rank writes, whole files alone. A folder that cannot be written, or does not answer,
costs the files and a line in the log, never the job. Nothing of an earlier attempt is replaced.

In: what an agent starts and ends. Out: JSON, times in UTC.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from ...base import files
from ...base.intake import within
from ...events import say

SECONDS = 10.0  # that a folder may take
_JOB = ("SLURM_ARRAY_JOB_ID", "SLURM_JOB_ID")


@dataclass(frozen=True)
class Cycle:
    """The fields of a file, in its spelling. `active_nodes`: separated by commas; `generation`: how often it was
    written again."""

    job_id: str
    attempt_index: int
    cycle_number: int
    cycle_start_time: str
    active_nodes: str
    active_ranks: str
    cycle_end_time: str = ""
    cycle_log_file: str = ""
    standby_nodes: str = ""
    generation: int = 0

    @property
    def name(self) -> str:
        return f"cycle_info.{self.job_id}.{self.attempt_index}.{self.cycle_number}"


class CycleFiles:
    """The files of one ft-run."""

    def __init__(self, folder: Path, job: str, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._job = next((environment[name] for name in _JOB if environment.get(name, "").isdigit()), job)
        count = environment.get("SLURM_RESTART_COUNT", "")
        self._attempt = int(count) if count.isdigit() else 0
        self._open: Cycle | None = None
        self._began = False
        self._silent: TimeoutError | None = None

    def begin(self, restarts: int, nodes: Sequence[str], ranks: int) -> None:
        """Ranks 0 to `ranks` - 1 have started on `nodes`."""
        self.end()
        own = f"cycle_info.{self._job}."
        self._bounded(lambda: self._count(own))
        names, every = ",".join(nodes), f"0-{ranks - 1}" if ranks > 1 else "0"
        self._open = Cycle(self._job, self._attempt, restarts, _now(), names, every)
        self._began = True
        self._write(self._open, own)

    def _count(self, own: str) -> None:
        while not self._began and any(self._folder.glob(f"{own}{self._attempt}.*")):
            self._attempt += 1

    def end(self) -> None:
        """They have ended. Idempotent."""
        if self._open is not None:
            self._write(replace(self._open, cycle_end_time=_now(), generation=1))
        self._open = None

    def _write(self, cycle: Cycle, own: str = "") -> None:
        def write() -> None:
            files.make_private(self._folder)
            files.write_json(self._folder / cycle.name, asdict(cycle))
            if own:
                link = self._folder / f"{own}current.new"
                link.unlink(missing_ok=True)
                os.symlink(cycle.name, link)
                os.replace(link, self._folder / f"{own}current")

        if error := self._bounded(write):
            why = f"{cycle.name} cannot be written ({error.strerror or error}); the job goes on without it"
            say(f"--ftp-cycle-info-dir {self._folder}: {why}", alarm=True, who="ft-run: ")

    def _bounded(self, call: Callable[[], None]) -> OSError | None:
        """Call it, unless the folder did not answer before: each such call leaves a thread behind."""
        try:
            if self._silent is None:
                within(SECONDS, call, "the file system")
        except TimeoutError as error:
            self._silent = error
        except OSError as error:
            return error
        return self._silent


def _now() -> str:
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
