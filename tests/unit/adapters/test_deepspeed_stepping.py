"""What replicas of a real DeepSpeed engine have between two updates: gradients, copies, and gradients once more."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("deepspeed")

from ft_plugins.adapters.deepspeed.stepping import DeepSpeedStepping  # noqa: E402
from ft_plugins.errors import UnsupportedError  # noqa: E402
from tests.unit.adapters import deepspeed_engines as engines  # noqa: E402

FP32 = {"stage": 0, "bf16": False}
MODES = {
    "fp32": (1, FP32),
    "fp32, two stages": (2, FP32),
    "fp32 zero1": (1, {"stage": 1, "bf16": False}),
    "bf16": (1, {"stage": 0, "bf16": True}),
    "bf16, two stages": (2, {"stage": 0, "bf16": True}),
    "bf16 accumulated in bf16": (1, {"stage": 0, "bf16": True, "accumulate": "bf16"}),
    "bf16 zero1": (1, {"stage": 1, "bf16": True, "accumulate": "fp32"}),
    "bf16 zero1 accumulated in bf16": (1, {"stage": 1, "bf16": True, "accumulate": "bf16"}),
    "bf16 zero1, two stages": (2, {"stage": 1, "bf16": True, "accumulate": "bf16"}),
}
PLAIN = {
    "fp32": FP32,
    "bf16 masters everywhere": {"stage": 0, "bf16": True, "accumulate": "bf16"},
    "bf16 zero1": {"stage": 1, "bf16": True},
    "bf16 zero2": {"stage": 2, "bf16": True},
    "fp32 zero2": {"stage": 2, "bf16": False},
}

# ---- once more ----


@pytest.mark.parametrize("mode", MODES)
def test_an_iteration_computed_once_more_behind_a_repair_is_the_clean_one_bit_for_bit(ranks, mode):
    """One rank computes the third from wrong parameters. Its gradients are then the clean ones, and so is all that
    follows: losses, running statistics, generators, counters, data."""
    for clean, again, gradients, wrong in ranks(_once_more, 2, *MODES[mode]):
        assert gradients[0] == gradients[1] != wrong and gradients[0]
        assert again == clean


def _once_more(rank, world, pp, told):
    gradients, wrong, right = [], [], []

    def seen(host):
        return engines.plain(dict(host.gradients()))

    def clean(host, step):
        torch.rand(step)  # behind the forward: this is not drawn again
        if step == 3:
            gradients.append(seen(host))

    def spoil(host, step):
        if step == 3 and rank == world - 1:
            for parameter in host.engine.module.parameters():
                right.append(parameter.detach().clone())
                parameter.data.add_(0.5)

    def repair(host, step):
        torch.rand(step)
        if step == 3:
            wrong.append(seen(host))
            for parameter, value in zip(host.engine.module.parameters(), right, strict=False):
                parameter.data.copy_(value)
            host.recompute(step)
            gradients.append(seen(host))

    first = engines.run(rank, world, pp, told, clean)
    return first, engines.run(rank, world, pp, told, repair, spoil), gradients, wrong[0]


@pytest.mark.parametrize(
    ("on", "clipping", "together"),
    [("", 1.0, True), ("", 0.0, False), ("fp16", 1.0, False), ("bfloat16", 1.0, False), ("zero", 1.0, False)],
)
def test_gradients_of_all_replicas_are_clipped_together_in_float32_without_zero(on, clipping, together):
    host = DeepSpeedStepping.__new__(DeepSpeedStepping)
    host.engine = SimpleNamespace(
        fp16_enabled=lambda: on == "fp16", bfloat16_enabled=lambda: on == "bfloat16",
        zero_optimization=lambda: on == "zero", gradient_clipping=lambda: clipping,
    )  # fmt: skip
    assert bool(host.clips_together) == together


# ---- gradients ----

SOME = ["pipeline, bf16", "pipeline, fp32 zero1", "fp32", "bf16 masters everywhere", "bf16 zero2", "fp32 zero2"]
ALL = {f"pipeline, {name}": mode for name, mode in MODES.items()} | {name: (0, told) for name, told in PLAIN.items()}


@pytest.mark.parametrize("mode", SOME)
def test_gradients_are_those_that_the_update_is_made_of(ranks, mode):
    """By the item of their parameter, in its type of layout: set to 0, the moments of Adam decay and nothing else."""
    found = ranks(_zeroed, 2, *ALL[mode])
    for told, applied, items, gradients, before, after in found:
        assert told == applied and 0 < told[2] < told[3], "that of the next update, in the warm-up"
        assert gradients and gradients == {name: items[name] for name in gradients}
        assert before and all(np.allclose(after[name], 0.9 * one, rtol=1e-6) for name, one in before.items())
    assert {name.removesuffix(":main") for one in found for name in one[3]} == _parameters()


def _parameters():
    return {f"{layer}.{kind}" for layer in (0, 1, 3, 5) for kind in ("weight", "bias")}


def _zeroed(rank, world, pp, told):
    engine = engines.built(rank, world, pp, **told)
    from ft_plugins.adapters.deepspeed import state
    from ft_plugins.adapters.deepspeed.core import DeepSpeedHost

    host = DeepSpeedHost(engine)
    items = {item.name: item.shape for item in host.inventory().items}
    seen = {}
    told_rates, applied = [], []

    def moments():
        return {name: one.clone().numpy() for name, one in host.tensors().items() if name.endswith("exp_avg")}

    def around(host, step):
        told_rates.append(host.learning_rate())
        if step == 4:
            gradients = host.gradients()
            seen["shapes"] = {name: tuple(gradient.shape) for name, gradient in gradients.items()}
            assert all(float(gradient.abs().sum()) for gradient in gradients.values())
            for gradient in gradients.values():
                gradient.zero_()
            seen["before"] = moments()

    host.install(engines.Ignoring(host, around))
    state.inner(engine.optimizer).register_step_pre_hook(
        lambda updating, *rest: applied.append(updating.param_groups[0]["lr"])
    )
    engines.train(engine, 4)
    return told_rates, applied, items, seen["shapes"], seen["before"], moments()


@pytest.mark.parametrize("mode", ["pipeline, bf16", "pipeline, fp32 zero1", "fp32"])
def test_before_the_reduction_there_are_this_ranks_own_gradients(ranks, mode):
    """Altered on one rank by as much as there are ranks, the mean of all is altered by 1."""
    for steps, names, plain, altered in ranks(_before_reduction, 2, *ALL[mode]):
        assert steps == [1, 2] and names == _parameters()
        for name, gradient in plain.items():
            assert np.allclose(altered[name], gradient + 1, atol=0.02)


def _before_reduction(rank, world, pp, told):
    found, steps, names = [], [], set()
    for altering in (False, True):
        engine = engines.built(rank, world, pp, **told)
        from ft_plugins.adapters.deepspeed.core import DeepSpeedHost

        host = DeepSpeedHost(engine)

        def alter(step, gradients):
            steps.append(step)
            names.update(gradients)
            for gradient in gradients.values() if rank == 0 and step == 2 else ():
                gradient.add_(world)

        if altering:
            host.before_reduction(alter)
        seen = {}

        def around(host, step, seen=seen):
            if step == 2:
                seen.update({name: one.float().clone().numpy() for name, one in host.gradients().items()})

        host.install(engines.Ignoring(host, around))
        engines.train(engine, 2)
        found.append(seen)
    return steps, names, *found


# ---- copies ----


@pytest.mark.parametrize("mode", SOME)
def test_copies_are_made_anew_from_what_the_optimizers_hold(ranks, mode):
    """Gathered or cast parameters; where parameters are items themselves there are none, and none are written."""
    for (told, copies), items, computed, before, wrong, after in ranks(_copies, 2, *ALL[mode]):
        if told:
            assert set(copies) == _parameters() == set(told) and not set(copies) & items
            assert all(replicas == (0, 1) and role == "copy" for replicas, role, _ in told.values())
            assert {name: layer for name, (_, _, layer) in told.items()} == {name: int(name[0]) for name in told}
            assert wrong != before and after == before
        else:
            assert mode in ("fp32", "pipeline, fp32") and not copies
            assert computed <= items and wrong == after != before


def _copies(rank, world, pp, told):
    engine = engines.built(rank, world, pp, **told)
    from ft_plugins.adapters.deepspeed.core import DeepSpeedHost

    host = DeepSpeedHost(engine)
    items = {item.name for item in host.inventory().items}
    engines.train(engine, 2)

    def now():
        return engines.plain(dict(engine.module.named_parameters()))

    before = now()
    for parameter in engine.module.parameters():
        parameter.data.view(-1)[rank] += 1
    wrong = now()
    host.derive()
    inventory = {item.name: (item.replicas, item.role.value, item.layer) for item in host.copies().items}
    computed = {name for name, _ in engine.module.named_parameters()}
    return (inventory, list(host.copy_tensors())), items, computed, before, wrong, now()


REFUSED = {  # by a part of the message
    "recomputed: the script may compute anything between engine(...) and engine.backward(...); with --paft-audit-at": (
        FP32, lambda host: (host.keep_iterations(), host.recompute(1)),
    ),
    "reduce gradients during backward": (
        PLAIN["bf16 zero2"], lambda host: host.before_reduction(lambda step, found: None),
    ),
    "ZeRO-3 gathers parameters only while they are used: between two updates a single rank holds each element, and": (
        {"stage": 3, "bf16": True}, lambda host: (host.gradients() == {} and host.copies()),
    ),
    "MoE layers: copies and gradients of experts have other replicas": (
        FP32, lambda host: (setattr(host.engine, "has_moe_layers", True), host.keep_iterations()),
    ),
}  # fmt: skip


def test_what_an_engine_cannot_do_is_refused_by_name(ranks):
    for found in ranks(_refused, 2):
        assert all(message in said for message, said in found.items()), found


def _refused(rank, world):
    from ft_plugins.adapters.deepspeed.core import DeepSpeedHost

    said = {}
    for message, (told, call) in REFUSED.items():
        with pytest.raises(UnsupportedError) as caught:
            call(DeepSpeedHost(engines.built(rank, world, 0, **told)))
        said[message] = str(caught.value)
    return said


# ---- beside tensors ----


@pytest.mark.parametrize("mode", ["fp32", "bf16 masters everywhere", "bf16 zero1"])
def test_a_replica_that_has_skipped_an_update_alone_goes_on_as_one_that_has_not(ranks, mode):
    """Rank 1 has counted a step less, and its schedule stands one behind; masters that are sharded follow nobody."""
    right, wrong = ranks(_skipped, 2, *ALL[mode])
    if mode == "bf16 zero1":
        assert right["told"] == wrong["told"] == b""
        return
    assert right["told"] != wrong["told"] and wrong["after"] == right["told"]
    assert wrong["rate"] == right["rate"] and wrong["counters"] == right["counters"]


def _skipped(rank, world, pp, told):
    engine = engines.built(rank, world, pp, **told)
    from ft_plugins.adapters.deepspeed import state
    from ft_plugins.adapters.deepspeed.core import DeepSpeedHost

    host = DeepSpeedHost(engine)
    host.inventory()
    engines.train(engine, 4)
    if rank == 1:
        engine.lr_scheduler.step(2)
        engine.skipped_steps += 1
        for values in state.inner(engine.optimizer).state.values():
            values["step"] -= 1
    own = host.scalars()
    gathered = [None] * world
    torch.distributed.all_gather_object(gathered, own)
    host.restore_scalars(gathered[0])
    counters = {name: getattr(engine, name) for name in ("global_steps", "skipped_steps", "micro_steps")}
    return {"told": own, "after": host.scalars(), "rate": host.learning_rate(), "counters": counters}
