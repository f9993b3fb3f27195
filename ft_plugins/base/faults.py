"""Fault points: named places in production code where a test can kill, stop or alter. Off unless armed.

Invariant: an unarmed `reach` is one dictionary lookup and changes nothing.

A specification is `point@condition,...:action`; several are joined by `;`. A condition compares a fact as text: one
that the point reports, an ambient one (`rank`, `restart`), or `hit` (how often this process has reached the point, from
1); `iteration%500=0` compares the remainder. All must hold; the first fault that applies acts. Actions: `kill` (SIGKILL
to self), `stop` (SIGSTOP to self), `exit` (status 1), `raise` (RuntimeError). Any other action is returned to the
point, which interprets it (`inf` at `update.begin`, `skip` at `fence.kill`, `hold` at `exchange.frame`, the actions of
`corruption`). `fault_points` lists the points. Example, a kill in the sixth iteration of rank 3, in the first
incarnation only:
`iteration.forward@iteration=6,rank=3,restart=0:kill`.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from dataclasses import dataclass

from ..errors import ConfigError
from .intake import shown


@dataclass(frozen=True)
class Fault:
    """One armed fault."""

    point: str
    conditions: tuple[tuple[str, str], ...]
    action: str

    def applies(self, facts: dict[str, str]) -> bool:
        """Whether all conditions hold."""
        return all(_value(facts, key) == value for key, value in self.conditions)


def _value(facts: dict[str, str], key: str) -> str | None:
    """The fact that `key` names, or its remainder for `fact%divisor`; None if there is none."""
    name, _, divisor = key.partition("%")
    fact = facts.get(name)
    if fact is None or not divisor:
        return fact
    return str(int(fact) % int(divisor)) if _NUMBER(fact) else None


ACTIONS = ("kill", "stop", "exit", "raise")  # that `reach` itself carries out
_NUMBER = re.compile(r"-?[0-9]{1,18}").fullmatch
_DIVIDES = re.compile(r"[^%]+(%0*[1-9][0-9]{0,17})?").fullmatch  # a fact, or its remainder by a non-zero number
_armed: dict[str, list[Fault]] = {}
_ambient: dict[str, str] = {}
_hits: dict[str, int] = {}


def parse(specification: str) -> list[Fault]:
    """The faults of a specification. Raises ConfigError that quotes the malformed part."""
    faults = []
    for part in filter(None, (piece.strip() for piece in specification.split(";"))):
        place, colon, action = part.rpartition(":")
        point, _, conditions = place.partition("@")
        pairs = [condition.partition("=") for condition in filter(None, conditions.split(","))]
        unread = any(not (key and equals and value and _DIVIDES(key)) for key, equals, value in pairs)
        if not (colon and point and action) or unread:
            raise ConfigError(f"fault {shown(part)} cannot be read: expected point@fact=value,...:action")
        faults.append(Fault(point, tuple((key, value) for key, _, value in pairs), action))
    return faults


def arm(specification: str, **ambient: object) -> None:
    """Replace the armed faults of this process by those of `specification`; '' disarms."""
    _armed.clear()
    _ambient.clear()
    _hits.clear()
    _ambient.update({key: str(value) for key, value in ambient.items()})
    for fault in parse(specification):
        _armed.setdefault(fault.point, []).append(fault)


def armed(point: str) -> tuple[Fault, ...]:
    """The faults armed at `point`, regardless of their conditions."""
    return tuple(_armed.get(point, ()))


def reach(point: str, **facts: object) -> str | None:
    """Carry out the armed action at `point`. Returns an action that the point itself must carry out, else None."""
    if point not in _armed:
        return None
    _hits[point] = _hits.get(point, 0) + 1
    known = _ambient | {key: str(value) for key, value in {**facts, "hit": _hits[point]}.items()}
    for fault in _armed[point]:
        if fault.applies(known):
            match fault.action:
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "stop":
                    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread first, then all others
                case "exit":
                    os._exit(1)
                case "raise":
                    raise RuntimeError(f"fault injected at {point} ({known})")
                case action:
                    return action
    return None
