"""End a wait for another rank in a synchronisation of local SGD with one error that names iteration and module.

    the other rank hangs, or its link does     torch's timeout of the process group (`sync.timeout`)
    the other rank has ended                   its connection is closed

Invariant: every other error passes unchanged. With NCCL torch's watchdog ends the process itself at the timeout.

In: work that waits for other ranks. Out: its result, or ProtocolError; the launcher restarts the job."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ...errors import ProtocolError

Ranks = tuple[int, ...]
T = TypeVar("T")
_LATE = re.compile(r"timed? ?out", re.IGNORECASE).search
_GONE = re.compile(r"connection (closed|reset|refused)|broken pipe", re.IGNORECASE).search


@dataclass(frozen=True)
class PeerWait:
    """Which ranks a rank waits for, those of its sync group and of its replica, and for how many seconds at most."""

    rank: int
    sync: Ranks
    replica: Ranks
    seconds: float

    def within(self, step: int, what: str, work: Callable[[], T]) -> T:
        """Do `work`: `what` of iteration `step`. Raises ProtocolError if a rank did not come, or has ended."""
        try:
            return work()
        except RuntimeError as error:  # torch has no narrower type for both
            outcome = self._outcome(str(error))
            if not outcome:
                raise
            raise ProtocolError(
                f"rank {self.rank}: local SGD, iteration {step}, {what}: a rank of its sync group {list(self.sync)} or "
                f"of its replica {list(self.replica)} {outcome}"
            ) from error

    def _outcome(self, message: str) -> str:
        if _LATE(message):
            return (
                f"did not come within {self.seconds:g} s: it hangs, or its link does; the job goes back to its last "
                "version (if it is only slow, raise --sync-timeout)"
            )
        return "has ended: see its own error" if _GONE(message) else ""
