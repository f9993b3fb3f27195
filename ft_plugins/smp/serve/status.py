"""What an SMP reports about its node: a signal in one word (as in REFT) and its segments; and how to read that report.

Invariant: facts of this moment only; nothing is decided by them. Silence alone decides which nodes are lost
(`tree_state`, `SnapshotProcess.check_trainers`).

In: segments, the node tier's status; a status. Out: `Signal`, plain values; versions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

from ...snapshot.segment.slots import Mark, SlotState, Version, marks_of, recovery_order
from ..watch import liveness

if TYPE_CHECKING:  # the command line imports this module, and not numpy
    from ...snapshot.segment.segment import Segment


class Signal(str, Enum):
    """The state of a node."""

    HEALTHY = "HEALTHY"  # its trainers live; nothing was captured yet
    SNAP = "SNAP"  # a version is being captured, or sent to other nodes
    CLEAN = "CLEAN"  # the last captured version is complete, and committed if nodes protect each other
    UNHEALTHY = "UNHEALTHY"  # a trainer has died or is stopped
    OFFLINE = "OFFLINE"  # its SMP does not answer


def signal_of(segments: Collection[Segment], tier: Mapping[str, Any], trainers_work: bool) -> Signal:
    """The signal of this node, whose SMP answers; the worst applies. `tier` is the status of its node tier."""
    owners = [segment.header.owner for segment in segments if segment.header.attached and segment.header.owner[1]]
    if not (trainers_work and all(liveness.started(pid) == began for pid, began in owners)):
        return Signal.UNHEALTHY
    slots = [slot for segment in segments for slot in segment.slots()]
    if tier["exchange"] or any(slot.state is SlotState.DIRTY and slot.version for slot in slots):
        return Signal.SNAP
    complete = tier["committed"] if tier["nodes"] else any(slot.state is SlotState.CLEAN for slot in slots)
    return Signal.CLEAN if complete else Signal.HEALTHY


def described(rank: int, segment: Segment) -> dict[str, Any]:
    """A segment with its slots, as plain values."""
    return {
        "rank": rank,
        "path": str(segment.path),
        "bytes": segment.claimed_bytes,
        "resident_bytes": segment.resident_bytes,
        "owner_pid": segment.header.owner[0],
        "attached": segment.header.attached,
        "completed": segment.header.completed,
        "held_at": segment.header.held_at,
        "ending": segment.header.ending,
        "lineage": segment.header.opened.lineage,
        "lineage_token": segment.header.opened.token,
        "slots": _slots(segment),
    }


def _slots(segment: Segment) -> list[dict[str, Any]]:
    return [
        {
            "state": slot.state.name,
            "lineage": slot.version.lineage if slot.version else None,
            "iteration": slot.version.iteration if slot.version else None,
            **({"mark": slot.mark.word} if slot.mark else {}),
        }
        for slot in segment.slots()
    ]


def newest_complete(segments: Iterable[Segment]) -> Version | None:
    """`newest_common` of this node's segments."""
    return newest_common({"segments": [{"attached": each.header.attached, "slots": _slots(each)} for each in segments]})


def completed_by_all(segments: Collection[Segment], token: int) -> int | None:
    """The last iteration that all ranks of the incarnation `token` have completed; None before they all have opened
    its lineage."""
    attached = [segment for segment in segments if segment.header.attached]
    begun = bool(attached) and all(segment.header.opened.token == token for segment in attached)
    return min(segment.header.completed for segment in attached) if begun else None


def any_failed(segments: Iterable[Segment]) -> bool:
    """Whether a trainer that had attached has ended, and not in order."""
    owners = [segment.header.owner for segment in segments if segment.header.attached and segment.header.owner[1]]
    return any(liveness.started(pid) != began for pid, began in owners)


def progress_of(status: Mapping[str, Any], token: int) -> tuple[int, int] | None:
    """From which iteration the incarnation `token` was resumed (0: from the beginning), and the last one that all of
    its ranks here have completed. None before all of them have opened its lineage. By an SMP's `status`."""
    attached = [segment for segment in status["segments"] if segment["attached"]]
    base = status["history"]["base"]
    if not attached or base is None or any(segment["lineage_token"] != token for segment in attached):
        return None
    return base, max(base, min(segment["completed"] for segment in attached))


def leaves_at(status: Mapping[str, Any]) -> tuple[int | None, int]:
    """The iteration at which this node can leave the job, None for none: it was committed in the running incarnation,
    no rank here has completed a later one, and one waits there, so that none of the job completes another. And where a
    rank here waits, 0 if none does. By an SMP's `status`."""
    attached = [segment for segment in status["segments"] if segment["attached"]]
    completed = max((segment["completed"] for segment in attached), default=0)
    lineage = max((segment["lineage"] for segment in attached), default=0)
    held_at = max((segment["held_at"] for segment in attached), default=0)
    leaves = held_at == completed and status["node_tier"]["committed"] == [lineage, completed]
    return (completed if leaves else None), held_at


def newest_common(status: Mapping[str, Any]) -> Version | None:
    """The newest version that every rank of this node holds complete, by an SMP's `status`; None if there is none.
    Preferred versions come first, as in a recovery.

    The ranks are those of the incarnation that runs or ran last: an earlier, larger one may have left segments that no
    longer change. Before any rank has attached, all ranks are included. Versions of two lineages are never mixed.
    """
    return next(iter(common(status)), None)


def common(status: Mapping[str, Any]) -> list[Version]:
    """The versions that every rank of this node holds complete, in the order in which a recovery tries them."""
    attached = [segment for segment in status["segments"] if segment["attached"]] or status["segments"]
    complete = [
        {Version(slot["lineage"], slot["iteration"]) for slot in segment["slots"] if slot["state"] == "CLEAN"}
        for segment in attached
    ]
    held = set.intersection(*complete) if complete else set()
    return recovery_order(held, marks_in(status))


def holds_nothing(status: Mapping[str, Any]) -> bool:
    """Whether the SMP with this `status` has nothing that a job could resume from."""
    snapshots = any(slot["state"] == "CLEAN" for segment in status["segments"] for slot in segment["slots"])
    # another version of ft_plugins may read the refused segments, a job of a previous size the segments of that size
    other = status["refused"] or status["previous_sizes"] or status["node_tier"].get("released")
    return not snapshots and not other


def marks_in(status: Mapping[str, Any]) -> dict[Version, Mark]:
    """The audit's verdicts on the versions that this node holds complete, by an SMP's `status`."""
    clean = [slot for segment in status["segments"] for slot in segment["slots"] if slot["state"] == "CLEAN"]
    return marks_of(
        (Version(slot["lineage"], slot["iteration"]), Mark[slot.get("mark", Mark.NONE.name).upper()]) for slot in clean
    )
