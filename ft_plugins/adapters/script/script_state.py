"""Tensors of a script's own objects: which they hold, whether they changed, and what `get_state` returns of them.

Invariant: nothing of the script is called except `state_dict` of torch's own classes, and nothing is changed.

    tensors_in   the tensors that an object holds directly, in containers, or, if it is torch's, as torch has them
    Marks        contents of tensors at one time: version counters, and a sample of the bytes (changes through `.data`)
    Returned     what `get_state` returned

In: objects of a script. Out: tensors, and answers about them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ..host_parts import local_part
from ..value_text import Text, is_a, sample_digest, text_of

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


def kept_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of a module itself that belong to its state."""
    left_out = module._non_persistent_buffers_set
    return {name: one for name, one in module._buffers.items() if one is not None and name not in left_out}


class Marks:
    """The contents of tensors when they were marked. Holds no tensor alive."""

    def __init__(self) -> None:
        self._marks: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}
        self._buffers: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, int]] = weakref.WeakKeyDictionary()

    def mark(self, tensors: Iterable[torch.Tensor]) -> None:
        """Mark tensors that are not marked yet. Waits for devices."""
        for tensor in tensors:
            if not self.marked(tensor):
                self._marks[id(tensor)] = weakref.ref(tensor), _version(tensor), _digest(tensor)

    def mark_buffers(self, modules: Iterable[torch.nn.Module], left_out: Callable[[torch.Tensor], bool]) -> None:
        """Mark buffers by name: a module may replace them. Waits for devices."""
        for one in modules:
            buffers = {name: each for name, each in kept_buffers(one).items() if not left_out(each)}
            if buffers:
                self._buffers[one] = {name: _digest(buffer) for name, buffer in buffers.items()}

    def buffer_changed(self, module: torch.nn.Module, among: Collection[int]) -> bool:
        """Whether a marked buffer of a module, of its own, has other contents, if its present tensor is `among` these,
        by id. Waits for devices."""
        now = {name: one for name, one in kept_buffers(module).items() if id(one) in among}
        return any(
            name in now and _digest(now[name]) != was
            for name, was in self._buffers.get(module, {}).items()
        )

    def marked(self, tensor: torch.Tensor) -> bool:
        """Whether this very tensor was marked."""
        found = self._marks.get(id(tensor))
        return found is not None and found[0]() is tensor

    def changed(self, tensor: torch.Tensor) -> bool:
        """Whether a marked tensor has changed since. Waits for devices."""
        if not self.marked(tensor):
            return False
        _, version, digest = self._marks[id(tensor)]
        return _version(tensor) != version or _digest(tensor) != digest


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version + local_part(tensor)._version


def _digest(tensor: torch.Tensor) -> int:
    """The digest of a sample of a tensor; 0 for one whose bytes cannot be read."""
    if not storage_of(tensor):
        return 0
    try:
        return sample_digest(local_part(tensor))
    except Exception:  # a subclass of Tensor, or gaps in memory: its version counter remains
        return 0


def address_of(value: Any) -> int:
    """The address of the memory of a tensor or an array; 0 of anything else."""
    if is_a(value, np.ndarray):
        return int(value.ctypes.data)
    return storage_of(value) if is_a(value, torch.Tensor) else 0


class Returned:
    """What a caller's `get_state` returned."""

    def __init__(self, value: Any) -> None:
        values = list(nested(value))
        self.storages = {address_of(one) for one in values} - {0}
        self._texts = {_text(one) for one in values} - {None}

    def has(self, state: Mapping[str, Any]) -> bool:
        """Whether all values of `state` are in it."""
        return bool(state) and all(_text(one) in self._texts for one in nested(state) if _text(one) is not None)

    def has_tensor(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor in it has the same shape, and the same values in a sample."""
        return _text(tensor) in self._texts


def _text(value: Any) -> Text | None:
    """Of tensors and arrays of numbers as they are read, whatever their strides. Waits for devices."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        value = torch.from_numpy(value)
    return text_of(value.contiguous() if type(value) is torch.Tensor else value, devices=True)


def nested(value: Any, depth: int = 2 * _DEPTH) -> Iterator[Any]:
    """`value`, and what is in it, where it is a mapping, a list or a tuple."""
    yield value
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for part in list(parts) if depth else ():
        yield from nested(part, depth - 1)
