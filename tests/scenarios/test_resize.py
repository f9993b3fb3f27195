"""No substitute comes for a lost node: the job goes on with fewer, from memory, and with all of them when one is back.

Real megatron-core at PP2, with and without TP2, on emulated nodes, each one replica: DP4 -> DP3 -> DP4. It ends as jobs
of these sizes end, bit for bit, that go on from each other by checkpoints of Megatron's own at the same iterations.
"""

from pathlib import Path

import pytest

from harness.emulated_nodes import network
from harness.golden import assert_identical
from harness.megatron_runs import MegatronConfiguration, MegatronRun
from harness.multinode import MultiNodeJob, until

REFERENCE = f"{Path(__file__).parent / 'framework_checkpoint.py'}:main"
ARGV = ("--order", "tp-cp-ep-pp-dp")
BATCH = ("--global-batch", "24")  # the least that both 3 and 4 replicas share equally, by micro-batches of 2
ITERATIONS = 30
PP = 2


@pytest.fixture(scope="module")
def places():
    with network([11, 12, 13, 14, 5]) as found:
        yield found


def resized(job):
    """The iteration at which state of another size was taken over, in this node's next incarnation."""
    found = until(job, lambda lines: any(e["name"] == "state.resharded" for e in lines))
    return int(next(e for e in reversed(found) if e["name"] == "state.resharded")["iteration"])


@pytest.mark.timeout(900)  # seven starts of all ranks, one after another: four minutes for 16 on two idle cores
@pytest.mark.parametrize(
    ("distributed", "tp"),
    [
        pytest.param(True, 1, id="distopt"),
        pytest.param(True, 2, id="distopt-tp2", marks=pytest.mark.all_configurations),
        pytest.param(False, 2, id="replicated-tp2", marks=pytest.mark.all_configurations),
    ],
)
def test_a_job_goes_on_with_fewer_nodes_and_again_with_all(jobs, tmp_path, places, distributed, tp):
    configuration = MegatronConfiguration(bf16=True, distributed_optimizer=distributed, interleaved=False)
    argv, per_node = (*ARGV, *BATCH, "--tp", str(tp)), tp * PP
    most, fewer = 4 * per_node, 3 * per_node
    killed = "resize.filling@rank=5,restart=1:kill"  # in the middle of being taken over: it is begun anew
    run = MegatronRun(
        "resize", tmp_path, configuration, protected=True, kills=killed, argv=argv, iterations=ITERATIONS, ranks=most
    )
    job = MultiNodeJob(jobs, run, 4, places[:4], "--reft-wait-seconds", "1", min_nodes=3)
    job.start_all()
    job.until_committed(4)
    job.destroy("n3")
    first = resized(job.nodes["n0"])
    job.until_committed(first + 2)
    fresh = job.start("s", places[4])
    second = resized(fresh)
    job.wait()
    assert 4 <= first < second < ITERATIONS
    for each in job.nodes.values():
        assert not each.events("state.lost")

    def reference(name, ranks, *words):
        folder = tmp_path / "reference"  # one loss log for all three
        found = MegatronRun(name, folder, configuration, argv=(*argv, *words), iterations=ITERATIONS)
        jobs.finish(found, entry=REFERENCE, nproc=ranks)
        return found

    four, three = tmp_path / "four", tmp_path / "three"
    reference("r1", most, "--stop-at", str(first), "--to-checkpoint", str(four))
    reference("r2", fewer, "--from-checkpoint", str(four), "--stop-at", str(second), "--to-checkpoint", str(three))
    last = reference("r3", most, "--from-checkpoint", str(three))
    assert_identical(run, last, most)
