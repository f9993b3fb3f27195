"""What the host of a plain torch loop is without its state: data parallelism only, no pipeline, nothing to recompute.

In: rank and number of ranks. Out: the part of `model.host.Host` and of `ReplicaOperations` that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ...errors import UnsupportedError
from ...model.host import Edges
from ...model.inventory import Inventory
from ...model.topology import Topology
from ..rng import process_state, set_process_state


class PlainLoop:
    """`replicated`: ranks are replicas of each other."""

    framework = f"torch {torch.__version__}"
    fault_points: Mapping[str, Collection[str]] = {}  # that the loop reaches, and the actions it carries out
    clips_together = ""  # unknown: the loop clips by itself, or not at all
    recomputes = False
    no_recompute_reason = "a plain torch loop cannot compute an iteration again"

    def __init__(self, rank: int, world_size: int, replicated: bool = True) -> None:
        self.rank, self._world_size = rank, world_size
        self._replicas = tuple(range(world_size)) if replicated else (rank,)

    def topology(self) -> Topology:
        return Topology(tp=1, pp=1, dp=self._world_size)

    def names(self) -> None:
        """None: there is no framework whose format a checkpoint could be exported to."""

    def generators(self) -> dict[str, Any]:
        """The part of small state that `restore_position` sets."""
        return {
            **process_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        }

    def restore_position(self, small: Mapping[str, Any]) -> None:
        set_process_state(small)
        if small["cuda"]:
            torch.cuda.set_rng_state_all(small["cuda"])

    def merged(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The small state of the first previous rank: the caller's state must not depend on the rank."""
        return dict(parts[0])

    def install_edges(self, edges: Edges) -> None:
        raise UnsupportedError("a plain torch loop has no pipeline, so that its spans cannot be followed")

    def recompute(self, step: int) -> None:
        raise UnsupportedError(self.no_recompute_reason)

    def keep_iterations(self, discarded: Callable[[], bool] = lambda: False) -> None:
        """Does nothing."""

    def copies(self) -> Inventory:
        """Empty: the loop computes with the captured tensors."""
        return Inventory.of(self.rank, ())

    def copy_tensors(self) -> Mapping[str, torch.Tensor]:
        return {}

    def finish_copies(self) -> None:
        """Does nothing."""

    def before_reduction(self, call: Callable[[int, Mapping[str, torch.Tensor]], None]) -> None:
        raise UnsupportedError(
            "a plain torch loop reduces its gradients by itself, so that nothing can be called before the reduction"
        )
