"""Lets go what an open gate allows: the SMP's side of the gate (bubbles.gate), for whoever sends by `model.pacer`.

Invariant: in the window of a bubble no more is allowed than was planned for it, nor than gets through by its deadline
at the pace of the frames before. In no bubble goes only what was granted as a rate, what goes before there is a plan or
when no gate is opened any more (by another pacer), and a trickle of what would otherwise never go.

In: openings of one gate. Out: allowances, and counts of what went within them, late, and by rate.
"""

from __future__ import annotations

import threading
import time
from collections import ChainMap
from collections.abc import Callable
from dataclasses import replace

from ..model.pacer import NO_DEADLINE, Allowance, Pacer
from .window_use import Fullness
from .gate import STEADY, Gate, Opening
from .plan import BY_RATE
from .round_trips import RoundTrips
from .shortened import Shortened, Window

LEAST_BYTES = 64 << 10  # of a frame: less is not worth a round trip, and waits for the next window
LEAST_SECONDS = 0.001  # of the link: what takes as long is worth it, on a slow link too
FRAME_SECONDS = 0.004  # of a frame, at most: so long the message that ends a bubble before its time may wait for it
FRAME_BYTES = 16 << 10  # or so many: shorter ones take more of the processor than of the link
SLOW_FRAME_SECONDS = 0.016  # but no longer than that: on a slow link short ones take long enough
MOST_FILLED = 32  # bubbles of which is told how much went in them
MARGIN = 0.75  # of what would be through by the deadline, at the pace of the frames before: the end of a window is met
SLOWER = 2.0  # than planned: what is yet slower than that is needed by messages in much of what was a bubble,
SLOW_SHARE = 0.25  # and so much is taken there of what by a rate might be
STARVED_OPENINGS, STARVED_SECONDS = 8, 5.0  # of which none let anything go: then a trickle does
TRICKLE = 0.01  # of the time
_SHORTEST = 1 << 10  # bytes of a frame of it: shorter ones tell of latency alone
PATIENCE_PERIODS = 3  # iterations: in each of them something is opened
_UNASKED_NS = 1_000_000_000  # who has not asked for so long has nothing to send
_UNPLANNED_NS = 1_000_000_000  # where there is no plan, and was no gate held for so long, none is to be expected
OPENING_SECONDS = 0.02  # until a closed gate is looked at without having been told
_UNTIL_OPEN = -1.0  # in the place of seconds


def least_bytes(bytes_per_second: float) -> int:
    """What a window has to carry, over a link of that speed, to be planned with."""
    return min(LEAST_BYTES, int(LEAST_SECONDS * bytes_per_second))


class GatePacer:
    """Lets go what an open gate allows: a frame at a time, each only as long as it will be through by its deadline: at
    the rate that was planned with, and by the pace of the frames before, with a MARGIN. So a link that carries a tenth
    of what was planned delays nothing but copies. A window in which frames were late is used less far from then on
    (`shortened`). What is granted in no bubble goes evenly over its time, and in `by_rate_share` of it at most: the
    rank's part of BY_RATE (`plan.by_rate_shares`). So do frames in bubbles, in SLOW_SHARE of it, where the link is more
    than SLOWER times slower than planned: training's own messages are then under way in much of what was a bubble.

    `otherwise` alone paces until a gate is opened or held for the first time: what is captured first is to be protected
    soon. By a rate, and by `otherwise`, goes what goes without a plan after that, and when no gate was opened for
    `patience_seconds` and for PATIENCE_PERIODS planned iterations in which somebody wanted to send (a trainer that is
    dead, evaluation) until there is one again.
    Where gates are opened and nothing goes (bubbles are shorter than planned, the machine is too busy to meet them), a
    copy must not stop for ever: after STARVED_OPENINGS frames go all the same, in a TRICKLE of the time. Never while a
    gate is held. `inside_bytes` went in a window of a bubble, `late_bytes` were through after it, or after the gate was
    closed; `rate_bytes` by a rate. `filled` has those of each bubble, `fullness` how full windows were.
    """

    def __init__(
        self,
        gate: Gate,
        otherwise: Pacer | None = None,
        patience_seconds: float = 60.0,
        least_bytes: int = LEAST_BYTES,
        poll_seconds: float = 0.002,
        by_rate_share: float = BY_RATE,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._gate = gate
        self._otherwise = otherwise
        self._patience_ns = int(patience_seconds * 1e9)
        self._least = least_bytes
        self._poll = poll_seconds
        self._by_rate_share = by_rate_share
        self._clock_ns = clock_ns
        self._by_kernel = clock_ns is time.monotonic_ns  # by another clock it is looked at again and again
        self._lock = threading.Lock()
        self._number: int | None = None  # the opening that was seen last
        self._seen_ns = clock_ns()  # when one was open or had been since the look before, or nobody had wanted
        self._seen_at = gate.openings  # how many there had been then
        self._silent_at: int | None = None  # how many there had been when there was no more patience
        self._asked_ns = self._seen_ns  # when somebody wanted to send
        self._fed_ns = self._seen_ns  # when the gate let something go, was held, or nobody had wanted
        self._fed_at = gate.openings  # how many there had been then
        self._trickle_ns = self._steady_ns = self._rested_ns = 0  # not before
        self._share = 1.0  # of the time: the rest of it is rested, on a slow link
        self._crawls = FRAME_BYTES  # of a frame in no bubble, by what the one before took
        self._before = self._fed_at  # openings of trainers before: those of this one come after
        self.fullness = Fullness()
        self._trips = RoundTrips()
        self._halved_ns = 0  # when frames were last taken to be faster than they were
        self._plan = gate.planned, gate.period_ns  # whose bubbles `_shortened` knows
        self._shortened = Shortened()
        # by deadline, its window and when that began: of the opening that was seen last, and of the one before
        self._ends: ChainMap[int, tuple[Window, int]] = ChainMap({}, {})
        self.inside_bytes = 0
        self.late_bytes = 0
        self.rate_bytes = 0
        self._filled: dict[int, int] = {}  # of `inside_bytes`, by bubble, since there is that plan

    @property
    def planned(self) -> int:
        """As the trainer says: `Gate.planned`."""
        return self._gate.planned

    def take(self, nbytes: int, stop: threading.Event) -> Allowance:
        """Wait until some of `nbytes` may go; how many of them, none only when stopped."""
        asking_ns = self._clock_ns()
        while not stop.is_set():
            seen = self._gate.openings  # before it is looked at: none is missed
            with self._lock:
                self._listen(seen)
                allowed, wait = self._look(nbytes, asking_ns)
                if allowed is None and self._starved():
                    allowed = Allowance(min(nbytes, self._crawls))
                silent = self._silent()
            if allowed is None and silent and self._otherwise is not None:
                rest = self._steady_ns - self._clock_ns()
                if self._unopened:
                    allowed = self._otherwise.take(nbytes, stop)
                elif rest > 0:
                    wait = min(rest / 1e9, 10 * self._poll)
                else:
                    allowed = self._otherwise.take(min(nbytes, self._crawls), stop)
            if allowed is not None:
                with self._lock:
                    self._gate.count_move()
                return replace(allowed, began_ns=self._clock_ns())
            if wait == _UNTIL_OPEN:
                wait = self._gate.wait(seen, OPENING_SECONDS) if self._by_kernel else self._poll
            if wait:
                stop.wait(wait)
        return Allowance(0)

    def ended(self, allowed: Allowance) -> bool | None:
        """Count a frame that is through."""
        opening = self._gate.read()  # None when the bubble has ended before its time
        stands = opening is not None and any(deadline == allowed.deadline_ns for _, deadline, _ in opening.windows)
        with self._lock:
            self._gate.count_move()
            now = self._asked_ns = self._clock_ns()
            if allowed.deadline_ns == NO_DEADLINE:
                self.rate_bytes += allowed.nbytes
                took = max(1, now - allowed.began_ns)
                pace = allowed.nbytes / took * 1e9
                short = min(FRAME_BYTES, int(pace * SLOW_FRAME_SECONDS))
                self._crawls = max(_SHORTEST, short, int(pace * LEAST_SECONDS))
                self._trickle_ns = now + int(took * (1 / TRICKLE - 1))
                self._steady_ns = now + int(took * (1 / self._by_rate_share - 1))
                return None
            known = bool(self._trips)  # the first frame on a slow link is late for another reason
            took = now - allowed.began_ns
            self._trips.add(allowed.nbytes, took)
            self._rested_ns = now + int(took * (1 / self._share - 1))
            inside = stands and now <= allowed.deadline_ns
            if known and not inside and allowed.deadline_ns in self._ends:
                window, begin = self._ends[allowed.deadline_ns]
                self._shortened.late(window, allowed.deadline_ns - begin)
            if inside and opening is not None:
                self.inside_bytes += allowed.nbytes
                self._filled[opening.bubble] = self._filled.get(opening.bubble, 0) + allowed.nbytes
            else:
                self.late_bytes += allowed.nbytes
            return inside

    def _listen(self, openings: int) -> None:
        """Somebody wants to send. Who has not for a while has missed nothing, and begins to wait now."""
        now = self._clock_ns()
        if now - self._asked_ns > _UNASKED_NS:
            self._fed_ns, self._fed_at, self._seen_ns = now, openings, now
        if openings != self._seen_at:
            self._seen_ns, self._seen_at = now, openings
        self._asked_ns = now

    @property
    def _unopened(self) -> bool:
        """Whether there was no plan yet, nor has one begun to be made."""
        return self._number is None and self._gate.openings == self._before and not self._gate.planned

    def _silent(self) -> bool:
        """Whether nothing is to be expected of the gate."""
        openings, planned = self._gate.openings, self._gate.planned
        if self._unopened:
            return True
        periods = PATIENCE_PERIODS * self._gate.period_ns
        patience = max(self._patience_ns, periods) if planned else min(self._patience_ns, _UNPLANNED_NS)
        if self._silent_at != openings and self._clock_ns() - self._seen_ns > patience:
            self._silent_at = openings  # until there is another one, whether somebody asks meanwhile or not
        return self._silent_at == openings

    def _starved(self) -> bool:
        """Whether a frame may go although no window lets it."""
        now, openings = self._clock_ns(), self._gate.openings
        hungry = now - self._fed_ns > STARVED_SECONDS * 1e9 and openings - self._fed_at >= STARVED_OPENINGS
        if not hungry or now < self._trickle_ns:
            return False
        self._trickle_ns = now + _UNASKED_NS  # until it is through
        return True

    def filled(self, most: int = MOST_FILLED) -> list[tuple[int, int]]:
        """(bubble, bytes) of those of this plan in which most has gone, by bubble."""
        with self._lock:
            self._follow()
            found = sorted(self._filled.items(), key=lambda one: -one[1])[:most]
        return sorted(found)

    def _look(self, nbytes: int, asking_ns: int) -> tuple[Allowance | None, float]:
        """What may go now, or for how many seconds there is nothing to look for."""
        opening, now = self._gate.read(), self._clock_ns()
        if opening is None or all(now >= deadline for _, deadline, _ in opening.windows):
            return None, _UNTIL_OPEN  # closed, or left open by a trainer that is dead
        self._seen_ns = now
        if opening.number != self._number:
            self._opened(opening, now, asking_ns)
        if not any(window[2] for window in opening.windows):
            self._fed_ns, self._fed_at = now, self._gate.openings  # it is held
        if opening.bubble == STEADY:
            return self._by_rate(*opening.windows[0], nbytes, now), self._poll
        for place, (begin, deadline, planned) in enumerate(opening.windows):
            end = begin + self._shortened.used((opening.bubble, place), deadline - begin)
            if now >= end:
                continue  # this one is over
            if now < begin:
                return None, min((begin - now) / 1e9, 10 * self._poll)  # it may be closed before
            if now < self._rested_ns:
                return None, min((min(self._rested_ns, deadline) - now) / 1e9, 10 * self._poll)
            rate = planned / (deadline - begin)
            room = min(self.fullness.left[place], self._through(end - now, rate))
            # a window that carries less than is worth a frame is taken where half of it gets through; on a slow link
            # less is worth one, or much of small windows would be left
            carried = self._through(end - begin, rate)
            if room > 0 and room >= min(nbytes, self._least, self._worth(rate), (carried + 1) // 2):
                slow = SLOWER * self._pace(rate) < rate
                self._share = SLOW_SHARE * self._by_rate_share if slow else 1.0
                return self._take(place, nbytes, min(room, self._longest(rate)), deadline, now), 0.0
        return None, _UNTIL_OPEN  # of what stands nothing more is worth a frame: what may go only shrinks

    def _opened(self, opening: Opening, now: int, asking_ns: int) -> None:
        """It is another one than was seen before."""
        self._follow()
        # Frames are taken to be faster than they were where none was worth it for a whole iteration: not in each bubble
        # that is too short for one.
        if self._trips and self._plan[1] and now - max(self._fed_ns, self._halved_ns) > self._plan[1]:
            self._trips.halve()
            self._halved_ns = now
        self._number = opening.number
        self.fullness.opened(opening.windows, asking_ns, counts=opening.bubble != STEADY)
        self._ends = ChainMap({}, self._ends.maps[0])
        for place, (begin, deadline, _) in enumerate(opening.windows):
            self._ends[deadline] = (opening.bubble, place), begin
            self._shortened.opened((opening.bubble, place), deadline - begin)

    def _follow(self) -> None:
        """Where there is another plan, its bubbles are others."""
        plan = self._gate.planned, self._gate.period_ns
        if plan != self._plan:
            self._plan, self._shortened, self._filled = plan, Shortened(), {}

    def _by_rate(self, begin: int, deadline: int, planned: int, nbytes: int, now: int) -> Allowance | None:
        """What may go of what is granted in no bubble: as time passes, and no burst."""
        left, least = self.fullness.left[0], min(self._least, self._crawls)
        due = planned * (now - begin) // (deadline - begin) + least - (planned - left)
        if now < self._steady_ns or now < begin or min(left, due) < max(1, min(nbytes, least, left)):
            return None
        return self._take(0, nbytes, min(left, due, self._crawls), NO_DEADLINE, now)

    def _take(self, window: int, nbytes: int, most: int, deadline_ns: int, now: int) -> Allowance:
        allowed = min(nbytes, most)
        self.fullness.take(window, allowed, more=allowed < nbytes)
        self._fed_ns, self._fed_at = now, self._gate.openings
        return Allowance(allowed, deadline_ns)

    def _pace(self, rate: float) -> float:
        """Bytes in a nanosecond: the `rate` that was planned with, or less by the frames before, for the plan may have
        another link in mind."""
        return min(rate, 1 / self._trips.per_byte) if self._trips else rate

    def _longest(self, rate: float) -> int:
        """Bytes of a frame."""
        pace = self._pace(rate) * 1e9
        return max(1, int(pace * FRAME_SECONDS), min(FRAME_BYTES, int(pace * SLOW_FRAME_SECONDS)))

    def _through(self, nanoseconds: float, rate: float) -> int:
        """Bytes of one frame that gets through within so long."""
        planned = rate * nanoseconds
        return int((min(planned, self._trips.through(MARGIN * nanoseconds)) if self._trips else planned) + 1e-6)

    def _worth(self, rate: float) -> int:
        """Bytes that take LEAST_SECONDS of the link, and no less time than a frame takes beside its bytes."""
        return int(max(LEAST_SECONDS * 1e9, self._trips.latency) * self._pace(rate))
