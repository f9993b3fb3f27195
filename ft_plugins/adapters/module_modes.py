"""What a module has besides tensors and changes in training: which parameters are trained, modes, numbers, extra state.

A script may unfreeze a layer, put some into evaluation, or change a number of one (the rate of a dropout, an element of
a list) in the middle of training; what it sets when it builds the model is then not what the restored iteration had.
All is set right before the first batch, after a script's own `engine.train()`. Modules of DeepSpeed and of torch's
DistributedDataParallel count micro-batches, and are left alone.

In: the module of a host. Out: plain values, and back."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch

from ..errors import ResumeError, UnsupportedError
from ..events import say
from ..snapshot.capture import codec
from .data.loader_values import assign
from .data.loaders import set_state_of
from .module_parts import ENCODED, GENERATOR, ModuleParts, Values, generators_in, parts_of
from .value_text import is_a

_ABSENT: Any = object()


class ModuleNumbers:
    """The values in attributes of modules that have changed since this was built.

    Not of a module that has come to keep another tensor in an attribute since: such numbers describe a cache, which is
    not captured."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module, self.parts = module, ModuleParts(module)
        self.present = self._first = self.parts.read()  # as it was read last, and first
        self._caches = {name: _tensors(part) for name, part in parts_of(module)}
        self._changed: tuple[Any, dict[str, dict[str, Any]]] = (self.present, {})  # what is present, and has changed

    def read(self) -> Mapping[str, Values]:
        self.present = self.parts.read()
        return self.present

    def captured(self) -> dict[str, dict[str, Any]]:
        """What has changed, by module and attribute."""
        present = self.read()
        if present is self._changed[0]:
            return self._changed[1]
        changed: dict[str, dict[str, Any]] = {}
        for name, now in present.items():
            built = self._first.get(name, {})
            different = {key: value for key, value in now.items() if key not in built or built[key] != value}
            if different and _tensors(self._module.get_submodule(name)) == self._caches.get(name):
                changed[name] = different
        self._changed = present, changed
        return changed

    def restore(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Lists, dicts and objects are changed in place: the script may hold them, too."""
        present = self.read()
        for name, part in parts_of(self._module):
            if _tensors(part) == self._caches.get(name):
                now, changed = present[name], saved.get(name, {})
                captured = {**self._first.get(name, {}), **changed}
                for key in [key for key in captured if key in changed or key in now]:  # else it cannot be read
                    _set(part, name, key, now.get(key), captured[key])


def _path(name: str, key: str) -> str:
    return f"{name}.{key}".lstrip(".")


def _set(part: torch.nn.Module, name: str, key: str, now: Any, captured: Any) -> None:
    """Set an attribute, which is read as `now`."""
    present = vars(part).get(key, _ABSENT)
    match captured:
        case (kind, bytes(encoded)) if kind == GENERATOR:
            found, states = generators_in(present), codec.decode(encoded)
            if len(found) != len(states):
                say(
                    f"after the restore '{_path(name, key)}' has {len(found)} random number generators, and had "
                    f"{len(states)} when that version was captured: they begin again, and results differ: make them "
                    "where the module is built",
                    alarm=True,
                )
            for one, state in zip(found, states, strict=False):
                set_state_of(one, state)
        case (kind, bytes(encoded)) if kind == ENCODED:
            if now != captured:
                assign(part, key, codec.decode(encoded))
        case _:
            vars(part)[key] = _put(present, captured)


def _put(present: Any, captured: Any) -> Any:
    """`captured`, in the list or dict that is there."""
    if type(present) is list and type(captured) is list:
        present[:] = [_put(*pair) for pair in zip_longest(present[: len(captured)], captured, fillvalue=_ABSENT)]
        return present
    if type(present) is dict and type(captured) is dict:
        values = {key: _put(present.get(key, _ABSENT), value) for key, value in captured.items()}
        present.clear()
        present.update(values)
        return present
    return copy.deepcopy(captured)


def _tensors(part: torch.nn.Module) -> dict[str, int]:
    return {key: id(value) for key, value in vars(part).items() if is_a(value, torch.Tensor)}


def read_modes(parts: Sequence[tuple[str, torch.nn.Module]]) -> dict[str, Any]:
    """One byte per parameter and per module, and extra state by module. `parts`: as `parts_of` has them."""
    return {
        "trained": bytes([one.requires_grad for one in _parameters(parts)]),
        "training": bytes([part.training for _, part in parts]),
        "extra": {name: part.get_extra_state() for name, part in _with_extra_state(parts)},
    }


def write_modes(module: torch.nn.Module, saved: Mapping[str, Any], training: bool = True) -> None:
    """Set what was read; with `training` also which modules are in training mode. Raises ResumeError if the module has
    other parameters or parts."""
    parts = parts_of(module)
    parameters = _parameters(parts)
    for kind, own in (("trained", parameters), ("training", parts)):
        if len(own) != len(saved[kind]):
            what = "parameters" if kind == "trained" else "modules"
            raise ResumeError(
                f"the model has {len(own)} {what}, the captured one had {len(saved[kind])}: resume with the captured "
                "job's model, or start with --ftp-resume fresh"
            )
    for one, trained in zip(parameters, saved["trained"], strict=True):
        if one.requires_grad != bool(trained):
            one.requires_grad_(bool(trained))
    for (_, part), mode in zip(parts, saved["training"], strict=True):
        part.training = bool(mode) if training else part.training
    for name, part in _with_extra_state(parts):
        if name in saved["extra"]:
            part.set_extra_state(saved["extra"][name])


def require_encodable_modes(module: torch.nn.Module, rank: int) -> None:
    """Raises UnsupportedError, naming the module whose extra state cannot be captured."""
    for name, part in _with_extra_state(parts_of(module)):
        what = f"rank {rank}: the extra state of '{name}' ({type(part).__name__}) cannot be captured: "
        remedy = "; return plain values and tensors from get_extra_state"
        codec.require_encodable(part.get_extra_state(), UnsupportedError, what, remedy)


def _parameters(parts: Sequence[tuple[str, torch.nn.Module]]) -> list[torch.nn.Parameter]:
    return [*{id(one): one for _, part in parts for one in part._parameters.values() if one is not None}.values()]


def _with_extra_state(parts: Sequence[tuple[str, torch.nn.Module]]) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, part in parts:
        if type(part).get_extra_state is not torch.nn.Module.get_extra_state:
            yield name, part
