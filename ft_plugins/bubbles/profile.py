"""Measures the first iterations of a job, tells every rank of all of them, and notices when that no longer fits.

    WARMING     a few iterations that are unlike the rest: buffers and communicators are made
    RECORDING   `iterations` of them are recorded, and their median taken
    SIZING      the ranks tell each other how long that is,           } each is asked at the end of one
    SHARING     then what it is: all have the same profile,           } iteration, and read at the end
    AGREEING    and then what each rank has made of it: a number      } of the next one
    WATCHING    every `watch_every`-th iteration is compared with the profile
    ASKING      every `ask_every`-th: does any rank miss it too often? Then it is RECORDING again
    OFF         a rank has failed to: all of them know, and there is no profile

Invariant: all ranks are in the same phase at the end of the same iteration, by counting and by what all were told, so
no rank waits for a word that another does not send. A message has a whole iteration to arrive, in which the update has
met all ranks: nothing waits in the step path but for a rank that is late anyway; `waited` says how long. An error
here ends the profile, never training.

An iteration in which copies went that nobody has planned yet (`traffic` has changed) is no measure of the others, and
is left out. One that is over while a single frame is still under way is not noticed: such are few, and the median is
taken.

In: a `Recorder` that the host tells of spans, begin and end of iterations, a collective; what this rank knows of the
copies that it sends, which the others are told with its timeline. Out: `profile`, `on_profile` for each new one, and
`on_agreed` with the numbers of all ranks; `on_failure`.
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

_ATTEMPTS = 3  # at a profile for which a rank has recorded nothing
_NUMBER = 8  # bytes
_LARGEST = (1 << 63) - 1


class GatherResult(Protocol):
    """Payloads on their way."""

    def result(self) -> list[bytes]:
        """Those of all ranks, by rank."""
        ...


class Gathers(Protocol):
    """What starts a gather of payloads of at most `longest` bytes, which all ranks know, without waiting for it."""

    def start_gather(self, payload: bytes, longest: int) -> GatherResult: ...


@dataclass(frozen=True)
class Profiling:
    """How a job is profiled. Iterations are counted; where a device clock lags behind, half of them are recorded."""

    warmup: int = 2
    iterations: int = 6
    watch_every: int = 4
    ask_every: int = 32  # as many as have to be watched for `misses`
    tolerance: float = 0.1  # of an edge, as a share of the iteration; less where a gate has less
    misses: int = 8  # more than fits, among those watched

    def misses_of(self, seconds: float) -> Misses:
        """None yet, of iterations of so many seconds: whatever bubbles are left alone for is a miss."""
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


class _Told(NamedTuple):
    """What a rank tells the others."""

    failure: str = ""
    left_out: Sequence[int] = ()  # iterations
    reductions: Sequence[float] = ()  # seconds of each
    facts: Sequence[Any] = ()  # of a sender
    timeline: bytes = b""  # packed; none where nothing was recorded


def _nothing(_: object) -> int:
    """Nobody asked to be told."""
    return 0


class Profiler:
    """One rank's part in the job's profile."""

    def __init__(
        self,
        rank: int,
        recorder: Recorder,
        collective: Gathers,
        settings: Profiling = Profiling(),  # noqa: B008  frozen
        on_profile: Callable[[Profile], int] = _nothing,
        on_agreed: Callable[[Sequence[int]], object] = _nothing,
        on_failure: Callable[[str], object] = _nothing,
        sender: Callable[[], SenderFacts] = SenderFacts,
        traffic: Callable[[], int] = int,
    ) -> None:
        """`on_profile` returns a number, 0 or more; `on_agreed` is given those of all ranks, by rank, an iteration
        later. `sender` is asked once for each profile, `traffic` at both ends of an iteration that is recorded."""
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
        self._ends = 0  # of iterations, in this phase
        self._attempts = 0
        self._recorded: list[tuple[int, Timeline]] = []  # with their iterations
        self._current = 0  # the iteration that is, or was last, recorded
        self._before = 0  # of traffic, at its begin
        self._measuring = False
        self._disturbed = False
        self._left_out: list[int] = []  # iterations that were disturbed
        self._payload = b""
        self._pending: GatherResult | None = None
        self._misses = settings.misses_of(1.0)  # of no profile yet
        self._failure = ""  # of this rank, for the next message

    def iteration_begin(self, step: int) -> None:
        """Whether this iteration is recorded follows from how many there have been."""
        wanted = self.phase is ProfilingPhase.RECORDING or (
            self.phase in (ProfilingPhase.WATCHING, ProfilingPhase.ASKING) and step % self._settings.watch_every == 0
        )
        if wanted and self._recorder.free and not self._failure:
            self._current, self._before, self._measuring = step, self._traffic(), True
            self._recorder.iteration_begin()

    def iteration_end(self, step: int) -> None:
        """One phase further, when its time has come."""
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
                    self._payload = self._own()
                    self._ask(len(self._payload).to_bytes(_NUMBER, "little"), _NUMBER)
                    self._go(ProfilingPhase.SIZING)
            case ProfilingPhase.SIZING:
                self._ask(self._payload, max(self._told_numbers()))
                self._go(ProfilingPhase.SHARING)
            case ProfilingPhase.SHARING:
                self._go(self._shared(self._told()))
            case ProfilingPhase.AGREEING:
                self._on_agreed(self._told_numbers())
                self._go(ProfilingPhase.WATCHING)
            case ProfilingPhase.WATCHING:
                if self._ends >= self._settings.ask_every:
                    self._ask(msgpack.packb([self._misses.limit_reached, bool(self._failure)]), 8)
                    self._go(ProfilingPhase.ASKING)
            case ProfilingPhase.ASKING:
                self._go(self._answered(self._told()))

    def _go(self, phase: ProfilingPhase) -> None:
        if phase not in TRANSITIONS[self.phase]:
            raise FtError(f"rank {self._rank}: a profile cannot go from {self.phase.value} to {phase.value}")
        self.phase, self._ends = phase, 0
        if phase is ProfilingPhase.RECORDING:
            self._recorded, self._left_out = [], []

    def _ask(self, payload: bytes, longest: int) -> None:
        self._pending = self._collective.start_gather(payload, longest)

    def _told(self) -> list[bytes]:
        assert self._pending is not None
        began = time.perf_counter()
        found = self._pending.result()
        self.waited += time.perf_counter() - began
        self._pending = None
        return found

    def _told_numbers(self) -> list[int]:
        return [int.from_bytes(part, "little") for part in self._told()]

    def _take(self) -> None:
        """Whatever fails here is told to all ranks with the next message."""
        try:
            self._recorder.iteration_end()
            if self._measuring:
                self._measuring, self._disturbed = False, self._traffic() != self._before
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
            self._failure = self._words(error)

    def _own(self) -> bytes:
        """What this rank tells the others."""
        facts: tuple[Any, ...] = ()
        try:
            facts = astuple(self._sender())
        except Exception as error:
            self._failure = self._failure or self._words(error)
        if self._failure or not self._recorded:
            return bytes(msgpack.packb(_Told(self._failure)))
        timelines = [timeline for _, timeline in self._recorded]
        stray = sorted([*(self._recorded[index][0] for index in strays(timelines)), *self._left_out])
        usual = median(timelines)
        return bytes(msgpack.packb(_Told("", stray, reductions(usual), facts, msgpack.packb(pack(usual)))))

    def _words(self, error: Exception) -> str:
        return f"rank {self._rank}: {type(error).__name__}: {error}"

    def _shared(self, parts: Sequence[bytes]) -> ProfilingPhase:
        told = [_Told(*msgpack.unpackb(part, use_list=False)) for part in parts]
        failure = next((one.failure for one in told if one.failure), "")
        empty = [rank for rank, one in enumerate(told) if not one.timeline]
        self._attempts += 1
        if not failure and empty:
            if self._attempts < _ATTEMPTS:
                return ProfilingPhase.RECORDING
            failure = f"rank {empty[0]} has recorded no iteration in {_ATTEMPTS} times {self._settings.iterations}"
        if failure:
            return self._off(failure)
        self._attempts = 0
        self.left_out = {rank: tuple(one.left_out) for rank, one in enumerate(told) if one.left_out}
        self.profile = Profile(
            Packed([one.timeline for one in told]),
            tuple(SenderFacts(*one.facts) for one in told),
            reduce_work([one.reductions for one in told]),
        )
        self._misses = self._settings.misses_of(self.profile.timelines[self._rank].seconds)
        made = min(self._on_profile(self.profile), _LARGEST)
        self._ask(made.to_bytes(_NUMBER, "little"), _NUMBER)
        return ProfilingPhase.AGREEING

    def _answered(self, parts: Sequence[bytes]) -> ProfilingPhase:
        told = [msgpack.unpackb(part) for part in parts]
        for rank, (_, failed) in enumerate(told):
            if failed:
                return self._off(self._failure or f"rank {rank} has failed to measure an iteration")
        return ProfilingPhase.RECORDING if any(again for again, _ in told) else ProfilingPhase.WATCHING

    def _off(self, reason: str) -> ProfilingPhase:
        self.profile = None
        self._on_failure(reason)
        return ProfilingPhase.OFF
