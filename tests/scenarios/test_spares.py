"""A node is lost for good, and the admissible sizes leave a gap: the surplus survivors are spares, and are asked.

Real megatron-core at TP2 x PP2 with a distributed optimizer on emulated nodes of two ranks each, so that a replica is
two nodes: DP3 on six nodes, one of which is lost; DP2 on four, the fifth waits. Part of the state is on that one alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ft_plugins.rig.forkserver import ForkServer, RunningJob
from ft_plugins.rig.golden import assert_identical
from ft_plugins.rig.gpt_runs import Configuration, GptRun
from ft_plugins.rig.journal import wait_for
from ft_plugins.rig.multinode import BOUND, MultiNodeJob, Spec
from ft_plugins.rig.nodes import Place, network
from ft_plugins.snapshot.segment import former_segments_of, segments_of

REFERENCE = f"{Path(__file__).parent / 'framework_checkpoint.py'}:main"
ARGV = ("--order", "tp-cp-ep-pp-dp", "--global-batch", "24")
ITERATIONS = 40
PER_NODE = 2


@pytest.fixture(scope="module")
def places() -> Iterator[list[Place]]:
    with network([21, 22, 23, 24, 25, 26]) as found:
        yield found


def event(job: RunningJob, name: str, seconds: float = BOUND) -> dict[str, object]:
    """The first event of that name on a node, waited for."""
    journal = job.spec.run_dir / "events.jsonl"
    found = wait_for(journal, lambda lines: any(entry["name"] == name for entry in lines), seconds)
    return next(entry for entry in found if entry["name"] == name)


@pytest.mark.all_configurations
def test_survivors_that_have_no_part_in_the_smaller_job_hand_out_what_they_hold(
    megatron_server: ForkServer, jobs: Spec, tmp_path: Path, places: list[Place]
) -> None:
    configuration = Configuration(bf16=True, distributed_optimizer=True, interleaved=False)
    run = GptRun("spares", tmp_path, configuration, protected=True, argv=ARGV, iterations=ITERATIONS)
    endpoint = ",".join(f"{place.address}:29430" for place in places)
    job = MultiNodeJob(megatron_server, jobs, run, 6 * PER_NODE, 6, endpoint, "--reft-wait-seconds", "1", min_nodes=4)
    for index, at in enumerate(places):
        job.start(f"n{index}", at)
    job.until_counts(4)
    job.destroy("n5")
    first = int(str(event(job.nodes["n0"], "restore.resized")["iteration"]))
    spare = job.nodes.pop("n4")
    assert event(spare, "spare.asked")["segments"] == PER_NODE
    assert event(spare, "spare.released")["segments"] == PER_NODE
    name = (spare.spec.run_dir.parent.name, spare.spec.run_dir.name)
    assert not segments_of(*name) and not former_segments_of(*name), "its memory is given back while the job trains"
    job.wait()
    assert spare.wait(BOUND)["status"] == "succeeded", spare.tail()
    assert 4 <= first < ITERATIONS
    counted = [found.fields["iteration"] for found in job.nodes["n0"].events("node.counts")]
    settled = event(spare, "spare.released")["lineage"]
    assert settled > 1 and max(counted) > first
    for each in job.nodes.values():
        assert not [found for found in each.events("restore.scratch") if found.fields["completed"]]

    folder = tmp_path / "reference"  # one loss log for both
    folder.mkdir()

    def reference(title: str, ranks: int, *words: str) -> GptRun:
        found = GptRun(title, folder, configuration, argv=(*ARGV, *words), iterations=ITERATIONS)
        started = megatron_server.start(found.spec(entry=REFERENCE, nproc=ranks))
        assert started.wait(BOUND)["status"] == "succeeded", started.tail()
        return found

    three = tmp_path / "three"
    reference("r1", 6 * PER_NODE, "--stop-at", str(first), "--to-checkpoint", str(three))
    last = reference("r2", 4 * PER_NODE, "--from-checkpoint", str(three))
    assert_identical(run, last, 4 * PER_NODE)
