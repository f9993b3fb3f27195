"""PAFT's policy: what is done around each update, and whether the replicas of a version differ. Pure.

Invariant: the answers are the same on every rank: they use only the iteration, the turn and what was gathered over all
ranks. No tensor is touched.

In: iteration, turn, verdicts. Out: whether to average, to wait for it, to audit; whether replicas differ.
"""

from __future__ import annotations

from dataclasses import dataclass

from .averaging_times import SyncSchedule, Turn


@dataclass(frozen=True)
class PaftPolicy:
    """PAFT: gradients are reduced in every iteration, so replicas are identical except for faults.

    `schedule` is None if nothing is averaged, `audit_interval` 0 if nothing is compared.
    """

    schedule: SyncSchedule | None
    waits: bool  # PAFT-Sync: averaging ends before training goes on; else it is applied before the next update
    audit_interval: int = 0

    def averages(self, step: int, turn: Turn | None) -> bool:
        """Whether averaging starts after the update of iteration `step`, before which parameters are saved to measure
        the length of the step. `turn` is the schedule's next turn."""
        return turn is not None and turn.at == step

    def audits(self, step: int) -> bool:
        """Whether digests are compared after the update of iteration `step`."""
        return bool(self.audit_interval) and step % self.audit_interval == 0

    def differ(self, step: int, turn: Turn | None, compared: bool | None, diverged: bool) -> bool:
        """Whether the replicas of version `step` differ. `compared`: whether their digests do, None without digests;
        `diverged`: whether the last averaging found that the replicas did."""
        averaged = self.waits and turn is not None and turn.at - turn.interval == step
        return compared if compared is not None else diverged and not averaged
