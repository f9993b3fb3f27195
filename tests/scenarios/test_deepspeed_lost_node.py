"""A node of a DeepSpeed job is destroyed whole, a fresh one takes its place: it ends as the unfailed run, bit for bit.

Emulated nodes of one rank each: own agent, SMP, workers and network namespace; RAIM5 over three of them. ZeRO's shards
are this rank's alone, so that what is lost comes from parity; without ZeRO all ranks share one capture.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.deepspeed_runs import DeepSpeedConfiguration, DeepSpeedRun
from harness.emulated_nodes import network
from harness.forkserver import ForkServer, JobSpec
from harness.golden import assert_identical
from harness.multinode import BOUND, MultiNodeJob

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra [deepspeed]")

NODES = 3
ITERATIONS = 60  # so many that the node is lost in the middle of them
CONFIGURATIONS = (DeepSpeedConfiguration(NODES, 1), DeepSpeedConfiguration(NODES, 0, bf16=False))


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_a_lost_node_is_rebuilt_on_a_fresh_one(
    deepspeed_server: ForkServer, jobs: Callable[..., JobSpec], tmp_path: Path, configuration: DeepSpeedConfiguration
) -> None:
    folders = [tmp_path / "golden", tmp_path / "lost"]
    for folder in folders:
        folder.mkdir()
    golden = DeepSpeedRun("golden", folders[0], configuration, iterations=ITERATIONS)
    unfailed = deepspeed_server.start(golden.spec())
    assert unfailed.wait(BOUND)["status"] == "succeeded", unfailed.tail()
    run = DeepSpeedRun("lost", folders[1], configuration, {"reft": {}}, iterations=ITERATIONS)
    with network([11, 12, 13, 14]) as places:
        port = 29500 + CONFIGURATIONS.index(configuration)
        endpoint = ",".join(f"{place.address}:{port}" for place in places[:2])
        job = MultiNodeJob(deepspeed_server, jobs, run, NODES, NODES, endpoint)
        for index, place in enumerate(places[:NODES]):
            job.start(f"n{index}", place)
        job.until_committed(2)
        job.destroy("n1")
        fresh = job.start("s", places[NODES])
        job.wait()
    restored = [(event.fields["tier"], event.fields["iteration"] >= 2) for event in fresh.events("state.restored")]
    assert restored == [("node", True)]
    assert_identical(run, golden, NODES)
