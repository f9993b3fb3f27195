"""Synchronisation policies: what is done around each update, and what is known of each version's replicas. Pure.

A policy never touches a tensor. It is asked before each update for the actions around it (`StepActions`), and at each
version point for the `Label` of that version.

Invariant: a policy gives the same answers on every rank: it uses only the iteration, the turn and what was gathered
over all ranks.

In: iteration, turn, verdicts. Out: `StepActions`, `Label`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .averaging_times import SyncSchedule, Turn


class Replicas(str, Enum):
    """How the replicas of a version compare."""

    IDENTICAL = "identical"  # one of them can represent all
    UNIQUE = "unique"  # each has state that is lost with it


@dataclass(frozen=True)
class Label:
    """What is known of a version: from digests if `verified`, else what the policy expects."""

    replicas: Replicas
    verified: bool

    @property
    def certified(self) -> bool:
        """Whether its replicas were compared and agreed."""
        return self.verified and self.replicas is Replicas.IDENTICAL

    def __str__(self) -> str:
        return f"{self.replicas.value}, {'compared' if self.verified else 'not compared'}"


@dataclass(frozen=True)
class StepActions:
    """What happens around one update.

    `save_parameters`: parameters are saved before it, to measure the length of its step. `average`: averaging starts
    after it. `waits`: averaging also ends there; otherwise it is applied before the next update. `audit`: digests are
    compared after it.
    """

    save_parameters: bool = False
    average: bool = False
    waits: bool = False
    audit: bool = False


@dataclass(frozen=True)
class PaftPolicy:
    """PAFT: gradients are reduced in every iteration, so replicas are identical except for faults.

    `schedule` is None if nothing is averaged, `audit_interval` 0 if nothing is compared.
    """

    schedule: SyncSchedule | None
    waits: bool  # PAFT-Sync: averaging ends before training goes on
    audit_interval: int = 0

    def actions(self, step: int, turn: Turn | None) -> StepActions:
        """The actions around the update of iteration `step`; `turn` is the schedule's next turn."""
        due = turn is not None and turn.at == step
        audit = bool(self.audit_interval) and step % self.audit_interval == 0
        return StepActions(save_parameters=due, average=due, waits=due and self.waits, audit=audit)

    def label(self, step: int, turn: Turn | None, differs: bool | None, diverged: bool) -> Label:
        """How the replicas of version `step` compare. `differs`: the digests' result, None if they were not compared;
        `diverged`: whether the last averaging found that the replicas differed."""
        if differs is not None:
            return Label(Replicas.UNIQUE if differs else Replicas.IDENTICAL, True)
        averaged = self.waits and turn is not None and turn.at - turn.interval == step
        return Label(Replicas.UNIQUE if diverged and not averaged else Replicas.IDENTICAL, False)
