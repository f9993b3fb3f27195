"""Export a checkpoint of this project as one that DeepSpeed loads (`engine.load_checkpoint`), for the same sizes.

Invariant: the files are those that the job's DeepSpeed would have saved: every tensor is the version's, bit for bit,
and counters, scheduler, parameter groups, steps and loss scaler are as they were; parameters that were not captured are
cast from their masters as DeepSpeed's own copy does. One file is in memory at a time. DeepSpeed's checkpoints contain
neither the data position nor random number generators.

In: `CheckpointReader`, a folder to create. Out: the argument of `load_checkpoint`: `latest`, `global_step<n>/`."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...errors import StorageError, UnsupportedError
from ...snapshot.checkpoint.checkpoint_reader import CheckpointReader
from ...snapshot.checkpoint.index import Index
from ..export_command import installed
from ..script.values import TAG, find_class, from_plain

_PACKAGES = ("deepspeed",)
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def export(shares: CheckpointReader, folder: Path) -> dict[str, Any]:
    """Write the checkpoint below `folder`, which is created; returns a summary.

    Raises UnsupportedError if DeepSpeed is not installed or a rank's files are not described; StorageError, OSError.
    """
    from . import prepare

    with installed("deepspeed", "DeepSpeed", "deepspeed"):
        prepare()  # before anything imports deepspeed
        importlib.import_module("deepspeed")
    for index in shares.indices():
        if "files" not in (index.names or {}):
            problem = (index.names or {}).get("problem", "no description")
            raise UnsupportedError(f"{shares.folder}: rank {index.rank} did not describe DeepSpeed's files ({problem})")
    tag = f"global_step{shares.manifest.iteration}"
    tensors = 0
    (folder / tag).mkdir(parents=True)
    for index in map(shares.index, shares.chosen):
        small = shares.small(index.rank)
        for path, plain in (index.names or {})["files"].items():
            builder = _ValueBuilder(shares, index)
            content = from_plain(plain, _PACKAGES, "DeepSpeed", builder.value)
            if isinstance(content, dict):
                _update_content(content, small)
            torch.save(content, folder / tag / Path(path).name)
            tensors += builder.tensors
    (folder / "latest").write_text(tag)
    return {"framework": "DeepSpeed", "iteration": shares.manifest.iteration, "tensors": tensors, "left_out": []}


class _ValueBuilder:
    """Builds one file's values of types that JSON lacks, and counts its tensors."""

    def __init__(self, shares: CheckpointReader, index: Index) -> None:
        self._shares, self._index = shares, index
        self._group = tuple((index.names or {})["group"])
        self.tensors = 0

    def value(self, plain: Mapping[str, Any]) -> Any:
        """Raises StorageError for an unknown tag or class."""
        build = partial(from_plain, packages=_PACKAGES, framework="DeepSpeed", other=self.value)
        match plain[TAG]:
            case "parts" | "cast" | "scalar":
                return self._tensor(plain)
            case "size":
                return torch.Size(plain["parts"])
            case "pairs":
                pairs = ((build(key), build(part)) for key, part in plain["parts"])
                return OrderedDict(pairs) if plain["ordered"] else dict(pairs)
            case "object":
                kind = find_class(plain, _PACKAGES)
                if kind is None:
                    raise StorageError(f"the installed DeepSpeed has no class {plain['module']}.{plain['class']}")
                value = kind.__new__(kind)
                vars(value).update({name: build(part) for name, part in plain["parts"].items()})
                return value
        raise StorageError(f"saved value of unknown kind {plain[TAG]!r}")

    def _tensor(self, plain: Mapping[str, Any]) -> torch.Tensor:
        dtype = getattr(torch, plain["dtype"])
        if plain[TAG] == "scalar":
            return torch.tensor(plain["value"], dtype=dtype)
        self.tensors += 1
        if plain[TAG] == "cast":
            master = self._whole(plain["source"], self._group)
            return torch.empty(plain["shape"], dtype=dtype).copy_(master.reshape(plain["shape"]))
        tensor = torch.zeros(plain["shape"], dtype=dtype)
        flat = tensor.reshape(-1)
        for at, name in plain["parts"]:
            own = self._own(name)
            count = min(own.numel(), flat.numel() - at)
            flat[at : at + count] = own[:count]
        return tensor

    def _own(self, name: str) -> torch.Tensor:
        """This rank's part of an item, flat."""
        entry = self._index.items[name]
        if entry.piece is None:
            return self._whole(name, entry.replicas)
        return self._whole(name, self._group)[entry.piece[0] : entry.piece[1]]

    def _whole(self, name: str, ranks: tuple[int, ...]) -> torch.Tensor:
        raw, dtype = self._shares.whole(name, ranks)
        return torch.from_numpy(raw).view(getattr(torch, dtype))


# ---- what changes with the iteration and is not a tensor ----


def _update_content(content: dict[str, Any], small: Mapping[str, Any]) -> None:
    if "global_steps" in content:
        content.update({name: small["counters"][name] for name in _COUNTERS if name in content})
        if small["scheduler"] is not None:
            content["lr_scheduler"] = dict(small["scheduler"])
    for name in ("optimizer", "optimizer_state_dict"):
        if isinstance(content.get(name), dict):
            _update_optimizer(content[name], small)


def _update_optimizer(content: dict[str, Any], small: Mapping[str, Any]) -> None:
    """Update DeepSpeed's wrappers around a torch optimizer, at any depth."""
    scaler = small["scaler"]
    content.update({name: value for name, value in scaler["scaler"].items() if name in content})
    if content.get("overflow") is not None and scaler["overflow"] is not None:
        content["overflow"] = scaler["overflow"]
    if hasattr(content.get("loss_scaler"), "__dict__"):
        vars(content["loss_scaler"]).update(scaler["scaler"])
    if "param_groups" in content and "state" in content:
        for group, values in zip(content["param_groups"], small["groups"], strict=True):
            group.update(values)
        if content["state"]:  # else the optimizer keeps nothing
            for key, values in zip(sorted(content["state"]), small["scalars"], strict=True):
                content["state"][key].update(values)
        return
    for name, inside in content.items():
        if isinstance(inside, dict):
            _update_optimizer(inside, small)
        elif name == "base_optimizer_state" and isinstance(inside, list):  # ZeRO's elastic form
            for state, values in zip(inside, small["scalars"], strict=True):
                state.update(values)
