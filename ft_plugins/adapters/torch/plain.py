"""The host of named tensors: for tests and benchmarks, and the base of `torch_loop.TorchHost`, the host for users.

Invariant: every tensor is captured under the name that the caller gave it; replicated tensors are split over all ranks.
State that a torch optimizer keeps for one of them must be among them, or its first update raises InventoryError. The
caller's loop calls the hooks.

In: tensors and two functions for small state. Out: a `model.host.Host`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...errors import InventoryError, UnsupportedError
from ...model.host import Edges, Hooks
from ...model.inventory import Inventory, Item, Role
from ...model.topology import Topology
from ..rng import process_state, set_process_state


class PlainHost:
    """Training state as a dict of tensors, `replicated` over all ranks or separate on each."""

    framework = f"torch {torch.__version__}"
    fault_points: Mapping[str, Collection[str]] = {}  # that the loop reaches; see `model.host.Injectable`
    clips_together = ""  # unknown: the loop clips by itself, or not at all

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        rank: int = 0,
        world_size: int = 1,
        replicated: bool = False,
        fingerprint: Mapping[str, Any] | None = None,
        get_state: Callable[[], dict[str, Any]] = dict,
        set_state: Callable[[Mapping[str, Any]], None] = lambda state: None,
        roles: Mapping[str, Role] | None = None,
        layers: Mapping[str, int] | None = None,
        learning_rate: Callable[[], float] | None = None,
        gradients: Callable[[], Mapping[str, torch.Tensor]] = dict,
        recompute: Callable[[int], None] | None = None,
    ) -> None:
        """`get_state` and `set_state` carry counters, scheduler and data position, as values for the codec.

        For systems that compare or average replicas: `roles` (default PARAMETER) and `layers` of tensors by name;
        `learning_rate`, `gradients` and `recompute` as in `model.host.ReplicaOperations`.
        """
        self.rank = rank
        self._tensors = dict(tensors)
        self._world_size = world_size
        self._replicas = tuple(range(world_size)) if replicated else (rank,)
        self._fingerprint = dict(fingerprint or {})
        self._get_state = get_state
        self._set_state = set_state
        self._roles = dict(roles or {})
        self._layers = dict(layers or {})
        self._learning_rate = learning_rate
        self._gradients = gradients
        self._recompute = recompute
        self.recomputes = recompute is not None
        self.no_recompute_reason = "" if self.recomputes else "the host was built without `recompute`"

    def topology(self) -> Topology:
        return Topology(tp=1, pp=1, dp=self._world_size)

    def inventory(self) -> Inventory:
        return Inventory.of(
            self.rank,
            (
                Item(
                    name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape),
                    tensor.numel() * tensor.element_size(), self._roles.get(name, Role.PARAMETER), self._replicas,
                    self._layers.get(name),
                )
                for name, tensor in self._tensors.items()
            ),
        )  # fmt: skip

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._tensors

    def names(self) -> None:
        """None: there is no framework whose format a checkpoint could be exported to."""
        return None

    def fingerprint(self) -> Mapping[str, Any]:
        return {"world_size": self._world_size, **self._fingerprint}

    def small_state(self) -> dict[str, Any]:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return {"caller": self._get_state(), **process_state(), "cuda": cuda}

    def restore(self, small: Mapping[str, Any]) -> None:
        self._set_state(small["caller"])

    def restore_position(self, small: Mapping[str, Any]) -> None:
        set_process_state(small)
        if small["cuda"]:
            torch.cuda.set_rng_state_all(small["cuda"])

    def merged(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The small state of the first previous rank: the caller's state must not depend on the rank."""
        return dict(parts[0])

    def admits(self, replicas: int) -> bool:
        """True: the caller is responsible."""
        return True

    def install(self, hooks: Hooks) -> None:
        """Check the first update of our tensors by a torch optimizer; the caller's loop calls `hooks`."""
        pending = [weakref.ref(self)]

        def check(optimizer: torch.optim.Optimizer, *call: Any) -> None:
            host = pending[0]() if pending else None
            if host is not None and host._require_state(optimizer):
                pending.clear()

        register_optimizer_step_post_hook(check)

    def _require_state(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether `optimizer` updates our tensors. Raises InventoryError if some of their state would be missed."""
        names = {tensor.data_ptr(): name for name, tensor in self._tensors.items() if tensor.numel()}
        ours = [one for group in optimizer.param_groups for one in group["params"] if one.data_ptr() in names]
        for parameter in ours:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.data_ptr() not in names:
                    raise InventoryError(
                        f"rank {self.rank}: {type(optimizer).__name__} keeps '{key}' for "
                        f"'{names[parameter.data_ptr()]}', which was not passed to PlainHost and would be missing from "
                        "snapshots: use ft_plugins.TorchHost(model, optimizer), which captures all of it"
                    )
        return bool(ours)

    def install_edges(self, edges: Edges) -> None:
        raise UnsupportedError("a plain torch loop has no pipeline, so that its spans cannot be followed")

    def learning_rate(self) -> float:
        if self._learning_rate is None:
            raise UnsupportedError("the learning rate of a plain torch loop is unknown: pass PlainHost `learning_rate`")
        return self._learning_rate()

    def gradients(self) -> Mapping[str, torch.Tensor]:
        return self._gradients()

    def recompute(self, step: int) -> None:
        if self._recompute is None:
            raise UnsupportedError("a plain torch loop cannot recompute gradients: pass PlainHost `recompute`")
        self._recompute(step)

    def keep_iterations(self, discarded: Callable[[], bool] = lambda: False) -> None:
        """Does nothing: `recompute` belongs to the caller."""

    def copies(self) -> Inventory:
        """Empty: the loop computes with the captured tensors."""
        return Inventory.of(self.rank, ())

    def copy_tensors(self) -> Mapping[str, torch.Tensor]:
        return {}

    def derive(self) -> None:
        """Does nothing: nothing is derived from the tensors."""

    def scalars(self) -> bytes:
        """Empty: the caller's loop keeps such values in its tensors, or equal on all ranks."""
        return b""

    def restore_scalars(self, encoded: bytes) -> None:
        """Does nothing."""

    def before_reduction(self, call: Callable[[int, Mapping[str, torch.Tensor]], None]) -> None:
        raise UnsupportedError(
            "a plain torch loop reduces its gradients by itself, so that nothing can be called before the reduction"
        )
