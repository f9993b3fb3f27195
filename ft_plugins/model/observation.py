"""What a host sees of an iteration besides its state: what it reads and what it computes.

Invariant: observing changes no number and waits for no device.

In: calls by the host, in the training thread, between `iteration_begin` and `iteration_end`. Out: an `Observer` has
them.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable


class Observer(Protocol):
    """What observations are reported to. Its methods return within microseconds and do not raise."""

    def read(self, digest: int) -> None:
        """A forward in training begins, with inputs of this digest (64 bits)."""

    def graded(self, digest: int) -> None:
        """The gradients that the update of the iteration will use have this digest (64 bits). Right before the update,
        by a host that knows neither loss nor norm."""

    def computed(self, loss: float | None = None, norm: float | None = None) -> None:
        """The loss of the iteration, and the norm of its gradients, as far as the host has them on the CPU."""


@runtime_checkable
class ObservedHost(Protocol):
    """What a host offers in addition, if it sees what its loop reads."""

    def install_observer(self, observer: Observer) -> None:
        """Report observations from now on; once, before the first iteration."""
