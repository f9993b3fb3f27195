"""Write Megatron's `torch_dist` format from one process, tensor by tensor: torch's distributed checkpoint format with
Megatron's keys, and two small files of Megatron's own.

Invariant: tensors are made when they are written and freed with their file; nothing else in memory grows with the
model. Each file is durable before the metadata that names it is written.

    __<n>_0.distcp   tensors and objects, about FILE_BYTES a file      .metadata       torch's: where each lies
    common.pt        state common to all ranks                         metadata.json   Megatron's: the format

In: blocks, a function that makes the tensor of one, objects, the common state. Out: a folder.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .export import TensorBlock

FILE_BYTES = 1 << 30  # bounds memory: torch's writer keeps tensors until their file is closed


def write(
    folder: Path,
    blocks: Sequence[TensorBlock],
    tensor: Callable[[TensorBlock], torch.Tensor],
    objects: Mapping[str, Any],
    common: Mapping[str, Any],
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write a checkpoint into `folder`, which is created. Raises OSError, and what `tensor` raises."""
    folder.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: 'assuming the intention is to save in a single process', correctly
        planner = _Planner(blocks, tensor, objects)
        try:
            dcp.save({}, storage_writer=_Writer(folder, file_bytes), planner=planner, no_dist=True)
        except dcp.CheckpointException as wrapped:  # torch collects the exceptions by rank
            raise next(iter(wrapped.failures.values()))[0] from None
    torch.save(dict(common), folder / COMMON_STATE_FNAME)
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))


class _Planner(SavePlanner):
    """Plans from blocks instead of from tensors in memory."""

    def __init__(
        self, blocks: Sequence[TensorBlock], tensor: Callable[[TensorBlock], torch.Tensor], objects: Mapping[str, Any]
    ) -> None:
        self._blocks = {(block.key, block.offset): block for block in blocks}
        self._tensor, self._objects = tensor, objects

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None: ...

    def create_local_plan(self) -> SavePlan:
        objects = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self._objects]
        return SavePlan([*objects, *map(_item, self._blocks.values())])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        index = write_item.index
        if write_item.type is WriteItemType.BYTE_IO:
            content = io.BytesIO()
            torch.save([self._objects[index.fqn]], content)  # Megatron stores a list with one entry per shard
            return content
        return self._tensor(self._blocks[index.fqn, tuple(index.offset or ())])


def _item(block: TensorBlock) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(block.offset), torch.Size(block.size))
    data = TensorWriteData(chunk, TensorProperties(dtype=getattr(torch, block.dtype)), torch.Size(block.shape))
    return WriteItem(MetadataIndex(block.key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


class _Writer(FileSystemWriter):
    """Torch's writer with files of bounded size; their numbers replace the rank in the file name."""

    def __init__(self, folder: Path, file_bytes: int) -> None:
        super().__init__(folder, sync_files=True, overwrite=False)
        self._file_bytes = file_bytes

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written: list[WriteResult] = []
        for number, items in enumerate(_files(plan.items, self._file_bytes)):
            prefix = replace(plan.storage_data, prefix=f"__{number}_")
            part = super().write_data(replace(plan, items=items, storage_data=prefix), planner)
            written += part.wait()
        whole: Future[list[WriteResult]] = Future()
        whole.set_result(written)
        return whole


def _files(items: Sequence[WriteItem], file_bytes: int) -> Iterator[list[WriteItem]]:
    """The consecutive items of each file: as many as fit, at least one."""
    batch: list[WriteItem] = []
    room = file_bytes
    for item in items:
        data = item.tensor_data
        nbytes = data.chunk.sizes.numel() * data.properties.dtype.itemsize if data else 0
        if batch and nbytes > room:
            yield batch
            batch, room = [], file_bytes
        batch.append(item)
        room -= nbytes
    yield batch
