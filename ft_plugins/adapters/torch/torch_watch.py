"""Detect changes that a plain torch loop must not make between a version point and the next update.

Parameters that the optimizer updates, and its state of them, are copied in the background until `optimizer.step()`: a
change before it would tear the snapshot. Gradients are not captured, so a backward must not add to gradients that
existed at the version point. Both raise StateChangedError before the update. Of several optimizers each is checked for
the gradients that its own step uses, and what later backwards add to at the next version point. Detection relies on
`tensor._version`, which counts every change in place (also under no_grad), except those through `tensor.data`: of these
the capture notices what would tear a snapshot (`snapshot.capture.samples`). An operation on a DTensor increments the
DTensor's, one on its local tensor the local tensor's; torch's `_foreach` operations on DTensors neither.

In: live tensors by name, parameters by name; identities of tensors. Out: nothing, or StateChangedError.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...errors import ConfigError, StateChangedError
from ..host_parts import local_part

_Versions = tuple[int, int]  # of a tensor and of its local part


class ChangeWatch:
    """Watches from `mark`, at the version point, until `check`, before the update."""

    def __init__(
        self, background: dict[str, torch.Tensor], parameters: Mapping[str, torch.nn.Parameter], place: str
    ) -> None:
        """`background` are the tensors that only the update changes; `place` begins every message ('rank 0')."""
        self._background, self._parameters, self._place = background, parameters, place
        self._versions: dict[str, _Versions] | None = None  # of `background` at the version point; None: not watching
        self._gradients: dict[str, tuple[weakref.ref[torch.Tensor], _Versions]] = {}  # at the version point
        self._sharded = {name for name, one in parameters.items() if local_part(one) is not one}
        self._non_zero: dict[str, torch.Tensor] = {}  # whether gradients of `_sharded` were, at the version point
        self._accumulated: dict[str, torch.Tensor | None] = {}  # by backwards since: whether the old one was non-zero
        self._recording = False  # what backwards add to

    def install(self, optimizers: Sequence[torch.optim.Optimizer], known: Mapping[str, torch.Tensor]) -> None:
        """Watch every backward, and raise ConfigError when another optimizer steps over `known` tensors."""
        for name, parameter in self._parameters.items():
            trained = parameter.requires_grad
            parameter.requires_grad_()  # required to register a hook; the parameter may be trained later
            if (
                name in self._sharded
            ):  # FSDP writes its gradient after the backward of its module, then calls such hooks
                parameter.register_post_accumulate_grad_hook(lambda one, name=name: self._after_accumulation(name))
            else:
                parameter.register_hook(lambda gradient, name=name: self._before_accumulation(name))
            parameter.requires_grad_(trained)
        present = {name: tensor for name, tensor in known.items() if not tensor.is_meta}
        storages = {_storage(tensor): name for name, tensor in present.items() if local_part(tensor).numel()}
        ours, place = [weakref.ref(one) for one in optimizers], self._place
        given = "optimizer" if len(ours) == 1 else "..."

        def refuse(other: torch.optim.Optimizer, *call: object) -> None:
            if any(one() is None or other is one() for one in ours):
                return
            for group in other.param_groups:
                for parameter in group["params"]:
                    if local_part(parameter).numel() and _storage(parameter) in storages:
                        raise ConfigError(
                            f"{place}: another optimizer ({type(other).__name__}) updates "
                            f"'{storages[_storage(parameter)]}', which TorchHost captures: its state would be lost; "
                            f"pass all optimizers: TorchHost(model, [{given}, other_optimizer], ...)"
                        )

        register_optimizer_step_pre_hook(refuse)

    def follow(self, name: str, tensor: torch.Tensor) -> None:
        """Watch `tensor` as one that only the update changes."""
        self._background[name] = tensor

    def _before_accumulation(self, name: str) -> None:
        gradient = self._parameters[name].grad
        if self._recording and name not in self._accumulated:
            self._accumulated[name] = None if gradient is None else _any(gradient)  # stays on its device: no wait

    def _after_accumulation(self, name: str) -> None:
        gradient = self._parameters[name].grad
        if not self._recording or name in self._accumulated or gradient is None:
            return
        before, (version, _) = self._gradients.get(name, (lambda: None, (0, 0)))
        added = before() is gradient and version == gradient._version  # added to it, without zeroing it first
        self._accumulated[name] = self._non_zero[name] if added else None

    def mark(self, iteration: int) -> None:
        """Start watching at the version point. Raises StateChangedError if gradients were accumulated across it."""
        self._require_none_accumulated(iteration)
        self._accumulated = {}
        self._gradients = {
            name: (weakref.ref(one.grad), _versions(one.grad))
            for name, one in self._parameters.items()
            if one.grad is not None
        }
        graded = self._gradients.keys() & self._sharded
        self._non_zero = {
            name: _any(gradient) for name in graded if (gradient := self._parameters[name].grad) is not None
        }
        self._versions, self._recording = self._present(), True

    def written(self) -> None:
        """Accept the present tensors, if watching: they were changed after the snapshot was complete."""
        if self._versions is not None:  # not in an update, which changes them once more
            self._versions = self._present()

    def _present(self) -> dict[str, _Versions]:
        return {name: _versions(tensor) for name, tensor in self._background.items()}

    def check(self, iteration: int, used: Collection[str] | None, more: bool = False) -> None:
        """Stop watching before the update, or where it is skipped. Raises StateChangedError, naming what changed.

        `used`: the parameters whose gradients the update uses, None if it is skipped. `more`: other optimizers may step
        in this iteration, after backwards of their own.
        """
        versions, self._versions = self._versions, None
        for name, version in (versions or {}).items():
            if _versions(self._background[name]) != version:
                raise StateChangedError(
                    f"{self._place}: iteration {iteration}: '{name}' was changed after the version point and before "
                    "optimizer.step(), while its snapshot was being copied: change parameters right after "
                    "optimizer.step(), in an iteration that makes an update"
                )
        self._recording = versions is not None
        self.check_gradients(iteration, used)
        self._recording = self._recording and more

    def check_gradients(self, iteration: int, used: Collection[str] | None) -> None:
        """Check the gradients that a step uses. Raises StateChangedError.

        A gradient of the version point that no backward has added to must be zero if the step uses it. Any other may
        stay until it is zeroed, but nothing may use it before, as clipping does, which also scales it.
        """
        if self._recording and used is not None:
            for name, (gradient, version) in self._gradients.items():
                now = self._parameters[name].grad
                stayed = name not in self._accumulated and now is not None and now is gradient()
                if stayed and now is not None and (_versions(now) == version) == (name in used):
                    self._accumulated[name] = _any(now)
        self._require_none_accumulated(iteration)

    def _require_none_accumulated(self, iteration: int) -> None:
        accumulated, self._accumulated = self._accumulated, dict.fromkeys(self._accumulated)
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


def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What stays equal while a tensor is changed in place."""
    return id(tensor), local_part(tensor).data_ptr(), local_part(tensor).shape, tensor.dtype


def changed_since(
    known: Mapping[str, tuple[Any, ...]], present: Mapping[str, tuple[Any, ...]], place: str, host: str
) -> StateChangedError:
    """The error that names one of the tensors that were added, removed or replaced since `host` was built, or else the
    optimizer's groups. By identities."""
    added, gone = present.keys() - known.keys(), known.keys() - present.keys()
    replaced = {name for name in present.keys() - added if present[name] != known[name]}
    cases: tuple[tuple[set[str], str], ...] = (
        (gone, f"was removed after {host} was built"),
        (added, f"was added after {host} was built and would be missing from snapshots"),
        (replaced, f"was replaced by another tensor, or has other memory or shape, since {host} was built"),
        ({"the optimizer's groups"}, f"have other parameters than when {host} was built"),
    )
    names, what = next(case for case in cases if case[0])
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return StateChangedError(
        f"{place}: '{min(names)}'{more} {what}: build the whole model and optimizer, all parameters and groups, before "
        f"{host}, and change tensors in place; or end the job before the change and start another one (--ftp-job) "
        "after it"
    )


def _versions(tensor: torch.Tensor) -> _Versions:
    return tensor._version, local_part(tensor)._version


def _any(gradient: torch.Tensor) -> torch.Tensor:
    gradient = local_part(gradient).detach()
    return (gradient.coalesce().values() if gradient.is_sparse else gradient).any()


def _storage(tensor: torch.Tensor) -> int:
    return local_part(tensor).untyped_storage().data_ptr()
