"""At which iterations a rank captures; with `--reft-interval auto` or `--reft-checkpoint-interval auto`, choose them.

Every SNAPSHOTS snapshots each rank sends all others what it has measured since. At the next fence all of them make the
same choice from the same figures (`planner.job_intervals`), the worst of any rank, and follow it from that iteration
on. The choice is in the header of every segment: SMPs read it there, and a restart continues with the newest that any
rank has. At a restart the interval between snapshots is halved: a job that fails more often than was known goes on.

Invariant: no rank captures by intervals that another one does not have. If it is not certain whether the others have
the figures, because a connection was lost just then, protection ends here. Where it was lost before, intervals stay.

In: seconds waited at fences, seconds of the SMP from the header. Out: whether a version is captured, and an event.
"""

from __future__ import annotations

import struct
import time
from dataclasses import replace

from ...collective import Collective, PendingGather
from ...config import ReftConfig
from ...errors import ProtectionError, ProtocolError
from ...events import Events, catalogue, say
from ...planner.job_intervals import Measured, MeasuredJob, choose
from ...snapshot.schedule import PACKED, ChosenSchedule, Intervals, SnapshotSchedule, newest
from ...snapshot.segment.header import Header

SNAPSHOTS = 16  # between two choices
DEGRADED = "degraded"  # announced by a rank that can no longer capture
_LOOK_SECONDS = 0.05  # for such a word, while figures are awaited
_MOST = 2**32 - 1  # that fits into a header
_FIGURES = struct.Struct("<5dQ")  # of `Measured`


class PeerDegraded(ProtectionError):
    """Another rank has lost protection."""

    def __init__(self) -> None:
        super().__init__("another rank lost protection: the versions that all ranks hold stay, none is added")


class CaptureTimes:
    """The schedule of one rank, from `resume` on."""

    def __init__(
        self, schedule: SnapshotSchedule, config: ReftConfig, job: MeasuredJob, collective: Collective, events: Events
    ) -> None:  # fmt: skip
        self._schedule, self._job, self._begins_with = schedule, job, Intervals(1, min(_MOST, config.begins_with[1]))
        self._collective, self._events = collective, events
        self._header: Header | None = None
        self._frozen = not (job.captured or job.stored)
        self._pending: PendingGather | None = None
        self._began = self._waited = 0.0  # a time; seconds of fences since
        self._fences = self._captured = 0  # since then

    def captures(self, iteration: int) -> bool:
        """Whether a version is captured at the end of `iteration`."""
        return self._schedule.captures(iteration)

    def resume(self, header: Header, restored: int | None) -> None:
        """Training begins, or goes on from the version of an iteration that was `restored`. Every rank calls."""
        again, self._header = self._header is not None, header
        if self._frozen:
            if header.chosen is not None:  # by an earlier start, that had other flags
                header.chosen = None
            return
        own = header.chosen
        parts = self._collective.gather(own.pack() if own else bytes(PACKED))
        chosen = newest(map(ChosenSchedule.unpack, parts))
        if chosen is None or restored is None:
            chosen = ChosenSchedule(0, self._begins_with, self._begins_with, int(time.time()))
        chosen = replace(chosen, now=self._allowed(chosen.now), before=self._allowed(chosen.before))
        self._begin_again()
        if again or restored is None:
            self._follow(chosen)
            return
        before, chosen = chosen.at(restored + 1), chosen.restarted(restored)
        self._follow(chosen)
        if chosen.now != before:
            self._tell("the job was restarted, and may fail more often than it has seen")

    def _allowed(self, known: Intervals) -> Intervals:
        """Intervals of an earlier start, of which one may be given now."""
        job, given = self._job, self._begins_with
        stored = known.stored if job.stored and known.stored else given.stored  # 0 was given then
        return Intervals(known.captured if job.captured else 1, stored)

    def captured(self, iteration: int) -> None:
        """The capture of a version has begun, or was left out."""
        self._captured += 1
        chosen = self._schedule.chosen
        if not self._frozen and chosen is not None and self._captured >= SNAPSHOTS and iteration >= chosen.since:
            self._send(chosen)

    def fence(self, iteration: int, waited: float) -> float:
        """The fence of an iteration was passed, after so many seconds. Returns those that it waits in addition. Raises
        ProtectionError; PeerDegraded."""
        started = time.monotonic()
        if self._pending is not None:
            self._take(self._pending, iteration)
            return time.monotonic() - started
        if self._began:
            self._waited += waited
            self._fences += 1
        else:
            self._began = started
        return 0.0

    def _begin_again(self) -> None:
        """Measure again, from the next fence on."""
        self._pending, self._began, self._fences, self._waited, self._captured = None, 0.0, 0, 0.0, 0

    def _send(self, chosen: ChosenSchedule) -> None:
        assert self._header is not None
        self._pending = self._collective.start_gather(
            _FIGURES.pack(
                (time.monotonic() - self._began) / max(1, self._fences), self._waited / self._captured,
                self._header.exchanged_ms / 1e3, self._header.stored_ms / 1e3,
                max(0.0, time.time() - chosen.began), chosen.restarts,
            )
        )  # fmt: skip
        if self._pending.refused:  # no rank gets the figures of all
            self._frozen, self._pending = True, None

    def _take(self, pending: PendingGather, iteration: int) -> None:
        chosen = self._schedule.chosen
        assert chosen is not None
        until = time.monotonic() + pending.seconds
        while pending.waits(_LOOK_SECONDS) and time.monotonic() < until:
            if self._collective.announced(DEGRADED):  # it may have sent nothing
                raise PeerDegraded()
        try:
            figures = [_FIGURES.unpack(part) for part in pending.result()]
        except ProtocolError as error:
            raise ProtectionError(
                f"rank {self._collective.rank}: at which iterations snapshots are taken from {iteration} on is not "
                f"known here, and may be known to others: {error}"
            ) from error
        self._begin_again()
        measured = Measured(*(max(each) for each in zip(*figures, strict=True)))
        configured = self._schedule.captured
        choice = choose(self._job, measured, configured * chosen.now.captured, chosen.now.stored)
        intervals = Intervals(choice.captured // configured, choice.stored)
        if intervals == chosen.now:
            return
        self._follow(chosen.changed(iteration, intervals))
        self._tell(choice.reason)

    def _tell(self, reason: str) -> None:
        """Say the change, on one rank."""
        chosen = self._schedule.chosen
        if chosen is None or self._collective.rank:
            return
        captured, stored, since = self._schedule.captured * chosen.now.captured, chosen.now.stored, chosen.since
        self._events.emit(
            catalogue.INTERVAL_CHANGED, interval=captured, checkpoint_interval=stored, iteration=since, reason=reason,
        )  # fmt: skip
        say(
            f"from iteration {since} on a snapshot is taken every {captured}, and a checkpoint is due every {stored} "
            f"iterations: {reason}"
        )

    def _follow(self, chosen: ChosenSchedule) -> None:
        assert self._header is not None
        self._schedule = replace(self._schedule, chosen=chosen)
        self._header.chosen = chosen
