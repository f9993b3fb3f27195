"""A rank's training state as digests: what two runs must have in common to be called identical, bit for bit.

Invariant: equal exactly when every byte of every item and every value of the small state is equal. In: a `Host` at a
version point. Out: plain values for JSON; floats as hexadecimal text, tensors and arrays as xxh3 digests.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np
import torch
import xxhash

from .host import Host

SHOWN_ELEMENTS = 8  # a tensor of at most so many elements is shown by its values as well


def state_digest(host: Host) -> dict[str, Any]:
    """`{"items": {name: {dtype, shape, xxh3, values?}}, "small": ...}` of this rank."""
    tensors = host.tensors()
    items = {item.name: tensor_digest(tensors[item.name]) for item in host.inventory().items}
    return {"items": items, "small": readable(host.small_state())}


def tensor_digest(tensor: torch.Tensor) -> dict[str, Any]:
    """dtype, shape, digest of the bytes; the values of a small one."""
    dense = tensor.detach().cpu().contiguous()
    found: dict[str, Any] = {
        "dtype": str(dense.dtype).removeprefix("torch."),
        "shape": list(dense.shape),
        "xxh3": xxhash.xxh3_64_hexdigest(dense.reshape(-1).view(torch.uint8).numpy().data) if dense.numel() else "",
    }
    if 0 < dense.numel() <= SHOWN_ELEMENTS:
        found["values"] = [readable(value) for value in dense.reshape(-1).tolist()]
    return found


def readable(value: Any) -> Any:
    """`value` as JSON can say it without loss: no float is rounded, no tuple of many numbers is printed out."""
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
            return {str(key): readable(part) for key, part in value.items()}
        case list() | tuple():
            if len(value) > 64:
                return {"length": len(value), "xxh3": xxhash.xxh3_64_hexdigest(repr(value).encode())}
            return [readable(part) for part in value]
    return readable(value.item()) if isinstance(value, np.generic) else repr(value)
