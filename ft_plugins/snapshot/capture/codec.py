"""Encode small state: msgpack with an explicit list of types, never pickle.

Invariant: `decode(encode(state)) == state` with the same types, including tuples and tensors. A type that is not on the
list raises an InventoryError on encoding, with its place in the state. Nesting is limited in both directions, because
each level of tuples takes a decoder of its own and a part of the thread's stack.

Types must match exactly: a subclass that is not on the list (nn.Parameter, a dict of one's own) would be decoded as its
base class, so it is rejected. A named tuple or dataclass is decoded as the class of that name that the program has
already loaded: no module is imported, and no method of the class is called.

In: nested dicts and lists of None, bool, int (any size), float, str, bytes, tuple, named tuple, OrderedDict (with its
attributes: a module's `state_dict` has `_metadata`), defaultdict of a built-in type, Counter, deque, dataclasses that
keep nothing but their fields, torch.Size, numpy arrays and scalars of numbers, and torch CPU tensors. Out: bytes.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import numpy as np
import torch

from ...base.intake import DEPTH, SHOWN
from ...errors import FtError, InventoryError, ProtocolError

_NUMERIC = "biufcmM"  # kinds of numpy dtypes that their name describes; no structured dtypes, no objects
_TUPLE, _ARRAY, _SCALAR, _TENSOR = range(1, 5)
_BIGINT, _MAP, _COUNTER, _ORDERED, _DEFAULT, _NAMED, _SIZE, _DEQUE, _DATACLASS = range(6, 15)  # 5: not used
_FACTORIES = {kind.__name__: kind for kind in (bool, int, float, str, bytes, list, tuple, dict)}  # of a defaultdict
_LEAST, _MOST = -(2**63), 2**64 - 1  # of the integers that msgpack supports
_INTEGER_BITS = 1 << 13  # limit for larger ones: Python converts at most 4300 digits to text and back
_AS_IT_IS = frozenset({type(None), bool, str, bytes, float})
_KEY = object()  # in a Place: the part is itself a key of the container
_ATTRIBUTE = object()  # in a Place: the part is an attribute

Place = tuple[Any, Any] | None  # place of the container and key in it; formatted only for an error


def encode(state: Any) -> bytes:
    """Encode `state`. Raises InventoryError, with the place, for an unknown type or too deep nesting."""
    try:
        return _pack(_plain(state, None, DEPTH))
    except UnicodeEncodeError as error:
        raise InventoryError(f"state: invalid Unicode text cannot be captured as small state ({error})") from error


def require_encodable(state: Any, kind: type[FtError], what: str, remedy: str = "") -> None:
    """Raises an error of this `kind` for what `encode` refuses, with its words between `what` and `remedy`."""
    try:
        encode(state)
    except InventoryError as error:
        raise kind(f"{what}{error}{remedy}") from error


def decode(encoded: bytes) -> Any:
    """Decode the bytes of `encode`. Raises ProtocolError for anything else."""
    left = DEPTH + 1  # a number or tensor in the innermost container is one more level

    def extension(code: int, payload: bytes) -> Any:
        nonlocal left
        if not left:
            raise ProtocolError(f"small state is nested more than {DEPTH} deep")
        left -= 1
        value = unpack(payload)
        left += 1
        match code:
            case _ if code == _TUPLE:
                return tuple(value)
            case _ if code == _ARRAY:
                dtype, shape, raw = value
                return np.frombuffer(raw, dtype=np.dtype(dtype)).reshape(shape).copy()
            case _ if code == _SCALAR:
                dtype, raw = value
                return np.frombuffer(raw, dtype=np.dtype(dtype))[0]
            case _ if code == _TENSOR:
                dtype, shape, raw = value
                flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
                return flat.view(getattr(torch, dtype)).reshape(shape)
            case _ if code == _BIGINT:
                return int(value)
            case _ if code == _MAP:
                return dict(value)
            case _ if code == _COUNTER:
                return Counter(dict(value))
            case _ if code == _ORDERED:
                pairs, attributes = value
                ordered = OrderedDict(pairs)
                vars(ordered).update(attributes)
                return ordered
            case _ if code == _DEFAULT:
                factory, pairs = value
                return defaultdict(None if factory is None else _FACTORIES[factory], pairs)
            case _ if code == _NAMED:
                return _named_tuple(*value)
            case _ if code == _SIZE:
                return torch.Size(value)
            case _ if code == _DEQUE:
                most, elements = value
                return deque(elements, most)
            case _ if code == _DATACLASS:
                return _dataclass(*value)
        raise ProtocolError(f"small state contains an extension of unknown kind {code}")

    def unpack(payload: bytes) -> Any:
        return msgpack.unpackb(payload, ext_hook=extension, strict_map_key=False, raw=False)

    try:
        return unpack(encoded)
    except ProtocolError:
        raise
    except Exception as error:
        reason = str(error)[:SHOWN]
        raise ProtocolError(f"small state cannot be decoded ({len(encoded)} bytes): {reason}") from error


def _pack(plain: Any) -> bytes:
    return bytes(msgpack.packb(plain, use_bin_type=True, strict_types=True))


def _extension(code: int, payload: Any) -> msgpack.ExtType:
    return msgpack.ExtType(code, _pack(payload))


def _plain(value: Any, place: Place, left: int) -> Any:
    """`value` with every type that msgpack lacks replaced by an extension. On the step path: common types first."""
    kind = type(value)
    if kind in _AS_IT_IS:
        return value
    if kind is int:
        return value if _is_word(value) else _extension(_BIGINT, _digits(value, place))
    if not left:
        raise InventoryError(f"{_shown(place)}: nested more than {DEPTH} deep; flatten it in the adapter")
    if kind is dict:
        if all(type(key) is str or _is_word(key) for key in value):
            return {key: _plain(part, (place, key), left - 1) for key, part in value.items()}
        return _extension(_MAP, _pairs(value, place, left - 1))
    if kind is list:
        return _parts(value, place, left - 1)
    if kind is tuple:
        return _extension(_TUPLE, _parts(value, place, left - 1))
    if kind is torch.Tensor:
        dense = value.detach().cpu().contiguous()
        raw = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
        return _extension(_TENSOR, [str(dense.dtype).removeprefix("torch."), list(dense.shape), raw])
    if kind is np.ndarray and value.dtype.kind in _NUMERIC + "SU":
        return _extension(_ARRAY, [value.dtype.str, list(value.shape), value.tobytes()])
    if isinstance(value, np.generic) and value.dtype.kind in _NUMERIC:
        return _extension(_SCALAR, [value.dtype.str, value.tobytes()])
    if kind is Counter:
        return _extension(_COUNTER, _pairs(value, place, left - 1))
    if kind is OrderedDict:
        attributes = vars(value).items()
        plain = {key: _plain(part, ((place, key), _ATTRIBUTE), left - 1) for key, part in attributes}
        return _extension(_ORDERED, [_pairs(value, place, left - 1), plain])
    if kind is defaultdict and (value.default_factory is None or value.default_factory in _FACTORIES.values()):
        factory = value.default_factory and value.default_factory.__name__
        return _extension(_DEFAULT, [factory, _pairs(value, place, left - 1)])
    if kind is torch.Size:
        return _extension(_SIZE, list(value))
    if isinstance(value, tuple) and _loaded(kind.__module__, kind.__qualname__) is kind and _fields(kind):
        parts = _parts(value, place, left - 1)
        return _extension(_NAMED, [kind.__module__, kind.__qualname__, list(_fields(kind)), parts])
    if kind is deque:
        return _extension(_DEQUE, [value.maxlen, _parts(value, place, left - 1)])
    if (names := plain_fields(value)) and _loaded(kind.__module__, kind.__qualname__) is kind:
        held = [_plain(getattr(value, each), ((place, each), _ATTRIBUTE), left - 1) for each in names]
        return _extension(_DATACLASS, [kind.__module__, kind.__qualname__, list(names), held])
    raise InventoryError(
        f"{_shown(place)}: a {kind.__module__}.{kind.__qualname__} cannot be captured as small state; "
        "convert it to plain values, tensors or arrays in the adapter"
    )


def _parts(value: Sequence[Any], place: Place, left: int) -> list[Any]:
    if set(map(type, value)) == {int} and min(value) >= _LEAST and max(value) <= _MOST:
        return list(value)  # a fast path: Python's generator has 625 integers
    return [_plain(part, (place, i), left) for i, part in enumerate(value)]


def _pairs(value: Mapping[Any, Any], place: Place, left: int) -> list[list[Any]]:
    return [[_plain(k, (place, _KEY), left), _plain(v, (place, k), left)] for k, v in value.items()]


def _loaded(module: str, name: str) -> Any:
    """The class of that name, if the program has loaded it at the top level of that module; else None."""
    return vars(sys.modules[module]).get(name) if module in sys.modules else None


def _fields(kind: type) -> tuple[str, ...]:
    """The fields of a class that `namedtuple` has made; () for any other."""
    fields = getattr(kind, "_fields", ())
    return fields if kind.__bases__ == (tuple,) and "__dict__" not in vars(kind) else ()


def plain_fields(value: Any) -> tuple[str, ...]:
    """The fields of an object of a dataclass that keeps nothing else; () for any other."""
    fields = tuple(getattr(type(value), "__dataclass_fields__", ()))
    whole = hasattr(value, "__dict__") and vars(value).keys() == {*fields} and not hasattr(value, "__del__")
    return fields if whole else ()


def _dataclass(module: str, name: str, fields: list[str], held: list[Any]) -> Any:
    kind = _loaded(module, name)
    if not (isinstance(kind, type) and [*getattr(kind, "__dataclass_fields__", ())] == fields):
        raise ProtocolError(
            f"small state contains a {module}.{name}, which the program does not have with these fields"
        )
    made: Any = object.__new__(kind)
    vars(made).update(zip(fields, held, strict=True))
    return made


def _named_tuple(module: str, name: str, fields: list[str], parts: list[Any]) -> Any:
    kind = _loaded(module, name)
    if not (isinstance(kind, type) and issubclass(kind, tuple) and _fields(kind) == tuple(fields)):
        raise ProtocolError(
            f"small state contains a {module}.{name}, which the program does not have with these fields"
        )
    return tuple.__new__(kind, parts)


def _digits(value: int, place: Place) -> str:
    if value.bit_length() > _INTEGER_BITS:
        raise InventoryError(f"{_shown(place)}: an integer of {value.bit_length()} bits; at most {_INTEGER_BITS} fit")
    return str(value)


def _shown(place: Place) -> str:
    """A place as Python writes it: state['rng'][3]."""
    if place is None:
        return "state"
    whole, key = place
    if key is _ATTRIBUTE and whole is not None:
        return f"{_shown(whole[0])}.{whole[1]}"
    return _shown(whole) + (" key" if key is _KEY else f"[{key!r}]")


def _is_word(value: Any) -> bool:
    """Whether msgpack supports it as an integer. Subclasses of int, such as bool, do not qualify."""
    return type(value) is int and _LEAST <= value <= _MOST
