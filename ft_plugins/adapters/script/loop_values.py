"""The value of an expression of a script, read without a call of anything of the script.

Invariant: attributes are read from an object's own dictionary, its slots or its class, elements by the methods of
Python's own containers; a property, a module's function, or an object of unknown kind has no value here.

    int                      itself
    other plain values       as text: floats, strings, True, None, a tensor of one element on the CPU; arrays of bytes
                             and of numbers; a sample of long ones, and of long strings
    containers of those      as text: kind, length, and a digest if they are small; so are objects with such attributes
    random number generators as text: kind, and a digest of their state

In: an expression, the namespaces that it is in. Out: an int, a text, or None for what cannot be compared.
"""

from __future__ import annotations

import ast
import gc
import operator
import re
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from itertools import islice
from types import GeneratorType, MappingProxyType, MemberDescriptorType
from typing import Any

import numpy as np
import torch
import xxhash

from ...snapshot.capture import codec
from ..data.data_parts import is_generator
from ..data.loaders import is_stateful, state_of
from .script_names import is_of_library

Spaces = tuple[Mapping[str, Any], ...]  # namespaces, the innermost first
_PLAIN = frozenset((bool, int, float, str, bytes, type(None)))
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_MOST = 256  # values of a container that are compared
_SMALL = 4096  # bytes of a tensor in one that is; characters of a text that is read as it is
_SHOWN = 40  # characters of a text
_SEQUENCES = (str, bytes, bytearray, array)
_WHOLE, _PIECES, _PIECE = 64 << 10, 32, 512  # elements of one that is read; pieces of a larger one, and theirs
_UUID = re.compile(  # another one in each start
    r"[0-9a-f]{8}(-?)[0-9a-f]{4}\1[1-8][0-9a-f]{3}\1[89ab][0-9a-f]{3}\1[0-9a-f]{12}"
)
NOTHING: Any = object()  # there is no value, or it cannot be read
_COMPARISONS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip

_LARGE, _BITS = 1 << 40, 64  # of a number that is computed with; of an exponent
_ARITHMETIC: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Pow: lambda base, exponent: base ** exponent if 0 <= exponent < _BITS else NOTHING,
}  # fmt: skip


@cache
def parsed(expression: str) -> ast.expr:
    return ast.parse(expression, mode="eval").body


@cache
def unparsed(node: ast.AST) -> str:
    """The text of a node of `parsed`, which are the same ones in each step."""
    return ast.unparse(node)


def value_of(node: ast.expr, spaces: Spaces) -> Any:
    """The object; NOTHING if there is none, or if it cannot be read."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return next((space[name] for space in spaces if name in space), NOTHING)
        case ast.Attribute(value=owner, attr=name):
            whole = value_of(owner, spaces)
            return NOTHING if whole is NOTHING else attribute(whole, name)
        case ast.Subscript(value=container, slice=key):
            return _element(value_of(container, spaces), value_of(key, spaces))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            number = value_of(operand, spaces)
            return -number if type(number) in (int, float) else NOTHING
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            numbers = value_of(left, spaces), value_of(right, spaces)
            known = all(type(one) is int and abs(one) < _LARGE for one in numbers)
            return _ARITHMETIC[type(op)](*numbers) if known else NOTHING
    return NOTHING


def truth_of(node: ast.expr, spaces: Spaces, unsteady: Collection[str] = ()) -> bool | None:
    """Whether a test holds; None if that cannot be read, or if it depends on one of the `unsteady` expressions."""
    match node:
        case ast.BoolOp(op=op, values=parts):
            known = [truth_of(one, spaces, unsteady) for one in parts]
            decisive = isinstance(op, ast.Or)
            return decisive if decisive in known else None if None in known else not decisive
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            holds = truth_of(operand, spaces, unsteady)
            return None if holds is None else not holds
    parts = [node.left, *node.comparators] if isinstance(node, ast.Compare) else [node]
    values = [NOTHING if is_unsteady(one, unsteady) else value_of(one, spaces) for one in parts]
    if any(type(one) not in _PLAIN for one in values):
        return None
    if not isinstance(node, ast.Compare):
        return bool(values[0])
    compare = _COMPARISONS.get(type(node.ops[0])) if len(node.ops) == 1 else None
    try:
        return None if compare is None else bool(compare(*values))
    except TypeError:
        return None


def is_unsteady(node: ast.expr, unsteady: Collection[str]) -> bool:
    named = (one for one in ast.walk(node) if isinstance(one, ast.Name | ast.Attribute | ast.Subscript))
    return any(unparsed(one) in unsteady for one in named)


def comparable(value: Any) -> int | str | None:
    """The object as a value that a version can hold."""
    if type(value) is int:
        return value
    if kind := _sequence_of(value):
        return _short(_sampled(kind, value))
    if type(value) in _PLAIN:
        return _short(repr(value))
    if is_a(value, torch.Tensor):
        plain_tensor = type(value) is torch.Tensor and value.layout is torch.strided and value.device.type == "cpu"
        return repr(value.detach().reshape(()).item()) if plain_tensor and value.numel() == 1 else None
    if is_generator(value):
        return _drawing(value)
    if is_a(value, np.generic):
        return repr(value.item())
    if container := container_of(value):
        plain = _leaves(value)
        digest = "" if plain is None else f" ({xxhash.xxh3_64_hexdigest(repr(plain).encode())[:8]})"
        return f"a {type(value).__name__} of {container.__len__(value)}{digest}"
    own = attributes(value)
    if own and not is_of_library(type(value).__module__) and not is_a(value, type):
        plain = _leaves(dict(own))
        if plain is not None:
            return f"a {type(value).__name__} ({xxhash.xxh3_64_hexdigest(repr(plain).encode())[:8]})"
    return None


def unread(value: Any) -> str | None:
    """The kind of a tensor, an array, an iterator, or of a container or an object with tensors, of which `comparable`
    does not read what is in it; None for any other value. An iterator with a `state_dict` is restored, or named with
    what nothing captures."""
    if is_a(value, torch.Tensor, np.ndarray):
        return type(value).__name__ if comparable(value) is None else None
    if type(value).__module__ == "itertools" and not _is_over_data(value):
        return type(value).__name__
    container = container_of(value)
    own = value if container else dict(attributes(value))
    if not own or is_a(value, type, torch.nn.Module) or is_of_library(type(value).__module__):
        return None
    if attribute(type(value), "__next__") is not NOTHING and not is_stateful(value) and comparable(value) is None:
        return type(value).__name__
    size = f" of {container.__len__(value)}" if container else ""
    return f"{type(value).__name__}{size}, with tensors" if has_tensors(own) and _leaves(own) is None else None


def _is_over_data(iterator: Any, depth: int = 3) -> bool:
    """Whether an iterator of itertools takes from an object that is not Python's own, or from a generator."""
    if is_a(iterator, GeneratorType) or type(iterator).__module__ not in ("builtins", "itertools"):
        return True
    return depth > 0 and any(_is_over_data(one, depth - 1) for one in gc.get_referents(iterator))


def has_tensors(value: Any, depth: int = 3) -> bool:
    """Whether a tensor is among the first parts of a container."""
    if is_a(value, torch.Tensor):
        return True
    kind = container_of(value) if depth else None
    parts = () if kind is None else dict.values(value) if kind is dict else kind.__iter__(value)
    inside = [*islice(parts, _MOST)]
    return any(has_tensors(one, depth - 1) for one in inside)


def is_a(value: Any, *kinds: type) -> bool:
    """`isinstance` without a look at `__class__`, which may be a property of the script."""
    return issubclass(type(value), kinds)


def length_of(value: Any) -> int | None:
    """The length of a list or tuple; None for what is none."""
    kind = container_of(value)
    return kind.__len__(value) if kind in (list, tuple) else None


def container_of(value: Any) -> Any:
    """Which of Python's own containers it is, whose methods read it whatever a class of the script overrides."""
    return next((kind for kind in _CONTAINERS if is_a(value, kind)), None)


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({xxhash.xxh3_64_hexdigest(text.encode())[:8]})"


def _leaves(value: Any) -> list[Any] | None:
    """The plain values of a container in order; None if it holds others, or many."""
    found: list[Any] = []
    pending = [iter([value])]
    while pending:
        for one in pending[-1]:
            if kind := _sequence_of(one):
                found.append(_sampled(kind, one))
            elif type(one) in _PLAIN:
                found.append(one)
            elif is_generator(one):
                found.append(_drawing(one))
            elif _is_small(one):
                bytes_of = one.detach().contiguous().view(-1).view(torch.uint8)
                found.append(f"{one.dtype} {tuple(one.shape)} {xxhash.xxh3_64_hexdigest(bytes_of.numpy())}")
            elif (kind := container_of(one)) and kind.__len__(one) <= _MOST and len(found) <= _MOST:
                found.append(type(one).__name__)
                pending.append(_parts(kind, one))
                break
            else:
                return None
            if len(found) > _MOST:
                return None
        else:
            pending.pop()
    return found


def _sequence_of(value: Any) -> Any:
    """Which of Python's own texts and arrays of numbers a value is."""
    return next((kind for kind in _SEQUENCES if type(value) is kind), None)


def _sampled(kind: Any, value: Any) -> str:
    """A text that is not long; else length and digest, of pieces at equal distances if it is large. By copies: while
    another object refers to the memory of an array, the script cannot extend it."""
    size = kind.__len__(value)
    if kind is str and _UUID.fullmatch(value):
        return "a UUID"
    if kind in (str, bytes) and size <= _SMALL:
        return repr(value)
    starts, piece = ((0,), size) if size <= _WHOLE else ((*range(0, size, size // _PIECES), size - _PIECE), _PIECE)
    digest = xxhash.xxh3_64()
    for at in starts:
        part = kind.__getitem__(value, slice(at, at + piece))
        digest.update(part.encode(errors="surrogatepass") if kind is str else bytes(part))
    return f"a {kind.__name__} of {size} ({digest.hexdigest()[:8]})"


def _drawing(generator: Any) -> str:
    return f"a {type(generator).__name__} ({xxhash.xxh3_64_hexdigest(codec.encode(state_of(generator)))[:8]})"


def _is_small(value: Any) -> bool:
    known = type(value) is torch.Tensor and value.device.type == "cpu" and value.layout is torch.strided
    return known and 0 < value.numel() * value.element_size() <= _SMALL


def _parts(kind: Any, value: Any) -> Iterator[Any]:
    if kind is dict:
        return iter([*dict.keys(value), *dict.values(value)])
    parts = list(kind.__iter__(value))
    if kind in (set, frozenset):
        leaves = [_leaves(one) for one in parts]  # no `repr` of an object is called
        return iter([NOTHING] if None in leaves else sorted(leaves, key=repr))
    return iter(parts)


def attributes(value: Any) -> Mapping[str, Any]:
    try:
        own = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return own if type(own) in (dict, MappingProxyType) else dict(dict.items(own))


def attribute(value: Any, name: str) -> Any:
    """An attribute of an object, or what its class has of that name: a property or a function as itself."""
    of_class = is_a(value, type)
    spaces = [] if of_class else [attributes(value)]
    for space in (*spaces, *map(vars, type.mro(value if of_class else type(value)))):
        if name in space:
            found = space[name]
            if type(found) is not MemberDescriptorType:
                return found
            try:
                return found.__get__(value)
            except (AttributeError, TypeError):  # not set yet; read from the class
                return NOTHING
    return NOTHING


def _element(container: Any, key: Any) -> Any:
    try:
        if is_a(container, dict) and type(key) in _PLAIN:
            plain = set(map(type, dict.keys(container))) <= _PLAIN  # others are compared by the script
            return dict.get(container, key, NOTHING) if plain else NOTHING
        if (kind := container_of(container)) in (list, tuple) and type(key) is int:
            return kind.__getitem__(container, key)
    except IndexError:
        pass
    return NOTHING
