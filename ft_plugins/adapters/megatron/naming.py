"""Describe a rank's tensors as Megatron's own distributed checkpoint names them, each with its part of a global tensor.

Invariant: keys, global shapes, offsets and splits (such as SwiGLU's gate and value) come from Megatron's
`sharded_state_dict` of the model, matched to parameters and buffers by identity; those of optimizer state from
Megatron's function for optimizer tensors. Nothing is copied or communicated; of splits, only offset and strides of
their views are recorded. Computed once per start; the values do not depend on the iteration.

    tensors     source: an item's name; dtype in the checkpoint; group: which ranks have it, whole or in pieces;
                replica: Megatron's replica id (it saves the smallest); blocks: key, global shape, offset, size, and
                view of the local tensor (first element, strides; [] for all of it in order)
    objects     values in the model's state that are not tensors and never change (extra state without fp8)
    optimizers  kinds, in the order of small state
    arguments   Megatron-LM's, see `arguments`

In: model chunks, optimizers, a function from a parameter to its replicas. Out: plain values for an `Index`.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.utils import unwrap_model

from ...errors import UnsupportedError
from ...snapshot.capture import codec
from . import state
from .export import arguments_to_plain
from .state import Replicas
from .support import facts, is_stub

_OBJECT_BYTES = 1 << 16
_PREFIX = "optimizer.state"
_UNTESTED = {  # by what the optimizers show
    "layer_wise": "a layer-wise optimizer",
    "masters": "an optimizer that keeps masters",
    "fp8_parameters": "fp8 parameters",
    "delayed_scaling": "delayed scaling",
}


def names(
    chunks: Sequence[Any],
    optimizers: Sequence[Any],
    rank: int,
    replicas: Replicas,
    arguments: argparse.Namespace | None,
) -> dict[str, Any]:
    """See above. Raises UnsupportedError for state that cannot be described, and what Megatron itself raises."""
    sharded, built = _ShardedState(chunks, optimizers, rank, replicas), facts(chunks, optimizers)
    if untested := [phrase for fact, phrase in _UNTESTED.items() if built[fact]]:
        raise UnsupportedError(f"what a job with {' and '.join(untested)} saves is not tested")
    tensors = [*sharded.parameters(), *sharded.buffers(), *sharded.optimizer_state()]
    return {
        "framework": "megatron",
        "groups": [list(group) for group in sharded.groups],
        "tensors": tensors,
        "objects": list(sharded.objects()),
        "optimizers": [_kind(optimizer) for optimizer in optimizers],
        "arguments": arguments_to_plain(arguments) if arguments is not None and rank == 0 else None,
    }


class _ShardedState:
    """Megatron's sharded state of this rank's model, by parameter and by buffer."""

    def __init__(self, chunks: Sequence[Any], optimizers: Sequence[Any], rank: int, replicas: Replicas) -> None:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True, "dp_cp_group": group}
        states = [chunk.sharded_state_dict(metadata=dict(metadata)) for chunk in unwrap_model(list(chunks))]
        self._values = [value for each in states for value in nested_values(each)]
        self._sharded: dict[int, ShardedTensor | ShardedTensorFactory] = {}
        for value in self._values:
            if isinstance(value, ShardedTensor | ShardedTensorFactory):
                self._sharded.setdefault(id(value.data), value)
        self._chunks, self._optimizers, self._rank, self._replicas = chunks, optimizers, rank, replicas
        self._names = state.parameter_names(chunks)
        self.groups: list[tuple[int, ...]] = []

    def parameters(self) -> Iterator[dict[str, Any]]:
        """The model's parameters; the source of one with a master, or a shard of one, is the master."""
        mastered = {p for o in self._optimizers for p in state.covered(o)} - {
            one.parameter
            for optimizer in self._optimizers
            for one in state.trained(optimizer, self._names)
            if one.main is one.parameter
        }
        for parameter, name in self._names.items():
            if id(parameter) in self._sharded:
                source = f"{name}:main" if parameter in mastered else name
                sharded = self._sharded[id(parameter)]
                yield self._tensor(source, self._replicas(parameter), sharded, parameter)

    def buffers(self) -> Iterator[dict[str, Any]]:
        """The buffers that Megatron saves."""
        for one in state.buffers(self._chunks, self._rank):
            buffer = one.read()
            if id(buffer) in self._sharded:
                yield self._tensor(one.item.name, (self._rank,), self._sharded[id(buffer)], buffer)

    def optimizer_state(self) -> Iterator[dict[str, Any]]:
        """Masters and moments."""
        for optimizer in self._optimizers:
            for one in state.trained(optimizer, self._names):
                sharded = self._sharded.get(id(one.parameter))
                if sharded is None:
                    raise UnsupportedError(f"trained parameter '{one.name}' is missing from Megatron's sharded state")
                master = "param" if isinstance(optimizer, DistributedOptimizer) else "fp32_param"
                kinds = {"main": (master, one.main)} if one.main is not one.parameter else {}
                kinds |= {key: (key, value) for key, value in one.moments.items()}
                for key, (name, tensor) in kinds.items():
                    like = torch.empty(one.parameter.shape, dtype=tensor.dtype, device="meta")
                    of_state = make_sharded_optimizer_tensor(sharded, like, f"{_PREFIX}.{name}")
                    yield self._tensor(f"{one.name}:{key}", self._replicas(one.parameter), of_state, like)

    def objects(self) -> Iterator[dict[str, Any]]:
        """Values that are not tensors. Raises UnsupportedError for one that is too large."""
        for value in self._values:
            if isinstance(value, ShardedObject):
                yield {"key": value.unique_key, "replica": _replica(value), "value": _plain_object(value)}

    def _tensor(
        self, source: str, group: tuple[int, ...], sharded: ShardedTensor | ShardedTensorFactory, base: torch.Tensor
    ) -> dict[str, Any]:
        if group not in self.groups:
            self.groups.append(group)
        parts = [sharded]
        if isinstance(sharded, ShardedTensorFactory):
            built = sharded.build()
            parts = list(nested_values(built)) if isinstance(built, dict | list) else [built]
        return {
            "source": source,
            "dtype": str(base.dtype).removeprefix("torch."),
            "group": self.groups.index(group),
            "replica": _replica(sharded),
            "shape": list(base.shape),
            "blocks": [_block(part, base) for part in parts],
        }


def _block(part: ShardedTensor, base: torch.Tensor) -> list[Any]:
    """One block of a global tensor. Raises UnsupportedError if it is not a view of `base`."""
    data = part.data
    if data.untyped_storage().data_ptr() != base.untyped_storage().data_ptr():
        raise UnsupportedError(f"Megatron saves '{part.key}' as a reordered copy, which cannot be described")
    view: list[Any] = [data.storage_offset() - base.storage_offset(), list(data.stride())]
    if tuple(data.shape) == tuple(base.shape) and data.is_contiguous():
        view = []
    size = [1] * part.prepend_axis_num + list(part.local_shape)
    return [part.key, list(part.global_shape), list(part.global_offset), size, view]


def _replica(sharded: Any) -> list[int]:
    return [sharded.replica_id] if isinstance(sharded.replica_id, int) else list(sharded.replica_id)


def _plain_object(sharded: ShardedObject) -> list[str]:
    data = sharded.data
    kind = "stream" if isinstance(data, io.BytesIO) else "value"
    encoded = codec.encode(data.getvalue() if isinstance(data, io.BytesIO) else data)
    if len(encoded) > _OBJECT_BYTES:
        raise UnsupportedError(f"object '{sharded.key}' has {len(encoded)} bytes, more than {_OBJECT_BYTES}")
    return [kind, encoded.hex()]


def _kind(optimizer: Any) -> str:
    if is_stub(optimizer):
        return "stub"
    if isinstance(optimizer, DistributedOptimizer):
        return "distributed"
    return "float16" if isinstance(optimizer, Float16OptimizerWithFloat16Params) else "fp32"
