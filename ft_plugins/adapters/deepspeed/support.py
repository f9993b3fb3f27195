"""Features of DeepSpeed that are not supported, found by name at start, before anything is captured.

Invariant: a job that passes has only state that `state` inventories, and only updates through `_take_model_step`.
In: an engine. Out: one phrase per unsupported feature."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from ...errors import UnsupportedError
from .state import CPU_ADAM, OWN_MOMENTS, inner, is_own

_ENGINES = ("DeepSpeedEngine", "PipelineEngine")
_WRAPPERS = (
    *("BF16_Optimizer", "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"),
    *("FP16_Optimizer", "FP16_UnfusedOptimizer"),
)
_ONE_BIT = "averages compressed gradients, with what compression left out on each rank and in engine and optimizer"
_NOT_FOLLOWED = {  # of DeepSpeed's own optimizers, by type in the configuration, in small letters: why
    **dict.fromkeys(("onebitadam", "onebitlamb", "zerooneadam"), _ONE_BIT),
    "muon": "updates whole matrices, of which ranks have parts",
}
_OFFLOAD_NOWHERE = ("none", None)
_NOTHING = SimpleNamespace()
_AUTO_EP = "AutoEP (expert_parallel) replaces layers and their experts"
_AMP = "apex.amp (amp) keeps masters and a loss scale of its own: use fp16 or bf16"
_EIGENVALUES = "eigenvalues (eigenvalue) keeps its own counters"
_OWN_SCALER = "torch_autocast in fp16 scales gradients by its own scaler"


def require_supported(engine: Any, rank: int) -> None:
    """Raises UnsupportedError that names every unsupported feature in use."""
    problems = [*_of_engine(engine), *_of_zero(engine), *_of_optimizer(engine.optimizer)]
    problems += [*_of_compression(engine), *_of_schedule(engine)]
    _refuse(problems, f"rank {rank}: ")


def require_supported_settings(settings: Mapping[str, Any], optimizer: Any) -> None:
    """The same before an engine is built, by what its settings say and the script's own `optimizer`, if there is one:
    what is missed here is found in the engine. Raises UnsupportedError."""
    problems = list(_of_settings(settings))
    if isinstance(optimizer, torch.optim.Optimizer):
        problems += _of_optimizer(optimizer)
    elif optimizer is None and str(kind := _at(settings, "optimizer", "type")).lower() in _NOT_FOLLOWED:
        problems.append(_of_own(str(kind)))
    _refuse(problems, "")


def _refuse(problems: list[str], who: str) -> None:
    if problems:
        raise UnsupportedError(
            f"{who}cannot protect this job: {'; '.join(dict.fromkeys(problems))}. "
            "Drop the option, or remove the block ft_plugins from the DeepSpeed configuration"
        )


def _of_engine(engine: Any) -> Iterator[str]:
    kind = type(engine).__name__
    if kind == "DualPipeVEngine":
        yield "DualPipeV has its own schedule"
    elif kind not in _ENGINES:
        yield f"the engine {kind} is unknown"
    if getattr(getattr(engine._config, "expert_parallel_config", None), "enabled", False):
        yield _AUTO_EP
    elif getattr(engine, "has_moe_layers", False) and kind == "PipelineEngine":
        yield "MoE layers in a pipeline: expert groups of stages are untested"
    if _asked(engine, "autotp_size", 0) > 1 and kind == "PipelineEngine":
        yield "AutoTP with pipelines (tensor_parallel.autotp_size)"
    if _asked(engine, "is_deepcompile_enabled", False):
        yield "DeepCompile replaces the step (compile.deepcompile)"
    if _asked(engine, "amp_enabled", False):
        yield _AMP
    if getattr(engine, "torch_autocast_z0_gradscaler", None) is not None:
        yield _OWN_SCALER
    if not _asked(engine, "managed_gradient_accumulation", True):
        yield "managed_gradient_accumulation false: the caller's accumulation is unknown"


def _of_zero(engine: Any) -> Iterator[str]:
    zero = getattr(engine._config, "zero_config", None)
    for name in ("offload_optimizer", "offload_param"):
        yield from _of_offload(name, vars(getattr(zero, name, None) or _NOTHING))
    if getattr(engine, "zenflow", None):
        yield "ZenFlow (zero_optimization.zenflow) updates after the step"
    if _asked(engine, "zero_hpz_partition_size", 1) > 1:
        yield "ZeRO++ hpZ (zero_hpz_partition_size) keeps second copies"
    for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights"):
        if _asked(engine, name, False):
            yield f"ZeRO++ ({name}) keeps quantized parameters"
    if (getattr(zero, "mics_shard_size", 0) or 0) > 0:
        yield "MiCS (zero_optimization.mics_shard_size) shards over parts of the replicas"


def _of_optimizer(optimizer: Any) -> Iterator[str]:
    if optimizer is None:
        yield "the engine has no optimizer, so there is nothing to protect"
        return
    kind = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer) and kind not in _WRAPPERS:
        yield f"the optimizer {kind} is unknown"
        return
    updating = inner(optimizer)
    if is_own(updating) and type(updating).__name__ not in OWN_MOMENTS:
        yield _of_own(type(updating).__name__)
        return
    if getattr(optimizer, "torch_autocast_gradscaler", None) is not None:
        yield _OWN_SCALER


def _of_offload(name: str, settings: Any) -> Iterator[str]:
    """Optimizer state in host memory is captured from there."""
    device = _at(settings, "device")
    where = getattr(device, "value", device)
    if where == "nvme":
        yield f"zero_optimization.{name} to NVMe: its state is in files"
    elif where not in _OFFLOAD_NOWHERE and name == "offload_param":
        yield f"zero_optimization.{name} to {where}: parameters are fetched while they are used"
    for option, usual in (("ratio", 1.0), ("super_offload", False)):
        if where not in _OFFLOAD_NOWHERE and (_at(settings, option) or usual) != usual:
            yield f"zero_optimization.{name}.{option}: an update is made by several optimizers"


def _of_own(name: str) -> str:
    why = f" {reason}" if (reason := _NOT_FOLLOWED.get(name.lower())) else ""
    return f"DeepSpeed's own optimizer {name}{why}; followed: its {', '.join(OWN_MOMENTS)}, and torch's optimizers"


def _of_settings(settings: Mapping[str, Any]) -> Iterator[str]:
    for name in ("offload_optimizer", "offload_param"):
        yield from _of_offload(name, _at(settings, "zero_optimization", name))
    if _at(settings, "eigenvalue", "enabled") is True:
        yield _EIGENVALUES
    if _at(settings, "compile", "deepcompile") is True:
        yield "DeepCompile replaces the step (compile.deepcompile)"
    if _at(settings, "amp", "enabled") is True:
        yield _AMP
    if _at(settings, "expert_parallel", "enabled") is True:
        yield _AUTO_EP


def _at(settings: Any, *path: str) -> Any:
    """The setting at a path; None if there is none."""
    for name in path:
        settings = settings.get(name) if isinstance(settings, Mapping) else None
    return settings


def _of_schedule(engine: Any) -> Iterator[str]:
    cycles = getattr(getattr(engine, "lr_scheduler", None), "cycle_momentum", False)
    if cycles and type(inner(engine.optimizer)).__name__ == CPU_ADAM:
        yield "a scheduler with cycle_momentum around DeepSpeedCPUAdam, which counts powers of its betas out of reach"


def require_local(engine: Any, rank: int) -> None:
    """Raises UnsupportedError if what local SGD averages is in host memory."""
    offloaded = getattr(getattr(engine._config, "zero_config", None), "offload_optimizer", None)
    device = _at(vars(offloaded or _NOTHING), "device")
    if getattr(device, "value", device) not in _OFFLOAD_NOWHERE:
        raise UnsupportedError(
            f"rank {rank}: local SGD averages what the optimizer updates, which zero_optimization.offload_optimizer "
            "has in host memory; drop one of the two"
        )


def _of_compression(engine: Any) -> Iterator[str]:
    """Compression's schedule, MoQ's quantizer and its eigenvalues, which older versions step with the engine."""
    methods = getattr(getattr(engine, "compression_scheduler", None), "different_compression_methods", {})
    for name in (name for name, method in methods.items() if method.get("enabled")):
        yield f"compression (compression_training.{name}) keeps its own counters"
    if getattr(engine, "quantizer", None) is not None:
        yield "MoQ (compression_training.weight_quantization) keeps its own counters"
    if _asked(engine, "eigenvalue_enabled", False):
        yield _EIGENVALUES


def _asked(engine: Any, name: str, usual: Any) -> Any:
    """The engine's answer; `usual` if this version lacks the method."""
    method = getattr(type(engine), name, None)
    return method(engine) if callable(method) else usual
