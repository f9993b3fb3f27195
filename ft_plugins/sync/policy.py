"""The protocol of a synchronisation policy: what is done around each update, and what is known of each version. Pure.

A policy never touches a tensor. Before each update it returns what to do around it (`StepActions`), and at each version
point what the replicas of that version are to each other (`Label`). Policies that skip the reduction of gradients, or
synchronise some layers only, say so in the same terms.

Invariant: a policy answers alike on every rank: it knows the iteration, the turn and what all ranks have measured.

In: iteration, turn, verdicts. Out: `StepActions`, `Label`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from .schedule import SyncSchedule, Turn


class Replicas(str, Enum):
    """What the replicas of a version are to each other."""

    IDENTICAL = "identical"  # one of them may stand for all
    UNIQUE = "unique"  # each has state of its own, and is lost with it


@dataclass(frozen=True)
class Label:
    """What is known of a version. `verified`: digests were compared; else it is what the policy expects."""

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

    `remember`: parameters are kept as they are before it, for the length of its step. `average`: averaging starts after
    it, of `layers` (None: all), and with `waits` ends there too; else it is applied before the next update. `audit`:
    digests are compared after it.
    """

    reduce_gradients: bool = True
    remember: bool = False
    average: bool = False
    waits: bool = False
    audit: bool = False
    layers: frozenset[int] | None = None


class Policy(Protocol):
    """One system's answer to the two questions."""

    def actions(self, step: int, turn: Turn | None) -> StepActions:
        """What is to be done around the update of iteration `step`; `turn` is the schedule's next one."""
        ...

    def label(self, step: int, turn: Turn | None, differs: bool | None, drifting: bool) -> Label:
        """What the replicas of version `step` are. `differs`: what digests say, None where none were compared;
        `drifting`: whether the last synchronisation has found the replicas apart."""
        ...


@dataclass(frozen=True)
class PaftPolicy:
    """PAFT: gradients are reduced in every iteration, so replicas are identical but for faults.

    `schedule` is None where nothing is averaged, `audit_interval` 0 where nothing is compared.
    """

    schedule: SyncSchedule | None
    waits: bool  # PAFT-Sync: averaging ends before training goes on
    audit_interval: int = 0

    def actions(self, step: int, turn: Turn | None) -> StepActions:
        due = turn is not None and turn.at == step
        audit = bool(self.audit_interval) and step % self.audit_interval == 0
        return StepActions(remember=due, average=due, waits=due and self.waits, audit=audit)

    def label(self, step: int, turn: Turn | None, differs: bool | None, drifting: bool) -> Label:
        if differs is not None:
            return Label(Replicas.UNIQUE if differs else Replicas.IDENTICAL, True)
        averaged = self.waits and turn is not None and turn.at - turn.interval == step  # of this very version
        return Label(Replicas.UNIQUE if drifting and not averaged else Replicas.IDENTICAL, False)
