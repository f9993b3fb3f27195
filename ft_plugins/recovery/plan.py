"""Which version is restored, and what is lost by it. Pure.

Invariant: the plan names one version that every rank of the job holds complete, the newest such, or none; versions are
never mixed. It opens a new lineage, one more than any rank has seen, so that what was captured after the restored
version can never be combined with what comes now.

In: what every rank's segment says. Out: `RecoveryPlan`, the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..errors import ResumeError
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
    """`version` is restored from `tier` into the new `lineage`.

    None: the framework's own checkpoint of iteration `loaded` stands (tier `storage`), or training starts from the
    beginning (`none`), because of `reason`. `completed` is the last iteration whose end every rank had reached, `lost`
    the iterations to be run again. `state_lost`: there was state that all ranks held, and it cannot be had any more.
    """

    version: Version | None
    tier: str
    lineage: int
    completed: int
    lost: int
    reason: str
    loaded: int = 0
    state_lost: bool = False

    def table(self) -> str:
        """The plan for people."""
        left = f"{self.completed} were completed, {self.lost} lost; lineage {self.lineage}"
        if self.version is not None:
            return (
                f"recovery: iteration {self.version.iteration} of lineage {self.version.lineage} "
                f"from the {self.tier} tier; {left}"
            )
        if self.tier == "storage":
            return f"recovery: iteration {self.loaded} of the framework's own checkpoint ({self.reason}); {left}"
        return f"recovery: from the beginning ({self.reason}); lineage {self.lineage}"


def plan_recovery(facts: Sequence[RankFacts], corrupt: Collection[Version] = ()) -> RecoveryPlan:
    """The newest version that all ranks hold and that is not known to be `corrupt`."""
    held_by_all = set.intersection(*(set(rank.holds()) for rank in facts))
    common = held_by_all - set(corrupt)
    lineage = max(rank.lineage for rank in facts) + 1
    completed = min(rank.completed for rank in facts)
    if common:
        newest = max(common)
        lost = max(0, completed - newest.iteration)
        return RecoveryPlan(newest, "process", lineage, completed, lost, "newest that all ranks hold")
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
    # a rank that holds two versions began the second when all ranks had the first (the fence): that one is gone
    state_lost = bool(held_by_all) or any(len(versions) > 1 for versions in held.values())
    return RecoveryPlan(None, "none", lineage, completed, completed, reason, state_lost=state_lost)


def choose_source(plan: RecoveryPlan, mode: str, loaded: int) -> RecoveryPlan:
    """`plan` as `--ftp-resume` and the framework's own checkpoint of iteration `loaded` (0: none) have it.

    With both at hand the larger iteration wins. Raises ResumeError when what was asked for is not there, and instead of
    a silent start from the beginning where there was state: nothing is void before the user has said so.
    """
    if mode == "storage" and not loaded:
        raise ResumeError(
            "--ftp-resume storage was asked for, but the framework has loaded no checkpoint; "
            "name one by its own flags (Megatron-LM: --load), or --ftp-resume auto takes what is in memory"
        )
    if mode == "memory" and plan.version is None:
        raise ResumeError(f"--ftp-resume memory was asked for, but {plan.reason}; --ftp-resume auto starts without")
    if mode in ("auto", "memory"):
        if plan.version is not None and plan.version.iteration >= loaded:
            return plan
        if plan.state_lost and not loaded:
            raise ResumeError(
                f"the state in memory cannot be restored ({plan.reason}; were ranks moved between nodes?); "
                "start again as before to try once more, --ftp-resume fresh starts from the beginning"
            )
        why = plan.reason if plan.version is None else f"newer than version {plan.version.iteration} in memory"
    else:
        why = f"--ftp-resume {mode}"
    lost = max(0, plan.completed - loaded)
    return RecoveryPlan(None, "storage" if loaded else "none", plan.lineage, plan.completed, lost, why, loaded)
