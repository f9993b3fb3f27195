"""Create an optimizer's state before its first update, exactly as that update would create it.

Invariant: the created state is verified first. Small stand-ins of the parameters are trained with it and without it;
parameters and state must be bitwise equal after each update, including the signs of zeros. If no method passes,
UnsupportedError names the optimizer. Only `optimizer.state` is written: parameters, gradients, groups and random number
generators stay as they are, and no hook or scheduler sees a step.

Two methods are tried, in this order:

    initialisation   call `_init_group`, in which torch's optimizers create state, without an update
    idle update      update stand-ins with learning rate and weight decay 0 and gradients of -0.0, which leave every
                     sum unchanged; then set 'step' back from 1 to 0

In: an optimizer whose state is all in `optimizer.state` and in its groups. Out: the same one, with its state.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from ..errors import UnsupportedError
from .data.loaders import generator_states, set_generator_states
from .host_parts import is_item

Group = Mapping[str, Any]
State = dict[str, Any]
_Method = Callable[[torch.optim.Optimizer, Group, torch.Tensor], State]

_UPDATES = 3  # compared: state may be created in the first and used differently in the second
_RATE = 0.0078125  # of the compared updates; differs from the groups' to detect state made from the learning rate
_EXTENT = 3  # maximum of a stand-in in each dimension
_IDLE = {"lr": 0.0, "weight_decay": 0.0, "maximize": False}
_KNOWN = {"state", "param_groups", "defaults"}
_SCRATCH = ("_dummy_overflow_buf", "_overflow_buf", "lamb_coeffs")  # of fused optimizers: never read back
_PLAIN = (bool, int, float, str, type(None))


def create_state(optimizer: torch.optim.Optimizer, groups: Sequence[Group] | None = None) -> None:
    """Give every parameter the state that its first update would create. Idempotent.

    `groups`: its groups, where `param_groups` lack their parameters outside of an update, as with ZeRO-3. Raises
    UnsupportedError, naming the optimizer, if that cannot be done exactly.
    """
    groups = optimizer.param_groups if groups is None else groups
    before = generator_states()
    try:
        _require_complete(optimizer)
        create = _verified_method(optimizer, groups)
        for place, group in enumerate(groups):
            for parameter in group["params"]:
                known = optimizer.state.get(parameter, {})
                for key, value in create(_twin(optimizer, place), group, _stand_in(parameter)).items():
                    if not known or known.get(key, value) is None:  # torch's SGD saves state not yet created as None
                        optimizer.state[parameter][key] = value
    finally:
        set_generator_states(before)


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


def _verified_method(optimizer: torch.optim.Optimizer, groups: Sequence[Group]) -> _Method:
    try:
        for create in (_by_initialisation, _by_idle_update):
            if all(_agrees(optimizer, create, place, group) for place, group in enumerate(groups)):
                return create
        reason = "state created before the first update would not give the same numbers"
    except UnsupportedError:
        raise
    except Exception as error:  # third-party optimizers raise anything
        reason = f"an update of small parameters fails: {type(error).__name__}: {error}"
    raise UnsupportedError(
        f"{type(optimizer).__name__} is not supported: {reason}; use another optimizer or other settings (SGD "
        "without dampening; not Rprop, ASGD or LBFGS)"
    )


def _twin(optimizer: torch.optim.Optimizer, place: int) -> torch.optim.Optimizer:
    """An optimizer of the same kind and settings, without state, parameters or hooks, for its group at `place`: of a
    list with an entry for each group it has that one."""
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name == "step":  # set by a scheduler that wraps the step of this one optimizer
            continue
        if isinstance(value, list):
            value = value[place : place + 1] if len(value) == len(optimizer.param_groups) else [*value]
        twin.__dict__[name] = OrderedDict() if name.endswith("hooks") else value
    twin.state, twin.param_groups = defaultdict(dict), []
    return twin


def _settings(group: Group) -> dict[str, Any]:
    """The settings in a group, without what updates make: tensors with dimensions. None of them is shared."""
    own = {key: value for key, value in group.items() if not any(map(is_item, _parts(value)))}
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in own.items()}


def _stand_in(parameter: torch.Tensor) -> torch.Tensor:
    """A copy, with a gradient of -0.0."""
    copied = parameter.detach().clone().requires_grad_()
    copied.grad = torch.full_like(copied, -0.0)
    return copied


def _by_initialisation(twin: torch.optim.Optimizer, group: Group, parameter: torch.Tensor) -> State:
    create = getattr(twin, "_init_group", None)
    if create is None:
        return {}
    lists = len(inspect.signature(create).parameters) - 1  # that it fills for the update
    create({**group, "params": [parameter]}, *([] for _ in range(lists)))
    return dict(twin.state.get(parameter, {}))


def _by_idle_update(twin: torch.optim.Optimizer, group: Group, parameter: torch.Tensor) -> State:
    twin.param_groups = [{**_settings(group), "params": [parameter], **{k: v for k, v in _IDLE.items() if k in group}}]
    _update(twin)
    state = twin.state.get(parameter, {})
    return {key: value * 0 if key == "step" and value == 1 else value for key, value in state.items()}


def _update(twin: torch.optim.Optimizer) -> None:
    """Step once, without the hooks that torch calls for every optimizer of the process."""
    step = type(twin).step
    getattr(step, "__wrapped__", step)(twin)


@dataclass(frozen=True)
class _Bits:
    """The bits of the stand-ins, and of the state of each, by key."""

    parameters: list[Any]
    state: list[dict[str, Any]]

    @classmethod
    def of(cls, twin: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> _Bits:
        states = [twin.state.get(one, {}) for one in parameters]
        return cls(
            [_bits(one) for one in parameters],
            [{key: _bits(value, key, twin) for key, value in state.items()} for state in states],
        )

    @property
    def keys(self) -> list[set[str]]:
        """The keys of each parameter's state."""
        return [set(state) for state in self.state]


def _agrees(optimizer: torch.optim.Optimizer, create: _Method, place: int, group: Group) -> bool:
    """Whether `create` makes all state that updates of this group use, and stand-ins are trained to the same bits."""
    small = [torch.Size(min(extent, _EXTENT) for extent in one.shape) for one in group["params"]]
    kinds = list(dict.fromkeys((p.dtype, p.device, shape) for p, shape in zip(group["params"], small, strict=True)))
    twins = partial(_twin, optimizer, place)
    without = _trained(twins, group, kinds, lambda *args: {})
    created = _trained(twins, group, kinds, create)
    if kinds and any(before.parameters == after.parameters for before, after in pairwise(without)):
        raise UnsupportedError(f"{type(optimizer).__name__}.step() changes no parameter of its groups")
    return created[0].keys == without[-1].keys and created[1:] == without[1:]


def _trained(
    twins: Callable[[], torch.optim.Optimizer], group: Group, kinds: Sequence[Any], create: _Method
) -> list[_Bits]:
    """The bits of stand-ins of these (dtype, device, shape) before the first update and after each."""
    generator = torch.Generator().manual_seed(1)

    def numbers(kind: Any) -> torch.Tensor:
        dtype, device, shape = kind
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    twin = twins()
    parameters = [numbers(kind).requires_grad_() for kind in kinds]
    settings = _settings(group)
    if "lr" in group:
        settings["lr"] = torch.full_like(group["lr"], _RATE) if isinstance(group["lr"], torch.Tensor) else _RATE
    twin.param_groups = [{**settings, "params": parameters}]
    for parameter in parameters:
        created = create(twins(), group, _stand_in(parameter))
        if created:
            twin.state[parameter].update(created)
    numbers_before = _number_attributes(twin)
    bits = [_Bits.of(twin, parameters)]
    for _ in range(_UPDATES):
        for parameter, kind in zip(parameters, kinds, strict=True):
            parameter.grad = numbers(kind)
            parameter.grad.view(-1)[1:2] = -0.0  # not of a single element, which would never change
        _update(twin)
        bits.append(_Bits.of(twin, parameters))
    unknown = [key for key in twin.state if not any(key is one for one in parameters)]
    if unknown:
        raise UnsupportedError(
            f"{type(twin).__name__} keeps state under '{unknown[0]}', not under a parameter; use another optimizer"
        )
    if numbers_before != _number_attributes(twin):
        raise UnsupportedError(
            f"{type(twin).__name__} keeps counters in attributes, not in its state; use another optimizer"
        )
    return bits


def _number_attributes(twin: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: value for name, value in vars(twin).items() if type(value) in (int, float)}


def _bits(value: Any, key: str = "", twin: Any = None) -> Any:
    if isinstance(value, torch.Tensor):
        dense = value.detach().cpu().contiguous()
        return str(dense.dtype), tuple(dense.shape), dense.reshape(-1).view(torch.uint8).numpy().tobytes()
    if type(value) not in _PLAIN:
        raise UnsupportedError(
            f"{type(twin).__name__} keeps a {type(value).__name__} as '{key}' in its state, but only tensors and "
            "plain numbers can be captured; use another optimizer"
        )
    return type(value), value
