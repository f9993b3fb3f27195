"""Compare two checkpoints saved by Megatron, entry by entry and bit for bit.

Invariant: there is no tolerance, and everything left out is reported: arguments that describe how a process was
started, and the padding between the parameters of a bucket in Megatron's default format (`dp_reshardable`), which is
uninitialised memory. A shard that does not begin at Megatron's alignment is padding; this is accepted only if the rest
is exactly as large as the model.

Reading unpickles, so use it only for checkpoints of your own runs. Megatron may be another version than the writer's,
or not installed: objects of its classes are read as class name, arguments and state.

In: folders of one iteration, of format `torch` or `torch_dist`. Out: a `CheckpointComparison`.
"""

from __future__ import annotations

import argparse
import functools
import io
import math
import pickle
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from ft_plugins.errors import FtError

_ALIGNMENT = 64  # elements; each parameter begins at a multiple in a buffer of Megatron's distributed optimizer
_OF_OPTIMIZER = re.compile(r"(?:^|\.)optimizer\.")
_BUCKET = re.compile(r"(?:^|\.)optimizer\.distributed\.dp_group_idx_\d+\.gbuf_idx_.*\.bucket_idx_\d+\.(\w+)$")
_COMMON = "common_state/shard_0_1"  # the object that replaced common.pt in megatron-core 0.19
_START_ARGUMENTS = re.compile(r"/args/(?:save|load|iteration|num_floating_point_operations_so_far)$")
_SHOWN = 200  # characters of a value in a message


class CheckpointFormatError(FtError):
    """A checkpoint has a format that this comparison does not know."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint as nested plain values and tensors. `padding`: by entry, true for elements of padding."""

    state: Mapping[str, Any]
    padding: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointComparison:
    """What was compared, what was left out, and each entry that differs."""

    tensors: Mapping[str, int]  # elements by entry, masked ones included
    values: tuple[str, ...]  # entries other than tensors
    masked: Mapping[str, int]  # elements of padding, by entry
    left_out: tuple[str, ...]  # arguments that describe how a process was started
    differences: tuple[str, ...]

    def __str__(self) -> str:
        compared = sum(self.tensors.values()) - sum(self.masked.values())
        words = f"{compared:,} elements of {len(self.tensors)} tensors and {len(self.values)} values"
        words += f" compared, {len(self.differences)} entries differ"
        if self.masked:
            words += f"; masked: {sum(self.masked.values()):,} elements of padding (uninitialised) in "
            words += f"{len(self.masked)} tensors"
        if self.left_out:
            arguments = sorted({entry.rpartition("/")[2] for entry in self.left_out})
            words += f"; left out: the start arguments {', '.join(arguments)}"
        return words

    def listing(self) -> str:
        """One line per tensor, one per group of values."""
        lines = []
        for entry, elements in sorted(self.tensors.items()):
            masked = self.masked.get(entry, 0)
            lines.append(f"{entry}: {elements - masked:,} elements" + f", {masked:,} of padding masked" * bool(masked))
        groups = Counter("/".join(re.sub(r"\[\d+\]", "[]", entry).split("/")[:3]) for entry in self.values)
        return "\n".join(lines + [f"{group}: {count:,} values" for group, count in sorted(groups.items())])


# reading


def read(folder: Path) -> LoadedCheckpoint:
    """The checkpoint in `folder`, of either format."""
    if not (folder / ".metadata").exists():
        return LoadedCheckpoint({str(file.relative_to(folder)): _load(file) for file in sorted(folder.rglob("*.pt"))})
    reader = dcp.FileSystemReader(folder)
    metadata = reader.read_metadata()
    shapes = tensors_of(metadata)
    tensors = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in shapes.items()}
    planner = _ObjectPlanner()
    wanted: dict[str, Any] = {key: tensors.get(key) for key in metadata.state_dict_metadata}
    dcp.load(wanted, storage_reader=reader, planner=planner, no_dist=True)
    objects = planner.objects
    if objects.keys() != wanted.keys() - tensors.keys():
        raise CheckpointFormatError(f"{folder}: torch's reader skipped some of its objects, expected all")
    legacy = folder / "common.pt"
    if not legacy.exists() and _COMMON not in objects:
        raise CheckpointFormatError(f"{folder}: expected the common state, in {legacy.name} or as '{_COMMON}'")
    common = _load(legacy) if legacy.exists() else objects.pop(_COMMON)
    state = {"tensors": tensors, "objects": objects, "common": common}
    return LoadedCheckpoint(state, {f"/tensors/{key}": mask for key, mask in padding(shapes).items()})


def tensors_of(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """The description of each global tensor of a `torch_dist` checkpoint."""
    entries = metadata.state_dict_metadata.items()
    return {key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)}


class _Foreign:
    """An object of one of Megatron's classes."""

    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> _Foreign:
        self = super().__new__(cls)
        self.arguments, self.state = arguments, None
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


@functools.cache
def _foreign(module: str, name: str) -> type[_Foreign]:
    return type(name, (_Foreign,), {"__module__": module})


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = module.partition(".")[0] != "megatron"
        return super().find_class(module, name) if known else _foreign(module, name)


_PICKLE = SimpleNamespace(__name__="pickle", Unpickler=_Unpickler)  # the attributes of a pickle module that torch uses


class _ObjectPlanner(dcp.DefaultLoadPlanner):
    """Reads the objects of a checkpoint with `_load`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)
        self.objects: dict[str, Any] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.objects[read_item.dest_index.fqn] = _load(value)


def _load(file: Path | io.BytesIO) -> Any:
    return torch.load(file, "cpu", _PICKLE, weights_only=False)


def padding(tensors: Mapping[str, TensorStorageMetadata]) -> dict[str, torch.Tensor]:
    """By tensor, the elements of a `dp_reshardable` checkpoint that belong to no parameter; empty for another format.

    Each parameter's part and each gap is a shard of its own; a gap begins where a parameter ended, off the alignment.
    Raises CheckpointFormatError unless the rest has exactly one element per element of the model.
    """
    masks: dict[str, torch.Tensor] = {}
    unmasked: Counter[str] = Counter()
    for key, entry in tensors.items():
        bucket = _BUCKET.search(key)
        if bucket is None:
            continue
        mask = torch.zeros(entry.size, dtype=torch.bool)
        for chunk in entry.chunks:
            begin, size = chunk.offsets[0], chunk.sizes[0]
            if begin % _ALIGNMENT:
                mask[begin : begin + size] = True
        unmasked[bucket[1]] += int((~mask).sum())
        if mask.any():
            masks[key] = mask
    model = sum(math.prod(entry.size) for key, entry in tensors.items() if not _OF_OPTIMIZER.search(key))
    for name, elements in unmasked.items():
        if elements != model:
            raise CheckpointFormatError(
                f"cannot identify the padding: without it '{name}' of the optimizer has {elements:,} elements, "
                f"expected the model's {model:,}; save with --dist-ckpt-optim-fully-reshardable, which has no padding"
            )
    return masks


# comparing


def compare(left: LoadedCheckpoint, right: LoadedCheckpoint) -> CheckpointComparison:
    """Compare all entries of both."""
    ours, theirs = dict(leaves(left.state)), dict(leaves(right.state))
    differences: list[str] = []
    for entry in sorted(ours.keys() | theirs.keys()):
        if _START_ARGUMENTS.search(entry):
            continue
        if entry not in ours or entry not in theirs:
            differences.append(f"{entry}: only in the {'second' if entry not in ours else 'first'}")
        else:
            mask, other = left.padding.get(entry), right.padding.get(entry)
            differences += _difference(entry, (ours[entry], mask), (theirs[entry], other))
    compared = {entry: leaf for entry, leaf in ours.items() if not _START_ARGUMENTS.search(entry)}
    return CheckpointComparison(
        tensors={entry: leaf.numel() for entry, leaf in compared.items() if isinstance(leaf, torch.Tensor)},
        values=tuple(entry for entry, leaf in compared.items() if not isinstance(leaf, torch.Tensor)),
        masked={entry: int(mask.sum()) for entry, mask in left.padding.items()},
        left_out=tuple(sorted(entry for entry in ours.keys() | theirs.keys() if _START_ARGUMENTS.search(entry))),
        differences=tuple(differences),
    )


def differences(left: Any, right: Any) -> list[str]:
    """The entries in which two nested states differ, bit for bit."""
    return list(compare(LoadedCheckpoint(left), LoadedCheckpoint(right)).differences)


def leaves(state: Any, entry: str = "") -> Iterator[tuple[str, Any]]:
    """Each tensor and plain value of a nested state, with its path."""
    match state:
        case argparse.Namespace():
            yield from leaves(vars(state), entry)
        case dict() if state:
            for key, value in state.items():
                yield from leaves(value, f"{entry}/{key}")
        case list() | tuple() if state:
            for index, value in enumerate(state):
                yield from leaves(value, f"{entry}[{index}]")
        case io.BytesIO():
            yield entry, state.getvalue()
        case _Foreign():
            yield f"{entry}/class", f"{type(state).__module__}.{type(state).__name__}"
            yield from leaves({"arguments": state.arguments, "state": state.state}, entry)
        case _ if type(state).__module__.startswith("deepspeed."):
            yield f"{entry}/class", f"{type(state).__module__}.{type(state).__qualname__}"
            yield from leaves(getattr(state, "value", None) or vars(state), entry)
        case _:
            yield entry, state


def _difference(
    entry: str, left: tuple[Any, torch.Tensor | None], right: tuple[Any, torch.Tensor | None]
) -> Iterator[str]:
    (ours, mask), (theirs, other) = left, right
    match ours, theirs:
        case torch.Tensor(), torch.Tensor():
            kinds = [f"{one.dtype} {tuple(one.shape)}" for one in (ours, theirs)]
            if kinds[0] != kinds[1]:
                yield f"{entry}: {kinds[0]} and {kinds[1]}"
                return
            if (mask is None) != (other is None) or mask is not None and other is not None and mask.ne(other).any():
                yield f"{entry}: its padding is elsewhere"
                return
            unequal = _unequal(ours, theirs)
            if mask is not None:
                unequal &= ~mask.reshape(-1)
            if unequal.any():
                first = int(unequal.nonzero()[0])
                yield f"{entry}: {int(unequal.sum()):,} of {ours.numel():,} elements differ, the first is {first}"
        case np.ndarray(), np.ndarray():
            if ours.dtype != theirs.dtype or ours.shape != theirs.shape or ours.tobytes() != theirs.tobytes():
                yield f"{entry}: the arrays differ"
        case float(), float():
            if ours.hex() != theirs.hex():
                yield f"{entry}: {ours!r} and {theirs!r}"
        case _:
            if type(ours) is not type(theirs) or ours != theirs:
                yield f"{entry}: {repr(ours)[:_SHOWN]} and {repr(theirs)[:_SHOWN]}"


def _unequal(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """By element, whether any of its bits differ."""
    raw = [one.detach().contiguous().reshape(-1, 1).view(torch.uint8) for one in (left, right)]
    return raw[0].ne(raw[1]).any(dim=1)
