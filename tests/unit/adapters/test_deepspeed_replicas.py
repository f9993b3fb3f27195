"""Local SGD under DeepSpeed, without a job: modules and their forwards, refusals, and how an engine is built."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from torch import nn

pytest.importorskip("deepspeed")

from ft_plugins.adapters.deepspeed import configuration, reducing, training  # noqa: E402
from ft_plugins.adapters.deepspeed.reducing import DeepSpeedReduction, require_local_gradients  # noqa: E402
from ft_plugins.adapters.deepspeed.shard_groups import ShardGroups, counterparts, replicas_of, require_divisible
from ft_plugins.config import Config  # noqa: E402
from ft_plugins.errors import ConfigError, UnsupportedError  # noqa: E402
from ft_plugins.model.reduction import ReducedOver  # noqa: E402

ALL, LOCAL = ReducedOver.ALL, ReducedOver.LOCAL

# ---- refusals ----


def control(**facts):
    """A host with an engine of these facts."""
    host = DeepSpeedReduction.__new__(DeepSpeedReduction)
    kind = facts.pop("kind", "SGD")
    host.rank, host._shards = 3, facts.pop("shards", None)
    usual = {
        "optimizer": type(kind, (), facts.pop("optimizer", {}))(), "mpu": None, "sequence_parallel_size": 1,
        "fp16_enabled": lambda: False,
    }  # fmt: skip
    host.engine = SimpleNamespace(**usual | facts)
    return host


def test_what_is_in_the_way_of_local_gradients_is_refused_by_name():
    host = control(kind="BF16_Optimizer", sequence_parallel_size=2, has_moe_layers=True)
    with pytest.raises(UnsupportedError, match="rank 3: local SGD") as error:
        host.prepare_reduction()
    words_of_each = ("sequence parallelism", "MoE layers", "was built over all")
    for words in words_of_each:
        assert words in str(error.value)


def test_shards_over_other_ranks_are_refused(monkeypatch):
    monkeypatch.setattr(reducing.dist, "get_process_group_ranks", lambda group: group)
    shards = ShardGroups((0, 1, 2, 3), (2, 3), (1, 3), None, None)
    parts = [[SimpleNamespace(ds_process_group=(2, 3)), SimpleNamespace(ds_process_group=(0, 1, 2, 3))]]
    optimizer = {"dp_process_group": (2, 3), "fp16_groups": parts}
    host = control(kind="DeepSpeedZeroOptimizer_Stage3", optimizer=optimizer)
    with pytest.raises(UnsupportedError, match=r"shards over other ranks than \[2, 3\]"):
        require_local_gradients(host.engine, 3, shards)
    parts[0].pop()
    require_local_gradients(host.engine, 3, shards)


def test_fp16_cannot_return_to_all_replicas_once_loss_scales_may_differ():
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


def test_forwards_are_not_followed_where_parameters_are_gathered_ahead_of_them():
    with pytest.raises(UnsupportedError, match="ZeRO-3 gathers parameters ahead"):
        control(kind="DeepSpeedZeroOptimizer_Stage3").before_modules(lambda name: None)


def test_ranks_are_divided_into_replicas_of_equal_size():
    assert replicas_of((1, 3, 5, 7), 2) == [(1, 3), (5, 7)]
    assert counterparts([(1, 3), (5, 7)]) == [(1, 5), (3, 7)]
    assert replicas_of((1, 3), 1) == [(1,), (3,)] and counterparts([(1,), (3,)]) == [(1, 3)]
    for size in (3, 8):
        with pytest.raises(ConfigError, match=rf"shard_ranks is {size}, but there are 4 .*\(1, 3, 5, 7\)"):
            replicas_of((1, 3, 5, 7), size)


def test_a_model_that_is_partitioned_already_is_refused():
    model = nn.Linear(2, 2)
    require_divisible(model)
    model.weight.ds_id = 0
    with pytest.raises(UnsupportedError, match="deepspeed.zero.Init"):
        require_divisible(model)


# ---- deepspeed.initialize ----


@pytest.mark.parametrize(("block", "size"), [({}, None), ({"sync": {}}, 1), ({"sync": {"shard_ranks": 2}}, 2)])
def test_only_with_local_sgd_deepspeed_builds_over_replicas(monkeypatch, block, size):
    made = []

    class Build:
        def __init__(self, size):
            self.groups = f"replicas of {size}"

        def active(self):
            made.append("built")
            return nullcontext()

    class Loop:
        def __init__(self, *args):
            made.append(args[5])

        def resume(self): ...

    monkeypatch.setattr(configuration, "ReplicaBuild", Build)
    monkeypatch.setattr(training, "DeepSpeedLoop", Loop)
    context = SimpleNamespace(config=Config(), run_dir=None)
    monkeypatch.setattr(training, "launch_context", lambda: context)
    settings = {"ft_plugins": block}
    engine = SimpleNamespace(_config=SimpleNamespace(_param_dict=settings))

    def initialize(model=None, config=None):
        return (engine,)

    training.EngineHooks().initialize(initialize, model=nn.Linear(1, 1), config=settings)
    assert made == ([] if size is None else ["built", f"replicas of {size}"])


def test_local_sgd_that_is_known_only_from_an_encoded_configuration_is_refused(monkeypatch):
    """DeepSpeed decodes it while it builds the engine, which is too late to divide ranks."""
    monkeypatch.setattr(training, "launch_context", lambda: SimpleNamespace(config=Config(), run_dir=None))
    settings = {"ft_plugins": {"sync": {"shard_ranks": 2}}}
    engine = SimpleNamespace(_config=SimpleNamespace(_param_dict=settings))
    with pytest.raises(ConfigError, match="pass a file or a dictionary"):
        training.EngineHooks().initialize(lambda model=None, config=None: (engine,), config="eyJmdF9wbHVnaW5zIjoge319")
