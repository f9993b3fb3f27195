"""Count connections that were rejected, or that ended, before their other side had proved who it is.

Invariant: a flood of them costs one event a minute, of bounded size. The first is reported at once.

In: an address and a reason for each. Out: `peer.rejected` events.
"""

from __future__ import annotations

import threading
import time
from collections import Counter

from ..events import Events, catalogue
from .protocol import legible

EVERY_SECONDS = 60.0
_NAMED = 8  # reasons and addresses of one event; the others are counted together
_REASON = 160  # characters
_OTHERS = "others"


class Rejected:
    """The counts since the last event."""

    def __init__(self, events: Events, every: float = EVERY_SECONDS) -> None:
        self._events = events
        self._every = every
        self._lock = threading.Lock()
        self._reported = float("-inf")  # monotonic
        self._reasons: Counter[str] = Counter()
        self._addresses: Counter[str] = Counter()

    def count(self, address: str, reason: str) -> None:
        """One more; an event if the last one is long enough ago."""
        with self._lock:
            _add(self._reasons, legible(reason, _REASON))
            _add(self._addresses, legible(address, _REASON))
        self.report()

    @property
    def due(self) -> float | None:
        """The moment (monotonic) at which `report` will have something to say; None for none."""
        return self._reported + self._every if self._reasons else None

    def report(self) -> None:
        """Emit what was counted, if anything was and the last event is long enough ago."""
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
