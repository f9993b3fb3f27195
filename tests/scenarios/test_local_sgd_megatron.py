"""Local SGD on Megatron, TP2 x PP2 x DP2: a killed and resumed run equals an unfailed one, bit for bit.

Golden runs train with the same policy and without REFT. Synchronisations are after iterations 2, 4, 6 and 8; versions
are taken there. With apply forward a rank killed in the first forward of iteration 5 dies while replicas are being
synchronised; with apply update the synchronisation of iteration 4 is in flight.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.forkserver import ForkServer, JobSpec
from harness.golden import explain, loss_differences, state_differences
from harness.megatron_runs import RANKS, MegatronConfiguration, MegatronRun

Spec = Callable[..., JobSpec]
BOUND = 240
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


def named(jobs: Spec, run: MegatronRun) -> JobSpec:
    """The job of a run, with a name and a run directory of its own: with local SGD it has a snapshot process, too."""
    return jobs(**{**vars(run.spec()), "name": f"m{os.getpid()}-{abs(hash(run.folder)) % 10**6}"})


@pytest.mark.parametrize(
    ("configuration", "sync", "argv"),
    [
        pytest.param(FP32, ("--sync-apply", "forward"), (), id="fp32-replicated-forward"),
        pytest.param(BF16, ("--sync-apply", "update"), (), id="bf16-replicated-interleaved-update"),
        pytest.param(SHARDED, ("--sync-apply", "wait"), INSTANCES, id="bf16-distopt-wait"),
        pytest.param(GATHERED, ("--sync-apply", "update"), INSTANCES, id="bf16-distopt-interleaved-overlap-update"),
    ],
)
@pytest.mark.parametrize("versions", ["sync", "every"])
def test_killed_between_synchronisations_and_in_one_it_ends_as_the_unfailed_run(
    megatron_server: ForkServer,
    jobs: Spec,
    tmp_path: Path,
    configuration: MegatronConfiguration,
    sync: tuple[str, ...],
    argv: tuple[str, ...],
    versions: str,
) -> None:
    flags = (*EDIT, *sync)
    (tmp_path / "golden").mkdir()
    golden = MegatronRun("golden", tmp_path / "golden", configuration, flags=flags, argv=argv)
    unfailed = megatron_server.start(named(jobs, golden))
    assert unfailed.wait(BOUND)["status"] == "succeeded", unfailed.tail()

    protected = (*flags, "--reft-versions", versions)
    run = MegatronRun("local", tmp_path, configuration, protected=True, kills=KILLS, flags=protected, argv=argv)
    job = megatron_server.start(named(jobs, run))
    outcome = job.wait(BOUND)
    assert outcome["status"] == "succeeded", f"{outcome}\n{job.tail()}"
    assert outcome["restarts"] == 3
    found = state_differences(run.digests, golden.digests, RANKS) + loss_differences(run.loss_log, golden.loss_log)
    assert not found, explain(found)
    restored = {event.fields["iteration"] for event in job.events("state.restored")}
    assert restored <= ({2, 4, 6} if versions == "sync" else {3, 4, 5, 6}), restored
    rounds = {event.fields["iteration"] for event in job.events("replicas.synchronised")}
    assert rounds == {2, 4, 6, 8}


def test_replicas_differ_between_synchronisations_and_are_equal_after_the_last(
    megatron_server: ForkServer, jobs: Spec, tmp_path: Path
) -> None:
    """Else the tests above would compare runs that never trained on their own."""
    ends = {}
    for name, iterations in (("apart", 7), ("equal", 8)):
        (tmp_path / name).mkdir()
        flags = (*EDIT, "--sync-apply", "wait")
        run = MegatronRun(name, tmp_path / name, FP32, flags=flags, iterations=iterations)
        job = megatron_server.start(named(jobs, run))
        assert job.wait(BOUND)["status"] == "succeeded", job.tail()
        ends[name] = run
    assert parameters(ends["equal"], 0) == parameters(ends["equal"], 2), "TP and PP index of ranks 0 and 2 are equal"
    apart = parameters(ends["apart"], 0), parameters(ends["apart"], 2)
    assert apart[0].keys() == apart[1].keys() and all(apart[0][name] != apart[1][name] for name in apart[0])


def parameters(run: MegatronRun, rank: int) -> dict[str, object]:
    """Digests of a rank's parameters at the end, by name."""
    state = json.loads(Path(f"{run.digests}{rank:05d}.json").read_text())
    return {name: digest for name, digest in state["items"].items() if ":" not in name}
