"""Search a script for undeclared training state, at version points 1, 2, 4, ... 256, and then at each 256th.

Invariant: one pass over the objects of the process (0.2 s for a million) at each, and when training begins; another one
only if something without a name was found, after a garbage collection, so that what is dropped is not named. Trained
state is an error before the first version is captured. What changes later (a copy of the best weights) is named, once:
it ends no job. Objects of every host are declared.

In: what a host was given, what `get_state` returned. Out: StateChangedError, or one line.
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

from ...errors import StateChangedError
from ...events import say
from ..data.data_parts import generators_of, parts
from ..observed import is_examined
from .script_names import named, namespaces
from .script_state import Marks, Returned, storage_of, tensors_in
from .undeclared import DeclaredState, Live, Sort, Undeclared, candidates, sorted_out, undeclared

_DEPTH = 3  # of the attributes of declared objects
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


def ignored() -> list[Any]:
    """What was given to `ignore`: objects, and variables by name."""
    return _ignored


@dataclass(frozen=True)
class Given:
    """What a host captures or ignores: objects, further tensors, and the tensors that are trained."""

    objects: tuple[Any, ...]
    tensors: tuple[torch.Tensor, ...]
    trained: tuple[torch.Tensor, ...]


class UndeclaredSearch:
    """The search of one host. `remedy` says what to do about trained state; `place` begins every error."""

    def __init__(self, given: Callable[[], Given], remedy: Callable[[list[Undeclared]], str], place: str) -> None:
        self._given, self.remedy, self._place = given, remedy, place
        self._marks = Marks()
        self._points = 0
        self._said: set[str] = set()
        _searches.add(self)

    def begin(self) -> None:
        """Training begins: remember the contents of what could be trained, of which the first version point then shows
        whether it is. Waits for devices."""
        names, declared = named(namespaces()), self._declared(set())
        live = _live(names.values())
        self._marks.mark(part for _, _, tensors in candidates(live, names, declared) for part in tensors)
        self._marks.mark_buffers(live[Sort.MODULE], declared.has)

    def check(self, iteration: int, returned: Any = None) -> None:
        """The version point, with what `get_state` returned. Raises StateChangedError at the first one."""
        self._points += 1
        if not is_examined(self._points):
            return
        state = Returned(returned)
        found = self._search(state)
        if any(one.name is None and one.trained for one in found):
            found.clear()  # refers to what may be garbage
            gc.collect()
            found = self._search(state)
        trained = [one for one in found if one.trained]
        self._marks.mark(part for one in found for part in one.tensors)
        if trained and self._points == 1:
            raise StateChangedError(
                f"{self._place}: iteration {iteration}: the script has training state that belongs to nothing that is "
                "captured, training changes it, and a restart would lose that: "
                f"{'; '.join(map(str, trained))}: {self.remedy(trained)}"
            )
        for one in trained:
            if one.who not in self._said and not any(type(name) is str and name == one.expression for name in _ignored):
                self._said.add(one.who)
                say(
                    f"{self._place}: iteration {iteration}: {one.who} has changed, but belongs to nothing that is "
                    f"captured, and a restart would lose that: {self.remedy([])}",
                    alarm=True,
                )

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
        )


def _live(names: Iterable[Any]) -> Live:
    return sorted_out(chain(gc.get_objects(), [one.value for one in names]))


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
