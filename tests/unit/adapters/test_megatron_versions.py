"""What differs between the versions of Megatron: arguments that one lacks, and the names of what is refused.

The tables are taken from the versions' sources; with --all, and a folder of checkouts (one per tag) named by
FTP_MEGATRON_LM_ROOT, they are compared with these.
"""

import argparse
import enum
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ft_plugins.adapters.megatron import training
from ft_plugins.adapters.megatron.arguments import check_validated, require_followed
from ft_plugins.adapters.megatron.fp8_scaling import _PARTS, create, require_no_other, tensors
from ft_plugins.adapters.megatron.training import MegatronLoop
from ft_plugins.adapters.rules import MEGATRON, Treatment, findings, refused
from ft_plugins.adapters.rules.megatron import cuda_graphs
from ft_plugins.errors import UnsupportedError
from ft_plugins.patches import cpu_patches
from tests.unit.adapters import megatron_sources as sources

ADAPTER = Path(training.__file__).parent
VERSIONS = ("0.14", "0.15", "0.16", "0.17", "0.18", "0.19", "0.20")

# Arguments that every version has: the adapter may read these, and only these, without a default.
EVERYWHERE = {
    *("iteration", "num_floating_point_operations_so_far", "consumed_train_samples", "consumed_valid_samples"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("context_parallel_size", "data_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
    *("use_tp_pp_dp_mapping", "train_iters", "dataloader_type"),
}
# Of megatron.training.training, by name.
OF_THE_LOOP = {
    *("get_args", "get_rerun_state_machine", "ft_integration", "setup_model_and_optimizer", "train_step", "pretrain"),
    *("build_train_valid_test_data_loaders", "dummy_train_step", "checkpoint_and_decide_exit"),
}

# What the adapter uses of the objects that classes of these modules of megatron.core make: methods and attributes.
OF_OBJECTS = {
    "optimizer.optimizer": {
        *("init_state_fn", "is_stub_optimizer", "grad_scaler", "chained_optimizers", "config", "optimizer"),
        *("float16_groups", "fp32_from_float16_groups", "fp32_from_fp32_groups", "_copy_main_params_to_model_params"),
    },
    "optimizer.distrib_optimizer": {
        *("model_float16_groups", "shard_fp32_from_float16_groups", "model_fp32_groups", "shard_fp32_groups"),
        *("_get_model_param_range_map", "_copy_main_params_to_model_params", "buffers", "shard_float16_groups"),
    },
    "distributed.distributed_data_parallel": {
        *("start_param_sync", "finish_grad_sync", "zero_grad_buffer", "ddp_config"),
        *("bucket_groups", "expert_parallel_bucket_groups"),
    },
    "distributed.param_and_grad_buffer": {
        *("params", "buckets", "gradient_scaling_factor", "data_parallel_group"),
        "inter_distributed_optimizer_instance_group",
    },
    "distributed.fsdp.mcore_fsdp_adapter": {"param_and_grad_buffer", "start_param_sync"},
    "distributed.fsdp.src.megatron_fsdp.megatron_fsdp": {"synchronize_param_gather"},
    "distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer": {
        *("optimizer_named_parameters", "parameter_groups", "model_weight_buffer", "is_data_distributed"),
    },
    "distributed.distributed_data_parallel_config": {
        *("overlap_grad_reduce", "overlap_param_gather", "bucket_size", "use_distributed_optimizer"),
        *("num_distributed_optimizer_instances", "average_in_collective", "use_megatron_fsdp"),
        "data_parallel_sharding_strategy",
    },
    "model_parallel_config": {"finalize_model_grads_func"},
    "parallel_state": {
        *("get_data_parallel_group", "get_expert_data_parallel_group", "get_context_parallel_group"),
        *("get_tensor_model_parallel_group", "get_inter_distributed_optimizer_instance_group"),
    },
    "pipeline_parallel.p2p_communication": {"P2PCommunicator", "_communicate", "config"},
    "rerun_state_machine": {
        *("large_value_counts", "max_values", "current_iteration", "state", "rerun_requested", "validation_counts"),
        *("validate_result", "data_iterator_checkpoints", "failed_validation_call", "initial_result"),
    },
    "optimizer_param_scheduler": {"num_steps", "load_state_dict", "state_dict"},
}


@dataclass(frozen=True)
class Option:
    """An option that is refused: its name, the first version that has it, a value in use, what the refusal says."""

    name: str
    since: str
    value: Any
    said: str

    def within(self, version):
        return VERSIONS.index(self.since) <= VERSIONS.index(version)


ARGUMENTS = (
    Option("perform_rl_step", "0.15", True, "--perform-rl-step"),
    Option("skip_train", "0.14", True, "--skip-train"),
    Option("inprocess_restart", "0.14", True, "--inprocess-restart"),
    Option("hybrid_context_parallel", "0.16", True, "--hybrid-context-parallel"),
    Option("fim_data", "0.16", True, "--fim-data"),
    Option("moe_use_upcycling", "0.14", True, "--moe-use-upcycling"),
    Option("error_injection_rate", "0.14", 100, "--error-injection-rate"),
    Option("optimizer_cuda_graph", "0.17", True, "--optimizer-cuda-graph"),
)
OF_MODEL = (
    Option("fp4", "0.15", "e2m1", "fp4 parameters"),
    Option("qk_clip", "0.16", True, "QK clipping"),
)
OF_SCHEDULE = (  # refused with BAFT
    Option("overlap_moe_expert_parallel_comm", "0.14", True, "combined 1F1B (--overlap-moe-expert-parallel-comm)"),
)
OF_LOCAL_STEPS = (
    Option("moe_router_enable_expert_bias", "0.14", True, "--moe-router-enable-expert-bias"),
    Option("moe_router_load_balancing_type", "0.14", ["aux_loss", "global_aux_loss"], "global auxiliary loss"),
    Option("mtp_num_layers", "0.14", 1, "--mtp-num-layers"),
)
OF_OPTIMIZER = (  # refused where replicas are compared or averaged
    Option("use_precision_aware_optimizer", "0.14", True, "an optimizer that keeps masters"),
    Option("optimizer_cpu_offload", "0.14", True, "an optimizer that keeps masters"),
)
USUAL = {"moe_router_load_balancing_type": "aux_loss", "error_injection_rate": 0}


REFT = ("reft",)


def said_of(settings, systems=()):
    """What is refused of them, each as its phrase."""
    return [one.text for one in refused(findings(MEGATRON, settings, systems=systems))]


class Scope(enum.Enum):
    """As in megatron.core 0.16 and 0.17."""

    full_iteration = 1
    full_iteration_inference = 2
    attn = 3


@dataclass(frozen=True)
class Graphs:
    """How versions name CUDA graphs: what is usual, what captures the whole iteration, what captures less."""

    versions: tuple[str, ...]
    usual: dict[str, Any]
    whole: dict[str, Any]
    less: tuple[dict[str, Any], ...] = field(default_factory=tuple)


GRAPHS = (
    Graphs(
        ("0.14",),
        {"enable_cuda_graph": False, "external_cuda_graph": False, "cuda_graph_scope": "full"},
        {"enable_cuda_graph": True, "cuda_graph_scope": "full_iteration"},
        (
            {"enable_cuda_graph": True, "cuda_graph_scope": "full"},
            {"external_cuda_graph": True, "cuda_graph_scope": "attn"},
        ),
    ),
    Graphs(
        ("0.15",),
        {"enable_cuda_graph": False, "cuda_graph_impl": "none", "cuda_graph_scope": "full"},
        {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"},
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn"},),
    ),
    Graphs(
        ("0.16", "0.17"),
        {"enable_cuda_graph": False, "cuda_graph_impl": "none", "cuda_graph_scope": []},
        {"cuda_graph_impl": "local", "cuda_graph_scope": [Scope.full_iteration]},
        (
            {"cuda_graph_impl": "local", "cuda_graph_scope": [Scope.full_iteration_inference]},
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": [Scope.attn]},
        ),
    ),
    Graphs(
        ("0.18", "0.19", "0.20"),
        {"enable_cuda_graph": False, "cuda_graph_impl": "none", "cuda_graph_modules": []},
        {"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []},
        ({"cuda_graph_impl": "local", "cuda_graph_modules": [Scope.attn]},),
    ),
)


def graphs_of(version):
    return next(one for one in GRAPHS if version in one.versions)


def configured(version, options, **set_):
    """The options that this version has, as usual but for `set_`."""
    known = {option.name: USUAL.get(option.name) for option in options if option.within(version)}
    return argparse.Namespace(**known | graphs_of(version).usual | set_)


# ---- arguments that a version lacks


@pytest.mark.parametrize("given", [{}, {"phase_transition_iterations": None}, {"phase_transition_iterations": [4]}])
def test_a_resume_before_the_first_evaluation_reads_no_option_that_only_newer_versions_have(given):
    args = argparse.Namespace(iteration=3, consumed_valid_samples=0, **given)
    loop = SimpleNamespace(args=args, _restored=True)
    with MegatronLoop.counted_validation(loop):
        during = args.iteration
    assert during == (3 if given.get("phase_transition_iterations") else 0)
    assert args.iteration == 3


def test_a_version_older_than_megatrons_checkpoint_drops_the_rerun_that_this_one_asks_for():
    class State(enum.Enum):
        NOT_RUNNING_YET = 0
        WILL_RERUN_FROM_CHECKPOINT = 3

    machine = SimpleNamespace(
        state=State.WILL_RERUN_FROM_CHECKPOINT, data_iterator_checkpoints=[{}], failed_validation_call=1,
        initial_result=2.0,
    )  # fmt: skip
    loaded = []
    module = SimpleNamespace(
        get_rerun_state_machine=lambda: machine,
        ft_integration=SimpleNamespace(on_checkpoint_loaded=lambda is_local_chkpt: loaded.append(is_local_chkpt)),
    )
    for restored, expected in ((11, State.WILL_RERUN_FROM_CHECKPOINT), (10, State.NOT_RUNNING_YET)):
        args = argparse.Namespace(iteration=11, train_iters=20, num_floating_point_operations_so_far=0)

        def resume(iteration, last, args=args, restored=restored):
            args.iteration = restored
            return restored

        loop = SimpleNamespace(args=args, _module=module, _session=SimpleNamespace(resume=resume), _host=None)
        loop._drop_rerun = lambda loop=loop: MegatronLoop._drop_rerun(loop)
        MegatronLoop.resume(loop)
        assert (machine.state, loop._restored, loop.completed) == (expected, restored == 10, restored)
    assert machine.data_iterator_checkpoints is None and loaded == [True]


def test_what_is_read_of_the_arguments_without_a_default_is_in_every_version():
    read = {name for file in ADAPTER.glob("*.py") for name in sources.read(file, "args")}
    assert read - EVERYWHERE == set()


# ---- refusals


@pytest.mark.parametrize("version", VERSIONS)
def test_what_the_arguments_show_is_refused_before_a_model_is_built(version):
    """The model and its optimizer took minutes, and then were refused for what the command line had said."""
    for option in (*OF_MODEL, *OF_OPTIMIZER):
        if option.within(version):
            with pytest.raises(UnsupportedError, match=f"{re.escape(option.said)}.*, or run without protection"):
                require_followed(configured(version, (option,), **{option.name: option.value}), (*REFT, "paft"))


@pytest.mark.parametrize("version", VERSIONS)
def test_each_option_is_refused_by_name_and_the_usual_ones_are_not(version):
    require_followed(configured(version, ARGUMENTS), REFT)
    for option in ARGUMENTS:
        if option.within(version):
            with pytest.raises(UnsupportedError, match=option.said):
                require_followed(configured(version, ARGUMENTS, **{option.name: option.value}), REFT)


@pytest.mark.parametrize("version", VERSIONS)
def test_graphs_of_a_whole_iteration_are_refused_and_smaller_ones_are_not(version):
    graphs = graphs_of(version)
    with pytest.raises(UnsupportedError, match="full-iteration CUDA graphs"):
        require_followed(configured(version, ARGUMENTS, **graphs.whole), REFT)
    assert any("full-iteration" in one for one in said_of(configured(version, OF_MODEL, **graphs.whole)))
    for smaller in graphs.less:
        require_followed(configured(version, ARGUMENTS, **smaller), REFT)
        assert said_of(configured(version, OF_MODEL, **smaller)) == []
        assert cuda_graphs(configured(version, OF_MODEL, **smaller)) != "none", "they cannot be replayed"
    assert cuda_graphs(configured(version, OF_MODEL)) == "none"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("options", "systems"),
    [(OF_MODEL, ()), (OF_OPTIMIZER, ("paft",)), (OF_LOCAL_STEPS, ("sync",)), (OF_SCHEDULE, ("baft",))],
    ids=["model", "optimizer", "local steps", "schedule"],
)
def test_each_field_of_a_configuration_is_refused_by_name(version, options, systems):
    assert said_of(configured(version, options), systems) == []
    for option in options:
        if option.within(version):
            (said,) = said_of(configured(version, options, **{option.name: option.value}), systems)
            assert option.said in said


def test_what_ends_one_system_leaves_the_others_alone():
    combined = argparse.Namespace(overlap_moe_expert_parallel_comm=True)
    require_followed(combined, ("reft", "paft"))
    for system in ("baft", "sync"):
        with pytest.raises(UnsupportedError, match="combined 1F1B.*rop it, or drop --baft and --sync-policy"):
            require_followed(combined, ("reft", system))
    instances = argparse.Namespace(num_distributed_optimizer_instances=2)
    require_followed(instances, ("reft", "baft", "sync"))
    with pytest.raises(UnsupportedError, match="--num-distributed-optimizer-instances 2.*Drop it, or drop --paft"):
        require_followed(instances, ("paft",))


FSDP = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
FSDP_REFUSED = [
    ({"data_parallel_sharding_strategy": "no_shard"}, "--data-parallel-sharding-strategy no_shard.*hoose optim"),
    ({"megatron_fsdp_version": 2}, "--megatron-fsdp-version 2"),
    ({"num_distributed_optimizer_instances": 2}, "over several instances"),
    ({"use_precision_aware_optimizer": True}, "an optimizer that keeps masters"),
    ({"optimizer_cpu_offload": True}, "an optimizer that keeps masters"),
    ({"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param_gather": True}, "fp8 parameters that FSDP divides"),
]


def test_fsdp_is_followed_with_reft_where_ranks_divide_what_they_update():
    for followed in ({"use_torch_fsdp2": True}, FSDP, {**FSDP, "megatron_fsdp_version": 1}):
        require_followed(argparse.Namespace(**followed), ("reft",))
        with pytest.raises(UnsupportedError, match="copies in bubbles with FSDP .*drop --baft"):
            require_followed(argparse.Namespace(**followed), ("reft", "baft"))
        for system in ("paft", "sync"):
            with pytest.raises(UnsupportedError, match="parameters that FSDP divides .*drop --paft and --sync-policy"):
                require_followed(argparse.Namespace(**followed), ("reft", system))
    for more, said in FSDP_REFUSED:
        with pytest.raises(UnsupportedError, match=said):
            require_followed(argparse.Namespace(**{**FSDP, **more}), REFT)


def test_what_lies_in_several_configurations_of_an_own_loop_is_refused_by_what_was_built():
    for fact, said in (("masters", "an optimizer that keeps masters"), ("fp8_parameters", "that FSDP divides")):
        assert any(said in one for one in said_of({"built": {"fsdp": True, fact: True}}, REFT)), fact
        assert not said_of({"built": {"fsdp": True}}, REFT)


FP8_REFUSED = [
    ({"fp8_recipe": "custom"}, "--fp8-recipe custom"),
    ({"use_megatron_fsdp": True}, "delayed scaling of fp8 with FSDP .--use-megatron-fsdp, --use-torch-fsdp2.:"),
    ({"fp8_recipe": "delayed", "cuda_graph_impl": "local"}, "fp8 with CUDA graphs .--cuda-graph-impl local"),
    ({"use_transformer_engine_op_fuser": True}, "fp8 with fused operations .--use-transformer-engine-op-fuser"),
    (
        {"te_precision_config_file": "a.yaml"},
        "fp8 with recipes by layer .--te-precision-config-file a.yaml.* Drop it, or",
    ),
    ({"quant_recipe": object(), "cuda_graph_impl": "none"}, "with recipes by layer .--te-precision-config-file.:"),
    ({"fp8_param_gather": True, "optimizer_cpu_offload": True}, "fp8 parameters whose masters an optimizer keeps"),
    ({"fp8_param": True, "use_precision_aware_optimizer": True}, "fp8 parameters whose masters an optimizer keeps"),
    ({"fp8_recipe": "tensorwise", "fp8_param_gather": True, "use_torch_fsdp2": True}, "that FSDP divides"),
    ({"fp8_recipe": "tensorwise", "fp8_dot_product_attention": True}, "fp8 in attention"),
]


def test_fp8_is_followed_by_recipe():
    for recipe in ("tensorwise", "blockwise", "mxfp8", "delayed"):
        settings = argparse.Namespace(fp8="hybrid", fp8_recipe=recipe, fp8_param_gather=False)
        require_followed(settings, REFT)
        [found] = findings(MEGATRON, settings)
        assert found.rule.treatment is Treatment.FOLLOWED and f"--fp8-recipe {recipe}" in found.text
        settings.fp8_param_gather = True
        require_followed(settings, ("reft", "baft"))
        for system in ("paft", "sync"):
            with pytest.raises(UnsupportedError, match="fp8 parameters .*drop --paft and --sync-policy"):
                require_followed(settings, ("reft", system))
    for given in ({"fp8_recipe": "delayed"}, {}):  # it is the default
        with pytest.raises(UnsupportedError, match="fp8 with delayed scaling .*or drop --paft and --sync-policy"):
            require_followed(argparse.Namespace(fp8="hybrid", **given), ("reft", "paft"))
    for more, said in FP8_REFUSED:
        with pytest.raises(UnsupportedError, match=said):
            require_followed(argparse.Namespace(fp8="hybrid", **more), REFT)


class _Scaled(torch.nn.Module):
    """A module that keeps what TransformerEngine's do: nothing before its first forward, then by its recipes."""

    def __init__(self, **kept):
        super().__init__()
        self.fp8_meta = {"fp8_checkpoint": False, "recipe": None}
        self._kept = kept

    def forward(self):
        self.fp8_meta.update(self._kept)


def test_a_history_of_maxima_that_appears_next_to_another_recipe_is_refused_by_its_module():
    """A restore began it from nothing, so that scales were others than in an unfailed run."""
    scaled_now = SimpleNamespace(quantizers=[object()])
    delayed = SimpleNamespace(scale=torch.ones(2), amax_history=torch.zeros(4, 2))
    attention = _Scaled(scaling_fwd=[scaled_now, delayed])
    chunk = torch.nn.ModuleDict({"linear": _Scaled(scaling_fwd=scaled_now), "attention": attention})
    chunk.config = SimpleNamespace(fp8="hybrid", fp8_recipe="tensorwise")
    require_no_other([chunk], 3)
    for part in (chunk["linear"], attention):
        part.forward()
    with pytest.raises(UnsupportedError, match="rank 3: 'attention' ._Scaled. keeps a history of maxima"):
        require_no_other([chunk], 3)
    chunk.config.fp8 = None  # another use of the name
    require_no_other([chunk], 3)


class Linear(_Scaled):
    """By its name, Transformer Engine's. It makes its state as version 1 did, without a recipe."""

    def init_fp8_metadata(self, products):
        self.fp8_meta.update({key: SimpleNamespace(scale_inv=torch.ones(products)) for key in _PARTS})


class _Operation(torch.nn.Module):
    """Transformer Engine's, which casts so many tensors; its norms are operations that cast none."""

    def __init__(self, casts):
        super().__init__()
        self._fp8_metas = None
        self.num_quantizers = lambda mode: casts


class TEFusedMLP(torch.nn.Module):
    """By its name, Megatron-LM's, which hides its operations."""


def test_delayed_scaling_of_an_unknown_module_is_refused_by_name_before_it_trains():
    for part in (_Scaled(), Linear(), _Operation(1), TEFusedMLP()):
        chunk = torch.nn.ModuleDict({"fc1": part, "other": torch.nn.Linear(1, 1)})
        chunk.config = SimpleNamespace(fp8="hybrid", fp8_recipe="delayed")
        with pytest.raises(UnsupportedError, match=f"rank 3: 'fc1' .{type(part).__name__}. keeps scales for fp8"):
            create([chunk], 3)
        chunk.config.fp8_recipe = "tensorwise"
        create([chunk], 3)
    norm = torch.nn.ModuleDict({"norm": _Operation(0)})
    norm.config = SimpleNamespace(fp8="hybrid", fp8_recipe="delayed")
    create([norm], 3)  # it casts nothing


FP8GlobalStateManager = SimpleNamespace(global_amax_history_buffer={})  # by its name, what `Linear` is updated by


def test_scales_of_modules_out_of_sight_are_refused(monkeypatch):
    linear = Linear()
    states = {key: SimpleNamespace(scale=torch.ones(2), amax_history=torch.zeros(4, 2)) for key in _PARTS}
    linear.fp8_meta.update(states)
    chunk = torch.nn.ModuleDict({"fc1": linear})
    chunk.config = SimpleNamespace(fp8="hybrid", fp8_recipe="delayed")
    buffers = {key: [one.amax_history] for key, one in states.items()}
    monkeypatch.setattr(FP8GlobalStateManager, "global_amax_history_buffer", buffers)
    require_no_other([chunk], 3)
    assert [name for name, _ in tensors(chunk)] == [f"fc1.{key}.{kind}" for key in _PARTS for kind in vars(states[key])]
    buffers[_PARTS[0]].append(torch.zeros(4, 2))
    with pytest.raises(UnsupportedError, match="rank 3: 'fc1' .Linear. is updated together with hidden modules"):
        require_no_other([chunk], 3)
    del buffers[_PARTS[0]][1], linear.fp8_meta[_PARTS[0]].scale  # as another recipe leaves it
    assert not [*tensors(chunk)]
    with pytest.raises(UnsupportedError, match="rank 3: 'fc1' .Linear. keeps a history of maxima"):
        require_no_other([chunk], 3)


def test_a_precision_aware_optimizer_is_followed_unless_quantizers_scale_its_state():
    """The dtypes as Megatron-LM's options name them, and as its validation leaves them."""
    for key in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        for followed in ("bf16", torch.float16, torch.float32):
            require_followed(argparse.Namespace(use_precision_aware_optimizer=True, **{key: followed}), REFT)
        for refused_dtype in ("fp8", torch.uint8):
            with pytest.raises(UnsupportedError, match="optimizer state in fp8"):
                require_followed(argparse.Namespace(use_precision_aware_optimizer=True, **{key: refused_dtype}), REFT)


LAYER_WISE = (
    {"optimizer": "dist_muon"},
    {"optimizer": "muon", "use_distributed_optimizer": True},
    {"optimizer": "muon", "use_layer_wise_distributed_optimizer": True},
)


def test_muon_is_followed_but_where_replicas_would_have_to_update_the_same():
    for given in ({"optimizer": "muon"}, *LAYER_WISE):
        require_followed(argparse.Namespace(**given), REFT)
    paft = ("paft",)
    require_followed(argparse.Namespace(optimizer="muon"), paft)
    for given in LAYER_WISE:
        with pytest.raises(UnsupportedError, match=f"a layer-wise optimizer .--optimizer {given['optimizer']}"):
            require_followed(argparse.Namespace(**given), paft)
    with pytest.raises(UnsupportedError, match="a layer-wise optimizer other than Muon .--optimizer soap"):
        require_followed(argparse.Namespace(optimizer="soap", use_layer_wise_distributed_optimizer=True), REFT)


class _Arguments(ModuleType):
    """Stands for `megatron.training.arguments`."""

    @staticmethod
    def validate_args(args, defaults):
        args.fp8, args.fp8_recipe = defaults["fp8"], "custom"
        return args


def test_arguments_are_refused_once_they_are_validated_before_anything_is_built(monkeypatch):
    """Process groups were made, and every rank had met the others, before the command line was refused."""
    module = _Arguments("megatron.training.arguments")
    check_validated(module)
    protected = argparse.Namespace(reft=True)
    assert module.validate_args(protected, {"fp8": None}) is protected
    with pytest.raises(UnsupportedError, match="--fp8-recipe custom"):
        module.validate_args(protected, {"fp8": "hybrid"})
    module.validate_args(argparse.Namespace(), {"fp8": "hybrid"})  # without protection it is Megatron-LM's own


# ---- the versions' sources


def checkouts():
    root = os.environ.get("FTP_MEGATRON_LM_ROOT")
    found = sorted(one for one in Path(root).iterdir() if (one / "megatron" / "core").is_dir()) if root else []
    for one in found:
        yield pytest.param(one, id=one.name)
    if not found:
        reason = "FTP_MEGATRON_LM_ROOT names no folder with checkouts of Megatron-LM"
        yield pytest.param(None, marks=pytest.mark.skip(reason=reason), id="none")


of_checkouts = pytest.mark.parametrize("checkout", list(checkouts()))


@pytest.mark.all_configurations
@of_checkouts
def test_the_tables_are_what_the_sources_say(checkout):
    version, named = sources.version(checkout), sources.arguments(checkout)
    assert version in VERSIONS
    assert EVERYWHERE - named == set()
    assert OF_THE_LOOP - sources.defined(checkout, "megatron.training.training") == set()
    model, optimizer = (
        {name for config in configs for name in sources.fields(checkout, config)}
        for configs in (sources.CONFIGS[:2], sources.CONFIGS[2:3])
    )
    for options, known in (
        (ARGUMENTS, named),
        (OF_MODEL, model),
        (OF_OPTIMIZER, optimizer),
        (OF_LOCAL_STEPS, model),
        (OF_SCHEDULE, model),
    ):
        assert {option.name: option.within(version) for option in options} == {
            option.name: option.name in known for option in options
        }
    graphs = graphs_of(version)
    assert set(graphs.usual) - named == set()
    field_ = (checkout / "megatron" / "core" / sources.CONFIGS[1]).read_text().partition("    cuda_graph_impl: ")[2]
    assert ("full_iteration" in field_.partition("\n")[0]) == (graphs.whole.get("cuda_graph_impl") == "full_iteration")


@pytest.mark.all_configurations
@of_checkouts
def test_what_is_imported_of_megatron_is_in_the_sources(checkout):
    wanted = {one for file in ADAPTER.glob("*.py") for one in sources.imports(file, "megatron")}
    assert ("megatron.core", "parallel_state") in wanted
    assert [one for one in sorted(wanted) if one[1] not in sources.defined(checkout, one[0])] == []
    for module, names in OF_OBJECTS.items():
        assert names - sources.members(checkout, f"megatron.core.{module}") == set(), module


@pytest.mark.all_configurations
@of_checkouts
def test_every_patch_of_megatron_applies_to_the_sources(checkout):
    for patch in cpu_patches():
        if patch.distribution != "megatron-core" or sources.file_of(checkout, patch.module) is None:
            continue  # what a version does not have needs no patch
        found = sources.source(checkout, patch.module, patch.symbol)
        if found is None:
            assert patch.symbol in sources.defined(checkout, patch.module), patch
            continue
        parameters, text = found
        assert patch.parameters in (None, parameters), patch
        assert [fragment for fragment in patch.contains if fragment not in text] == [], patch


IMPORTED = """
import importlib, pathlib, sys
from ft_plugins.adapters.megatron import prepare
from ft_plugins.patches.megatron_missing import needed_by
prepare()
checkout = pathlib.Path(sys.argv[1])
importlib.import_module("megatron.training.training")
files = [file for file in (checkout / "megatron").rglob("*.py") if needed_by(file.read_bytes())]
names = [".".join(file.relative_to(checkout).with_suffix("").parts) for file in files]
failed = []
for name in names:
    try:
        importlib.import_module(name)
    except Exception as error:
        if "triton" in str(error):
            failed.append((name, str(error)))
print("outcome", failed, "triton" in sys.modules, pathlib.Path(sys.modules["megatron.core"].__file__).parents[2])
"""


@pytest.mark.all_configurations
@of_checkouts
def test_megatrons_loop_and_all_of_its_kernels_can_be_imported_without_triton(checkout):
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", IMPORTED, checkout]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == f"outcome [] False {checkout}"
