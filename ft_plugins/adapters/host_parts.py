"""What the hosts of all frameworks share: items with live tensors, optimizer values, and recomputing an iteration.

Invariant: values are set in place, each in a tensor of its own: schedulers hold the dictionaries of parameter groups,
and a 'step' that parameters share is incremented once per parameter. `recomputes` says what `recompute` can do; where
it cannot, `why_not` says why, from the start.

In: live tensors and what a framework says of them, torch optimizers; a replay, where the framework's iterations can be
kept. Out: `StateItem`, and what a host reports of it; plain values, and back; the replay, or a refusal by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch

from ..errors import InventoryError, ResumeError, UnsupportedError
from ..model.inventory import Inventory, Item, IterationSpan, Role
from ..model.topology import Topology

UPDATE = frozenset({IterationSpan.UPDATE})
ANYWHERE = frozenset(IterationSpan)
NEVER: frozenset[IterationSpan] = frozenset()


@dataclass(frozen=True)
class StateItem:
    """An item and where its tensor lives now."""

    item: Item
    read: Callable[[], torch.Tensor]


class StateItems:
    """The part of `model.host.Host` that follows from what a rank holds, whichever framework it is of."""

    rank: int
    _topology: Topology

    @cached_property
    def _state_items(self) -> list[StateItem]:
        """Found once; creates the optimizer's state where no update has done so yet."""
        raise NotImplementedError

    def topology(self) -> Topology:
        """Where every rank of the job stands."""
        return self._topology

    def inventory(self) -> Inventory:
        """What this rank's state is made of; creates the optimizer's state where no update has done so yet."""
        return Inventory.of(self.rank, (one.item for one in self._state_items))

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The live tensors, by item name."""
        return {one.item.name: one.read() for one in self._state_items}


def state_item(
    name: str,
    role: Role,
    replicas: tuple[int, ...],
    layer: int | None,
    changed_by: frozenset[IterationSpan],
    read: Callable[[], torch.Tensor],
    piece: tuple[int, int, int] | None = None,
    counts: bool = True,
) -> StateItem:
    """The item that `read` shows. Raises InventoryError when it is not dense in memory."""
    tensor = read()
    if piece is not None and piece[1] - piece[0] != tensor.numel():
        piece = None  # not laid out as its parameter is: it stays where it is
    if not tensor.is_contiguous():
        raise InventoryError(f"item '{name}' of shape {tuple(tensor.shape)} is not dense in memory, and must be")
    dtype, nbytes = str(tensor.dtype).removeprefix("torch."), tensor.numel() * tensor.element_size()
    shape = tuple(tensor.shape)
    return StateItem(Item(name, dtype, shape, nbytes, role, replicas, layer, changed_by, piece, counts), read)


def is_item(value: Any) -> bool:
    """Whether a value of an optimizer's state is an item of its own; what has no dimensions ('step') is small state."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def scalars_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """What an optimizer keeps for a parameter beside items."""
    return {key: value for key, value in state.items() if not is_item(value)}


def first_step(group: Mapping[str, Any], parameter: torch.Tensor) -> torch.Tensor:
    """The 'step' with which torch's Adam begins for a parameter of `group`."""
    on_device = group["capturable"] or group["fused"]
    return torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")


def groups(optimizer: Any) -> list[dict[str, Any]]:
    """The values of the parameter groups (lr, weight decay, betas, FusedAdam's 'step'), without the parameters."""
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def restore_groups(optimizer: Any, saved: Sequence[Mapping[str, Any]]) -> None:
    """Set the values of the parameter groups, in place: schedulers hold the dictionaries, loops a learning rate."""
    if len(saved) != len(optimizer.param_groups):
        raise ResumeError(
            f"the optimizer has {len(optimizer.param_groups)} parameter groups, captured were {len(saved)}: "
            "resume with the model and the optimizer settings of the captured job"
        )
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        group.update({key: _in_place(key, value, group.get(key)) for key, value in values.items()})


def _in_place(key: str, value: Any, present: Any) -> Any:
    """`present` with what `value` holds, where both are tensors of a kind, or tuples of them; but for a 'step', which
    groups may share by now."""
    if isinstance(value, tuple) and isinstance(present, tuple) and len(value) == len(present):
        return tuple(_in_place(key, *pair) for pair in zip(value, present, strict=True))
    of_a_kind = isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor) and key != "step"
    if not of_a_kind or (value.shape, value.dtype) != (present.shape, present.dtype):
        return own_copy(value, present)
    with torch.no_grad():
        return present.copy_(value)


def own_copy(value: Any, like: Any) -> Any:
    """`value` as a tensor of its own, on the device of the one that it replaces."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone().to(like.device if isinstance(like, torch.Tensor) else "cpu")


R = TypeVar("R")


class Recompute(Generic[R]):
    """Of a host, beside the rest of its `Steps`."""

    rank: int
    clips_together = ""
    why_not = "what iterations are computed from is kept only where replicas are compared or averaged"
    _replay: R | None = None

    @property
    def recomputes(self) -> bool:
        """Whether `recompute` can be called."""
        return self._replay is not None

    def _start_replay(self, build: Callable[[], R]) -> None:
        """Keep iterations from now on by what `build` makes, unless it raises UnsupportedError."""
        try:
            self._replay, self.why_not = build(), ""
        except UnsupportedError as error:
            self.why_not = str(error)

    def _required_replay(self) -> R:
        """Raises UnsupportedError where nothing is kept."""
        if self._replay is None:
            raise UnsupportedError(f"rank {self.rank}: gradients cannot be computed again here: {self.why_not}")
        return self._replay
