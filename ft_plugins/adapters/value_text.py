"""A value of a script as text that is the same in every process, and the means to read one.

    int                        itself
    other plain values         their `repr`; a digest where that is long, as of arrays and texts
    tensors                    shape, and a digest of a sample; the number, of one element
    functions, classes, enums  their names
    generators                 a digest of their state
    iterators of containers    how much is left

Invariant: nothing of the script is called: attributes are read from an object's own dictionary or its slots, elements
by the methods of Python's own containers.

In: a value. Out: an int, a text, which is the kind alone of a container, or None for what cannot be compared.
"""

from __future__ import annotations

import functools
import itertools
import operator
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MemberDescriptorType, MethodType
from typing import Any

import numpy as np
import torch
import xxhash

from ..snapshot.capture import codec
from ..snapshot.capture.copiers import flat_bytes
from ..snapshot.capture.samples import digest_of
from .data.data_parts import is_generator
from .data.loaders import state_of
from .host_parts import local_part

CONTAINERS = (list, tuple, dict, set, frozenset, deque)
PLAIN = (bool, int, float, str, bytes, type(None))
FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, type, functools.partial)
_CONSTANTS = (complex, torch.dtype, torch.device, torch.Size)
_SHOWN = 40  # characters of a text
_LARGE = 1 << 63
SAMPLED = 256  # bytes of each of four parts of a tensor, of which a sample is
_SAMPLE = 64 << 10  # bytes of an array that are read
ON_DEVICE = "a tensor on a device"  # which was not read
Text = int | str


def text_of(value: Any, devices: bool = False) -> Text | None:
    """The text of `value`, at most about 70 characters. `devices`: whether a tensor on one is read, which waits for it;
    otherwise it is `ON_DEVICE`. Raises what the value's class raises: of a tensor nothing, of a generator of the script
    whatever its `getstate` does."""
    kind = type(value)
    if kind is int and abs(value) < _LARGE:
        return value  # type: ignore[no-any-return]
    if kind in PLAIN or is_a(value, *_CONSTANTS):
        return short(repr(value))
    if is_a(value, torch.Tensor):
        return _tensor(value, devices)
    if is_a(value, *FUNCTIONS):
        return name_of(value)
    if is_a(value, Enum):  # not its `repr`: that of its value may have an address
        return f"{name_of(kind)}.{value._name_ or value._value_}"
    if is_a(value, np.generic):
        return short(repr(value.item()))
    if is_a(value, np.ndarray):
        return _array(value)
    if kind in (bytearray, array):
        return f"a {kind.__name__} of {len(value)} ({_digest(bytes(value[:_SAMPLE]))})"
    if is_generator(value):
        return f"a {kind.__name__} ({_digest(codec.encode(state_of(value)))})"
    if kind.__module__ == "builtins" and kind.__name__.endswith("iterator"):
        return f"a {kind.__name__} with {operator.length_hint(value)} left"
    return repr(value) if kind is itertools.count else f"a {kind.__name__}" if container_of(value) else None


def short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({_digest(text.encode(errors='surrogatepass'))})"


def _digest(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)[:8]


def _tensor(value: torch.Tensor, devices: bool) -> str | None:
    if not (devices or value.device.type == "cpu"):
        return ON_DEVICE
    with suppress(Exception):  # a class of its own, or gaps in memory
        local = local_part(value).detach()
        if local.numel() == 1:
            return repr(local.reshape(()).item())
        return f"a tensor of {tuple(value.shape)} ({sample_digest(local):016x})"
    return None


def sample_digest(tensor: torch.Tensor) -> int:
    """The digest of a sample of a dense tensor, of which no more is copied from a device. Raises what torch raises."""
    flat = flat_bytes("", tensor)
    step = (flat.numel() - SAMPLED) // 3
    return digest_of((flat.as_strided((4, SAMPLED), (step, 1)) if step > SAMPLED else flat).cpu().numpy())


def _array(value: Any) -> str | None:
    if is_a(value, np.memmap) or value.dtype.hasobject:  # a file; objects
        return None
    return f"an array of {value.shape} ({_digest(value.reshape(-1)[: _SAMPLE // value.itemsize].tobytes())})"


def name_of(value: Any) -> str:
    """How a function or class is called; with the line, if it has no name of its own."""
    if is_a(value, functools.partial):
        return f"{name_of(value.func)} with {[one for one in value.args if type(one) in PLAIN]}"
    function = value.__func__ if is_a(value, MethodType) else value if is_a(value, *FUNCTIONS) else type(value)
    code = function.__code__ if is_a(function, FunctionType) else None
    line = f":{code.co_firstlineno}" if code is not None and "<lambda>" in function.__qualname__ else ""
    return f"{getattr(function, '__module__', '')}.{function.__qualname__}{line}".removeprefix("torch.nn.modules.")


def is_a(value: Any, *kinds: type) -> bool:
    """`isinstance` without a look at `__class__`, which may be a property of the script."""
    return issubclass(type(value), kinds)


def container_of(value: Any) -> Any:
    """Which of Python's own containers it is, whose methods read it whatever a class of the script overrides."""
    return next((kind for kind in CONTAINERS if is_a(value, kind)), None)


def attributes(value: Any) -> Mapping[str, Any]:
    """An object's own dictionary; empty if it has none."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return own if type(own) in (dict, MappingProxyType) else dict(dict.items(own))


def slots(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object keeps in slots."""
    for base in type(value).__mro__:
        for name, one in list(vars(base).items()) if base is not object else ():
            if type(one) is MemberDescriptorType and not name.startswith("__"):
                with suppress(AttributeError):  # not set
                    yield name, one.__get__(value)
