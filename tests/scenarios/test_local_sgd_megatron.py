"""Local SGD on Megatron, TP2 x PP2 x DP2: a killed and resumed run equals an unfailed one, bit for bit.

Golden runs train with the same policy and without REFT. Synchronisations are after iterations 2, 4, 6 and 8; versions
are taken there. With apply forward a rank killed in the first forward of iteration 5 dies while replicas are being
synchronised; with apply update the synchronisation of iteration 4 is in flight.
"""

from pathlib import Path

import pytest

from harness.golden import assert_identical
from harness.megatron_runs import RANKS, MegatronConfiguration, MegatronRun

EDIT = ("--sync-policy", "edit", "--sync-tau", "2", "--sync-penalty-warmup", "1", "--sync-clip", "0.05")
INSTANCES = ("--num-distributed-optimizer-instances", "2")
KILLS = (
    "iteration.forward@iteration=5,rank=5,restart=0:kill;"  # in mid-synchronisation
    "iteration.forward@iteration=6,rank=3,restart=1:kill;"  # between two
    "sync.apply@rank=2,hit=2,restart=2:kill"  # in the outer step
)
FP32 = MegatronConfiguration(bf16=False, distributed_optimizer=False, interleaved=False)
BF16 = MegatronConfiguration(bf16=True, distributed_optimizer=False, interleaved=True)
SHARDED = MegatronConfiguration(bf16=True, distributed_optimizer=True, interleaved=False)
GATHERED = MegatronConfiguration(bf16=True, distributed_optimizer=True, interleaved=True, overlap_param_gather=True)


@pytest.mark.parametrize(
    ("configuration", "sync", "argv"),
    [
        pytest.param(FP32, ("--sync-apply", "forward"), (), id="fp32-replicated-forward"),
        pytest.param(BF16, ("--sync-apply", "update"), (), id="bf16-replicated-interleaved-update"),
        pytest.param(SHARDED, ("--sync-apply", "wait"), INSTANCES, id="bf16-distopt-wait"),
        pytest.param(GATHERED, ("--sync-apply", "update"), INSTANCES, id="bf16-distopt-interleaved-overlap-update"),
        pytest.param(BF16, ("--sync-apply", "forward"), (), id="bf16-replicated-interleaved-forward"),
        pytest.param(GATHERED, ("--sync-apply", "forward"), INSTANCES, id="bf16-distopt-interleaved-overlap-forward"),
    ],
)
@pytest.mark.parametrize("versions", ["sync", "every"])
def test_killed_between_synchronisations_and_in_one_it_ends_as_the_unfailed_run(
    jobs, golden, configuration, sync, argv, versions
):
    flags = (*EDIT, *sync)
    whole = golden(MegatronRun("golden", Path(), configuration, flags=flags, argv=argv))
    protected = (*flags, "--reft-versions", versions)
    run = MegatronRun("local", jobs.folder, configuration, True, KILLS, flags=protected, argv=argv)
    job = jobs.finish(run, 3)
    assert_identical(run, whole, RANKS)
    found = {event.fields["iteration"] for event in job.events("state.restored")}
    assert found <= ({2, 4, 6} if versions == "sync" else {3, 4, 5, 6}), found
    rounds = {event.fields["iteration"] for event in job.events("replicas.synchronised")}
    assert rounds == {2, 4, 6, 8}


def test_replicas_differ_between_synchronisations_and_are_equal_after_the_last(jobs):
    """Else the tests above would compare runs that never trained on their own."""
    ends = {}
    for name, iterations in (("apart", 7), ("equal", 8)):
        flags = (*EDIT, "--sync-apply", "wait")
        ends[name] = MegatronRun(name, jobs.folder / name, FP32, flags=flags, iterations=iterations)
        jobs.finish(ends[name])
    assert ends["equal"].items(0) == ends["equal"].items(2), "TP and PP index of ranks 0 and 2 are equal"
    apart = ends["apart"].items(0), ends["apart"].items(2)
    assert apart[0].keys() == apart[1].keys() and all(apart[0][name] != apart[1][name] for name in apart[0])
