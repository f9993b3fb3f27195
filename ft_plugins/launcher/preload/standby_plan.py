"""Decisions about standby workers, without side effects: when one may be started, run and used, or why not.

Invariant: a standby is used only if nothing that its imports have read differs from what they would read now. What is
handed over (ranks, addresses, tokens) may differ, unless an import has read it.

In: environments, names, bytes. Out: reasons in words, '' for none; yes or no.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ...model.imported import Imported, digest

HANDED_OVER = frozenset(
    {
        "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE",
        "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_ERROR_FILE", "FTP_CONFIG", "FTP_RUN_DIR", "FTP_TOKEN", "FTP_AGENT_PID",
    }
)  # fmt: skip
# A standby has none of these while it imports, so that no import can join the running job or write its error file.
ABSENT = frozenset(
    {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "FTP_RUN_DIR", "FTP_TOKEN", "FTP_AGENT_PID"}
)
SETTLED_SECONDS = 10.0  # between the first iterations of an incarnation and the start of its first standby
GUESSED_BYTES = 1 << 30  # of the first standby, which is then measured
_MEMORY_SHARE = 0.25  # of the memory that is available, for all standbys of a node
_IDLE_CORES = 1.0  # with fewer a standby imports in one of `_TURNS` turns
_TURNS = 2
_SHOWN = 4  # names in a reason
_NOT_LATER = ("ft_plugins.adapters", "ft_plugins.deepspeed", "ft_plugins.launcher")  # they act on frameworks


def environment_refusal(before: Mapping[str, str], now: Mapping[str, str], read: Collection[str]) -> str:
    """Why what was imported with the environment `before`, of which the imports have read `read`, cannot be used with
    that of `now`."""
    changed = {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}
    wrong = sorted(name for name in changed if name not in HANDED_OVER or name in read)
    return f"the environment differs: {_listed(wrong)}" if wrong else ""


def later_names(imported: Imported, present: Collection[str]) -> list[str]:
    """What to import after the script's own imports: modules of torch, of Python and of this package that the running
    rank has imported since. Those of frameworks and of the script may depend on what the script does first."""
    allowed = {"torch", "ft_plugins", *sys.stdlib_module_names} - {"__main__"}
    names = (name for name in imported.names if name.partition(".")[0] in allowed and name not in present)
    return [name for name in names if not any(f"{name}.".startswith(f"{each}.") for each in _NOT_LATER)]


def later_refusal(imported: Imported, environ: Mapping[str, str], read: Collection[str]) -> str:
    """Why modules that were imported after the script's own, having read `read` of `environ`, are not as in the running
    rank: its script had set one of these variables."""
    ours = {name: digest(environ[name]) if name in environ else None for name in read if name not in HANDED_OVER}
    wrong = sorted(name for name, found in ours.items() if imported.environment.get(name) != found)
    return f"the script sets what modules read when they are imported: {_listed(wrong)}" if wrong else ""


def modules_refusal(imported: Imported, versions: tuple[str, str], names: Iterable[str]) -> str:
    """Why the modules `names` are not those of the running rank."""
    if versions != (imported.python, imported.torch):
        return "Python or torch has another version than in the running ranks"
    known = {name.partition(".")[0] for name in imported.names} | {"ft_plugins", *sys.stdlib_module_names}
    unknown = sorted({name.partition(".")[0] for name in names} - known)
    return f"it has imported what the running rank has not: {_listed(unknown)}" if unknown else ""


def added(before: Sequence[str], after: Sequence[str]) -> list[int]:
    """Where in `after` are the elements that were added to `before`; none if others were removed."""
    found, matched = [], 0
    for place, element in enumerate(after):
        if matched < len(before) and element == before[matched]:
            matched += 1
        else:
            found.append(place)
    return found if matched == len(before) else []


def put_in_front(before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
    """The elements that were put, or moved, to the front of `before`."""
    for count in range(len(after)):
        front = list(after[:count])
        kept = [element for element in before if element not in front]
        if list(after[count : count + len(kept)]) == kept:
            return front
    return list(after)


def filters_refusal(filters: Sequence[Any], again: Sequence[Any]) -> str:
    """Why `filters` of warnings would not be the same once the script has moved its own, `again`, to the front: a
    warning would be an error, or would not be one any more. Each is action, message, category, ..."""
    for place, own in enumerate(filters):
        for other in filters[:place] if own in again else ():
            related = issubclass(own[2], other[2]) or issubclass(other[2], own[2])
            if other not in again and related and own[0] != other[0] and "error" in (own[0], other[0]):
                return f"modules filter warnings ('{other[0]}') after the script has ('{own[0]}')"
    return ""


def memory_refusal(each: int, count: int, available: int) -> str:
    """Why memory does not allow `count` standbys of `each` bytes."""
    if each * count <= _MEMORY_SHARE * available:
        return ""
    return (
        f"{count} of them would take {each * count / 2**30:.1f} GiB, more than {_MEMORY_SHARE:.0%} of the "
        f"{available / 2**30:.1f} GiB that are available"
    )


def may_import(idle_cores: float, turn: int) -> bool:
    """Whether the standby that is importing runs in this turn, or is stopped for it: training goes first. `idle_cores`:
    of the last turn, without the standby's own."""
    return idle_cores >= _IDLE_CORES or turn % _TURNS == 0


def _listed(names: Collection[str]) -> str:
    shown = sorted(names)[:_SHOWN]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return ", ".join(shown) + more
