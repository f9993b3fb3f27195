"""An unmodified Megatron-LM checkout on two nodes, one of which is lost: it ends in the checkpoint of an unfailed run.

Runs where MEGATRON_LM_PATH names a checkout of core_v0.16.1. TP2 x PP2 x DP2, four ranks per node. By Megatron's usual
order each pipeline spans both nodes, with `--use-tp-pp-dp-mapping` each sharding group does.
"""

import time
from dataclasses import dataclass

import pytest

from ft_plugins.rehearse.driver import DrivenJob, DrivePhase
from harness.megatron_checkpoints import differences
from harness.megatron_lm import RUN_SECONDS, SETTINGS, ft_run

from .test_megatron_lm import HARDEST, JOB, final_state

pytestmark = pytest.mark.timeout(1200)

LOST_FROM = 4  # the iteration that must be committed before the node is lost


@dataclass(frozen=True)
class Protection:
    """Megatron's flags of a job, and ours."""

    name: str
    megatron: tuple[str, ...]
    ours: tuple[str, ...]
    iterations: int = 14


CASES = (
    Protection(
        "parity",
        (*HARDEST, "--use-tp-pp-dp-mapping"),
        ("--reft", "--reft-interval", "1", "--reft-redundancy", "raim5"),
    ),
    Protection("bubbles", ("--bf16", "--use-distributed-optimizer"), ("--baft",), 60),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_lost_node_is_replaced_and_the_run_ends_in_the_checkpoint_of_an_unfailed_one(
    checkout, corpus, tmp_path, monkeypatch, case
):
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    script = [checkout / "pretrain_gpt.py", *JOB, *case.megatron, "--data-path", corpus]
    script += ["--train-iters", case.iterations, "--save-interval", 100]
    unfailed, saved = tmp_path / "unfailed", tmp_path / "saved"
    ft_run(script, unfailed, "--save", unfailed, job=f"unfailed-{case.name}").require_success()

    reported = lose_a_node([*script, "--save", saved, *case.ours], tmp_path / "job", case)

    rebuilt = [event for event in reported if event.name == "slot.rebuilt"]
    assert sorted(event.fields["about"] for event in rebuilt) == [4, 5, 6, 7], "the shares of the lost node"
    restored = [(event.rank, event.fields["iteration"]) for event in reported if event.name == "state.restored"][:8]
    assert sorted(rank for rank, _ in restored) == list(range(8))
    (iteration,) = {iteration for _, iteration in restored}
    assert LOST_FROM <= iteration < case.iterations
    differing = differences(final_state(unfailed, case.iterations), final_state(saved, case.iterations))
    assert [each for each in differing if "/args/local_rank:" not in each] == [], "that alone is a fact of the node"


def lose_a_node(words, folder, case, on_node=4):
    """Run ft-run on two nodes of so many ranks, lose the second one and replace it. Returns the events of all nodes."""
    command = [str(word) for word in ("--nproc-per-node", on_node, *words)]
    folder.mkdir()
    with DrivenJob(f"nodes-{case.name}", command, folder, folder / "none", case.iterations, nodes=2) as running:
        deadline = time.monotonic() + RUN_SECONDS
        lost = False
        while running.follow(0.1, RUN_SECONDS).phase is not DrivePhase.DONE:
            assert time.monotonic() < deadline, running.tail(60)
            committed = [e.fields["iteration"] for e in running.events() if e.name == "version.committed"]
            if not lost and max(committed, default=0) >= LOST_FROM:
                running.kill_node()
                lost = True
        assert lost, "the job ended before its node was lost"
        return running.events()
