"""Iterations that are computed again are compared with what they were: real SMP, forked ranks, a loop of plain torch.

Each case changes how the second incarnation continues. The state is restored bit for bit in all of them.
"""

from typing import Any

import pytest
import torch

from ft_plugins.adapters.torch.torch_loop import TorchHost
from ft_plugins.config import Config
from ft_plugins.errors import FtError
from ft_plugins.session import attach

from .incarnation import context

Node = Any  # the fixture's class lives in conftest
DIES_IN, LAST = 6, 9


def _life(rank, world, run_dir, token, block, case):
    """One incarnation; without `case` it dies in iteration DIES_IN, after its update."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    session = attach(
        TorchHost(model, optimizer, scheduler),
        Config.from_json({"reft": {}, "node_name": "n", **block}),
        context(rank, world, run_dir, token, int(bool(case))),
    )
    done = []
    try:
        for step in session.iterations(LAST):
            read = step - DIES_IN + 1 if case == "reads from the beginning" else step
            read += 1000 if case == "reads something else" else 0
            batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(read))
            if case == "draws" and step == DIES_IN:
                torch.rand(())
            if case == "sets the rate":
                optimizer.param_groups[0]["lr"] = 0.5
            weight = 1.5 if case == "counts from zero" else 1.0
            (weight * model(batch).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            done.append(step)
            if step == DIES_IN and not case:
                return {"done": done, "error": ""}
    except FtError as error:
        return {"done": done, "error": f"{type(error).__name__}: {error}"}
    return {"done": done, "error": ""}


@pytest.fixture
def continued(node, ranks):
    """A job that dies in iteration DIES_IN; then its second incarnation."""

    def run(case, **block):
        node.start()
        first = ranks(_life, 1, node.run_dir, node.fence(), block, "")
        assert first == [{"done": list(range(1, DIES_IN + 1)), "error": ""}]
        (second,) = ranks(_life, 1, node.run_dir, node.fence(), block, case)
        return dict(second)

    return run


REST = list(range(DIES_IN, LAST + 1))


def test_a_loop_that_continues_is_proven(node, continued):
    assert continued("continues", prove="on") == {"done": [DIES_IN - 1, *REST], "error": ""}
    (proven,) = node.events("resume.proven")
    assert proven.fields["iteration"] == DIES_IN - 1
    assert proven.fields["reason"] == "proven: iteration 5 computed again, identical on 1 rank, 4 items"
    assert not node.events("resume.differed")


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("reads from the beginning", "iteration 6 reads what iteration 1 read"),
        ("draws", "differs from before the restore in: random numbers drawn"),
        ("sets the rate", "learning rate (learning rate 0.5 in place of 0.0059"),
    ],
)
def test_a_loop_that_does_not_continue_ends_before_its_state_is_captured(node, continued, case, said):
    second = continued(case)
    assert second["done"] == [] and second["error"].startswith("LoopError: rank 0: ")
    assert said in second["error"] and "--ftp-resume fresh" in second["error"]
    (alarm,) = node.events("resume.differed")
    assert alarm.fields["iteration"] == DIES_IN and alarm.fields["ending"]
    assert {event.fields["iteration"] for event in node.events("snapshot.sealed")} == set(range(1, DIES_IN))


@pytest.mark.parametrize(
    ("case", "on_difference"), [("reads something else", "auto"), ("counts from zero", "auto"), ("draws", "warn")]
)
def test_other_differences_are_an_alarm_and_training_goes_on(node, continued, case, on_difference):
    assert continued(case, on_difference=on_difference) == {"done": REST, "error": ""}
    (alarm,) = node.events("resume.differed")
    assert alarm.fields["iteration"] == DIES_IN and not alarm.fields["ending"]
    assert not node.events("resume.proven")


def test_any_difference_ends_the_job_if_the_user_wants_that(node, continued):
    second = continued("reads something else", on_difference="stop")
    assert second["done"] == [] and "iteration 6 was computed again, and differs" in second["error"]


def test_the_ledger_outlives_a_second_kill_and_still_shows_the_difference(node, ranks, continued):
    first = continued("reads from the beginning")
    (again,) = ranks(_life, 1, node.run_dir, node.fence(), {}, "reads from the beginning")
    assert again == first and again["error"]
    (continues,) = ranks(_life, 1, node.run_dir, node.fence(), {}, "continues")
    assert continues == {"done": REST, "error": ""}
