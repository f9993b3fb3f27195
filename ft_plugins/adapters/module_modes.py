"""What a module has besides tensors and changes in training: which parameters are trained, modes, numbers, extra state.

A script may unfreeze a layer, put some into evaluation, or change a number of one (the rate of a dropout, an element of
a list) in the middle of training; what it sets when it builds the model is then not what the restored iteration had.
All is set right before the first batch, after a script's own `engine.train()`. Modules of DeepSpeed and of torch's
DistributedDataParallel count micro-batches, and are left alone.

In: the module of a host. Out: plain values, and back."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch

from ..errors import InventoryError, ResumeError, UnsupportedError
from ..events import say
from ..snapshot.capture import codec
from .data.loader_values import assign
from .data.loaders import set_state_of
from .module_parts import CONTAINERS, ENCODED, GENERATOR, MOST, ModulePart, ModuleParts, generators_in, parts_of
from .script.loop_values import is_a

_SHOWN = 8  # names in a message
_ABSENT: Any = object()
_Differences = tuple[dict[str, dict[str, Any]], list[str], list[str]]


class ModuleNumbers:
    """The values in attributes of modules that have changed since this was built.

    Not of a module that has come to keep another tensor in an attribute since: such numbers describe a cache, which is
    not captured."""

    def __init__(self, module: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        self._module, self.parts = module, ModuleParts(module, optimizers)
        self.present = self._first = self.parts.read()  # as it was read last, and first
        self._caches = {name: _tensors(part) for name, part in parts_of(module)}
        self._said: set[str] = set()
        self._differing: tuple[Any, _Differences] = (self.present, ({}, [], []))  # what is present, and its differences

    def _built(self, name: str) -> Mapping[str, Any]:
        return self._first[name].values if name in self._first else {}

    def read(self) -> Mapping[str, ModulePart]:
        self.present = self.parts.read()
        return self.present

    def captured(self, speaks: bool) -> dict[str, dict[str, Any]]:
        """What has changed, by module and attribute. What is not captured is said once, on the rank that `speaks`."""
        changed, unread, cached = self._differences()
        large = f"they hold more than {MOST} plain values, or others"
        for names, reason in ((unread, large), (cached, "their modules have come to keep other tensors in attributes")):
            new = [one for one in names if one not in self._said] if speaks else []
            self._said.update(new)
            if new:
                more = f" and {len(new) - _SHOWN} more" if len(new) > _SHOWN else ""
                say(
                    f"not captured, because {reason}: attributes of modules: {', '.join(new[:_SHOWN])}{more}; if "
                    "training depends on one, make it a buffer, or return it from get_extra_state"
                )
        return changed

    def _differences(self) -> _Differences:
        """What has changed. The lists, tuples and dicts that could be captured when this was built, and no longer can:
        what they hold now is not plain, or too much. What has changed in a module with a cache."""
        changed: dict[str, dict[str, Any]] = {}
        unread: list[str] = []
        cached: list[str] = []
        present = self.read()
        if present is self._differing[0]:
            return self._differing[1]
        for name, one in present.items():
            built, now = self._built(name), one.values
            if built is now or built == now:
                continue
            part = self._module.get_submodule(name)
            lost = [key for key in built.keys() - now.keys() if _is_unread(part, key, built[key], key in one.shape)]
            unread += [_path(name, key) for key in lost]
            different = {key: value for key, value in now.items() if key not in built or built[key] != value}
            if different and _tensors(part) == self._caches.get(name):
                changed[name] = different
            else:
                cached += [_path(name, key) for key in different]
        self._differing = present, (changed, unread, cached)
        return self._differing[1]

    def restore(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Lists, dicts and objects are changed in place: the script may hold them, too."""
        present = self.read()
        for name, part in parts_of(self._module):
            if _tensors(part) == self._caches.get(name):
                now, changed = present[name].values, saved.get(name, {})
                captured = {**self._built(name), **changed}
                for key in [key for key in captured if key in changed or key in now]:  # else it cannot be read
                    _set(part, name, key, now.get(key), captured[key])


def _path(name: str, key: str) -> str:
    return f"{name}.{key}".lstrip(".")


def _is_unread(part: torch.nn.Module, key: str, built: Any, compared: bool) -> bool:
    """Whether the module still has what was `built`, or a container, in place of what could be read."""
    present = vars(part).get(key, _ABSENT)
    was_encoded = type(built) is tuple and built[:1] in ((ENCODED,), (GENERATOR,))
    return type(present) in CONTAINERS or (was_encoded and present is not _ABSENT and not compared)


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
        try:
            codec.encode(part.get_extra_state())
        except InventoryError as error:
            raise UnsupportedError(
                f"rank {rank}: the extra state of '{name}' ({type(part).__name__}) cannot be captured: {error}; return "
                "plain values and tensors from get_extra_state"
            ) from error


def _parameters(parts: Sequence[tuple[str, torch.nn.Module]]) -> list[torch.nn.Parameter]:
    return [*{id(one): one for _, part in parts for one in part._parameters.values() if one is not None}.values()]


def _with_extra_state(parts: Sequence[tuple[str, torch.nn.Module]]) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, part in parts:
        if type(part).get_extra_state is not torch.nn.Module.get_extra_state:
            yield name, part
