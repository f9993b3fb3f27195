"""Decide how many bytes one sender may send now, from what it has seen of its gate and of the link. Pure; no I/O.

Inside the window of a bubble, never more than was planned for it, nor than is expected through by its deadline. Outside
bubbles, only rate-limited sends: a granted rate (STEADY), sends before there is a plan, a trickle of bytes that would
otherwise never be sent, and what is left of a copy that bubbles did not carry in time. Nothing is sent while a gate is
held.

`decide` reads `PacingState` and changes nothing; `PacingState.observe`, `sent` and `ended` record what was seen and
done. Times are nanoseconds of CLOCK_MONOTONIC unless a name says seconds.
"""

from __future__ import annotations

from collections import ChainMap
from dataclasses import dataclass, field

from ...model.pacer import NO_DEADLINE, Allowance
from ..bubble_plan import LARGEST_RATE_DUTY
from ..round_trips import RoundTrips
from .gate import STEADY, Opening
from .overdue import OverdueFrames
from .pacing_limits import PacingLimits
from .window_use import Fullness, Shortened, WindowKey


@dataclass(frozen=True)
class GateSight:
    """What one look at the gate shows. `openings` is read first, so that an opening is never missed."""

    openings: int  # so far
    plan_iterations: int  # `Gate.planned`: iterations within which the plan's bubbles carry all; 0 without a plan
    period_ns: int  # an iteration of the plan
    opening: Opening | None  # the one that stands; None for a closed gate
    link_rate: int = 0  # `Gate.link_rate`: bytes per second

    @property
    def plan(self) -> tuple[int, int, int]:
        return self.plan_iterations, self.period_ns, self.link_rate


@dataclass(frozen=True)
class SendNow:
    """Send `nbytes`. `window_index`: the window of the opening whose bytes are used (0 for a STEADY grant); None for a
    frame outside windows. `duty`: part of the time to use from now on; the sender rests for the remainder."""

    nbytes: int
    deadline_ns: int = NO_DEADLINE
    window_index: int | None = None
    duty: float | None = None


@dataclass(frozen=True)
class AskFallback:
    """Nothing is expected of the gate: the fallback pacer decides on `nbytes`."""

    nbytes: int


@dataclass(frozen=True)
class WaitFor:
    """Look again after `seconds`; None: when the gate is opened."""

    seconds: float | None


Decision = SendNow | AskFallback | WaitFor


@dataclass
class PacingState:
    """What one sender has seen of its gate and link. `start` makes the state before the first look."""

    limits: PacingLimits
    rate_duty: float  # part of the time for rate-limited sends: the rank's part of LARGEST_RATE_DUTY
    has_fallback: bool  # whether another pacer decides where the gate is silent
    first_openings: int  # openings counted before this sender started
    open_seen_ns: int  # when the gate was last seen open or newly opened, or the sender was idle
    openings_when_seen: int
    fed_ns: int  # when the gate last allowed bytes, was held, or the sender was idle
    openings_when_fed: int
    asked_ns: int  # when the sender last asked or ended a frame
    plan: tuple[int, int, int]  # (plan_iterations, period_ns, link_rate) of the bubbles in `shortened` and `filled`
    number: int | None = None  # the opening that was seen last
    openings_when_silent: int | None = None  # when patience ended: the gate is silent until another opening
    trickle_ns: int = 0  # no trickle frame before
    rate_ns: int = 0  # no rate-limited frame before
    overdue_ns: int = 0  # no frame of an overdue copy before
    copy_began_ns: int = 0  # when there was a copy to be sent
    copy_left: int = 0  # bytes of it that are not through
    window_rate: float = 0.0  # bytes per nanosecond planned in the last window of the plan; before it, the link's
    overdue: OverdueFrames = field(default_factory=OverdueFrames)
    rested_ns: int = 0  # no frame in a window before
    window_duty: float = 1.0  # part of the time for frames in windows
    rate_frame_bytes: int = 0  # of the next frame outside windows, from the time of the one before
    halved_ns: int = 0  # when the round trips were last halved
    fullness: Fullness = field(default_factory=Fullness)
    trips: RoundTrips = field(default_factory=RoundTrips)
    shortened: Shortened = field(default_factory=Shortened)
    # deadline -> (window, begin), of the last opening and the one before
    ends: ChainMap[int, tuple[WindowKey, int]] = field(default_factory=lambda: ChainMap({}, {}))
    inside_bytes: int = 0  # through within a window of a bubble
    late_bytes: int = 0  # through after the window, or after the gate was closed
    rate_bytes: int = 0  # rate-limited
    filled: dict[int, int] = field(default_factory=dict)  # bubble -> its part of `inside_bytes`, under `plan`

    @classmethod
    def start(
        cls, limits: PacingLimits, sight: GateSight, now: int, has_fallback: bool = False,
        rate_duty: float = LARGEST_RATE_DUTY,
    ) -> PacingState:  # fmt: skip
        """The state of a sender that has just been started."""
        return cls(
            limits, rate_duty, has_fallback, first_openings=sight.openings, open_seen_ns=now,
            openings_when_seen=sight.openings, fed_ns=now, openings_when_fed=sight.openings, asked_ns=now,
            plan=sight.plan, window_rate=sight.link_rate / 1e9,
            rate_frame_bytes=limits.slow_frame_bytes,
        )  # fmt: skip

    def begins(self, nbytes: int, now: int) -> None:
        """A copy of `nbytes` is to be sent from now on, instead of any other."""
        self.copy_began_ns, self.copy_left, self.overdue_ns = now, nbytes, 0

    def observe(self, sight: GateSight, asking_ns: int, now: int) -> None:
        """Record one look by a sender that has been asking since `asking_ns`."""
        if now - self.asked_ns > self.limits.idle_seconds * 1e9:  # it missed nothing, and begins to wait now
            self.fed_ns, self.openings_when_fed, self.open_seen_ns = now, sight.openings, now
        if sight.openings != self.openings_when_seen:
            self.open_seen_ns, self.openings_when_seen = now, sight.openings
        self.asked_ns = now
        self.follow(sight, now)  # also while no bubble of it is opened
        opening = sight.opening
        if opening is not None and stands(opening, now):
            self.open_seen_ns = now
            if opening.number != self.number:
                self._opened(opening, sight, asking_ns, now)
            if _is_held(opening, now):
                self.fed_ns, self.openings_when_fed = now, sight.openings
        impatient = now - self.open_seen_ns > self._patience_ns(sight)
        if impatient and self.openings_when_silent != sight.openings and not self.is_unplanned(sight):
            self.openings_when_silent = sight.openings

    def is_unplanned(self, sight: GateSight) -> bool:
        """Whether no plan is published and the gate was never open under this sender."""
        return self.number is None and sight.openings == self.first_openings and not sight.plan_iterations

    def follow(self, sight: GateSight, now: int) -> None:
        """Forget the bubbles of a plan that was replaced. A copy that waited for a plan has all of its iterations; to
        replace one postpones nothing, or plans that come often enough would do so for ever."""
        if self.plan != sight.plan:
            self.copy_began_ns = self.copy_began_ns if self.plan[0] else now
            self.plan, self.shortened, self.filled = sight.plan, Shortened(), {}
            self.window_rate = sight.link_rate / 1e9 or self.window_rate

    def sent(self, decision: SendNow, sight: GateSight, nbytes: int, now: int) -> None:
        """Record that a decision about `nbytes` is carried out."""
        if decision.duty is not None:
            self.window_duty = decision.duty
        if decision.window_index is not None:
            self.fullness.take(decision.window_index, decision.nbytes, more=decision.nbytes < nbytes)
            self.fed_ns, self.openings_when_fed = now, sight.openings
        else:
            self.trickle_ns = now + int(self.limits.idle_seconds * 1e9)  # until this frame is through
            if self.is_overdue(now):
                self.overdue_ns = self.trickle_ns

    def ended(self, allowed: Allowance, opening: Opening | None, now: int) -> bool | None:
        """Record that a frame is through, while `opening` stands; whether in its window, None outside windows."""
        self.asked_ns = now
        self.copy_left = max(0, self.copy_left - allowed.nbytes)
        if self.window_rate:
            self.overdue.seen(allowed.nbytes, now - allowed.began_ns, self.largest_frame())
        if allowed.deadline_ns == NO_DEADLINE:
            self._ended_by_rate(allowed.nbytes, max(1, now - allowed.began_ns), now)
            return None
        known = bool(self.trips)  # the first frame on a slow link is late for another reason
        took = now - allowed.began_ns
        self.trips.add(allowed.nbytes, took)
        self.rested_ns = now + _rest(took, self.window_duty)
        in_opening = opening is not None and any(end == allowed.deadline_ns for _, end, _ in opening.windows)
        inside = in_opening and now <= allowed.deadline_ns
        if known and not inside and allowed.deadline_ns in self.ends:
            window, begin = self.ends[allowed.deadline_ns]
            self.shortened.late(window, allowed.deadline_ns - begin)
        if inside and opening is not None:
            self.inside_bytes += allowed.nbytes
            self.filled[opening.bubble] = self.filled.get(opening.bubble, 0) + allowed.nbytes
        else:
            self.late_bytes += allowed.nbytes
        return inside

    def _ended_by_rate(self, nbytes: int, took: int, now: int) -> None:
        self.rate_bytes += nbytes
        pace, limits = nbytes / took * 1e9, self.limits
        self.rate_frame_bytes = max(
            limits.least_rate_frame_bytes, min(limits.slow_frame_bytes, int(pace * limits.slow_frame_seconds)),
            int(pace * limits.least_frame_seconds),
        )  # fmt: skip
        self.trickle_ns = now + _rest(took, limits.trickle_duty)
        self.rate_ns = now + _rest(took, self.rate_duty)
        if self.is_overdue(now):
            self.overdue.ended(nbytes, took, self.largest_frame(), limits)
            if self.overdue.large:  # most of its time it waited for a processor, not for the link
                link, duty = int(nbytes / self.window_rate), self.rate_duty
            else:  # the quickest of them has waited least
                link = min(took, int(nbytes * self.overdue.per_byte))
                slow = limits.much_slower * nbytes < self.window_rate * link
                duty = self.rate_duty * (limits.slow_link_part if slow else 1.0)
            rest = link + _rest(link, duty) - took
            until = self.copy_began_ns + int(limits.through_by * self.plan[0] * self.plan[1])
            even = (until - now) * nbytes // max(nbytes, self.copy_left) - took  # if all frames are like this one
            self.overdue_ns = now + max(rest, even)

    def is_overdue(self, now: int) -> bool:
        """Whether the bubbles of the plan should have carried the copy by now."""
        planned = self.plan[0] * self.plan[1]
        late = now - self.copy_began_ns > self.limits.overdue_after * planned
        return late and planned > 0 < self.window_rate

    @property
    def is_quick(self) -> bool:
        """Whether the link carried one of the recent large frames nearly as fast as planned."""
        return self.window_rate * self.overdue.per_byte <= self.limits.much_slower

    def largest_frame(self) -> int:
        """Bytes of the largest frame of an overdue copy."""
        planned = int(self.window_rate * self.limits.slow_frame_seconds * 1e9)
        return max(self.rate_frame_bytes, min(planned, self.limits.payload_bytes))

    def overdue_bytes(self) -> int:
        """Bytes of the next frame of an overdue copy."""
        largest = self.largest_frame()
        return largest if self.is_quick else self.overdue.size(self.rate_frame_bytes, largest)

    def _opened(self, opening: Opening, sight: GateSight, asking_ns: int, now: int) -> None:
        # If no frame was worth sending for a whole iteration, the link may have become faster. Once per iteration, not
        # in each bubble that is too short for a frame.
        if self.trips and self.plan[1] and now - max(self.fed_ns, self.halved_ns) > self.plan[1]:
            self.trips.halve()
            self.halved_ns = now
        self.number = opening.number
        self.fullness.opened(opening.windows, asking_ns, in_bubble=opening.bubble != STEADY)
        self.ends = ChainMap({}, self.ends.maps[0])
        for window_index, (begin, deadline, _) in enumerate(opening.windows):
            self.ends[deadline] = (opening.bubble, window_index), begin
            self.shortened.opened((opening.bubble, window_index), deadline - begin)
        if opening.bubble != STEADY and opening.windows:
            begin, deadline, window_bytes = opening.windows[-1]
            self.window_rate = window_bytes / max(1, deadline - begin) or self.window_rate

    def _patience_ns(self, sight: GateSight) -> int:
        patience = int(self.limits.patience_seconds * 1e9)
        if sight.plan_iterations:
            return max(patience, self.limits.patience_iterations * sight.period_ns)
        return min(patience, int(self.limits.unplanned_seconds * 1e9))


def stands(opening: Opening, now: int) -> bool:
    """Whether any of its windows may still be used: one left open by a dead trainer ends by its deadlines."""
    return any(now < deadline for _, deadline, _ in opening.windows)


def decide(state: PacingState, sight: GateSight, nbytes: int, now: int) -> Decision:
    """How many of `nbytes` may go now, after `sight` was observed."""
    overdue = state.copy_left > 0 and state.is_overdue(now) and not _is_held(sight.opening, now)
    if overdue and now >= state.overdue_ns:
        return SendNow(min(nbytes, state.overdue_bytes()))
    decision = _in_opening(state, sight.opening, nbytes, now, overdue)
    if overdue or isinstance(decision, SendNow):  # no other rate besides that of an overdue copy
        return decision
    if _starved(state, sight, now):
        return SendNow(min(nbytes, state.rate_frame_bytes))
    if state.has_fallback and state.is_unplanned(sight):  # protect the first capture soon
        return AskFallback(nbytes)
    if state.has_fallback and state.openings_when_silent == sight.openings:
        if (rest := state.rate_ns - now) > 0:
            return WaitFor(min(rest / 1e9, 10 * state.limits.poll_seconds))
        return AskFallback(min(nbytes, state.rate_frame_bytes))
    return decision


def _starved(state: PacingState, sight: GateSight, now: int) -> bool:
    """Whether a trickle frame is due: the gate is opened, but no window allows a frame."""
    return (
        now - state.fed_ns > state.limits.starved_seconds * 1e9
        and sight.openings - state.openings_when_fed >= state.limits.starved_openings
        and now >= state.trickle_ns
    )


def _is_held(opening: Opening | None, now: int) -> bool:
    return opening is not None and stands(opening, now) and not any(window[2] for window in opening.windows)


def _in_opening(
    state: PacingState, opening: Opening | None, nbytes: int, now: int, overdue: bool
) -> SendNow | WaitFor:
    if opening is None or not stands(opening, now):
        return WaitFor(None)
    if opening.bubble == STEADY:
        return WaitFor(state.limits.poll_seconds) if overdue else _by_rate(state, opening.windows[0], nbytes, now)
    limits = state.limits
    for window_index, (begin, deadline, window_bytes) in enumerate(opening.windows):
        end = begin + state.shortened.used((opening.bubble, window_index), deadline - begin)
        if now >= end:
            continue
        until = begin if now < begin else min(state.rested_ns, deadline)
        if now < until:
            return WaitFor(min((until - now) / 1e9, 10 * limits.poll_seconds))  # it may be closed before
        rate = window_bytes / (deadline - begin)
        room = min(state.fullness.left[window_index], _through(state, end - now, rate))
        # A window that carries less than a worthwhile frame is used if half of its bytes get through; on a slow link
        # smaller frames are worthwhile, or much of small windows would be lost.
        half = (_through(state, end - begin, rate) + 1) // 2
        if room > 0 and room >= min(nbytes, limits.least_frame_bytes, _worthwhile(state, rate), half):
            slow = limits.much_slower * _pace(state, rate) < rate and not state.is_quick
            duty = limits.slow_link_part * state.rate_duty if slow else 1.0
            return SendNow(min(nbytes, room, _longest(state, rate)), deadline, window_index, duty)
    return WaitFor(None)  # what remains of this opening is not worth a frame, and only shrinks


def _by_rate(state: PacingState, window: tuple[int, int, int], nbytes: int, now: int) -> SendNow | WaitFor:
    """Spread the bytes granted outside bubbles evenly over their time, without bursts."""
    begin, deadline, window_bytes = window
    left, least = state.fullness.left[0], min(state.limits.least_frame_bytes, state.rate_frame_bytes)
    due = window_bytes * (now - begin) // (deadline - begin) + least - (window_bytes - left)
    if now < state.rate_ns or now < begin or min(left, due) < max(1, min(nbytes, least, left)):
        return WaitFor(state.limits.poll_seconds)
    return SendNow(min(nbytes, left, due, state.rate_frame_bytes), NO_DEADLINE, 0)


def _pace(state: PacingState, rate: float) -> float:
    """Bytes per nanosecond: the planned `rate`, or less if recent frames were slower."""
    return min(rate, 1 / state.trips.per_byte) if state.trips else rate


def _longest(state: PacingState, rate: float) -> int:
    pace, limits = _pace(state, rate) * 1e9, state.limits
    slow = min(limits.slow_frame_bytes, int(pace * limits.slow_frame_seconds))
    return max(1, int(pace * limits.frame_seconds), slow)


def _through(state: PacingState, nanoseconds: float, rate: float) -> int:
    """Bytes of one frame that gets through within `nanoseconds`, with a margin once the link is measured."""
    planned = rate * nanoseconds
    measured = state.trips.through(state.limits.margin * nanoseconds) if state.trips else planned
    return int(min(planned, measured) + 1e-6)


def _worthwhile(state: PacingState, rate: float) -> int:
    """Bytes that take the link `least_frame_seconds`, or the latency of a frame if that is longer."""
    return int(max(state.limits.least_frame_seconds * 1e9, state.trips.latency) * _pace(state, rate))


def _rest(took: int, duty: float) -> int:
    """Nanoseconds to rest after a frame of `took` nanoseconds, so that frames use `duty` of the time."""
    return int(took * (1 / duty - 1))
