"""Tensors of a script's own objects: which they hold, whether they changed, and what `get_state` returns of them.

Invariant: nothing of the script is called except `state_dict` of torch's own classes, and nothing is changed.

    tensors_in   the tensors that an object holds directly, in containers, or, if it is torch's, as torch has them
    Marks        contents of tensors at one time: version counters, and a sample of the bytes (changes through `.data`)
    Returned     what `get_state` returned, and what its code refers to

In: objects of a script. Out: tensors, and answers about them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ...snapshot.capture.copiers import flat_bytes
from ...snapshot.capture.samples import digest_of, sample_of
from ..data.data_parts import global_names, is_filled
from ..host_parts import local_part

_DEPTH = 3  # of the containers that are searched for tensors
_MANY = 20_000  # elements: a larger container is one of data, not of weights
_CONTAINERS = (list, tuple, dict, set, frozenset)


def storage_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory; 0 if it has none."""
    try:
        return 0 if tensor.is_meta else local_part(tensor).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # of torch's compiler, or sparse
        return 0


def holds_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values here; those of ZeRO-3 have them in another one."""
    return storage_of(tensor) != 0 or getattr(tensor, "ds_numel", 0) > 0


def tensors_in(value: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """The tensors that `value` holds: as parameters, buffers, or an optimizer's state; else in attributes, and in
    containers in them. Modules and optimizers in attributes are left out: they are objects of their own."""
    if isinstance(value, torch.nn.Module):
        yield from (*value.parameters(), *value.buffers())
    elif isinstance(value, torch.optim.Optimizer):
        for group in value.param_groups:
            yield from group["params"]
        yield from optimizer_tensors(value)
    else:
        yield from _contained(value, depth)
        for part in list(getattr(value, "__dict__", {}).values()):
            yield from _contained(part, depth)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The tensors of an optimizer's state."""
    yield from _contained(list(optimizer.state.values()), _DEPTH + 1)


def _contained(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and (kind := next((one for one in _CONTAINERS if issubclass(type(value), one)), None)):
        read: Any = kind  # by its own methods: those of a class of the script may draw numbers, or fail
        if read.__len__(value) <= _MANY:
            for part in list(dict.values(value) if kind is dict else read.__iter__(value)):
                yield from _contained(part, depth - 1)


class Marks:
    """The contents of tensors when they were marked. Holds no tensor alive."""

    def __init__(self) -> None:
        self._marks: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}

    def mark(self, tensors: Iterable[torch.Tensor]) -> None:
        """Mark tensors that are not marked yet. Waits for devices."""
        for tensor in tensors:
            if not self.marked(tensor):
                self._marks[id(tensor)] = weakref.ref(tensor), _version(tensor), _digest(tensor, devices=True)

    def marked(self, tensor: torch.Tensor) -> bool:
        """Whether this very tensor was marked."""
        found = self._marks.get(id(tensor))
        return found is not None and found[0]() is tensor

    def changed(self, tensor: torch.Tensor, devices: bool = True) -> bool:
        """Whether a marked tensor has changed since. On a device changes through `.data` are seen only if `devices`,
        which waits for it."""
        if not self.marked(tensor):
            return False
        _, version, digest = self._marks[id(tensor)]
        on_host = tensor.device.type == "cpu"
        return _version(tensor) != version or ((devices or on_host) and _digest(tensor, devices) != digest)


def _version(tensor: torch.Tensor) -> int:
    return tensor._version + local_part(tensor)._version


def _digest(tensor: torch.Tensor, devices: bool) -> int:
    """The digest of a sample of a tensor; 0 for one whose bytes cannot be read."""
    if not storage_of(tensor) or not (devices or tensor.device.type == "cpu"):
        return 0
    try:
        return digest_of(sample_of(flat_bytes("", local_part(tensor)).cpu().numpy()))
    except Exception:  # a subclass of Tensor, or gaps in memory: its version counter remains
        return 0


def contents_of(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """The digest of a sample of each tensor. Waits for devices."""
    return tuple(_digest(one, devices=True) for one in tensors)


class Returned:
    """What a caller's `get_state` returned. `functions`: it and `set_state`."""

    def __init__(self, value: Any, *functions: Callable[..., Any]) -> None:
        self._values = list(_nested(value))
        self._tensors = list(tensors_in(self._values))
        self.storages = {storage_of(one) for one in self._tensors} - {0}
        self.storages |= {one.ctypes.data for one in self._values if isinstance(one, np.ndarray)}
        self.referenced = {id(one) for function in functions for one in _referenced(function)}

    def has(self, state: Mapping[str, Any]) -> bool:
        """Whether a mapping in it has all keys of `state`, with equal values."""
        return bool(state) and any(isinstance(one, Mapping) and _same(state, one) for one in self._values)

    def has_tensor(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor in it has the same values."""
        return any(_same(tensor, one) for one in self._tensors)


def _nested(value: Any, depth: int = 2 * _DEPTH) -> Iterator[Any]:
    yield value
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for part in list(parts) if depth else ():
        yield from _nested(part, depth - 1)


def _same(wanted: Any, found: Any) -> bool:
    """Whether `found` has at least the keys, and equal values."""
    if isinstance(wanted, Mapping):
        keys = isinstance(found, Mapping) and wanted.keys() <= found.keys()
        return keys and all(_same(value, found[key]) for key, value in wanted.items())
    if isinstance(wanted, list | tuple):
        sequences = isinstance(found, list | tuple) and len(wanted) == len(found)
        return sequences and all(map(_same, wanted, found))
    if isinstance(wanted, torch.Tensor):
        if isinstance(found, np.ndarray):
            found = torch.from_numpy(found)
        equal = isinstance(found, torch.Tensor) and (wanted.shape, wanted.dtype) == (found.shape, found.dtype)
        return equal and torch.equal(local_part(wanted).detach().cpu(), local_part(found).detach().cpu())
    try:
        return bool(wanted == found)
    except (TypeError, ValueError, RuntimeError):
        return False


def names_in(function: Any) -> frozenset[str]:
    """The variables and attributes that a function's code, or that of the method of an object, names."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return frozenset() if code is None else frozenset((*global_names(code), *code.co_freevars))


def _referenced(function: Any) -> Iterator[Any]:
    """The objects that a function's code refers to: closure, globals, attributes of `self`, arguments of a partial."""
    owner = getattr(function, "__self__", None)
    yield owner
    for part in (*getattr(function, "args", ()), getattr(function, "func", None)):  # functools.partial
        yield part
        yield from _referenced(part) if callable(part) else ()
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if is_filled(cell)]
    names = set(global_names(code))
    used = [value for name, value in function.__globals__.items() if name in names]
    for one in (*cells, *used, *(function.__defaults__ or ())):
        yield one
    for one in (owner, *cells, *used):
        yield from (value for name, value in getattr(one, "__dict__", {}).items() if name in names)
