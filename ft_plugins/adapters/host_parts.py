"""Parts that the hosts of all frameworks share: state items, optimizer values, and recomputing an iteration.

Invariant: values are restored in place, because schedulers hold references to the parameter groups. Each 'step' gets a
tensor of its own, because a shared one would be incremented once per parameter.

In: live tensors, torch optimizers, a function that builds the framework's replay. Out: `StateItem`s and what a host
reports of them; plain values, and back; the replay, or UnsupportedError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch

from ..base import faults
from ..errors import InventoryError, ResumeError, UnsupportedError
from ..model.inventory import Inventory, Item, IterationSpan, Role
from ..model.topology import Topology

UPDATE = frozenset({IterationSpan.UPDATE})
ANYWHERE = frozenset(IterationSpan)
NEVER: frozenset[IterationSpan] = frozenset()


@dataclass(frozen=True)
class StateItem:
    """An item and a function that returns its live tensor."""

    item: Item
    read: Callable[[], torch.Tensor]


R = TypeVar("R")


class FrameworkHost(Generic[R]):
    """The part of a host that follows from a rank's state items, and from a replay of type R."""

    rank: int
    _topology: Topology
    clips_together = ""
    no_recompute_reason = "inputs of iterations are recorded only if replicas are compared or averaged"
    _replay: R | None = None

    @cached_property
    def _state_items(self) -> list[StateItem]:
        """All items of this rank. Creates the optimizer's state if no update has done so yet."""
        raise NotImplementedError

    @cached_property
    def _copies(self) -> list[StateItem]:
        """What `copies` names. Raises UnsupportedError."""
        raise NotImplementedError

    def topology(self) -> Topology:
        return self._topology

    def inventory(self) -> Inventory:
        return Inventory.of(self.rank, (one.item for one in self._state_items))

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {one.item.name: one.read() for one in self._state_items}

    def copies(self) -> Inventory:
        return Inventory.of(self.rank, (one.item for one in self._copies))

    def copy_tensors(self) -> Mapping[str, torch.Tensor]:
        return {one.item.name: one.read() for one in self._copies}

    def finish_copies(self) -> None:
        pass

    @property
    def recomputes(self) -> bool:
        return self._replay is not None

    def _start_replay(self, build: Callable[[], R]) -> None:
        """Record iterations from now on with the replay that `build` returns, unless it raises UnsupportedError."""
        try:
            self._replay, self.no_recompute_reason = build(), ""
        except UnsupportedError as error:
            self.no_recompute_reason = str(error)

    def _required_replay(self) -> R:
        """Raises UnsupportedError if iterations are not recorded."""
        if self._replay is None:
            raise UnsupportedError(f"rank {self.rank}: gradients cannot be recomputed: {self.no_recompute_reason}")
        return self._replay


def state_item(
    name: str,
    role: Role,
    replicas: tuple[int, ...],
    layer: int | None,
    changed_by: frozenset[IterationSpan],
    read: Callable[[], torch.Tensor],
    piece: tuple[int, int, int] | None = None,
    in_norm: bool = True,
) -> StateItem:
    """The item of what this rank holds of the tensor that `read` returns. Raises InventoryError if it is not
    contiguous."""
    held = lambda: local_part(read())  # noqa: E731
    tensor = held()
    if piece is not None and piece[1] - piece[0] != tensor.numel():
        piece = None  # laid out differently from its parameter, so it cannot be resharded
    if not tensor.is_contiguous():
        raise InventoryError(
            f"item '{name}' of shape {tuple(tensor.shape)} is not contiguous in memory, so that it cannot be captured"
        )
    dtype, nbytes = str(tensor.dtype).removeprefix("torch."), tensor.numel() * tensor.element_size()
    shape = tuple(tensor.shape)
    return StateItem(Item(name, dtype, shape, nbytes, role, replicas, layer, changed_by, piece, in_norm), held)


def reach_fault_points(
    forwards: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer], iteration: Callable[[], int]
) -> None:
    """From now on reach the fault points before the first forward of each iteration, and after a step of `optimizers`.
    `iteration`: the number of the one under way."""
    reached = 0

    def before_forward(module: torch.nn.Module, args: Any) -> None:
        nonlocal reached
        if module.training and reached != iteration():
            reached = iteration()
            faults.reach("iteration.forward", iteration=reached)

    def after_step(*call: Any) -> None:
        faults.reach("update.middle", iteration=iteration())

    for module in forwards:
        module.register_forward_pre_hook(before_forward)
    for one in optimizers:
        one.register_step_post_hook(after_step)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of `tensor`: the live local tensor of a DTensor; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def is_item(value: Any) -> bool:
    """Whether a value of an optimizer's state is an item; tensors without dimensions ('step') are small state."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def scalars_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The values of an optimizer's state for one parameter that are not items."""
    return {key: value for key, value in state.items() if not is_item(value)}


def first_step(group: Mapping[str, Any], parameter: torch.Tensor) -> torch.Tensor:
    """The 'step' with which torch's Adam starts a parameter of `group`."""
    on_device = group["capturable"] or group["fused"]
    return torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")


def groups(optimizer: Any) -> list[dict[str, Any]]:
    """The values of the parameter groups (lr, weight decay, betas, FusedAdam's 'step'); no parameters, no classes."""
    return [
        {k: v for k, v in group.items() if k != "params" and not isinstance(v, type)}
        for group in optimizer.param_groups
    ]


def restore_groups(
    optimizer: Any, saved: Sequence[Mapping[str, Any]], updated: Mapping[int, torch.Tensor] | None = None
) -> None:
    """Set the values of the parameter groups in place. `updated`: a tensor of each, where groups have none between
    updates. Raises ResumeError if their number differs."""
    if len(saved) != len(optimizer.param_groups):
        raise ResumeError(
            f"the optimizer has {len(optimizer.param_groups)} parameter groups, the captured one had {len(saved)}: "
            "resume with the model and the optimizer settings of the captured job"
        )
    for number, (group, values) in enumerate(zip(optimizer.param_groups, saved, strict=True)):
        if "step" not in values:  # Megatron's own load leaves its count there, also where torch counts per parameter
            group.pop("step", None)
        near = next(iter(group["params"]), (updated or {}).get(number))
        group.update(
            {k: _in_place(k, value, group[k]) if k in group else _new(value, near) for k, value in values.items()}
        )


def _new(value: Any, near: torch.Tensor | None) -> Any:
    """A copy of what updates put into a group, with its tensors on the device of the parameter `near`."""
    return type(value)(_new(part, near) for part in value) if type(value) in (list, tuple) else own_copy(value, near)


def _in_place(key: str, value: Any, present: Any) -> Any:
    """Copy `value` into `present` if both are tensors (or tuples or lists of them) of one shape and dtype; else return
    a new one. A 'step' is always new: groups may share the present one."""
    if type(value) in (list, tuple) and type(present) is type(value) and len(value) == len(present):
        return type(value)(_in_place(key, *pair) for pair in zip(value, present, strict=True))
    are_tensors = isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor) and key != "step"
    if not are_tensors or (value.shape, value.dtype) != (present.shape, present.dtype):
        return own_copy(value, present)
    with torch.no_grad():
        return present.copy_(value)


def own_copy(value: Any, like: Any) -> Any:
    """A copy of `value`, if it is a tensor, on the device of the tensor `like` that it replaces."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone().to(like.device if isinstance(like, torch.Tensor) else "cpu")
