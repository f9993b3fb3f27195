"""Describe what is in an object that a module holds, as text that is the same in every process; whole numbers apart.

    texts    by path from the attribute, '' for the object itself: its kind, and a digest of plain values, functions and
             arrays in it
    counts   by path, whole numbers in attributes of objects, and in small dicts that hold more than plain values; any
             plain value next to tensors in a list or tuple, which may be a cache

Followed: containers, and objects with their slots, but none of torch or of Python's own library (a logger fills a cache
in its first line). Left out: tensors of more than one element (`held_tensors`), and empty containers.

Invariant: nothing of the script is called. Bounded in levels and values, the nearest first; of a large container, text
or array a sample is read: a change between samples is not seen.

In: an object. Out: its texts; calls with its counts.
"""

from __future__ import annotations

import argparse
import functools
import sys
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import islice
from types import BuiltinFunctionType, CodeType, FunctionType, MemberDescriptorType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import xxhash

from .data.data_parts import is_generator
from .data.loader_values import mark_of
from .script.loop_values import attributes, comparable, container_of, has_tensors, is_a
from .script.script_names import is_of_library

PLAIN = (int, float, bool, str, type(None))
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, type, functools.partial)
_CONSTANTS = (complex, torch.dtype, torch.device, torch.Size)
UNCHANGING = (*_FUNCTIONS, Enum, bytes, *_CONSTANTS)
_LEAVES = (*PLAIN, bytes, bytearray, array, np.generic, torch.Tensor)
# libraries whose hooks are the same in every start
_HOOKED_BY = ("transformers", "accelerate", "megatron", "transformer_engine")
_OF_PROCESSES = {"asyncio", "concurrent", "logging", "multiprocessing", "socket", "subprocess", "threading", "weakref"}
_OF_OBSERVERS = {  # what they keep is of the run, and no part of training
    "comet_ml", "datasets", "loguru", "mlflow", "pyarrow", "rich", "structlog", "tensorboard", "tensorboardX", "tqdm",
    "triton", "wandb",
}  # fmt: skip
_DEPTH, _MOST = 4, 1024  # levels below an attribute; values in it
_SAMPLE, _SMALL = 256, 64  # values of a container that are read; that are one text, of a dict also counts
_PEEK = 8  # values of a container among which tensors are looked for
_WHOLE = 64 << 10  # bytes of an array that is read
_LARGE = 1 << 63  # no count


@dataclass(frozen=True)
class _Node:
    """One object or container. `mark`: ids of what it was read from, which `kept` keeps from becoming those of others.
    `inside`: what of it is followed, by its place among the values; `changing`: what can change in itself, as read;
    `cost`: values that were read, those of containers that are one text too."""

    mark: list[int]
    kept: list[Any]
    text: str
    counts: Mapping[str, int | str]
    inside: list[tuple[str, int]]
    changing: list[tuple[int, Any]]
    cost: int


class Reading:
    """What one reading of a model has met. What has not changed since the one before is not read again."""

    def __init__(self, before: Reading | None = None) -> None:
        self.earlier: Mapping[int, _Node] = {} if before is None else before.nodes
        self.nodes: dict[int, _Node] = {}
        self.known: set[int] = set()  # ids


def held_by(value: Any, reading: Reading, counted: Callable[[str, int | str], None]) -> dict[str, str]:
    """The texts of `value` by path, without objects that another path has reached. `counted` is called with each count
    that is new or may have changed."""
    if (text := text_of(value)) is not None or not is_followed(value):
        return {} if text is None else {"": str(text)}
    texts: dict[str, str] = {}
    pending, left = deque([("", value, False, _DEPTH)]), _MOST
    reading.known.add(id(value))
    while pending and left > 0:
        path, one, in_object, depth = pending.popleft()
        in_object = in_object or container_of(one) is None
        keys, values, own = read_parts(one)
        mark = [id(type(one)), own, in_object, *map(id, keys), *map(id, values)]
        node = reading.earlier.get(id(one))
        if node is None or node.mark != mark or any(_token(values[at]) != was for at, was in node.changing):
            node = _node(one, keys, values, own, in_object, mark, left)
            for label, count in node.counts.items():
                counted(path + label, count)
        reading.nodes[id(one)] = node
        left -= node.cost
        if node.text:
            texts[path] = node.text
        for label, at in node.inside if depth else ():
            if id(values[at]) not in reading.known:
                reading.known.add(id(values[at]))
                pending.append((path + label, values[at], in_object, depth - 1))
    return texts


def _node(
    one: Any, keys: Sequence[Any], values: Sequence[Any], own: int, in_object: bool, mark: list[int], left: int
) -> _Node:
    """`left`: values that may be read; of containers beyond them only the length is."""
    kind, cost = container_of(one), len(values)
    plain: list[tuple[str, Any]] = []
    counts: dict[str, int | str] = {}
    inside: list[tuple[str, int]] = []
    changing: list[tuple[int, Any]] = []
    has_objects = tensors = False
    for at, (key, part) in enumerate(zip(keys, values, strict=True)):
        label = f".{key}" if at < own else f"[{at if (text := text_of(key)) is None else text}]"
        counting = at < own or (kind is dict and type(key) is str and len(values) <= _SMALL)
        if counting and type(part) is int and abs(part) < _LARGE:
            counts[label] = part
        elif is_generator(part):
            if in_object:  # others are restored
                changing.append((at, comparable(part)))
                plain.append((label, changing[-1][1]))
        elif (held := container_of(part)) and cost > left:  # only its length
            plain.append((label, held.__len__(part)))
        elif (text := text_of(part)) is not None:
            plain.append((label, text))
            cost += min(held.__len__(part), _SAMPLE) if held else 0
            if not is_a(part, *PLAIN, *UNCHANGING):
                changing.append((at, text))
        elif is_followed(part):
            inside.append((label, at))
            cached = False
            if container_of(part):
                cached = _with_tensors(part)
                cost += 2 * _PEEK
                changing.append((at, cached))
            has_objects, tensors = has_objects or not cached, tensors or cached
        else:
            tensors = tensors or is_a(part, torch.Tensor)
    text = ""
    if kind is None:
        text = f"{name_of(type(one))} ({_digest(sorted(plain))})"
    elif not tensors and (plain or has_objects):
        text = f"a {type(one).__name__} of {kind.__len__(one)} ({_digest(plain)})"
    elif kind is dict and plain:
        text = f"a {type(one).__name__} ({_digest(plain)})"
    elif tensors:
        counts |= {label: part if type(part) is int and abs(part) < _LARGE else str(part) for label, part in plain}
    kept = [*keys, *(part for part in values if is_a(part, *PLAIN, *UNCHANGING))]
    return _Node(mark, kept, text, counts, inside, changing, cost)


def _token(value: Any) -> Any:
    """What `_Node.changing` has of a value."""
    if is_generator(value):
        return comparable(value)
    return _with_tensors(value) if (text := text_of(value)) is None else text


def _digest(plain: list[tuple[str, Any]]) -> str:
    return xxhash.xxh3_64_hexdigest(repr(plain).encode(errors="surrogatepass"))[:8]


def text_of(value: Any) -> str | int | None:
    """A value as text, or itself; None if it has parts that are not in the text, or cannot be compared."""
    if is_a(value, *_FUNCTIONS):
        return name_of(value)
    if is_a(value, Enum):  # not its `repr`: that of its value may have an address
        return f"{name_of(type(value))}.{value._name_ or value._value_}"
    if is_a(value, *_CONSTANTS):
        return repr(value)
    if is_a(value, *_LEAVES):
        return comparable(value)
    if is_a(value, np.ndarray):
        return _array(value)
    if (kind := container_of(value)) and kind.__len__(value) and _is_flat(kind, value):
        text = str(comparable(value))
        return text if text.endswith(")") or kind in (set, frozenset) else None  # ")": the digest of all its values
    return None


def _is_flat(kind: Any, value: Any) -> bool:
    """Whether a container is one text: a set, whose order is another one in each process, or plain values. What
    holds others is followed, value by value, as far as their number allows."""
    if kind in (set, frozenset):
        return not has_tensors(value, 1)
    parts = dict.values(value) if kind is dict else kind.__iter__(value)
    return all(is_a(one, *PLAIN, bytes) for one in [*islice(parts, _SMALL)])


def _with_tensors(value: Any, levels: int = 2) -> bool:
    """As `has_tensors`, of few parts: it is asked again at each version."""
    if is_a(value, torch.Tensor):
        return True
    kind = container_of(value) if levels else None
    parts = () if kind is None else dict.values(value) if kind is dict else kind.__iter__(value)
    return any(_with_tensors(one, levels - 1) for one in [*islice(parts, _PEEK)])


def is_followed(value: Any) -> bool:
    kind: Any = type(value)
    return container_of(value) is not None or _slots_of(kind) is not None


def _array(value: Any) -> str | None:
    if is_a(value, np.memmap):  # a file
        return None
    if value.dtype.hasobject:
        return f"an array of {value.shape}"
    contents = value.tobytes() if value.nbytes <= _WHOLE else mark_of(value)[2]
    return f"an array of {value.shape} ({xxhash.xxh3_64_hexdigest(contents)[:8]})"


def read_parts(value: Any) -> tuple[list[Any], list[Any], int]:
    """Keys and values, of which so many are attributes. Copied at once: other threads may change what is read here."""
    class_of: Any = type(value)
    keys, values = [], []
    if (slots := _slots_of(class_of)) is not None:
        own = [*attributes(value).items(), *((name, _slot(one, value)) for name, one in slots)]
        keys, values = [name for name, _ in own], [one for _, one in own]
    attributes_read = len(values)
    if (kind := container_of(value)) is None or kind in (set, frozenset):
        return keys, values, attributes_read
    size = kind.__len__(value)
    if kind is dict:
        items = [*islice(dict.items(value), _SAMPLE)]
        items += [*islice(reversed(dict.items(value)), max(0, min(_SAMPLE, size - len(items))))]
        return [*keys, *(key for key, _ in items)], [*values, *(one for _, one in items)], attributes_read
    if kind is deque:
        places: Sequence[int] = sorted({*range(min(size, _SAMPLE)), *range(max(0, size - _SAMPLE), size)})
        sample: list[Any] = []
        with suppress(IndexError):  # another thread has made it shorter since
            sample += (deque.__getitem__(value, at) for at in places)
        places = places[: len(sample)]
    else:
        step = -(-size // _SAMPLE) or 1
        sample = kind.__getitem__(value, slice(None, None, step))
        places = range(0, step * len(sample), step)  # of what was copied: its length may have changed since
    return [*keys, *places], [*values, *sample], attributes_read


@cache
def _slots_of(kind: Any) -> tuple[tuple[str, Any], ...] | None:
    """The slots of a class whose objects are followed; None for another one."""
    bases = [one for one in kind.__mro__ if one is not object]
    roots = {str(one.__module__).partition(".")[0] for one in bases}
    own = str(kind.__module__).partition(".")[0]
    python = own in sys.stdlib_module_names and kind not in (SimpleNamespace, argparse.Namespace)
    if python or roots & (_OF_PROCESSES | _OF_OBSERVERS) or any(is_of_library(one.__module__) for one in bases):
        return None
    own_slots = ((name, one) for base in bases for name, one in vars(base).items())
    return tuple((name, one) for name, one in own_slots if type(one) is MemberDescriptorType)


def _slot(descriptor: Any, value: Any) -> Any:
    try:
        return descriptor.__get__(value)
    except AttributeError:  # not set
        return None


def name_of(value: Any, hook: bool = False) -> str:
    """How a function or class is called, with a digest of its code if it has no name of its own; '' for a `hook` that
    is a library's."""
    if isinstance(value, functools.partial):
        given = [one for one in (*value.args, *value.keywords.values()) if type(one) in PLAIN]
        inner = name_of(value.func, hook)
        return inner and f"{inner} with {given}"
    function = getattr(value, "__func__", value)
    function = function if hasattr(function, "__qualname__") else type(function)
    module = str(getattr(function, "__module__", None) or "")
    if hook and (is_of_library(module) or module.partition(".")[0] in _HOOKED_BY):
        return ""
    code = getattr(function, "__code__", None)
    nameless = f" ({_digest_of(code)})" if code is not None and "<" in function.__qualname__ else ""
    return f"{module}.{function.__qualname__}{nameless}".removeprefix("torch.nn.modules.")


def _digest_of(code: CodeType) -> str:
    constants = [one for one in code.co_consts if type(one) in PLAIN]
    return xxhash.xxh3_64_hexdigest(code.co_code + repr((constants, code.co_names)).encode())[:8]
