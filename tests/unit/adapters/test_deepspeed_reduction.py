"""Gradients of real DeepSpeed engines, averaged over all replicas or over one.

LOCAL is compared with a job that consists of one replica alone, ALL with an ordinary job: same data, same start. SGD
shows any wrong factor. Clipping is on, and active in every second iteration only. Each rank would start from parameters
of its own if DeepSpeed did not broadcast those of the first one.
"""

import functools
from contextlib import nullcontext
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("deepspeed")


from ft_plugins.adapters.deepspeed.shard_groups import ReplicaBuild  # noqa: E402
from ft_plugins.model.reduction import ReducedOver, ReductionControl  # noqa: E402
from harness.gang import gang  # noqa: E402
from tests.unit.adapters import deepspeed_engines as engines  # noqa: E402
from tests.unit.adapters.edge_log import EdgeLog, backward, forward

ALL, LOCAL = ReducedOver.ALL, ReducedOver.LOCAL
STEPS, ACCUMULATED, MICRO = 4, 2, 3
CLIP, WEIGHTS = 0.1, (1.0, 0.01)  # of the loss, in turn: the norm is above CLIP, and below


class Mode(NamedTuple):
    """One kind of engine, and the ranks of a replica. `exact`: DeepSpeed itself sums over all replicas."""

    stage: int
    dtype: str
    inner: int
    exact: bool
    accumulate: str = ""
    pp: int = 0


PLAIN = {
    "fp32": Mode(0, "fp32", 1, True),
    "fp32, replicas of 2": Mode(0, "fp32", 2, True),
    "bf16 masters everywhere": Mode(0, "bf16", 2, True, "bf16"),
    "bf16 zero1, BF16_Optimizer": Mode(1, "bf16", 2, True, "fp32"),
    "bf16 zero1": Mode(1, "bf16", 2, False, "bf16"),
    "bf16 zero2, replicas of 1": Mode(2, "bf16", 1, False, "fp32"),
    "fp16 masters everywhere": Mode(0, "fp16", 2, True, "fp16"),
    "fp16 zero2": Mode(2, "fp16", 2, False),
    "fp32 zero1": Mode(1, "fp32", 2, False),
    "fp32 zero2": Mode(2, "fp32", 2, False),
    "fp32 zero3": Mode(3, "fp32", 2, False),
}
PIPELINES = {
    "pipeline": Mode(0, "fp32", 1, True, pp=2),
    "pipeline, zero1": Mode(1, "fp32", 1, False, pp=2),
    "pipeline, bf16": Mode(0, "bf16", 1, True, "bf16", pp=2),
}
WIDE = {  # 8 ranks
    "pipeline, replicas of 2": Mode(0, "fp32", 2, True, pp=2),
    "pipeline, zero1, replicas of 2": Mode(1, "fp32", 2, False, pp=2),
    "pipeline, bf16 zero1, replicas of 2": Mode(1, "bf16", 2, True, "fp32", pp=2),
}
SETS = (PLAIN, PIPELINES, WIDE)
MODES = PLAIN | PIPELINES | WIDE


# ---- jobs ----


def configuration(mode):
    found = {
        "train_micro_batch_size_per_gpu": MICRO, "gradient_accumulation_steps": ACCUMULATED,
        "bf16": {"enabled": mode.dtype == "bf16"},
        "fp16": {  # without ZeRO this version does not scale the loss, but divides gradients by the scale
            "enabled": mode.dtype == "fp16", "hysteresis": 1, "loss_scale": 0 if mode.stage else 1,
        },
        "gradient_clipping": CLIP, "steps_per_print": 1000,
        "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": mode.stage, "reduce_bucket_size": 60},
    }  # fmt: skip
    return found | ({"data_types": {"grad_accum_dtype": mode.accumulate}} if mode.accumulate else {})


def layers(pp):
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    if not pp:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3))
    described = [
        TiedLayerSpec("embed", nn.Linear, 6, 6, bias=False), LayerSpec(nn.Linear, 6, 6), torch.tanh,
        LayerSpec(nn.Linear, 6, 6),
        TiedLayerSpec("embed", nn.Linear, 6, 6, bias=False, forward_fn=lambda part, x: x @ part.weight),
        LayerSpec(nn.Linear, 6, 3),
    ]  # fmt: skip
    return PipelineModule(described, num_stages=pp, loss_fn=weighted, partition_method="uniform", seed_layers=False)


weight = [1.0]


def weighted(outputs, labels):
    return (outputs.float() - labels).square().mean() * weight[0]


def batches(place, step, dtype):
    """Those that the data-parallel rank at `place` reads in an iteration."""
    generator = torch.Generator().manual_seed(1000 * place + step)
    for _ in range(ACCUMULATED):
        inputs, labels = torch.randn(MICRO, 6, generator=generator), torch.randn(MICRO, 3, generator=generator)
        overflows = dtype is torch.float16 and place > 1 and step == 3
        yield inputs.to(dtype), labels * (1e9 if overflows else 1.0)


def start(rank, world):
    """DeepSpeed on this rank, with fp16: slow on a CPU, but the same code."""
    engines.start(rank, world).accelerator.get_accelerator().is_fp16_supported = lambda: True


def jobs(rank, world, runs):
    """Train each (mode, over, replica) from the start: an ordinary job without `over`. `replica`: whose data are read,
    if the job is a single replica."""
    start(rank, world)
    return [job(rank, world, MODES[name], over, replica) for name, over, replica in runs]


def job(rank, world, mode, over, replica):
    import deepspeed

    dp = world // (mode.pp or 1)
    stage, place = divmod(rank, dp)
    torch.manual_seed(7 + stage + 100 * place)
    model, build = layers(mode.pp), ReplicaBuild(mode.inner)
    with nullcontext() if over is None else build.active():
        engine = deepspeed.initialize(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), config=configuration(mode)
        )[0]
    from ft_plugins.adapters.deepspeed.core import DeepSpeedHost

    host = DeepSpeedHost(engine, shards=build.groups)
    norms, calls, log = [], [], EdgeLog()
    if over is not None:
        host.follow_modules(log)  # whose training is compared with one that is not followed
        host.prepare_reduction()
        host.reduce_over(over)
        if mode[:2] == (0, "fp32"):
            host.before_modules(calls.append)
    hooks = SimpleNamespace(before_update=lambda step: None, after_update=lambda step: None)
    host.install(hooks)
    for step in range(1, STEPS + 1):
        weight[0] = WEIGHTS[step % 2]
        calls.clear()
        log.taken()
        train_once(engine, batches(place + replica * mode.inner, step, next(engine.module.parameters()).dtype))
        norms.append(float(engine.get_global_grad_norm() or 0.0))
    trained, trained_calls, edges = parameters(engine), list(calls), log.taken()
    host.derive()
    derived = parameters(engine)
    calls.clear()
    if over is not None and mode[:2] == (0, "fp32"):
        evaluate_once(engine, batches(0, 0, torch.float32))
    return {
        "trained": trained, "derived": derived, "norms": norms, "calls": trained_calls, "evaluated": list(calls),
        "edges": edges,
        "skipped": engine.skipped_steps, "files": sorted((host.names() or {}).get("files", {})),
        "items": {item.name: (item.role.value, item.replicas, item.piece) for item in host.inventory().items},
        "modules": dict(host.modules()), "shard_group": host.shard_group(),
        "controls": isinstance(host, ReductionControl),
        "sizes": (engine.dp_world_size, engine.train_batch_size(), engine.gradient_accumulation_steps()),
        "topology": (host.topology().dp, host.topology().tp), "fingerprint": host.fingerprint()["parallel"],
    }  # fmt: skip


def train_once(engine, read):
    if hasattr(engine, "train_batch"):
        engine.train_batch(read)
        return
    for inputs, labels in read:
        engine.backward(weighted(engine(inputs), labels))
        engine.step()


def evaluate_once(engine, read):
    if hasattr(engine, "eval_batch"):
        engine.eval_batch(read)
        return
    engine.eval()
    for inputs, _ in read:
        engine(inputs)


def parameters(engine):
    import deepspeed

    own = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(own) if hasattr(own[0], "ds_id") else nullcontext():
        return {name: one.detach().float().numpy().copy() for name, one in engine.module.named_parameters()}


class Jobs:
    """All jobs of some modes on some ranks, each group of ranks forked once."""

    def __init__(self, modes, world):
        self._modes = modes
        runs = [(name, over, 0) for name in modes for over in (None, ALL, LOCAL)]
        self._found = dict(zip(runs, zip(*gang(jobs, world, runs), strict=True), strict=True))
        self._alone = {}
        for inner in {mode.inner for mode in modes.values()}:
            own = {name: mode for name, mode in modes.items() if mode.inner == inner}
            stages = max(next(iter(own.values())).pp, 1)
            runs = [(name, None, replica) for name in own for replica in range(world // stages // inner)]
            self._alone |= dict(zip(runs, zip(*gang(jobs, inner * stages, runs), strict=True), strict=True))

    def of(self, name, over):
        """By rank."""
        return self._found[name, over, 0]

    def alone(self, name, rank):
        """The rank of a job of one replica that does what `rank` does."""
        mode, world = self._modes[name], len(self.of(name, None))
        stage, place = divmod(rank, world // max(mode.pp, 1))
        replica, at = divmod(place, mode.inner)
        return self._alone[name, None, replica][stage * mode.inner + at]


@functools.cache
def ran(number):
    """The jobs of all modes of a set, each run once."""
    return Jobs(SETS[number], 4 if number < 2 else 8)


@pytest.fixture
def trained(name):
    return ran(next(number for number, modes in enumerate(SETS) if name in modes))


every = pytest.mark.parametrize(
    "name",  # whole trajectories of pipelines are in test_deepspeed_local_sgd.py
    [*PLAIN, *(pytest.param(name, marks=pytest.mark.all_configurations) for name in (*PIPELINES, *WIDE))],
)


def equal(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


# ---- what is trained ----


@every
def test_over_one_replica_it_is_a_job_of_that_replica_alone(trained, name):
    """Bit for bit: the sums have the same terms in the same order."""
    found = trained.of(name, LOCAL)
    for rank, one in enumerate(found):
        alone = trained.alone(name, rank)
        assert equal(one["trained"], alone["trained"]) and one["norms"] == alone["norms"]
    assert not equal(found[0]["trained"], found[MODES[name].inner]["trained"]), "replicas have data of their own"


@every
def test_over_all_replicas_it_is_an_ordinary_job(trained, name):
    """Bit for bit where DeepSpeed sums over all replicas. With ZeRO sums are in another order; in low precision they
    are also rounded in between: to 2 ** -8 of the gradient, whose norm is CLIP at most, times learning rate and
    iterations, before the parameter itself is rounded."""
    mode = MODES[name]
    for one, ordinary in zip(trained.of(name, ALL), trained.of(name, None), strict=True):
        if mode.exact:
            assert equal(one["trained"], ordinary["trained"]) and one["norms"] == ordinary["norms"]
            continue
        low = mode.dtype != "fp32"
        far, relative = (CLIP * 0.5 * STEPS * 2**-8, 2**-7) if low else (1e-6, 0.0)
        assert one["trained"].keys() == ordinary["trained"].keys()
        for parameter, value in one["trained"].items():
            np.testing.assert_allclose(value, ordinary["trained"][parameter], rtol=relative, atol=far)
        assert np.allclose(one["norms"], ordinary["norms"], rtol=2e-2 if low else 1e-5)


@every
def test_gradients_were_clipped_in_some_iterations_only(trained, name):
    for over in (ALL, LOCAL):
        norms = trained.of(name, over)[0]["norms"]
        if any(norms):  # fp32 without ZeRO reports none
            assert all((norm > CLIP) == (at % 2 == 1) for at, norm in enumerate(norms) if np.isfinite(norm))


@pytest.mark.parametrize("name", ["fp16 masters everywhere", "fp16 zero2"])
def test_a_replica_alone_skips_an_update_that_overflows(trained, name):
    assert [one["skipped"] for one in trained.of(name, LOCAL)] == [0, 0, 1, 1]
    assert [one["skipped"] for one in trained.of(name, ALL)] == [1, 1, 1, 1]


# ---- what the host says ----


@every
def test_shards_are_held_by_the_same_place_of_all_replicas(trained, name):
    mode = MODES[name]
    found = trained.of(name, LOCAL)
    dp = len(found) // max(mode.pp, 1)
    for rank, one in enumerate(found):
        first, place = rank - rank % dp, rank % dp
        inner = first + place - place % mode.inner
        assert one["shard_group"] == tuple(range(inner, inner + mode.inner))
        for _, replicas, piece in one["items"].values():
            whole = tuple(range(first, first + dp))
            assert replicas == (whole if piece is None else whole[place % mode.inner :: mode.inner])
        if mode.stage == 0 and mode.dtype == "fp32" or name == "bf16 masters everywhere":
            assert all(piece is None for _, _, piece in one["items"].values())
    for replica in range(0, dp, mode.inner):  # every element once
        pieces = {}
        for one in found[replica : replica + mode.inner]:
            for item, (_, _, piece) in one["items"].items():
                pieces.setdefault(item, []).extend([piece] if piece else [])
        for parts in (sorted(parts) for parts in pieces.values() if parts):
            assert parts[0][0] == 0 and parts[-1][1] == parts[-1][2]
            assert all(left[1] == right[0] for left, right in zip(parts, parts[1:], strict=False))


@every
def test_derived_parameters_are_gathered_within_a_replica(trained, name):
    assert all(equal(one["derived"], one["trained"]) for one in trained.of(name, LOCAL))


@every
def test_no_two_ranks_write_one_file_of_deepspeeds_own_checkpoints(trained, name):
    mode, found = MODES[name], trained.of(name, LOCAL)
    files = [file for one in found for file in one["files"]]
    assert len(files) == len(set(files))
    if mode.stage:
        dp = len(found) // max(mode.pp, 1)
        assert {rank % dp for rank, one in enumerate(found) if one["files"]} >= set(range(mode.inner))


@every
def test_deepspeed_counts_batches_as_without_replicas(trained, name):
    for over in (ALL, LOCAL):
        for one, ordinary in zip(trained.of(name, over), trained.of(name, None), strict=True):
            dp = len(trained.of(name, over)) // max(MODES[name].pp, 1)
            assert one["sizes"] == ordinary["sizes"] == (dp, dp * MICRO * ACCUMULATED, ACCUMULATED)
            assert one["topology"] == ordinary["topology"] == (dp, 1)
            assert one["fingerprint"] == ordinary["fingerprint"] | {"shard_ranks": MODES[name].inner}
            assert one["controls"]


@every
def test_modules_are_layers_in_the_order_of_the_forward(trained, name):
    """A rank names the modules of which it has a part; a tied layer has one name on both stages."""
    mode, found = MODES[name], trained.of(name, LOCAL)
    stages = [("0", "1"), ("3", "0", "5")] if mode.pp else [("0", "2", "4")]
    for rank, one in enumerate(found):
        expected = stages[rank * len(stages) // len(found)]
        names = list(dict.fromkeys(one["modules"].values()))
        assert names == [module for module in expected if module in names]
        assert mode.inner > 1 and mode.stage or tuple(names) == expected
        assert {item for item, (role, _, _) in one["items"].items() if role != "moment"} == one["modules"].keys()
    named = {module for one in found for module in one["modules"].values()}
    assert named == {module for stage in stages for module in stage}


@pytest.mark.parametrize("name", ["fp32", "fp32, replicas of 2", "pipeline"])
def test_each_module_is_announced_before_its_forward(trained, name):
    for rank, one in enumerate(trained.of(name, LOCAL)):
        expected = ["0", "2", "4"] if name in PLAIN else ["0", "1"] if rank < 2 else ["3", "0", "5"]
        assert one["calls"] == one["evaluated"] == expected * ACCUMULATED


@every
def test_edges_are_those_of_the_modules_of_a_rank(trained, name):
    """Also where an optimizer holds masters or shards; the first stage of a pipeline has two batches in flight."""
    mode = MODES[name]
    for over in (ALL, LOCAL):
        found = trained.of(name, over)
        for rank, one in enumerate(found):
            last = rank >= len(found) // 2
            layers = ["0", "2", "4"] if not mode.pp else ["3", "0", "5"] if last else ["0", "1"]
            held = [layer for layer in layers if layer in one["modules"].values()]
            there, back = forward(*held), backward(*reversed(held))
            expected = there * 2 + back * 2 if mode.pp and not last else (there + back) * 2
            assert one["edges"] == expected


def _recomputed(rank, world):
    """The edges of the last iteration of a pipeline that computes every two layers again; the parameters are those of
    one that is not followed."""
    start(rank, world)
    import deepspeed

    from ft_plugins.adapters.deepspeed.core import DeepSpeedHost

    mode, trained, words = Mode(0, "fp32", 1, True, pp=1), [], []
    for follows in (False, True):
        torch.manual_seed(7)
        model, log = layers(mode.pp), EdgeLog()
        engine = deepspeed.initialize(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            config=configuration(mode) | {"pipeline": {"activation_checkpoint_interval": 2}},
        )[0]  # fmt: skip
        if follows:
            DeepSpeedHost(engine).follow_modules(log)
        for step in range(1, STEPS + 1):
            log.words.clear()
            train_once(engine, batches(0, step, torch.float32))
        words = log.taken()
        trained.append(parameters(engine))
    assert equal(*trained)
    return words


def test_recomputations_are_within_the_backward_of_what_is_computed_again():
    (words,) = gang(_recomputed, 1)
    head = ["b+ 0", *forward("0", "5"), *backward("5"), "b- 0"]  # the tied layer, and the last one
    middle = ["b+ 3", *forward("3"), "b- 3"]  # a function, and a layer
    first = ["b+ 0", *forward("0", "1"), *backward("1"), "b- 0"]
    assert words == [*forward("0", "1", "3", "0", "5"), *head, *middle, *first] * ACCUMULATED


def test_a_job_can_be_resized_to_whole_replicas_alone():
    """Else the resized job would be refused when it starts: two ranks form a replica."""
    from ft_plugins.adapters.deepspeed.core import DeepSpeedHost

    engine = SimpleNamespace(
        _config=SimpleNamespace(_param_dict={"train_batch_size": 24}),
        train_micro_batch_size_per_gpu=lambda: 2, train_batch_size=lambda: 24,
    )  # fmt: skip
    for shards, expected in ((None, [1, 2, 3, 4, 6]), (SimpleNamespace(inner=(0, 1)), [2, 4, 6])):
        host = SimpleNamespace(engine=engine, _shards=shards)
        assert [ranks for ranks in range(1, 8) if DeepSpeedHost.admits(host, ranks)] == expected
