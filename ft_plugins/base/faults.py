"""Fault points: named places in production code where a test can kill, stop or alter. Off unless armed.

Invariant: an unarmed `reach` is one dictionary lookup and changes nothing.

A specification is `point@condition,...:action`; several are joined by `;`. A condition compares a fact as text: one
that the point reports, an ambient one (`rank`, `restart`), or `hit` (how often this process has reached the point, from
1); `iteration%500=0` compares the remainder. All must hold; the first fault that applies acts. Actions: `kill` (SIGKILL
to self), `stop` (SIGSTOP to self), `exit` (status 1), `raise` (RuntimeError). Any other action is returned to the
point, which interprets it (`inf` at `update.begin`, `skip` at `fence.kill`, `hold` at `exchange.frame`, the actions of
`corruption`). Example, a kill in the sixth iteration of rank 3, in the first incarnation only:
`iteration.forward@iteration=6,rank=3,restart=0:kill`.

A fault that could never act is an error at start, by name: at an unknown point, with a fact that the point does not
report, with an action that it does not carry out, where the system that reaches it is off, or with a host that does not
reach it. A test compares the list, `POINTS`, with the source.
"""

from __future__ import annotations

import difflib
import os
import re
import signal
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from ..errors import ConfigError
from .intake import shown

ACTIONS = ("kill", "stop", "exit", "raise")  # that `reach` itself carries out
_NUMBER = re.compile(r"-?[0-9]{1,18}").fullmatch
_DIVIDES = re.compile(r"[^%]+(%0*[1-9][0-9]{0,17})?").fullmatch  # a fact, or its remainder by a non-zero number
REQUESTS = (
    *("status", "watch", "fence", "attach", "restore", "shutdown", "end", "endpoint", "claim", "protect", "inventory"),
    *("rebuild", "resize", "previous_sizes", "spare", "settle", "checkpoint", "hold", "nodes"),
)
OF_HOSTS = ("iteration.forward", "update.begin", "update.middle", "update.end")  # not reached by every host


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


# ---- the list of points ----


class Needs(str, Enum):
    """What has to be on for a point to be reached, in words for people."""

    NOTHING = ""
    MEMORY = "no system that protects state is on; add --reft or --baft"
    STORAGE = "--reft-checkpoint-dir is unset; give it"
    NODES = "--reft-redundancy is none; choose another one"
    PARITY = "no parity is kept; give --reft-redundancy raim5, raim6 or both"
    PAFT = "--paft is off; add it"
    SYNC = "--sync-policy is unset; give one"


@dataclass(frozen=True)
class FaultPoint:
    """A place in the source. `facts`: what it reports, in addition to `hit` and, in a `rank`, to rank and restart.
    `actions`: its own, in addition to those of `faults`; None if another module reads them."""

    needs: Needs
    facts: tuple[str, ...] = ()
    actions: tuple[str, ...] | None = ()
    in_rank: bool = True  # else in an SMP

    @property
    def known_facts(self) -> tuple[str, ...]:
        return (*self.facts, "hit", *(("rank", "restart") if self.in_rank else ()))


def _points() -> Iterator[tuple[str, FaultPoint]]:
    iteration = ("iteration",)
    for name in ("iteration.forward", "update.middle", "update.end"):
        yield name, FaultPoint(Needs.NOTHING, iteration)
    yield "update.begin", FaultPoint(Needs.NOTHING, iteration, ("inf",))
    for name in ("reduce.gradients", "update.gradients", "update.parameters", "update.copies"):
        yield name, FaultPoint(Needs.PAFT, iteration, None)  # see `corruption`
    for name in ("exchange", "apply"):
        yield f"sync.{name}", FaultPoint(Needs.SYNC, ("module",))
    for name in ("attach.before", "attach.after", "shutdown.before", "shutdown.after"):
        yield name, FaultPoint(Needs.MEMORY)
    for name in ("restore.begin", "restore.opened", "restore.end"):
        yield name, FaultPoint(Needs.MEMORY)
    yield "restore.tensors", FaultPoint(Needs.MEMORY, ("iteration", "stream"))
    yield "restore.storage", FaultPoint(Needs.STORAGE, ("bucket",))
    yield "resize.filling", FaultPoint(Needs.MEMORY)
    for name in ("capture.begin", "capture.seal.before", "capture.seal.after"):
        yield name, FaultPoint(Needs.MEMORY, ("iteration", "slot"))
    for name in ("capture.bucket.begin", "capture.bucket.end"):
        yield name, FaultPoint(Needs.MEMORY, ("iteration", "bucket", "slot"))
    for name, facts in _OF_THE_SMP.items():
        needs, actions, words = facts
        yield name, FaultPoint(needs, words, actions, in_rank=False)
    for request in REQUESTS:
        for when in ("before", "after"):
            yield f"smp.{request}.{when}", FaultPoint(Needs.MEMORY, ("adopted",), in_rank=False)


_OF_THE_SMP: Mapping[str, tuple[Needs, tuple[str, ...], tuple[str, ...]]] = {
    "fence.kill": (Needs.MEMORY, ("skip",), ("token",)),
    "persist.rank.before": (Needs.STORAGE, (), ("rank", "iteration", "adopted")),
    "persist.write": (Needs.STORAGE, ("enospc",), ("rank", "iteration", "adopted")),
    "persist.rename": (Needs.STORAGE, (), ("rank", "iteration", "adopted")),
    "persist.file": (Needs.STORAGE, (), ("rank", "iteration", "adopted")),
    "persist.manifest.before": (Needs.STORAGE, (), ("iteration", "adopted")),
    "persist.manifest.after": (Needs.STORAGE, (), ("iteration", "adopted")),
    "exchange.frame": (Needs.NODES, ("hold",), ("position", "target", "at", "epoch", "iteration", "frame")),
    "exchange.check": (Needs.PARITY, (), ("position", "target")),
    "rebuild.frame": (Needs.NODES, (), ("rank", "at")),
    "parity_store.xored": (Needs.PARITY, (), ("section", "stripe", "node", "at", "position")),
    "parity_store.seal.before": (Needs.PARITY, (), ("iteration", "position")),
}
POINTS: Mapping[str, FaultPoint] = dict(_points())


def require_known(faults: Iterable[Fault]) -> None:
    """Raises ConfigError for a fault that no point carries out."""
    for fault in faults:
        point = POINTS.get(fault.point)
        if point is None:
            raise ConfigError(f"there is no fault point {shown(fault.point)}; {_similar(fault.point, POINTS)}")
        for key, _ in fault.conditions:
            if key.partition("%")[0] not in point.known_facts:
                raise ConfigError(
                    f"fault at {fault.point}: it reports no fact {shown(key)}, so the condition never holds; it "
                    f"reports {', '.join(point.known_facts)}"
                )
        if point.actions is not None and fault.action not in (*ACTIONS, *point.actions):
            raise ConfigError(
                f"fault at {fault.point}: there is no action {shown(fault.action)}; expected one of "
                f"{', '.join((*ACTIONS, *point.actions))}"
            )


def require_on(faults: Iterable[Fault], on: Collection[Needs]) -> None:
    """Raises ConfigError for a fault at a point that is not reached while only `on` is on."""
    for fault in faults:
        needs = POINTS[fault.point].needs
        if needs not in on:
            raise ConfigError(f"fault at {fault.point}: has no effect while {needs.value}, or drop the fault")


def require_reached(faults: Iterable[Fault], reached: Mapping[str, Collection[str]], framework: str) -> None:
    """Raises ConfigError for a fault at a point of hosts that is not in `reached`, or with an action that is not among
    the host's own ones at that point. `framework`: the host's name for people."""
    for fault in faults:
        if fault.point not in OF_HOSTS:
            continue
        if fault.point not in reached:
            known = ", ".join(sorted(reached)) or "none of " + ", ".join(OF_HOSTS)
            raise ConfigError(f"fault at {fault.point}: has no effect: {framework} reaches {known}")
        if fault.action not in (*ACTIONS, *reached[fault.point]):
            raise ConfigError(f"fault at {fault.point}: {framework} has no action {shown(fault.action)} there")


def _similar(name: str, known: Iterable[str]) -> str:
    """The names of `known` that resemble `name`, in words."""
    near = difflib.get_close_matches(name, sorted(known), n=4, cutoff=0.5)
    return f"similar ones: {', '.join(near)}" if near else f"known are {', '.join(sorted(known))}"
