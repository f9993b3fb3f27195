"""apex's optimizers under DeepSpeed and Megatron: a killed job ends as the unfailed one. Runs where APEX_PATH names
a checkout; nothing of it is built.
"""

from dataclasses import replace
from importlib.util import find_spec

import pytest

from harness import apex_jobs
from harness.deepspeed_runs import DeepSpeedConfiguration, DeepSpeedRun
from harness.golden import assert_identical
from harness.megatron_runs import MegatronConfiguration, MegatronRun

pytestmark = [
    pytest.mark.all_configurations,
    pytest.mark.skipif(not apex_jobs.available(), reason="set APEX_PATH"),
]
KILLS = "iteration.forward@iteration=4,rank=1,restart=0:kill;update.middle@iteration=5,rank=0,restart=1:kill"
SETTING = {  # that no other one of them has in its groups
    **{"FusedAdam": "bias_correction", "FusedLAMB": "max_grad_norm"},
    **{"FusedSGD": "nesterov", "FusedNovoGrad": "norm_type"},
}


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra [deepspeed]")
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("kind", apex_jobs.KINDS)
def test_under_deepspeed(jobs, tmp_path, kind, stage):
    configuration = DeepSpeedConfiguration(2, stage, bf16=bool(stage), untested=True, sub_group_size=8_000)
    words, script = ("--apex", kind), "harness.apex_jobs:deepspeed_example"
    golden = DeepSpeedRun("golden", tmp_path / "golden", configuration, script=script, words=words)
    jobs.finish(golden)
    run = replace(golden, name="killed", folder=tmp_path / "killed", block={"reft": {}, "faults": KILLS})
    jobs.finish(run, 2)
    assert_identical(run, golden, configuration.ranks)
    assert SETTING[kind] in golden.state(0)["small"]["groups"][0]


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra [megatron]")
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", apex_jobs.KINDS)
def test_under_megatron(jobs, tmp_path, kind, bf16):
    configuration = MegatronConfiguration(bf16, False, False, sgd=kind != "FusedAdam")
    entry = "harness.apex_jobs:megatron_example"
    golden = MegatronRun("golden", tmp_path / "golden", configuration, argv=("--apex", kind))
    jobs.finish(golden, entry=entry)
    run = replace(golden, name="killed", folder=tmp_path / "killed", protected=True, kills=KILLS)
    jobs.finish(run, 2, entry=entry)
    assert_identical(run, golden, run.ranks)
    assert SETTING[kind] in str(golden.state(0)["small"]["groups"])
