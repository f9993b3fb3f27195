"""A killed and resumed job under local SGD equals an unfailed one with the same keys, bit for bit.

Golden runs have the same block `sync` and no snapshots. Every comparison is over all inventory items, all small state,
all parameters, all losses (evaluations included), and what each synchronisation left out and clipped: the penalty's
statistics decide that, so it differs after a resume without them. Anchors and outer momentum are in the parameters of
the synchronisations that follow.
"""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.claims import restored, synchronisations
from harness.deepspeed_runs import DeepSpeedConfiguration, DeepSpeedRun
from harness.golden import assert_identical

ITERATIONS = 9  # one after the synchronisation of iteration 8, whose result is in its forward or its update

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra [deepspeed]")

# norms grow with the learning rate: those of iteration 6 are outliers, those of 8 are not all, because of those of 6
EDIT = {"policy": "edit", "tau": 2, "penalty_warmup": 1, "alpha": 0.3, "threshold": 1.5, "clip": 0.02}
PIPELINE, SHARDED, BF16 = "pipeline", "zero2", "bf16 zero1"
CONFIGURATIONS = {
    PIPELINE: (DeepSpeedConfiguration(4, 0, bf16=False, pp=2), EDIT),  # applied in forwards
    SHARDED: (DeepSpeedConfiguration(4, 2, bf16=False), {**EDIT, "shard_ranks": 2}),  # behind the next iteration
    BF16: (DeepSpeedConfiguration(4, 1, bf16=True), {**EDIT, "shard_ranks": 2, "apply": "forward"}),
}


def unfailed(name):
    configuration, sync = CONFIGURATIONS[name]
    return DeepSpeedRun("golden", Path(), configuration, {"sync": sync}, iterations=ITERATIONS)


BETWEEN = "iteration.forward@iteration=4,rank=3,restart=0:kill"
# A rank exchanges and applies its modules one after another: rank 3 three of them, rank 0 two. What is restored depends
# on what other ranks have sealed when a rank dies. A version of ZeRO-2 at a synchronisation starts with that once more.
LATER = {
    (PIPELINE, "sync"): ("sync.exchange@rank=3,hit=5", "sync.apply@rank=0,hit=3"),
    (PIPELINE, "every"): ("sync.exchange@rank=3,hit=5", "sync.apply@rank=0,hit=3"),
    (SHARDED, "sync"): ("sync.exchange@rank=3,hit=8", "sync.apply@rank=0,hit=4"),
    (SHARDED, "every"): ("sync.exchange@rank=3,hit=5", "sync.apply@rank=0,hit=2"),
    (BF16, "sync"): ("sync.exchange@rank=3,hit=5", "sync.apply@rank=0,hit=3"),
    (BF16, "every"): ("sync.exchange@rank=3,hit=5", "sync.apply@rank=0,hit=3"),
}
RESTORED = {
    (PIPELINE, "sync"): [{2}, {4}, {6}],
    (PIPELINE, "every"): [{2, 3}, {4, 5}, {6, 7}],
    (SHARDED, "sync"): [{2}, {4, 6}, {4, 6, 8}],
    (SHARDED, "every"): [{2, 3}, {2, 3, 4, 5, 6}, {2, 3, 4, 5, 6}],
    (BF16, "sync"): [{2}, {4, 6}, {4, 6, 8}],
    (BF16, "every"): [{2, 3}, {4, 5, 6, 7}, {4, 5, 6, 7, 8}],
}


@pytest.mark.parametrize("versions", ["sync", "every"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_deepspeed_job_killed_between_and_within_synchronisations_ends_as_the_unfailed_one(
    golden, jobs, name, versions
):
    """Three kills: between two synchronisations, in the middle of an exchange, and in the middle of applying one. The
    block comes from the DeepSpeed configuration, which names the ranks of a replica before the engine is built."""
    configuration, sync = CONFIGURATIONS[name]
    whole, expected = golden(unfailed(name)), synchronisations(golden.job(unfailed(name)))
    kills = ";".join([BETWEEN, *(f"{at},restart={life}:kill" for life, at in enumerate(LATER[name, versions], 1))])
    block = {"sync": sync, "reft": {"versions": versions}, "faults": kills}
    run = DeepSpeedRun("protected", jobs.folder, configuration, block, iterations=ITERATIONS)
    job = jobs.finish(run, 3)
    found = restored(job)
    for iteration, possible in zip(found, RESTORED[name, versions], strict=True):
        assert iteration in possible, found
    assert_identical(run, whole, configuration.ranks)
    assert synchronisations(job) == expected
    assert {iteration for _, iteration in expected} >= {2, 4, 6, 8}
    assert any(one["left_out"] for one in expected.values()) and any(one["clipped"] for one in expected.values())


STALLS = {
    "detected": {"detect_seconds": 2.0},  # by the snapshot process of its node
    "timed out": {"detect_seconds": 600.0},  # by the others, which wait for it
}


@pytest.mark.parametrize("stall", STALLS)
def test_a_rank_that_stops_in_the_middle_of_an_exchange_is_replaced_and_the_job_ends_as_the_unfailed_one(
    golden, jobs, stall
):
    """Nothing has died: without either, the others would wait for half an hour."""
    configuration, sync = CONFIGURATIONS[PIPELINE]
    whole, expected = golden(unfailed(PIPELINE)), synchronisations(golden.job(unfailed(PIPELINE)))
    stops = "sync.exchange@rank=3,hit=5,restart=0:stop"
    timeout = {"timeout": 6.0} if stall == "timed out" else {}
    block = {"sync": {**sync, **timeout}, "reft": {}, "faults": stops, **STALLS[stall]}
    run = DeepSpeedRun("protected", jobs.folder, configuration, block, iterations=ITERATIONS)
    job = jobs.finish(run, None)
    assert len(restored(job)) == 1
    lost = [event.fields["lost"] for event in job.events("node.lost")]
    if stall == "detected":
        assert lost == [["rank 3"]]
    else:
        assert lost == []
        line = r"rank \d: local SGD, iteration 4, module '[^']+': a rank of its sync group .* did not come within 6 s"
        messages = [event.fields["message"] for event in job.events("worker.failed")]
        assert any(re.search(line, message) for message in messages), messages
    assert_identical(run, whole, configuration.ranks)
    assert synchronisations(job) == expected
