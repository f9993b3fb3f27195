"""DreamDDP: a job that is killed while layers are averaged equals an unfailed one with the same keys, bit for bit.

Golden runs average the same layers in the same iterations, and take no snapshots. Layers are averaged in iterations 1
to 3, 5 to 7 and 9, all of them after 4 and 8. Compared are all items of all ranks, all small state, all losses, and
which layers were averaged when.
"""

from importlib.util import find_spec

import pytest

from harness.averagings import averagings, reached
from harness.deepspeed_runs import DeepSpeedConfiguration, DeepSpeedRun
from harness.fsdp_runs import FsdpRun
from harness.golden import assert_identical
from harness.megatron_runs import MegatronConfiguration, MegatronRun

TAU, ITERATIONS = 4, 9
SYNC = {"policy": "dreamddp", "tau": TAU, "h": 2, "schedule": "equal"}
FLAGS = tuple(f"--sync-{key}={value}" for key, value in SYNC.items())
INSTANCES = ("--num-distributed-optimizer-instances", "2")


def deepspeed(configuration, **keys):
    def run(folder, versions, kills):
        protected = {"reft": {"versions": versions}, "faults": kills} if versions else {}
        return DeepSpeedRun("d", folder, configuration, {"sync": {**SYNC, **keys}, **protected}, iterations=ITERATIONS)

    return run


def fsdp(*argv):
    def run(folder, versions, kills):
        protected = ("--reft", "--reft-versions", versions) if versions else ()
        argv_of_run = ("--local", "--shards", "2", *argv)
        return FsdpRun("f", folder, argv_of_run, (*protected, *FLAGS, "--sync-shard-ranks", "2"), kills)

    return run


def megatron(configuration, *argv):
    def run(folder, versions, kills):
        flags = (*FLAGS, *(("--reft-versions", versions) if versions else ()))
        return MegatronRun(
            "m", folder, configuration, bool(versions), kills, flags=flags, argv=argv, iterations=ITERATIONS
        )

    return run


needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra [deepspeed]")
needs_megatron = pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra [megatron]")
JOBS = [
    pytest.param(4, fsdp(), id="fsdp"),
    pytest.param(
        4, deepspeed(DeepSpeedConfiguration(4, 0, bf16=False, pp=2)), id="deepspeed-pipeline",
        marks=needs_deepspeed,
    ),
    pytest.param(
        4, deepspeed(DeepSpeedConfiguration(4, 2, bf16=False), shard_ranks=2), id="deepspeed-zero2",
        marks=needs_deepspeed,
    ),
    pytest.param(8, megatron(MegatronConfiguration(False, False, False)), id="megatron-fp32",
                 marks=needs_megatron),
    pytest.param(8, megatron(MegatronConfiguration(True, True, True), *INSTANCES),
                 id="megatron-bf16-distopt-interleaved", marks=needs_megatron),
]  # fmt: skip


def synchronised(job):
    return {event.fields["iteration"] for event in job.events("replicas.synchronised")}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("ranks", "make"), JOBS)
def test_killed_while_layers_are_averaged_it_ends_as_the_unfailed_run(ranks, make, jobs, tmp_path):
    """Three kills: while layers are exchanged behind a backward, while they are applied before an update, and once more
    after the last synchronisation of all. Once with versions of synchronisations alone, and once with all."""
    whole = make(tmp_path / "golden", "", "")
    unfailed = jobs.finish(whole)
    expected = averagings([unfailed])
    assert {step for _, step in expected} == {1, 2, 3, 5, 6, 7, 9} and synchronised(unfailed) == {4, 8}

    def hit(rank, after, iteration):
        return reached(expected, TAU, rank, after, iteration)

    later = {
        "sync": (hit(0, 4, 7), hit(ranks - 2, 4, 9)),
        "every": (2, 3),  # it may go on after more than one iteration
    }
    for versions, (applied, exchanged) in later.items():
        kills = (
            f"sync.exchange@rank={ranks - 1},hit={hit(ranks - 1, 0, 6)},restart=0:kill;"
            f"sync.apply@rank=0,hit={applied},restart=1:kill;"
            f"sync.exchange@rank={ranks - 2},hit={exchanged},restart=2:kill"
        )
        run = make(tmp_path / versions, versions, kills)
        job = jobs.finish(run, 3)
        restored = {event.fields["iteration"] for event in job.events("state.restored")}
        assert restored <= ({4, 8} if versions == "sync" else {4, 5, 6, 7, 8}), restored
        assert_identical(run, whole, ranks)
        assert averagings([job]) == expected and synchronised(job) == {4, 8}
