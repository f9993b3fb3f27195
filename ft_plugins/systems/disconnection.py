"""When a rank reports that its connection to another rank was lost. Pure.

Invariant: no report while the loss can be the death of the other rank, which the launcher reports and ends by a
restart: a job that is killed stays as quiet as it was. That rank can have contributed to the iteration in which the
loss was seen and to the next one, but to none after those; and where replicas train without each other, the launcher
has restarted the job before `QUIET_SECONDS`. A job that trains on has lost the connection alone. Both ends report it,
once; the other ranks, which learn of it from them, do not.

Protection goes on: an outage of the network that training does not use would else end it, and with it the job, although
all versions are whole.

In: the loss, iterations, the time. Out: the loss that is to be reported.
"""

from __future__ import annotations

from ..collective import LostNeighbour

QUIET_ITERATIONS = 2
QUIET_SECONDS = 30.0


class Disconnection:
    """The lost connection of one rank, if it loses one."""

    def __init__(self) -> None:
        self._seen: int | None = None  # the iteration at whose end the loss was first seen
        self._over = False

    def due(self, lost: LostNeighbour | None, step: int, now: float) -> LostNeighbour | None:
        """The loss, if it is to be reported at the end of iteration `step`, at `time.monotonic()`."""
        if lost is None or self._over:
            return None
        if self._seen is None:
            self._seen = step
        if step < self._seen + QUIET_ITERATIONS or now < lost.at + QUIET_SECONDS:
            return None
        self._over = True
        return lost
