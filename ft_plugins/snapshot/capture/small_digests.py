"""Digests of a host's small state by what it means, for the ledger.

Invariant: equal state has equal digests, in every process: nothing depends on addresses, hash seeds or the order of
keys. Of a large mapping, such as the numbers that an optimizer keeps for each parameter, MANY entries at equal steps
are digested: this is in the step path. The data position has no digest: what it leads to, the inputs, is compared.

In: the small state of any host. Out: one digest for each `LedgerPart` of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from ..segment.ledger import LedgerPart

_RERUN = "rerun_state_machine"  # among Megatron's counters: the largest losses so far
_PART_OF = {
    **dict.fromkeys(("torch", "cuda", "tracker"), LedgerPart.GENERATORS),
    **dict.fromkeys(("python", "numpy"), LedgerPart.LIBRARY),
    "groups": LedgerPart.GROUPS,
    "counters": LedgerPart.COUNTERS,
    **dict.fromkeys(("scalars", "scalers", "scaler", "scheduler", "own_schedulers", _RERUN), LedgerPart.SCHEDULE),
}
# how the loop reads, what the restore itself sets, and what it has compared
_NOT_COMPARED = {"position", "pace", "silent", "modes", "graded", "members", "loop"}
MANY = 64  # entries
_RNG = "rng"  # the generators, in the small state of Megatron and DeepSpeed
_CALLER = "caller"  # what the script's own functions return, in the small state of loops of plain torch


def small_digests(small: Mapping[str, Any]) -> dict[LedgerPart, int]:
    """The digests of a small state. Empty parts have none."""
    hashes: dict[LedgerPart, xxhash.xxh3_64] = {}
    for key, value in _entries(small):
        part = _PART_OF.get(key, LedgerPart.OWN)
        for piece in pieces(value):
            hashes.setdefault(part, xxhash.xxh3_64()).update(piece)
    return {part: running.intdigest() for part, running in hashes.items()}


def drawn() -> int:
    """A digest of torch's own generator on the CPU."""
    return xxhash.xxh3_64_intdigest(torch.get_rng_state().numpy().tobytes())


def _entries(small: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in sorted(small.items()):
        if key == "counters" and isinstance(value, Mapping) and _RERUN in value:
            yield key, {name: one for name, one in value.items() if name != _RERUN}
            yield _RERUN, value[_RERUN]
        elif key == _RNG and isinstance(value, Mapping):
            yield from _entries(value)
        elif key == _CALLER and isinstance(value, Mapping):
            yield from _entries({inner: part for inner, part in value.items() if inner != _CALLER})
            yield from [("own", value[_CALLER])] if _CALLER in value else []
        elif key not in _NOT_COMPARED and value is not None:
            yield key, value


def pieces(value: Any) -> Iterator[bytes]:
    """The bytes of a value, with types and lengths, so that different values have different bytes."""
    match value:
        case torch.Tensor() if not value.dim():
            yield f"t{value.dtype}{value.item()!r}".encode()
        case torch.Tensor():
            dense = value.detach().cpu().contiguous()
            yield f"t{dense.dtype}{tuple(dense.shape)}".encode()
            yield dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
        case np.ndarray():
            yield f"a{value.dtype}{value.shape}".encode()
            yield value.tobytes()
        case Mapping():
            yield b"m%d" % len(value)
            entries = sorted(value.items(), key=lambda entry: str(entry[0]))
            for key, part in entries if len(entries) <= MANY else entries[:: -(-len(entries) // MANY)]:
                yield f"k{key!r}".encode()
                yield from pieces(part)
        case list() | tuple():
            yield b"l%d" % len(value)
            if len(value) > MANY and all(type(part) is int for part in value):  # the state of Python's generator
                small = min(value) >= -(1 << 63) and max(value) < 1 << 63
                yield np.array(value, dtype=np.int64).tobytes() if small else repr(value).encode()
            else:
                for part in value:
                    yield from pieces(part)
        case float():
            yield f"f{value.hex()}".encode()
        case bytes() | bytearray():
            yield b"b" + bytes(value)
        case _:
            yield f"{type(value).__name__}{value!r}".encode()
