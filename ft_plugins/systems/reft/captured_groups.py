"""Refuse captured state of an optimizer whose groups have other parameters, or of other tensors, by the name of one.

Invariant: the names are in the small state, which is bounded by the rank's own segment, not in the fingerprint, which
has to fit into a header and into messages. So groups are compared when small state is read; where a segment is refused
before that, its newest small state is read to add the name to the reason. The fingerprint has a digest of all tensors;
the manifest of each version names them. Only what is certain is said: a rank captures a share of what its replicas
hold, so a tensor is new only if no share has it, and all shares are known.

In: a host, small state or a segment. Out: nothing, or ResumeError.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...base.outside_values import shown
from ...errors import FtError, ResumeError
from ...model.host import Grouped, Host
from ...model.inventory import Inventory, Item, Role
from ...snapshot.capture import codec, manifest
from ...snapshot.capture.manifest import REPLICATED, Manifest
from ...snapshot.segment.segment import Segment
from ...snapshot.segment.slots import SlotState


def require_same_groups(host: Host, small: Mapping[str, Any]) -> None:
    """Raises ResumeError."""
    if difference := _difference(host, small):
        raise ResumeError(f"rank {host.rank}: {difference}")


@contextlib.contextmanager
def naming_parameters(host: Host, path: Path, paths: Sequence[Path]) -> Iterator[None]:
    """Within it, a ResumeError about the segment at `path` also names a parameter of another group or a tensor that
    differs, if there is one. `paths`: the segments of all ranks of this node."""
    try:
        yield
    except ResumeError as error:
        difference = ""
        with contextlib.suppress(FtError, OSError):  # whatever else is wrong with a segment is not the reason
            if small := _newest(path):
                others = [found for each in paths if each != path and (found := _newest(each))]
                manifests = [manifest.read(one[0]) for one in (small, *others)]
                difference = _difference(host, codec.decode(small[1])) or changed_tensor(manifests, host.inventory())
        if not difference:
            raise
        raise ResumeError(f"rank {host.rank}: {difference}. Therefore {error}") from error


def _difference(host: Host, small: Mapping[str, Any]) -> str:
    return host.regrouped(small) if small and isinstance(host, Grouped) else ""


def _newest(path: Path) -> tuple[bytes, bytes] | None:
    """The manifest and the host's small state of the newest version in a segment, encoded; None if there is none."""
    segment = Segment(path)
    try:
        slots = [slot for slot in segment.slots() if slot.state is SlotState.CLEAN]
        versions = {slot.version: slot.index for slot in slots if slot.version is not None}
        return manifest.split(segment.small(versions[max(versions)])) if versions else None
    finally:
        segment.close()


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
