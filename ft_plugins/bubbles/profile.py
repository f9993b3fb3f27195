"""Measure a job's iterations, give each rank the profile that it needs, and measure again when it no longer fits.

    WARMING     skip a few atypical iterations, in which buffers and communicators are made
    RECORDING   record `iterations` of them, and take their median
    SIZING      gather summaries of all ranks,                      } each starts at the end of one
    SHARING     then timelines of some or all (timeline_exchange),  } iteration and is read at the end
    AGREEING    then a number that each rank computed from them     } of the next
    WATCHING    compare every `watch_every`-th iteration with the profile
    ASKING      every `ask_every` iterations: if any rank misses the profile too often, RECORDING again
    OFF         a rank has failed and all ranks know, or they are no longer connected: there is no profile

Invariant: all ranks are in the same phase at the end of the same iteration, because they count iterations and receive
the same messages; so no rank waits for a message that another does not send. A gather has a whole iteration to
complete, including an update in which all ranks meet: the step path waits only for a rank that is late anyway
(`waited`, seconds). An error here ends the profile, never training.

An iteration in which unplanned copies were sent (`traffic` changed) does not represent the others and is left out. A
single frame that spans a whole iteration goes unnoticed; such are few, and the median is taken.

In: a `Recorder` fed by the host's edges, begin and end of iterations, a collective; facts about this rank's copies,
gathered with the summaries. Out: `profile`, `on_profile` for each new one, `on_agreed` with the numbers of all ranks,
`on_failure`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from enum import Enum
from typing import Any

import msgpack

from ..errors import FtError, ProtocolError
from ..model.timeline import Misses, Profile, SenderFacts, Timeline, median, reduce_work, reductions, strays
from .gate.gate import edge_tolerance
from .timeline.record import Recorder
from .timeline.timeline_exchange import GatherResult, Gathers, RankSummary, Readers, TimelineExchange
from .timeline.timeline_values import Packed, pack

_ATTEMPTS = 3  # to get a recording from every rank
_NUMBER = 8  # bytes
_LARGEST = (1 << 63) - 1
_FAILED = (1 << 64) - 1  # sent in place of a number by a rank that has no profile


@dataclass(frozen=True)
class Profiling:
    """How a job is profiled. Counts are of iterations; if a device clock lags behind, half of them are recorded."""

    warmup: int = 2
    iterations: int = 6
    watch_every: int = 4
    ask_every: int = 32  # `misses` watched iterations
    tolerance: float = 0.1  # deviation of an edge, as a share of the iteration; at most that of a gate
    misses: int = 8  # more misses than fits, among watched iterations, that make a new profile due

    def misses_of(self, seconds: float) -> Misses:
        """No misses yet, for iterations of `seconds`: a deviation for which a gate does not use a bubble is a miss."""
        share = edge_tolerance(seconds) / seconds if seconds > 0 else self.tolerance
        return Misses(min(self.tolerance, share), self.misses)


class ProfilingPhase(Enum):
    """See the module."""

    WARMING = "warming"
    RECORDING = "recording"
    SIZING = "sizing"
    SHARING = "sharing"
    AGREEING = "agreeing"
    WATCHING = "watching"
    ASKING = "asking"
    OFF = "off"


TRANSITIONS = {
    ProfilingPhase.WARMING: {ProfilingPhase.RECORDING},
    ProfilingPhase.RECORDING: {ProfilingPhase.SIZING},
    ProfilingPhase.SIZING: {ProfilingPhase.SHARING, ProfilingPhase.RECORDING, ProfilingPhase.OFF},
    ProfilingPhase.SHARING: {ProfilingPhase.AGREEING},
    ProfilingPhase.AGREEING: {ProfilingPhase.WATCHING, ProfilingPhase.OFF},
    ProfilingPhase.WATCHING: {ProfilingPhase.ASKING},
    ProfilingPhase.ASKING: {ProfilingPhase.WATCHING, ProfilingPhase.RECORDING, ProfilingPhase.OFF},
    ProfilingPhase.OFF: set(),
}


def _ignore(_: object) -> int:
    return 0


class Profiler:
    """One rank's part in the job's profile."""

    def __init__(
        self,
        rank: int,
        recorder: Recorder,
        collective: Gathers,
        settings: Profiling = Profiling(),  # noqa: B008  frozen
        on_profile: Callable[[Profile], int] = _ignore,
        on_agreed: Callable[[Sequence[int]], object] = _ignore,
        on_failure: Callable[[str], object] = _ignore,
        sender: Callable[[], SenderFacts] = SenderFacts,
        traffic: Callable[[], int] = int,
        readers: Readers = lambda: None,
        gated: Callable[[Timeline], Timeline] = lambda own: own,
    ) -> None:
        """`on_profile` returns a number, 0 or more; `on_agreed` receives those of all ranks, by rank, an iteration
        later. `sender` is called once per profile, `traffic` at both ends of a recorded iteration. `readers`: who reads
        which timelines; None if every rank gets all. `gated`: this rank's timeline, as its gate follows it."""
        self._rank = rank
        self._recorder = recorder
        self._collective = collective
        self._settings = settings
        self._on_profile = on_profile
        self._on_agreed = on_agreed
        self._on_failure = on_failure
        self._sender = sender
        self._traffic = traffic
        self.profile: Profile | None = None
        self.left_out: dict[int, tuple[int, ...]] = {}  # by rank: iterations that were left out
        self.phase = ProfilingPhase.WARMING
        self.waited = 0.0  # seconds, for messages
        self._ends = 0  # iterations completed in this phase
        self._attempts = 0
        self._recorded: list[tuple[int, Timeline]] = []  # with their iterations
        self._current = 0  # the iteration recorded last
        self._traffic_before = 0  # at its begin
        self._measuring = False
        self._disturbed = False
        self._left_out: list[int] = []  # iterations that were disturbed
        self._readers = readers
        self._gated = gated
        self._exchange: TimelineExchange | None = None
        self._summaries: list[RankSummary] = []
        self._pending: GatherResult | None = None
        self._misses = settings.misses_of(1.0)  # no profile yet
        self._failure = ""  # of this rank, for the next message

    def iteration_begin(self, step: int) -> None:
        """Start recording this iteration if its number in the phase requires it."""
        wanted = self.phase is ProfilingPhase.RECORDING or (
            self.phase in (ProfilingPhase.WATCHING, ProfilingPhase.ASKING) and step % self._settings.watch_every == 0
        )
        if wanted and self._recorder.free and not self._failure:
            self._current, self._traffic_before, self._measuring = step, self._traffic(), True
            self._recorder.iteration_begin()

    def iteration_end(self, step: int) -> None:
        """Take the recording, and go to the next phase when it is due."""
        if self.phase is ProfilingPhase.OFF:
            return
        self._ends += 1
        self._take()
        try:
            match self.phase:
                case ProfilingPhase.WARMING:
                    if self._ends >= self._settings.warmup:
                        self._go(ProfilingPhase.RECORDING)
                case ProfilingPhase.RECORDING:
                    if self._ends >= self._settings.iterations:
                        summary, timeline = self._own_summary()
                        self._exchange = TimelineExchange(self._rank, self._collective, self._readers())
                        self._gather(msgpack.packb(self._exchange.summary(summary, timeline)))
                        self._go(ProfilingPhase.SIZING)
                case ProfilingPhase.SIZING:
                    self._go(self._summarized(self._gathered()))
                case ProfilingPhase.SHARING:
                    self._share()
                    self._go(ProfilingPhase.AGREEING)
                case ProfilingPhase.AGREEING:
                    self._go(self._agreed(self._gathered()))
                case ProfilingPhase.WATCHING:
                    if self._ends >= self._settings.ask_every:
                        self._gather(bytes([self._misses.limit_reached | bool(self._failure) << 1]))
                        self._go(ProfilingPhase.ASKING)
                case ProfilingPhase.ASKING:
                    self._go(self._answered(self._gathered()))
        except ProtocolError as error:  # the tree of ranks is lost: there can be no profile, but training goes on
            if self._exchange is not None:
                self._exchange.close()
            self._pending = self._exchange = None
            self._go(self._off(str(error)))

    def _go(self, phase: ProfilingPhase) -> None:
        if phase not in TRANSITIONS[self.phase]:
            raise FtError(f"rank {self._rank}: a profile cannot go from {self.phase.value} to {phase.value}")
        self.phase, self._ends = phase, 0
        if phase is ProfilingPhase.RECORDING:
            self._recorded, self._left_out = [], []

    def _gather(self, payload: bytes) -> None:
        self._pending = self._collective.start_gather(payload)

    def _gathered(self) -> list[bytes]:
        assert self._pending is not None
        began = time.perf_counter()
        payloads = self._pending.result()
        self.waited += time.perf_counter() - began
        self._pending = None
        return payloads

    def _take(self) -> None:
        """Take the recorded iteration. An error is reported to all ranks in the next message."""
        try:
            self._recorder.iteration_end()
            if self._measuring:
                self._measuring, self._disturbed = False, self._traffic() != self._traffic_before
            measured = self._recorder.take()
            if measured is None:
                return
            if self.phase is ProfilingPhase.RECORDING and self._disturbed:
                self._left_out.append(self._current)
            elif self.phase is ProfilingPhase.RECORDING:
                self._recorded.append((self._current, measured))
            elif self.profile is not None:
                self._misses = self._misses.seen(self.profile.timelines[self._rank], measured)
        except Exception as error:
            self._failure = self._described(error)

    def _own_summary(self) -> tuple[RankSummary, bytes]:
        """What this rank sends to all, and its packed timeline; b"" if there is none."""
        facts: tuple[Any, ...] = ()
        timelines = [timeline for _, timeline in self._recorded]
        try:
            facts = astuple(self._sender())
            usual = self._gated(median(timelines)) if timelines else None
        except Exception as error:
            self._failure = self._failure or self._described(error)
        if self._failure or usual is None:
            return RankSummary(self._failure), b""
        stray = sorted([*(self._recorded[index][0] for index in strays(timelines)), *self._left_out])
        return RankSummary("", stray, reductions(usual), facts), msgpack.packb(pack(usual))

    def _described(self, error: Exception) -> str:
        return f"rank {self._rank}: {type(error).__name__}: {error}"

    def _summarized(self, parts: Sequence[bytes]) -> ProfilingPhase:
        """Take the summaries of all ranks, and start to exchange timelines, if all have one."""
        self._summaries = [RankSummary(*msgpack.unpackb(part, use_list=False)) for part in parts]
        failure = next((one.failure for one in self._summaries if one.failure), "")
        empty = [rank for rank, one in enumerate(self._summaries) if not one.nbytes]
        self._attempts += 1
        if (failure or empty) and self._exchange is not None:
            self._exchange.close()
        if not failure and empty:
            if self._attempts < _ATTEMPTS:
                return ProfilingPhase.RECORDING
            iterations = f"{_ATTEMPTS} attempts of {self._settings.iterations} iterations"
            failure = f"rank {empty[0]} recorded no iteration in {iterations}"
        if failure:
            return self._off(failure)
        self._attempts = 0
        assert self._exchange is not None
        try:
            self._exchange.start(self._summaries)
        except FtError as error:
            self._failure = self._described(error)
        return ProfilingPhase.SHARING

    def _share(self) -> None:
        """Take the timelines, and send the number that is computed from them; _FAILED if they did not arrive."""
        summaries, number = self._summaries, _FAILED
        try:
            if self._failure:
                raise FtError(self._failure)
            assert self._exchange is not None
            began = time.perf_counter()
            timelines = self._exchange.result()
            self.waited += time.perf_counter() - began
        except Exception as error:
            self._failure = self._failure or self._described(error)
        else:
            self.left_out = {rank: tuple(one.left_out) for rank, one in enumerate(summaries) if one.left_out}
            self.profile = Profile(
                Packed(timelines), tuple(SenderFacts(*one.facts) for one in summaries),
                reduce_work([one.reductions for one in summaries]),
            )  # fmt: skip
            self._misses = self._settings.misses_of(self.profile.timelines[self._rank].seconds)
            number = min(self._on_profile(self.profile), _LARGEST)
        self._summaries, self._exchange = [], None
        self._gather(number.to_bytes(_NUMBER, "little"))

    def _agreed(self, parts: Sequence[bytes]) -> ProfilingPhase:
        numbers = [int.from_bytes(part, "little") for part in parts]
        failed = next((rank for rank, number in enumerate(numbers) if number == _FAILED), None)
        if failed is not None:
            return self._off(self._failure or f"rank {failed} did not receive the timelines of other ranks")
        self._on_agreed(numbers)
        return ProfilingPhase.WATCHING

    def _answered(self, parts: Sequence[bytes]) -> ProfilingPhase:
        """Each rank's answer is a byte: bit 0 for a profile that no longer fits, bit 1 for a failure."""
        answers = b"".join(parts)
        failed = next((rank for rank, answer in enumerate(answers) if answer & 2), None)
        if failed is not None:
            return self._off(self._failure or f"rank {failed} failed to measure an iteration")
        return ProfilingPhase.RECORDING if any(answers) else ProfilingPhase.WATCHING

    def _off(self, reason: str) -> ProfilingPhase:
        self.profile = None
        self._on_failure(reason)
        return ProfilingPhase.OFF
