"""Refuse captured state of an optimizer whose groups have other parameters, or of other tensors, by the name of one.

Invariant: the names are in the small state, which is bounded by the rank's own segment, not in the fingerprint, which
has to fit into a header and into messages. So groups are compared when small state is read; where a segment is refused
before that, its newest small state is read to add the name to the reason.

In: a host, small state or a segment. Out: nothing, or ResumeError.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import FtError, ResumeError
from ...model.host import Grouped, Host
from ...snapshot.capture import codec, manifest
from ...snapshot.segment.segment import Segment
from ...snapshot.segment.slots import SlotState
from .captured_tensors import changed_tensor


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
