"""What a torch module has in addition to tensors, and objects around it and its optimizer that the host was not given.

Invariant: what is read here is plain values for the codec, and setting it makes the module what it was: which
parameters are trained, which modules are in training mode, and what modules keep by `get_extra_state`.

In: a module, an optimizer. Out: plain values, and back; names of what is not captured.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ..errors import ConfigError, InventoryError
from ..snapshot import codec

_DEPTH = 3  # of attributes that are looked into for schedulers


def read_modes(module: torch.nn.Module) -> dict[str, Any]:
    """Which parameters are trained, which modules are in training mode, what modules keep beside their tensors."""
    return {
        "trained": [name for name, one in module.named_parameters() if one.requires_grad],
        "training": [name for name, part in module.named_modules() if part.training],
        "extra": {name: part.get_extra_state() for name, part in _keepers(module)},
    }


def write_modes(module: torch.nn.Module, saved: Mapping[str, Any]) -> None:
    """Set them."""
    trained, training = set(saved["trained"]), set(saved["training"])
    for name, one in module.named_parameters():
        one.requires_grad_(name in trained)
    for name, part in module.named_modules():
        part.training = name in training
    for name, part in _keepers(module):
        if name in saved["extra"]:
            part.set_extra_state(saved["extra"][name])


def require_encodable(module: torch.nn.Module, place: str) -> None:
    """Raises InventoryError, naming the module whose extra state cannot be captured."""
    for name, part in _keepers(module):
        try:
            codec.encode(part.get_extra_state())
        except InventoryError as error:
            raise InventoryError(
                f"{place}: what get_extra_state of '{name}' ({type(part).__name__}) gives cannot be captured: {error}; "
                "have it give plain values and tensors"
            ) from error


def _keepers(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, part in module.named_modules():
        if type(part).get_extra_state is not torch.nn.Module.get_extra_state:
            yield name, part


def stray_tensors(module: torch.nn.Module) -> list[str]:
    """Tensors that are attributes of modules, but neither parameters nor buffers nor views of such."""
    known = {one.untyped_storage().data_ptr() for one in (*module.parameters(), *module.buffers())}
    return [
        f"{name}.{key}" if name else key
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in known
    ]


def unnamed_scheduler(optimizer: torch.optim.Optimizer, given: Any) -> LRScheduler | None:
    """A scheduler of torch that moves this optimizer and is neither `given` nor inside of it. Looks at all objects of
    the process: once."""
    named = {id(one) for one in _inside(given, _DEPTH)}
    for one in gc.get_objects():
        ours = issubclass(type(one), LRScheduler) and getattr(one, "optimizer", None) is optimizer
        if ours and id(one) not in named:
            return one  # type: ignore[no-any-return]
    return None


def _inside(value: Any, depth: int) -> Iterator[Any]:
    yield value
    if depth:
        within = value if isinstance(value, list | tuple) else getattr(value, "__dict__", {}).values()
        for part in list(within):
            yield from _inside(part, depth - (not isinstance(part, list | tuple)))


def require_kinds(model: Any, optimizer: Any, scheduler: Any) -> None:
    """What TorchHost is given is what it expects. Raises ConfigError."""
    expected = "expected TorchHost(model, optimizer, scheduler=None, sampler=None)"
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"{expected}, found a {type(model).__name__} as the model: give a torch.nn.Module")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"{expected}, found a {type(optimizer).__name__} as the optimizer: give one of torch.optim's")
    if scheduler is not None and not (hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict")):
        raise ConfigError(
            f"{expected}, found a {type(scheduler).__name__} as the scheduler, which has no state_dict and "
            "load_state_dict; a learning rate that follows from the iteration needs none"
        )
