"""Which parameters each group of an optimizer has, by name, and how that differs from what was captured.

Optimizers keep learning rate, weight decay and more by the number of a group. A script that builds its groups in
another order after a restart, or moves a parameter to another group, would continue with values of other parameters.

Invariant: pure. Groups have titles that are unique within a rank ('group 0', 'group 0 of optimizer d'). Groups in small
state are one text, because the codec takes longer for a list of many names, and it is the same in every version.

In: names of parameters by the title of their group. Out: text for small state; a sentence.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from ..base.outside_values import shown

Groups = Mapping[str, list[str]]  # the names of the parameters, by the title of their group

_REMEDY = (
    "what was captured of a group (learning rate, weight decay) would be used for other parameters; build the groups "
    "with the same parameters in the same order at every start (the order of a set changes), or start from the "
    "beginning with --ftp-resume fresh"
)


def numbered(groups: Iterable[Sequence[str]], optimizer: str = "") -> dict[str, list[str]]:
    """Groups with their numbers as titles. `optimizer`: its name, if there are several."""
    suffix = f" of optimizer {optimizer}" if optimizer else ""
    return {f"group {number}{suffix}": list(names) for number, names in enumerate(groups)}


def packed(groups: Groups) -> str:
    """Groups as text, for small state."""
    return json.dumps(groups)


def merged(parts: Iterable[str]) -> str:
    """Packed groups of ranks that each update a part of the parameters, as those of all of them. Without order."""
    groups: dict[str, dict[str, None]] = {}
    for part in parts:
        for title, names in json.loads(part).items():
            groups.setdefault(title, {}).update(dict.fromkeys(names))
    return packed({title: list(names) for title, names in groups.items()})


def regrouped(captured: str | None, present: str, *, partial: bool = False) -> str:
    """What differs between captured and present groups, both packed, and what to do; '' if nothing does, or
    if none were captured, as by older versions.

    `partial`: each rank has some of a group's parameters, in an order of its own, and which ones depends on the number
    of ranks. Then only the groups of those that are in both are compared.
    """
    if captured is None or captured == present:
        return ""
    difference = _difference(json.loads(captured), json.loads(present), partial)
    return difference and f"{difference}: {_REMEDY}"


def _difference(before: Groups, now: Groups, partial: bool) -> str:
    were, are = _titles(before), _titles(now)
    moved = [name for name in are if name in were and are[name] != were[name]]
    added, gone = [name for name in are if name not in were], [name for name in were if name not in are]
    for names in (moved,) if partial else (moved, added, gone):
        if names:
            more = f" ({len(names) - 1} more are in others, too)" if len(names) > 1 else ""
            change = f"in {are.get(names[0], 'no group')} now, was in {were.get(names[0], 'none')}{more}"
            return f"parameter {shown(names[0])} is {change}"
    if partial:
        return ""
    if list(before) != list(now):
        return f"there are {len(now)} groups now ({', '.join(now)}), there were {len(before)} ({', '.join(before)})"
    for title, names in now.items():
        for number, (name, other) in enumerate(zip(names, before[title], strict=True)):
            if name != other:
                return f"parameter {shown(name)} is number {number} of {title} now, where {shown(other)} was"
    return ""


def _titles(groups: Groups) -> dict[str, str]:
    """The groups that each parameter is in, by its name."""
    titles: dict[str, str] = {}
    for title, names in groups.items():
        for name in names:
            titles[name] = f"{titles[name]} and {title}" if name in titles else title
    return titles
