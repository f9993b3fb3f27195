"""What a module has besides tensors and changes in training: which parameters are trained, modes, numbers, extra state.

A script may unfreeze a layer, put some into evaluation, or change a number of one (the rate of a dropout) in the middle
of training; what it sets when it builds the model is then not what the restored iteration had. All is set right before
the first batch, after a script's own `engine.train()`. DeepSpeed's own modules count micro-batches, and are left alone.

In: the module of a host. Out: plain values, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..errors import InventoryError, ResumeError, UnsupportedError
from ..snapshot.capture import codec

_PLAIN = (int, float, bool, str)


class ModuleNumbers:
    """The plain values in attributes of modules that have changed since this was built.

    Not of a module that has come to keep another tensor in an attribute since: such numbers describe a cache, which is
    not captured."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._built = {name: _numbers(part) for name, part in module.named_modules()}
        self._caches = {name: _tensors(part) for name, part in module.named_modules()}

    def changed(self) -> dict[str, dict[str, Any]]:
        """By module and attribute."""
        found = {}
        for name, part in self._module.named_modules():
            built, now = self._built.get(name, {}), _numbers(part)
            if now != built and _tensors(part) == self._caches.get(name):
                found[name] = {key: value for key, value in now.items() if key not in built or built[key] != value}
        return found

    def restore(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        for name, part in self._module.named_modules():
            if _tensors(part) == self._caches.get(name):
                vars(part).update({**self._built.get(name, {}), **saved.get(name, {})})


def _tensors(part: torch.nn.Module) -> dict[str, int]:
    return {key: id(value) for key, value in vars(part).items() if isinstance(value, torch.Tensor)}


def _numbers(part: torch.nn.Module) -> dict[str, Any]:
    if type(part).__module__.split(".")[0] == "deepspeed":
        return {}
    return {key: value for key, value in vars(part).items() if type(value) in _PLAIN and key != "training"}


def read_modes(module: torch.nn.Module) -> dict[str, Any]:
    """One byte per parameter and per module, and extra state by module."""
    return {
        "trained": bytes(one.requires_grad for one in module.parameters()),
        "training": bytes(part.training for part in module.modules()),
        "extra": {name: part.get_extra_state() for name, part in _with_extra_state(module)},
    }


def write_modes(module: torch.nn.Module, saved: Mapping[str, Any], training: bool = True) -> None:
    """Set what was read; with `training` also which modules are in training mode. Raises ResumeError if the module has
    other parameters or parts."""
    for kind, own in (("trained", [*module.parameters()]), ("training", [*module.modules()])):
        if len(own) != len(saved[kind]):
            what = "parameters" if kind == "trained" else "modules"
            raise ResumeError(
                f"the model has {len(own)} {what}, the captured one had {len(saved[kind])}: resume with the captured "
                "job's model, or start with --ftp-resume fresh"
            )
    for one, trained in zip(module.parameters(), saved["trained"], strict=True):
        if one.requires_grad != bool(trained):
            one.requires_grad_(bool(trained))
    for part, mode in zip(module.modules(), saved["training"], strict=True):
        part.training = bool(mode) if training else part.training
    for name, part in _with_extra_state(module):
        if name in saved["extra"]:
            part.set_extra_state(saved["extra"][name])


def require_encodable_modes(module: torch.nn.Module, rank: int) -> None:
    """Raises UnsupportedError, naming the module whose extra state cannot be captured."""
    for name, part in _with_extra_state(module):
        try:
            codec.encode(part.get_extra_state())
        except InventoryError as error:
            raise UnsupportedError(
                f"rank {rank}: the extra state of '{name}' ({type(part).__name__}) cannot be captured: {error}; return "
                "plain values and tensors from get_extra_state"
            ) from error


def _with_extra_state(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, part in module.named_modules():
        if type(part).get_extra_state is not torch.nn.Module.get_extra_state:
            yield name, part
