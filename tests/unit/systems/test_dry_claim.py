"""The memory that a job would claim, before there is a job. Whole jobs are compared with it in the scenarios."""

import json
from dataclasses import replace

import pytest

from ft_plugins.config import Config
from ft_plugins.errors import ConfigError
from ft_plugins.snapshot.segment.shape import PAGE
from ft_plugins.snapshot.segment.slots import FIRST, SLOTS, Pin, slots_for
from ft_plugins.systems.reft import dry_claim
from ft_plugins.systems.reft.dry_claim import DryJob, block_of, plan_claim

GIB = 1 << 30
JOB = DryJob(parameters=1 << 27, bytes_each=12, tp=2, pp=2, dp=8, ranks_per_node=8, order="tp-cp-ep-pp-dp")
SHARE = (12 << 27) // 4  # bytes that a node of four captures


def config(*flags):
    return Config.from_flags(["--reft", *flags])[0]


def only(job, *flags):
    """What each node claims, where all claim the same."""
    (kind,) = plan_claim(job, config(*flags)).kinds
    return kind


def test_one_node_claims_three_times_what_it_captures():
    kind = only(replace(JOB, dp=2))
    assert (kind.count, kind.ranks, kind.slots, kind.captured) == (1, 8, SLOTS, 12 << 27)
    assert (kind.own_parity, kind.store) == (0, 0) and kind.total == kind.snapshots
    assert SLOTS <= kind.snapshots / kind.captured < SLOTS + 0.01
    assert plan_claim(replace(JOB, dp=2), config()).unprotected == "all ranks are on one node"


@pytest.mark.parametrize(
    ("flags", "pins", "parity", "losses"),
    [
        (("--reft-redundancy", "none"), (), 0.0, 0),
        ((), (Pin.NODE, Pin.SOURCE), 2 / 3, 1),
        (("--reft-redundancy", "raim6"), (Pin.NODE, Pin.SOURCE), 4 / 2, 2),
        (("--reft-group-nodes", "2"), (Pin.NODE, Pin.SOURCE), 2 / 1, 1),
        (("--reft-checkpoint-dir", "/ck"), (Pin.NODE, Pin.SOURCE, Pin.STORAGE), 2 / 3, 1),
        (("--paft", "--paft-mode", "audit"), (Pin.NODE, Pin.SOURCE, Pin.CERTIFIED), 2 / 3, 1),
    ],
    ids=str,
)
def test_flags_of_the_job_decide_slots_and_parity_over_four_nodes(flags, pins, parity, losses):
    kind = only(JOB, *flags)
    first = FIRST if losses else slots_for(*pins)
    assert (kind.count, kind.captured, kind.slots, kind.most_slots) == (4, SHARE, first, slots_for(*pins))
    assert kind.snapshots / SHARE == pytest.approx(first, rel=0.005)
    assert kind.more / SHARE == pytest.approx(slots_for(*pins) - first, rel=0.005)
    assert kind.store / SHARE == pytest.approx(parity, rel=0.01, abs=0.001)
    assert plan_claim(JOB, config(*flags)).losses == losses


def test_ranks_compute_parity_of_what_they_hold_identically():
    """RAIM5 of replicated state is not sent: each node computes a third of a share of it from its replicas."""
    kind = only(replace(JOB, sharded=False))
    assert kind.captured == SHARE and kind.store < 0.02 * SHARE
    versions = kind.own_parity / (SHARE / 3)
    assert versions == pytest.approx(round(versions), rel=0.01) and 1 < round(versions) <= kind.most_slots


def test_whole_replicas_are_as_many_as_there_are_ranks():
    """Averaged replicas may differ, so none can do without its own."""
    kind = only(replace(JOB, sharded=False, whole=True), "--reft-redundancy", "none")
    assert kind.captured == 8 * (12 << 27) // 4


def test_ranks_of_megatrons_usual_order_share_their_parity_with_fewer_nodes():
    """With pp last a sharding group is on two of the four nodes: parity of two versions is as large as they are."""
    kind = only(replace(JOB, order=dry_claim.ORDER))
    assert kind.store / SHARE == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize("sharded", [True, False])
def test_a_large_job_is_planned_by_some_of_its_nodes(sharded, monkeypatch):
    job = replace(JOB, dp=80, sharded=sharded)  # 40 nodes: five redundancy groups of eight
    exact = plan_claim(job, config()).kinds
    monkeypatch.setattr(dry_claim, "_PLANNED_RANKS", 64)
    sampled = plan_claim(job, config()).kinds
    assert sum(kind.count for kind in exact) == 40
    for kind in sampled:
        assert abs(kind.total - exact[0].total) <= PAGE * kind.ranks * (kind.slots + 4)


def test_redundancy_that_is_named_and_not_possible_is_refused_and_so_is_no_protection():
    with pytest.raises(ConfigError, match="--reft-redundancy raim6: RAIM6 needs .* at least 4 nodes"):
        plan_claim(replace(JOB, order=dry_claim.ORDER), config("--reft-redundancy", "raim6"))
    with pytest.raises(ConfigError, match="no system is on that claims host memory"):
        plan_claim(JOB, Config())


def test_the_block_is_plain_values_with_the_total():
    block = json.loads(json.dumps(block_of(plan_claim(JOB, config()))))
    (kind,) = block["nodes"]
    assert kind["total"] == kind["snapshots"] + kind["own_parity"] + kind["store"] and block["losses"] == 1
