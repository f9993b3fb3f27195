"""FSDP2, two replicas of two shards: a killed and resumed run equals an unfailed one, bit for bit.

Under EDiT golden runs train with the same policy and without REFT; without local SGD they run without the package. All
items of all ranks, all small state, the losses of rank 0 (evaluations included) and what each synchronisation left out
and clipped are compared. Synchronisations are after iterations 2, 4, 6 and 8; an evaluation is after 4 and 8.
"""

from pathlib import Path

import pytest

from harness.claims import restored, synchronisations
from harness.emulated_nodes import network
from harness.fsdp_runs import FsdpRun
from harness.golden import assert_identical
from harness.jobs import DETECT
from harness.multinode import BOUND, MultiNodeJob

RANKS = 4

# norms grow with the learning rate: some of those at 6 and 8 are outliers
EDIT = (
    *("--sync-policy", "edit", "--sync-tau", "2", "--sync-shard-ranks", "2", "--sync-penalty-warmup", "1"),
    *("--sync-alpha", "0.3", "--sync-threshold", "1.5", "--sync-clip", "0.02"),
)
LOCAL = ("--local", "--shards", "2")
FORWARD, WAIT, UPDATE = "tied-forward", "untied-bf16-offload-wait", "tied-update"
CONFIGURATIONS = {  # flags of the example and of ft-run
    FORWARD: (LOCAL, EDIT),
    WAIT: ((*LOCAL, "--untied", "--bf16"), (*EDIT, "--sync-apply", "wait", "--sync-offload")),
    UPDATE: (LOCAL, (*EDIT, "--sync-apply", "update")),
}
KILLS = (  # a rank exchanges and applies three modules one after another: root, and two blocks
    "update.begin@iteration=4,rank=3,restart=0:kill",  # between two synchronisations
    "sync.exchange@rank=3,hit=5,restart=1:kill",  # in the middle of exchanging the second one after the restart
    "sync.apply@rank=0,hit=5,restart=2:kill",  # in the middle of its outer step
)
# A version at a synchronisation that is in flight (update) begins with it once more; whether that one or the version
# before is sealed on all ranks when a rank is killed behind it, depends on how far they have come.
# Where the iteration before is computed again, to prove the restore, it synchronises again: the fifth exchange, and the
# fifth module, may come with the synchronisation before.
RESTORED = {
    "sync": ([{2}, {4}, {6}], [{2}, {2, 4}, {2, 4, 6}]),
    "every": ([{3}, {5}, {7}], [{3}, {3, 4, 5, 6}, {4, 5, 6, 7, 8}]),
}


def unfailed(name):
    return FsdpRun("golden", Path(), *CONFIGURATIONS[name])


@pytest.mark.parametrize("versions", RESTORED)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_killed_between_synchronisations_in_an_exchange_and_in_the_outer_step_it_ends_as_the_unfailed_run(
    golden, jobs, name, versions
):
    """With apply forward the exchange of iteration 6 runs in the forward of 7, and that of 8 in the evaluation; with
    update both run behind the next iteration."""
    argv, flags = CONFIGURATIONS[name]
    whole, expected = golden(unfailed(name)), synchronisations(golden.job(unfailed(name)))
    protected = ("--reft", "--reft-versions", versions, *flags)
    run = FsdpRun("killed", jobs.folder, argv, protected, ";".join(KILLS))
    job = jobs.finish(run, len(KILLS))
    possible = RESTORED[versions][name == UPDATE]
    assert all(one in those for one, those in zip(restored(job), possible, strict=True)), restored(job)
    assert_identical(run, whole, RANKS)
    assert synchronisations(job) == expected
    assert {iteration for _, iteration in expected} == {2, 4, 6, 8}
    assert any(one["left_out"] for one in expected.values()) and any(one["clipped"] for one in expected.values())


def test_replicas_differ_between_synchronisations_and_are_equal_after_the_last(jobs, tmp_path):
    """Else the test above would compare runs that never trained on their own."""
    equal = {}
    for iterations in (7, 8):
        run = FsdpRun("ends", tmp_path / str(iterations), LOCAL, (*EDIT, "--sync-apply", "wait"), "", iterations)
        jobs.finish(run)
        equal[iterations] = [run.items(shard) == run.items(shard + 2) and run.items(shard) for shard in (0, 1)]
    assert not any(equal[7]) and all(equal[8]) and equal[8][0] != equal[8][1]


@pytest.mark.parametrize(
    "argv", [("--shards", "2"), ("--shards", "4", "--bf16", "--untied")], ids=["hybrid", "sharded"]
)
def test_reft_alone_protects_a_job_that_is_killed_around_an_update(jobs, golden, argv):
    """Without local SGD, replicated by FSDP itself and not at all; golden is without the package."""
    kills = "update.begin@iteration=5,rank=3,restart=0:kill;update.end@iteration=7,rank=0,restart=1:kill"
    run = FsdpRun("killed", jobs.folder, argv, ("--reft",), kills)
    job = jobs.finish(run, 2)
    assert restored(job) == [4, 6]
    assert_identical(run, golden(FsdpRun("golden", Path(), argv)), RANKS)


def test_replicas_that_nothing_keeps_together_are_refused_at_start(jobs):
    """Their snapshots would take parts of each. The flag of the script is that of local SGD, which is not on."""
    outcome = jobs.start(FsdpRun("apart", jobs.folder, LOCAL, ("--reft",))).wait(BOUND)
    assert outcome["status"] == "refused", outcome
    assert "gradients are not averaged over the replicas" in outcome["reason"]


@pytest.mark.parametrize("nodes", [2, 4])
def test_a_node_that_is_lost_in_a_synchronisation_is_rebuilt_from_parity(golden, jobs, nodes):
    """Each replica on a node of its own, or each shard. RAIM5, version at a synchronisation: parameters and outer
    momentum have a replica elsewhere, the inner optimizer's state has none. The ranks of the node stop in the outer
    step of iteration 6, in the forward of 7; then it is destroyed."""
    argv, flags = CONFIGURATIONS[FORWARD]
    whole, expected = golden(unfailed(FORWARD)), synchronisations(golden.job(unfailed(FORWARD)))
    run = FsdpRun("lost", jobs.folder, argv, ("--reft", "--reft-redundancy", "raim5", *flags, DETECT, "15"))
    with (
        network([11, 12, 13, 14, 15]) as places,
        MultiNodeJob(jobs, run, nodes, places[: nodes + 1]) as job,
    ):
        job.start_all({"n1": "sync.apply@hit=8:stop"})
        job.until_rank_stopped("n1")
        job.until_committed(2)
        job.destroy("n1")
        fresh = job.start("s", places[nodes])
        job.wait()
    found = [(event.fields["tier"], event.fields["iteration"] in (2, 4)) for event in fresh.events("state.restored")]
    assert found == [("node", True)] * (RANKS // nodes)
    assert_identical(run, whole, RANKS)
    seen = synchronisations(*job.nodes.values())
    assert seen == {key: value for key, value in expected.items() if key in seen}
    assert {iteration for _, iteration in seen} >= {6, 8}
