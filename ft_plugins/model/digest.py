"""A rank's training state as digests, to compare two runs bit for bit.

Invariant: equal only if every byte of every item and every value of the small state is equal; of the latter not whether
a key was a number, a sequence a tuple, a number one of numpy's. In: a `Host` at a version point. Out: plain values for
JSON; floats as hexadecimal text, tensors and arrays as xxh3 digests.
"""

from __future__ import annotations

import json
from enum import Enum
from typing import Any

import numpy as np
import torch
import xxhash

from .host import Host

WALL_TIMES = "wall times"  # key of what is captured, but differs from run to run: not compared
SHOWN_PARTS = 64  # of a sequence
SHOWN_ELEMENTS = 8  # tensors up to this size also show their values


def state_digest(host: Host) -> dict[str, Any]:
    """`{"items": {name: {dtype, shape, xxh3, values?}}, "small": ...}` of this rank."""
    tensors = host.tensors()
    present = {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}  # made by updates yet
    items = {item.name: tensor_digest(present[item.name]) for item in host.inventory().items if item.name in present}
    return {"items": items, "small": readable(dict(host.small_state()))}


def tensor_digest(tensor: torch.Tensor) -> dict[str, Any]:
    """dtype, shape and digest of the bytes, and the values of a small tensor."""
    dense = tensor.detach().cpu().contiguous()
    summary: dict[str, Any] = {
        "dtype": str(dense.dtype).removeprefix("torch."),
        "shape": list(dense.shape),
        "xxh3": xxhash.xxh3_64_hexdigest(dense.reshape(-1).view(torch.uint8).numpy().data) if dense.numel() else "",
    }
    if 0 < dense.numel() <= SHOWN_ELEMENTS:
        summary["values"] = [readable(value) for value in dense.reshape(-1).tolist()]
    return summary


def readable(value: Any) -> Any:
    """`value` in JSON without loss: floats are not rounded; a sequence of more than SHOWN_PARTS becomes a digest."""
    match value:
        case Enum():
            return value.name
        case bool() | int() | str() | None:
            return value
        case float():
            return value.hex()
        case bytes():
            return {"bytes": len(value), "xxh3": xxhash.xxh3_64_hexdigest(value)}
        case torch.Tensor():
            return tensor_digest(value)
        case np.ndarray():
            raw = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8) if value.size else torch.empty(0)
            return {**tensor_digest(raw), "dtype": value.dtype.str, "shape": list(value.shape)}
        case dict():
            value = {key: part for key, part in value.items() if key != WALL_TIMES}
            texts = {str(key) for key in value}
            return {str(key) if len(texts) == len(value) else repr(key): readable(part) for key, part in value.items()}
        case list() | tuple():
            parts = [readable(part) for part in value]
            if len(parts) > SHOWN_PARTS:
                return {"length": len(parts), "xxh3": xxhash.xxh3_64_hexdigest(json.dumps(parts).encode())}
            return parts
    return readable(value.item()) if isinstance(value, np.generic) else repr(value)
