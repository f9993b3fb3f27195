"""DeepSpeed jobs with MoE layers: experts are replicated over the ranks that have the same ones, and over no others."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.claims import assert_restored
from harness.deepspeed_runs import DeepSpeedConfiguration, DeepSpeedRun
from harness.emulated_nodes import network
from harness.golden import assert_identical
from harness.multinode import MultiNodeJob

SCRIPT = f"{Path(__file__).with_name('own_experts.py')}:main"

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra [deepspeed]")


CONFIGURATIONS = (
    (DeepSpeedConfiguration(4, 0, bf16=False), 2),
    (DeepSpeedConfiguration(2, 0, bf16=False), 2),
    (DeepSpeedConfiguration(4, 1), 2),
    (DeepSpeedConfiguration(4, 2), 2),
)


@pytest.mark.all_configurations
@pytest.mark.parametrize("configuration, over", CONFIGURATIONS, ids=str)
def test_experts_of_a_killed_job_end_as_those_of_the_unfailed_one(jobs, tmp_path, configuration, over):
    words = ("--experts-over", str(over))
    golden = DeepSpeedRun("golden", tmp_path / "golden", configuration, {}, 1234, 6, SCRIPT, words)
    jobs.finish(golden)
    kills = "update.begin@iteration=3,rank=1,restart=0:kill;update.middle@iteration=5,rank=0,restart=1:kill"
    run = replace(golden, name="killed", folder=tmp_path / "killed", block={"reft": {}, "faults": kills})
    jobs.finish(run, 2)
    assert_identical(run, golden, configuration.ranks)
    first, second = (golden.state(rank)["parameters"] for rank in (0, 1))
    expert = next(name for name in first if "deepspeed_experts" in name)
    assert first[expert] != second[expert] and first["norm.weight"] == second["norm.weight"]


@pytest.mark.all_configurations
def test_experts_of_a_node_that_is_lost_are_rebuilt(jobs, tmp_path):
    """Of four nodes, two each have the same experts, and all of them the rest of the model."""
    words = ("--experts-over", "2")
    golden = DeepSpeedRun("golden", tmp_path / "golden", CONFIGURATIONS[0][0], {}, 1234, 30, SCRIPT, words)
    jobs.finish(golden)
    run = replace(golden, name="run", folder=tmp_path / "run", block={"reft": {}})
    with network([11, 12, 13, 14, 25]) as hosts, MultiNodeJob(jobs, run, 4, hosts) as job:
        job.start_all()
        job.until_committed(2)
        job.destroy("n2")
        fresh = job.start("sn2", hosts[4])
        job.wait()
        assert_restored(fresh, "node", 2)
    assert_identical(run, golden, 4)
