"""What of DeepSpeed cannot be followed is refused by name, all of it at once."""

from types import SimpleNamespace

import pytest
import torch

from ft_plugins.adapters.deepspeed.support import require_local, require_supported, require_supported_settings
from ft_plugins.errors import UnsupportedError


class OnebitAdam(torch.optim.Adam):
    """One that stands where DeepSpeed's do."""

    __module__ = "deepspeed.runtime.fp16.onebit.adam"


def engine(kind="DeepSpeedEngine", optimizer=None, zero=None, has_moe_layers=False, expert_parallel=False, **answers):
    """An engine of class `kind`, whose methods answer `answers`."""
    methods = {name: (lambda self, value=value: value) for name, value in answers.items()}
    found = type(kind, (), methods)()
    parameter = torch.nn.Parameter(torch.zeros(2))
    found.optimizer = torch.optim.AdamW([parameter]) if optimizer is None else optimizer(parameter)
    experts = SimpleNamespace(enabled=expert_parallel)
    found._config = SimpleNamespace(zero_config=SimpleNamespace(**(zero or {})), expert_parallel_config=experts)
    found.has_moe_layers = has_moe_layers
    return found


def test_what_is_followed_passes():
    for kind in ("DeepSpeedEngine", "PipelineEngine"):
        offload = {"offload_optimizer": SimpleNamespace(device="cpu", ratio=1.0, super_offload=False)}
        offload["offload_param"] = SimpleNamespace(device="cpu")
        require_supported(engine(kind, zero=offload, zero_hpz_partition_size=1, autotp_size=0), 0)
    require_supported(engine(optimizer=lambda one: torch.optim.SGD([one], 0.1), has_moe_layers=True), 0)


@pytest.mark.parametrize(
    "refused, words",
    [
        ({"kind": "DualPipeVEngine"}, "DualPipeV"),
        ({"kind": "DeepSpeedHybridEngine"}, "an engine of its own kind (DeepSpeedHybridEngine)"),
        ({"kind": "PipelineEngine", "autotp_size": 2}, "AutoTP with pipelines"),
        ({"kind": "PipelineEngine", "has_moe_layers": True}, "MoE layers in a pipeline"),
        ({"has_moe_layers": True, "expert_parallel": True}, "AutoEP (expert_parallel)"),
        ({"zero": {"offload_optimizer": SimpleNamespace(device="nvme")}}, "offload_optimizer.device nvme"),
        ({"zero": {"offload_param": SimpleNamespace(device="nvme")}}, "zero_optimization.offload_param.device nvme"),
        ({"zero": {"mics_shard_size": 2}}, "MiCS"),
        ({"zero_hpz_partition_size": 2}, "hpZ"),
        ({"zero_quantized_weights": True}, "zero_quantized_weights"),
        ({"is_deepcompile_enabled": True}, "DeepCompile"),
        ({"amp_enabled": True}, "apex.amp (amp)"),
        ({"amp_enabled": "false"}, "apex.amp (amp)"),  # for DeepSpeed, which asks whether it is empty
        ({"managed_gradient_accumulation": 0}, "gradient accumulation that the script manages"),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation"),
        ({"eigenvalue_enabled": True}, "eigenvalues"),
        ({"optimizer": lambda one: OnebitAdam([one])}, "1-bit optimizer (optimizer.type OnebitAdam)"),
    ],
)
def test_what_cannot_be_followed_is_named(refused, words):
    with pytest.raises(UnsupportedError, match="rank 3: cannot protect this job: ") as told:
        require_supported(engine(**refused), 3)
    assert words in str(told.value) and "Drop the option" in str(told.value)


def test_compression_is_refused_where_it_is_on():
    found = engine()
    methods = {"sparse_pruning": {"enabled": False}, "row_pruning": {"enabled": False}}
    found.compression_scheduler = SimpleNamespace(different_compression_methods=methods, training_steps=0)
    found.quantizer = None
    require_supported(found, 0)
    methods["sparse_pruning"]["enabled"] = True
    with pytest.raises(UnsupportedError, match="compression_training sparse_pruning") as told:
        require_supported(found, 0)
    assert "row_pruning" not in str(told.value)
    methods["sparse_pruning"]["enabled"] = False
    found.quantizer = object()
    with pytest.raises(UnsupportedError, match="MoQ"):
        require_supported(found, 0)


def test_all_of_it_is_named_at_once():
    with pytest.raises(UnsupportedError, match="hpZ.*DualPipeV"):
        require_supported(engine("DualPipeVEngine", zero_hpz_partition_size=2), 0)


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "Adagrad", "Lamb", "Lion", "SGD"])
def test_optimizers_that_are_followed_pass_by_their_settings(kind):
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    require_supported_settings({"optimizer": {"type": kind}, "zero_optimization": zero}, None)


def test_an_engine_that_was_told_to_sum_gradients_is_refused_with_local_sgd():
    summing = engine()
    summing.gradient_average = False
    require_supported(summing, 0)
    with pytest.raises(UnsupportedError, match="sums of gradients"):
        require_local(summing, 0)
