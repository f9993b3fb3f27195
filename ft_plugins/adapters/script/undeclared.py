"""Find training state of a script that belongs to nothing that its host was given. Pure: from live objects to findings.

One rule: tensors that training changes, and that nothing captures, in any module, optimizer, GradScaler or object with
`state_dict` of the process, or in a container of the script shaped like the model's parameters; and torch's schedulers
of a captured optimizer. Tensors decide, not objects: a wrapper whose tensors are all captured is no finding.

In: live objects, names, what is declared, what `get_state` returned, earlier contents. Out: `Undeclared`s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from .script_names import Name, Named
from .script_state import Marks, Returned, holds_values, kept_buffers, optimizer_tensors, storage_of, tensors_in

_LIBRARIES = ("torch", "deepspeed", "ft_plugins", "numpy")  # whose own objects with `state_dict` are no finding


class Sort(Enum):
    """What kind of state an object may hold."""

    OPTIMIZER = "optimizer"
    MODULE = "module"
    SCALER = "scaler"
    SCHEDULER = "scheduler"
    STATEFUL = "stateful"


_SORTS: tuple[tuple[type, Sort], ...] = (
    (torch.optim.Optimizer, Sort.OPTIMIZER),
    (torch.nn.Module, Sort.MODULE),
    (torch.amp.GradScaler, Sort.SCALER),
    (LRScheduler, Sort.SCHEDULER),
)
_MADE = (Sort.OPTIMIZER, Sort.SCALER)  # whose tensors training makes
Live = Mapping[Sort, list[Any]]
Holding = tuple[Sort, Any, list[torch.Tensor]]  # an object, and its tensors


@dataclass(frozen=True)
class DeclaredState:
    """What is captured or ignored: objects by id, tensors by address of their memory; the shapes of what is trained."""

    objects: frozenset[int]
    storages: frozenset[int]
    shapes: Mapping[torch.Size, int]

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is captured, or has no values."""
        return id(tensor) in self.objects or storage_of(tensor) in self.storages or not holds_values(tensor)

    def covers(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether tensors could be another version of all that is trained."""
        shapes = Counter(one.shape for one in tensors)
        return bool(self.shapes) and all(shapes[shape] >= count for shape, count in self.shapes.items())


@dataclass(frozen=True)
class Undeclared:
    """An object that holds `tensors` which nothing captures. `trained`: training changes them."""

    value: Any
    tensors: tuple[torch.Tensor, ...]
    trained: bool
    name: Name | None = None

    @property
    def expression(self) -> str:
        """As the script writes it, or else its class in small letters."""
        return type(self.value).__name__.lower() if self.name is None else self.name.expression

    @property
    def who(self) -> str:
        """Name, class and place, for messages."""
        kind, name = type(self.value).__name__, self.name
        return f"a {kind} whose name was not found" if name is None else f"'{name.expression}' ({kind}, {name.place})"

    def __str__(self) -> str:
        return f"{self.who}: {len(self.tensors)} tensors" if self.tensors else self.who


def sorted_out(objects: Iterable[Any]) -> Live:
    """The objects that may hold state, by sort. Visits each object once; asks each class once."""
    everything = list(objects)
    sorts = {kind: sort for kind in set(map(type, everything)) if (sort := _sort_of(kind)) is not None}
    found: dict[Sort, dict[int, Any]] = {sort: {} for sort in Sort}
    for one in [one for one in everything if type(one) in sorts]:
        found[sorts[type(one)]][id(one)] = one
    return {sort: list(ones.values()) for sort, ones in found.items()}


def _sort_of(kind: type) -> Sort | None:
    bases = type.mro(kind) if kind is not type and not issubclass(kind, type) else []
    if known := next((sort for one, sort in _SORTS if one in bases), None):
        return known
    names = {name for base in bases for name in ("state_dict", "load_state_dict") if name in vars(base)}
    return Sort.STATEFUL if len(names) > 1 and kind.__module__.split(".")[0] not in _LIBRARIES else None


def stray_modules(modules: Iterable[torch.nn.Module], declared: DeclaredState) -> list[torch.nn.Module]:
    """The largest modules of which no parameter is captured, and others with a buffer that is not."""
    known = list(modules)
    parents = {id(part): one for one in known for part in one._modules.values() if part is not None}
    tops: dict[int, torch.nn.Module] = {}
    for one in known:
        parameters = [part for part in one._parameters.values() if part is not None]
        if any(not declared.has(part) for part in (*parameters, *kept_buffers(one).values())):
            while (parent := parents.get(id(one))) is not None:
                if any(declared.has(part) for part in parent.parameters() if holds_values(part)):
                    break
                one = parent
            tops[id(one)] = one
    return [one for one in tops.values() if id(one) not in declared.objects]


def candidates(live: Live, names: Mapping[int, Named], declared: DeclaredState) -> list[Holding]:
    """The objects that may hold such state, with the tensors that nothing captures, and what sort they are."""

    def free(sort: Sort) -> list[Any]:
        return [one for one in live[sort] if id(one) not in declared.objects]

    found = [(Sort.OPTIMIZER, one, [*optimizer_tensors(one)]) for one in free(Sort.OPTIMIZER)]
    found += [(Sort.MODULE, one, [*tensors_in(one)]) for one in stray_modules(live[Sort.MODULE], declared)]
    found += [(sort, one, [*tensors_in(one)]) for sort in (Sort.SCALER, Sort.STATEFUL) for one in free(sort)]
    seen = {id(part) for _, _, tensors in found for part in tensors}
    for one in sorted(names.values(), key=lambda named: named.direct):  # the smallest containers first
        if id(one.value) in declared.objects or isinstance(one.value, torch.Tensor) or _sort_of(type(one.value)):
            continue
        tensors = [part for part in tensors_in(one.value) if not declared.has(part)]
        if declared.covers(tensors) and not seen.issuperset(map(id, tensors)):
            seen.update(map(id, tensors))
            found.append((Sort.STATEFUL, one.value, tensors))
    free_ones = [(sort, one, [part for part in tensors if not declared.has(part)]) for sort, one, tensors in found]
    return [each for each in free_ones if each[2]]


def undeclared(
    live: Live, names: Mapping[int, Named], declared: DeclaredState, returned: Returned, marks: Marks
) -> list[Undeclared]:
    """All state that is neither declared nor returned. `marks`: contents when training began."""
    found = [*_found(candidates(live, names, declared), returned, marks)]
    found += [
        Undeclared(one, (), trained=True)
        for one in live[Sort.SCHEDULER]
        if id(one) not in declared.objects and id(one.optimizer) in declared.objects
        and not returned.has(one.state_dict())
    ]  # fmt: skip
    return [replace(one, name=names[id(one.value)].name) if id(one.value) in names else one for one in found]


def _found(holding: Iterable[Holding], returned: Returned, marks: Marks) -> Iterator[Undeclared]:
    for sort, one, tensors in holding:
        if sort in _MADE and returned.has(one.state_dict()):
            continue
        lacks = [part for part in tensors if not returned.has_tensor(part)]
        if not lacks:
            continue
        trained = any(marks.changed(part) or (sort in _MADE and not marks.marked(part)) for part in lacks)
        if sort is Sort.MODULE:
            trained = trained or any(marks.buffer_changed(part, {*map(id, lacks)}) for part in one.modules())
        yield Undeclared(one, tuple(lacks), trained)
