"""Gradients of real DeepSpeed engines, averaged over all replicas or over one.

LOCAL is compared with a job that consists of one replica alone, ALL with an ordinary job: same data, same start. SGD
shows any wrong factor. Clipping is on, and active in every second iteration only. Each rank would start from parameters
of its own if DeepSpeed did not broadcast those of the first one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("deepspeed")

from ft_plugins.adapters.deepspeed import module_names, prepare, reducing, training  # noqa: E402
from ft_plugins.adapters.deepspeed.reducing import DeepSpeedReduction, require_local_gradients  # noqa: E402
from ft_plugins.adapters.deepspeed.shard_groups import (  # noqa: E402
    ReplicaBuild,
    ShardGroups,
    counterparts,
    replicas_of,
    require_divisible,
)
from ft_plugins.config import Config  # noqa: E402
from ft_plugins.errors import ConfigError, UnsupportedError  # noqa: E402
from ft_plugins.model.reduction import ReducedOver, ReductionControl  # noqa: E402
from ft_plugins.testing.gang import gang  # noqa: E402

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
MODES = PLAIN | PIPELINES | WIDE


# ---- jobs ----


def configuration(mode: Mode) -> dict[str, Any]:
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO, "gradient_accumulation_steps": ACCUMULATED,
        "bf16": {"enabled": mode.dtype == "bf16"}, "gradient_clipping": CLIP, "steps_per_print": 1000,
        "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": mode.stage},
    }  # fmt: skip
    return found | ({"data_types": {"grad_accum_dtype": mode.accumulate}} if mode.accumulate else {})


def layers(pp: int) -> Any:
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


def weighted(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs.float() - labels).square().mean() * weight[0]


def batches(place: int, step: int, dtype: torch.dtype) -> Iterator[Any]:
    """Those that the data-parallel rank at `place` reads in an iteration."""
    generator = torch.Generator().manual_seed(1000 * place + step)
    for _ in range(ACCUMULATED):
        yield torch.randn(MICRO, 6, generator=generator).to(dtype), torch.randn(MICRO, 3, generator=generator)


def jobs(rank: int, world: int, runs: list[tuple[str, ReducedOver | None, int]]) -> list[Any]:
    """Train each (mode, over, replica) from the start: an ordinary job without `over`. `replica`: whose data are read,
    if the job is a single replica."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    prepare()
    import deepspeed

    deepspeed.init_distributed("gloo")
    return [job(rank, world, MODES[name], over, replica) for name, over, replica in runs]


def job(rank: int, world: int, mode: Mode, over: ReducedOver | None, replica: int) -> Any:
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
    norms, calls = [], []
    if over is not None:
        host.prepare_reduction()
        host.reduce_over(over)
        if mode[:2] == (0, "fp32"):
            host.before_modules(calls.append)
    hooks = SimpleNamespace(before_update=lambda step: None, after_update=lambda step: None)
    host.install(hooks)
    for step in range(1, STEPS + 1):
        weight[0] = WEIGHTS[step % 2]
        calls.clear()
        train_once(engine, batches(place + replica * mode.inner, step, next(engine.module.parameters()).dtype))
        norms.append(float(engine.get_global_grad_norm() or 0.0))
    trained = parameters(engine)
    host.derive()
    return {
        "trained": trained, "derived": parameters(engine), "norms": norms, "calls": list(calls),
        "items": {item.name: (item.role.value, item.replicas, item.piece) for item in host.inventory().items},
        "modules": dict(host.modules()), "shard_group": host.shard_group(),
        "controls": isinstance(host, ReductionControl),
        "sizes": (engine.dp_world_size, engine.train_batch_size(), engine.gradient_accumulation_steps()),
        "topology": (host.topology().dp, host.topology().tp), "fingerprint": host.fingerprint()["parallel"],
    }  # fmt: skip


def train_once(engine: Any, read: Iterator[Any]) -> None:
    if hasattr(engine, "train_batch"):
        engine.train_batch(read)
        return
    for inputs, labels in read:
        engine.backward(weighted(engine(inputs), labels))
        engine.step()


def parameters(engine: Any) -> dict[str, Any]:
    import deepspeed

    own = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(own) if hasattr(own[0], "ds_id") else nullcontext():
        return {name: one.detach().float().numpy().copy() for name, one in engine.module.named_parameters()}


class Jobs:
    """All jobs of some modes on some ranks, each group of ranks forked once."""

    def __init__(self, modes: dict[str, Mode], world: int) -> None:
        self._modes = modes
        runs = [(name, over, 0) for name in modes for over in (None, ALL, LOCAL)]
        self._found = dict(zip(runs, zip(*gang(jobs, world, runs), strict=True), strict=True))
        self._alone: dict[Any, Any] = {}
        for inner in {mode.inner for mode in modes.values()}:
            own = {name: mode for name, mode in modes.items() if mode.inner == inner}
            stages = max(next(iter(own.values())).pp, 1)
            runs = [(name, None, replica) for name in own for replica in range(world // stages // inner)]
            self._alone |= dict(zip(runs, zip(*gang(jobs, inner * stages, runs), strict=True), strict=True))

    def of(self, name: str, over: ReducedOver | None) -> Any:
        """By rank."""
        return self._found[name, over, 0]

    def alone(self, name: str, rank: int) -> Any:
        """The rank of a job of one replica that does what `rank` does."""
        mode, world = self._modes[name], len(self.of(name, None))
        stage, place = divmod(rank, world // max(mode.pp, 1))
        replica, at = divmod(place, mode.inner)
        return self._alone[name, None, replica][stage * mode.inner + at]


@pytest.fixture(scope="module")
def plain() -> Jobs:
    return Jobs(PLAIN, 4)


@pytest.fixture(scope="module")
def pipelines() -> Jobs:
    return Jobs(PIPELINES, 4)


@pytest.fixture(scope="module")
def wide() -> Jobs:
    return Jobs(WIDE, 8)


@pytest.fixture
def trained(request: pytest.FixtureRequest, name: str) -> Jobs:
    of: Jobs = request.getfixturevalue("plain" if name in PLAIN else "pipelines" if name in PIPELINES else "wide")
    return of


every = pytest.mark.parametrize(
    "name", [*PLAIN, *PIPELINES, *(pytest.param(name, marks=pytest.mark.all_configurations) for name in WIDE)]
)


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


# ---- what is trained ----


@every
def test_over_one_replica_it_is_a_job_of_that_replica_alone(trained: Jobs, name: str) -> None:
    """Bit for bit: the sums have the same terms in the same order."""
    found = trained.of(name, LOCAL)
    for rank, one in enumerate(found):
        alone = trained.alone(name, rank)
        assert equal(one["trained"], alone["trained"]) and one["norms"] == alone["norms"]
    assert not equal(found[0]["trained"], found[MODES[name].inner]["trained"]), "replicas have data of their own"


@every
def test_over_all_replicas_it_is_an_ordinary_job(trained: Jobs, name: str) -> None:
    """Bit for bit where DeepSpeed sums over all replicas; with ZeRO sums are in another order, in bf16 also rounded in
    between: to 2 ** -8 of the gradient, whose norm is CLIP at most, times learning rate and iterations."""
    mode = MODES[name]
    for one, ordinary in zip(trained.of(name, ALL), trained.of(name, None), strict=True):
        if mode.exact:
            assert equal(one["trained"], ordinary["trained"]) and one["norms"] == ordinary["norms"]
            continue
        far = CLIP * 0.5 * STEPS * 2**-8 if mode.dtype == "bf16" else 1e-6
        assert one["trained"].keys() == ordinary["trained"].keys()
        for parameter, value in one["trained"].items():
            np.testing.assert_allclose(value, ordinary["trained"][parameter], rtol=2**-7 if far > 1e-6 else 0, atol=far)
        assert np.allclose(one["norms"], ordinary["norms"], rtol=2e-2 if mode.dtype == "bf16" else 1e-5)


@every
def test_gradients_were_clipped_in_some_iterations_only(trained: Jobs, name: str) -> None:
    for over in (ALL, LOCAL):
        norms = trained.of(name, over)[0]["norms"]
        if any(norms):  # fp32 without ZeRO reports none
            assert all((norm > CLIP) == (weight == 1.0) for norm, weight in zip(norms, (0.01, 1.0) * 2, strict=True))


# ---- what the host says ----


@every
def test_shards_are_held_by_the_same_place_of_all_replicas(trained: Jobs, name: str) -> None:
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
        pieces: dict[str, list[Any]] = {}
        for one in found[replica : replica + mode.inner]:
            for item, (_, _, piece) in one["items"].items():
                pieces.setdefault(item, []).extend([piece] if piece else [])
        for parts in (sorted(parts) for parts in pieces.values() if parts):
            assert parts[0][0] == 0 and parts[-1][1] == parts[-1][2]
            assert all(left[1] == right[0] for left, right in zip(parts, parts[1:], strict=False))


@every
def test_derived_parameters_are_gathered_within_a_replica(trained: Jobs, name: str) -> None:
    assert all(equal(one["derived"], one["trained"]) for one in trained.of(name, LOCAL))


@every
def test_deepspeed_counts_batches_as_without_replicas(trained: Jobs, name: str) -> None:
    for over in (ALL, LOCAL):
        for one, ordinary in zip(trained.of(name, over), trained.of(name, None), strict=True):
            dp = len(trained.of(name, over)) // max(MODES[name].pp, 1)
            assert one["sizes"] == ordinary["sizes"] == (dp, dp * MICRO * ACCUMULATED, ACCUMULATED)
            assert one["topology"] == ordinary["topology"] == (dp, 1)
            assert one["fingerprint"] == ordinary["fingerprint"] | {"shard_ranks": MODES[name].inner}
            assert one["controls"]


@every
def test_modules_are_layers_in_the_order_of_the_forward(trained: Jobs, name: str) -> None:
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
def test_each_module_is_announced_before_its_forward(trained: Jobs, name: str) -> None:
    for rank, one in enumerate(trained.of(name, LOCAL)):
        expected = ["0", "2", "4"] if name in PLAIN else ["0", "1"] if rank < 2 else ["3", "0", "5"]
        assert one["calls"] == expected * ACCUMULATED


# ---- modules, without a job ----


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.scales = nn.Linear(2, 2), nn.ParameterList([nn.Parameter(torch.ones(2))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x) * self.scales[0]


class Transformer(nn.Module):
    def __init__(self, nested: bool = False) -> None:
        super().__init__()
        blocks = [nn.ModuleList([Block()]), nn.ModuleList([Block()])] if nested else [Block(), Block()]
        self.h = nn.ModuleList(blocks)
        self.embed, self.head = nn.Linear(2, 2), nn.Linear(2, 1)
        self.gains = nn.ParameterList([nn.Parameter(torch.ones(2))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) * self.gains[0]
        for block in self.h:
            x = block(x)
        return self.head(x)


def test_what_is_in_no_numbered_part_is_one_module_and_the_first() -> None:
    model = Transformer()
    modules = {name: module_names.module_of(model, name) for name, _ in model.named_parameters()}
    assert {modules[name] for name in modules if not name.startswith("h.")} == {""}
    assert modules["h.1.attention.weight"] == modules["h.1.scales.0"] == "h.1"
    assert module_names.in_forward_order(model, modules.values()) == ["", "h.0", "h.1"]


def test_forwards_are_announced_in_training_mode_only() -> None:
    model, calls = Transformer(), []
    module_names.follow_forwards(model, ["h.1", "", "h.0", "h.1"], calls.append)
    model(torch.ones(1, 2))
    assert calls == ["", "h.0", "h.1"]
    model.eval()(torch.ones(1, 2))
    assert len(calls) == 3


def test_a_recomputed_forward_is_announced_again() -> None:
    model, calls = Block(), []
    holder = nn.Sequential(model)
    module_names.follow_forwards(holder, ["0"], calls.append)
    from torch.utils.checkpoint import checkpoint

    checkpoint(holder, torch.ones(1, 2, requires_grad=True), use_reentrant=False).sum().backward()
    assert calls == ["0", "0"]


def test_a_container_without_a_forward_is_refused() -> None:
    model = Transformer(nested=True)
    with pytest.raises(UnsupportedError, match="'h.0' is a ModuleList"):
        module_names.follow_forwards(model, ["h.0"], lambda name: None)


# ---- refusals ----


def control(**facts: Any) -> Any:
    """A host with an engine of these facts."""
    host = DeepSpeedReduction()
    kind = facts.pop("kind", "SGD")
    host.rank, host._shards = 3, facts.pop("shards", None)
    usual = {
        "optimizer": type(kind, (), facts.pop("optimizer", {}))(), "mpu": None, "sequence_parallel_size": 1,
        "gradient_average": True, "zero_quantized_gradients": lambda: False, "fp16_enabled": lambda: False,
    }  # fmt: skip
    host.engine = SimpleNamespace(**usual | facts)
    return host


def test_what_is_in_the_way_of_local_gradients_is_refused_by_name() -> None:
    host = control(
        kind="BF16_Optimizer", sequence_parallel_size=2, gradient_average=False, zero_quantized_gradients=lambda: True
    )
    with pytest.raises(UnsupportedError, match="rank 3: local SGD") as error:
        host.prepare_reduction()
    for words in ("sequence parallelism", "'sum'", "zero_quantized_gradients", "BF16_Optimizer was built over all"):
        assert words in str(error.value)


def test_shards_over_other_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducing.dist, "get_process_group_ranks", lambda group: group)
    shards = ShardGroups((0, 1, 2, 3), (2, 3), (1, 3), None, None)
    parts = [[SimpleNamespace(ds_process_group=(2, 3)), SimpleNamespace(ds_process_group=(0, 1, 2, 3))]]
    optimizer = {"dp_process_group": (2, 3), "fp16_groups": parts}
    host = control(kind="DeepSpeedZeroOptimizer_Stage3", optimizer=optimizer)
    with pytest.raises(UnsupportedError, match=r"shards over other ranks than \[2, 3\]"):
        require_local_gradients(host.engine, 3, shards)
    parts[0].pop()
    require_local_gradients(host.engine, 3, shards)


def test_fp16_cannot_return_to_all_replicas_once_loss_scales_may_differ() -> None:
    for dynamic in (True, False):
        host = control(fp16_enabled=lambda: True, dynamic_loss_scale=lambda dynamic=dynamic: dynamic)
        host.reduce_over(ALL)
        host.reduce_over(LOCAL)
        host.reduce_over(LOCAL)
        if dynamic:
            with pytest.raises(UnsupportedError, match="own loss scale"):
                host.reduce_over(ALL)
        else:
            host.reduce_over(ALL)


def test_forwards_are_not_followed_where_an_optimizer_holds_masters() -> None:
    with pytest.raises(UnsupportedError, match="FP16_Optimizer holds fp32 masters"):
        control(kind="FP16_Optimizer").before_modules(lambda name: None)


def test_ranks_are_divided_into_replicas_of_equal_size() -> None:
    assert replicas_of((1, 3, 5, 7), 2) == [(1, 3), (5, 7)]
    assert counterparts([(1, 3), (5, 7)]) == [(1, 5), (3, 7)]
    assert replicas_of((1, 3), 1) == [(1,), (3,)] and counterparts([(1,), (3,)]) == [(1, 3)]
    for size in (3, 8):
        with pytest.raises(ConfigError, match=rf"shard_ranks is {size}, but there are 4 .*\(1, 3, 5, 7\)"):
            replicas_of((1, 3, 5, 7), size)


def test_a_model_that_is_partitioned_already_is_refused() -> None:
    model = nn.Linear(2, 2)
    require_divisible(model)
    model.weight.ds_id = 0  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match="deepspeed.zero.Init"):
        require_divisible(model)


# ---- deepspeed.initialize ----


@pytest.mark.parametrize(("block", "size"), [({}, None), ({"sync": {}}, 1), ({"sync": {"shard_ranks": 2}}, 2)])
def test_only_with_local_sgd_deepspeed_builds_over_replicas(
    monkeypatch: pytest.MonkeyPatch, block: dict[str, Any], size: int | None
) -> None:
    made: list[Any] = []

    class Build:
        def __init__(self, size: int) -> None:
            self.groups = f"replicas of {size}"

        def active(self) -> Any:
            made.append("built")
            return nullcontext()

    class Loop:
        def __init__(self, *args: Any) -> None:
            made.append(args[-1])

        def resume(self) -> None: ...

    monkeypatch.setattr(training, "ReplicaBuild", Build)
    monkeypatch.setattr(training, "DeepSpeedLoop", Loop)
    context = SimpleNamespace(config=Config(), run_dir=None)
    monkeypatch.setattr(training, "launch_context", lambda: context)
    settings = {"ft_plugins": block}
    engine = SimpleNamespace(_config=SimpleNamespace(_param_dict=settings))

    def initialize(model: Any = None, config: Any = None) -> Any:
        return (engine,)

    training.EngineHooks()._initializing(initialize)(model=nn.Linear(1, 1), config=settings)
    assert made == ([] if size is None else ["built", f"replicas of {size}"])
