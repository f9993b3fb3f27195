"""Detect changes that a plain torch loop must not make between a version point and the next update.

Parameters that the optimizer updates, and its state of them, are copied in the background until `optimizer.step()`: a
change before it would tear the snapshot. Gradients are not captured, so a backward must not add to gradients that
existed at the version point. Both raise StateChangedError before the update. Detection relies on `tensor._version`,
which counts every change in place (also under no_grad), except those through `tensor.data`.

In: live tensors by name, parameters by name. Out: nothing, or StateChangedError.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import ConfigError, StateChangedError


class ChangeWatch:
    """Watches from `mark`, at the version point, until `check`, before the update."""

    def __init__(
        self, background: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.nn.Parameter], place: str
    ) -> None:
        """`background` are the tensors that only the update changes; `place` begins every message ('rank 0')."""
        self._background, self._parameters, self._place = background, parameters, place
        self._versions: dict[str, int] | None = None  # of `background` at the version point; None: not watching
        self._gradients: dict[str, tuple[weakref.ref[torch.Tensor], int]] = {}  # at the version point, with versions
        self._accumulated: dict[str, torch.Tensor | None] = {}  # by backwards since: whether the old one was non-zero

    def install(self, optimizer: torch.optim.Optimizer, known: Mapping[str, torch.Tensor]) -> None:
        """Watch every backward, and raise ConfigError when another optimizer steps over `known` tensors."""
        for name, parameter in self._parameters.items():
            trained = parameter.requires_grad
            parameter.requires_grad_()  # required to register a hook; the parameter may be trained later
            parameter.register_hook(lambda gradient, name=name: self._before_accumulation(name))
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
                            f"{place}: another optimizer ({type(other).__name__}) updates "
                            f"'{storages[_storage(parameter)]}', which TorchHost captures: its state would be lost; "
                            "pass one optimizer, with a group for each part of the model"
                        )

        register_optimizer_step_pre_hook(refuse)

    def _before_accumulation(self, name: str) -> None:
        gradient = self._parameters[name].grad
        if self._versions is not None and name not in self._accumulated:
            self._accumulated[name] = None if gradient is None else _any(gradient)  # stays on its device: no wait

    def mark(self, iteration: int) -> None:
        """Start watching at the version point. Raises StateChangedError if gradients were accumulated across it."""
        self._require_none_accumulated(iteration)
        self._gradients = {
            name: (weakref.ref(one.grad), one.grad._version)
            for name, one in self._parameters.items()
            if one.grad is not None
        }
        self.written()

    def written(self) -> None:
        """Accept the present tensors: they were changed after the snapshot was complete."""
        self._versions = {name: tensor._version for name, tensor in self._background.items()}

    def check(self, iteration: int, updates: bool) -> None:
        """Stop watching before the update, or where it is skipped. Raises StateChangedError, naming what changed."""
        versions, self._versions = self._versions, None
        for name, version in (versions or {}).items():
            if self._background[name]._version != version:
                raise StateChangedError(
                    f"{self._place}: iteration {iteration}: '{name}' was changed after the version point and before "
                    "optimizer.step(), while its snapshot was being copied: change parameters right after "
                    "optimizer.step(), in an iteration that makes an update"
                )
        if updates and versions is not None:
            for name, (gradient, version) in self._gradients.items():
                now = self._parameters[name].grad
                if name not in self._accumulated and now is not None and now is gradient() and now._version == version:
                    self._accumulated[name] = _any(now)
        self._require_none_accumulated(iteration)

    def _require_none_accumulated(self, iteration: int) -> None:
        accumulated, self._accumulated = self._accumulated, {}
        for name, non_zero in accumulated.items():
            if non_zero is not None and bool(non_zero):
                raise StateChangedError(
                    f"{self._place}: iteration {iteration}: the gradient of '{name}' still held that of the previous "
                    "iteration, which no snapshot has: zero gradients in every iteration; to accumulate over several "
                    "batches, count one iteration per update, with all its batches in it"
                )


def with_gradient(parameters: Mapping[str, torch.nn.Parameter]) -> list[str]:
    """Which parameters have a dense gradient, even one of zeros: an optimizer skips the others."""
    return [name for name, one in parameters.items() if one.grad is not None and not one.grad.is_sparse]


def set_zero_gradients(parameters: Mapping[str, torch.nn.Parameter], names: list[str]) -> None:
    """Give the named parameters a gradient of zeros, and the others none."""
    for name, one in parameters.items():
        one.grad = torch.zeros_like(one) if name in names else None


def _any(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.detach()
    return (gradient.coalesce().values() if gradient.is_sparse else gradient).any()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
