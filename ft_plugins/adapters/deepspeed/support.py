"""Features of DeepSpeed that are not supported, found by name at start, before anything is captured.

Invariant: a job that passes has only state that `state` inventories, and only updates through `_take_model_step`. What
is refused is in `adapters.rules.deepspeed`. In: a configuration, then the engine. Out: UnsupportedError, one line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from ..rules import DEEPSPEED, refuse
from ..rules.deepspeed import CPU_ADAM, OTHERWISE, OWN_OPTIMIZERS
from .state import inner, is_own

_ENGINES = ("DeepSpeedEngine", "PipelineEngine")
_WRAPPERS = (
    *("BF16_Optimizer", "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"),
    *("FP16_Optimizer", "FP16_UnfusedOptimizer"),
)
_NOTHING = SimpleNamespace()


def require_supported(engine: Any, rank: int) -> None:
    """Raises UnsupportedError that names every unsupported feature in use."""
    refuse(DEEPSPEED, OTHERWISE, as_built(engine), who=f"rank {rank}: ")


def require_supported_settings(
    settings: Mapping[str, Any], optimizer: Any, systems: Iterable[str] = (), client: str = ""
) -> None:
    """The same before an engine is built, by what its settings say, the script's own `optimizer`, if there is one, and
    the name of its client: what is missed here is found in the engine. Raises UnsupportedError."""
    built = {"client": client}
    if optimizer is not None:  # then that of the settings is not used
        own = _of_optimizer(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else {}
        settings, built = {**settings, "optimizer": None}, {**built, **own}
    refuse(DEEPSPEED, OTHERWISE, {**settings, "built": built}, systems=systems)


def require_local(engine: Any, rank: int) -> None:
    """Raises UnsupportedError for what local SGD cannot be combined with."""
    refuse(DEEPSPEED, OTHERWISE, as_built(engine), systems=("sync",), who=f"rank {rank}: ")


def as_built(engine: Any) -> dict[str, Any]:
    """The settings as the engine has read them, in the form of a configuration, and the facts that only it shows."""
    given = getattr(engine._config, "_param_dict", None) or {}
    random_ltd = {"random_ltd": {"enabled": _is_on(engine, "random_ltd_enabled")}}
    curriculum = {"curriculum_learning": {"enabled": _is_on(engine, "curriculum_learning_enabled")}}
    return {
        **given,
        "optimizer": None,  # the one that was built counts
        **({} if getattr(engine, "gradient_average", True) else {"gradient_allreduce_op": "sum"}),
        "zero_optimization": _zero(engine),
        "compile": {"deepcompile": _is_on(engine, "is_deepcompile_enabled")},
        "amp": {"enabled": _is_on(engine, "amp_enabled")},
        "expert_parallel": vars(getattr(engine._config, "expert_parallel_config", None) or _NOTHING),
        "managed_gradient_accumulation": _is_on(engine, "managed_gradient_accumulation", True),
        "progressive_layer_drop": {"enabled": _is_on(engine, "pld_enabled")},
        "eigenvalue": {"enabled": _is_on(engine, "eigenvalue_enabled")},
        "data_efficiency": {"data_routing": random_ltd, "data_sampling": curriculum},
        "compression_training": None,  # the methods that the engine steps count
        "built": {**_facts(engine), **_of_optimizer(engine.optimizer)},
    }


def _zero(engine: Any) -> dict[str, Any]:
    """Also what the engine answers, which older versions keep elsewhere."""
    sizes = {"zero_hpz_partition_size": _asked(engine, "zero_hpz_partition_size", 1)}
    names = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
    fields = vars(getattr(engine._config, "zero_config", None) or _NOTHING)
    return {**fields, "zenflow": getattr(engine, "zenflow", None), **sizes} | {
        name: _asked(engine, name, False) for name in names
    }


def _facts(engine: Any) -> dict[str, Any]:
    """What of the engine no setting shows."""
    kind = type(engine).__name__
    methods = getattr(getattr(engine, "compression_scheduler", None), "different_compression_methods", {})
    cycles = getattr(getattr(engine, "lr_scheduler", None), "cycle_momentum", False)
    return {
        "engine": "" if kind in _ENGINES else kind,
        "moe_pipeline": getattr(engine, "has_moe_layers", False) and kind == "PipelineEngine",
        "tensor_parallel_pipeline": _asked(engine, "autotp_size", 0) > 1 and kind == "PipelineEngine",
        "own_scaler": getattr(engine, "torch_autocast_z0_gradscaler", None) is not None,
        "compression": [name for name, method in methods.items() if method.get("enabled")],
        "moq": getattr(engine, "quantizer", None) is not None,
        "cycled_betas": cycles and type(inner(engine.optimizer)).__name__ == CPU_ADAM,
    }


def _of_optimizer(optimizer: Any) -> dict[str, Any]:
    """What the optimizer itself shows."""
    if optimizer is None:
        return {"no_optimizer": True}
    kind = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer) and kind not in _WRAPPERS:
        return {"optimizer": kind}
    updating = inner(optimizer)
    if is_own(updating) and type(updating).__name__ not in OWN_OPTIMIZERS:
        return {"own_optimizer": type(updating).__name__}
    scaled = getattr(optimizer, "torch_autocast_gradscaler", None) is not None
    return {"own_scaler": True} if scaled else {}


def _is_on(engine: Any, name: str, usual: bool = False) -> bool:
    """The same, of a switch: some versions answer with what the configuration holds, and ask whether it is empty."""
    return bool(_asked(engine, name, usual))


def _asked(engine: Any, name: str, usual: Any) -> Any:
    """The engine's answer; `usual` if this version lacks the method."""
    method = getattr(type(engine), name, None)
    return method(engine) if callable(method) else usual
