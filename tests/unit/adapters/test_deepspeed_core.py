"""What a DeepSpeed engine's learning rate schedulers are captured as, and which are refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from ft_plugins.adapters.deepspeed.continuing import OwnCounters  # noqa: E402
from ft_plugins.adapters.deepspeed.core import DeepSpeedHost, require_encodable_scheduler  # noqa: E402
from ft_plugins.adapters.module_modes import (  # noqa: E402
    ModuleNumbers,
    read_modes,
    require_encodable_modes,
    write_modes,
)
from ft_plugins.adapters.schedulers import schedules  # noqa: E402
from ft_plugins.errors import ResumeError, UnsupportedError  # noqa: E402
from ft_plugins.snapshot.capture import codec  # noqa: E402


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)


def test_milestones_of_a_scheduler_are_captured_and_go_on() -> None:
    one, other = optimizer(), optimizer()
    scheduler, again = (torch.optim.lr_scheduler.MultiStepLR(each, [2, 2, 4]) for each in (one, other))
    one.step()
    scheduler.step()
    require_encodable_scheduler(scheduler, 0)
    again.load_state_dict(codec.decode(codec.encode(scheduler.state_dict())))
    rates = []
    for each, stepped in ((one, scheduler), (other, again)):
        each.step()
        rates.append([])
        for _ in range(3):
            stepped.step()
            rates[-1].append(each.param_groups[0]["lr"])
    assert rates[0] == rates[1] == pytest.approx([0.01, 0.01, 0.001])


def test_a_scheduler_of_unknown_state_is_named() -> None:
    class Odd(torch.optim.lr_scheduler.ConstantLR):
        def state_dict(self) -> dict[str, object]:
            return {"seen": {1, 2}}

    with pytest.raises(UnsupportedError, match=r"rank 3: the learning rate scheduler Odd .*\['seen'\]"):
        require_encodable_scheduler(Odd(optimizer()), 3)
    require_encodable_scheduler(None, 3)


@pytest.mark.parametrize("known", [False, True])
def test_a_scheduler_that_deepspeed_does_not_know_of_is_told_once(
    known: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    host: Any = DeepSpeedHost.__new__(DeepSpeedHost)
    host.rank, host._positions, host._rates, host._scheduler_reported = 0, None, None, False
    host.silent, host.pace, host.counted = False, None, OwnCounters()
    host._numbers = ModuleNumbers(torch.nn.Module())
    updating = optimizer()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(updating, [2, 3])
    counters = dict.fromkeys(("global_steps", "global_samples", "skipped_steps", "micro_steps"), 0)
    given = scheduler if known else None
    host.engine = SimpleNamespace(module=torch.nn.Module(), optimizer=updating, lr_scheduler=given, **counters)
    told = []
    for _ in range(4):
        host.small_state()
        told.append(capsys.readouterr().out)
        updating.step()
        scheduler.step()
    assert told[:2] == ["", ""] and told[3] == ""
    assert ("pass a scheduler to deepspeed.initialize" in told[2]) == (not known)


def test_a_version_whose_reads_do_not_fit_its_micro_steps_is_not_restored() -> None:
    host: Any = DeepSpeedHost.__new__(DeepSpeedHost)
    host.rank, host.engine = 2, SimpleNamespace(optimizer=None)
    small = {"pace": {"read": 2, "computed": 1, "proven": False}, "counters": {"global_steps": 1}}
    with pytest.raises(ResumeError, match="rank 2: iteration 1 cannot be restored: it read 2 batches for 1 micro"):
        host.restore(small)


class Counted(torch.nn.Module):
    """A module with extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Any = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def test_layers_that_were_unfrozen_or_put_into_evaluation_in_training_are_so_again() -> None:
    trained, again = (torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), Counted()) for _ in range(2))
    for one in (trained, again):
        one[0].requires_grad_(False)  # as the script builds it
    trained[0].requires_grad_(True)
    trained[1].eval()
    trained[2].calls = 7
    write_modes(again, codec.decode(codec.encode(read_modes(trained))))
    assert all(one.requires_grad for one in again.parameters())
    assert again.training and not again[1].training and again[2].calls == 7


def test_a_number_of_a_module_that_changes_in_training_is_restored() -> None:
    trained, again = (torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.1)) for _ in range(2))
    numbers, others = ModuleNumbers(trained), ModuleNumbers(again)
    assert numbers.changed() == {}
    trained[1].p, trained.tau = 0.05, 3
    trained.eval()
    assert numbers.changed() == {"": {"tau": 3}, "1": {"p": 0.05}}
    others.restore(codec.decode(codec.encode(numbers.changed())))
    assert again[1].p == 0.05 and again.tau == 3 and again.training and others.changed() == numbers.changed()


def test_a_number_that_is_back_at_what_it_was_built_with_is_restored_too() -> None:
    """The script sets it right after the engine is built, as in its first start; in iteration 100 it set it back."""
    trained, again = (torch.nn.Sequential(torch.nn.Dropout(0.1)) for _ in range(2))
    numbers, others = ModuleNumbers(trained), ModuleNumbers(again)
    again[0].p = 0.5
    others.restore(numbers.changed())
    assert again[0].p == 0.1


def test_numbers_that_describe_a_cache_are_left_to_it() -> None:
    """As a module that makes a table for the longest sequence so far, and keeps its length."""
    trained, again = (torch.nn.Sequential(torch.nn.Identity()) for _ in range(2))
    numbers, others = ModuleNumbers(trained), ModuleNumbers(again)
    trained[0].table, trained[0].length = torch.zeros(8), 8
    assert numbers.changed() == {}
    again[0].table, again[0].length = torch.zeros(4), 4
    others.restore({"0": {"length": 8}})
    assert again[0].length == 4


def test_a_module_whose_extra_state_cannot_be_captured_is_named() -> None:
    module = torch.nn.Sequential(Counted())
    module[0].calls = {1, 2}
    with pytest.raises(UnsupportedError, match=r"rank 2: the extra state of '0' \(Counted\) cannot be captured"):
        require_encodable_modes(module, 2)


def test_what_a_client_loads_after_a_restore_is_replaced_before_its_loop_begins() -> None:
    """Megatron-DeepSpeed loads an older checkpoint of its own, and counts from 0, after the engine was restored."""
    host: Any = DeepSpeedHost.__new__(DeepSpeedHost)
    calls: list[Any] = []
    host.rank, host.engine = 0, SimpleNamespace(global_steps=0, optimizer=None)
    host._client = SimpleNamespace(name="Counter", restore=lambda state: calls.append(state))
    host._restore_optimizer = lambda small: calls.append(small["groups"])
    counters = dict.fromkeys(("global_samples", "skipped_steps", "micro_steps"), 0) | {"global_steps": 5}
    small: dict[str, Any] = {"counters": counters, "groups": "rate", "client": {"name": "Counter", "state": {"at": 5}}}
    small["schedules"] = schedules(host.engine)
    host._unsettled = small
    host.settle()
    host.settle()
    assert host.engine.global_steps == 5 and calls == ["rate", {"at": 5}], "once"
    host._unsettled = small
    host.find_tensors()  # the engine has loaded a newer checkpoint of its own
    host.settle()
    assert len(calls) == 2, "what it loaded instead is left alone"


def test_a_state_of_another_clients_loop_is_refused() -> None:
    host: Any = DeepSpeedHost.__new__(DeepSpeedHost)
    host.rank = 1
    with pytest.raises(ResumeError, match="rank 1: the captured job's loop was that of gpt-neox, this one's is"):
        host._require_same_client({"client": {"name": "gpt-neox", "state": {}}})


def test_groups_that_differ_between_ranks_are_not_divided_over_others() -> None:
    """As those of an optimizer that keeps a norm of its own shard in them."""
    host: Any = DeepSpeedHost.__new__(DeepSpeedHost)
    host.rank, host.engine = 2, SimpleNamespace(optimizer=optimizer())
    one, other = ({"groups": [{"lr": 1.0, "norms": torch.full((2,), size)}]} for size in (1.0, 2.0))
    assert host.merged([one, one]) == one
    with pytest.raises(ResumeError, match="rank 2: SGD keeps other values in the groups of each rank"):
        host.merged([one, one, other])
