"""Bound the connections of a server: how many there may be, and how often events report rejected ones.

Invariant: connections never take the last RESERVE descriptors of a process, which are for segments, locks, logs and
child processes. A flood of rejected connections costs one event a minute, of bounded size; the first is reported at
once.

In: the limits of the process; rejected connections. Out: the number of places; `peer.rejected` events.
"""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from collections import Counter

from ..events import Events, catalogue
from .protocol import legible

ENOUGH = 1 << 16  # descriptors; no more even if the hard limit is 2**30: some programs iterate over all of them
RESERVE = 256  # descriptors; half of the limit if that is less
EVERY_SECONDS = 60.0  # between two events about rejected connections
_NAMED = 8  # reasons and addresses in one event; the others are counted together
_REASON = 160  # characters
_OTHERS = "others"


def raise_limit() -> int:
    """Raise the soft limit on descriptors of this process and its future children, to the hard limit or to ENOUGH if
    that is lower.

    Returns the limit afterwards. Never lowers it; if the system refuses, the limit stays, without an error.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(_number(hard), ENOUGH)
    if _number(soft) < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return _number(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def places(wanted: int, others: int = 0) -> int:
    """How many connections may be open at a time: `wanted`, or fewer, to leave the reserve and `others`."""
    limit = _number(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return max(1, min(wanted, limit - min(RESERVE, limit // 2) - others))


def _number(limit: int) -> int:
    return ENOUGH if limit == resource.RLIM_INFINITY else limit


class RejectedConnections:
    """Counts connections that were rejected, or ended before their peer had authenticated itself."""

    def __init__(self, events: Events, every: float = EVERY_SECONDS) -> None:
        self._events = events
        self._every = every
        self._lock = threading.Lock()
        self._reported = float("-inf")  # monotonic
        self._reasons: Counter[str] = Counter()
        self._addresses: Counter[str] = Counter()

    def count(self, address: str, reason: str) -> None:
        """Count one more, and `report`."""
        with self._lock:
            _add(self._reasons, legible(reason, _REASON))
            _add(self._addresses, legible(address, _REASON))
        self.report()

    @property
    def due(self) -> float | None:
        """When (monotonic) `report` will emit an event; None: never."""
        return self._reported + self._every if self._reasons else None

    def report(self) -> None:
        """Emit the counts, if there are any and the last event is long enough ago."""
        with self._lock:
            now = time.monotonic()
            if (due := self.due) is None or now < due:
                return
            reasons, addresses = dict(self._reasons), dict(self._addresses)
            self._reasons.clear()
            self._addresses.clear()
            self._reported = now
        self._events.emit(catalogue.PEER_REJECTED, count=sum(reasons.values()), reasons=reasons, addresses=addresses)


def _add(counts: Counter[str], name: str) -> None:
    counts[name if name in counts or len(counts) < _NAMED else _OTHERS] += 1
