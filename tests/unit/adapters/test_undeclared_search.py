"""The search of a running loop: an error at the first version point, or one line; what seemed frozen is watched."""

import copy
import gc
import os
import weakref

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import ft_plugins
from ft_plugins.adapters.hf.torch_trainer import remedy
from ft_plugins.adapters.script import undeclared_search
from ft_plugins.errors import StateChangedError
from tests.unit.adapters.torch_small import Small


class Given(Small):
    """A small loop with an average or the like next to it."""

    def iterate(self):
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_an_average_that_nothing_returns_ends_the_loop_before_the_first_version():
    small = Given()
    ema = AveragedModel(small.model)
    done = []

    def body(step):
        done.append(step)
        small.iterate()
        ema.update_parameters(small.model)

    with pytest.raises(StateChangedError) as caught:
        small.run(body)
    words = str(caught.value)
    assert done == [1] and words.startswith("rank 0: iteration 1: the script has training state")
    assert "'ema' (AveragedModel, a variable of test_an_average_that_nothing_returns" in words
    assert "add TorchHost(..., get_state=lambda: {'ema': dict(ema.state_dict())}" in words
    assert "set_state=lambda state: ema.load_state_dict(state['ema']))" in words
    assert "TorchHost(..., ignored=[ema])" in words


@pytest.mark.parametrize("answer", ["get_state", "ignored"])
def test_the_lines_that_such_an_error_names_are_accepted(answer):
    first = Given()
    ema = AveragedModel(first.model)
    del first
    lines = {
        "get_state": {
            "get_state": lambda: {"ema": dict(ema.state_dict())},
            "set_state": lambda state: ema.load_state_dict(state["ema"]),
        },
        "ignored": {"ignored": [ema]},
    }
    small = Given(**lines[answer])

    def body(step):
        small.iterate()
        ema.update_parameters(small.model)

    small.run(body)


def test_what_is_dropped_but_not_collected_yet_is_not_named():
    small = Given()
    gc.disable()
    try:
        dropped = AveragedModel(small.model)
        dropped.cycle = [dropped]
        del dropped
        small.run(lambda step: small.iterate(), 2)
    finally:
        gc.enable()


@pytest.mark.parametrize("from_step", [1, 4])
def test_a_frozen_module_is_named_as_soon_as_it_changes(from_step, capsys):
    small = Given()
    teacher = copy.deepcopy(small.model).requires_grad_(False).eval()
    done = []

    def body(step):
        done.append(step)
        small.iterate()
        if step >= from_step:
            for mean, one in zip(teacher.parameters(), small.model.parameters(), strict=True):
                mean.data.mul_(0.9).add_(one.data, alpha=0.1)

    if from_step == 1:
        with pytest.raises(StateChangedError, match=r"iteration 1: .*'teacher' \(Sequential, a variable of"):
            small.run(body)
        assert done == [1]
    else:
        small.run(body)
    said = capsys.readouterr()
    assert "not captured, because" not in said.out
    assert said.err.count(f"iteration {from_step}: 'teacher' (Sequential, a variable of") == (from_step > 1)


def test_an_average_that_begins_late_is_named_once_with_the_advice_of_the_loop_and_ends_nothing(capsys):
    """A library's loop has no line to which get_state could be added."""
    small = Given()
    small.host.of_a_library("what callbacks keep", remedy)
    ema = {name: torch.zeros_like(one) for name, one in small.model.named_parameters()}

    def body(step):
        small.iterate()
        for name, one in small.model.named_parameters() if step > 3 else ():
            ema[name].mul_(0.9).add_(one.detach(), alpha=0.1)

    small.run(body, 9)
    said = capsys.readouterr().err
    assert said.count("iteration 4: 'ema' (dict, a variable of") == 1 == said.count("belongs to nothing that is capt")
    assert "as a submodule whose parameters require no gradients" in said and "ft_plugins.ignore(...)" in said


def test_what_is_trained_from_the_start_in_a_librarys_loop_is_refused_with_its_advice(monkeypatch):
    monkeypatch.setattr(undeclared_search, "_ignored", [])
    average = AveragedModel(Given().model)

    def iterate(small):
        small.iterate()
        average.update_parameters(small.model)

    for ignored in (False, True):
        small = Given()
        small.host.of_a_library("what callbacks keep", remedy)
        if ignored:
            ft_plugins.ignore(average)
            small.run(lambda step, small=small: iterate(small))
        else:
            with pytest.raises(StateChangedError, match=r"'average' .*a submodule .*ft_plugins.ignore\(average\)"):
                small.run(lambda step, small=small: iterate(small))


def test_state_of_another_host_of_the_process_is_declared():
    one, other = Given(), Given()
    one.run(lambda step: one.iterate(), 2)
    other.run(lambda step: other.iterate(), 2)


def _deepspeed(rank, world, answer):
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    from ft_plugins.adapters.deepspeed.core import DeepSpeedHost
    from tests.unit.adapters.deepspeed_engines import Ignoring, built, train

    engine = built(rank, world, 0, stage=1, bf16=True)
    mean = copy.deepcopy(engine.module).requires_grad_(False)
    host = DeepSpeedHost(engine)
    if answer == "ignored":
        import ft_plugins.deepspeed

        ft_plugins.deepspeed.ignore(mean)
    host.install(Ignoring(host, lambda host, step: None))
    host.loop_begins()

    def before(step):
        if step > 1:
            host.small_state()
        if answer != "frozen":
            for one, other in zip(mean.parameters(), engine.module.parameters(), strict=True):
                one.data.mul_(0.9).add_(other.data)

    try:
        train(engine, 3, before)
    except StateChangedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("answer", ["none", "ignored", "frozen"])
def test_an_average_next_to_a_deepspeed_engine_is_named_unless_it_is_ignored(ranks, answer):
    pytest.importorskip("deepspeed")
    [words] = ranks(_deepspeed, 1, answer)
    if answer != "none":
        assert words == ""
    else:
        assert words.startswith("rank 0: iteration 1: the script has training state") and "'mean' (Sequential" in words
        assert "make modules a part of the model" in words and "ft_plugins.deepspeed.ignore(mean)" in words


def test_what_the_script_has_of_its_variables_stays():
    """`locals()` is the dictionary that the search reads as well, before Python 3.13."""
    small = Given()
    variables = locals()
    small.run(lambda step: small.iterate(), 2)
    assert variables["small"] is small


def test_a_search_holds_no_object_of_the_script():
    small = Given()
    teacher = copy.deepcopy(small.model).requires_grad_(False).eval()
    small.run(lambda step: small.iterate(), 2)
    gone = weakref.ref(teacher)
    del teacher
    gc.collect()
    assert gone() is None
    small.run(lambda step: small.iterate(), 2)
    assert not [one for one in undeclared_search._ignored if type(one) is not str]
