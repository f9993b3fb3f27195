"""A node is lost for good, and the admissible sizes leave a gap: the surplus survivors are spares, and are asked.

Real megatron-core at TP2 x PP2 with a distributed optimizer on emulated nodes of two ranks each, so that a replica is
two nodes. One node is lost: of the six of DP3 four go on as DP2, the fifth waits; of the four of DP2 two go on as DP1,
at which no further loss could be survived. The lost node and the one that waits were of the same sharding groups: what
they held cannot be decoded without it. When a fresh node comes, both are taken in: nothing that the spare had counts.
"""

from pathlib import Path

import pytest

from ft_plugins.snapshot.segment.paths import previous_segments_of, segments_of
from harness.emulated_nodes import network
from harness.golden import assert_identical
from harness.job_control import wait_for
from harness.megatron_runs import MegatronConfiguration, MegatronRun
from harness.multinode import BOUND, MultiNodeJob

REFERENCE = f"{Path(__file__).parent / 'framework_checkpoint.py'}:main"
ARGV = ("--order", "tp-cp-ep-pp-dp", "--global-batch", "24")
ITERATIONS = 60
PER_NODE = 2


@pytest.fixture(scope="module")
def places():
    with network([21, 22, 23, 24, 25, 26]) as found:
        yield found


def event(job, name, seconds=BOUND):
    """The first event of that name on a node, waited for."""
    journal = job.spec.run_dir / "events.jsonl"
    found = wait_for(journal, lambda lines: any(entry["name"] == name for entry in lines), seconds)
    return next(entry for entry in found if entry["name"] == name)


@pytest.mark.all_configurations
@pytest.mark.parametrize(("before", "after", "again"), [(4, 2, True), (6, 4, False)])
def test_survivors_that_have_no_part_in_the_smaller_job_hand_out_what_they_hold(
    jobs, tmp_path, places, before, after, again
):
    configuration = MegatronConfiguration(bf16=True, distributed_optimizer=True, interleaved=False)
    ranks = before * PER_NODE
    run = MegatronRun("spares", tmp_path, configuration, True, argv=ARGV, iterations=ITERATIONS, ranks=ranks)
    job = MultiNodeJob(jobs, run, before, places[:before], "--reft-wait-seconds", "1", min_nodes=after)
    job.start_all()
    job.until_committed(4)
    job.destroy("n1")
    first = int(str(event(job.nodes["n0"], "state.resharded")["iteration"]))
    spare = job.nodes.pop(f"n{before - 1}")  # for its rank the round is too small
    assert event(spare, "spare.queried")["segments"] == PER_NODE
    assert event(spare, "spare.released")["segments"] == PER_NODE
    name = (spare.spec.run_dir.parent.name, spare.spec.run_dir.name)
    assert not segments_of(*name) and not previous_segments_of(*name), "its memory is given back while the job trains"
    assert int(str(event(spare, "spare.released")["lineage"])) > 1
    if again:
        fresh = job.start("s", places[before])
        second = int(str(event(fresh, "state.resharded")["iteration"]))
        assert first < second < ITERATIONS
    job.wait()
    assert spare.wait(BOUND)["status"] == "succeeded", spare.tail()
    assert 4 <= first < ITERATIONS
    for each in job.nodes.values():
        assert not each.events("state.lost")

    def reference(title, ranks, *words):
        folder = tmp_path / "reference"  # one loss log for both
        found = MegatronRun(title, folder, configuration, argv=(*ARGV, *words), iterations=ITERATIONS)
        jobs.finish(found, entry=REFERENCE, nproc=ranks)
        return found

    handed = tmp_path / "handed"
    reference("r1", before * PER_NODE, "--stop-at", str(first), "--to-checkpoint", str(handed))
    if not again:
        last = reference("r2", after * PER_NODE, "--from-checkpoint", str(handed))
        assert_identical(run, last, after * PER_NODE)
        return
    back = tmp_path / "back"
    to = ("--stop-at", str(second), "--to-checkpoint", str(back))
    reference("r2", after * PER_NODE, "--from-checkpoint", str(handed), *to)
    last = reference("r3", before * PER_NODE, "--from-checkpoint", str(back))
    assert_identical(run, last, before * PER_NODE)
