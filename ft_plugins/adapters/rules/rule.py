"""A rule: what one option of a framework means for protection. Pure.

Invariant: a predicate reads the settings that it is given and nothing else, so a rule says the same before a job as at
its start. Settings are Megatron's arguments or configurations, a DeepSpeed configuration, a Trainer's arguments: an
object with attributes or a mapping. What only a built object shows is under `built`, a mapping of facts; before a job
there is none, and these rules find nothing.

In: rules, settings, the systems that are on. Out: a `Finding` for each rule that applies; the line of a refusal, or it
as UnsupportedError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from ...errors import UnsupportedError

Predicate = Callable[[Any], bool]

DROP = "drop the option"
_VALUE = 60  # characters of a value that are shown


class Treatment(str, Enum):
    """What becomes of a job that uses an option."""

    FOLLOWED = "followed"
    REFUSED = "refused"
    INEFFECTIVE = "ineffective"
    MISSING = "missing"  # its framework lacks a package for it, here


@dataclass(frozen=True)
class Rule:
    """`keys`: what it looks at, dotted where settings are nested; `option`: what a person writes for it, '' if the
    script decides; `given`: with which value, for the page; `systems`: those with which it applies, () for all."""

    name: str
    keys: tuple[str, ...]
    applies: Predicate
    reason: str
    option: str = ""
    given: str = ""
    treatment: Treatment = Treatment.REFUSED
    remedy: str = DROP
    systems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """A rule that applies, and the value that it was found with ('' for a switch)."""

    rule: Rule
    value: str

    @property
    def text(self) -> str:
        """The finding as a phrase: what, as the person wrote it, and why."""
        written = " ".join(filter(None, (self.rule.option, self.value)))
        return f"{self.rule.name}{f' ({written})' if written else ''}: {self.rule.reason}"


def findings(rules: Iterable[Rule], *settings: Any, systems: Iterable[str] = ()) -> tuple[Finding, ...]:
    """The rules that apply to any of `settings`, each once."""
    on = set(systems)
    found = {}
    for rule in rules:
        if not rule.systems or on.intersection(rule.systems):
            for one in settings:
                if rule not in found and rule.applies(one):
                    found[rule] = Finding(rule, _shown(one, rule.keys))
    return tuple(found.values())


def refused(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """Those that end the job."""
    return tuple(one for one in found if one.rule.treatment is Treatment.REFUSED)


def line(found: Iterable[Finding], otherwise: str) -> str:
    """The refusal as one line; '' if nothing is refused. `otherwise`: how to go on without protection."""
    stop = refused(found)
    if not stop:
        return ""
    remedies = "; ".join(dict.fromkeys(one.rule.remedy for one in stop))
    phrases = "; ".join(dict.fromkeys(one.text for one in stop))
    return f"cannot protect this job: {phrases}. {remedies[:1].upper()}{remedies[1:]}, or {otherwise}"


def refuse(
    rules: Iterable[Rule], otherwise: str, *settings: Any, systems: Iterable[str] = (), who: str = "", more: str = ""
) -> None:
    """Raises UnsupportedError with the line, between `who` and `more`, if anything is refused."""
    if problem := line(findings(rules, *settings, systems=systems), otherwise):
        raise UnsupportedError(f"{who}{problem}{more}")


def built(fact: str, name: str, reason: str, **more: Any) -> Rule:
    """A rule about what only a built object shows."""
    return Rule(name, (f"built.{fact}",), on(f"built.{fact}"), reason, **more)


def treated_as(treatment: Treatment, rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """The same rules with another treatment."""
    return tuple(replace(rule, treatment=treatment) for rule in rules)


# ---- reading settings ----


def at(settings: Any, path: str) -> Any:
    """The setting at a dotted path; None if there is none."""
    for name in path.split("."):
        settings = settings.get(name) if isinstance(settings, Mapping) else getattr(settings, name, None)
    return settings


def on(path: str) -> Predicate:
    """Whether a setting is on."""
    return lambda settings: bool(at(settings, path))


def equals(path: str, *values: Any) -> Predicate:
    """Whether a setting, in small letters, is one of `values`."""
    return lambda settings: (set_to.lower() if isinstance(set_to := at(settings, path), str) else set_to) in values


def above(path: str, most: float) -> Predicate:
    """Whether a setting is a number larger than `most`."""
    return lambda settings: isinstance(found := at(settings, path), int | float) and found > most


def every(*predicates: Predicate) -> Predicate:
    """Whether all of them hold."""
    return lambda settings: all(one(settings) for one in predicates)


def some(*predicates: Predicate) -> Predicate:
    """Whether any of them holds."""
    return lambda settings: any(one(settings) for one in predicates)


def _shown(settings: Any, keys: Iterable[str]) -> str:
    """The first value at `keys` that says more than that it is set."""
    for key in keys:
        value = at(settings, key)
        parts = value if isinstance(value, list | tuple | set | frozenset) else (value,)
        words = [_word(one) for one in parts if one is not None and not isinstance(one, bool)]
        if words and not isinstance(value, Mapping) and all(isinstance(one, _PLAIN) for one in parts):
            return ", ".join(words)[:_VALUE]
    return ""


def _word(value: Any) -> str:
    """An enum's member as a person writes it."""
    return str(getattr(value, "value" if isinstance(value, str) else "name", value))


_PLAIN = (str, int, float, Enum, type(None))
