"""What must stay as it is between a version point and the next update of a loop of plain torch.

Invariant: parameters that the optimizer updates, and what it keeps of them, are copied while training goes on, until
`optimizer.step()`: a change before it would tear the snapshot. Gradients are not captured, so none may add to what the
version point had. Both are an error before the update, by name. Seen is every change in place that torch counts
(`tensor._version`, also under no_grad); one through `tensor.data` is not counted and not seen.

In: live tensors by name, parameters by name. Out: nothing, or a StateChangedError.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import ConfigError, StateChangedError


class Watch:
    """From `mark`, at the version point, until `settle`, before the update."""

    def __init__(
        self, quiet: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.nn.Parameter], place: str
    ) -> None:
        """`quiet` are the tensors that only the update changes; `place` begins every message ('rank 0')."""
        self._quiet, self._parameters, self._place = quiet, parameters, place
        self._versions: dict[str, int] | None = None  # of the tensors at the version point; None: nothing is awaited
        self._before: dict[str, tuple[weakref.ref[torch.Tensor], int]] = {}  # gradients that the version point had
        self._added: dict[str, torch.Tensor | None] = {}  # where a backward has added since: whether there was any

    def install(self, optimizer: torch.optim.Optimizer, known: Mapping[str, torch.Tensor]) -> None:
        """Look at every backward, and refuse the step of another optimizer over `known` tensors."""
        for name, parameter in self._parameters.items():
            trained = parameter.requires_grad
            parameter.requires_grad_()  # torch takes hooks of no other; it may be trained later
            parameter.register_hook(lambda gradient, name=name: self._adding(name))
            parameter.requires_grad_(trained)
        storages = {_storage(tensor): name for name, tensor in known.items() if tensor.numel()}
        ours, place = weakref.ref(optimizer), self._place

        def refuse(other: torch.optim.Optimizer, *call: object) -> None:
            if ours() is None or other is ours():
                return
            for group in other.param_groups:
                for parameter in group["params"]:
                    if parameter.numel() and _storage(parameter) in storages:
                        raise ConfigError(
                            f"{place}: another optimizer ({type(other).__name__}) steps over "
                            f"'{storages[_storage(parameter)]}', which TorchHost captures: its state would be lost; "
                            "pass one optimizer, with a group for each part of the model"
                        )

        register_optimizer_step_pre_hook(refuse)

    def _adding(self, name: str) -> None:
        gradient = self._parameters[name].grad
        if self._versions is not None and name not in self._added:
            self._added[name] = None if gradient is None else _any(gradient)  # on its device: no wait here

    def mark(self, iteration: int) -> None:
        """The version point. Raises StateChangedError where gradients were accumulated over the one before."""
        self._require_none_added(iteration)
        self._before = {
            name: (weakref.ref(one.grad), one.grad._version)
            for name, one in self._parameters.items()
            if one.grad is not None
        }
        self.written()

    def written(self) -> None:
        """Tensors were changed by those who have waited for the snapshot."""
        self._versions = {name: tensor._version for name, tensor in self._quiet.items()}

    def settle(self, iteration: int, updates: bool) -> None:
        """The update comes next, or is skipped. Raises StateChangedError, naming what was changed before it."""
        versions, self._versions = self._versions, None
        for name, version in (versions or {}).items():
            if self._quiet[name]._version != version:
                raise StateChangedError(
                    f"{self._place}: iteration {iteration}: '{name}' was changed after the version point and before "
                    "optimizer.step(), while its snapshot was being copied: change parameters right behind "
                    "optimizer.step(), in an iteration that makes an update"
                )
        if updates and versions is not None:
            for name, (gradient, version) in self._before.items():
                now = self._parameters[name].grad
                if name not in self._added and now is not None and now is gradient() and now._version == version:
                    self._added[name] = _any(now)
        self._require_none_added(iteration)

    def _require_none_added(self, iteration: int) -> None:
        added, self._added = self._added, {}
        for name, found in added.items():
            if found is not None and bool(found):
                raise StateChangedError(
                    f"{self._place}: iteration {iteration}: the gradient of '{name}' still held that of the iteration "
                    "before, which no snapshot has: zero gradients in every iteration; to accumulate over several "
                    "batches, count an iteration per update, with all of its batches in it"
                )


def graded(parameters: Mapping[str, torch.nn.Parameter]) -> list[str]:
    """Which parameters have a gradient, though it be 0: an optimizer passes over the others."""
    return [name for name, one in parameters.items() if one.grad is not None and not one.grad.is_sparse]


def set_graded(parameters: Mapping[str, torch.nn.Parameter], names: list[str]) -> None:
    """Have just these a gradient, of 0."""
    for name, one in parameters.items():
        one.grad = torch.zeros_like(one) if name in names else None


def _any(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.detach()
    return (gradient.coalesce().values() if gradient.is_sparse else gradient).any()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
