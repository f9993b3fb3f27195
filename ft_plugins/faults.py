"""Fault points: named places in production code at which a test can kill, stop or alter. Off unless armed.

Invariant: an unarmed `reach` is one dictionary lookup and changes nothing.

A specification is `point@condition,...:action`, several joined by `;`. Conditions compare the facts that the point
reports, the ambient ones (`rank`, `restart`) and `hit` (how often this process has reached the point, from 1) as text;
`iteration%500=0` compares the remainder. All must hold; the first fault that applies acts. Actions: `kill` (SIGKILL to
self), `stop` (SIGSTOP to self), `exit` (status 1), `raise` (RuntimeError); any other word is returned to the point,
which knows what it means (`inf` at `update.begin`, `skip` at `fence.kill`, `hold` at `exchange.frame`, numbers in
`corruption`). Example, a kill in the sixth iteration of rank 3, in the first incarnation only:
`iteration.forward@iteration=6,rank=3,restart=0:kill`.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from dataclasses import dataclass

from .errors import ConfigError
from .intake import shown


@dataclass(frozen=True)
class Fault:
    """One armed fault: where, under which conditions, what."""

    point: str
    conditions: tuple[tuple[str, str], ...]
    action: str

    def applies(self, facts: dict[str, str]) -> bool:
        """Whether every condition equals the fact of that name, or its remainder."""
        return all(_of(facts, key) == value for key, value in self.conditions)


def _of(facts: dict[str, str], key: str) -> str | None:
    name, _, divisor = key.partition("%")
    found = facts.get(name)
    if found is None or not divisor:
        return found
    return str(int(found) % int(divisor)) if _NUMBER(found) else None


_NUMBER = re.compile(r"-?[0-9]{1,18}").fullmatch
_DIVIDES = re.compile(r"[^%]+(%0*[1-9][0-9]{0,17})?").fullmatch  # a fact, or its remainder by a number that is not 0
_armed: dict[str, list[Fault]] = {}
_ambient: dict[str, str] = {}
_hits: dict[str, int] = {}


def parse(specification: str) -> list[Fault]:
    """The faults of a specification. Raises ConfigError naming the part that cannot be read."""
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
    """Arm the faults of `specification` in this process, in place of any armed before; '' disarms."""
    _armed.clear()
    _ambient.clear()
    _hits.clear()
    _ambient.update({key: str(value) for key, value in ambient.items()})
    for fault in parse(specification):
        _armed.setdefault(fault.point, []).append(fault)


def armed(point: str) -> tuple[Fault, ...]:
    """What may strike at `point`, whatever the conditions."""
    return tuple(_armed.get(point, ()))


def reach(point: str, **facts: object) -> str | None:
    """Report that `point` was reached. Returns the word of an armed action that the point itself carries out."""
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
                case word:
                    return word
    return None
