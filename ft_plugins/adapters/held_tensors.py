"""Find the tensors that modules keep outside their parameters and buffers, and that training changes.

They are in no version: a memory of earlier batches, an average, a teacher hidden in a list. A table that is made once
is a tensor, too, so only those that another one has replaced, or that were changed in place, are found. Only version
points 1, 2, 4, 8 and so on are examined: a later change is found later.

Followed: containers and objects, as in `held_objects`, and modules in them. Left out: modules of packages whose state
is known, objects of libraries, views of parameters and buffers, and what the optimizers update. Nothing of the script
is called.

In: modules at version points. Out: paths.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from .held_objects import is_followed, read_parts, text_of
from .host_parts import local_part
from .module_parts import parts_of
from .script.loop_values import is_a

_DEPTH, _MOST, _SAMPLE = 4, 4096, 64  # levels below an attribute; values in it; elements of a tensor that are read
_KNOWN = ("deepspeed.", "megatron.", "torch.nn.parallel.")  # packages whose modules' state is known
_OWN = frozenset(("_parameters", "_buffers", "_modules"))


class HeldTensors:
    """Of one model."""

    def __init__(self) -> None:
        self._points = 0
        self._seen: dict[str, tuple[weakref.ref[torch.Tensor], str]] = {}  # by path: a tensor, and what it has

    def changed(
        self, modules: Sequence[tuple[str, torch.nn.Module]], optimizers: Iterable[torch.optim.Optimizer]
    ) -> list[str]:
        """At a version point: the paths of those that were replaced or changed since the last examined one."""
        self._points += 1
        if self._points & (self._points - 1):
            return []
        known = {id(one) for each in optimizers for group in each.param_groups for one in group["params"]}
        storages = {_storage(one) for _, part in modules for _, one in _own_tensors(part)} - {0}
        seen, self._seen = self._seen, {}
        changed = []
        for name, module in modules:
            if f"{type(module).__module__}.".startswith(_KNOWN):
                continue
            for path, tensor in _tensors_of(module):
                if id(tensor) not in known and _storage(tensor) not in storages:
                    known.add(id(tensor))
                    place = f"{name}.{path}".lstrip(".")
                    now = self._seen[place] = weakref.ref(tensor), _contents(tensor)
                    before = seen.get(place, now)
                    if before[0]() is not tensor or before[1] != now[1]:
                        changed.append(place)
        return changed


def _own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for own in (module._parameters, module._buffers):
        yield from ((name, one) for name, one in own.items() if one is not None)


def _storage(tensor: torch.Tensor) -> int:
    """0 for one without memory."""
    with suppress(Exception):  # a tensor of another layout, or of a class of its own
        return local_part(tensor).untyped_storage().data_ptr()
    return 0


def _contents(tensor: torch.Tensor) -> str:
    """Its version and a sample: changes through `.data` are not counted."""
    with suppress(Exception):
        version = 0 if tensor.is_inference() else tensor._version
        sample = tensor.detach().view(-1)[:: -(-tensor.numel() // _SAMPLE) or 1] if tensor.is_contiguous() else None
        return f"{version} {None if sample is None else sample.tolist()}"
    return ""


def _tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """In a module's attributes, by path."""
    met = set[int]()
    for key, attribute in [*vars(module).items()]:
        pending, left = deque([(key, attribute, _DEPTH)]), 0 if key in _OWN else _MOST
        while pending and left > 0:
            path, one, depth = pending.popleft()
            if id(one) in met:
                continue
            if is_a(one, torch.Tensor):
                yield path, one
                continue
            parts: list[tuple[str, Any]] = []
            if is_a(one, torch.nn.Module):  # hidden from the model, or a part of it, whose storages are known
                parts = [
                    (f".{name}.{of}".replace("..", "."), each)
                    for name, part in parts_of(one)
                    for of, each in _own_tensors(part)
                ]
            elif depth and is_followed(one):
                keys, values, own = read_parts(one)
                parts = [
                    (f".{of}" if at < own else f"[{at if text_of(of) is None else text_of(of)}]", each)
                    for at, (of, each) in enumerate(zip(keys, values, strict=True))
                ]
            met.add(id(one))
            left -= len(parts)
            pending += [(path + label, each, depth - 1) for label, each in parts]
