"""Rules over Megatron-LM's arguments after validation, which name what configurations of megatron.core name too. Pure.

An option that a version does not have is not in use. Versions name CUDA graphs differently:

    0.14           enable_cuda_graph or external_cuda_graph; cuda_graph_scope 'full_iteration' with the former
    0.15 to 0.17   cuda_graph_impl 'local' or 'transformer_engine'; cuda_graph_scope with 'full_iteration' and 'local'
    0.18 and newer cuda_graph_impl 'full_iteration' as well; the scope is migrated to it
"""

from __future__ import annotations

from typing import Any

from .rule import DROP, Predicate, Rule, Treatment, above, at, built, equals, every, on, some, treated_as

OTHERWISE = "run without protection"
_WHOLE = "full_iteration"
_MUON = ("muon", "dist_muon")
_UNTESTED = ("adaptive_muon", "lion", "soap")


def cuda_graphs(options: Any) -> str:
    """How CUDA graphs are captured: 'none', 'local', 'transformer_engine' or 'full_iteration'."""
    implementation = at(options, "cuda_graph_impl") or "none"
    if implementation == "none" and at(options, "enable_cuda_graph"):
        implementation = "local"
    if implementation == "none" and at(options, "external_cuda_graph"):
        implementation = "transformer_engine"
    if implementation == "local" and _WHOLE in _scopes(options):
        implementation = _WHOLE
    return str(implementation)


def _scopes(options: Any) -> list[str]:
    """The names in `cuda_graph_scope`: a comma-separated string, or a list of strings or enum members."""
    given = at(options, "cuda_graph_scope") or ()
    parts = given.split(",") if isinstance(given, str) else given if isinstance(given, list | tuple) else [given]
    return [str(getattr(part, "name", part)).rpartition(".")[2] for part in parts]


def _graphs(*kinds: str) -> Predicate:
    return lambda settings: cuda_graphs(settings) in kinds


def _in_fp8(key: str) -> Predicate:
    return lambda settings: str(at(settings, key)) in ("fp8", "torch.uint8")


def _named(key: str, name: str, reason: str, option: str = "", **more: Any) -> Rule:
    """A rule about an option that is on."""
    return Rule(name, (key,), on(key), reason, option or f"--{key.replace('_', '-')}", **more)


_several_instances = above("num_distributed_optimizer_instances", 1)
_current_scaling = equals("fp8_recipe", "tensorwise", "blockwise", "mxfp8")
_delayed_scaling = some(equals("fp8_recipe", "delayed"), lambda settings: not at(settings, "fp8_recipe"))
layer_wise = some(
    on("built.layer_wise"),
    equals("optimizer", "dist_muon"),
    every(
        equals("optimizer", *_MUON, *_UNTESTED),
        some(on("use_distributed_optimizer"), on("use_layer_wise_distributed_optimizer")),
    ),
)
LAYER_WISE = Rule(
    "a layer-wise optimizer", ("optimizer",), layer_wise,
    "each rank updates other parameters, which replicas neither compare nor average", "--optimizer", "dist_muon",
    systems=("paft", "sync"),
)  # fmt: skip
UNSHARDED = Rule(
    "cyclic data that are not sharded", ("data_sharding",),
    every(equals("dataloader_type", "cyclic"), lambda settings: at(settings, "data_sharding") is False),
    "passes of some ranks are a batch longer, so the place in them does not follow from consumed samples",
    "--dataloader-type cyclic --no-data-sharding",
)  # fmt: skip
ONE_INSTANCE = Rule(
    "several instances of the distributed optimizer", ("num_distributed_optimizer_instances",),
    _several_instances,
    "each decides alone whether to skip an update, so that instances that disagree cannot be repaired",
    "--num-distributed-optimizer-instances", "2", remedy="drop it, or drop --paft", systems=("paft",),
)  # fmt: skip

COMBINED = _named(
    "overlap_moe_expert_parallel_comm", "combined 1F1B", "layers run one by one, outside of the schedule",
    remedy="drop it, or drop --baft and --sync-policy", systems=("baft", "sync"),
)  # fmt: skip

_FSDP = on("use_megatron_fsdp")
_FP8_PARAMETERS = some(on("fp8_param_gather"), on("fp8_param"))
KEPT = Rule(
    "an optimizer that keeps masters", ("use_precision_aware_optimizer", "optimizer_cpu_offload"),
    some(on("built.masters"), on("use_precision_aware_optimizer"), on("optimizer_cpu_offload")),
    "replicas of them were neither compared nor averaged yet",
    "--use-precision-aware-optimizer, --optimizer-cpu-offload",
    remedy="drop it, or drop --paft and --sync-policy", systems=("paft", "sync"),
)  # fmt: skip
QUANTIZED = Rule(
    "fp8 parameters", ("fp8_param_gather", "fp8_param"),
    some(on("built.fp8_parameters"), every(on("fp8"), _FP8_PARAMETERS)),
    "replicas of them were neither compared nor averaged yet", "--fp8-param-gather",
    remedy="drop it, or drop --paft and --sync-policy", systems=("paft", "sync"),
)  # fmt: skip
DIVIDED = Rule(
    "parameters that FSDP divides", ("built.fsdp",),
    some(_FSDP, on("use_torch_fsdp2"), on("built.fsdp")), "no rank repeats what another updates",
    "--use-megatron-fsdp, --use-torch-fsdp2", remedy="drop it, or drop --paft and --sync-policy",
    systems=("paft", "sync"),
)  # fmt: skip
_CURRENT = "choose --fp8-recipe tensorwise, blockwise or mxfp8"
_DELAYS = some(on("built.delayed_scaling"), every(on("fp8"), _delayed_scaling))
DELAYED = Rule(
    "fp8 with delayed scaling", ("fp8_recipe",), _DELAYS,
    "replicas of its scales were neither compared nor averaged yet", "--fp8-recipe", "delayed",
    remedy=f"{_CURRENT}, or drop --paft and --sync-policy", systems=("paft", "sync"),
)  # fmt: skip
_ELSEWHERE = (  # what delayed scaling is not followed with: name, key, option, whether it is in use
    (
        "fused operations", "use_transformer_engine_op_fuser", "--use-transformer-engine-op-fuser",
        on("use_transformer_engine_op_fuser"),
    ),
    ("CUDA graphs", "cuda_graph_impl", "--cuda-graph-impl", _graphs("local", "transformer_engine")),
    (
        "recipes by layer", "te_precision_config_file", "--te-precision-config-file",
        some(on("te_precision_config_file"), on("quant_recipe")),
    ),
    ("FSDP", "built.fsdp", DIVIDED.option, DIVIDED.applies),
    (
        "fp8 parameters whose masters an optimizer keeps", "built.masters", KEPT.option,
        every(QUANTIZED.applies, KEPT.applies),
    ),
)  # fmt: skip

COMPARED = (ONE_INSTANCE, DIVIDED, LAYER_WISE, KEPT, QUANTIZED, DELAYED)  # what ends an audit

_REFUSED = (
    COMBINED,
    DIVIDED,
    KEPT,
    QUANTIZED,
    Rule(
        "copies in bubbles with FSDP", ("built.fsdp",), DIVIDED.applies, "no job of both was run yet",
        "--use-megatron-fsdp, --use-torch-fsdp2", remedy="drop it, or drop --baft", systems=("baft",),
    ),
    Rule(
        "full-iteration CUDA graphs", ("cuda_graph_scope", "cuda_graph_impl"), _graphs(_WHOLE),
        "they hide the iteration", "--cuda-graph-impl, --cuda-graph-scope", _WHOLE,
    ),
    _named("optimizer_cuda_graph", "CUDA graphs of the optimizer", "a captured update replays without hooks"),
    DELAYED,
    *(
        Rule(
            f"delayed scaling of fp8 with {what}", (key,), every(_DELAYS, used),
            "scales that it keeps elsewhere are not followed", option, remedy=f"drop it, or {_CURRENT}",
        )
        for what, key, option, used in _ELSEWHERE
    ),
    Rule(
        "fp8 with a recipe of the job's own", ("fp8_recipe",),
        every(on("fp8"), lambda settings: not (_current_scaling(settings) or _delayed_scaling(settings))),
        "what it keeps is unknown", "--fp8-recipe", "custom", remedy=_CURRENT,
    ),
    Rule(
        "fp8 parameters that FSDP divides", ("fp8_param_gather", "fp8_param"),
        some(
            every(some(_FSDP, on("use_torch_fsdp2")), _FP8_PARAMETERS),
            every(on("built.fsdp"), on("built.fp8_parameters")),  # configurations of an own loop lie apart
        ),
        "a restore that casts them from masters is not tested", "--fp8-param-gather",
    ),
    Rule(
        "fp8 in attention", ("fp8_dot_product_attention", "fp8_multi_head_attention"),
        every(on("fp8"), some(on("fp8_dot_product_attention"), on("fp8_multi_head_attention"))),
        "its scaling may be delayed whatever the recipe", "fp8_dot_product_attention, fp8_multi_head_attention",
    ),
    _named("fp4", "fp4 parameters", "they keep scaling state outside of the optimizer", "--fp4-format"),
    _named("qk_clip", "QK clipping", "it changes parameters and masters separately after the update"),
    Rule(
        "the second Megatron FSDP", ("megatron_fsdp_version",), every(_FSDP, above("megatron_fsdp_version", 1)),
        "its optimizer is of another kind", "--megatron-fsdp-version", "2",
    ),
    Rule(
        "Megatron FSDP that divides nothing", ("data_parallel_sharding_strategy",),
        every(_FSDP, equals("data_parallel_sharding_strategy", "no_shard")), "its replicas are untested",
        "--data-parallel-sharding-strategy", "no_shard", remedy="choose optim, optim_grads or optim_grads_params",
    ),
    Rule(
        "Megatron FSDP over several instances", ("num_distributed_optimizer_instances",),
        every(_FSDP, _several_instances), "what they share is untested", "--num-distributed-optimizer-instances", "2",
    ),
    Rule(
        "Megatron FSDP with an optimizer that keeps masters",
        ("use_precision_aware_optimizer", "optimizer_cpu_offload"),
        some(
            every(_FSDP, some(on("use_precision_aware_optimizer"), on("optimizer_cpu_offload"))),
            every(on("built.fsdp"), on("built.masters")),
        ),
        "its shards are masters already, which is untested",
        "--use-precision-aware-optimizer, --optimizer-cpu-offload",
    ),
    Rule(
        "optimizer state in fp8", ("exp_avg_dtype", "exp_avg_sq_dtype"),
        every(on("use_precision_aware_optimizer"), some(*map(_in_fp8, ("exp_avg_dtype", "exp_avg_sq_dtype")))),
        "it is scaled by quantizers, which are not captured", "--exp-avg-dtype, --exp-avg-sq-dtype", "fp8",
    ),
    Rule(
        "a layer-wise optimizer other than Muon", ("optimizer",),
        every(layer_wise, equals("optimizer", *_UNTESTED)), "its state is untested", "--optimizer",
        ", ".join(_UNTESTED),
    ),
    LAYER_WISE,
    built(
        "optimizers", "an optimizer of its own kind",
        "its state is unknown; Megatron's fp32, bf16/fp16 and distributed ones are followed",
    ),
    built("amsgrad", "amsgrad", "Megatron's own state of an optimizer lacks it"),
    built(
        "loaders", "a data loader of the script's own without state_dict and load_state_dict",
        "its data position is unknown",
        remedy="give it both, of plain values (Energon's states are objects: wrap its loader), and to one for "
        "evaluation too, unless --eval-iters is 0",
    ),
    _named("hybrid_context_parallel", "hybrid context parallelism", "its packing of samples keeps its own position"),
    _named("fim_data", "fill-in-the-middle data", "it draws from a random generator that cannot be restored"),
    UNSHARDED,
    Rule(
        "DINO", ("vision_pretraining", "vision_pretraining_type"),
        every(on("vision_pretraining"), equals("vision_pretraining_type", "dino")),
        "it keeps a teacher, which it updates itself", "--vision-pretraining-type", "dino",
    ),
    _named("moe_use_upcycling", "upcycling", "it ends after saving, or trains a converted model"),
    _named("inprocess_restart", "in-process restart", "it builds the model again in the same process"),
    _named("error_injection_rate", "error injection", "injected errors are not repeated after a resume"),
    _named("perform_rl_step", "reinforcement learning steps", "rollouts have no data position"),
    _named("skip_train", "evaluation alone", "there is nothing to protect"),
    ONE_INSTANCE,
    Rule(
        "the distributed optimizer over all replicas",
        ("use_distributed_optimizer", "num_distributed_optimizer_instances"),
        every(on("use_distributed_optimizer"), lambda settings: not _several_instances(settings)),
        "a replica cannot update alone", "--use-distributed-optimizer",
        remedy="give --num-distributed-optimizer-instances (an instance is one replica)", systems=("sync",),
    ),
    _named(
        "moe_router_enable_expert_bias", "the router's bias", "it follows the tokens of all replicas in each iteration",
        systems=("sync",),
    ),
    Rule(
        "the global auxiliary loss", ("moe_router_load_balancing_type",),
        lambda settings: "global_aux_loss" in _listed(at(settings, "moe_router_load_balancing_type")),
        "it reads all replicas in each forward", "--moe-router-load-balancing-type", "global_aux_loss",
        systems=("sync",),
    ),
    _named(
        "mtp_num_layers", "multi-token prediction", "it numbers its layers as the decoder does", systems=("sync",),
    ),
)  # fmt: skip

_FOLLOWED = (
    Rule(
        "fp8 scaled by the current tensor (not yet run on a GPU)", ("fp8_recipe",), every(on("fp8"), _current_scaling),
        "no state outlives an iteration", "--fp8-recipe", "tensorwise, blockwise, mxfp8",
    ),
    Rule(
        "fp8 with delayed scaling (not yet run on a GPU)", ("fp8_recipe",), _DELAYS,
        "scales and maxima are captured", "--fp8-recipe", "delayed",
    ),
    Rule(
        "fp8 parameters (not yet run on a GPU)", ("fp8_param_gather",), every(on("fp8"), _FP8_PARAMETERS),
        "masters are captured, parameters are cast from them", "--fp8-param-gather",
    ),
    _named("use_distributed_optimizer", "the distributed optimizer", "each rank captures its shards"),
    _named(
        "use_precision_aware_optimizer", "the precision-aware optimizer (not yet run on a GPU)",
        "masters are captured where it keeps them",
    ),
    _named(
        "optimizer_cpu_offload", "optimizer CPU offload (not yet run on a GPU)",
        "its copies are captured where they are",
    ),
    _named("use_megatron_fsdp", "Megatron FSDP", "each rank captures the shards that its optimizer updates"),
    _named("use_torch_fsdp2", "torch's FSDP2", "each rank captures its shards"),
    _named("bf16", "bf16", "masters are captured, parameters are cast from them"),
    _named("fp16", "fp16", "masters and the loss scale are captured, parameters are cast from masters"),
    _named("num_experts", "mixture of experts", "experts have replica sets of their own"),
    Rule(
        "CUDA graphs of layers", ("cuda_graph_impl",), _graphs("local", "transformer_engine"),
        "updates stay outside of them", "--cuda-graph-impl",
    ),
    Rule(
        "SGD", ("optimizer",), equals("optimizer", "sgd"), "its momentum is made before the first update",
        "--optimizer", "sgd",
    ),
    Rule(
        "Muon", ("optimizer",), equals("optimizer", *_MUON), "each rank captures what it updates", "--optimizer",
        ", ".join(_MUON),
    ),
    Rule(
        "data loaders of the script's own", ("dataloader_type",), equals("dataloader_type", "external"),
        "their state_dict is captured; one without is refused when it is built",
        "--dataloader-type", "external",
    ),
    _named("rampup_batch_size", "a growing batch", "it follows from the consumed samples"),
    _named("iterations_to_skip", "skipped iterations", "a skipped iteration has a version point too"),
)  # fmt: skip

_INEFFECTIVE = (
    _named(
        "overlap_param_gather", "overlapping the gather of parameters",
        "an audit completes the gather before the forward begins", systems=("paft",),
    ),
)  # fmt: skip

_NEEDED = "Megatron-LM needs Transformer Engine for it, which is not installed here: install it where the job runs, or "

OF_TRANSFORMER_ENGINE = treated_as(Treatment.MISSING, (  # with that package alone, whether the job is protected or not
    Rule(
        "Transformer Engine's layers", ("transformer_impl",),
        equals("transformer_impl", "transformer_engine", "inference_optimized"),
        f"{_NEEDED}choose --transformer-impl local", "--transformer-impl",
    ),
    Rule(
        "CUDA graphs by Transformer Engine", ("cuda_graph_impl",), _graphs("transformer_engine"),
        f"{_NEEDED}{DROP}", "--cuda-graph-impl",
    ),
    *(
        _named(key, name, f"{_NEEDED}{DROP}", option)
        for key, name, option in (
            ("fp8", "fp8", "--fp8-format"),
            ("fp4", "fp4", "--fp4-format"),
            ("use_precision_aware_optimizer", "the precision-aware optimizer", ""),
            ("optimizer_cpu_offload", "optimizer CPU offload", ""),
        )
    ),
))  # fmt: skip


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


MEGATRON = (*_REFUSED, *treated_as(Treatment.FOLLOWED, _FOLLOWED), *treated_as(Treatment.INEFFECTIVE, _INEFFECTIVE))
