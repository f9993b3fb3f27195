"""A host of named tensors, whose loop calls the hooks itself.

In: tensors and functions for small state. Out: a `model.host.Host`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ft_plugins.adapters.torch.plain import PlainLoop
from ft_plugins.errors import UnsupportedError
from ft_plugins.model.host import Hooks
from ft_plugins.model.inventory import Inventory, Item, Role


class PlainHost(PlainLoop):
    """Training state as a dict of tensors, `replicated` over all ranks or separate on each."""

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
        super().__init__(rank, world_size, replicated)
        self._tensors = dict(tensors)
        self._fingerprint = dict(fingerprint or {})
        self._get_state, self._set_state = get_state, set_state
        self._roles, self._layers = dict(roles or {}), dict(layers or {})
        self._learning_rate, self._gradients, self._recompute = learning_rate, gradients, recompute
        self.recomputes = recompute is not None
        self.no_recompute_reason = "" if self.recomputes else "the host was built without `recompute`"

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

    def fingerprint(self) -> Mapping[str, Any]:
        return {"world_size": self._world_size, **self._fingerprint}

    def small_state(self) -> dict[str, Any]:
        return {"caller": self._get_state(), **self.generators()}

    def restore(self, small: Mapping[str, Any]) -> None:
        self._set_state(small["caller"])

    def admits(self, replicas: int) -> bool:
        return True

    def install(self, hooks: Hooks) -> None:
        """Does nothing: the caller's loop calls `hooks`."""

    def learning_rate(self) -> float:
        if self._learning_rate is None:
            raise UnsupportedError("the learning rate of a plain torch loop is unknown: pass PlainHost `learning_rate`")
        return self._learning_rate()

    def gradients(self) -> Mapping[str, torch.Tensor]:
        return self._gradients()

    def recompute(self, step: int) -> None:
        if self._recompute is None:
            super().recompute(step)
        else:
            self._recompute(step)

    def derive(self) -> None: ...

    def scalars(self) -> bytes:
        return b""

    def restore_scalars(self, encoded: bytes) -> None: ...
