"""Megatron's precision-aware optimizer, its optimizer CPU offload, and fp8 parameters, on a CPU: a killed job ends as
the unfailed one, and the restore is proven. Runs where TRANSFORMER_ENGINE_PATH names a checkout (v2.9); nothing of it
is built.
"""

from dataclasses import replace
from importlib.util import find_spec

import pytest

from harness import transformer_engine_jobs
from harness.claims import assert_proven
from harness.golden import assert_identical
from harness.megatron_runs import MegatronConfiguration, MegatronRun

pytestmark = [
    pytest.mark.all_configurations,
    pytest.mark.skipif(not transformer_engine_jobs.available(), reason="set TRANSFORMER_ENGINE_PATH"),
    pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra [megatron]"),
]
ENTRY = "harness.transformer_engine_jobs:megatron_example"
KILLS = "iteration.forward@iteration=4,rank=1,restart=0:kill;update.middle@iteration=5,rank=0,restart=1:kill"
KEPT = {  # what of each is captured next to masters and moments, or in another form
    "remainders": (":master_param",),
    "scaled": (":exp_avg:scale", ":master_param:scale"),
    **dict.fromkeys(("delayed", "delayed_alone"), (".engine.scaling_fwd.scale", ".engine.scaling_bwd.amax_history")),
}


CASES = {  # whether the gather of parameters overlaps the forward
    **{"remainders": (True,), "scaled": (False,), "offload": (True,)},
    **{"tensorwise": (True,), "blockwise": (False,), "mxfp8": (True, False)},
    **{"delayed": (True,), "delayed_alone": (False,)},
}


@pytest.mark.parametrize(("kept", "overlap"), [(kept, one) for kept, each in CASES.items() for one in each])
def test_killed_in_forward_and_in_the_update_it_ends_as_the_unfailed_run(jobs, tmp_path, kept, overlap):
    words, forms = ("--state", kept, "--tp", "1", "--layers", "4" if overlap else "2"), (True, True, overlap, overlap)
    golden = MegatronRun("golden", tmp_path / "golden", MegatronConfiguration(*forms), argv=words, ranks=4)
    jobs.finish(golden, entry=ENTRY)
    run = replace(golden, name="killed", folder=tmp_path / "killed", protected=True, kills=KILLS)
    job = jobs.finish(run, 2, entry=ENTRY)
    assert_proven(job, "no rank knows captured bytes of iteration")
    assert job.events("resume.proven")
    assert_identical(run, golden, run.ranks)
    items = golden.state(0)["items"]
    assert any(name.endswith(":main") for name in items)
    assert all(any(name.endswith(end) for name in items) for end in KEPT.get(kept, ()))
