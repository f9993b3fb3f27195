"""What an optimizer keeps of each parameter, known before its first update makes it.

Invariant: the live optimizer is untouched until its own first update, or until a restore. What it will keep is seen in
copies: one of each parameter (one for all of a kind, dropped again) is updated by an optimizer of the same class and
settings. Their numbers are never used, so a state that depends on a tensor's size or values is what the optimizer
itself makes of it. A tensor that is not there yet is a stand-in on the meta device, with dtype, shape, strides and
placement. State may appear later than at the first update (skipped updates, experts without tokens, parameters
unfrozen late), or never: what is there is read where it is.

In: an optimizer whose state is all in `optimizer.state` and in its groups. Out: its state by parameter and key; memory
for it, before a restore.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..errors import UnsupportedError
from .data.loaders import generator_states, set_generator_states
from .host_parts import is_item, local_part, own_copy

Group = Mapping[str, Any]

_UPDATES = 3  # of a copy: state may be made in the second
_RATE = 0.0078125  # learning rate of these updates: that of a warm-up may begin with 0, which changes nothing
_KNOWN = {"state", "param_groups", "defaults"}
_SCRATCH = ("_dummy_overflow_buf", "_overflow_buf", "lamb_coeffs")  # of fused optimizers: never read back
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor with dimensions that updates will make: a stand-in on the meta device, and where it is to be."""

    stand_in: torch.Tensor
    device: torch.device

    @classmethod
    def like(cls, tensor: torch.Tensor, dtype: torch.dtype | None = None, device: Any = None) -> PlannedTensor:
        """Raises RuntimeError for a class of tensors that cannot be on the meta device."""
        held = local_part(tensor)
        made = _with_local(tensor, _empty(held, dtype or held.dtype, torch.device("meta")))
        return cls(made, torch.device(device or held.device))

    def made(self) -> torch.Tensor:
        """A tensor as it stands for, of zeros: a restore leaves what belongs to no item, such as padding."""
        held = local_part(self.stand_in)
        return _with_local(self.stand_in, _empty(held, held.dtype, self.device).zero_())


_PLANS: WeakKeyDictionary[Any, Mapping[torch.Tensor, Mapping[str, Any]]] = WeakKeyDictionary()  # by optimizer


def plan_state(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Group] | None = None,
    initialise: Callable[[torch.optim.Optimizer], None] | None = None,
) -> None:
    """Find out what `optimizer` keeps, for the functions below. `groups`: its groups, where `param_groups` lack their
    parameters outside of an update, as with ZeRO-3. `initialise`: makes the state of a twin of it as the first update
    would, without numbers; else copies are updated. Raises UnsupportedError, naming the optimizer, if what it keeps
    cannot be known or captured."""
    planned, kinds = dict[torch.Tensor, Mapping[str, Any]](), dict[Any, Mapping[str, Any]]()
    before = generator_states()
    try:
        if initialise is None:
            _require_complete(optimizer)
        for place, group in enumerate(optimizer.param_groups if groups is None else groups):
            for one in group["params"]:
                if not (one.is_floating_point() or one.is_complex()):
                    continue  # it has no gradient
                held = local_part(one)
                kind = place, type(one), one.dtype, held.device, one.shape, held.stride(), _placed(one)
                if kind not in kinds:
                    known = optimizer.state.get(one) or {}
                    kinds[kind] = _kept(_twin(optimizer, place), group, one, known, initialise)
                planned[one] = kinds[kind]
    finally:
        set_generator_states(before)
    _PLANS[optimizer] = planned


def set_plan(optimizer: torch.optim.Optimizer, planned: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
    """What `optimizer` keeps is known: by tensor and key, `PlannedTensor`s, numbers and 0-dimensional tensors."""
    _PLANS[optimizer] = planned


def planned(optimizer: torch.optim.Optimizer) -> Mapping[torch.Tensor, Mapping[str, Any]]:
    """What was found out, by parameter and key."""
    return _PLANS.get(optimizer, {})


def items_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors with dimensions that are kept of `parameter`, by key: as they are, or stand-ins."""
    live = optimizer.state.get(parameter) or {}
    items = {key: one.stand_in for key, one in planned(optimizer).get(parameter, {}).items() if _is_planned(one)}
    return items | {key: value for key, value in live.items() if is_item(value)}


def item_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, key: str) -> torch.Tensor:
    """That of one key."""
    live = (optimizer.state.get(parameter) or {}).get(key)
    item: torch.Tensor = planned(optimizer)[parameter][key].stand_in if live is None else live
    return item


def allocate(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, absent: Callable[[str], bool]) -> None:
    """Give memory to the tensors that are kept of `parameter`, which a restore then writes with the numbers, but take
    it from those whose key is `absent`."""
    known = planned(optimizer).get(parameter, {})
    tensors, live = {key for key, one in known.items() if _is_planned(one)}, optimizer.state.get(parameter) or {}
    if tensors and all(map(absent, tensors)):
        optimizer.state.pop(parameter, None)
    elif known:
        made = {key: _made(one) if live.get(key) is None else live[key] for key, one in known.items()}
        kept = {**made, **{key: one for key, one in live.items() if key not in made}}
        optimizer.state[parameter] = {key: one for key, one in kept.items() if key not in tensors or not absent(key)}


def set_numbers(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, numbers: Mapping[str, Any]) -> None:
    """Set what is kept of `parameter` besides tensors with dimensions ('step'): each tensor is one of its own, on the
    device on which the optimizer keeps it."""
    known = planned(optimizer).get(parameter, {})
    for key in known.keys() - numbers if optimizer.state.get(parameter) else ():
        if not _is_planned(known[key]):
            optimizer.state[parameter].pop(key, None)
    for key, value in numbers.items():
        state = optimizer.state[parameter]
        state[key] = own_copy(value, state.get(key, known.get(key)))


@contextmanager
def as_updated(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within it `optimizer` has what updates will make, without values: for code that describes what it would save."""
    missing = [one for one in planned(optimizer) if not optimizer.state.get(one)]
    try:
        for one in missing:
            allocate(optimizer, one, lambda key: False)
        yield
    finally:
        for one in missing:
            optimizer.state.pop(one, None)


def _made(value: Any) -> Any:
    if isinstance(value, PlannedTensor):
        return value.made()
    return value.clone() if isinstance(value, torch.Tensor) else value


def _is_planned(value: Any) -> bool:
    return isinstance(value, PlannedTensor)


def _placed(tensor: Any) -> Any:
    return getattr(tensor, "placements", None)


def _empty(like: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=device)


def _with_local(like: Any, local: torch.Tensor) -> torch.Tensor:
    """`local`, as the local part of a DTensor if `like` is one."""
    if local_part(like) is like:
        return local
    made: torch.Tensor = type(like).from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return made


def _require_complete(optimizer: torch.optim.Optimizer) -> None:
    """Raises UnsupportedError if anything but `state` holds some: attributes, a compiled part, apex.amp."""
    if hasattr(type(optimizer), "__del__"):
        raise UnsupportedError(
            f"{type(optimizer).__name__} has a compiled part that it frees when it ends (__del__), whose state cannot "
            "be captured; use one of torch's optimizers"
        )
    if hasattr(optimizer, "_amp_stash"):
        raise UnsupportedError(
            f"{type(optimizer).__name__} was initialised by apex.amp, which keeps masters and the loss scale "
            "elsewhere; use torch.amp"
        )
    for name, value in vars(optimizer).items():
        if name in _KNOWN or name in _SCRATCH:
            continue
        if any(isinstance(one, torch.Tensor | torch.optim.Optimizer | torch.nn.Module) for one in _parts(value)):
            raise UnsupportedError(
                f"{type(optimizer).__name__} keeps tensors in '{name}', not in its state, so that they cannot be "
                "captured; use an optimizer that keeps them in optimizer.state, by parameter"
            )


def _parts(value: Any, depth: int = 3) -> Iterator[Any]:
    yield value
    if depth and isinstance(value, dict | list | tuple | set):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _parts(part, depth - 1)


def _twin(optimizer: torch.optim.Optimizer, place: int) -> torch.optim.Optimizer:
    """An optimizer of the same kind and settings, without state, parameters or hooks, for its group at `place`: of a
    list with an entry for each group it has that one."""
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name in ("state", "param_groups", "step"):  # the last by a scheduler that wraps the step of this one
            continue
        if isinstance(value, list):
            value = value[place : place + 1] if len(value) == len(optimizer.param_groups) else [*value]
        twin.__dict__[name] = OrderedDict() if name.endswith("hooks") else _own(value)
    twin.state, twin.param_groups = defaultdict(dict), []
    return twin


def _own(value: Any, depth: int = 4) -> Any:
    """A copy of a value and of what containers in it hold, as deep as optimizers keep numbers; other objects are
    shared."""
    if isinstance(value, torch.Tensor):
        return value if value.requires_grad else value.clone()
    if type(value) is tuple:
        return tuple(_own(part, depth - 1) for part in value)
    if not (depth and isinstance(value, dict | list | set)):
        return value
    copied = copy.copy(value)
    if isinstance(copied, dict):
        copied.update({key: _own(part, depth - 1) for key, part in copied.items()})
    elif isinstance(copied, list):
        copied[:] = [_own(part, depth - 1) for part in copied]
    return copied


def _settings(group: Group) -> dict[str, Any]:
    """The settings in a group, without what updates make: tensors with dimensions. None of them is shared."""
    own = {key: value for key, value in group.items() if not any(map(is_item, _parts(value)))}
    if "lr" in own:
        own["lr"] = torch.full_like(own["lr"], _RATE) if isinstance(own["lr"], torch.Tensor) else _RATE
    return {key: _own(value) for key, value in own.items() if key != "params"}


def _kept(
    twin: torch.optim.Optimizer,
    group: Group,
    parameter: torch.Tensor,
    known: Mapping[str, Any],
    initialise: Callable[[torch.optim.Optimizer], None] | None,
) -> Mapping[str, Any]:
    """What `twin` keeps of a copy of `parameter` after some updates. `known`: what the original keeps already."""
    kind, held = type(twin).__name__, local_part(parameter)
    if initialise is not None:
        copied = PlannedTensor.like(parameter).stand_in.requires_grad_()
        twin.param_groups = [{**_settings(group), "params": [copied]}]
        initialise(twin)
    else:
        copied = parameter.detach().clone().requires_grad_()
        twin.param_groups = [{**_settings(group), "params": [copied]}]
        if known:  # some make it when they are built
            twin.state[copied] = {key: one.clone() if torch.is_tensor(one) else one for key, one in known.items()}
        _update(twin, copied, parameter)
    kept = twin.state.get(copied, {})
    if len(twin.state) > (copied in twin.state):
        other = next(key for key in twin.state if key is not copied)
        raise UnsupportedError(f"{kind} keeps state under '{other}', not under a parameter; use another optimizer")
    for key, value in kept.items():
        plain = (
            type(local_part(value)) in (torch.Tensor, torch.nn.Parameter)
            if isinstance(value, torch.Tensor)
            else (type(value) in _PLAIN)
        )
        if not plain:
            raise UnsupportedError(
                f"{kind} keeps a {type(value).__name__} as '{key}' in its state, but only plain tensors and numbers "
                "can be captured; use another optimizer"
            )
    return {
        key: PlannedTensor.like(value, device=held.device if local_part(value).is_meta else None)
        if is_item(value)
        else value
        for key, value in kept.items()
    }


def _update(twin: torch.optim.Optimizer, copied: torch.Tensor, original: torch.Tensor) -> None:
    """Step a few times, without the hooks that torch calls for every optimizer of the process."""
    kind, before = type(twin).__name__, _counters(twin)
    step: Any = type(twin).step
    try:
        for _ in range(_UPDATES):
            copied.grad = (copied.detach().abs() + 1).to(copied.dtype)  # moves it whatever its size
            getattr(step, "__wrapped__", step)(twin)
    except Exception as error:  # third-party optimizers raise anything
        raise UnsupportedError(
            f"{kind} is not supported: what it keeps of a parameter of shape {tuple(original.shape)} cannot be known "
            f"before its first update, as an update of a copy fails: {type(error).__name__}: {error}; use another "
            "optimizer or other settings"
        ) from error
    if before != _counters(twin):
        raise UnsupportedError(f"{kind} keeps counters in attributes, not in its state; use another optimizer")
    if not twin.state and local_part(original).numel() and torch.equal(local_part(copied), local_part(original)):
        raise UnsupportedError(f"{kind}.step() changes no parameter of its groups")


def _counters(twin: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: value for name, value in vars(twin).items() if type(value) in (int, float)}
