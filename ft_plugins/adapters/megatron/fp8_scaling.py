"""The state of delayed scaling: how Transformer Engine's modules scale what they cast to fp8, and the maxima of earlier
casts, of which they make the next scales.

Invariant: a module has this state from the start, made as its first forward would make it, so that each tensor of it
is an item. Other histories of maxima are refused: at the start if a module is of an unknown kind, at a version point if
one has appeared since, wherever Transformer Engine has it. fp8 parameters are cast from masters with the scales of
their last cast: an iteration that skips its update moves the scales, and casts nothing.

In: model chunks. Out: functions that read a tensor, by name; UnsupportedError, one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core import fp8_utils

from ...errors import UnsupportedError

_META, _PARTS, _HISTORY = "fp8_meta", ("scaling_fwd", "scaling_bwd"), "amax_history"  # Transformer Engine's names
_CAST = "__ft_cast_scale__"  # attribute of a module: the scales of its forward when fp8 parameters were cast last
_FUSED = ("TEFusedMLP", "TEFusedMLPWithGroupedLinear")  # Megatron-LM's, which hide what casts for them
_PRODUCTS = {"Linear": 1, "LayerNormLinear": 1, "LayerNormMLP": 2, "GroupedLinear": "num_gemms"}  # of matrices
_ATTENTION = "DotProductAttention"  # casts nothing without fp8 in attention, which rules refuse: nothing reads its own
LACKED = "the scales of the last cast of fp8 parameters and which modules had run"  # by Megatron's checkpoints
_REMEDY = "choose --fp8-recipe tensorwise, blockwise or mxfp8, without fp8 in attention"


def delays(chunk: Any) -> bool:
    """Whether the chunk's configuration asks for delayed scaling."""
    config = getattr(chunk, "config", None)
    return bool(getattr(config, "fp8", None)) and getattr(config, "fp8_recipe", "delayed") == "delayed"


def in_use(chunks: Sequence[torch.nn.Module]) -> bool:
    return any(map(delays, chunks))


def create(chunks: Sequence[torch.nn.Module], rank: int) -> None:
    """Give every module the state that its first forward would create. Idempotent. Raises UnsupportedError."""
    for chunk in filter(delays, chunks):
        for name, part in chunk.named_modules():
            if any(_is(part, one) for one in _FUSED) or _is_casting_operation(part):
                raise _unsupported(rank, name, part, "keeps scales for fp8 as an operation")
            if _META not in vars(part) or _is(part, _ATTENTION):
                continue
            products = next((_PRODUCTS[kind] for kind in _PRODUCTS if _is(part, kind)), 0)
            if products:
                with _as_in_forward(chunk):
                    part.init_fp8_metadata(getattr(part, products) if isinstance(products, str) else products)
            if not products or not all(hasattr(part.fp8_meta.get(key), "recipe") for key in _PARTS):  # or version 1
                raise _unsupported(rank, name, part, "keeps scales for fp8 in a way that is not known")
            if _with_parameters(chunk):
                vars(part).setdefault(_CAST, _scales(part).clone())


def tensors(chunk: Any) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """What `create` made: names within the chunk, and what reads each tensor (scale: fp32, one per tensor that is cast;
    amax_history: (length, number of such tensors), fp32). A module may replace them."""
    for name, part in chunk.named_modules() if delays(chunk) else ():
        if not _is_followed(part):
            continue
        for key in _PARTS:
            for kind in ("scale", _HISTORY):
                yield f"{name}.{key}.{kind}", partial(_kept_as, part, key, kind)
        if _CAST in vars(part):
            yield f"{name}.cast.scale", partial(vars(part).__getitem__, _CAST)


def unused(chunks: Sequence[torch.nn.Module]) -> str:
    """The modules, by line, that have not run: the end of any forward or backward updates the state of all others."""
    found = (name for name, part in _followed(chunks) if _manager(part).get_buffer_info() not in part.fp8_meta)
    return "\n".join(found)


def restore_used(chunks: Sequence[torch.nn.Module], unused: str) -> None:
    """Have all other modules updated before they run: a stage of several chunks runs one after the other."""
    names = set(unused.splitlines())
    for name, part in _followed(chunks):
        if name not in names:
            with _as_in_forward(chunks[int(name.partition(".")[0])]):
                _manager(part).add_fp8_tensors_to_global_buffer(part.fp8_meta)


def scales_of_casts(chunks: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    """Copies of the present scales of what casts fp8 parameters."""
    return [_scales(part).clone() for part in _casting(chunks)]


def note_cast(chunks: Sequence[torch.nn.Module]) -> None:
    """Call after each update, which casts fp8 parameters from masters, and after a load, which may."""
    for part in _casting(chunks):
        vars(part)[_CAST].copy_(_scales(part))


@contextmanager
def as_cast_last(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Within this a cast of fp8 parameters repeats the last one of the captured job; scales and maxima stay."""
    kept = [(part, _scales(part).clone(), part.fp8_meta[_PARTS[0]].amax_history.clone()) for part in _casting(chunks)]
    for part, *_ in kept:
        _scales(part).copy_(vars(part)[_CAST])
    yield
    for part, scales, history in kept:
        _scales(part).copy_(scales)
        part.fp8_meta[_PARTS[0]].amax_history.copy_(history)


def require_no_other(chunks: Sequence[torch.nn.Module], rank: int) -> None:
    """Raises UnsupportedError that names a module with a history of maxima that is not captured."""
    known: set[int] = set()
    for chunk in chunks if getattr(chunks[0].config, "fp8", None) else ():
        for name, part in chunk.named_modules():
            if _META not in vars(part):
                continue
            kept = (getattr(one, _HISTORY, None) for one in _kept(vars(part).get(_META)))
            histories = [one for one in kept if isinstance(one, torch.Tensor)]
            if delays(chunk) and (_is_followed(part) or _is(part, _ATTENTION)):
                known.update(one.data_ptr() for one in histories)
            elif histories or delays(chunk):  # another recipe has replaced what was there
                raise _unsupported(rank, name, part, "keeps a history of maxima for fp8")
    for name, part in _followed(chunks):
        manager = _manager(part)
        updated = getattr(manager, "quantization_state", manager).global_amax_history_buffer  # the former since 2.15
        if any(one.data_ptr() not in known for together in updated.values() for one in together):
            raise _unsupported(
                rank, name.partition(".")[2], part, "is updated together with hidden modules that keep scales for fp8"
            )
        return


def _with_parameters(chunk: Any) -> bool:
    settings = getattr(chunk, "config", None), getattr(chunk, "ddp_config", None)
    return any(getattr(one, name, None) for one in settings for name in ("fp8_param", "fp8_param_gather"))


@contextmanager
def _as_in_forward(chunk: Any) -> Iterator[None]:
    """Megatron's own context of a forward, which updates nothing when it ends."""
    with torch.no_grad(), fp8_utils.get_fp8_context(chunk.config):
        yield


def _manager(part: torch.nn.Module) -> Any:
    """Transformer Engine's own state of all modules, from where the module's class has it."""
    homes = (vars(sys.modules[kind.__module__]) for kind in type(part).__mro__)
    return next(home["FP8GlobalStateManager"] for home in homes if "FP8GlobalStateManager" in home)


def _followed(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Any]]:
    for index, chunk in enumerate(chunks):
        for name, part in chunk.named_modules() if delays(chunk) else ():
            if _is_followed(part):
                yield f"{index}.{name}", part


def _casting(chunks: Sequence[torch.nn.Module]) -> Iterator[Any]:
    return (part for _, part in _followed(chunks) if _CAST in vars(part))


def _kept_as(part: Any, key: str, kind: str) -> torch.Tensor:
    return getattr(part.fp8_meta[key], kind)  # type: ignore[no-any-return]


def _scales(part: Any) -> torch.Tensor:
    return _kept_as(part, _PARTS[0], "scale")


def _is_followed(part: Any) -> bool:
    if _META not in vars(part) or not any(_is(part, kind) for kind in _PRODUCTS):
        return False
    states = [part.fp8_meta.get(key) for key in _PARTS]
    return all(hasattr(one, kind) for one in states for kind in ("scale", _HISTORY))


def _is_casting_operation(part: Any) -> bool:
    """Norms and activations are operations of Transformer Engine that cast nothing."""
    count = getattr(part, "num_quantizers", None) or getattr(part, "num_fp8_scales", None)  # the latter in version 1
    return hasattr(part, "_fp8_metas") and (count is None or any(map(count, ("forward", "backward"))))


def _is(part: torch.nn.Module, kind: str) -> bool:
    """Whether the module is Transformer Engine's of that name, or one derived from it, as Megatron-LM's are."""
    return any(one.__name__ == kind for one in type(part).__mro__)


def _kept(meta: Any) -> Iterator[Any]:
    values = meta.values() if isinstance(meta, Mapping) else ()
    for value in values:
        yield from value if isinstance(value, list | tuple) else (value,)


def _unsupported(rank: int, name: str, part: Any, what: str) -> UnsupportedError:
    return UnsupportedError(f"rank {rank}: '{name}' ({type(part).__name__}) {what}, which are not captured: {_REMEDY}")
