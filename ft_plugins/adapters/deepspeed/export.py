"""A checkpoint of this project as one that DeepSpeed itself loads: for `engine.load_checkpoint` of the same sizes.

Invariant: the files are those that the job's DeepSpeed would have saved, with every tensor bit for bit that of the
version, and counters, scheduler, parameter groups, steps and loss scaler as they were; parameters that were not
captured are cast from their masters as DeepSpeed's own copy does. One file is in memory at a time. Data position and
random numbers are in no checkpoint of DeepSpeed's.

In: `Shares`, a folder to be made. Out: what `load_checkpoint` is given: `latest`, `global_step<n>/`.
"""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...errors import StorageError, UnsupportedError
from ...snapshot.index import Index
from ...snapshot.shares import Shares
from ..values import TAG, find_class, from_plain

_PACKAGES = ("deepspeed",)
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def export(shares: Shares, folder: Path) -> dict[str, Any]:
    """Write the checkpoint below `folder`, which is made; what is told to people about it.

    Raises UnsupportedError where DeepSpeed is not installed or a rank's files are not told; StorageError, OSError.
    """
    _require_deepspeed()
    for index in shares.indices():
        if "files" not in (index.names or {}):
            problem = (index.names or {}).get("problem", "it tells none")
            raise UnsupportedError(f"{shares.folder}: rank {index.rank} could not tell DeepSpeed's files ({problem})")
    tag = f"global_step{shares.manifest.iteration}"
    tensors = 0
    (folder / tag).mkdir(parents=True)
    for index in shares.indices():
        small = shares.small(index.rank)
        for path, told in (index.names or {})["files"].items():
            made = _Made(shares, index)
            content = from_plain(told, _PACKAGES, "DeepSpeed", made.value)
            if isinstance(content, dict):
                _bring_up_to_date(content, small)
            torch.save(content, folder / tag / Path(path).name)
            tensors += made.tensors
    (folder / "latest").write_text(tag)
    return {"framework": "DeepSpeed", "iteration": shares.manifest.iteration, "tensors": tensors, "left_out": []}


def _require_deepspeed() -> None:
    from . import prepare

    try:
        prepare()  # before anything imports deepspeed
        importlib.import_module("deepspeed")
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("deepspeed"):
            raise
        raise UnsupportedError(
            "this is a checkpoint of a DeepSpeed job, and deepspeed is not installed here; "
            "pip install 'ft_plugins[deepspeed]'"
        ) from error


class _Made:
    """Makes what JSON has no type for, for one file."""

    def __init__(self, shares: Shares, index: Index) -> None:
        self._shares, self._index = shares, index
        self._group = tuple((index.names or {})["group"])
        self.tensors = 0

    def value(self, told: Mapping[str, Any]) -> Any:
        """Raises StorageError."""
        again = partial(from_plain, packages=_PACKAGES, framework="DeepSpeed", other=self.value)
        match told[TAG]:
            case "parts" | "cast" | "scalar":
                return self._tensor(told)
            case "size":
                return torch.Size(told["parts"])
            case "pairs":
                pairs = ((again(key), again(part)) for key, part in told["parts"])
                return OrderedDict(pairs) if told["ordered"] else dict(pairs)
            case "object":
                kind = find_class(told, _PACKAGES)
                if kind is None:
                    raise StorageError(f"{told['module']}.{told['class']} is not known to the DeepSpeed installed here")
                made = kind.__new__(kind)
                vars(made).update({name: again(part) for name, part in told["parts"].items()})
                return made
        raise StorageError(f"a value of unknown kind {told[TAG]!r} was saved")

    def _tensor(self, told: Mapping[str, Any]) -> torch.Tensor:
        dtype = getattr(torch, told["dtype"])
        if told[TAG] == "scalar":
            return torch.tensor(told["value"], dtype=dtype)
        self.tensors += 1
        if told[TAG] == "cast":
            master = self._whole(told["source"], self._group)
            return torch.empty(told["shape"], dtype=dtype).copy_(master.reshape(told["shape"]))
        made = torch.zeros(told["shape"], dtype=dtype)
        flat = made.reshape(-1)
        for at, name in told["parts"]:
            own = self._own(name)
            count = min(own.numel(), flat.numel() - at)
            flat[at : at + count] = own[:count]
        return made

    def _own(self, name: str) -> torch.Tensor:
        """This rank's part of an item, flat."""
        entry = self._index.items[name]
        if entry.piece is None:
            return self._whole(name, entry.replicas)
        return self._whole(name, self._group)[entry.piece[0] : entry.piece[1]]

    def _whole(self, name: str, ranks: tuple[int, ...]) -> torch.Tensor:
        raw, dtype = self._shares.whole(name, ranks)
        return torch.from_numpy(raw).view(getattr(torch, dtype))


# ---- what changes with the iteration and is no tensor ----


def _bring_up_to_date(content: dict[str, Any], small: Mapping[str, Any]) -> None:
    if "global_steps" in content:
        content.update({name: small["counters"][name] for name in _COUNTERS if name in content})
        if small["scheduler"] is not None:
            content["lr_scheduler"] = dict(small["scheduler"])
    for name in ("optimizer", "optimizer_state_dict"):
        if isinstance(content.get(name), dict):
            _optimizer(content[name], small)


def _optimizer(content: dict[str, Any], small: Mapping[str, Any]) -> None:
    """DeepSpeed's wrappers around a torch optimizer, at any depth."""
    scaler = small["scaler"]
    content.update({name: value for name, value in scaler["scaler"].items() if name in content})
    if content.get("overflow") is not None and scaler["overflow"] is not None:
        content["overflow"] = scaler["overflow"]
    if hasattr(content.get("loss_scaler"), "__dict__"):
        vars(content["loss_scaler"]).update(scaler["scaler"])
    if "param_groups" in content and "state" in content:
        for group, values in zip(content["param_groups"], small["groups"], strict=True):
            group.update(values)
        for key, values in zip(sorted(content["state"]), small["scalars"], strict=True):
            content["state"][key].update(values)
        return
    for name, inside in content.items():
        if isinstance(inside, dict):
            _optimizer(inside, small)
        elif name == "base_optimizer_state" and isinstance(inside, list):  # of ZeRO's elastic form
            for kept, values in zip(inside, small["scalars"], strict=True):
                kept.update(values)
