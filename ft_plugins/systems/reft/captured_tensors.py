"""Say which tensor differs between captured state and a job that it does not belong to. Pure.

A fingerprint has to fit into a header, so it has a digest of all tensors; the manifest of each version names them.

Invariant: only what is certain is said. A rank captures a share of what its replicas hold, so a tensor is new only if
no share has it, and all shares are known.

In: manifests of a node's ranks, the rank's own first; the rank's inventory. Out: a sentence; '' for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...base.outside_values import shown
from ...model.inventory import Inventory, Item, Role
from ...snapshot.capture.manifest import REPLICATED, Manifest


def changed_tensor(captured: Sequence[Manifest], now: Inventory) -> str:
    """The first tensor by name that has changed, is gone or is new; '' if none is known to be."""
    own = captured[0]
    alike = [one for one in captured if one.coordinates == own.coordinates]
    were = {
        tensor.name: tensor
        for one in reversed(alike)
        for tensor in one.tensors
        if one is own or tensor.kind == REPLICATED
    }
    are = {item.name: item for item in now.items if item.nbytes and item.role is not Role.COPY}
    found: list[str] = []
    for name in sorted(were.keys() | are.keys()):
        before, after = were.get(name), are.get(name)
        if after is None:
            found.append(f"{_named(before.role if before else '', name)} is gone")
        elif before is None:
            if len(captured) == own.world_size:
                found.append(f"{_named(after.role.value, name)} of {_shape(after)} is new")
        elif (before.dtype, before.whole) != (after.dtype, whole_bytes(after)):
            had = f"{before.whole} bytes of {before.dtype}"
            found.append(f"{_named(before.role, name)} had {had}, and has {whole_bytes(after)}, {_shape(after)}")
    more = f" ({len(found) - 1} more tensors differ)" if len(found) > 1 else ""
    return f"{found[0]}{more}" if found else ""


def whole_bytes(item: Item) -> int:
    """Bytes of the whole tensor of which an item may be a piece."""
    if item.piece is None:
        return item.nbytes
    start, stop, elements = item.piece
    return elements * (item.nbytes // (stop - start))


def _named(role: str, name: str) -> str:
    return f"{role.replace('_', ' ')} {shown(name)}"


def _shape(item: Item) -> str:
    return f"shape {' x '.join(map(str, item.shape)) or 'scalar'} of {item.dtype}"
