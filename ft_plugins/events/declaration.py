"""The declaration of an event: its name, severity and fields, and what it means to an operator.

Invariant: a declaration is immutable and complete. Alarms in the job's log, `ft-plugins status`, the summary of routine
events and docs/events.md are derived from it, so that an event is described in one place (`catalogue`). One that is
read back fits its declaration (`fits`), or is left out.
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


_LARGEST = 1 << 62  # of a number that is read back: sums of them are floats still
_LONGEST = 1e12  # seconds that are read back
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
    """A fact that an event carries. `kind` is one of KINDS; `unit` is empty for names and counts. `of`: the kind of
    what a list or dict holds, or those of each of its rows."""

    kind: str
    meaning: str
    unit: str = ""
    optional: bool = False  # may be None: unknown, or not applicable
    needed: bool = False  # readers cannot do without
    of: str | tuple[str, ...] = ""

    def accepts(self, value: Any) -> bool:
        """Whether `value` is of this kind."""
        if value is None:
            return self.optional
        return _is(self.kind, value)

    def reads(self, value: Any) -> bool:
        """Whether `value`, from a file, is of this kind and can be computed with."""
        if value is None or not self.accepts(value):
            return value is None and self.optional
        if isinstance(value, (int, float)):
            return _computable(value, _LONGEST if self.unit == "s" else 0)
        held = value.values() if isinstance(value, dict) else value
        return not self.of or all(_holds(self.of, each) for each in held)


def _is(kind: str, value: Any) -> bool:
    return isinstance(value, KINDS[kind]) and (kind == "bool" or not isinstance(value, bool))


def _computable(value: float, longest: float = 0) -> bool:
    """Whether a number is no larger than `longest`; 0: an integer of a size that is met, or any float."""
    if longest:
        return -longest <= value <= longest
    return isinstance(value, float) or -_LARGEST <= value <= _LARGEST


def _holds(kinds: str | tuple[str, ...], value: Any) -> bool:
    """Whether an element is of a kind, or a row of these kinds. Durations are not longer than is met."""
    if isinstance(kinds, str):
        return _is(kinds, value) and (not isinstance(value, (int, float)) or _computable(value, _LONGEST))
    return (
        isinstance(value, (list, tuple))
        and len(value) == len(kinds)
        and all(_holds(kind, each) for kind, each in zip(kinds, value, strict=True))
    )


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
        """A message on undeclared fields, values of another type, and what a reader would miss; '' for none. Another
        declared field may be absent."""
        unknown = sorted(fields.keys() - self.fields.keys())
        if unknown:
            return f"{self.name} declares no field {', '.join(unknown)}"
        wrong = [f"{key}={value!r}" for key, value in fields.items() if not self.fields[key].reads(value)]
        if wrong:
            return f"{self.name}: not of the declared type: {', '.join(wrong)}"
        absent = [key for key, field in self.fields.items() if field.needed and key not in fields]
        return f"{self.name}: lacks {', '.join(absent)}, which readers need" if absent else ""

    def fits(self, fields: Mapping[str, Any]) -> bool:
        """Whether these fields, from a file, can be used: the declared ones are of their types, the needed ones there.
        Others are of another version, and may be anything."""
        return all(
            field.reads(fields[name]) if name in fields else not field.needed for name, field in self.fields.items()
        )
