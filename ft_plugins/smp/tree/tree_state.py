"""One node of the tree of SMPs: merges the reports of its subtree, passes announcements on, finds lost nodes. No I/O.

Reports go up: a node merges its own with the newest summaries of its children, and sends the result when it has changed
and at each heartbeat. Announcements go down: a parent sends its newest one when it has changed and in answer to each
heartbeat. The root (`tree`) decides by `agreement.decide`. Each node merges the decision that it hears with the one
that it knows and with its own report, so neither part goes back when it changes its parent.

Who is lost:
- A child, or this node's own driver, from which nothing is heard for `detect_seconds`. Its parent reports that at once.
- Any position that the root has not seen in a summary for half of that time (`Presence`): its parent may be lost,
  too. Within that time it has to attach to another parent, for which it has begun to look earlier: after PATIENCE of
  that time without a message of its parent. So the loss of an inner node usually leaves no gap. A position is never
  lost while any parent hears of it.
- Position 0, and others that no node is below: they are found by the lowest live position, which acts as root as long
  as no lower one can be reached. It announces who is lost, and decides nothing, because its summary lacks position 0.
- A parent, if none has taken its place within `detect_seconds`, because other candidates are lost too: the node below
  announces that on its own, and searches on.

While this process was stopped it could hear no one, and its neighbours may have been stopped with it: that time does
not count.

Invariant: deterministic; only positions and times (seconds, monotonic) come from outside. One message at a time is on
its way to a neighbour, of bounded size.

In: reports, messages, connections made and ended. Out: an `Outbox` of what to send and when to look again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ...errors import ProtocolError
from .agreement import (
    LOST_LIMIT,
    Announcement,
    Bounds,
    ExchangeDecision,
    ExchangeEpoch,
    NodeReport,
    Summary,
    decide,
    merge,
    newer,
    summarize,
)
from .tree import Presence, candidates, parent_of

_HEARTBEATS_PER_DETECTION = 5
_SLOWEST_SECONDS = 1.0  # between two heartbeats
_SPACING_SECONDS = 0.005  # least time between two summaries to a parent: changes in a subtree are sent together
_RETRY_SECONDS = 0.1  # before the same parent is tried again
PATIENCE = 0.5  # of `detect_seconds`, without a message of the parent, before another one is tried


@dataclass(eq=False)
class _Source:
    """A child, or this node itself: its newest summary, until it is `lost`."""

    heard: float
    summary: Summary | None = None
    lost: bool = False
    sent: Announcement | None = None  # what was sent to it last, and when
    answered: float = float("-inf")
    waits: bool = True  # for an answer
    rejected: bool = False  # its last report exceeded a bound


@dataclass(frozen=True)
class Outbox:
    """What to do now: send a summary to the parent and the announcement to children, connect to a candidate, end
    connections in order. At `wake` there is more to do, even if nothing arrives."""

    up: Summary | None
    down: tuple[int, ...]
    connect: int | None
    leave: tuple[int, ...]
    wake: float
    rejected: tuple[tuple[int, str], ...] = ()  # neighbours that began to report what cannot be, and what


class TreeState:
    """The state of one node in one incarnation. Every method takes the time; call `advance` after each other one."""

    def __init__(self, epoch: ExchangeEpoch, position: int, detect_seconds: float, now: float) -> None:
        self.position = position
        self.announcement = Announcement()
        self.parent: int | None = None  # to which this node is connected
        self.reason = ""  # why the last connection to a parent failed or ended
        self._epoch = epoch
        self._detect = detect_seconds
        self._sources: dict[int, _Source] = {position: _Source(now)}
        self._summary, self._changed = Summary(), True
        self._sent: Summary | None = None  # to the parent, and when
        self._sent_at = float("-inf")
        self._expected = self._last = parent_of(position)  # the parent to return to; the last one
        self._heard_parent = now
        self._trying: int | None = None
        self._retry_at = self._return_at = now
        self._round: Iterator[int] | None = None  # through all candidates
        self._silent: dict[int, float] = {}  # candidates that could not be reached, and since when
        self._leaving: dict[int, float] = {}  # parents of before, and when to leave them
        self._advanced = now
        self._rejected: list[tuple[int, str]] = []  # to be reported
        self._parent_rejected = False  # the last announcement exceeded a bound
        self._presence = Presence(epoch.nodes, detect_seconds, self.heartbeat_seconds, now)  # used while it is the root
        self.acts_as_root = position == 0

    @property
    def heartbeat_seconds(self) -> float:
        """Maximum seconds between two messages to a neighbour."""
        return min(self._detect / _HEARTBEATS_PER_DETECTION, _SLOWEST_SECONDS)

    # ---- what happens ----

    def report(self, report: NodeReport, now: float) -> None:
        """This node's own state, which its driver reports several times in `detect_seconds`."""
        self._epoch = replace(self._epoch, chosen=report.chosen)
        self._take(self.position, summarize(self.position, report), now)
        if (known := self._known(self.announcement.decision)) != self.announcement.decision:
            self.announcement = replace(self.announcement, decision=known)

    def hear_child(self, position: int, summary: Summary, now: float) -> None:
        """A summary of a child. Raises ProtocolError if it cannot be one."""
        if not self.position < position < self._epoch.nodes:
            raise ProtocolError(f"position {position} cannot report to position {self.position}")
        if summary.covered & ((1 << position) - 1) or summary.covered >> self._epoch.nodes:
            raise ProtocolError(f"position {position} reports for positions that are not below it")
        self._check_lost(position, summary.lost)
        self._take(position, summary, now)

    def _check_lost(self, position: int, lost: Sequence[int]) -> None:
        if any(one >= self._epoch.nodes for one in lost):
            raise ProtocolError(f"position {position} reports a lost position that no node has")

    def _take(self, position: int, summary: Summary, now: float) -> None:
        source = self._sources.setdefault(position, _Source(now))
        self._changed |= summary != source.summary
        source.summary, source.heard, source.lost, source.waits = summary, now, False, True

    def child_joined(self, position: int) -> None:
        """A connection from a child, perhaps of an SMP that replaces another one."""
        if source := self._sources.get(position):
            source.sent = None

    def child_left(self, position: int) -> None:
        """A child has another parent now. A connection that only ends changes nothing: its SMP may be replaced."""
        if position != self.position and position in self._sources:
            del self._sources[position]
            self._changed = True

    def hear_parent(self, position: int, announcement: Announcement, now: float) -> None:
        """An announcement; ignored unless it comes from the parent. Raises ProtocolError if it cannot be one."""
        if position == self.parent:
            self._check_lost(position, announcement.lost)
            self._found_parent(now)
            announcement, reason = self._bounds().announcement(announcement)
            self._parent_rejected = self._note_rejected(position, self._parent_rejected, reason)
            self.announcement = replace(announcement, decision=self._known(announcement.decision))

    def joined(self, position: int, now: float) -> None:
        """The candidate that was tried is the parent now."""
        self._leaving.pop(position, None)
        if self.parent not in (None, position):
            assert self.parent is not None
            # not at once: until the root hears of this node by its new parent, it would seem to be below none
            self._leaving[self.parent] = now + self.heartbeat_seconds
        self.parent = self._last = position
        self._trying, self._sent, self.reason = None, None, ""
        self._return_at = now + self._detect
        self._found_parent(now)

    def _found_parent(self, now: float) -> None:
        self._heard_parent = now
        self._round, self.acts_as_root = None, False
        self._silent.clear()

    def failed(self, position: int, reason: str, now: float) -> None:
        """The candidate that was tried cannot be reached, or the connection to the parent has ended."""
        self.reason = f"position {position}: {reason}"
        if position == self._trying:
            self._trying = None
            self._silent.setdefault(position, now)
        if position == self.parent:
            self.parent = None
        if now - self._heard_parent <= PATIENCE * self._detect:
            self._retry_at = now + min(_RETRY_SECONDS, self._detect / 20)

    # ---- what to do ----

    def advance(self, now: float) -> Outbox:
        """What is due at `now`. Read everything that has arrived before, so that no neighbour seems silent that is
        not."""
        self._note_stop(now)
        self._expire(now)
        if self._changed:
            self._changed = False
            self._summary = self._merged()
        self._miss_parent(now)
        if self.acts_as_root:
            self._rule(now)
        elif self.parent is None and (lost := self._silent_too_long(now)):
            self.announcement = replace(self.announcement, lost=tuple(sorted(lost)[:LOST_LIMIT]))
        up = None
        if self.parent is not None and now >= self._up_due:
            up = self._sent = self._summary
            self._sent_at = now
        down = tuple(
            position for position in self._sources if position != self.position and self._answer(position, now)
        )
        connect = self._seek(now)
        leave = tuple(position for position, when in self._leaving.items() if now >= when)
        for position in leave:
            del self._leaving[position]
        rejected, self._rejected = tuple(self._rejected), []
        return Outbox(up, down, connect, leave, self._wake(now), rejected)

    def _note_stop(self, now: float) -> None:
        """Move all times on if this process was stopped: it looks at each heartbeat."""
        stopped, self._advanced = now - self._advanced - 2 * self.heartbeat_seconds, now
        if stopped <= 0:
            return

        def moved(when: float) -> float:
            return max(when, min(when + stopped, now))

        for source in self._sources.values():
            source.heard = moved(source.heard)
        self._heard_parent = moved(self._heard_parent)
        self._silent = {position: moved(since) for position, since in self._silent.items()}
        self._presence.skip(stopped, now)

    def _expire(self, now: float) -> None:
        """Drop the summaries of the silent. They are reported as lost for as long again, then forgotten."""
        for position, source in list(self._sources.items()):
            if not source.lost and now >= source.heard + self._detect:
                source.lost, source.summary, self._changed = True, None, True
            elif source.lost and position != self.position and now >= source.heard + 2 * self._detect:
                del self._sources[position]
                self._changed = True

    def _merged(self) -> Summary:
        lost = tuple(position for position, source in self._sources.items() if source.lost)
        bounds, parts = self._bounds(), [Summary(lost=lost)]
        for position, source in self._sources.items():
            if source.summary is not None:
                part = source.summary
                if position != self.position:
                    part, reason = bounds.summary(position, part)
                    source.rejected = self._note_rejected(position, source.rejected, reason)
                parts.append(part)
        whole = merge(parts)
        return replace(whole, lost=tuple(one for one in whole.lost if not whole.covered >> one & 1))

    def _bounds(self) -> Bounds:
        return Bounds.of(self._epoch, self._begun, self.announcement.decision.committed)

    @property
    def _begun(self) -> int:
        own = self._sources[self.position].summary
        return own.begun if own is not None else 0

    def _note_rejected(self, position: int, before: bool, reason: str) -> bool:
        """Note a report that exceeds a bound, unless the one before did. Before the ranks here have begun a version, it
        is not known whether it is wrong: it is not used yet."""
        wrong = bool(reason) and self._begun > 0
        if wrong and not before:
            self._rejected.append((position, reason))
        return wrong

    def _known(self, decision: ExchangeDecision) -> ExchangeDecision:
        """`decision`, or what is newer of what this node knows already."""
        known = newer(decision, self.announcement.decision)
        own = self._sources[self.position].summary
        return known if own is None else newer(known, ExchangeDecision(own.exchange, own.newest_committed))

    def _answer(self, position: int, now: float) -> bool:
        """Whether the announcement is due to be sent to a child."""
        source = self._sources[position]
        if source.lost or (source.sent == self.announcement and not (source.waits and now >= self._answer_due(source))):
            return False
        source.sent, source.answered, source.waits = self.announcement, now, False
        return True

    def _answer_due(self, source: _Source) -> float:
        return source.answered + self.heartbeat_seconds / 2

    @property
    def _up_due(self) -> float:
        return self._sent_at + (self.heartbeat_seconds if self._sent == self._summary else _SPACING_SECONDS)

    # ---- the root ----

    def _act_as_root(self, now: float) -> None:
        self.acts_as_root = True
        self._presence.expect_all(now)

    def _rule(self, now: float) -> None:
        """Decide, and find out who is lost."""
        self._presence.look(self._summary.covered, now)
        lost = {*self._summary.lost, *self._presence.absent, *self._silent_too_long(now)}
        before = self._known(self.announcement.decision)
        decision = decide(self._epoch, before, self._summary) if self.position == 0 else before
        whole = self.position == 0 and self._summary.covered == (1 << self._epoch.nodes) - 1
        stall = self._summary.stall if whole else None
        self.announcement = Announcement(decision, tuple(sorted(lost)[:LOST_LIMIT]), stall, self._summary.behind)

    # ---- the way up ----

    def _miss_parent(self, now: float) -> None:
        """Leave a parent that has been silent for too long."""
        if self.position and now >= self._heard_parent + self._detect:
            assert self._last is not None
            self._silent.setdefault(self._last, self._heard_parent)
            if self.parent is not None:
                self.reason = self.reason or f"position {self.parent}: silent for {self._detect:g} s"
                self._leaving[self.parent] = now
                self.parent = None

    def _silent_too_long(self, now: float) -> set[int]:
        """Parents and candidates that have been silent for `detect_seconds`, unless a node below hears of them."""
        covered = self._summary.covered
        return {one for one, since in self._silent.items() if now >= since + self._detect and not covered >> one & 1}

    def _seek(self, now: float) -> int | None:
        """The candidate to connect to now."""
        if self.position == 0 or self._trying is not None or now < self._retry_at:
            return None
        assert self._expected is not None and self._last is not None
        if now < self._impatient_at:
            if self.parent is None:
                self._trying = self._last  # it may be starting, or its SMP may be replaced
            elif self.parent != self._expected and now >= self._return_at:
                self._trying, self._return_at = self._expected, now + self._detect
            return self._trying
        if self.parent is not None:
            self._silent.setdefault(self.parent, self._heard_parent)
        if self._round is None:
            self._round = iter([one for one in candidates(self.position) if one != self._last])
            self._silent.setdefault(self._last, self._heard_parent)
        self._trying = next((one for one in self._round if one != self.parent), None)
        if self._trying is None:  # none can be reached
            if not self.acts_as_root:
                self._act_as_root(now)
            self._round = candidates(self.position)
            self._retry_at = now + self.heartbeat_seconds
        return self._trying

    @property
    def _impatient_at(self) -> float:
        return self._heard_parent + PATIENCE * self._detect

    def _wake(self, now: float) -> float:
        """When `advance` has more to do, if nothing happens."""
        times = [now + self.heartbeat_seconds, *self._leaving.values()]
        if self.position and now < (missed := self._heard_parent + self._detect):
            times.append(missed)
        for position, source in self._sources.items():
            times.append(source.heard + self._detect * (2 if source.lost else 1))
            if position != self.position and source.waits and not source.lost:
                times.append(self._answer_due(source))
        if self.parent is not None:
            times.append(self._up_due)
        if self.acts_as_root:
            times.append(self._presence.due)
        if self.position and self._trying is None:
            if self.parent is None or now >= self._impatient_at:
                times.append(self._retry_at)
            else:
                times.append(self._impatient_at)
                if self.parent != self._expected:
                    times.append(self._return_at)
        return max(now, min(times))
