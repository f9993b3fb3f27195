"""What DeepSpeed's own checkpoints are made of on this rank: its files, value by value, and the items of each tensor.

Invariant: DeepSpeed itself is asked, by having it save with a checkpoint engine that keeps what it is given and writes
nothing; so the files, their names and what stands in them are this version's own. Nothing is copied or communicated.
Asked once a start: what changes with the iteration is in the small state, and is put in at an export.

    files   path below the checkpoint's folder -> values; a tensor is
            parts     a dense tensor, zero but for items at these elements (flat partitions are padded with zeros)
            cast      a parameter of the model, from the fp32 master of its name
            scalar    one without dimensions
    group   the ranks that hold the pieces of what ZeRO has cut

In: an engine, its items. Out: plain values for an `Index`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch

from ...errors import UnsupportedError
from ..host_parts import StateItem
from ..values import TAG, Unknown, to_plain
from . import state

FRAMEWORK = "deepspeed"
FOLDER = "checkpoint"
_CLONE = "clone_tensors_for_torch_save"


def described(engine: Any, held: Sequence[StateItem], group: Sequence[int]) -> Mapping[str, Any]:
    """`names`, or why there are none: what cannot be exported is protected all the same."""
    try:
        return names(engine, held, group)
    except Exception as error:  # of a model of the user's own, whose state is anybody's code
        return {"framework": FRAMEWORK, "problem": f"{type(error).__name__}: {error}".replace("\n", " ")}


def names(engine: Any, held: Sequence[StateItem], group: Sequence[int]) -> dict[str, Any]:
    """See above. Raises UnsupportedError for state that cannot be described so, and what DeepSpeed itself raises."""
    if type(engine.optimizer).__name__ == "BF16_Optimizer" and not engine.zero_optimization():
        raise UnsupportedError(
            f"DeepSpeed {deepspeed.__version__} cannot load what it saves of bf16 without ZeRO: its engine gives "
            "BF16_Optimizer one state where it takes those of all ranks; ZeRO-1 trains the same and can be exported"
        )
    tensors = _Tensors(engine, held)
    try:
        files = {path: to_plain(content, tensors.told) for path, content in _saved(engine).items()}
    except Unknown as error:
        raise UnsupportedError(f"DeepSpeed saves a {error}, which has no plain form") from error
    return {"framework": FRAMEWORK, "version": deepspeed.__version__, "group": list(group), "files": files}


class _Keeping:
    """A checkpoint engine that writes nothing."""

    def __init__(self) -> None:
        self.files: dict[str, Any] = {}

    def save(self, state_dict: Any, path: str) -> None:
        self.files[path.removeprefix(f"{FOLDER}/")] = state_dict

    def makedirs(self, *args: Any, **kwargs: Any) -> None: ...

    def preserves_storage_sharing(self) -> bool:
        return False


def _saved(engine: Any) -> dict[str, Any]:
    """What this rank would save."""
    keeping = _Keeping()
    with _instead(engine, "checkpoint_engine", keeping), _instead(engine, "_copy_recovery_script", lambda path: None):
        with _instead(deepspeed.runtime.pipe.module, _CLONE, lambda found, *args, **kwargs: found):
            engine._save_checkpoint("", FOLDER)
        if engine.save_zero_checkpoint:
            engine._save_zero_checkpoint("", FOLDER)
    return keeping.files


@contextmanager
def _instead(owner: Any, name: str, value: Any) -> Iterator[None]:
    own = vars(owner).get(name, _instead)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is _instead:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


class _Tensors:
    """Where the live tensors lie."""

    def __init__(self, engine: Any, held: Sequence[StateItem]) -> None:
        items = [(one.item.name, one.read()) for one in held]
        self._items = sorted(((t.data_ptr(), name, t) for name, t in items if t.numel()), key=lambda each: each[:2])
        self._places = [at for at, _, _ in self._items]
        self._masters = {name for name, _ in items if name.endswith(":main")} | {
            f"{name}:main" for name, one in engine.module.named_parameters() if one.requires_grad
        }
        self._parameters = {p.data_ptr(): (name, p) for name, p in engine.module.named_parameters() if p.numel()}
        kept = [value for _, main in state.mains(engine.optimizer) for value in state.kept_of(engine.optimizer, main)]
        self._padded = {_storage(tensor) for tensor in kept}

    def told(self, value: Any) -> Any:
        """A value that JSON has no type for. Raises Unknown, UnsupportedError."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value.detach())
        if isinstance(value, torch.Size):
            return {TAG: "size", "parts": list(value)}
        if isinstance(value, dict):  # another kind of mapping, or other keys than words
            pairs = [[to_plain(key), to_plain(part, self.told)] for key, part in value.items()]
            return {TAG: "pairs", "ordered": isinstance(value, OrderedDict), "parts": pairs}
        kind = type(value)
        if kind.__module__.split(".")[0] == "deepspeed" and hasattr(value, "__dict__"):
            parts = {name: to_plain(part, self.told) for name, part in vars(value).items()}
            return {TAG: "object", "module": kind.__module__, "class": kind.__qualname__, "parts": parts}
        raise Unknown(f"{kind.__module__}.{kind.__qualname__}")

    def _tensor(self, tensor: torch.Tensor) -> dict[str, Any]:
        told = {TAG: "parts", "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        parts = self._parts(tensor) if tensor.is_contiguous() else []
        if parts or tensor.numel() == 0 or _storage(tensor) in self._padded:
            return {**told, "parts": parts}
        name, parameter = self._parameters.get(tensor.data_ptr(), ("", None))
        if parameter is not None and hasattr(parameter, "ds_tensor"):  # gathered for now; saved as cut, as an empty one
            return {**told, "shape": [0], "parts": []}
        if parameter is not None and parameter.numel() == tensor.numel() and f"{name}:main" in self._masters:
            return {**told, TAG: "cast", "source": f"{name}:main"}
        if tensor.dim() == 0:
            return {**told, TAG: "scalar", "value": tensor.item()}
        raise UnsupportedError(f"DeepSpeed saves a tensor of shape {told['shape']} that belongs to no item")

    def _parts(self, tensor: torch.Tensor) -> list[list[Any]]:
        """Items that lie in it: from which of its elements on, name."""
        first, size = tensor.data_ptr(), tensor.element_size()
        last = first + tensor.numel() * size
        inside = self._items[bisect_left(self._places, first) : bisect_left(self._places, last)]
        return [
            [(at - first) // size, name]
            for at, name, item in inside
            if item.dtype == tensor.dtype and _storage(item) == _storage(tensor)
        ]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
