"""Stories about the Megatron host, one rank each; see `gang_stories`."""

import json
import random
from types import SimpleNamespace
from typing import Any

import megatron_gpt
import torch
from gpt_job import Job
from megatron.core import num_microbatches_calculator as calculator
from megatron.core import parallel_state
from megatron.core.optimizer.optimizer import FP32Optimizer

from ft_plugins.adapters import host_parts
from ft_plugins.adapters.megatron import state
from ft_plugins.adapters.megatron.core import MegatronCoreHost
from ft_plugins.adapters.megatron.spans import follow
from ft_plugins.adapters.megatron.support import require_supported
from ft_plugins.base import faults
from ft_plugins.config import launch_context
from ft_plugins.errors import InventoryError, ResumeError, TopologyError, UnsupportedError
from ft_plugins.model.digest import state_digest
from ft_plugins.model.inventory import IterationSpan, Role
from ft_plugins.model.topology import Topology
from ft_plugins.snapshot.capture import codec

SMALL = ["--layers", "2", "--hidden", "16", "--heads", "2", "--sequence", "16", "--global-batch", "4", "--warmup", "1"]
SHARDED_BF16 = ["--bf16", "--distributed-optimizer", "--loss-scale", "4"]


class Recorded:
    """Hooks that write down what is called."""

    def __init__(self):
        self.calls = []

    def before_update(self, step):
        self.calls.append(("before", step))

    def after_update(self, step):
        self.calls.append(("after", step))


def job(*flags):
    return Job(megatron_gpt.parse([*SMALL, *flags]), launch_context())


def trained(built, iterations):
    for _ in range(iterations):
        built.train_step(skip=lambda: None)
    return built


def refused(kind, call):
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")


def it_knows_what_the_optimizer_will_keep_and_leaves_it_untouched():
    for flags in ([], ["--bf16"], SHARDED_BF16, ["--distributed-optimizer"]):
        expected = state_digest((alone := trained(job(*flags), 3)).host())
        alone.close()
        looked_at = job(*flags)
        host = looked_at.host()
        moments = [item.name for item in host.inventory().items if item.role is Role.MOMENT]
        assert moments and all(host.tensors()[name].is_meta for name in moments), flags
        assert state_digest(trained(looked_at, 3).host()) == expected, flags
        looked_at.close()


def it_inventories_twelve_bytes_a_parameter_and_no_derived_copy():
    for flags in ([], ["--bf16"], SHARDED_BF16, ["--distributed-optimizer"]):
        built = job(*flags)
        host = built.host()
        parameters = sum(parameter.numel() for chunk in built.chunks for parameter in chunk.parameters())
        items = host.inventory().items
        assert host.inventory().nbytes == 12 * parameters, flags
        assert {item.dtype for item in items} == {"float32"}, flags
        assert {item.changed_by for item in items} == {frozenset({IterationSpan.UPDATE})}
        assert {item.layer for item in items} == {None, 1, 2}
        assert set(host.tensors()) == {item.name for item in items}
        kept = {item.role for item in items} - {Role.MOMENT}
        assert kept == ({Role.MAIN_PARAMETER} if flags else {Role.PARAMETER}), flags
        built.close()


def it_inventories_frozen_parameters_and_buffers_as_they_are():
    built = job("--bf16")
    host = built.host()
    layer = built.chunks[0].module.module.decoder.layers[0]
    layer.register_buffer("tokens_seen", torch.zeros(4, dtype=torch.int64))
    name = "chunk0.decoder.layers.0.mlp.linear_fc1.weight"
    frozen = layer.mlp.linear_fc1.weight
    wrapped = built.optimizer.chained_optimizers[0]
    for groups in (wrapped.float16_groups, wrapped.fp32_from_float16_groups):
        for group in groups:
            group[:] = [one for one in group if one is not frozen and one is not frozen.main_param]
    assert name in refused(InventoryError, host.inventory)
    frozen.requires_grad = False
    items = {item.name: item for item in host.inventory().items}
    assert (items[name].role, items[name].dtype, items[name].changed_by) == (Role.PARAMETER, "bfloat16", frozenset())
    buffer = items["chunk0.decoder.layers.0.tokens_seen"]
    assert (buffer.role, buffer.replicas, buffer.layer, buffer.background) == (Role.BUFFER, (0,), 1, False)


class Router(torch.nn.Module):
    """Of a script."""

    def __init__(self, config):
        super().__init__()
        self.config, self.rate, self.limits, self.never = config, 1.0, [1, 2], float("nan")
        self.activation = torch.nn.functional.relu
        self.drawing = torch.Generator()


class Unreadable(random.Random):
    def getstate(self):
        raise RuntimeError("no state")


def routed():
    """A job with a module of the script, and buffers that are made after its host."""
    built = job("--bf16")
    layer = built.chunks[0].module.module.decoder.layers[0]
    layer.router = Router(layer.config)
    host = built.host()
    host.inventory()
    layer.register_buffer("average", torch.zeros(2))
    layer.register_buffer("table", torch.zeros(2))
    layer.mlp.linear_fc2.eval()
    host.observed.begin()
    return built, host, layer


def it_names_what_a_script_changes_in_modules_where_a_restart_begins_it_again():
    built, host, layer = routed()
    router, version = layer.router, dict[str, Any]()
    router.broken = Unreadable()
    for iteration in range(1, 5):
        trained(built, 1)
        layer.config.seen = float(iteration)  # as its timers, which change
        layer.average.add_(1)
        version = codec.decode(codec.encode(host.observed.captured(iteration, {})))
        router.rate, router.activation, router.limits[1] = 0.5, torch.nn.functional.gelu, 3
        torch.rand(1, generator=router.drawing)
        layer.mlp.linear_fc1.weight.requires_grad = False
        layer.mlp.linear_fc2.train()
        if iteration == 1:
            layer.register_forward_hook(lambda *_: None)
    built.close()
    again, host, _ = routed()
    host.observed.restored(version), host.observed.captured(5, {})
    of = "chunk0.decoder.layers.0"
    named = {one.split(" ")[0].removeprefix(f"{of}.") for one in host.observed.said().split("; ")}
    of_router = {f"router.{one}" for one in ("rate", "limits[1]", "activation", "drawing")}
    of_others = {"average", "hooks", "mlp.linear_fc1.weight.requires_grad", "mlp.linear_fc2.training"}
    assert named == of_router | of_others
    again.close()


def it_continues_bit_for_bit_after_everything_was_overwritten():
    for flags in ([], ["--bf16"], SHARDED_BF16, [*SHARDED_BF16, "--overlap-param-gather"], ["--distributed-optimizer"]):
        first = job(*flags)
        host = trained(first, 2).host()
        tensors = {name: tensor.detach().clone() for name, tensor in host.tensors().items()}
        small = codec.decode(codec.encode(host.small_state()))
        expected = state_digest(trained(first, 2).host())
        first.close()
        again = trained(job(*flags), 1)
        host = again.host()
        host.allocate(())
        with torch.no_grad():
            for parameter in again.chunks[0].parameters():
                parameter.fill_(float("nan"))
            for name, tensor in host.tensors().items():
                tensor.copy_(tensors[name])
        host.restore(small)
        host.restore_position(small)
        assert again.iteration == 2
        assert state_digest(trained(again, 2).host()) == expected, flags
        again.close()


def it_gives_every_parameter_a_step_tensor_of_its_own():
    built = trained(job("--bf16"), 1)
    host = built.host()
    small = codec.decode(codec.encode(host.small_state()))
    inner = built.optimizer.chained_optimizers[0].optimizer
    shared = torch.tensor(9.0)
    for values in inner.state.values():
        values["step"] = shared  # as Megatron's own load leaves it
    host.restore(small)
    trained(built, 1)
    steps = [float(values["step"]) for values in inner.state.values()]
    assert len(steps) > 1 and set(steps) == {2.0}


def it_calls_the_hooks_of_an_update_around_it_also_where_it_is_skipped():
    built = job(*SHARDED_BF16)
    host, hooks = built.host(), Recorded()
    host.install(hooks)
    faults.arm("update.begin@iteration=2:inf")
    trained(built, 1)
    before = {name: tensor.detach().clone() for name, tensor in host.tensors().items()}
    trained(built, 1)
    assert built.skipped_updates == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in host.tensors().items())
    trained(built, 1)
    assert not all(torch.equal(tensor, before[name]) for name, tensor in host.tensors().items())
    host.skip_update(hooks)
    assert hooks.calls == [(word, step) for step in (1, 2, 3, 4) for word in ("before", "after")]


def it_reaches_each_fault_point_of_an_iteration_in_order():
    built = job("--eval-at", "1")
    host, seen = built.host(), []
    original = faults.reach
    faults.reach = lambda point, **facts: seen.append((point, facts["iteration"]))
    try:
        host.install(Recorded())
        trained(built, 2)
    finally:
        faults.reach = original
    points = ("iteration.forward", "update.begin", "update.middle", "update.end")
    assert seen == [(point, iteration) for iteration in (1, 2) for point in points]


def it_finds_the_state_of_an_optimizer_that_counts_steps_per_group():
    class FusedLike(torch.optim.Optimizer):
        """As apex's FusedAdam: moments per parameter, the step in the group from the first update on."""

        def step(self):
            for group in self.param_groups:
                group["step"] = group.get("step", 0) + 1

    parallel_state.initialize_model_parallel()
    parameter = torch.nn.Parameter(torch.ones(3))
    inner = FusedLike([{"params": [parameter]}], {"lr": 0.5, "betas": (0.9, 0.95)})
    inner.state[parameter] = {"exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
    wrapped = FP32Optimizer(inner, SimpleNamespace(timers=None), None)
    chunk = torch.nn.Module()
    chunk.weight = parameter
    items = [one.item.name for one in state.state_items([chunk], [wrapped], 0, lambda parameter: (0,))]
    assert items == ["chunk0.weight", "chunk0.weight:exp_avg", "chunk0.weight:exp_avg_sq"]
    inner.step()
    captured = codec.decode(codec.encode(host_parts.groups(wrapped)))
    assert captured == [{"lr": 0.5, "betas": (0.9, 0.95), "step": 1}]
    inner.step()
    host_parts.restore_groups(wrapped, captured)
    assert inner.param_groups[0]["step"] == 1 and inner.param_groups[0]["params"] == [parameter]
    host_parts.restore_groups(wrapped, [{"lr": 0.5, "betas": (0.9, 0.95)}])  # of an optimizer that has none there
    assert host_parts.groups(wrapped) == [{"lr": 0.5, "betas": (0.9, 0.95)}]


def it_refuses_by_name_what_it_cannot_follow():
    chunk = SimpleNamespace(
        config=SimpleNamespace(
            overlap_moe_expert_parallel_comm=True,
            cuda_graph_impl="local",
            cuda_graph_scope=["full_iteration"],
            fp8="hybrid",
            qk_clip=True,
        ),
        ddp_config=SimpleNamespace(use_megatron_fsdp=True, data_parallel_sharding_strategy="no_shard"),
    )
    parameter = torch.nn.Parameter(torch.ones(3))
    amsgrad = FP32Optimizer(torch.optim.AdamW([parameter], amsgrad=True), SimpleNamespace(), None)
    unknown = SimpleNamespace(is_stub_optimizer=False)
    spans = lambda: follow([chunk], SimpleNamespace(), SimpleNamespace(), [])  # noqa: E731
    assert "--overlap-moe-expert-parallel-comm" in refused(UnsupportedError, spans)
    message = refused(UnsupportedError, lambda: require_supported([chunk], [amsgrad, unknown], 3))
    for part in (
        *("rank 3", "full_iteration", "fp8", "--qk-clip"),
        *("--data-parallel-sharding-strategy no_shard", "amsgrad", "(SimpleNamespace)"),
    ):
        assert part in message, (part, message)


def it_refuses_a_topology_that_is_not_megatrons():
    built = job()
    built.topology = Topology(tp=1, pp=1, dp=2)
    assert "[0, 1]" in refused(TopologyError, built.host)


def it_refuses_state_of_other_settings_and_says_what_to_do():
    built = job()
    host = built.host()
    host.inventory()
    small = host.small_state()
    schedule = {**small, "scheduler": {**small["scheduler"], "max_lr": 7.0}}
    built.scheduler.use_checkpoint_opt_param_scheduler = False
    assert "override_opt_param_scheduler" in refused(ResumeError, lambda: host.restore(schedule))
    assert "counters" in refused(ResumeError, lambda: host.restore({**small, "counters": {}}))
    assert "parameter groups" in refused(ResumeError, lambda: host.restore({**small, "groups": [[]]}))
    streams = {**small, "rng": {**small["rng"], "tracker": {}}}
    assert "RNG tracker" in refused(ResumeError, lambda: host.restore_position(streams))


def it_names_a_parameter_that_another_group_had():
    for flags in ([], ["--bf16"], SHARDED_BF16, ["--distributed-optimizer"]):
        built = job(*flags)
        host = built.host()
        items = {item.name for item in host.inventory().items if item.role is Role.MOMENT}
        small = codec.decode(codec.encode(host.small_state()))
        assert host.regrouped(small) == "" == host.regrouped(host.merged([small, small]))
        groups = json.loads(small["members"])
        assert {name for own in groups.values() for name in own} == {name.rpartition(":")[0] for name in items}, flags
        (first, names), (second, others) = list(groups.items())[:2]
        others.append(moved := names.pop())
        said = host.regrouped({**small, "members": json.dumps(groups)})
        assert said.startswith(f"parameter '{moved}' is in {first} now, was in {second}"), said
        built.close()


def it_goes_on_with_the_micro_batches_of_a_ramp_up_of_the_batch_size():
    sizes = {"global_batch_size": 8, "micro_batch_size": 2, "data_parallel_size": 1}
    if hasattr(calculator, "RampupBatchsizeNumMicroBatchesCalculator"):
        ramp_up = {**sizes, "rampup_batch_size": [2, 2, 12]}
    else:  # from megatron-core 0.19 on
        ramp_up = {**sizes, "step_batch_size_schedule": "0:2 4:4 8:6 12:8"}

    def at(consumed):
        built = job()
        calculator.reconfigure_num_microbatches_calculator(rank=0, **ramp_up)
        built.consumed_samples = consumed
        calculator.update_num_microbatches(consumed, consistency_check=False)
        return built, built.host()

    found = {}
    for consumed in (0, 5, 9, 99):  # 2, 4, 6, then 8 samples per iteration: steps of 12 / 3 samples
        built, host = at(consumed)
        host.inventory()
        small = codec.decode(codec.encode(host.small_state()))
        built.close()
        again, fresh = at(0)
        assert calculator.get_num_microbatches() == 1, "a new incarnation begins at the bottom of the ramp"
        fresh.inventory()
        fresh.restore(small)
        assert again.consumed_samples == consumed
        found[consumed] = calculator.get_num_microbatches(), calculator.get_current_global_batch_size()
        again.close()
    assert found == {0: (1, 2), 5: (2, 4), 9: (3, 6), 99: (4, 8)}


def it_has_one_fingerprint_for_a_job_and_another_for_another_model():
    def fingerprint(*flags):
        built = job(*flags)
        found = dict(built.host().fingerprint())
        built.close()
        return codec.decode(codec.encode(found))  # plain values

    usual = fingerprint()
    assert fingerprint("--lr", "0.5", "--iterations", "99") == usual
    for flags in (
        ["--hidden", "32"],
        ["--bf16"],
        ["--seed", "5"],
        ["--global-batch", "8"],
        ["--distributed-optimizer"],
    ):
        assert fingerprint(*flags) != usual, flags


def it_takes_experts_for_replicas_over_expert_data_parallelism():
    host = job().host()
    assert isinstance(host, MegatronCoreHost)
    host._topology = Topology(tp=1, pp=1, dp=4, ep=2)
    dense, expert = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    expert.allreduce = False  # as Megatron marks them
    assert (host._replicas(dense), host._replicas(expert)) == ((0, 1, 2, 3), (0, 2))
