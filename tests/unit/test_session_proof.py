"""A restore is proven by an iteration that is computed again: real SMP, forked ranks, a loop of plain torch.

Each case changes what the second incarnation does. The state of the version before is restored bit for bit in all.
"""

from typing import Any

import pytest
import torch

from ft_plugins.adapters.torch.torch_loop import TorchHost
from ft_plugins.config import Config
from ft_plugins.errors import FtError
from ft_plugins.session import attach
from ft_plugins.snapshot.segment.paths import path_of
from ft_plugins.snapshot.segment.segment import Segment

from .incarnation import context

Node = Any  # the fixture's class lives in conftest
LIVED, LAST = 5, 9


class Center:
    """A running mean that a criterion keeps beside the model, as a plain attribute."""

    def __init__(self):
        self.mean = torch.zeros(())

    def __call__(self, out):
        loss = (out - self.mean).square().mean()
        self.mean = 0.9 * self.mean + 0.1 * out.detach().mean()
        return loss


def _life(rank, world, run_dirs, token, block, case, until):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    criterion = Center() if case.startswith("beside") else lambda out: out.square().mean()
    session = attach(
        TorchHost(model, optimizer, scheduler),
        Config.from_json({"reft": {}, "prove": "on", "node_name": run_dirs[rank].name, **block}),
        context(rank, world, run_dirs[rank], token, int(token > 1)),
    )
    found = {"done": [], "error": ""}
    try:
        for step in session.iterations(LAST):
            again = step == LIVED and token > 1
            read = step - LIVED + 1 if again and case == "reads from the beginning" else step
            batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(read))
            if again and case == "another seed":
                torch.manual_seed(99)
            if again and case == "another count":
                scheduler.step()
            criterion(model(batch)).backward()
            if world > 1:
                torch.distributed.barrier()  # as the reduction of gradients
            if again and case.startswith("dies"):
                return found
            optimizer.step()
            if again and case == "an element":
                optimizer.state[model[0].weight]["momentum_buffer"][0, 0] += 1e-3
            optimizer.zero_grad()
            scheduler.step()
            found["done"].append(step)
            found["digest"] = sum(one.double().sum().item() for one in model.parameters())
            if case == "ends in order" and step == until:
                session.complete(step)
                session.shutdown()
            if step == until:
                return found
    except FtError as error:
        found["error"] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture
def lives(node, ranks):
    """One more life of a job of one rank. The first one completes LIVED iterations, and begins another one."""
    node.start()

    def live(case, until=LAST, **block):
        (found,) = ranks(_life, 1, [node.run_dir], node.fence(), block, case, until)
        return dict(found)

    return live


def sealed(node):
    return [event.fields["iteration"] for event in node.events("snapshot.sealed")]


def test_the_last_iteration_is_computed_again_and_capture_goes_on_with_the_next(node, lives):
    lives("lives", LIVED + 1)
    second = lives("continues")
    assert second["done"] == [*range(LIVED, LAST + 1)] and not second["error"]
    (proven,) = node.events("resume.proven")
    assert proven.fields["iteration"] == LIVED and "identical on 1 rank, 8 items" in proven.fields["reason"]
    assert sealed(node) == [*range(1, LAST)], "version 5 stays, and is captured once"
    restored = node.events("state.restored")[-1].fields
    assert (restored["iteration"], restored["completed"], restored["lost"]) == (LIVED, LIVED, 0)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("reads from the beginning", "iteration 5 reads what iteration 1 read"),
        ("another seed", "differs from before the restore in: random numbers drawn"),
        ("another count", "schedules"),
        ("an element", "1 of 8 items of the state are not what they were: 0.weight:momentum_buffer (1 elem"),
        ("beside", "something begins again that is no part of the captured state"),
    ],
)
def test_what_is_not_as_it_was_is_named_before_anything_is_captured(node, lives, case, said):
    lives("beside" if case == "beside" else "lives", LIVED + 1)
    for _ in range(2):  # nothing is lost by it, and the next start tries again
        second = lives(case)
        assert second["error"].startswith("LoopError: rank 0: ") and said in second["error"], second
        assert node.events("resume.differed")[-1].fields["iteration"] == LIVED
    assert sealed(node) == [*range(1, LIVED + 1)]
    assert not node.events("resume.proven")
    if case != "beside":
        assert lives("continues")["done"] == [*range(LIVED, LAST + 1)]
        assert len(node.events("resume.proven")) == 1


def test_with_a_warning_alone_training_goes_on(node, lives):
    lives("beside", LIVED + 1)
    second = lives("beside", on_difference="warn")
    assert second["done"] == [*range(LIVED, LAST + 1)] and not second["error"]
    (unproven,) = node.events("resume.unproven")
    said = "differs: iteration 5 computed again on 1 rank, and 8 of 8 items differ by"
    assert unproven.fields["reason"].startswith(said)
    assert not node.events("resume.differed")[-1].fields["ending"]


def test_a_failure_within_the_proof_is_not_answered_by_another_one(node, lives):
    lives("lives", LIVED + 1)
    assert lives("dies in the proof")["done"] == []
    assert lives("continues", LIVED + 2)["done"] == [LIVED + 1, LIVED + 2]
    assert [event.fields["reason"] for event in node.events("resume.unproven")] == [
        "unproven: the job failed while iteration 5 was proven"
    ]
    lives("continues")
    assert [event.fields["iteration"] for event in node.events("resume.proven")] == [LIVED + 1]


def test_a_script_that_ends_in_order_at_an_iteration_does_not_end_there_again(node, lives):
    lives("ends in order", LIVED)
    assert lives("ends in order", LIVED + 1)["done"] == [LIVED + 1]
    third = lives("continues", LIVED + 1)  # the same end, so that nothing else differs
    assert third["done"] == [*range(LIVED + 2, LAST + 1)], third
    assert {event.fields["reason"] for event in node.events("resume.unproven")} == {
        f"unproven: training had ended in order after iteration {last}" for last in (LIVED, LIVED + 1)
    }


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        ({"prove": "off"}, "--ftp-prove off"),
        ({"resume": "before:5"}, "--ftp-resume before:5"),
        ({"reft": {"interval": 2}}, "there is no version of iteration 3"),
    ],
)
def test_what_is_not_computed_again_is_unproven_for_a_reason(node, lives, block, reason):
    lives("lives", LIVED, **({"reft": block["reft"]} if "reft" in block else {}))
    second = lives("continues", **block)
    assert second["done"] == [*range(LIVED, LAST + 1)]
    (unproven,) = node.events("resume.unproven")
    assert reason in unproven.fields["reason"]


def test_iterations_that_some_ranks_had_captured_prove_the_version_before_them(node, ranks):
    """One rank has lost its last version: what the other one recorded of it is compared."""
    node.start()
    lived = [node.run_dir] * 2
    ranks(_life, 2, lived, node.fence(), {}, "lives", LIVED + 1)
    segment = Segment(path_of(node.run_dir.parent.name, node.run_dir.name, 1))
    index = max((slot.version, slot.index) for slot in segment.slots() if slot.version)[1]
    segment.dirty(index, None, segment.header.token)
    segment.ledger.clear()  # as that of a substitute
    segment.close()
    found = ranks(_life, 2, lived, node.fence(), {}, "continues", LAST)
    assert [one["done"] for one in found] == [[*range(LIVED, LAST + 1)]] * 2
    (proven,) = node.events("resume.proven")
    assert "iteration 5 computed again, identical on 1 of 2 ranks" in proven.fields["reason"]
