"""Which version is restored, and what is lost by it. Pure.

Invariant: the plan names one version that every rank of the job holds complete, the newest such, or none; versions are
never mixed. It opens a new lineage, one more than any rank has seen, so that what was captured after the restored
version can never be combined with what comes now.

In: what every rank's segment says. Out: `RecoveryPlan`, the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..snapshot.slots import Slot, SlotState, Version


@dataclass(frozen=True)
class RankFacts:
    """What a rank's segment says before recovery."""

    rank: int
    slots: tuple[Slot, ...]
    lineage: int
    completed: int

    def holds(self) -> dict[Version, int]:
        """The restorable versions of this rank and the slots they lie in."""
        return {slot.version: slot.index for slot in self.slots if slot.state is SlotState.CLEAN and slot.version}


@dataclass(frozen=True)
class RecoveryPlan:
    """`version` is restored from `tier` into the new `lineage`; None means from the beginning, because of `reason`.

    `completed` is the last iteration whose end every rank had reached; `lost` the iterations to be run again.
    """

    version: Version | None
    tier: str
    lineage: int
    completed: int
    lost: int
    reason: str

    def table(self) -> str:
        """The plan for people."""
        if self.version is None:
            return f"recovery: from the beginning ({self.reason}); lineage {self.lineage}"
        return (
            f"recovery: iteration {self.version.iteration} of lineage {self.version.lineage} "
            f"from the {self.tier} tier; "
            f"{self.completed} were completed, {self.lost} lost; lineage {self.lineage}"
        )


def plan_recovery(facts: Sequence[RankFacts], corrupt: Collection[Version] = ()) -> RecoveryPlan:
    """The newest version that all ranks hold and that is not known to be `corrupt`."""
    held_by_all = set.intersection(*(set(rank.holds()) for rank in facts))
    common = held_by_all - set(corrupt)
    lineage = max(rank.lineage for rank in facts) + 1
    completed = min(rank.completed for rank in facts)
    if common:
        newest = max(common)
        return RecoveryPlan(
            newest, "process", lineage, completed, max(0, completed - newest.iteration), "newest that all ranks hold"
        )
    held = {rank.rank: sorted(rank.holds()) for rank in facts}
    empty = [rank for rank, versions in held.items() if not versions]
    if held_by_all:
        reason = "every version that all ranks hold is corrupt"
    elif len(empty) == len(held):
        reason = "no version was captured before"
    elif empty:
        reason = f"rank {min(empty)} holds no version"
    else:
        reason = "no version is held by all ranks"
    return RecoveryPlan(None, "none", lineage, completed, completed, reason)
