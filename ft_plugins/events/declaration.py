"""The declaration of an event: its name, severity and fields, and what it means to an operator.

Invariant: a declaration is immutable and complete. Alarms in the job's log, `ft-plugins status`, the summary of routine
events and docs/events.md are derived from it, so that an event is described in one place (`catalogue`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

KINDS: Mapping[str, type | tuple[type, ...]] = {
    "bool": bool,
    "int": int,
    "float": (int, float),
    "str": str,
    "list": (list, tuple),
    "dict": dict,
}


NOTHING = "Nothing."  # for an operator to do


class Severity(IntEnum):
    """How much attention an event needs."""

    ROUTINE = 0
    NOTICE = 1
    WARNING = 2
    ALARM = 3

    @property
    def meaning(self) -> str:
        """One sentence for operators."""
        return _MEANINGS[self]


_MEANINGS = {
    Severity.ROUTINE: "Happens in every iteration or every few; the history holds summaries of them.",
    Severity.NOTICE: "Part of normal operation.",
    Severity.WARNING: "Something failed and was handled; look into it if it repeats.",
    Severity.ALARM: "State or protection of the job is worse until something changes; printed in the job's log, with "
    "the exceptions above.",
}


@dataclass(frozen=True)
class Field:
    """A fact that an event carries. `kind` is one of KINDS; `unit` is empty for names and counts."""

    kind: str
    meaning: str
    unit: str = ""
    optional: bool = False  # may be None: unknown, or not applicable

    def accepts(self, value: Any) -> bool:
        """Whether `value` is of this kind."""
        if value is None:
            return self.optional
        return isinstance(value, KINDS[self.kind]) and (self.kind == "bool" or not isinstance(value, bool))


class EventType:
    """The declaration of one event. Compared by identity.

    `name` is subject.verb. `what` says what happened, `action` what an operator does. `ends` names the alarms that
    this event ends: it is printed in the job's log too. `once`: all ranks emit the same event, and rank 0 alone
    prints it.
    """

    def __init__(
        self,
        name: str,
        severity: Severity,
        what: str,
        action: str = NOTHING,
        /,
        *,
        ends: tuple[str, ...] = (),
        once: bool = False,
        **fields: Field,
    ) -> None:
        self.name = name
        self.severity = severity
        self.what = what
        self.action = action
        self.ends = ends
        self.once = once
        self.fields: Mapping[str, Field] = fields

    @property
    def printed(self) -> bool:
        """Whether the event belongs in the job's log: an alarm, or the end of one."""
        return self.severity is Severity.ALARM or bool(self.ends)

    def sentence(self, where: str, words: str) -> str:
        """A sentence for the job's log: what happened `where` (rank or node), and what to do. `words` are its facts."""
        action = "" if self.action == NOTHING else f". {self.action}"
        return f"{self.name}: {where}: {words.rstrip('.')}{action}"

    def problem(self, fields: Mapping[str, Any]) -> str:
        """A message on undeclared fields or values of another type; '' for none. A declared field may be absent."""
        unknown = sorted(fields.keys() - self.fields.keys())
        if unknown:
            return f"{self.name} declares no field {', '.join(unknown)}"
        wrong = [f"{key}={value!r}" for key, value in fields.items() if not self.fields[key].accepts(value)]
        return f"{self.name}: not of the declared type: {', '.join(wrong)}" if wrong else ""
