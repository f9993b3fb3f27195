"""Find training state of a script that belongs to nothing that its host was given. Pure: from live objects to findings.

Invariant: trained state of these kinds is never passed over in silence, and what may be scratch memory is not called
trained. Tensors decide, not objects: a wrapper whose tensors are all captured, such as a compiled module, is no
finding.

    trained     an optimizer with state, or of other parameters; an average of weights; a module that has gradients, has
                changed, or is in training mode with parameters that require gradients; a GradScaler; an object with
                `state_dict`, or a container of tensors shaped like the model's parameters, whose tensors have changed
    other       frozen modules, schedulers, generators, loaders in the middle of a pass, objects with `state_dict`,
                trainers of other libraries, which keep counters of their own

In: live objects, names, what is declared, what `get_state` returned, earlier contents. Out: `Undeclared`s.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..data.data_parts import is_generator
from ..data.loaders import StartedSampler
from .script_names import Name, Named
from .script_state import Marks, Returned, holds_values, optimizer_tensors, storage_of, tensors_in

_LIBRARIES = ("torch", "deepspeed", "ft_plugins", "numpy")  # whose own objects with `state_dict` are no finding
_TRAINERS = {  # classes that count iterations on their own
    "transformers": ("Trainer",),
    "accelerate": ("Accelerator",),
    "lightning": ("Trainer",),
    "pytorch_lightning": ("Trainer",),
}


class Sort(Enum):
    """What kind of state an object may hold."""

    OPTIMIZER = "optimizer"
    MODULE = "module"
    SCALER = "scaler"
    SCHEDULER = "scheduler"
    GENERATOR = "generator"
    PASS = "pass over a loader"
    TRAINER = "trainer"
    STATEFUL = "stateful"


_SORTS: tuple[tuple[type | tuple[type, ...], Sort], ...] = (
    (torch.optim.Optimizer, Sort.OPTIMIZER),
    (torch.nn.Module, Sort.MODULE),
    (torch.amp.GradScaler, Sort.SCALER),
    (LRScheduler, Sort.SCHEDULER),
    ((torch.Generator, np.random.Generator, np.random.RandomState, random.Random), Sort.GENERATOR),
    (_BaseDataLoaderIter, Sort.PASS),
)


@dataclass(frozen=True)
class DeclaredState:
    """What is captured or ignored: objects by id, tensors by address of their memory; the shapes of what is trained."""

    objects: frozenset[int]
    storages: frozenset[int]
    shapes: Mapping[torch.Size, int]
    follows_loaders: bool = False  # whether the host restores the position of every loader

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is captured, or has no values."""
        return id(tensor) in self.objects or storage_of(tensor) in self.storages or not holds_values(tensor)

    def covers(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether tensors could be another version of all that is trained."""
        shapes = Counter(one.shape for one in tensors)
        return bool(self.shapes) and all(shapes[shape] >= count for shape, count in self.shapes.items())


@dataclass(frozen=True)
class Undeclared:
    """An object whose state is not captured. `why` it is trained state; '' if it is not known to be."""

    value: Any
    why: str
    remark: str = ""
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
        return self.who + (f": {self.why}" if self.why else f", {self.remark}" if self.remark else "")


def sorted_out(objects: Iterable[Any]) -> dict[Sort, list[Any]]:
    """The objects that may hold state, by sort. Visits each object once; asks each class once."""
    everything = list(objects)
    sorts = {kind: sort for kind in set(map(type, everything)) if (sort := _sort_of(kind)) is not None}
    found: dict[Sort, dict[int, Any]] = {sort: {} for sort in Sort}
    for one in [one for one in everything if type(one) in sorts]:
        found[sorts[type(one)]][id(one)] = one
    return {sort: list(ones.values()) for sort, ones in found.items()}


def _sort_of(kind: type) -> Sort | None:
    bases = type.mro(kind) if kind is not type and not issubclass(kind, type) else []
    for classes, sort in _SORTS:
        if any(base in (classes if isinstance(classes, tuple) else (classes,)) for base in bases):
            return sort
    if any(base.__name__ in _TRAINERS.get(_root(base), ()) for base in bases):
        return Sort.TRAINER
    names = {name for base in bases for name in ("state_dict", "load_state_dict") if name in vars(base)}
    return Sort.STATEFUL if len(names) > 1 and _root(kind) not in _LIBRARIES else None


def _root(kind: type) -> str:
    return str(getattr(kind, "__module__", "")).split(".")[0]


def stray_modules(modules: Iterable[torch.nn.Module], declared: DeclaredState) -> list[torch.nn.Module]:
    """The largest modules of which no parameter is captured, and averages whose counter is not."""
    known = list(modules)
    parents = {id(part): one for one in known for part in one._modules.values() if part is not None}
    tops: dict[int, torch.nn.Module] = {}
    for one in known:
        own = any(not declared.has(part) for part in one._parameters.values() if part is not None)
        if own or (isinstance(one, AveragedModel) and not declared.has(one.n_averaged)):
            while (parent := parents.get(id(one))) is not None:
                if any(declared.has(part) for part in parent.parameters() if holds_values(part)):
                    break
                one = parent
            tops[id(one)] = one
    return [one for one in tops.values() if id(one) not in declared.objects]


def containers(
    names: Mapping[int, Named], declared: DeclaredState, stateful: Iterable[Any]
) -> Iterator[tuple[Named, list[torch.Tensor]]]:
    """Named containers and objects with tensors shaped like all that is trained, the smallest first, but for those in
    `stateful` objects."""
    seen = {id(part) for one in stateful for part in tensors_in(one)}
    for one in sorted(names.values(), key=lambda named: named.direct):
        if id(one.value) in declared.objects or isinstance(one.value, torch.Tensor) or _sort_of(type(one.value)):
            continue
        tensors = [part for part in tensors_in(one.value) if not declared.has(part)]
        if declared.covers(tensors) and not seen.issuperset(map(id, tensors)):
            seen.update(map(id, tensors))
            yield one, tensors


def tensors_to_mark(live: Mapping[Sort, list[Any]], names: Mapping[int, Named], declared: DeclaredState) -> list[Any]:
    """The tensors whose change would show that they are trained."""
    modules = [part for one in stray_modules(live[Sort.MODULE], declared) for part in tensors_in(one)]
    stateful = [part for one in live[Sort.STATEFUL] for part in tensors_in(one)]
    contained = [part for _, tensors in containers(names, declared, []) for part in tensors]
    return [part for part in (*modules, *stateful, *contained) if not declared.has(part)]


def contents(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What `module.state_dict()` holds, without its hooks: those of sharded modules change the module."""
    left_out = {
        f"{path}.{name}".lstrip(".")
        for path, part in module.named_modules()
        for name in part._non_persistent_buffers_set
    }
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: tensor for name, tensor in named if name not in left_out}


def undeclared(
    live: Mapping[Sort, list[Any]],
    names: Mapping[int, Named],
    declared: DeclaredState,
    returned: Returned,
    marks: Marks,
) -> list[Undeclared]:
    """All state that is neither declared nor returned. `marks`: contents when training began."""
    strays = stray_modules(live[Sort.MODULE], declared)
    by_value = [one for one in strays if returned.has(contents(one))]
    storages = {storage_of(part) for one in by_value for part in tensors_in(one)}
    looked_at = _Script(live, names, replace(declared, storages=declared.storages | storages), returned, marks)
    found = looked_at.found([one for one in strays if all(one is not other for other in by_value)])
    return [replace(one, name=names[id(one.value)].name) if id(one.value) in names else one for one in found]


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


@dataclass(frozen=True)
class _Script:
    live: Mapping[Sort, list[Any]]
    names: Mapping[int, Named]
    declared: DeclaredState
    returned: Returned
    marks: Marks

    def found(self, strays: list[torch.nn.Module]) -> list[Undeclared]:
        found = [
            *self._optimizers(),
            *self._modules(strays),
            *self._scalers(),
            *self._stateful(),
            *self._containers(),
        ]
        lost = {id(one.value) for one in found}
        found += [*self._schedulers(lost), *self._generators()]
        found += [] if self.declared.follows_loaders else self._passes()
        return found + [Undeclared(one, "", "keeps counters of its own") for one in self._free(Sort.TRAINER)]

    def _free(self, sort: Sort) -> list[Any]:
        return [one for one in self.live[sort] if id(one) not in self.declared.objects]

    def _undeclared(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        return [one for one in tensors if not self.declared.has(one)]

    def _changed(self, tensors: Iterable[torch.Tensor]) -> bool:
        return any(self.marks.changed(one) and not self.returned.has_tensor(one) for one in tensors)

    def _optimizers(self) -> Iterator[Undeclared]:
        in_modules = {id(part) for one in self.live[Sort.MODULE] for part in one._parameters.values()}
        for one in self._free(Sort.OPTIMIZER):
            state = self._undeclared(optimizer_tensors(one))
            updated = self._undeclared(part for part in _parameters_of(one) if part.requires_grad)
            if state and not self.returned.has(one.state_dict()):
                yield Undeclared(one, "it is an optimizer with state")
            elif updated and (not one.state or any(id(part) not in in_modules for part in updated)):
                yield Undeclared(one, f"it updates {len(updated)} parameters that no snapshot has")

    def _modules(self, strays: list[torch.nn.Module]) -> Iterator[Undeclared]:
        optimized = {id(part) for one in self._free(Sort.OPTIMIZER) for part in _parameters_of(one)}
        for one in strays:
            why, named = self._trained(one, optimized), [*one.named_parameters(), *one.named_buffers()]
            missing = [name for name, part in named if storage_of(part) not in self.returned.storages]
            if why and 0 < len(missing) < len(named):
                returns = f"{len(named) - len(missing)} of its {len(named)} tensors"
                why += f"; get_state returns {returns}, without '{missing[0]}'"
            yield Undeclared(one, why, "" if why else "unchanged so far")

    def _trained(self, module: torch.nn.Module, optimized: set[int]) -> str:
        """Why the tensors of a module are trained; '' if they may be frozen."""
        parameters = self._undeclared(module.parameters())
        if isinstance(module, AveragedModel):
            return "it averages weights"
        if any(id(one) in optimized for one in parameters):
            return "an optimizer updates it"
        if any(one.grad is not None for one in parameters):
            return "its parameters have gradients"
        if any(self.marks.changed(one) for one in self._undeclared(tensors_in(module))):
            return "it has changed since training began"
        training = [part._parameters.values() for part in module.modules() if part.training]
        trained = self._undeclared(one for own in training for one in own if one is not None and one.requires_grad)
        return "it is in training mode, and its parameters require gradients" if trained else ""

    def _scalers(self) -> Iterator[Undeclared]:
        for one in self._free(Sort.SCALER):
            used = one.is_enabled() and getattr(one, "_scale", None) is not None
            if used and not self.returned.has(one.state_dict()):
                yield Undeclared(one, "its scale changes")

    def _stateful(self) -> Iterator[Undeclared]:
        for one in self._free(Sort.STATEFUL):
            if self.declared.follows_loaders and hasattr(one, "__iter__"):
                continue
            if self._changed(self._undeclared(tensors_in(one))):
                yield Undeclared(one, "its tensors have changed since training began")
            elif id(one) in self.names and id(one) not in self.returned.referenced:
                yield Undeclared(one, "")

    def _containers(self) -> Iterator[Undeclared]:
        for one, tensors in containers(self.names, self.declared, self.live[Sort.STATEFUL]):
            if self._changed(tensors):
                why = "it holds tensors shaped like the parameters, which are changed in training"
                yield Undeclared(one.value, why)
            elif not all(self.marks.marked(part) or self.returned.has_tensor(part) for part in tensors):
                yield Undeclared(one.value, "", "holds tensors shaped like the parameters")

    def _schedulers(self, lost: set[int]) -> Iterator[Undeclared]:
        """Those of optimizers that are not `lost` as well."""
        for one in self._free(Sort.SCHEDULER):
            if id(getattr(one, "optimizer", None)) not in lost and id(one) not in self.returned.referenced:
                yield Undeclared(one, "")

    def _generators(self) -> Iterator[Undeclared]:
        """But for those of the process, which hosts restore."""
        known = [torch.default_generator, *getattr(torch.cuda, "default_generators", ())]
        known += [getattr(random, "_inst", None), getattr(np.random.mtrand, "_rand", None)]
        known_ids = {*map(id, known), *self.returned.referenced, *self.declared.objects}
        for one in self.names.values():
            if is_generator(one.value) and id(one.value) not in known_ids:
                yield Undeclared(one.value, "")

    def _passes(self) -> Iterator[Undeclared]:
        loaders = [one.value for one in self.names.values() if isinstance(one.value, DataLoader)]
        for one in self.live[Sort.PASS]:
            sampler = one._index_sampler
            sampler = sampler.original if isinstance(sampler, StartedSampler) else sampler
            if id(sampler) in self.declared.objects or not one._num_yielded:
                continue
            try:
                ended = one._num_yielded >= len(sampler)
            except (TypeError, NotImplementedError):
                ended = False
            if not ended:
                loader = next((each for each in loaders if each._index_sampler is sampler), one)
                yield Undeclared(loader, "", "in the middle of a pass")
