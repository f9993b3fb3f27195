"""Four replicas: the wrong one is named and repaired, and with an audit of every update the run is the clean one."""

import math

import pytest
import torch

from ft_plugins.base import faults
from ft_plugins.config import PaftConfig
from ft_plugins.errors import ReplicaError
from ft_plugins.model.inventory import Inventory
from ft_plugins.model.topology import Topology

from . import replicas

train, Training, Watched = replicas.train, replicas.Training, replicas.Watched

AUDIT = {"mode": "audit", "audit_interval": 1}
FLIPS = {
    "parameter": "update.parameters@iteration=4,rank=2:flip=20~5",
    "moment": "update.parameters@iteration=4,rank=2:flip=20~3",
    "gradient": "update.gradients@iteration=4,rank=2:flip=29~5",
    "nan": "update.gradients@iteration=4,rank=2:nan",
}


_clean = {}


def clean_run(ranks):
    """Nine iterations of four replicas without PAFT and without faults, once for all tests of this file."""
    if not _clean:
        _clean[9] = ranks(train, 4, None, 9)
    return _clean[9]


def versions(found, step):
    return [one["versions"][step] for one in found]


@pytest.mark.parametrize(
    "fault, at",
    [*((fault, "update") for fault in FLIPS), ("gradient", "forward")],
)
def test_a_wrong_replica_is_named_and_repaired_and_the_run_is_bit_identical_to_a_clean_one(ranks, fault, at):
    """Parameters and optimizer state alike: a gradient shows only in what the update made of it."""
    clean = clean_run(ranks)
    found = ranks(train, 4, {**AUDIT, "audit_at": at}, 8, FLIPS[fault])
    for step in range(1, 9):
        right = versions(clean, step)
        assert len(set(right)) == 1
        differing = [rank for rank in range(4) if versions(found, step)[rank] != right[rank]]
        assert differing == ([2] if step == 4 else [])
    struck = found[2]["events"]["fault.injected"][0]
    told = [one["events"].get("audit.failed", []) for one in found]
    assert [len(events) for events in told] == [1, 0, 0, 0], "the first of the majority speaks for all"
    (event,) = told[0]
    assert (event["iteration"], event["ranks"], event["majority"]) == (4, [2], True)
    assert event["layers"] == [int(struck["item"].split(".")[0])]
    kinds = {kind for kind in ("parameter", "moment") if f", {kind} (" in event["reason"]}
    assert kinds == ({fault} if fault in ("parameter", "moment") else {"parameter", "moment"})
    assert all(one["recomputed"] == ([5] if at == "update" else []) for one in found)


def test_gradients_that_cannot_be_computed_again_leave_replicas_that_agree_on_another_run(ranks):
    clean = clean_run(ranks)
    found = ranks(train, 4, AUDIT, 8, "update.gradients@iteration=4,rank=2:flip=29~5", {"recomputes": False})
    assert len(set(versions(found, 8))) == 1 and versions(found, 8) != versions(clean, 8)


def test_beside_averaging_a_repair_comes_first_and_what_was_averaged_of_wrong_state_is_dropped(ranks):
    """The flip is at a turn: its averaging is under way when the verdict comes."""
    clean = clean_run(ranks)
    for mode in ({"mode": "dyn", "h": 4, "h_min": 2, "h_max": 4}, {"mode": "sync", "h": 4}):
        found = ranks(train, 4, {**mode, "audit_interval": 1}, 9, FLIPS["gradient"])
        assert versions(found, 9) == versions(clean, 9)
        turns = found[0]["events"]["replicas.averaged"]
        assert turns[0]["iteration"] == 4 and turns[0]["applied"] is (mode["mode"] == "sync")
        assert turns[-1]["applied"] and turns[-1]["divergence"] == 0


def test_a_rank_that_is_wrong_again_is_named_as_one_to_drain(ranks):
    armed = ";".join(f"update.parameters@iteration={step},rank=3:flip=12~{step}" for step in (2, 5, 6))
    found = ranks(train, 4, AUDIT, 7, armed)
    offences = found[0]["events"]["rank.suspected"]
    assert [(one["rank"], one["count"]) for one in offences] == [(3, 2), (3, 3)]
    assert "rank 3 was wrong at 2 audits" in offences[0]["reason"] and "drain its device" in offences[0]["reason"]
    told = [one["events"].get("suspect.listed", []) for one in found]
    assert [[(one["rank"], one["count"]) for one in said] for said in told] == [[(3, 3)], [], [], []], "at the end"
    assert told[0][0]["reason"] == "rank 3 was wrong at 3 audits: drain its device"
    assert len(set(versions(found, 7))) == 1


def test_two_against_two_are_averaged(ranks):
    armed = ";".join(f"update.parameters@iteration=3,rank={rank}:flip=12~{rank}" for rank in (1, 2))
    found = ranks(train, 4, AUDIT, 5, armed)
    assert len(set(versions(found, 3))) == 3 and len(set(versions(found, 4))) == len(set(versions(found, 5))) == 1


def test_a_wrong_replica_sends_the_whole_job_back_where_that_is_asked_for(ranks):
    for error, step, echo in ranks(_rolled_back, 4):
        assert step == 5 and "replicas of iteration 4 differ" in error and echo is False


def _rolled_back(rank, world):
    faults.arm(FLIPS["gradient"], rank=rank)
    watched = Watched(Training(rank, world), PaftConfig(**{**AUDIT, "on_corruption": "rollback"}))
    try:
        watched.run(8)
    except ReplicaError as error:
        return str(error), watched.completed + 1, error.echo
    raise AssertionError("went on")


# ------------------------------------------------------------------------------------------------ two stages


class Staged(replicas.Training):
    """A training whose ranks 0, 2 and 1, 3 are replicas, as of two pipeline stages; each stage trains by itself."""

    def __init__(self, rank, world, group, **more):
        super().__init__(rank, world, **more)
        self.group = group
        inner, members = self.host.inventory(), (rank % 2, rank % 2 + 2)
        self.host.inventory = lambda: Inventory.of(rank, (_with(item, members) for item in inner.items))
        self.host.topology = lambda: Topology(tp=1, pp=2, dp=2, order="pp-dp")

    def backward(self, step):
        torch.manual_seed(1000 * step + self.rank)
        x, y = torch.randn(16, replicas.LAYERS[0]), torch.randn(16, replicas.LAYERS[-1])
        self.optimizer.zero_grad()
        torch.nn.functional.mse_loss(self.model(x), y).backward()
        self._reduce(self.group, 2)


def _with(item, members):
    from dataclasses import replace

    return replace(item, replicas=members)


def _staged(rank, world, block, until, armed, optimizer):
    faults.arm(armed, rank=rank)
    groups = [torch.distributed.new_group([stage, stage + 2]) for stage in range(2)]
    training = Staged(rank, world, groups[rank % 2], optimizer=optimizer)
    return Watched(training, PaftConfig(**block)).run(until).end()


def test_stages_average_each_by_itself_and_take_one_interval_from_the_noise_of_the_whole_model(ranks):
    """Only the replicas of stage 0 are noised: the whole model has half the variance."""
    armed = ";".join(f"update.gradients@rank={rank}:gauss=0.004" for rank in (0, 2))
    found = ranks(_staged, 4, {"h": 4, "h_min": 2, "h_max": 50}, 12, armed, "sgd")
    averaged = [one["events"]["replicas.averaged"] for one in found]
    told = [[[t[k] for k in ("iteration", "next", "sigma")] for t in turns] for turns in averaged]
    assert told[0] == told[1] == told[2] == told[3] and len(told[0]) >= 2
    for _, _, sigma in told[0]:
        assert sigma == pytest.approx(0.004 / math.sqrt(2), rel=0.05)
    turn = told[0][0][0]
    assert found[0]["fenced"][turn + 1] == found[2]["fenced"][turn + 1] != found[1]["fenced"][turn + 1]
    assert found[0]["versions"][turn] != found[2]["versions"][turn]
    assert found[1]["versions"][turn] == found[3]["versions"][turn]


def _own_rates(rank, world):
    """Stage 1 updates ten times as fast."""
    faults.arm(NOISED, rank=rank)
    groups = [torch.distributed.new_group([stage, stage + 2]) for stage in range(2)]
    training = Staged(rank, world, groups[rank % 2], optimizer="sgd", rate=0.01 if rank % 2 == 0 else 0.1)
    return Watched(training, PaftConfig(h=4, h_min=2, h_max=5)).run(12).end()


NOISED = ";".join(f"update.gradients@rank={rank}:gauss=0.004" for rank in range(4))


def test_stages_that_update_at_rates_of_their_own_take_one_interval_all_the_same(ranks):
    found = ranks(_own_rates, 4)
    averaged = [one["events"]["replicas.averaged"] for one in found]
    told = [[[t[k] for k in ("iteration", "next", "sigma")] for t in turns] for turns in averaged]
    assert told[0] == told[1] == told[2] == told[3] and len(told[0]) >= 2


def test_a_fault_in_one_stage_has_all_ranks_compute_their_gradients_again(ranks):
    found = ranks(_staged, 4, AUDIT, 6, "update.parameters@iteration=3,rank=3:flip=12~1", "adam")
    assert all(one["recomputed"] == [4] for one in found)
    (event,) = found[1]["events"]["audit.failed"]
    assert event["ranks"] == [1, 3] and not event["majority"]
    assert not any("audit.failed" in found[rank]["events"] for rank in (0, 2, 3))
    assert found[1]["versions"][6] == found[3]["versions"][6] != found[0]["versions"][6] == found[2]["versions"][6]
