"""Describe this rank's files of DeepSpeed's own checkpoints, value by value, and the items in each tensor.

Invariant: DeepSpeed saves to a checkpoint engine that records and writes nothing, so the files, their names and
contents are those of the installed version. Nothing is copied or communicated. This is done once per start: what
changes with the iteration is in the small state, and an export fills it in.

    files   path below the checkpoint's folder -> values; a tensor is
            parts     a dense tensor: items at the given offsets, else zeros (flat partitions are padded with zeros)
            cast      a parameter of the model, cast from the fp32 master of that name
            scalar    a tensor without dimensions
    group   the ranks that hold the pieces of what ZeRO shards

In: an engine, its items. Out: plain values for an `Index`."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import deepspeed
import torch

from ...errors import UnsupportedError
from ..host_parts import StateItem
from ..planned_state import as_updated
from ..script.script_hooks import replaced
from ..script.values import TAG, Unknown, to_plain
from . import state

FRAMEWORK = "deepspeed"
FOLDER = "checkpoint"
_CLONE = "clone_tensors_for_torch_save"


def described(engine: Any, items: Sequence[StateItem], group: Sequence[int]) -> Mapping[str, Any]:
    """The description, or why there is none: state that cannot be exported is still protected."""
    try:
        with ExitStack() as whole:
            for one in state.updating(engine.optimizer):
                whole.enter_context(as_updated(one))
            return _description(engine, items, group)
    except Exception as error:  # the state may involve any code of the user's
        return {"framework": FRAMEWORK, "problem": f"{type(error).__name__}: {error}".replace("\n", " ")}


def _description(engine: Any, items: Sequence[StateItem], group: Sequence[int]) -> dict[str, Any]:
    """Raises UnsupportedError for state that cannot be described, and whatever DeepSpeed raises."""
    if type(engine.optimizer).__name__ == "BF16_Optimizer" and not engine.zero_optimization():
        raise UnsupportedError(
            f"DeepSpeed {deepspeed.__version__} cannot load its own checkpoints of bf16 without ZeRO: its engine gives "
            "BF16_Optimizer one state instead of those of all ranks; ZeRO-1 trains the same and can be exported"
        )
    if getattr(engine, "has_moe_layers", False):
        raise UnsupportedError("DeepSpeed saves experts by the ranks of expert groups, whose files are not described")
    tensors = _TensorIndex(engine, items)
    try:
        files = {path: to_plain(content, tensors.plain) for path, content in _saved(engine).items()}
    except Unknown as error:
        raise UnsupportedError(f"DeepSpeed saves a {error}, which has no plain form") from error
    return {"framework": FRAMEWORK, "version": deepspeed.__version__, "group": list(group), "files": files}


class _RecordingEngine:
    """A checkpoint engine that records what it should save, and writes nothing."""

    def __init__(self) -> None:
        self.files: dict[str, Any] = {}

    def save(self, state_dict: Any, path: str) -> None:
        self.files[path.removeprefix(f"{FOLDER}/")] = state_dict

    def makedirs(self, *args: Any, **kwargs: Any) -> None: ...

    def preserves_storage_sharing(self) -> bool:
        return False


def _saved(engine: Any) -> dict[str, Any]:
    """The files that this rank would save, by path."""
    recorder = _RecordingEngine()
    engine_replaced = replaced(engine, "checkpoint_engine", recorder)
    with engine_replaced, replaced(engine, "_copy_recovery_script", lambda path: None):
        with replaced(deepspeed.runtime.pipe.module, _CLONE, lambda tensors, *args, **kwargs: tensors):
            engine._save_checkpoint("", FOLDER)
        if engine.save_zero_checkpoint:
            engine._save_zero_checkpoint("", FOLDER)
    return recorder.files


class _TensorIndex:
    """Finds items and parameters by the addresses of their tensors."""

    def __init__(self, engine: Any, items: Sequence[StateItem]) -> None:
        tensors = [(one.item.name, one.read()) for one in items]
        self._items = sorted(((t.data_ptr(), name, t) for name, t in tensors if t.numel()), key=lambda each: each[:2])
        self._addresses = [at for at, _, _ in self._items]
        self._masters = {name for name, _ in tensors if name.endswith(":main")} | {
            f"{name}:main" for name, one in engine.module.named_parameters() if one.requires_grad
        }
        self._parameters = {p.data_ptr(): (name, p) for name, p in engine.module.named_parameters() if p.numel()}
        optimizer = engine.optimizer
        self._padded = {
            _storage(tensor)
            for _, main in state.updated_tensors(optimizer)
            for tensor in state.with_optimizer_state(optimizer, main)
        }

    def plain(self, value: Any) -> Any:
        """The plain form of a value of a type that JSON lacks. Raises Unknown, UnsupportedError."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value.detach())
        if isinstance(value, torch.Size):
            return {TAG: "size", "parts": list(value)}
        if isinstance(value, dict):  # a subclass of dict, or keys other than strings
            pairs = [[to_plain(key), to_plain(part, self.plain)] for key, part in value.items()]
            return {TAG: "pairs", "ordered": isinstance(value, OrderedDict), "parts": pairs}
        kind = type(value)
        if kind.__module__.split(".")[0] == "deepspeed" and hasattr(value, "__dict__"):
            parts = {name: to_plain(part, self.plain) for name, part in vars(value).items()}
            return {TAG: "object", "module": kind.__module__, "class": kind.__qualname__, "parts": parts}
        raise Unknown(f"{kind.__module__}.{kind.__qualname__}")

    def _tensor(self, tensor: torch.Tensor) -> dict[str, Any]:
        form = {TAG: "parts", "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        parts = self._parts(tensor) if tensor.is_contiguous() else []
        if parts or tensor.numel() == 0 or _storage(tensor) in self._padded:
            return {**form, "parts": parts}
        name, parameter = self._parameters.get(tensor.data_ptr(), ("", None))
        if parameter is not None and hasattr(parameter, "ds_tensor"):  # gathered now, but DeepSpeed saves it empty
            return {**form, "shape": [0], "parts": []}
        if parameter is not None and parameter.numel() == tensor.numel() and f"{name}:main" in self._masters:
            return {**form, TAG: "cast", "source": f"{name}:main"}
        if tensor.dim() == 0:
            return {**form, TAG: "scalar", "value": tensor.item()}
        raise UnsupportedError(f"DeepSpeed saves a tensor of shape {form['shape']} that belongs to no item")

    def _parts(self, tensor: torch.Tensor) -> list[list[Any]]:
        """The items inside it: [offset in elements, name]."""
        first, size = tensor.data_ptr(), tensor.element_size()
        last = first + tensor.numel() * size
        inside = self._items[bisect_left(self._addresses, first) : bisect_left(self._addresses, last)]
        return [
            [(at - first) // size, name]
            for at, name, item in inside
            if item.dtype == tensor.dtype and _storage(item) == _storage(tensor)
        ]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
