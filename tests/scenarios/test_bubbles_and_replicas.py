"""BAFT beside what lets replicas differ, local SGD and PAFT's averaging: a lost node comes back with its
replica's own state, from copies that were sent in bubbles, and the job ends as the unfailed one.

Each emulated node holds one stage of one replica; n0 and n1 keep each other's copies, and so do n2 and n3.
"""

from importlib.util import find_spec

import pytest

from harness.claims import assert_restored
from harness.emulated_nodes import network
from harness.golden import assert_identical
from harness.multinode import MultiNodeJob
from harness.shapes import JobShape

SHAPE = JobShape(1, 2, 2, False, 120)
TAU = 3
LOCAL = ("--sync-policy", "edit", "--sync-tau", str(TAU), "--sync-warmup", "2", "--sync-penalty-warmup", "1")
EVERY = ("--reft", "--reft-versions", "every")
AVERAGED = ("--paft", "--paft-mode", "sync", "--paft-h", "4")
LINK_MBPS = "400"  # measured on a busy machine, it may be so low that a copy takes longer than the job
DRIFTING = "update.gradients@rank=2:gauss=0.001"  # what averaging is for: replicas of one parameter differ
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra [deepspeed]")


@pytest.fixture(scope="module")
def hosts():
    with network([11, 12, 13, 14, 25]) as found:
        yield found


@pytest.mark.parametrize(
    ("framework", "system", "protection", "committed"),
    [
        pytest.param("megatron", (*LOCAL, "--sync-apply", "wait"), EVERY, 14, id="local-sgd-every-iteration-megatron"),
        pytest.param("megatron", (*LOCAL, "--sync-apply", "update"), (), 15, id="local-sgd-megatron"),
        pytest.param("deepspeed", LOCAL, (), 15, id="local-sgd-deepspeed", marks=needs_deepspeed),
        pytest.param("megatron", AVERAGED, (), 14, id="averaging-megatron"),
        pytest.param("deepspeed", AVERAGED, (), 14, id="averaging-deepspeed", marks=needs_deepspeed),
    ],
)
def test_a_lost_node_gets_its_replicas_own_state_from_copies_in_bubbles(
    jobs, golden, tmp_path, hosts, framework, system, protection, committed
):
    noise = DRIFTING if system is AVERAGED else ""
    baft = ("--baft", "--baft-link-mbps", LINK_MBPS)
    run = SHAPE.run(framework, tmp_path / "run", (*baft, *protection, *system), protected=True).armed(noise)
    with MultiNodeJob(jobs, run, 4, hosts) as job:
        job.start_all()
        job.until_committed(committed)
        job.destroy("n3")
        fresh = job.start("s", hosts[-1])
        job.wait()
        assert_restored(fresh, "node", committed)
        assert any(event.fields["in_bubbles"] for event in job.events("version.committed"))
    assert_identical(run, golden(SHAPE.run(framework, flags=system).armed(noise)), run.ranks)
