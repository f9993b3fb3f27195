"""DeepSpeed's curricula, random-LTD and progressive layer drop go on in a killed job as they would have."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.deepspeed_runs import DeepSpeedConfiguration, DeepSpeedRun
from harness.golden import assert_identical

SCRIPT = f"{Path(__file__).with_name('efficient.py')}:main"
NEEDED = {"layer_drop": "deepspeed.runtime.progressive_layer_drop"}  # module that has the feature

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra [deepspeed]")


@pytest.mark.all_configurations
@pytest.mark.parametrize("feature", ["sampling", "random_ltd", "layer_drop"])
def test_its_schedule_goes_on_where_it_was(jobs, tmp_path, feature):
    if find_spec(NEEDED.get(feature, "deepspeed")) is None:
        pytest.skip(f"this DeepSpeed has no {feature}")
    words = ("--feature", feature)
    golden = DeepSpeedRun("golden", tmp_path / "golden", DeepSpeedConfiguration(2, 1), {}, 1234, 8, SCRIPT, words)
    jobs.finish(golden)
    kills = "update.begin@iteration=4,rank=1,restart=0:kill;iteration.forward@iteration=7,rank=0,restart=1:kill"
    run = replace(golden, name="killed", folder=tmp_path / "killed", block={"reft": {}, "faults": kills})
    job = jobs.finish(run, 2)
    assert_identical(run, golden, 2)
    said = job.log.read_text()
    assert "read again and dropped" not in said, "batches are skipped, not read"
