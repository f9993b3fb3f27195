"""Create an optimizer's state before its first update, exactly as that update would create it.

Invariant: what is created was proven first. Small stand-ins of the parameters are trained with the created state and
without any; parameters and state must be equal bit for bit after each update, zeros with their signs included. An
optimizer for which no way passes is refused by name. Nothing but `optimizer.state` is written: parameters, gradients,
groups and random number generators stay as they are, hooks and schedulers see no step.

Two ways are tried, in this order:

    initialisation   torch's optimizers create state in `_init_group`: it is called, and no update follows
    idle update      one update of stand-ins with learning rate and weight decay 0 and gradients of -0.0, which changes
                     nothing that it is added to; then 'step' is set back from 1 to 0

In: an optimizer whose state is all in `optimizer.state` and in its groups. Out: the same one, with its state.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from ..errors import UnsupportedError
from .loaders import generator_states, set_generator_states

Group = Mapping[str, Any]
State = dict[str, Any]
_Way = Callable[[torch.optim.Optimizer, Group, torch.Tensor], State]

_UPDATES = 3  # of the proof: state may be created in the first, and used otherwise in the second
_RATE = 0.0078125  # of the proof; none that a group has, so that state made of the learning rate is noticed
_EXTENT = 3  # of a stand-in, in each dimension
_IDLE = {"lr": 0.0, "weight_decay": 0.0, "maximize": False}
_KNOWN = {"state", "param_groups", "defaults"}
_PLAIN = (bool, int, float, str, type(None))


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter the state that its first update would create. Idempotent.

    Raises UnsupportedError, naming the optimizer, where that cannot be done exactly.
    """
    around = generator_states()
    try:
        _require_followed(optimizer)
        way = _proven(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                known = optimizer.state.get(parameter, {})
                for key, value in way(_twin(optimizer), group, _stand_in(parameter)).items():
                    if not known or known.get(key, value) is None:  # None: as torch's SGD saves what is not there yet
                        optimizer.state[parameter][key] = value
    finally:
        set_generator_states(around)


def _require_followed(optimizer: torch.optim.Optimizer) -> None:
    """Nothing that an update changes may be kept elsewhere."""
    for name, value in vars(optimizer).items():
        if name not in _KNOWN and any(_holds(part) for part in _parts(value)):
            raise UnsupportedError(
                f"{type(optimizer).__name__} keeps tensors in '{name}', not in its state: it cannot be followed; use "
                "an optimizer that keeps them in optimizer.state, by parameter"
            )


def _parts(value: Any, depth: int = 3) -> Iterator[Any]:
    yield value
    if depth and isinstance(value, dict | list | tuple | set):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _parts(part, depth - 1)


def _holds(value: Any) -> bool:
    return isinstance(value, torch.Tensor | torch.optim.Optimizer | torch.nn.Module)


def _proven(optimizer: torch.optim.Optimizer) -> _Way:
    try:
        for way in (_by_initialisation, _by_idle_update):
            if all(_agrees(optimizer, way, group) for group in optimizer.param_groups):
                return way
        reason = "state that is created before the first update would not give the same numbers"
    except UnsupportedError:
        raise
    except Exception as error:  # of an optimizer that is not ours
        reason = f"an update on small parameters fails: {type(error).__name__}: {error}"
    raise UnsupportedError(
        f"{type(optimizer).__name__} cannot be followed, for {reason}; use another optimizer or other settings (SGD "
        "without dampening; not Rprop, ASGD or LBFGS)"
    )


def _twin(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of the same kind and settings, without state, parameters or hooks."""
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name != "step":  # as a scheduler has wrapped it, for this optimizer alone
            twin.__dict__[name] = OrderedDict() if name.endswith("hooks") else value
    twin.state, twin.param_groups = defaultdict(dict), []
    return twin


def _stand_in(parameter: torch.Tensor) -> torch.Tensor:
    """A copy, with a gradient of -0.0."""
    copied = parameter.detach().clone().requires_grad_()
    copied.grad = torch.full_like(copied, -0.0)
    return copied


def _by_initialisation(twin: torch.optim.Optimizer, group: Group, parameter: torch.Tensor) -> State:
    create = getattr(twin, "_init_group", None)
    if create is None:
        return {}
    collected = len(inspect.signature(create).parameters) - 1  # lists that it fills, for the update
    create({**group, "params": [parameter]}, *([] for _ in range(collected)))
    return dict(twin.state.get(parameter, {}))


def _by_idle_update(twin: torch.optim.Optimizer, group: Group, parameter: torch.Tensor) -> State:
    twin.param_groups = [{**group, "params": [parameter], **{k: v for k, v in _IDLE.items() if k in group}}]
    _update(twin)
    state = twin.state.get(parameter, {})
    return {key: value * 0 if key == "step" and value == 1 else value for key, value in state.items()}


def _update(twin: torch.optim.Optimizer) -> None:
    """One, without the hooks that torch calls for every optimizer of the process."""
    step = type(twin).step
    getattr(step, "__wrapped__", step)(twin)


@dataclass(frozen=True)
class _Moment:
    """Bits of small parameters, and of the state of each, by key."""

    parameters: list[Any]
    state: list[dict[str, Any]]

    @classmethod
    def of(cls, twin: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> _Moment:
        """As they are now."""
        kept = [twin.state.get(one, {}) for one in parameters]
        return cls(
            [_bits(one) for one in parameters],
            [{key: _bits(value, key, twin) for key, value in state.items()} for state in kept],
        )

    @property
    def keys(self) -> list[set[str]]:
        """What there is of each parameter's state."""
        return [set(state) for state in self.state]


def _agrees(optimizer: torch.optim.Optimizer, way: _Way, group: Group) -> bool:
    """Whether small parameters of this group are trained to the same bits with the created state as without, and all
    state that the updates use is created."""
    small = [torch.Size(min(extent, _EXTENT) for extent in one.shape) for one in group["params"]]
    kinds = list(dict.fromkeys((p.dtype, p.device, shape) for p, shape in zip(group["params"], small, strict=True)))
    without = _trained(optimizer, group, kinds, lambda *args: {})
    created = _trained(optimizer, group, kinds, way)
    if kinds and any(before.parameters == after.parameters for before, after in pairwise(without)):
        raise UnsupportedError(f"{type(optimizer).__name__}.step() changes no parameter of its groups")
    return created[0].keys == without[-1].keys and created[1:] == without[1:]


def _trained(optimizer: torch.optim.Optimizer, group: Group, kinds: Sequence[Any], way: _Way) -> list[_Moment]:
    """Before the first update, and after each."""
    generator = torch.Generator().manual_seed(1)

    def numbers(kind: Any) -> torch.Tensor:
        dtype, device, shape = kind
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    twin = _twin(optimizer)
    parameters = [numbers(kind).requires_grad_() for kind in kinds]
    settings = dict(group)
    if "lr" in group:
        settings["lr"] = torch.full_like(group["lr"], _RATE) if isinstance(group["lr"], torch.Tensor) else _RATE
    twin.param_groups = [{**settings, "params": parameters}]
    for parameter in parameters:
        created = way(_twin(optimizer), group, _stand_in(parameter))
        if created:
            twin.state[parameter].update(created)
    counts = _counts(twin)
    found = [_Moment.of(twin, parameters)]
    for _ in range(_UPDATES):
        for parameter, kind in zip(parameters, kinds, strict=True):
            parameter.grad = numbers(kind)
            parameter.grad.view(-1)[:1] = -0.0
        _update(twin)
        found.append(_Moment.of(twin, parameters))
    strange = [key for key in twin.state if not any(key is one for one in parameters)]
    if strange:
        raise UnsupportedError(f"{type(optimizer).__name__} keeps state of no parameter: '{strange[0]}'")
    if counts != _counts(twin):
        raise UnsupportedError(f"{type(optimizer).__name__} counts in attributes of its own, not in its state")
    return found


def _counts(twin: torch.optim.Optimizer) -> dict[str, Any]:
    """Numbers among its attributes."""
    return {name: value for name, value in vars(twin).items() if type(value) in (int, float)}


def _bits(value: Any, key: str = "", twin: Any = None) -> Any:
    if isinstance(value, torch.Tensor):
        dense = value.detach().cpu().contiguous()
        return str(dense.dtype), tuple(dense.shape), dense.reshape(-1).view(torch.uint8).numpy().tobytes()
    if type(value) not in _PLAIN:
        raise UnsupportedError(
            f"{type(twin).__name__} keeps a {type(value).__name__} as '{key}' in its state, where only tensors and "
            "plain numbers can be followed; use another optimizer"
        )
    return type(value), value
