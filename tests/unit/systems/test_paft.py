"""Replicas in a real process group: they stay what they are without faults, and become one again after any."""

import math
import threading

import pytest
import torch

from ft_plugins.base import faults
from ft_plugins.config import PaftConfig
from ft_plugins.errors import ConfigError, ReplicaError, UnsupportedError
from ft_plugins.events import Events
from ft_plugins.systems.paft import Paft
from harness.plain_host import PlainHost

from . import replicas

train, Training, Watched = replicas.train, replicas.Training, replicas.Watched

NOISE = "update.gradients:gauss={}"
NOISES = {"sgd": 1e-3, "adam": 0.02}  # the first is about a sixth of the gradient
PARAMETERS = sum((a + 1) * b for a, b in zip(replicas.LAYERS, replicas.LAYERS[1:], strict=False))


def at(found, key, step):
    """What the ranks hold at that moment: one digest where they agree."""
    return {one[key][step] for one in found}


# ------------------------------------------------------------------------------------------------ averaging


@pytest.mark.parametrize("block", [{"h": 5, "h_max": 7}, {"mode": "sync", "h": 4}, {"aggregate": "median", "h": 5}])
def test_without_faults_nothing_changes_and_the_interval_becomes_the_largest(ranks, block):
    clean = ranks(train, 2, None, 20)
    found = ranks(train, 2, block, 20)
    assert [one["versions"] for one in found] == [one["versions"] for one in clean]
    turns = found[0]["events"]["replicas.averaged"]
    expected = {"sync": [4, 8, 12, 16, 20], "dyn": [5, 12, 19]}[block.get("mode", "dyn")]
    expected = [5] if block.get("aggregate") else expected
    assert [turn["iteration"] for turn in turns] == expected
    assert all(turn["divergence"] == 0 and turn["sigma"] == 0 for turn in turns)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_noise_is_measured_alike_on_all_ranks_and_drift_is_0_after_each_turn(ranks, optimizer):
    """Averaging started behind the update of a turn is in place before the next one."""
    options = {"optimizer": optimizer}
    found = ranks(train, 2, {"h": 6, "h_min": 2, "h_max": 500}, 30, NOISE.format(NOISES[optimizer]), options)
    first, second = (one["events"]["replicas.averaged"] for one in found)
    keys = ("iteration", "next", "sigma", "signal", "divergence", "reason")
    assert [[turn[key] for key in keys] for turn in first] == [[turn[key] for key in keys] for turn in second]
    assert len(first) >= 2 and first[0]["iteration"] == 6
    for turn in first:
        assert len(at(found, "versions", turn["iteration"])) == 2, "the turn itself has drifted"
        assert len(at(found, "fenced", turn["iteration"] + 1)) == 1, "and is one again before the next update"
        assert turn["next"] == turn["iteration"] + turn["interval"]
        ratio = turn["signal"] / turn["sigma"] / math.sqrt(PARAMETERS)
        assert turn["interval"] == min(max(math.floor(ratio), 2), 500)
        if optimizer == "sgd":  # 17,096 parameters and an update or more: the estimate's own error is below 1 %
            assert turn["sigma"] == pytest.approx(NOISES["sgd"], rel=0.05)
    assert optimizer != "sgd" or {turn["interval"] for turn in first} - {2, 500}, "driven by noise, not by a bound"


def test_the_signal_is_the_length_of_the_gradient_over_the_whole_model(ranks):
    found = ranks(_gradient_norm, 2)
    for turn, norms in found:
        assert turn["signal"] == pytest.approx(math.sqrt(sum(n**2 for n in norms) / 2), rel=1e-4)  # fp32 steps


def _gradient_norm(rank, world):
    faults.arm(NOISE.format(0.02), rank=rank)
    watched = Watched(Training(rank, world, "sgd", rate=0.5), PaftConfig(h=5))
    own = 0.0
    inner = watched.training.optimizer.step

    def step():
        nonlocal own
        if watched.completed == 4:
            own = math.sqrt(sum(float(p.grad.double().square().sum()) for p in watched.training.named.values()))
        inner()

    watched.training.optimizer.step = step
    watched.run(6)
    norms = torch.tensor([own if r == rank else 0.0 for r in range(world)], dtype=torch.float64)
    torch.distributed.all_reduce(norms)
    return watched.end()["events"]["replicas.averaged"][0], norms.tolist()


def test_a_waiting_synchronisation_leaves_one_version_on_all_ranks_at_every_h_iterations(ranks):
    found = ranks(train, 2, {"mode": "sync", "h": 4}, 9, NOISE.format(0.02), {"optimizer": "sgd"})
    assert {step: len(at(found, "versions", step)) for step in range(1, 10)} == {
        step: 1 if step % 4 == 0 else 2 for step in range(1, 10)
    }
    turns = found[0]["events"]["replicas.averaged"]
    assert [turn["sigma"] for turn in turns] == pytest.approx([0.02, 0.02], rel=0.05)


def test_optimizer_state_is_averaged_only_if_asked(ranks):
    for asked, differing in ((False, 2), (True, 1)):
        block = {"mode": "sync", "h": 3, "average_optimizer_state": asked}
        found = ranks(train, 2, block, 3, NOISE.format(0.02))
        assert len(at(found, "versions", 3)) == differing


def test_a_nan_at_a_turn_is_named_and_left_out_and_the_gradients_made_of_it_are_computed_again(ranks):
    """Optimizer state is averaged too: the NaN is in the moments as well, and would come back."""
    block = {"h": 5, "h_min": 3, "h_max": 50, "average_optimizer_state": True}
    found = ranks(train, 2, block, 12, "update.gradients@iteration=5,rank=1:nan")
    turn, after = found[0]["events"]["replicas.averaged"][:2]
    assert turn["nonfinite"] == [1] and (turn["interval"], turn["next"]) == (3, 8)
    assert "non-finite parameters on ranks 1: h_min" in turn["reason"]
    assert after["nonfinite"] == [] and after["interval"] == 50, "all is well again"
    assert [one["iteration"] for one in found[1]["events"]["fault.injected"]] == [5]
    assert "fault.injected" not in found[0]["events"]
    assert all(one["recomputed"] == [6] and one["finite"] for one in found)


def _sent_back(rank, world):
    faults.arm("update.gradients@iteration=5,rank=1:nan", rank=rank)
    watched = Watched(Training(rank, world, recomputes=False), PaftConfig(h=5, average_optimizer_state=True))
    try:
        watched.run(8)
    except ReplicaError as error:
        return str(error), error.echo, watched.completed, watched.paft.tainted(), watched.paft.table()
    raise AssertionError("went on")


def test_a_nan_at_a_turn_whose_gradients_cannot_be_computed_again_sends_the_job_back(ranks):
    """Before it is in all replicas; snapshots of the turn are not gone on from."""
    found = ranks(_sent_back, 2)
    assert [echo for _, echo, *_ in found] == [True, False]
    for error, _, completed, since, told in found:
        assert "after iteration 5 parameters of ranks 1 were non-finite" in error
        assert (completed, since) == (5, 4) and "a non-finite replica sends the job back" in told


def test_a_nan_between_turns_reaches_all_by_the_gradients_and_all_are_named(ranks):
    """What averaging cannot undo and an audit of every update can."""
    block = {"h": 5, "h_min": 3, "h_max": 50}
    armed = "update.gradients@iteration=3,rank=1:nan"
    found = ranks(train, 2, block, 7, armed)
    (turn,) = found[0]["events"]["replicas.averaged"]
    assert turn["nonfinite"] == [0, 1] and turn["interval"] == 3 and not found[0]["finite"]
    audited = ranks(train, 2, {**block, "audit_interval": 1}, 7, armed)
    assert all(one["finite"] and one["recomputed"] == [4] for one in audited)
    assert audited[0]["events"]["replicas.averaged"][0]["nonfinite"] == []


def test_a_nan_that_parameters_have_at_a_waiting_turn_is_never_used(ranks):
    block = {"mode": "sync", "h": 5, "average_optimizer_state": True}
    found = ranks(train, 2, block, 12, "update.parameters@iteration=5,rank=1:nan")
    assert found[0]["events"]["replicas.averaged"][0]["nonfinite"] == [1]
    assert all(one["finite"] and one["recomputed"] == [] for one in found)


def _skipped(rank, world):
    """What is derived from parameters, beside the parameters, after an update that was skipped right behind a turn."""
    faults.arm(NOISE.format(0.02), rank=rank)
    watched = Watched(Training(rank, world, "sgd"), PaftConfig(h=5, h_min=5, h_max=9))
    training = watched.training
    derived = ""

    def derive():
        nonlocal derived
        derived = training.parameters()

    watched.run(5)
    training.host.derive = derive
    training.optimizer.step = lambda: None
    watched.run(6).end()
    return derived, training.parameters()


def test_what_is_derived_from_averages_does_not_wait_for_an_update_that_may_be_skipped(ranks):
    first, second = ranks(_skipped, 2)
    assert first == second and first[0] == first[1]


def _waited_for(rank, world):
    """Whether an audit could go on before the state of its version was told: what it waits for here."""
    watched = Watched(Training(rank, world), PaftConfig(h=5, audit_interval=5)).run(4)
    auditing, told, found = watched.paft._verdicts._auditing, threading.Event(), []
    compare = auditing.compare
    auditing.compare = lambda iteration: (found.append(told.wait(3.0)), compare(iteration))[1]
    watched.run(5)
    state = watched.paft.state()
    told.set()
    watched.run(6).end()
    assert state["turns"]["signal"] is not None
    return found


def test_a_version_point_does_not_wait_for_an_audit(ranks):
    assert ranks(_waited_for, 2) == [[True], [True]]


# ------------------------------------------------------------------------------------------------ going on


def test_a_job_killed_while_an_averaging_is_in_flight_goes_on_as_if_it_had_not_been(ranks):
    """From every version of a noised run: tensors and state of each rank as a snapshot would have them."""
    for whole, resumed in ranks(_resumed, 2):
        assert len(resumed) == 3
        for versions, turns in resumed:
            assert versions.items() <= whole["versions"].items() and 14 in versions
            assert turns == [t for t in _turns(whole["events"]) if t[0] >= turns[0][0]]


def _turns(events):
    return [[turn[key] for key in ("iteration", "next", "sigma", "signal")] for turn in events["replicas.averaged"]]


def _resumed(rank, world):
    faults.arm(NOISE.format(0.05), rank=rank)
    config = PaftConfig(h=5, h_min=4, h_max=6)
    watched = Watched(Training(rank, world), config)
    saved = {}
    for until in range(1, 15):
        watched.run(until)
        saved[until] = (watched.training.copy(), watched.paft.state())
    whole = watched.end()
    found = []
    for version in (3, 5, 6):  # before the first turn, at it (its averaging in flight), after it
        again = Training(rank, world)
        tensors, state = saved[version]
        again.load(tensors)
        one = Watched(again, config, version, state).run(14).end()
        found.append((one["versions"], _turns(one["events"])))
    return whole, found


# ------------------------------------------------------------------------------------------------ audits

AUDIT = {"mode": "audit", "audit_interval": 1}


def test_replicas_that_agree_are_compared_and_left_alone(ranks):
    clean = ranks(train, 2, None, 6)
    found = ranks(train, 2, AUDIT, 6)
    assert [one["versions"] for one in found] == [one["versions"] for one in clean]
    assert all("audit.failed" not in one["events"] and one["recomputed"] == [] for one in found)


@pytest.mark.parametrize("chosen", ["repair", "average"])
def test_two_that_differ_are_named_as_one_of_these_two_and_averaged(ranks, chosen):
    found = ranks(train, 2, {**AUDIT, "on_corruption": chosen}, 8, "update.parameters@iteration=4,rank=1:flip=20~3")
    struck = found[1]["events"]["fault.injected"][0]
    (event,) = found[0]["events"]["audit.failed"]
    assert (event["iteration"], event["ranks"], event["majority"]) == (4, [0, 1], False)
    assert event["layers"] == [int(struck["item"].split(".")[0])] and "one of these two" in event["reason"]
    assert f"layer {event['layers'][0]}, moment" in event["reason"] and struck["item"].endswith("exp_avg_sq")
    assert "audit.failed" not in found[1]["events"], "said once"
    assert len(at(found, "versions", 4)) == 2 and all(len(at(found, "versions", step)) == 1 for step in (5, 6, 7, 8))
    assert found[0]["recomputed"] == [5]


def test_of_two_the_one_with_a_nan_is_not_averaged_in(ranks):
    clean = ranks(train, 2, None, 8)
    found = ranks(train, 2, AUDIT, 8, "update.parameters@iteration=4,rank=1:nan")
    assert at(found, "versions", 8) == at(clean, "versions", 8)


def test_a_later_audit_finds_what_an_earlier_one_could_not_have(ranks):
    """Every three iterations: found within one interval, and the replicas agree from then on."""
    found = ranks(train, 2, {**AUDIT, "audit_interval": 3}, 8, "update.parameters@iteration=4,rank=1:flip=20~3")
    (event,) = found[0]["events"]["audit.failed"]
    assert event["iteration"] == 6
    assert [len(at(found, "versions", step)) for step in (3, 4, 5, 6, 7, 8)] == [1, 2, 2, 2, 1, 1]


# ------------------------------------------------------------------------------------------------ refusals


class Sharded(PlainHost):
    """Four ranks that each hold parameters of their own, as with ZeRO."""

    def topology(self):
        from ft_plugins.model.topology import Topology

        return Topology(tp=1, pp=1, dp=4)


def host(kind=PlainHost, **more):
    return kind({"w": torch.zeros(4)}, learning_rate=lambda: 0.1, **more)


def test_one_replica_alone_is_refused_as_a_switch_without_effect():
    with pytest.raises(ConfigError, match="--paft: has no effect with one data-parallel replica; raise the data-"):
        Paft(host(), PaftConfig(), Events())


def test_sharded_parameters_are_refused_by_name():
    with pytest.raises(UnsupportedError, match="held by one of 4 replicas only .ZeRO, distributed optimizer."):
        Paft(host(Sharded), PaftConfig(), Events())


def test_a_host_whose_parameters_cannot_be_changed_is_refused_by_name():
    class Bare:
        framework = "frame 1.0"

    with pytest.raises(UnsupportedError, match="frame 1.0: parameters cannot be changed between two updates here"):
        Paft(Bare(), PaftConfig(), Events())


def test_a_loop_that_does_not_tell_its_learning_rate_can_be_audited_but_not_averaged():
    told = {"world_size": 3, "replicated": True}
    silent = PlainHost({"w": torch.zeros(4)}, **told)
    with pytest.raises(UnsupportedError, match="the learning rate of a plain torch loop is unknown"):
        Paft(silent, PaftConfig(), Events())
    said = Paft(silent, PaftConfig(mode="audit", audit_interval=1), Events()).table()
    assert "its gradients cannot be recomputed here" in said and "ranks 0 1 2: 1 buckets" in said


def test_what_averaging_costs_is_said_at_start():
    table = Paft(host(world_size=4, replicated=True), PaftConfig(aggregate="median"), Events()).table()
    assert "averaging by median: 24 bytes sent" in table and "16 bytes held permanently" in table
    assert "8 comparisons per coordinate" in table and "audit" not in table


def test_too_few_replicas_to_trim_are_refused():
    with pytest.raises(ConfigError, match="expected at least 3 replicas"):
        Paft(host(world_size=2, replicated=True), PaftConfig(aggregate="trimmed"), Events())


def test_a_fault_whose_word_alters_no_numbers_is_refused_at_start():
    faults.arm("update.gradients:kil")
    with pytest.raises(ConfigError, match="fault 'kil': expected gauss=SIGMA"):
        Paft(host(world_size=2, replicated=True), PaftConfig(), Events())
