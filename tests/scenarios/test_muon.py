"""Megatron's Muon, on all replicas and divided over them by parameter: a killed job ends as the unfailed one. Runs
where EMERGING_OPTIMIZERS_PATH names a checkout; nothing of it is built.
"""

from dataclasses import replace
from importlib.util import find_spec

import pytest

from harness import muon_jobs
from harness.golden import assert_identical
from harness.megatron_runs import MegatronConfiguration, MegatronRun

pytestmark = [
    pytest.mark.all_configurations,
    pytest.mark.skipif(not muon_jobs.available(), reason="set EMERGING_OPTIMIZERS_PATH"),
    pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra [megatron]"),
]
ENTRY = "harness.muon_jobs:megatron_example"
KILLS = "iteration.forward@iteration=4,rank=1,restart=0:kill;update.middle@iteration=5,rank=0,restart=1:kill"


class WithoutScaler(MegatronConfiguration):
    """Muon's optimizers have no loss scaler, whatever the precision."""

    has_scaler = False


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", muon_jobs.KINDS)
def test_killed_in_forward_and_in_the_update_it_ends_as_the_unfailed_run(jobs, tmp_path, kind, bf16):
    configuration = WithoutScaler(bf16, False, False)
    golden = MegatronRun("golden", tmp_path / "golden", configuration, argv=("--muon", kind))
    jobs.finish(golden, entry=ENTRY)
    run = replace(golden, name="killed", folder=tmp_path / "killed", protected=True, kills=KILLS)
    jobs.finish(run, 2, entry=ENTRY)
    assert_identical(run, golden, run.ranks)
    own, replica = ({name for name in golden.state(rank)["items"] if "momentum" in name} for rank in (0, 2))
    assert own and replica and (not own & replica if kind == "dist_muon" else own == replica)
