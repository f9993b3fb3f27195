"""The host of named tensors: for tests and benchmarks, and what `torch_loop.TorchHost`, the host for users, is made of.

Invariant: every tensor is captured under the name that the caller gave it; replicated tensors are cut over all ranks.
What a torch optimizer keeps for one of them has to be among them, or its first update is an error. The caller's loop
calls the hooks itself.

In: tensors and two functions for small state. Out: a `model.host.Host`.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..errors import InventoryError, UnsupportedError
from ..model.host import Edges, Hooks
from ..model.inventory import Inventory, Item, Role
from ..model.topology import Topology


class PlainHost:
    """Training state as a dict of tensors, `replicated` over all ranks or each rank's own."""

    framework = f"torch {torch.__version__}"
    clips_together = ""  # what the loop does with norms is its own

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
        """`get_state` and `set_state` carry counters, scheduler and data position, as the codec can encode them.

        For systems that compare or average replicas: `roles` and `layers` of tensors, by name (a parameter, and none);
        the rest as `model.host.ReplicaOperations` has it.
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
        self.no_recompute_reason = "" if self.recomputes else "the loop has named no function for it"

    def topology(self) -> Topology:
        """Data parallelism only."""
        return Topology(tp=1, pp=1, dp=self._world_size)

    def inventory(self) -> Inventory:
        """One item per tensor."""
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
        """There is no framework whose format a checkpoint could be exported to."""
        return None

    def fingerprint(self) -> Mapping[str, Any]:
        return {"world_size": self._world_size, **self._fingerprint}

    def small_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "caller": self._get_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        }
        return state

    def restore(self, small: Mapping[str, Any]) -> None:
        self._set_state(small["caller"])

    def restore_position(self, small: Mapping[str, Any]) -> None:
        random.setstate(small["python"])
        np.random.set_state(small["numpy"])
        torch.set_rng_state(small["torch"])
        if small["cuda"]:
            torch.cuda.set_rng_state_all(small["cuda"])

    def merged(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """That of the first previous rank: the caller's state must not depend on the rank."""
        return dict(parts[0])

    def admits(self, replicas: int) -> bool:
        """Any number: the caller knows."""
        return True

    def install(self, hooks: Hooks) -> None:
        """The caller's loop calls the hooks. The first update of our tensors by a torch optimizer is looked at."""
        pending = [weakref.ref(self)]

        def look(optimizer: torch.optim.Optimizer, *call: Any) -> None:
            host = pending[0]() if pending else None
            if host is not None and host._require_state(optimizer):
                pending.clear()

        register_optimizer_step_post_hook(look)

    def _require_state(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether `optimizer` updates our tensors. Raises InventoryError when it keeps some that are not among them."""
        names = {tensor.data_ptr(): name for name, tensor in self._tensors.items() if tensor.numel()}
        ours = [one for group in optimizer.param_groups for one in group["params"] if one.data_ptr() in names]
        for parameter in ours:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.data_ptr() not in names:
                    raise InventoryError(
                        f"rank {self.rank}: {type(optimizer).__name__} keeps '{key}' for "
                        f"'{names[parameter.data_ptr()]}', which PlainHost was not given, so that no snapshot holds "
                        "it: use ft_plugins.TorchHost(model, optimizer), which captures all of it"
                    )
        return bool(ours)

    def install_edges(self, edges: Edges) -> None:
        """Nothing is known of what the caller's loop does in an iteration."""
        raise UnsupportedError("a training loop of torch alone has no pipeline, so no spans that could be followed")

    def learning_rate(self) -> float:
        """As the caller says. Raises UnsupportedError where it was not told how to ask."""
        if self._learning_rate is None:
            raise UnsupportedError("a training loop of torch alone was given no learning_rate: name a function for it")
        return self._learning_rate()

    def gradients(self) -> Mapping[str, torch.Tensor]:
        return self._gradients()

    def recompute(self, step: int) -> None:
        """As the caller does it. Raises UnsupportedError where it was not told how."""
        if self._recompute is None:
            raise UnsupportedError("a training loop of torch alone was given no recompute: name a function for it")
        self._recompute(step)

    def keep_iterations(self) -> None:
        """The caller's loop knows its iterations."""

    def copies(self) -> Inventory:
        """None: what is computed with are the tensors themselves."""
        return Inventory.of(self.rank, ())

    def copy_tensors(self) -> Mapping[str, torch.Tensor]:
        return {}

    def derive(self) -> None:
        """Nothing is derived from the tensors."""

    def scalars(self) -> bytes:
        """Nothing: what the caller's loop decides by is among its tensors, or alike by itself."""
        return b""

    def restore_scalars(self, encoded: bytes) -> None:
        """Nothing."""

    def before_reduction(self, call: Callable[[int, Mapping[str, torch.Tensor]], None]) -> None:
        """The caller's loop reduces gradients where nobody sees it."""
        raise UnsupportedError("a training loop of torch alone reduces its gradients itself: what is to be done before")
