"""Events of one rank of REFT, and its lines in the job's log.

Invariant: nothing is written in the step path: a fence's wait is reported later, by the capture thread.

In: plans, sealed captures, errors, the alarms of the node's SMP. Out: events; lines on standard output and error.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from ...base.intake import Text, read_json
from ...errors import BudgetError, CorruptHeaderError, CorruptSlotError, FtError, printable
from ...events import Events, EventType, catalogue, say
from ...recovery.nodes import JobNodes
from ...recovery.recovery_plan import RecoveryPlan
from ...redundancy.exchange_plan import positions
from ...redundancy.node_kinds import SHOWN, grouped, more_kinds, node_label, node_lines, runs, shortened
from ...snapshot.segment.shape import Shape
from ...snapshot.segment.slots import Commit, Version
from ...transport.protocol import ALARM

_ALARMS = TypeAdapter(dict[Text, Text])
_CAPTURES = 9  # recent captures, whose median is the expected duration of one


class ReftReports:
    """The reports of one rank."""

    def __init__(self, events: Events, run_dir: Path | None) -> None:
        """`run_dir`: where the SMP writes its alarms, for the rank of a node that prints them; None for the others."""
        self._events = events
        self._alarms = run_dir / ALARM if run_dir is not None else None
        self._printed: dict[str, str] = {}  # the last alarm by subject
        self._waits: list[tuple[int, float]] = []  # (iteration, seconds) of fences not yet reported
        self._captures: deque[float] = deque(maxlen=_CAPTURES)  # seconds from the version point to the seal

    @property
    def capture_seconds(self) -> float:
        """From the end of an iteration until its capture is sealed; 0 before the first."""
        return statistics.median(tuple(self._captures) or (0.0,))  # copied first: the capture thread appends

    def attached(self, token: int, shape: Shape, claimed_bytes: int, resident_bytes: int) -> None:
        self._events.emit(
            catalogue.RANK_ATTACHED, token=token, share_bytes=shape.slot_room, budget_bytes=claimed_bytes,
            resident_bytes=resident_bytes,
        )  # fmt: skip

    def not_exportable(self, reason: str) -> None:
        self._events.emit(catalogue.EXPORT_DISABLED, reason=reason)

    def damage(self, error: FtError) -> None:
        """Report a slot or segment that recovery cannot use."""
        match error:
            case CorruptSlotError():
                kind = catalogue.SLOT_CORRUPTED
            case CorruptHeaderError():
                kind = catalogue.SEGMENT_CORRUPTED
            case _:
                kind = catalogue.SLOT_LOST
        self._events.emit(kind, reason=str(error))

    def storage(self, kind: EventType, reason: str) -> None:
        self._events.emit(kind, reason=reason)

    def restored(self, plan: RecoveryPlan, **seconds: float) -> None:
        """Report the end of a recovery. `seconds`: in total, for verification, for loading."""
        known: dict[str, Any] = {"completed": plan.completed, "lost": plan.lost, "run": plan.run}
        known |= {"at_least": True} if plan.at_least and not plan.fresh else {}
        if plan.tier == "none":
            kind = catalogue.TRAINING_STARTED if plan.fresh else catalogue.STATE_LOST
            self._events.emit(kind, reason=plan.reason, **known)
            return
        self._events.emit(
            catalogue.STATE_RESTORED, lineage=plan.version.lineage if plan.version else None,
            iteration=plan.version.iteration if plan.version else plan.loaded, tier=plan.tier, reason=plan.reason,
            **known, **({"mark": plan.mark.word} if plan.mark else {}), **seconds,
        )  # fmt: skip

    def voided(self, since: int, discarded: Sequence[int], tainted: Sequence[int]) -> None:
        """Report versions captured after iteration `since`, which hold a wrong replica: `tainted` ones are pinned."""
        self._events.emit(catalogue.VERSION_VOIDED, since=since, iterations=sorted(discarded))
        if tainted:
            reason = f"snapshots of iterations {sorted(tainted)} hold a wrong replica, but are being sent or written"
            self._events.emit(catalogue.VERSION_TAINTED, iterations=sorted(tainted), reason=reason)

    def checkpoints_voided(self, base: Path, names: Sequence[str]) -> None:
        """Report checkpoints that were renamed because the user went back to before them."""
        if names:
            reason = f"{base}: newer than what --ftp-resume went back to, and now called {', '.join(names)}"
            self._events.emit(catalogue.CHECKPOINT_VOIDED, reason=reason)

    def sealed(self, commit: Commit) -> None:
        """Report a sealed capture. Called on the capture thread."""
        self.report_waits()
        self._captures.append(commit.seconds)
        self._events.emit(
            catalogue.SNAPSHOT_SEALED, lineage=commit.version.lineage, iteration=commit.version.iteration,
            seconds=commit.seconds, bytes=commit.nbytes, slot=commit.slot,
        )  # fmt: skip

    def left_out(self, version: Version) -> None:
        """Report a version that was not captured, because all slots are pinned and there is no memory for another."""
        self._events.emit(catalogue.SNAPSHOT_SKIPPED, lineage=version.lineage, iteration=version.iteration)

    def slot_claimed(self, slots: int, nbytes: int, refused: BudgetError | None) -> None:
        """Report that this rank has `slots` slots with memory now, `nbytes` in all, or why it cannot have more."""
        if refused is None:
            self._events.emit(catalogue.SLOT_CLAIMED, count=slots, bytes=nbytes)
        else:
            self._events.emit(catalogue.SLOT_REFUSED, count=slots, reason=str(refused))
            if self._alarms is not None:
                say(f"memory for another snapshot is lacking: {refused}", alarm=True)

    def record_wait(self, step: int, seconds: float) -> None:
        """Record how long the fence of iteration `step` waited, for `report_waits`."""
        self._waits.append((step, seconds))

    def report_waits(self) -> None:
        waits, self._waits = self._waits, []
        for step, seconds in waits:
            self._events.emit(catalogue.FENCE_WAITED, iteration=step, seconds=seconds)

    def print_alarms(self) -> None:
        if self._alarms is None:
            return
        with contextlib.suppress(OSError, ValueError):
            alarms = read_json(self._alarms, _ALARMS)
            for name, sentence in alarms.items():
                if sentence != self._printed.get(name):
                    say(printable(sentence), alarm=True)
            self._printed = alarms


def protection_table(nodes: JobNodes, claimed: Sequence[tuple[str, int]]) -> str:
    """A table of the nodes that protect each other and the memory that each has `claimed` for that; nodes with equal
    figures once."""
    lines = [nodes.exchange.table() if nodes.exchange else ""]
    names = [name for name, _ in claimed]
    lines += node_lines((f"{size} bytes claimed for two versions of parity and copies" for _, size in claimed), names)
    if rates := list(nodes.links.values())[: len(names)]:
        slowest, fastest = min(range(len(rates)), key=rates.__getitem__), max(range(len(rates)), key=rates.__getitem__)
        lines.append(
            f"  links carry {rates[slowest] * 8e-6:.0f} (node {names[slowest]}) to {rates[fastest] * 8e-6:.0f} "
            f"(node {names[fastest]}) megabits per second, measured"
        )
    return "\n".join(lines)


def budget_table(
    claims: Sequence[tuple[Shape, int]], nodes: Sequence[str], certifies: int = 0, memory: Sequence[int] = ()
) -> str:
    """A table of the memory claimed on each kind of node, by rank and in total; nodes with equal budgets are one.

    `claims[rank]` is the shape of each rank's segment and the number of slots that have memory, `nodes[rank]` its node.
    A slot holds the captured share, its digests and small state, in whole pages; a parity slot the parity and its
    digests. `certifies`: iterations between two versions whose replicas are compared, 0 for none. `memory`: bytes of
    memory of each rank's node, if known.
    """
    names, ranks = positions(nodes)
    kinds = grouped(tuple(_claim(*claims[r]) for r in there) for there in ranks)
    lines = []
    for kind, places in list(kinds.items())[:SHOWN]:
        each = " each" if len(places) > 1 else ""
        captured = _span([sum(claims[rank][0].data_nbytes for rank in ranks[place]) for place in places])
        parity = [sum(claims[rank][0].parity_nbytes for rank in ranks[place]) for place in places]
        content = f"{captured} bytes captured"
        content += f" and {_span(parity)} of parity computed from replicas" if any(parity) else ""
        smallest = min(memory[ranks[place][0]] for place in places) if memory else 0
        total, most = sum(claim.total for claim in kind), sum(claim.most for claim in kind)
        lines.append(
            f"host memory for protection on {node_label(places, names)}: {total} bytes{each} "
            f"({_sized(total, smallest)}) for {content}, all of it resident"
        )
        for claim, members in grouped(kind).items():
            if len(places) == 1:
                members = [ranks[places[0]][member] for member in members]
            label = f"rank{'s' * (len(members) > 1)} {', '.join(shortened(runs(members)))}"
            label += " of each, counted on the node" if len(places) > 1 else ""
            rooms = f"{claim.slots} slots x {claim.slot_room} bytes"
            rooms += f" and {claim.parity_slots} of parity x {claim.parity_room} bytes" if claim.parity_slots else ""
            lines.append(f"  {label}: {rooms}{' each' if len(members) > 1 else ''}")
        if most > total:
            slots = _span([claim.most_slots for claim in kind])
            lines.append(
                f"  up to {slots} slots, {most} bytes ({_sized(most, smallest)}), if versions are still being sent "
                "when the next one is captured"
            )
    lines += more_kinds(list(kinds.values())[SHOWN:])
    if certifies:
        which = "every iteration" if certifies == 1 else f"every {certifies} iterations"
        lines.append(f"  one slot of each rank keeps the newest snapshot whose replicas agreed; compared {which}")
    return "\n".join(lines)


def _sized(nbytes: int, memory: int) -> str:
    """Bytes in GiB, and as a part of a node's memory if that is known."""
    return f"{nbytes / (1 << 30):.2f} GiB" + (f", {nbytes / memory:.1%} of a node's memory" if memory else "")


class _Claim(NamedTuple):
    """What a rank has claimed, in bytes and slots, and the most that it may."""

    total: int
    slots: int
    slot_room: int
    parity_slots: int
    parity_room: int
    most: int
    most_slots: int


def _claim(shape: Shape, slots: int) -> _Claim:
    parity = len(shape.parity_indices)
    room = shape.parity_room if parity else 0
    return _Claim(shape.bytes_with(slots), slots, shape.slot_room, parity, room, shape.total, shape.slots)


def _span(numbers: Sequence[int]) -> str:
    """'5', or '5 to 7'."""
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"
