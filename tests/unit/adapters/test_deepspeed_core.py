"""What a DeepSpeed engine's learning rate schedulers are captured as, and which are refused by name."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("deepspeed")

from ft_plugins.adapters.deepspeed.core import DeepSpeedHost, require_encodable_scheduler  # noqa: E402
from ft_plugins.adapters.schedulers import schedules  # noqa: E402
from ft_plugins.errors import ResumeError, UnsupportedError  # noqa: E402
from ft_plugins.snapshot.capture import codec  # noqa: E402


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)


def test_milestones_of_a_scheduler_are_captured_and_go_on():
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


def test_a_scheduler_of_unknown_state_is_named():
    class Odd(torch.optim.lr_scheduler.ConstantLR):
        def state_dict(self):
            return {"seen": {1, 2}}

    with pytest.raises(UnsupportedError, match=r"rank 3: the learning rate scheduler Odd .*\['seen'\]"):
        require_encodable_scheduler(Odd(optimizer()), 3)
    require_encodable_scheduler(None, 3)


def test_a_version_whose_reads_do_not_fit_its_micro_steps_is_not_restored():
    host = DeepSpeedHost.__new__(DeepSpeedHost)
    host.rank, host.engine = 2, SimpleNamespace(optimizer=None)
    small = {"pace": {"read": 2, "computed": 1, "proven": False}, "counters": {"global_steps": 1}}
    with pytest.raises(ResumeError, match="rank 2: iteration 1 cannot be restored: it read 2 batches for 1 micro"):
        host.restore(small)


def test_what_a_client_loads_after_a_restore_is_replaced_before_its_loop_begins():
    """Megatron-DeepSpeed loads an older checkpoint of its own, and counts from 0, after the engine was restored."""
    host = DeepSpeedHost.__new__(DeepSpeedHost)
    calls = []
    host.rank, host.engine = 0, SimpleNamespace(global_steps=0, optimizer=None)
    host._client = SimpleNamespace(name="Counter", restore=lambda state: calls.append(state))
    host._restore_optimizer = lambda small: calls.append(small["groups"])
    counters = dict.fromkeys(("global_samples", "skipped_steps", "micro_steps"), 0) | {"global_steps": 5}
    small = {"counters": counters, "groups": "rate", "client": {"name": "Counter", "state": {"at": 5}}}
    small["schedules"] = schedules(host.engine)
    host._unsettled = small
    host.settle()
    host.settle()
    assert host.engine.global_steps == 5 and calls == ["rate", {"at": 5}], "once"
    host._unsettled = small
    host.find_tensors()  # the engine has loaded a newer checkpoint of its own
    host.settle()
    assert len(calls) == 2, "what it loaded instead is left alone"


def test_a_state_of_another_clients_loop_is_refused():
    host = DeepSpeedHost.__new__(DeepSpeedHost)
    host.rank = 1
    with pytest.raises(ResumeError, match="rank 1: the captured job's loop was that of gpt-neox, this one's is"):
        host._require_same_client({"client": {"name": "gpt-neox", "state": {}}})


def test_groups_that_differ_between_ranks_are_not_divided_over_others():
    """As those of an optimizer that keeps a norm of its own shard in them."""
    host = DeepSpeedHost.__new__(DeepSpeedHost)
    host.rank, host.engine = 2, SimpleNamespace(optimizer=optimizer())
    one, other = ({"groups": [{"lr": 1.0, "norms": torch.full((2,), size)}]} for size in (1.0, 2.0))
    assert host.merged([one, one]) == one
    with pytest.raises(ResumeError, match="rank 2: SGD keeps other values in the groups of each rank"):
        host.merged([one, one, other])
