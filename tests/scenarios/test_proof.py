"""Which restores are proven: modes, and points at which a rank is killed or a node is lost, with the verdict of each.

Whatever it is, the run ends as the unfailed one, bit for bit, and nothing is named that begins again.
"""

from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.claims import assert_restored
from harness.deepspeed_runs import DeepSpeedConfiguration, DeepSpeedRun
from harness.emulated_nodes import network
from harness.fsdp_runs import FsdpRun
from harness.golden import assert_identical
from harness.megatron_runs import HARDEST, MegatronConfiguration, MegatronRun
from harness.multinode import MultiNodeJob
from harness.shapes import JobShape

PROVEN = "proven: iteration"
UNKNOWN = (
    "unproven: no rank knows captured bytes of iteration"  # a rank that had sealed them is the one that was killed
)
NONE = "unproven: there is no version of iteration 3"
FAILED = "unproven: the job failed while iteration"
MOVED = "unproven: parts of it came from other nodes"
POINTS = {  # in which iteration; the verdict where each is captured, and where every other one is
    "iteration.forward": (6, (PROVEN, UNKNOWN), (UNKNOWN, NONE)),  # another rank may not be so far
    "update.begin": (6, (PROVEN,), (UNKNOWN,)),  # the fence: all ranks have sealed the version before
    "update.middle": (6, (PROVEN,), (UNKNOWN,)),
    "update.end": (6, (PROVEN,), (UNKNOWN,)),
    "capture.begin": (6, (PROVEN, UNKNOWN), (PROVEN, UNKNOWN)),
    "capture.seal.before": (4, (PROVEN, UNKNOWN), (PROVEN, UNKNOWN)),
    "capture.seal.after": (4, (PROVEN, UNKNOWN), (PROVEN, UNKNOWN, NONE)),
}
FP32 = MegatronConfiguration(bf16=False, distributed_optimizer=False, interleaved=False)
EDIT = ("--sync-policy", "edit", "--sync-tau", "2", "--sync-penalty-warmup", "1")
AUDIT = ("--paft", "--paft-mode", "audit", "--paft-audit-interval", "1")
EXPERTS = (f"{Path(__file__).with_name('own_experts.py')}:main", ("--experts-over", "2"))


def megatron(folder, protected, configuration=HARDEST, flags=(), protection=(), ranks=4):
    given = (*flags, *protection) if protected else flags
    return MegatronRun("run", folder, configuration, protected, flags=given, ranks=ranks)


def fsdp(folder, protected):
    return FsdpRun("run", folder, flags=("--reft",) if protected else ())


def deepspeed(folder, protected, configuration, more=()):
    return DeepSpeedRun("run", folder, configuration, {"reft": {}} if protected else {}, 1234, 7, *more)


MODES = {  # and every how many iterations a version is captured
    "megatron": (1, megatron),
    "interval": (2, partial(megatron, protection=("--reft-interval", "2"))),
    "paft": (1, partial(megatron, configuration=FP32, flags=AUDIT, ranks=8)),
    "edit": (2, partial(megatron, configuration=FP32, flags=EDIT, ranks=8)),
    "fsdp": (1, fsdp),
    "zero-2": (1, partial(deepspeed, configuration=DeepSpeedConfiguration(2, 2))),
    "pipeline": (1, partial(deepspeed, configuration=DeepSpeedConfiguration(4, 1, pp=2))),
    "experts": (1, partial(deepspeed, configuration=DeepSpeedConfiguration(2, 0, bf16=False), more=EXPERTS)),
}


@pytest.fixture(autouse=True)
def _installed(request):
    if request.node.name.partition("[")[2].startswith(("zero", "pipe", "expert")) and not find_spec("deepspeed"):
        pytest.skip("needs the extra [deepspeed]")


def verdicts(job):
    """What a node said of restores, in order; nothing that begins again was named."""
    assert not job.events("values.restarted") and not job.events("resume.differed"), job.tail()
    said = [event for name in ("resume.proven", "resume.unproven") for event in job.events(name)]
    return [event.fields["reason"] for event in sorted(said, key=lambda event: event.time)]


@pytest.mark.all_configurations
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("mode", MODES)
def test_a_rank_is_killed(jobs, golden, mode, point):
    every, make = MODES[mode]
    if make is fsdp and point in ("iteration.forward", "update.middle"):
        pytest.skip("loops of plain torch do not reach it")
    iteration, *expected = POINTS[point]
    run = make(jobs.folder, True).armed(f"{point}@iteration={iteration},rank=1,restart=0:kill")
    [verdict] = verdicts(jobs.finish(run, 1))
    assert verdict.startswith(expected[every - 1]), verdict
    assert_identical(run, golden(make(Path(), False)), run.ranks)


SHAPE, WIDE = JobShape(1, 2, 2, True, 30), JobShape(1, 2, 4, True, 30)
REDUNDANCY = {
    "raim5": (SHAPE, 4, ("--reft-redundancy", "raim5"), ("n2",)),
    "raim6": (WIDE, 4, ("--reft-redundancy", "raim6"), ("n0", "n2")),
    "copies": (SHAPE, 4, ("--reft-redundancy", "neighbour"), ("n1",)),
    "baft": (JobShape(1, 2, 2, True, 120), 4, ("--baft",), ("n1",)),
}


@pytest.fixture(scope="module")
def hosts():
    with network([11, 12, 13, 14, 15, 25]) as found:
        yield found


@pytest.mark.all_configurations
@pytest.mark.parametrize("mode", REDUNDANCY)
def test_a_node_is_lost(jobs, golden, tmp_path, hosts, mode):
    shape, count, flags, lost = REDUNDANCY[mode]
    run = shape.run("megatron", tmp_path / "run", flags, protected=True)
    with MultiNodeJob(jobs, run, count, hosts) as job:
        job.start_all()
        job.until_committed(14 if mode == "baft" else 3)
        for name in lost:
            job.destroy(name)
        fresh = [job.start(f"s{name}", hosts[at]) for name, at in zip(lost, (4, 5), strict=False)]
        job.wait()
        for one in fresh:
            assert_restored(one, "node", 3)
        verdict, *_ = (one for node in job.nodes.values() for one in verdicts(node))
    assert verdict.startswith((PROVEN, UNKNOWN, MOVED)), verdict
    known = f"identical on {run.ranks - len(lost) * run.ranks // count} of {run.ranks} ranks"
    assert known in verdict or not verdict.startswith(PROVEN), verdict
    assert_identical(run, golden(shape.run("megatron")), run.ranks)


@pytest.mark.all_configurations
def test_a_node_is_lost_while_a_restore_is_proven(jobs, golden, tmp_path, hosts):
    """A rank is killed; the iteration that is computed again is held on a node, which is lost then."""
    run = SHAPE.run("megatron", tmp_path / "run", REDUNDANCY["raim5"][2], protected=True)
    held = ";".join(f"update.middle@iteration=11,rank=2,restart={one}:stop" for one in (1, 2, 3))
    with MultiNodeJob(jobs, run, 4, hosts) as job:
        job.start_all({"n0": "update.middle@iteration=12,rank=0,restart=0:kill", "n2": held})
        job.until_rank_stopped("n2", 2, starts=2)
        job.destroy("n2")
        fresh = job.start("s", hosts[4])
        job.wait()
        assert_restored(fresh, "node", 5, 11)
        [verdict] = verdicts(job.nodes["n0"])
    assert verdict.startswith(FAILED), verdict
    assert_identical(run, golden(SHAPE.run("megatron")), run.ranks)
