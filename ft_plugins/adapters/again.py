"""What the adapters of frameworks share of computing an iteration once more (`model.host.Steps`).

Invariant: `recomputes` says what `recompute` can do; where it cannot, `why_not` says why, from the start.

In: a replay, where the framework's iterations can be kept. Out: it, or a refusal by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from ..errors import UnsupportedError

R = TypeVar("R")


class Recompute(Generic[R]):
    """Of a host, beside the rest of its `Steps`."""

    rank: int
    clips_together = ""
    why_not = "what iterations are computed from is kept only where replicas are compared or averaged"
    _replay: R | None = None

    @property
    def recomputes(self) -> bool:
        """Whether `recompute` can be called."""
        return self._replay is not None

    def _keep(self, build: Callable[[], R]) -> None:
        """Keep iterations from now on by what `build` makes, unless it raises UnsupportedError."""
        try:
            self._replay, self.why_not = build(), ""
        except UnsupportedError as error:
            self.why_not = str(error)

    def _kept(self) -> R:
        """Raises UnsupportedError where nothing is kept."""
        if self._replay is None:
            raise UnsupportedError(f"rank {self.rank}: gradients cannot be computed again here: {self.why_not}")
        return self._replay
