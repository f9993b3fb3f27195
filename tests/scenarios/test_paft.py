"""Silent errors in real jobs: found, named with rank, layer and iteration, repaired or averaged away, and not seen in
the end: where a clean end is promised, it equals that of a run without any system and any fault, bit for bit.

Replicas are pure data parallelism but where a story says otherwise. In bf16 three things are replicated: masters,
moments, and the copies that ranks compute with; sharded, the copies alone.
"""

import re
from dataclasses import dataclass, replace

import pytest

from harness.deepspeed_runs import DeepSpeedConfiguration, DeepSpeedRun
from harness.golden import assert_identical, explain, loss_differences, state_differences
from harness.jobs import Goldens, Jobs
from harness.megatron_runs import MegatronConfiguration, MegatronRun
from harness.shapes import FRAMEWORKS, JobShape

ITERATIONS = 7
# after these nothing is evaluated, of replicas as they are before the verdict, and no update is skipped
QUIET = {"megatron": (2, 4, ITERATIONS), "deepspeed": (3, 5, ITERATIONS)}
AUDIT = ("--paft", "--paft-mode", "audit", "--paft-audit-interval")
NOISE = "update.gradients:gauss=0.001"
DYN = ("--paft", "--paft-h", "3", "--paft-h-min", "2", "--paft-h-max", "3")


def shape(dp, sharded=False, tp=1, pp=1):
    return JobShape(tp, pp, dp, sharded, ITERATIONS)


@dataclass
class Bench:
    """The jobs of a framework."""

    framework: str
    jobs: Jobs
    golden: Goldens
    clipping: bool = True

    def run(self, of, *flags, protected=False, faults="", name="run"):
        found = of.run(self.framework, self.jobs.folder / name, flags, protected).armed(faults)
        if isinstance(found, DeepSpeedRun) and not self.clipping:
            return replace(found, configuration=replace(found.configuration, clipping=0.0))
        return found

    def finish(self, run):
        return self.jobs.finish(run, None)

    def clean(self, of):
        """The run without systems and faults."""
        return self.golden(self.run(of))


@pytest.fixture(params=FRAMEWORKS)
def bench(request, jobs, golden):
    if request.param == "deepspeed":
        pytest.importorskip("deepspeed", reason="needs the extra [deepspeed]")
    return Bench(request.param, jobs, golden)


def once(job, name):
    """The one event of that name."""
    (event,) = job.events(name)
    return {**event.fields, "rank": event.rank}


def agree(run, ranks):
    """Whether these ranks have ended with the same items and parameters."""
    ends = [run.state(rank) for rank in ranks]
    return all((end["items"], end["parameters"]) == (ends[0]["items"], ends[0]["parameters"]) for end in ends)


def assert_same(run, clean, ranks):
    """The same end, but for what a replica has counted: an update that it alone has skipped was skipped."""
    found = state_differences(run.digests, clean.digests, ranks) + loss_differences(run.loss_log, clean.loss_log)
    found = [line for line in found if "skipped_updates" not in line]
    assert not found, explain(found)


# ------------------------------------------------------------------------------------------------ four replicas


FLIPS = {
    "parameters": "update.parameters@iteration={at},rank=2:flip=20~5",
    "copies": "update.copies@iteration={at},rank=2:flip=12~5",
    "gradients": "update.gradients@iteration={at},rank=2:flip=26~6",
    "nan": "update.gradients@iteration={at},rank=2:nan",
}


@pytest.mark.parametrize(
    "flipped", ["parameters", *(pytest.param(one, marks=pytest.mark.all_configurations) for one in list(FLIPS)[1:])]
)
def test_a_flipped_bit_is_named_and_repaired_and_the_run_ends_as_the_clean_one(bench, flipped):
    if (bench.framework, flipped) == ("deepspeed", "copies"):
        pytest.skip("without ZeRO these jobs are fp32, and compute with what the optimizer holds")
    if bench.framework == "deepspeed" and flipped in ("gradients", "nan"):
        bench.clipping = False  # it clips all replicas by the mean of their norms
    four = shape(4)
    clean = bench.clean(four)
    at = QUIET[bench.framework][1]
    run = bench.run(four, *AUDIT, "1", faults=FLIPS[flipped].format(at=at))
    job = bench.finish(run)
    struck, told = once(job, "fault.injected"), once(job, "audit.failed")
    assert (told["iteration"], told["ranks"], told["majority"]) == (at, [2], True)
    assert "rank 2 of 4 wrong in bucket" in told["reason"]
    layer = re.search(r"(?P<megatron>(?<=layers\.)\d+)|^(?P<deepspeed>\d+)", struck["item"])
    layers = [] if layer is None else [int(layer[0]) + (layer.lastgroup == "megatron")]  # which counts them from 1
    if "gradients" in struck["point"] and bench.framework == "megatron":
        assert set(layers) < set(told["layers"]), "wrong in one place, all of this replica is clipped by another norm"
    else:
        assert told["layers"] == layers
    assert_same(run, clean, 4)
    said = job.log.read_text()
    assert "audit.failed" in said, "said to whoever looks at the job"
    assert ("DeepSpeed clips by the mean" in said) == (bench.framework == "deepspeed" and bench.clipping)


# ------------------------------------------------------------------------------------------------ two replicas


def test_two_that_differ_are_averaged(bench):
    two = shape(2)
    clean = bench.clean(two)
    run = bench.run(two, *AUDIT, "1", faults="update.parameters@iteration=4,rank=1:flip=20~5")
    told = once(bench.finish(run), "audit.failed")
    assert (told["iteration"], told["ranks"], told["majority"]) == (4, [0, 1], False)
    assert "one of these two" in told["reason"] and agree(run, range(2))
    assert state_differences(run.digests, clean.digests, 2), "one of the two was right, and nobody knows which"


@pytest.mark.all_configurations
def test_two_that_differ_send_the_job_back_to_where_they_agreed_and_it_ends_as_the_clean_one(bench):
    two = shape(2)
    clean = bench.clean(two)
    flip = "update.parameters@iteration=4,rank=1,restart=0:flip=20~5"
    run = bench.run(two, *AUDIT, "1", "--paft-on-corruption", "rollback", protected=True, faults=flip)
    job = bench.finish(run)
    assert once(job, "audit.failed")["ranks"] == [0, 1]
    assert {event.fields["iteration"] for event in job.events("state.restored")} == {3}
    assert_identical(run, clean, 2)


# ------------------------------------------------------------------------------------------------ shards


@pytest.mark.parametrize("dp", [2, pytest.param(4, marks=pytest.mark.all_configurations)])
def test_a_wrong_copy_of_shards_is_found_and_gathered_anew(bench, dp):
    sharded = shape(dp, sharded=True)
    clean = bench.clean(sharded)
    at = QUIET[bench.framework][1]
    run = bench.run(sharded, *AUDIT, "1", faults=f"update.copies@iteration={at},rank=1:flip=12~5")
    job = bench.finish(run)
    told = once(job, "audit.failed")
    assert told["iteration"] == at and told["ranks"] == ([0, 1] if dp == 2 else [1]) and ", copy (" in told["reason"]
    assert_identical(run, clean, dp)
    assert "an error in one reaches all replicas in the same way" in job.log.read_text(), "limits are said at start"


@pytest.mark.all_configurations
@pytest.mark.parametrize("bf16, overlap", [(False, False), (False, True), (True, True)])
def test_what_is_gathered_is_compared_also_if_it_would_be_gathered_in_the_next_forward(jobs, golden, bf16, overlap):
    """Rank 1 is wrong six times, in its own shard or elsewhere. Of fp32 shards the gathered parameters are replicas,
    and a majority repairs the shard itself: gathering again would spread what is wrong in it."""
    flips = ";".join(f"update.copies@iteration={step},rank=1:flip={12 if bf16 else 20}~{step}" for step in range(2, 8))
    sharded = MegatronConfiguration(bf16, True, False, overlap)
    clean = MegatronRun("clean", jobs.folder, sharded, argv=("--tp", "1", "--pp", "1"), ranks=4)
    wrong = replace(clean, flags=(*AUDIT, "1")).armed(flips)
    job = jobs.finish(wrong)
    assert [event.fields["ranks"] for event in job.events("audit.failed")] == [[1]] * 6
    kind = "copy" if bf16 else "parameter"
    assert f", {kind} (" in job.events("audit.failed")[0].fields["reason"]
    assert_identical(wrong, golden(clean), 4)


# ------------------------------------------------------------------------------------------------ with snapshots


@pytest.mark.all_configurations
@pytest.mark.parametrize("mode", ["dyn", "largest", "sync"])
def test_killed_while_an_averaging_is_in_flight_it_ends_as_the_noised_run_that_was_not(bench, mode):
    """Rank 1 dies in the forward behind the update of a turn (3, then 5 or 6), while its average is under way."""
    two = shape(2)
    words = {"dyn": DYN, "largest": (*DYN, "--paft-noise-of", "largest")}.get(
        mode, ("--paft", "--paft-mode", "sync", "--paft-h", "3")
    )
    whole = bench.run(two, *words, faults=NOISE, name="whole")
    averaged = bench.finish(whole).events("replicas.averaged")
    turns = [(e.rank, e.fields["iteration"], e.fields["sigma"]) for e in averaged]
    assert len(turns) >= 4 and min(sigma for _, _, sigma in turns) > 0
    killed = f"{NOISE};iteration.forward@iteration=4,rank=1,restart=0:kill"
    run = bench.run(two, *words, protected=True, faults=killed)
    job = bench.finish(run)
    assert {event.fields["iteration"] for event in job.events("state.restored")} <= {2, 3}
    assert job.events("state.restored")
    again = {(e.rank, e.fields["iteration"], e.fields["sigma"]) for e in job.events("replicas.averaged")}
    assert set(turns) == again
    assert_identical(run, whole, 2)


@pytest.mark.all_configurations
def test_killed_between_two_audits_it_ends_as_the_clean_run(bench):
    """In the same job a wrong replica before the kill, and another after it."""
    four = shape(4)
    clean = bench.clean(four)
    faults = (
        "update.parameters@iteration=3,rank=1,restart=0:flip=20~5;update.middle@iteration=5,rank=3,restart=0:kill;"
        "update.parameters@iteration=5,rank=0,restart=1:flip=20~6"
    )
    run = bench.run(four, *AUDIT, "1", protected=True, faults=faults)
    job = bench.finish(run)
    assert sorted((e.fields["iteration"], *e.fields["ranks"]) for e in job.events("audit.failed")) == [(3, 1), (5, 0)]
    assert_identical(run, clean, 4)


# ------------------------------------------------------------------------------------------------ three dimensions


@pytest.mark.all_configurations
def test_in_a_job_of_three_dimensions_averaging_and_audit_go_together(bench):
    """Every stage and tensor rank has replicas of its own; all ranks take one interval."""
    cube = shape(2, tp=2, pp=2)
    clean = bench.clean(cube)
    at = QUIET[bench.framework][1]
    flip = f"update.parameters@iteration={at},rank=6:nan"  # of two, the one that has a number is right
    run = bench.run(cube, *DYN, "--paft-audit-interval", "1", faults=flip)
    job = bench.finish(run)
    told = once(job, "audit.failed")
    assert told["iteration"] == at and 6 in told["ranks"] and len(told["ranks"]) == 2
    turns = {}
    for event in job.events("replicas.averaged"):
        turns.setdefault(event.fields["iteration"], set()).add((event.fields["next"], event.fields["divergence"]))
    assert sorted(turns) == [3, 6] and all(len(said) == 1 for said in turns.values())
    assert len(job.events("replicas.averaged")) == 16
    assert_identical(run, clean, 8)


def test_a_script_with_deepspeed_and_its_own_loop_is_repaired_before_its_next_forward(jobs, golden):
    """What it computes between the engine's calls cannot be computed again, and need not be."""
    pytest.importorskip("deepspeed", reason="needs the extra [deepspeed]")
    clean = DeepSpeedRun("audited", jobs.folder, DeepSpeedConfiguration(4, 0, bf16=False))
    paft = {"mode": "audit", "audit_interval": 1, "audit_at": "forward"}
    run = replace(clean, block={"paft": paft, "faults": "update.parameters@iteration=3,rank=2:flip=30~3"})
    told = once(jobs.finish(run), "audit.failed")
    assert (told["iteration"], told["ranks"], told["majority"]) == (3, [2], True)
    assert_identical(run, golden(clean), 4)
