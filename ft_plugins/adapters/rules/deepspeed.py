"""Rules over a DeepSpeed configuration, as a job gives it or as the engine has read it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .rule import DROP, Predicate, Rule, Treatment, above, at, built, equals, every, on, some, treated_as

OTHERWISE = "remove the block ft_plugins from the DeepSpeed configuration"
LIGHTNING = "PyTorch Lightning"
CPU_ADAM = "DeepSpeedCPUAdam"
OWN_OPTIMIZERS = (  # of DeepSpeed, that are followed
    *("FusedAdam", CPU_ADAM, "FusedLamb", "FusedLion", "DeepSpeedCPULion", "DeepSpeedCPUAdagrad"),
)
_ONE_BIT = ("onebitadam", "onebitlamb", "zerooneadam")  # types, in small letters
_MUON = ("muon", "muonwithauxadam")
_ZERO = "zero_optimization"
_DEPRECATED = {"offload_optimizer": "cpu_offload", "offload_param": "cpu_offload_param"}
_OWN_COUNTERS = "it keeps its own counters"
_TRUE = ("true", "t", "yes", "y", "on", "1")


def _on(path: str, name: str, reason: str, **more: Any) -> Rule:
    """A rule about an option that is on."""
    return Rule(name, (path,), on(path), reason, path, **more)


def _enabled(block: str, name: str, reason: str = _OWN_COUNTERS, **more: Any) -> Rule:
    """A rule about a block whose `enabled` is on."""
    path = f"{block}.enabled"
    return Rule(name, (path,), _switched(path), reason, block, **more)


def _switched(path: str) -> Predicate:
    """Whether a switch is on, in any spelling that DeepSpeed takes for true; 'auto' is not yet on."""

    def applies(settings: Any) -> bool:
        value = at(settings, path)
        return value.lower() in _TRUE if isinstance(value, str) else bool(value)

    return applies


def _offloaded(name: str) -> Predicate:
    return lambda settings: _device(settings, name) != "none"


def _device(settings: Any, name: str) -> str:
    deprecated = "cpu" if at(settings, f"{_ZERO}.{_DEPRECATED[name]}") is True else "none"
    device = at(settings, f"{_ZERO}.{name}.device") or deprecated
    return str(getattr(device, "value", device)).lower()


def _compressed(settings: Any) -> bool:
    methods = at(settings, "compression_training")
    methods = methods.values() if isinstance(methods, Mapping) else ()
    given = any(map(_switched("shared_parameters.enabled"), methods))
    return given or bool(at(settings, "built.compression"))


_DEVICE, _RATIO, _SUPER = (f"{_ZERO}.offload_optimizer.{name}" for name in ("device", "ratio", "super_offload"))
_PARAM = f"{_ZERO}.offload_param.device"
_AUTOCAST = ("torch_autocast.dtype", "built.own_scaler")

_OPTIMIZER = ("optimizer.type", "built.own_optimizer")

_REFUSED = (
    Rule(
        "a 1-bit optimizer", _OPTIMIZER, some(*(equals(key, *_ONE_BIT) for key in _OPTIMIZER)),
        "it averages compressed gradients, with what compression left out on each rank and in engine and optimizer",
        "optimizer.type", "OneBitAdam, OneBitLamb, ZeroOneAdam",
    ),
    Rule(
        "Muon", _OPTIMIZER, some(*(equals(key, *_MUON) for key in _OPTIMIZER)),
        "it updates whole matrices, of which ranks have parts", "optimizer.type", "Muon",
    ),
    Rule(
        "another of DeepSpeed's own optimizers", ("built.own_optimizer",),
        every(on("built.own_optimizer"), lambda one: not equals("built.own_optimizer", *_ONE_BIT, *_MUON)(one)),
        f"its state is unknown; followed: its {', '.join(OWN_OPTIMIZERS)}, and torch's optimizers",
    ),
    Rule(
        "offload to NVMe", (_DEVICE,), equals(_DEVICE, "nvme"), "its state is in files", _DEVICE, "nvme",
    ),
    Rule(
        "offload of parameters to NVMe", (_PARAM,), equals(_PARAM, "nvme"), "they are in files", _PARAM, "nvme",
    ),
    Rule(
        "SuperOffload", (_SUPER,), every(_offloaded("offload_optimizer"), on(_SUPER)),
        "another process updates masters during the backward", _SUPER,
    ),
    _on(f"{_ZERO}.zenflow", "ZenFlow", "it updates after the step"),
    Rule(
        "ZeRO++ hpZ", (f"{_ZERO}.zero_hpz_partition_size",), above(f"{_ZERO}.zero_hpz_partition_size", 1),
        "it keeps second copies", f"{_ZERO}.zero_hpz_partition_size",
    ),
    *(
        _on(f"{_ZERO}.{name}", "ZeRO++", "it keeps quantized parameters")
        for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights")
    ),
    Rule(
        "MiCS", (f"{_ZERO}.mics_shard_size",), above(f"{_ZERO}.mics_shard_size", 0),
        "it shards over parts of the replicas", f"{_ZERO}.mics_shard_size",
    ),
    _on("compile.deepcompile", "DeepCompile", "it replaces the step"),
    Rule(
        "torch_autocast in fp16", _AUTOCAST,
        some(
            every(
                _switched("torch_autocast.enabled"),
                equals("torch_autocast.dtype", "float16", "fp16", "half", "torch.float16"),
            ),
            on("built.own_scaler"),
        ),
        "it scales gradients by its own scaler", "torch_autocast.dtype", "float16",
    ),
    Rule(
        "gradient accumulation that the script manages", ("managed_gradient_accumulation",),
        lambda settings: at(settings, "managed_gradient_accumulation") is False, "what it accumulates is unknown",
        "managed_gradient_accumulation", "false",
    ),
    _enabled("eigenvalue", "eigenvalues"),
    Rule(
        "compression", ("built.compression",), _compressed, _OWN_COUNTERS, "compression_training",
    ),
    built("moq", "MoQ (compression_training.weight_quantization)", _OWN_COUNTERS),
    _enabled("hybrid_engine", "the hybrid engine", "it generates between updates"),
    built("engine", "an engine of its own kind", "its step is unknown"),
    _enabled("amp", "apex.amp", "it keeps masters and a loss scale of its own", remedy=f"{DROP} and use fp16 or bf16"),
    _enabled("expert_parallel", "AutoEP", "it replaces layers and their experts"),
    built("moe_pipeline", "MoE layers in a pipeline", "expert groups of stages are untested"),
    built("tensor_parallel_pipeline", "AutoTP with pipelines (tensor_parallel.autotp_size)", "its layout is unknown"),
    Rule(
        "a loop that does not continue where the engine is restored", ("built.client",),
        equals("built.client", LIGHTNING.lower()), "it counts epochs and batches itself",
        remedy="call deepspeed.initialize in a loop of your own that begins at engine.global_steps, use Hugging Face's "
        "Trainer",
    ),
    built(
        "client", "a loop that is not the script's own", "it is untested with local SGD", remedy="drop --sync-policy",
        systems=("sync",),
    ),
    built("no_optimizer", "no optimizer", "there is nothing to protect", remedy="pass one to deepspeed.initialize"),
    built("optimizer", "an optimizer of its own kind", "its state is unknown"),
    built(
        "cycled_betas", "a scheduler with cycle_momentum around DeepSpeedCPUAdam",
        "this optimizer counts powers of its betas out of reach",
    ),
    Rule(
        "offload of optimizer state", (f"{_ZERO}.offload_optimizer.device",),
        _offloaded("offload_optimizer"), "local SGD averages what the optimizer updates, which is in host memory",
        f"{_ZERO}.offload_optimizer", remedy="drop one of the two", systems=("sync",),
    ),
    Rule(
        "offload of parameters", (_PARAM,), _offloaded("offload_param"),
        "replicas are averaged on the device", _PARAM, remedy="drop one of the two", systems=("sync",),
    ),
    Rule(
        "sums of gradients", ("gradient_allreduce_op",), equals("gradient_allreduce_op", "sum"),
        "replicas with local SGD average them", "gradient_allreduce_op", "sum", systems=("sync",),
    ),
    _on(
        f"{_ZERO}.zero_quantized_gradients", "ZeRO++", "it reduces gradients over nodes, not within a replica",
        systems=("sync",),
    ),
)  # fmt: skip

_FOLLOWED = (
    Rule("ZeRO", (f"{_ZERO}.stage",), above(f"{_ZERO}.stage", 0), "each rank captures its shards", f"{_ZERO}.stage"),
    _enabled("bf16", "bf16", "masters are captured, parameters are cast from them"),
    _enabled("fp16", "fp16", "masters and the loss scale are captured, parameters are cast from masters"),
    Rule(
        "optimizer state in host memory", (f"{_ZERO}.offload_optimizer.device",),
        equals(f"{_ZERO}.offload_optimizer.device", "cpu"), "it is captured from there",
        f"{_ZERO}.offload_optimizer.device", "cpu",
    ),
    Rule(
        "offload of a part (not yet run on a GPU)", (_RATIO,),
        every(_offloaded("offload_optimizer"), lambda settings: at(settings, _RATIO) not in (None, 1.0)),
        "state is captured from both optimizers that update", _RATIO, "0.5",
    ),
    Rule(
        "parameters in host memory", (_PARAM,), lambda settings: _device(settings, "offload_param") == "cpu",
        "they are cast from masters there", _PARAM, "cpu",
    ),
    _on("scheduler.type", "a scheduler of DeepSpeed", "it is captured by its own state_dict"),
    _enabled("curriculum_learning", "a curriculum of sequence lengths", "its difficulty is captured"),
    _enabled("progressive_layer_drop", "progressive layer drop", "its rate is captured"),
    _enabled("data_efficiency.data_routing.random_ltd", "random-LTD", "its length is captured"),
    _enabled(
        "data_efficiency.data_sampling.curriculum_learning", "a curriculum of data efficiency",
        "its sampler is captured by its own state_dict",
    ),
)  # fmt: skip

DEEPSPEED = (*_REFUSED, *treated_as(Treatment.FOLLOWED, _FOLLOWED))
