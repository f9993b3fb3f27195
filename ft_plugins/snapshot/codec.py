"""Small state as bytes: msgpack with an explicit list of types, never pickle.

Invariant: `decode(encode(state)) == state` with the same types, tuples and tensors included; a type that is not on the
list is an InventoryError at encoding time that names where in the state it stands.

In: nested dicts and lists of None, bool, int (any size), float, str, bytes, tuple, numpy arrays and scalars, torch CPU
tensors, and members of the enum classes that the caller names. Out: bytes, and back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import msgpack
import numpy as np
import torch

from ..errors import InventoryError, ProtocolError

_TUPLE, _ARRAY, _SCALAR, _TENSOR, _ENUM, _BIGINT, _MAP = range(1, 8)
_WORD = range(-(2**63), 2**64)


def encode(state: Any, enums: Sequence[type[Enum]] = ()) -> bytes:
    """`state` as bytes. Raises InventoryError for a type that is not on the list, naming its place."""
    names = {kind: kind.__name__ for kind in enums}
    return _pack(_plain(state, "state", names))


def decode(encoded: bytes, enums: Sequence[type[Enum]] = ()) -> Any:
    """What `encode` was given. Raises ProtocolError when the bytes are not such an encoding."""
    kinds = {kind.__name__: kind for kind in enums}

    def extension(code: int, payload: bytes) -> Any:
        value = unpack(payload)
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
            case _ if code == _ENUM:
                name, member = value
                return kinds[name][member]
            case _ if code == _BIGINT:
                return int(value)
            case _ if code == _MAP:
                return dict(value)
        raise ProtocolError(f"small state holds an extension of unknown kind {code}")

    def unpack(payload: bytes) -> Any:
        return msgpack.unpackb(payload, ext_hook=extension, strict_map_key=False, raw=False)

    try:
        return unpack(encoded)
    except ProtocolError:
        raise
    except Exception as error:
        raise ProtocolError(f"small state cannot be decoded ({len(encoded)} bytes): {error}") from error


def _pack(plain: Any) -> bytes:
    return bytes(msgpack.packb(plain, use_bin_type=True, strict_types=True))


def _extension(code: int, payload: Any) -> msgpack.ExtType:
    return msgpack.ExtType(code, _pack(payload))


def _plain(value: Any, place: str, enums: Mapping[type[Enum], str]) -> Any:
    """`value` with every type that msgpack lacks replaced by an extension."""
    if isinstance(value, Enum):  # before str and int: an enum may be both
        if type(value) not in enums:
            raise InventoryError(f"{place}: enum {type(value).__name__} is not on the codec's list")
        return _extension(_ENUM, [enums[type(value)], value.name])
    match value:
        case None | bool() | str() | bytes():
            return value
        case np.generic():  # before float: numpy.float64 is a float
            return _extension(_SCALAR, [value.dtype.str, value.tobytes()])
        case int():
            return value if value in _WORD else _extension(_BIGINT, str(value))
        case float():
            return value
        case np.ndarray():
            if value.dtype.hasobject:
                raise InventoryError(f"{place}: a numpy array of objects cannot be captured")
            return _extension(_ARRAY, [value.dtype.str, list(value.shape), value.tobytes()])
        case torch.Tensor():
            dense = value.detach().cpu().contiguous()
            raw = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
            return _extension(_TENSOR, [str(dense.dtype).removeprefix("torch."), list(dense.shape), raw])
        case tuple():
            return _extension(_TUPLE, [_plain(part, f"{place}[{i}]", enums) for i, part in enumerate(value)])
        case list():
            return [_plain(part, f"{place}[{i}]", enums) for i, part in enumerate(value)]
        case dict():
            if all(isinstance(key, (str, int)) and not isinstance(key, (bool, Enum)) for key in value):
                return {key: _plain(part, f"{place}[{key!r}]", enums) for key, part in value.items()}
            pairs = [[_plain(k, f"{place} key", enums), _plain(v, f"{place}[{k!r}]", enums)] for k, v in value.items()]
            return _extension(_MAP, pairs)
    raise InventoryError(
        f"{place}: a {type(value).__module__}.{type(value).__qualname__} cannot be captured as small state; "
        "make it plain values, tensors or arrays in the adapter"
    )
