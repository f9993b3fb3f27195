"""Measure a job's iterations, give all ranks the profile of all, and measure again when it no longer fits.

    WARMING     skip a few atypical iterations, in which buffers and communicators are made
    RECORDING   record `iterations` of them, and take their median
    SIZING      gather the lengths of the ranks' messages,          } each gather starts at the end of one
    SHARING     then the messages: all ranks have one profile,      } iteration and is read at the end
    AGREEING    then a number that each rank computed from it       } of the next
    WATCHING    compare every `watch_every`-th iteration with the profile
    ASKING      every `ask_every` iterations: if any rank misses the profile too often, RECORDING again
    OFF         a rank has failed: all ranks know, and there is no profile

Invariant: all ranks are in the same phase at the end of the same iteration, because they count iterations and receive
the same messages; so no rank waits for a message that another does not send. A gather has a whole iteration to
complete, including an update in which all ranks meet: the step path waits only for a rank that is late anyway
(`waited`, seconds). An error here ends the profile, never training.

An iteration in which unplanned copies were sent (`traffic` changed) does not represent the others and is left out. A
single frame that spans a whole iteration goes unnoticed; such are few, and the median is taken.

In: a `Recorder` fed by the host's edges, begin and end of iterations, a collective; facts about this rank's copies,
gathered with its timeline. Out: `profile`, `on_profile` for each new one, `on_agreed` with the numbers of all ranks,
`on_failure`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

import msgpack

from ..errors import FtError
from ..model.timeline import Misses, Profile, SenderFacts, Timeline, median, reduce_work, reductions, strays
from .gate import edge_tolerance
from .record import Recorder
from .timeline_values import Packed, pack

_ATTEMPTS = 3  # to get a recording from every rank
_NUMBER = 8  # bytes
_LARGEST = (1 << 63) - 1


class GatherResult(Protocol):
    """A gather in progress."""

    def result(self) -> list[bytes]:
        """Wait for the payloads of all ranks, by rank."""
        ...


class Gathers(Protocol):
    """A collective that gathers in the background."""

    def start_gather(self, payload: bytes, longest: int) -> GatherResult:
        """Start to gather payloads of at most `longest` bytes, the same on all ranks."""
        ...


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
    ProfilingPhase.SIZING: {ProfilingPhase.SHARING},
    ProfilingPhase.SHARING: {ProfilingPhase.AGREEING, ProfilingPhase.RECORDING, ProfilingPhase.OFF},
    ProfilingPhase.AGREEING: {ProfilingPhase.WATCHING},
    ProfilingPhase.WATCHING: {ProfilingPhase.ASKING},
    ProfilingPhase.ASKING: {ProfilingPhase.WATCHING, ProfilingPhase.RECORDING, ProfilingPhase.OFF},
    ProfilingPhase.OFF: set(),
}


class _Message(NamedTuple):
    """What a rank sends to the others."""

    failure: str = ""
    left_out: Sequence[int] = ()  # iterations
    reductions: Sequence[float] = ()  # seconds of each
    facts: Sequence[Any] = ()  # of a sender
    timeline: bytes = b""  # packed; empty if nothing was recorded


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
    ) -> None:
        """`on_profile` returns a number, 0 or more; `on_agreed` receives those of all ranks, by rank, an iteration
        later. `sender` is called once per profile, `traffic` at both ends of a recorded iteration."""
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
        self._payload = b""
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
        match self.phase:
            case ProfilingPhase.WARMING:
                if self._ends >= self._settings.warmup:
                    self._go(ProfilingPhase.RECORDING)
            case ProfilingPhase.RECORDING:
                if self._ends >= self._settings.iterations:
                    self._payload = self._own_message()
                    self._gather(len(self._payload).to_bytes(_NUMBER, "little"), _NUMBER)
                    self._go(ProfilingPhase.SIZING)
            case ProfilingPhase.SIZING:
                self._gather(self._payload, max(self._gathered_numbers()))
                self._go(ProfilingPhase.SHARING)
            case ProfilingPhase.SHARING:
                self._go(self._shared(self._gathered()))
            case ProfilingPhase.AGREEING:
                self._on_agreed(self._gathered_numbers())
                self._go(ProfilingPhase.WATCHING)
            case ProfilingPhase.WATCHING:
                if self._ends >= self._settings.ask_every:
                    self._gather(msgpack.packb([self._misses.limit_reached, bool(self._failure)]), 8)
                    self._go(ProfilingPhase.ASKING)
            case ProfilingPhase.ASKING:
                self._go(self._answered(self._gathered()))

    def _go(self, phase: ProfilingPhase) -> None:
        if phase not in TRANSITIONS[self.phase]:
            raise FtError(f"rank {self._rank}: a profile cannot go from {self.phase.value} to {phase.value}")
        self.phase, self._ends = phase, 0
        if phase is ProfilingPhase.RECORDING:
            self._recorded, self._left_out = [], []

    def _gather(self, payload: bytes, longest: int) -> None:
        self._pending = self._collective.start_gather(payload, longest)

    def _gathered(self) -> list[bytes]:
        assert self._pending is not None
        began = time.perf_counter()
        payloads = self._pending.result()
        self.waited += time.perf_counter() - began
        self._pending = None
        return payloads

    def _gathered_numbers(self) -> list[int]:
        return [int.from_bytes(part, "little") for part in self._gathered()]

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

    def _own_message(self) -> bytes:
        facts: tuple[Any, ...] = ()
        try:
            facts = astuple(self._sender())
        except Exception as error:
            self._failure = self._failure or self._described(error)
        if self._failure or not self._recorded:
            return bytes(msgpack.packb(_Message(self._failure)))
        timelines = [timeline for _, timeline in self._recorded]
        stray = sorted([*(self._recorded[index][0] for index in strays(timelines)), *self._left_out])
        usual = median(timelines)
        return bytes(msgpack.packb(_Message("", stray, reductions(usual), facts, msgpack.packb(pack(usual)))))

    def _described(self, error: Exception) -> str:
        return f"rank {self._rank}: {type(error).__name__}: {error}"

    def _shared(self, parts: Sequence[bytes]) -> ProfilingPhase:
        messages = [_Message(*msgpack.unpackb(part, use_list=False)) for part in parts]
        failure = next((one.failure for one in messages if one.failure), "")
        empty = [rank for rank, one in enumerate(messages) if not one.timeline]
        self._attempts += 1
        if not failure and empty:
            if self._attempts < _ATTEMPTS:
                return ProfilingPhase.RECORDING
            iterations = f"{_ATTEMPTS} attempts of {self._settings.iterations} iterations"
            failure = f"rank {empty[0]} recorded no iteration in {iterations}"
        if failure:
            return self._off(failure)
        self._attempts = 0
        self.left_out = {rank: tuple(one.left_out) for rank, one in enumerate(messages) if one.left_out}
        self.profile = Profile(
            Packed([one.timeline for one in messages]),
            tuple(SenderFacts(*one.facts) for one in messages),
            reduce_work([one.reductions for one in messages]),
        )
        self._misses = self._settings.misses_of(self.profile.timelines[self._rank].seconds)
        number = min(self._on_profile(self.profile), _LARGEST)
        self._gather(number.to_bytes(_NUMBER, "little"), _NUMBER)
        return ProfilingPhase.AGREEING

    def _answered(self, parts: Sequence[bytes]) -> ProfilingPhase:
        answers = [msgpack.unpackb(part) for part in parts]
        for rank, (_, failed) in enumerate(answers):
            if failed:
                return self._off(self._failure or f"rank {rank} failed to measure an iteration")
        return ProfilingPhase.RECORDING if any(misfits for misfits, _ in answers) else ProfilingPhase.WATCHING

    def _off(self, reason: str) -> ProfilingPhase:
        self.profile = None
        self._on_failure(reason)
        return ProfilingPhase.OFF
