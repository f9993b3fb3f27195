"""Decide how many bytes one sender may send now, from what it has seen of its gate and of the link. Pure; no I/O.

Inside the window of a bubble, never more than was planned for it, nor than is expected through by its deadline. Outside
bubbles, only rate-limited sends: a granted rate (STEADY), sends before there is a plan, and a trickle of bytes that
would otherwise never be sent. Nothing is sent while a gate is held.

`decide` reads `PacingState` and changes nothing; `PacingState.observe`, `sent` and `ended` record what was seen and
done. Times are nanoseconds of CLOCK_MONOTONIC unless a name says seconds.
"""

from __future__ import annotations

from collections import ChainMap
from dataclasses import dataclass, field

from ..model.pacer import NO_DEADLINE, Allowance
from .bubble_plan import BY_RATE
from .gate import STEADY, Opening
from .round_trips import RoundTrips
from .window_use import Fullness, Shortened, WindowKey


@dataclass(frozen=True)
class PacingLimits:
    """The constants of pacing. Bytes and seconds; a share is a part of 1."""

    # frames in bubbles
    least_frame_bytes: int = 64 << 10  # a smaller frame is not worth its round trip: it waits for the next window,
    least_frame_seconds: float = 0.001  # unless it takes the link this long, as on a slow link
    frame_seconds: float = 0.004  # longest frame: a message that ends a bubble early waits this long for it
    slow_frame_bytes: int = 16 << 10  # or this many bytes: below that a frame costs more processor than link
    slow_frame_seconds: float = 0.016  # but not longer than this: on a slow link even short frames take long
    margin: float = 0.75  # part of the bytes expected through by the deadline that is sent, so that the end is met
    much_slower: float = 2.0  # times slower than planned: beyond it, training's messages fill much of each bubble,
    slow_link_share: float = 0.25  # so frames in bubbles take this part of the share of rate-limited sends
    # outside bubbles
    starved_openings: int = 8  # openings without a frame, and
    starved_seconds: float = 5.0  # as long without one, after which a copy goes on in a trickle
    trickle_share: float = 0.01  # of the time
    least_rate_frame_bytes: int = 1 << 10  # shorter frames measure nothing but latency
    # when nothing more is expected of the gate
    patience_seconds: float = 60.0  # without an opening, under a plan
    patience_iterations: int = 3  # and as many planned iterations: each opens the gate at least once
    unplanned_seconds: float = 1.0  # without an opening, without a plan
    idle_seconds: float = 1.0  # a sender that has not asked for so long had nothing to send
    # waiting
    poll_seconds: float = 0.002  # between looks at a gate that is open
    opening_seconds: float = 0.02  # until a closed gate is looked at again, though no opening was signalled
    # reporting
    reported_bubbles: int = 32  # bubbles whose bytes are reported, the fullest ones


LIMITS = PacingLimits()


def least_bytes(bytes_per_second: float) -> int:
    """Bytes that a window must carry, over a link of that speed, to be planned with."""
    return min(LIMITS.least_frame_bytes, int(LIMITS.least_frame_seconds * bytes_per_second))


@dataclass(frozen=True)
class GateSight:
    """What one look at the gate shows. `openings` is read first, so that an opening is never missed."""

    openings: int  # so far
    planned: int  # `Gate.planned`: 0 without a plan
    period_ns: int  # an iteration of the plan
    opening: Opening | None  # the one that stands; None for a closed gate


@dataclass(frozen=True)
class SendNow:
    """Send `nbytes`. `window`: of the opening, None outside windows. `share`: part of the time to use from now on;
    the sender rests for the remainder."""

    nbytes: int
    deadline_ns: int = NO_DEADLINE
    window: int | None = None
    share: float | None = None


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
    rate_share: float  # of the time, for rate-limited sends: the rank's part of BY_RATE
    has_fallback: bool  # whether another pacer decides where the gate is silent
    first_openings: int  # of earlier trainers: those of this one come after
    open_seen_ns: int  # when the gate was last seen open or newly opened, or the sender was idle
    open_seen_at: int  # `openings` at that time
    fed_ns: int  # when the gate last allowed bytes, was held, or the sender was idle
    fed_at: int  # `openings` at that time
    asked_ns: int  # when the sender last asked or ended a frame
    plan: tuple[int, int]  # (planned, period_ns) of the bubbles in `shortened` and `filled`
    number: int | None = None  # the opening that was seen last
    silent_at: int | None = None  # `openings` when patience ended: silent until there is another one
    trickle_ns: int = 0  # no trickle frame before
    rate_ns: int = 0  # no rate-limited frame before
    rested_ns: int = 0  # no frame in a window before
    share: float = 1.0  # of the time, for frames in windows
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
        cls, limits: PacingLimits, sight: GateSight, now: int, has_fallback: bool = False, rate_share: float = BY_RATE
    ) -> PacingState:
        """The state of a sender that has just been started."""
        return cls(
            limits, rate_share, has_fallback, first_openings=sight.openings, open_seen_ns=now,
            open_seen_at=sight.openings, fed_ns=now, fed_at=sight.openings, asked_ns=now,
            plan=(sight.planned, sight.period_ns), rate_frame_bytes=limits.slow_frame_bytes,
        )  # fmt: skip

    def observe(self, sight: GateSight, asking_ns: int, now: int) -> None:
        """Record one look by a sender that has been asking since `asking_ns`."""
        if now - self.asked_ns > self.limits.idle_seconds * 1e9:  # it missed nothing, and begins to wait now
            self.fed_ns, self.fed_at, self.open_seen_ns = now, sight.openings, now
        if sight.openings != self.open_seen_at:
            self.open_seen_ns, self.open_seen_at = now, sight.openings
        self.asked_ns = now
        opening = sight.opening
        if opening is not None and stands(opening, now):
            self.open_seen_ns = now
            if opening.number != self.number:
                self._opened(opening, sight, asking_ns, now)
            if not any(window[2] for window in opening.windows):  # held
                self.fed_ns, self.fed_at = now, sight.openings
        impatient = now - self.open_seen_ns > self._patience_ns(sight)
        if impatient and self.silent_at != sight.openings and not self.is_unplanned(sight):
            self.silent_at = sight.openings

    def is_unplanned(self, sight: GateSight) -> bool:
        """Whether there was no plan yet, and none is being made."""
        return self.number is None and sight.openings == self.first_openings and not sight.planned

    def follow(self, planned: int, period_ns: int) -> None:
        """Forget the bubbles of a plan that was replaced."""
        if self.plan != (planned, period_ns):
            self.plan, self.shortened, self.filled = (planned, period_ns), Shortened(), {}

    def sent(self, decision: SendNow, sight: GateSight, nbytes: int, now: int) -> None:
        """Record that a decision about `nbytes` is carried out."""
        if decision.share is not None:
            self.share = decision.share
        if decision.window is not None:
            self.fullness.take(decision.window, decision.nbytes, more=decision.nbytes < nbytes)
            self.fed_ns, self.fed_at = now, sight.openings
        else:
            self.trickle_ns = now + int(self.limits.idle_seconds * 1e9)  # until this frame is through

    def ended(self, allowed: Allowance, opening: Opening | None, now: int) -> bool | None:
        """Record that a frame is through, while `opening` stands; whether in its window, None outside windows."""
        self.asked_ns = now
        if allowed.deadline_ns == NO_DEADLINE:
            self._ended_by_rate(allowed.nbytes, max(1, now - allowed.began_ns), now)
            return None
        known = bool(self.trips)  # the first frame on a slow link is late for another reason
        took = now - allowed.began_ns
        self.trips.add(allowed.nbytes, took)
        self.rested_ns = now + _rest(took, self.share)
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
            limits.least_rate_frame_bytes,
            min(limits.slow_frame_bytes, int(pace * limits.slow_frame_seconds)),
            int(pace * limits.least_frame_seconds),
        )
        self.trickle_ns = now + _rest(took, limits.trickle_share)
        self.rate_ns = now + _rest(took, self.rate_share)

    def _opened(self, opening: Opening, sight: GateSight, asking_ns: int, now: int) -> None:
        self.follow(sight.planned, sight.period_ns)
        # If no frame was worth sending for a whole iteration, the link may have become faster. Once per iteration, not
        # in each bubble that is too short for a frame.
        if self.trips and self.plan[1] and now - max(self.fed_ns, self.halved_ns) > self.plan[1]:
            self.trips.halve()
            self.halved_ns = now
        self.number = opening.number
        self.fullness.opened(opening.windows, asking_ns, in_bubble=opening.bubble != STEADY)
        self.ends = ChainMap({}, self.ends.maps[0])
        for place, (begin, deadline, _) in enumerate(opening.windows):
            self.ends[deadline] = (opening.bubble, place), begin
            self.shortened.opened((opening.bubble, place), deadline - begin)

    def _patience_ns(self, sight: GateSight) -> int:
        patience = int(self.limits.patience_seconds * 1e9)
        if sight.planned:
            return max(patience, self.limits.patience_iterations * sight.period_ns)
        return min(patience, int(self.limits.unplanned_seconds * 1e9))


def stands(opening: Opening, now: int) -> bool:
    """Whether any of its windows may still be used: one left open by a dead trainer ends by its deadlines."""
    return any(now < deadline for _, deadline, _ in opening.windows)


def decide(state: PacingState, sight: GateSight, nbytes: int, now: int) -> Decision:
    """How many of `nbytes` may go now, after `sight` was observed."""
    decision = _in_opening(state, sight.opening, nbytes, now)
    if isinstance(decision, SendNow):
        return decision
    if _starved(state, sight, now):
        return SendNow(min(nbytes, state.rate_frame_bytes))
    if state.has_fallback and state.is_unplanned(sight):  # protect the first capture soon
        return AskFallback(nbytes)
    if state.has_fallback and state.silent_at == sight.openings:
        rest = state.rate_ns - now
        if rest > 0:
            return WaitFor(min(rest / 1e9, 10 * state.limits.poll_seconds))
        return AskFallback(min(nbytes, state.rate_frame_bytes))
    return decision


def _starved(state: PacingState, sight: GateSight, now: int) -> bool:
    """Whether a trickle frame is due: the gate is opened, but no window allows a frame."""
    return (
        now - state.fed_ns > state.limits.starved_seconds * 1e9
        and sight.openings - state.fed_at >= state.limits.starved_openings
        and now >= state.trickle_ns
    )


def _in_opening(state: PacingState, opening: Opening | None, nbytes: int, now: int) -> SendNow | WaitFor:
    """What the current opening allows."""
    if opening is None or not stands(opening, now):
        return WaitFor(None)
    if opening.bubble == STEADY:
        return _by_rate(state, opening.windows[0], nbytes, now)
    limits = state.limits
    for place, (begin, deadline, planned) in enumerate(opening.windows):
        end = begin + state.shortened.used((opening.bubble, place), deadline - begin)
        if now >= end:
            continue
        until = begin if now < begin else min(state.rested_ns, deadline)
        if now < until:
            return WaitFor(min((until - now) / 1e9, 10 * limits.poll_seconds))  # it may be closed before
        rate = planned / (deadline - begin)
        room = min(state.fullness.left[place], _through(state, end - now, rate))
        # A window that carries less than a worthwhile frame is used if half of its bytes get through; on a slow link
        # smaller frames are worthwhile, or much of small windows would be lost.
        half = (_through(state, end - begin, rate) + 1) // 2
        if room > 0 and room >= min(nbytes, limits.least_frame_bytes, _worthwhile(state, rate), half):
            slow = limits.much_slower * _pace(state, rate) < rate
            share = limits.slow_link_share * state.rate_share if slow else 1.0
            return SendNow(min(nbytes, room, _longest(state, rate)), deadline, place, share)
    return WaitFor(None)  # what remains of this opening is not worth a frame, and only shrinks


def _by_rate(state: PacingState, window: tuple[int, int, int], nbytes: int, now: int) -> SendNow | WaitFor:
    """Spread the bytes granted outside bubbles evenly over their time, without bursts."""
    begin, deadline, planned = window
    left, least = state.fullness.left[0], min(state.limits.least_frame_bytes, state.rate_frame_bytes)
    due = planned * (now - begin) // (deadline - begin) + least - (planned - left)
    if now < state.rate_ns or now < begin or min(left, due) < max(1, min(nbytes, least, left)):
        return WaitFor(state.limits.poll_seconds)
    return SendNow(min(nbytes, left, due, state.rate_frame_bytes), NO_DEADLINE, 0)


def _pace(state: PacingState, rate: float) -> float:
    """Bytes per nanosecond: the planned `rate`, or less if recent frames were slower."""
    return min(rate, 1 / state.trips.per_byte) if state.trips else rate


def _longest(state: PacingState, rate: float) -> int:
    """Most bytes of a frame in a window."""
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


def _rest(took: int, share: float) -> int:
    """Nanoseconds to rest after a frame of `took` nanoseconds, so that frames use `share` of the time."""
    return int(took * (1 / share - 1))
