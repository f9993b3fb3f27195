"""The optimizers of a loop as one: a single one, or several (a GAN has two), and their schedulers.

Invariant: with a single one, names and values are those of that optimizer. Of several, every name has the optimizer's
name in it, so two of them may update the same parameter. An iteration may step each of them any number
of times, also not at all: its update lasts from the first step to the end of the loop's body.

In: what a loop passes as optimizer and scheduler. Out: `Optimizers`, `Schedulers`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..errors import ConfigError, ResumeError, UnsupportedError
from .host_parts import groups, restore_groups, scalars_of
from .parameter_groups import Groups, numbered
from .planned_state import allocate, items_of, plan_state, planned, set_numbers

EXPECTED = "expected TorchHost(model, optimizer, scheduler=None, sampler=None)"


def by_name(given: Any) -> dict[str, Any]:
    """One or several, by name: '' for a single one, else the keys of a mapping or the places in a sequence."""
    if isinstance(given, Mapping):
        named = {str(key): one for key, one in given.items()}
    elif isinstance(given, Sequence):
        named = {str(place): one for place, one in enumerate(given)}
    else:
        named = {"": given}
    return {"": next(iter(named.values()))} if len(named) == 1 else named


class Optimizers:
    """The optimizers of a loop, as one."""

    def __init__(self, given: Any) -> None:
        """`given`: an optimizer, or a sequence or dict of several. Raises ConfigError."""
        self._by_name: dict[str, torch.optim.Optimizer] = by_name(given)
        if not self._by_name:
            raise ConfigError(f"{EXPECTED}, found no optimizer in the {type(given).__name__}")
        for one in self:
            if not isinstance(one, torch.optim.Optimizer):
                raise ConfigError(f"{EXPECTED}, found a {type(one).__name__} as the optimizer: pass one of torch.optim")
        if len({id(one) for one in self}) < len(self._by_name):
            raise ConfigError(f"{EXPECTED}, found the same optimizer twice in the {type(given).__name__}")

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self._by_name.values())

    @property
    def several(self) -> bool:
        return len(self._by_name) > 1

    @property
    def kinds(self) -> str:
        """The classes, with names if there are several."""
        return ", ".join(f"{name} {type(one).__name__}".strip() for name, one in self._by_name.items())

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all."""
        return [group for one in self for group in one.param_groups]

    def members(self) -> list[list[int]]:
        """The ids of the parameters of each group."""
        return [[id(one) for one in group["params"]] for group in self.param_groups]

    def named_groups(self, names: Mapping[torch.Tensor, str]) -> Groups:
        """The names of the parameters of each group."""
        groups: dict[str, list[str]] = {}
        for name, one in self._by_name.items():
            groups |= numbered(([names[each] for each in group["params"]] for group in one.param_groups), name)
        return groups

    def used(self, names: Mapping[torch.Tensor, str]) -> dict[torch.optim.Optimizer, Collection[str]]:
        """The names of the parameters whose gradients a step of each uses. A single one is taken to use all: clipping
        does."""
        if not self.several:
            return {one: set(names.values()) for one in self}
        return {one: {names[each] for group in one.param_groups for each in group["params"]} for one in self}

    def plan_state(self) -> None:
        """See `planned_state.plan_state`."""
        for one in self:
            plan_state(one)

    def allocate(self, names: Mapping[torch.Tensor, str], absent: Collection[str]) -> None:
        """Give memory to all `moments` but those `absent`, by name."""
        for optimizer, one in self._by_name.items():
            for parameter in planned(one):
                name = _of(optimizer, names[parameter])
                allocate(one, parameter, lambda key, name=name: f"{name}:{key}" in absent)  # type: ignore[misc]

    def moments(self, names: Mapping[torch.Tensor, str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that each keeps of a parameter, or stand-ins, with a name, in the order of `names`."""
        places = {parameter: place for place, parameter in enumerate(names)}
        for optimizer, one in self._by_name.items():
            kept = {**planned(one), **one.state}
            for parameter in sorted(kept, key=lambda parameter: places.get(parameter, len(names))):
                name = _of(optimizer, names.get(parameter, "outside of the model"))
                for key, value in items_of(one, parameter).items():
                    yield f"{name}:{key}", value

    def values(self, names: Mapping[torch.Tensor, str]) -> dict[str, Any]:
        """The groups of all, and the numbers and 0-dimensional tensors of their state, by parameter."""
        scalars = {
            _of(optimizer, names[parameter]): scalars_of(state)
            for optimizer, one in self._by_name.items()
            for parameter, state in one.state.items()
        }
        return {"groups": groups(self), "scalars": scalars}

    def restore(self, saved: Mapping[str, Any], names: Mapping[torch.Tensor, str]) -> None:
        """Set `values`, in place. Raises ResumeError if the number of groups differs."""
        restore_groups(self, saved["groups"])
        for parameter, name in names.items():
            for optimizer, one in self._by_name.items():
                set_numbers(one, parameter, saved["scalars"].get(_of(optimizer, name), {}))

    def single(self, what: str) -> torch.optim.Optimizer:
        """The only optimizer. Raises UnsupportedError if there are several, naming what then does not work."""
        if self.several:
            raise UnsupportedError(
                f"TorchHost was given {len(self._by_name)} optimizers ({self.kinds}), and {what} with one only: drop "
                "that flag, or pass one optimizer with a group for each part of the model"
            )
        return next(iter(self))


def _of(optimizer: str, parameter: str) -> str:
    """The name of what one of several optimizers keeps of a parameter."""
    return f"{parameter}:{optimizer}" if optimizer else parameter


class Schedulers:
    """Several learning rate schedulers, as one."""

    def __init__(self, named: Mapping[str, Any]) -> None:
        self.names, self.schedulers = list(named), list(named.values())

    def state_dict(self) -> dict[str, Any]:
        return {name: one.state_dict() for name, one in zip(self.names, self.schedulers, strict=True)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ResumeError for the state of other schedulers."""
        if list(state) != self.names:
            raise ResumeError(
                f"this job has the schedulers {self.names}, the captured job had {list(state)}: pass TorchHost the "
                "schedulers of the captured job, or start with --ftp-resume fresh"
            )
        for one, part in zip(self.schedulers, state.values(), strict=True):
            one.load_state_dict(part)


def scheduler_of(given: Any) -> Any:
    """One or several schedulers as one; None for none. Raises ConfigError for what has no state."""
    several = isinstance(given, Mapping | Sequence)
    named = {name: one for name, one in by_name(given).items() if one is not None}
    for one in named.values():
        if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
            raise ConfigError(
                f"{EXPECTED}, found a {type(one).__name__} as the scheduler, which has no state_dict and "
                "load_state_dict; pass none if the learning rate follows from the iteration"
            )
    if several and len(named) > 1:
        return Schedulers(named)
    return next(iter(named.values()), None)
