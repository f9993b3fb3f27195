"""Search a script for undeclared training state, once, at its first version point; then watch what seemed frozen.

Invariant: one pass over the objects of the process (0.2 s for a million), another one when training begins, and a third
one only if something was found, after a garbage collection, so that what is dropped is not named. Trained state is an
error before the first version is captured. Frozen tensors are compared at every later version point; a device is not
waited for there. What has changed then (a copy of the best weights) is named, and does not end the job: only a restart,
which would lose it, is refused. Objects of every host of the process are declared.

In: what a host was given, what `get_state` returned. Out: StateChangedError, or one line on rank 0; ResumeError.
"""

from __future__ import annotations

import gc
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader

from ...errors import ResumeError, StateChangedError
from ...events import say
from ...model.digest import WALL_TIMES as NOT_COMPARED
from ..data.data_parts import generators_of, parts
from .script_names import Name, named, namespaces
from .script_state import Marks, Returned, contents_of, storage_of, tensors_in
from .undeclared import DeclaredState, Sort, Undeclared, sorted_out, tensors_to_mark, undeclared

_DEPTH = 3  # of the attributes of declared objects
_ROOM, _MOST = 4 << 10, 8  # bytes for what is lost, and how many names of it are captured
_searches: weakref.WeakSet[UndeclaredSearch] = weakref.WeakSet()
_ignored: list[Any] = []
_alone: list[weakref.ref[Any]] = []


def ignore(*objects: Any) -> None:
    """Have all searches ignore objects of the script: a restart need not restore them."""
    _ignored.extend(objects)


def has_hosts() -> bool:
    """Whether something of this process is captured."""
    return len(_searches) > 0


def ignore_alone(*objects: Any) -> None:
    """The same, but not what these objects refer to."""
    _alone.extend(map(weakref.ref, objects))


def ignored_names() -> frozenset[str]:
    """The variables that were named to `ignore`: counters of loops, and others."""
    return frozenset(one for one in _ignored if isinstance(one, str))


@dataclass(frozen=True)
class Given:
    """What a host captures or ignores: objects, further tensors, and the tensors that are trained."""

    objects: tuple[Any, ...]
    tensors: tuple[torch.Tensor, ...]
    trained: tuple[torch.Tensor, ...]
    follows_loaders: bool = False


@dataclass(frozen=True)
class _Frozen:
    """Tensors that may not change, and what they belong to."""

    who: str
    expression: str
    name: Name | None  # of a container
    tensors: tuple[weakref.ref[torch.Tensor], ...]
    contents: tuple[int, ...]  # of a container, whose tensors may be replaced

    def changed(self, marks: Marks) -> bool:
        """Whether a tensor has changed, or a container has got others with other contents."""
        tensors = [tensor for ref in self.tensors if (tensor := ref()) is not None]
        if any(marks.changed(tensor, devices=False) for tensor in tensors):
            return True
        if len(tensors) == len(self.tensors) or self.name is None:
            return False
        now = next((one for one in named(namespaces()).values() if one.name == self.name), None)
        held = [] if now is None else list(tensors_in(now.value))
        return len(held) == len(self.tensors) and self.contents != contents_of(held)


class UndeclaredSearch:
    """The search of one host. `remedy` says what to do about trained state; `place` begins every error; `speaks` is
    whether this rank prints the line."""

    def __init__(
        self, given: Callable[[], Given], remedy: Callable[[list[Undeclared]], str], place: str, speaks: bool
    ) -> None:
        self._given, self._remedy, self._place, self._speaks = given, remedy, place, speaks
        self._marks = Marks()
        self._frozen: list[_Frozen] | None = None  # None: not searched yet
        self._reports = False  # what changes later, and a restart is not refused
        self._lost: dict[str, str] = {}  # what has changed, by the script's name for it
        _searches.add(self)

    def only_report(self, remedy: Callable[[list[Undeclared]], str]) -> None:
        """What has seemed frozen and changes later refuses no restart. `remedy` replaces the given one."""
        self._remedy, self._reports = remedy, True

    def begin(self) -> None:
        """Training begins: remember the contents of what could be trained."""
        names = named(namespaces())
        self._marks.mark(tensors_to_mark(_live(names.values()), names, self._declared(set())))

    def check(self, iteration: int, returned: Any = None, *functions: Callable[..., Any]) -> None:
        """The version point, with what `get_state` returned; `functions` are `get_state` and `set_state`. Raises
        StateChangedError at the first one."""
        if self._frozen is not None:
            for one in [one for one in self._frozen if one.changed(self._marks)]:
                self._frozen.remove(one)
                if one.expression not in ignored_names():
                    self._report(iteration, one)
            return
        state = Returned(returned, *functions)
        found = self._search(state)
        if any(one.name is None for one in found):
            found.clear()  # refers to what may be garbage
            gc.collect()
            found = self._search(state)
        if trained := [one for one in found if one.why]:
            raise StateChangedError(
                f"{self._place}: iteration {iteration}: the script has training state that belongs to nothing that is "
                f"captured, and a restart would lose it: {'; '.join(map(str, trained))}: {self._remedy(trained)}"
            )
        if found and self._speaks:
            say(
                f"not captured, because nothing that is captured refers to it: {'; '.join(map(str, found))}; "
                f"if training depends on it: {self._remedy([])}"
            )
        self._frozen = [self._watched(one) for one in found]

    def _report(self, iteration: int, changed: _Frozen) -> None:
        fate = "a restart would lose that"
        if not self._reports:
            fate = "a restart, which would lose that, will be refused"
            if len(self._lost) < _MOST:
                self._lost[changed.expression[: _ROOM // (4 * _MOST)]] = changed.who[: _ROOM // (4 * _MOST)]
        say(
            f"{self._place}: iteration {iteration}: {changed.who} has changed, but belongs to nothing that is "
            f"captured, and {fate}: {self._remedy([])}",
            alarm=True,
        )

    def lost(self) -> dict[str, Any]:
        """For a version: what has changed and is not captured; room for it before the first one."""
        return {"names": dict(self._lost), NOT_COMPARED: bytes(_ROOM if self._frozen is None else 0)}

    def require_kept(self, saved: Mapping[str, Any]) -> None:
        """Raises ResumeError if a version lacks what the script has changed. What is ignored by name is not missed."""
        missed = {name: who for name, who in saved["names"].items() if name not in ignored_names()}
        if missed:
            named = ", ".join(map(repr, missed))
            raise ResumeError(
                f"{self._place}: the captured version lacks {', '.join(missed.values())}, which had changed: start "
                f"with --ftp-resume fresh, and {self._remedy([])}; or go on without it, by ft_plugins.ignore({named})"
            )

    def _watched(self, found: Undeclared) -> _Frozen:
        tensors = list(tensors_in(found.value)) if _has_tensors(found.value) else []
        self._marks.mark(tensors)
        name = found.name if isinstance(found.value, dict | list) else None
        contents = contents_of(tensors) if name else ()
        return _Frozen(found.who, found.expression, name, tuple(map(weakref.ref, tensors)), contents)

    def _search(self, returned: Returned) -> list[Undeclared]:
        names = named(namespaces())
        live = _live(names.values())
        return undeclared(live, names, self._declared(returned.storages), returned, self._marks)

    def _declared(self, storages: set[int]) -> DeclaredState:
        given = [search._given() for search in _searches]
        contents = list(_contents(chain(_ignored, *(one.objects for one in given))))
        held = (tensors_in(one) for one in contents if isinstance(one, torch.nn.Module | torch.optim.Optimizer))
        listed = (one for one in contents if isinstance(one, torch.Tensor))
        tensors = {
            id(one): one
            for one in chain(listed, *held, *(one.tensors for one in given), *(one.trained for one in given))
        }
        return DeclaredState(
            frozenset(map(id, contents)) | tensors.keys() | {id(one()) for one in _alone},
            frozenset(storages.union(map(storage_of, tensors.values()))) - {0},
            Counter(one.shape for one in self._given().trained),
            any(one.follows_loaders for one in given),
        )


def _live(names: Iterable[Any]) -> Mapping[Sort, list[Any]]:
    return sorted_out(chain(gc.get_objects(), [one.value for one in names]))


def _has_tensors(value: Any) -> bool:
    return not isinstance(value, DataLoader | torch.Generator)


def _contents(objects: Iterable[Any], depth: int = _DEPTH) -> Iterator[Any]:
    """The objects, and what their attributes hold, containers included. Of a loader: its samplers and generators,
    not its data set, which may keep state of its own."""
    pending, seen = [(one, depth) for one in objects], set[int]()
    while pending:
        one, left = pending.pop()
        if id(one) in seen or isinstance(one, str | bytes | int | float | type | type(None)):
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, DataLoader):
            inside = [part for _, part in parts(one)]
            pending += [(part, 0) for part in (*inside, *generators_of(one).values())]
        elif isinstance(one, Mapping):
            pending += [(part, left) for part in list(one.values())]
        elif isinstance(one, list | tuple):
            pending += [(part, left) for part in one]
        elif left and not isinstance(one, torch.nn.Module | torch.Tensor):
            pending += [(part, left - 1) for part in list(getattr(one, "__dict__", {}).values())]


def lines_to_add(host: str, lost: list[Undeclared]) -> str:
    """What to write in an own loop about `lost` state; about any, if it is empty."""
    known = [one for one in lost if one.name is not None and hasattr(one.value, "load_state_dict")]
    names = {_key(one.name.expression): one for one in known if one.name is not None}
    gets = [f"{key!r}: {_saved(one)}" for key, one in names.items()]
    sets = [f"{one.expression}.load_state_dict(state[{key!r}])" for key, one in names.items()]
    ways = "return its state from get_state and take it back in set_state"
    if gets:
        back = sets[0] if len(sets) == 1 else f"({', '.join(sets)})"
        more = "" if len(known) == len(lost) else " (and the others' tensors)"
        ways = f"add {host}(..., get_state=lambda: {{{', '.join(gets)}}}, set_state=lambda state: {back}){more}"
    ignored = ", ".join(one.expression for one in lost) or "..."
    return f"{ways}; or, if a restart need not restore it, {host}(..., ignored=[{ignored}])"


def _key(expression: str) -> str:
    return re.sub(r"\W+", "_", expression).strip("_")


def _saved(one: Undeclared) -> str:
    states = f"{one.expression}.state_dict()"
    return f"dict({states})" if isinstance(one.value, torch.nn.Module) else states
