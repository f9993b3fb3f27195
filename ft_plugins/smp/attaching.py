"""What a trainer tells when it attaches, checked: a shape, plain values, and whether a segment holds this job's state.

Invariant: state that belongs to another job, or was laid out otherwise, is never taken for this job's.
In: fields of a request. Out: a `Shape`, a fingerprint; errors that say what differs and what to do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from pydantic import TypeAdapter

from ..errors import ProtocolError, ResumeError
from ..intake import Unfit, require_shallow, shown, typed
from ..snapshot.segment import Segment
from ..snapshot.shape import Shape

_SHAPE = TypeAdapter(Shape)
_FIELDS = {field.name for field in fields(Shape)}


def shape_of(rank: int, told: Mapping[str, Any]) -> Shape:
    """The segment that a rank wants. Raises ProtocolError."""
    try:
        if set(told) != _FIELDS:
            raise Unfit(f"expected {', '.join(sorted(_FIELDS))}, found {shown(sorted(map(str, told)))}")
        found = typed(_SHAPE, told)
        if found.parity_nbytes > found.nbytes:
            raise Unfit(f"{found.parity_nbytes} bytes of parity in {found.nbytes}")
    except Unfit as error:
        raise ProtocolError(f"rank {rank}: attach with a shape that cannot be used: {error}") from error
    return found


def plain(rank: int, fingerprint: dict[str, Any]) -> dict[str, Any]:
    """The fingerprint as a segment's header gives it back. Raises ProtocolError for more than plain values."""
    try:
        require_shallow(fingerprint)
        return dict(json.loads(json.dumps(fingerprint)))
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"rank {rank}: the job's fingerprint holds more than plain values: {error}") from error


def require_same_job(rank: int, found: Segment, shape: Shape, fingerprint: dict[str, Any]) -> None:
    """Raises ResumeError when a segment holds the state of another job, or of this job laid out otherwise."""
    before = found.fingerprint
    if before != fingerprint:
        differing = ", ".join(
            f"{key}: {shown(before.get(key))} -> {shown(fingerprint.get(key))}"
            for key in sorted(before.keys() | fingerprint.keys())
            if before.get(key) != fingerprint.get(key)
        )
        remedy = (
            "--ftp-resume fresh drops it, --ftp-resume storage loads from disk instead, another --ftp-job keeps both"
        )
        raise ResumeError(f"rank {rank}: the state in memory belongs to another job ({differing}); {remedy}")
    same = replace(found.shape, small_nbytes=0) == replace(shape, small_nbytes=0)
    if same and 2 * found.shape.small_nbytes < shape.small_nbytes:  # twice what is needed is asked for
        raise ResumeError(
            f"rank {rank}: there is room for {found.shape.small_nbytes} bytes of small state in memory, now "
            f"{shape.small_nbytes // 2} are needed at least; --ftp-resume fresh drops it"
        )
    if not same:
        raise ResumeError(
            f"rank {rank}: the state in memory was laid out otherwise ({found.shape.nbytes} bytes in "
            f"{found.shape.buckets} buckets, {found.shape.slots} slots, "
            f"now {shape.nbytes} in {shape.buckets}, {shape.slots} slots: nodes, bucket size or model changed); "
            "--ftp-resume fresh drops it"
        )
