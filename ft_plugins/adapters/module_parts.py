"""What each module of a model is and keeps besides tensors, read again only where something may have changed.

    values   what can be set again: plain values in attributes, also in lists, tuples and dicts; states of random number
             generators, also in these, and small objects that the codec knows, both encoded
    shape    what can only be compared, as text: the class, its forward, hooks of the module and of its parameters'
             gradients, functions in attributes, and what other objects hold, but their whole numbers
    counts   these, by path: most change in each iteration

Invariant: a module is not read again only if its class, hooks and attributes are the very objects that they were, and
what can change in itself has the same contents. Tensors are left out, and hooks that a library makes in every start.
Nothing of the script is called.

In: a module. Out: a `ModulePart` for each of its modules, by path; counts.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch.nn.modules import module as torchs_modules

from ..snapshot.capture import codec
from .data.data_parts import is_generator
from .data.loader_values import encoding
from .data.loaders import state_of
from .held_objects import PLAIN, UNCHANGING, Reading, held_by, name_of, text_of
from .script.loop_values import attribute, container_of, is_a
from .script.script_names import is_of_library
from .script.suspended import Values

ENCODED, GENERATOR = "__ft_encoded__", "__ft_generator__"  # first of a tuple whose second is encoded
CONTAINERS = (list, tuple, dict)
MOST = 256  # values of a list, tuple or dict that are read
_LIMIT = 4 << 10  # bytes of an object that is
_SCALARS = (np.number, np.bool_)  # as `np.maximum` of two numbers
# of every module: parameters, hooks, `training`; and what Megatron-DeepSpeed sets when it saves
_LEFT_OUT = frozenset((*vars(torch.nn.Module()), "state_dict", "load_state_dict"))
_COUNTING = ("deepspeed.", "torch.nn.parallel.")  # packages whose modules count for themselves
_DEPTH, _MOST_COUNTS = 4, 4096
_OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_ALL = tuple(f"_global{name}" for name in _OF_MODULES)
_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
Shape = Mapping[str, str]
_Contents = bytes | dict[str, str]  # of an object: encoded, or texts


@dataclass(frozen=True)
class ModulePart:
    """One module: `values` by attribute, `shape` by what is described, `digest` of that: 4 bytes."""

    values: Mapping[str, Any]
    shape: Shape
    digest: bytes

    @classmethod
    def of(cls, values: Mapping[str, Any], shape: Shape) -> ModulePart:
        return cls(values, shape, xxhash.xxh32_digest(repr(sorted(shape.items())).encode()))


@dataclass(frozen=True, eq=False)
class _Seen:
    """`mark`: ids of what `part` was read from, which `kept` keeps from becoming those of others. `objects` can change
    in themselves, by attribute; `steady`: nothing else can."""

    part: ModulePart
    mark: list[int]
    kept: list[Any]
    objects: dict[str, _Contents]
    steady: bool


class ModuleParts:
    """The parts of one model. Hooks of its `optimizers` are a part of its root."""

    def __init__(self, module: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        self.module, self.optimizers = module, tuple(optimizers)
        self.modules: list[tuple[str, torch.nn.Module]] = []  # by path, as they were read last
        self._names: list[str] = []
        self._seen: list[_Seen] = []
        self._present: Mapping[str, ModulePart] = {}
        self.counts: Values = {}  # whole numbers of objects in modules, by quoted path, as read last
        self.moved: set[str] = set()  # the paths of those that have changed
        self._rising: dict[str, bool] = {}  # of values next to tensors
        self._turned: set[str] = set()
        self._contents: dict[int, _Contents] = {}  # of the objects that the present reading has met
        self._earlier = self._contents  # of the reading before
        self._reading = Reading()

    def read(self) -> Mapping[str, ModulePart]:
        """All parts, in the order of `named_modules`; the very mapping of the last time if nothing has changed."""
        self._earlier, self._contents, self._reading = self._contents, {}, Reading(self._reading)
        self.modules = parts_of(self.module)
        same = [name for name, _ in self.modules] == self._names
        before: Sequence[_Seen | None] = self._seen if same else len(self.modules) * [None]
        self._seen = [self._read(*one, seen) for one, seen in zip(self.modules, before, strict=True)]
        if self._seen != before:
            self._names = [name for name, _ in self.modules]
            self._present = {name: one.part for name, one in zip(self._names, self._seen, strict=True)}
        return self._present

    def _read(self, name: str, module: torch.nn.Module, seen: _Seen | None) -> _Seen:
        kind, own = type(module), vars(module)
        hooks = _hooks_of(own) if name else [*_hooks_of(own), *self._hooks_of_root()]
        mark = [id(kind), id(kind.__dict__.get("forward"))]
        mark += map(id, own.values())
        for _, found in hooks:
            mark += found
        if seen is None or seen.mark != mark:
            return self._described(name, module, mark, hooks)
        if seen.steady and (
            not seen.objects or all(self._is_same(name, key, own.get(key), one) for key, one in seen.objects.items())
        ):
            return seen
        now = self._described(name, module, mark, hooks)
        return seen if seen.part == now.part else now

    def _hooks_of_root(self) -> Iterator[tuple[str, Mapping[int, Any]]]:
        yield from ((name, found) for name in _OF_ALL if (found := vars(torchs_modules)[name]))
        for one in self.optimizers:
            yield from ((name, found) for name in _OF_OPTIMIZERS if (found := vars(one).get(name)))

    def _described(
        self, name: str, module: torch.nn.Module, mark: list[int], hooks: list[tuple[str, Mapping[int, Any]]]
    ) -> _Seen:
        kind = type(module)
        shape = {"class": name_of(kind)}
        if not (forward := name_of(attribute(kind, "forward"))).endswith(".forward"):  # of none of its classes
            shape["forward"] = forward
        for of, found in hooks:
            names = [one for each in found.values() if (one := name_of(each, hook=True))]
            if names:
                shape[of] = ", ".join([shape[of], *names] if of in shape else names)
        values: dict[str, Any] = {}
        objects: dict[str, _Contents] = {}
        steady, counts = True, f"{kind.__module__}.".startswith(_COUNTING)
        own = [(key, one) for key, one in vars(module).items() if key not in _LEFT_OUT]
        for key, value in own:
            if counts or is_a(value, torch.Tensor, torch.nn.Module):
                continue
            if is_plain(value):
                values[key] = copy.deepcopy(value)
                steady = steady and type(value) not in (list, dict) and _is_flat(value)
            elif drawing := generators_in(value):
                values[key], steady = (GENERATOR, codec.encode([*map(state_of, drawing)])), False
            elif is_a(value, *UNCHANGING):
                shape[key] = str(text_of(value))
            else:
                contents = self._contents_of(name, key, value)
                if isinstance(contents, bytes):
                    values[key] = (ENCODED, contents)
                else:
                    shape.update((key + path, text) for path, text in contents.items())
                if contents or container_of(value):
                    objects[key] = contents
        kept = [one for _, one in own if is_a(one, *PLAIN, *_SCALARS, *UNCHANGING, tuple)]
        kept += [kind, kind.__dict__.get("forward")]
        return _Seen(ModulePart.of(values, shape), mark, kept, objects, steady)

    def _is_same(self, name: str, key: str, value: Any, known: _Contents) -> bool:
        contents = self._contents_of(name, key, value)
        return contents is known or contents == known

    def _contents_of(self, name: str, key: str, value: Any) -> _Contents:
        """A small object, encoded, or else what it holds. `name` and `key`: of the module, and of its attribute."""
        known = self._contents.get(id(value))
        if known is None:
            place = f"{name}.{key}".lstrip(".")
            known = _contents_of(value, self._reading, lambda path, number: self._count(f"`{place}{path}`", number))
            if (earlier := self._earlier.get(id(value))) == known:
                known = earlier  # of which modules know that it is the same
            self._contents[id(value)] = known
        return known

    def _count(self, path: str, number: int | str) -> None:
        if path not in self.counts and len(self.counts) >= _MOST_COUNTS:  # of objects whose names change all the time
            return
        if (was := self.counts.get(path, number)) != number and path not in self._turned:
            self.moved.add(path)
            if path.endswith("]`") and path[-3].isdigit() and self._turns(path, was, number):
                self._turned.add(path)
                self.moved.discard(path)
        self.counts[path] = number

    def _turns(self, path: str, was: int | str, number: int | str) -> bool:
        """Whether a value next to a tensor, which has risen, falls, or the other way round: it describes a cache, as a
        length does."""
        try:
            rises = float(number) > float(was)
        except ValueError:
            return False
        return self._rising.setdefault(path, rises) != rises


def _contents_of(value: Any, reading: Reading, counted: Callable[[str, int | str], None]) -> _Contents:
    kind = type(value)
    with suppress(Exception):  # its class may compute what is asked for, and fail
        known_kind = kind in CONTAINERS or kind in weakref.ProxyTypes or is_of_library(kind.__module__)
        if not known_kind and (encoded := encoding(value, _LIMIT)):
            return encoded
    with suppress(Exception):
        return held_by(value, reading, counted)
    return {}


def generators_in(value: Any, depth: int = _DEPTH) -> list[Any]:
    """`value`, if it is a generator; those in a list, tuple or dict that is not large."""
    if is_generator(value):
        return [value]
    if type(value) not in CONTAINERS or len(value) > MOST or not depth:
        return []
    inside = [*value.values()] if type(value) is dict else [*value]
    return [one for part in inside for one in generators_in(part, depth - 1)]


def is_plain(value: Any) -> bool:
    return (
        is_a(value, *_SCALARS)
        or type(value) in PLAIN
        or (type(value) in CONTAINERS and _plain_values(value, _DEPTH) <= MOST)
    )


def _is_flat(value: Any) -> bool:
    return type(value) is not tuple or not any(isinstance(one, CONTAINERS) for one in value)


def _plain_values(value: Any, depth: int) -> int:
    """How many plain values `value` has; more than `MOST` if there are others, or if it is nested too deep."""
    if type(value) in PLAIN or is_a(value, *_SCALARS):
        return 1
    if type(value) not in CONTAINERS or len(value) > MOST or not depth:
        return MOST + 1
    count = 1
    for part in [*value, *value.values()] if type(value) is dict else value:
        count += _plain_values(part, depth - 1)
        if count > MOST:
            break
    return count


def _hooks_of(own: Mapping[str, Any]) -> list[tuple[str, Mapping[int, Any]]]:
    """The hooks of a module with these attributes, and of its parameters. Most have none, which is seen at once."""
    hooks = []
    if own["_forward_pre_hooks"] or own["_forward_hooks"] or own["_backward_pre_hooks"] or own["_backward_hooks"]:
        hooks += [(name, found) for name in _OF_MODULES if (found := own[name])]
    for key, one in own["_parameters"].items():
        if one is not None and (one._backward_hooks or one._post_accumulate_grad_hooks):
            hooks += [(f"{name} of {key}", found) for name in _OF_TENSORS if (found := getattr(one, name))]
    return hooks


def encoded_bytes(parts: Mapping[str, ModulePart]) -> int:
    """What generators and objects take once they have changed, before which a version has none of them."""
    values = (value for one in parts.values() for value in one.values.values())
    return sum(len(one[1]) for one in values if type(one) is tuple and one[:1] in ((ENCODED,), (GENERATOR,)))


def parts_of(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """What `named_modules` yields, in a fraction of its time; it has a generator for each depth of nesting."""
    found: list[tuple[str, torch.nn.Module]] = []
    pending, seen = [("", module)], set[torch.nn.Module]()
    while pending:
        name, part = pending.pop()
        if part not in seen:
            seen.add(part)
            found.append((name, part))
            before = f"{name}." if name else ""
            inside = [(before + key, one) for key, one in part._modules.items() if one is not None]
            pending += reversed(inside)
    return found
