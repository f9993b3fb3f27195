"""How a rank leaves: once, and with whether training ended in order."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("deepspeed")

from ft_plugins.adapters.deepspeed import training  # noqa: E402
from ft_plugins.adapters.deepspeed.training import DeepSpeedLoop, EngineHooks  # noqa: E402
from ft_plugins.config import Config  # noqa: E402
from ft_plugins.errors import ResumeError, UnsupportedError  # noqa: E402


def test_a_rank_leaves_once_with_whether_it_ended_in_order():
    left = []
    for fails in (False, True):
        one = DeepSpeedLoop.__new__(DeepSpeedLoop)
        one._leave, one._updated = left.append, None

        def shutdown(fails=fails):
            if fails:
                raise ResumeError("at the end")

        one._session = SimpleNamespace(shutdown=shutdown)
        for _ in range(2):
            try:
                one.shutdown()
            except ResumeError:
                assert fails
    assert left == [True, False]


@pytest.mark.parametrize("code", [0, None, 3])
def test_a_stop_after_the_scripts_last_iteration_is_an_orderly_end(code, monkeypatch):
    """The version point of that iteration is in the orderly end, at destroy_process_group, which is done then."""
    done = []
    one = DeepSpeedLoop.__new__(DeepSpeedLoop)
    one._leave, one._updated = done.append, 7

    def iteration_end(step, ends):
        raise SystemExit(code)

    one._session = SimpleNamespace(iteration_end=iteration_end, shutdown=lambda: None)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda group=None: done.append("destroyed"))
    one._follow_end()
    if code:
        with pytest.raises(SystemExit):
            torch.distributed.destroy_process_group()
        assert done == [False]
    else:
        torch.distributed.destroy_process_group()
        assert done == [True, "destroyed"]


def _amid_an_evaluation(monkeypatch):
    """A loop whose iteration 7 is not captured yet, and what is done at its end."""
    done = []
    one = DeepSpeedLoop.__new__(DeepSpeedLoop)
    one._leave, one._updated = done.append, 7
    one._session = SimpleNamespace(
        iteration_end=lambda step, ends: done.append(step), shutdown=lambda: done.append("over")
    )
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda group=None: done.append("destroyed"))
    one._follow_end()
    return one, done


@pytest.mark.parametrize(
    ("error", "orderly"), [(LookupError(), False), (KeyboardInterrupt(), False), (SystemExit(3), False),
                           (SystemExit(0), True), (SystemExit(), True)],
)  # fmt: skip
def test_a_script_that_destroys_the_group_because_it_failed_is_not_captured_and_leaves_its_snapshots(
    error, orderly, monkeypatch
):
    """As in `try: train() finally: dist.destroy_process_group()`, amid an evaluation."""
    one, done = _amid_an_evaluation(monkeypatch)
    with pytest.raises(type(error)):
        try:
            raise error
        finally:
            torch.distributed.destroy_process_group()
    assert done == ([7, "over", True, "destroyed"] if orderly else [False, "destroyed"])
    one.shutdown()  # as where the script has caught the error, and ends in order
    assert done[-1] == "over" and done.count(7) == orderly


def test_a_group_that_is_destroyed_at_exit_after_an_error_is_left_as_after_a_failure(monkeypatch):
    """As with `atexit.register(dist.destroy_process_group)`: no exception is under way then."""
    one, done = _amid_an_evaluation(monkeypatch)
    monkeypatch.setattr(sys, "last_type", LookupError, raising=False)
    torch.distributed.destroy_process_group()
    assert done == [False, "destroyed"]


@pytest.mark.parametrize("where", ["__init__", "resume"])
def test_a_rank_that_joined_leaves_if_protection_does_not_start(where, monkeypatch):
    left = []

    def fail(*args):
        raise ResumeError("at the start")

    made = type("Loop", (), {"__init__": lambda *args: None, "resume": lambda self: None, where: fail})
    monkeypatch.setattr(training, "DeepSpeedLoop", made)
    monkeypatch.setattr(training, "launch_context", lambda: SimpleNamespace(config=Config(), run_dir=None))
    settings = {"ft_plugins": {"reft": {}}}
    engine = SimpleNamespace(_config=SimpleNamespace(_param_dict=settings))
    with pytest.raises(ResumeError):
        EngineHooks(lambda config, context: (context, left.append)).initialize(
            lambda config=None: (engine,), config=settings
        )
    assert left == [False]


@pytest.mark.parametrize(
    ("settings", "optimizer", "named"),
    [
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, None, "offload_optimizer.device nvme"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, None, "offload_param.device nvme"),
        ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.1}}}, None, "(optimizer.type OneBitAdam)"),
        ({"optimizer": {"type": "OneBitLamb"}}, None, "(optimizer.type OneBitLamb): it averages compressed gradients"),
        ({"optimizer": {"type": "ZeroOneAdam"}}, None, "a 1-bit optimizer (optimizer.type ZeroOneAdam)"),
        ({"optimizer": {"type": "Muon"}}, None, "Muon (optimizer.type Muon): it updates whole matrices"),
        ({"eigenvalue": {"enabled": True}}, None, "eigenvalues (eigenvalue)"),
        ({"compile": {"deepcompile": True}}, None, "DeepCompile"),
        ({"amp": {"enabled": True, "opt_level": "O1"}}, None, "apex.amp (amp)"),
        ({"expert_parallel": {"enabled": True, "autoep_size": 2}}, None, "AutoEP (expert_parallel)"),
    ],
)
def test_settings_that_cannot_be_protected_are_refused_before_an_engine_is_built(
    monkeypatch, settings, optimizer, named
):
    built = []
    monkeypatch.setattr(training, "launch_context", lambda: SimpleNamespace(config=Config(), run_dir=None))

    def initialize(config=None, optimizer=None):
        built.append("engine")

    with pytest.raises(UnsupportedError, match=re.escape(named) + ".*Drop the option.*, or remove the block"):
        EngineHooks().initialize(initialize, config={"ft_plugins": {"reft": {}}, **settings}, optimizer=optimizer)
    assert built == []
    harmless = {
        "zero_optimization": {"offload_optimizer": {"device": "none"}},
        "progressive_layer_drop": {"enabled": True},
        "data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": {"enabled": True}}},
    }
    with pytest.raises(TypeError):  # it goes on to what this function does not return
        EngineHooks().initialize(initialize, config={"ft_plugins": {"reft": {}}, **harmless})
    assert built == ["engine"]
