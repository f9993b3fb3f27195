"""A-EDiT in a session: replicas of different speed, equal to one process that simulates them; exact over a lost
incarnation; one clear line for what is impossible."""

import time
from typing import Any

import numpy as np
import pytest

from ft_plugins.config import Config
from ft_plugins.errors import ConfigError, ResumeError, UnsupportedError
from ft_plugins.session import attach

from .incarnation import context
from .systems import local_replicas as local

Node = Any  # the fixture's class lives in conftest

LAST, WARMUP = 30, 4
SECONDS = 0.2  # between synchronisations
PACE = (0.01, 0.06)  # seconds of an iteration, by replica
POLICY = {"policy": "a_edit", "seconds": SECONDS, "warmup": WARMUP, "penalty": False}
PROTECTED = {"reft": {}, "sync": {**POLICY, "apply": "forward"}, "node_name": "n"}


def life(rank, world, block, last=LAST, kind="sgd", run_dir=None, token=0, ends_in=None):
    """One incarnation. `ends_in`: a number of synchronisations after which it is left in mid-period."""
    training = local.LocalTraining(rank, world, kind)
    completed = {"completed": 0}
    training.host._get_state, training.host._set_state = lambda: dict(completed), completed.update
    events = []
    session = attach(training.host, Config.from_json(block), context(rank, world, run_dir, token))
    session._events.subscribe(
        lambda event: events.append(event.fields) if event.name == "replicas.synchronised" else None
    )
    began = None
    fenced, versions, following = {}, {}, set[int]()
    for step in session.iterations(last):
        if began is None:
            began = step - 1
            assert completed["completed"] == began
            if session._reft is not None:
                _follow(session._reft._capture, following)
        if events and ends_in is not None and events[-1]["number"] >= ends_in and step > events[-1]["iteration"] + 2:
            session._reft.wait_for_capture()  # the last version is sealed, as at the next fence
            break
        training.backward(step)
        fenced[step] = training.digest(moments=False)
        time.sleep(PACE[rank] if step > WARMUP else 0.0)
        session.before_update(step)
        versions[session._version(step - 1)] = training.digest()  # as captured: nothing writes before this
        training.optimizer.step()
        session.after_update(step)
        completed["completed"] = step
    return {
        "began": began, "fenced": fenced, "versions": versions, "events": events, "end": training.digest(moments=False),
        "steps": completed["completed"], "state": session._sync.state(), "following": following,
    }  # fmt: skip


def _follow(capture, following):
    """Collect the versions for which `capture` makes room."""
    make_room = capture._claims.make_room

    def follow(version):
        following.add(version.iteration)
        make_room(version)

    capture._claims.make_room = follow


def simulated(replicas, periods, kind="sgd"):
    """Digests of the parameters that each replica's gradients are computed with, and of those at the end. `periods`:
    by synchronisation, the iterations of each replica before it."""
    simulation = local.Simulation(replicas, kind)
    fenced = [{} for _ in range(replicas)]
    for step in range(1, WARMUP + 1):
        simulation.backward(step, together=True)
        for place, digest in enumerate(simulation.digests()):
            fenced[place][step] = digest
        simulation.update()
    simulation.remember()
    at = [WARMUP] * replicas
    for period in periods:
        for place, count in enumerate(period):
            for _ in range(count):
                at[place] += 1
                fenced[place][at[place]] = simulation.digests()[place]
                local.gradients(simulation.models[place], at[place], place)
                simulation.optimizers[place].step()
        targets = {name: simulation.outer(name, simulation.mean(name), 0.8, 0.85) for name in simulation.anchors}
        for name, target in targets.items():
            simulation.write(name, target)
        simulation.remember()
    return fenced, simulation.digests()


@pytest.mark.parametrize("apply", ["wait", "forward"])
def test_replicas_of_different_speed_equal_their_simulation_in_one_process_bit_for_bit(ranks, apply):
    """The simulation makes the numbers of iterations that the replicas have reported."""
    found = ranks(life, 2, {"sync": {**POLICY, "apply": apply}}, LAST, "adam")
    periods = [event["iterations"] for event in found[0]["events"]]
    fenced, end = simulated(2, periods, "adam")
    for place, one in enumerate(found):
        assert one["fenced"] == fenced[place]
        assert one["end"] == end[place] == end[0]
        assert one["steps"] == WARMUP + sum(period[place] for period in periods)
    assert tuple(one["steps"] for one in found) == found[0]["state"]["clocked"]["steps"]
    assert sum(one["steps"] for one in found) >= 2 * LAST
    fast, slow = (sum(period[place] for period in periods) for place in range(2))
    assert fast > slow, "each trains at its own pace"
    assert [event["number"] for event in found[0]["events"]] == list(range(1, len(periods) + 1))


def test_weights_by_tokens_are_the_shares_of_the_iterations(ranks):
    keys = {**POLICY, "weights": "tokens", "apply": "wait", "outer_lr": 1.0, "outer_momentum": 0.0, "warmup": 0}
    found = ranks(_weighted, 2, {"sync": keys})
    (first, _), (second, _) = found
    shares = np.array(found[0][1]) / sum(found[0][1])  # the slower rank's is smaller, unless the machine is slow
    expected = shares[0] * first["before"] + shares[1] * second["before"]
    assert np.allclose(first["after"], expected, rtol=1e-6, atol=1e-7)  # rounded to float32 once
    assert np.array_equal(first["after"], second["after"])


def _weighted(rank, world, block):
    """Parameters before and after the first synchronisation."""
    training = local.LocalTraining(rank, world)
    events = []
    session = attach(training.host, Config.from_json(block), context(rank, world))
    session._events.subscribe(lambda event: events.extend([event.fields] * (event.name == "replicas.synchronised")))
    before = np.zeros(0)
    for step in session.iterations(LAST):
        training.backward(step)
        time.sleep(PACE[rank])
        session.before_update(step)
        training.optimizer.step()
        if not events:
            before = _flat(training.model)
        session.after_update(step)
        if events and "after" not in locals():
            after = _flat(training.model)
    return {"before": before, "after": after}, events[0]["iterations"]


def _flat(model):
    return np.concatenate([parameter.detach().numpy().reshape(-1) for parameter in model.parameters()]).copy()


def test_a_lost_incarnation_goes_on_from_its_last_synchronisation(ranks, node):
    """Every replica has its own iteration, parameters, moments and outer state back, and what follows equals the
    simulation of both incarnations together."""
    node.start()
    first = ranks(life, 2, PROTECTED, 60, "adam", node.run_dir, node.fence(), 3)
    second = ranks(life, 2, PROTECTED, 60, "adam", node.run_dir, node.fence())
    kept = [event["iterations"] for event in first[0]["events"]]
    periods = kept + [event["iterations"] for event in second[0]["events"]]
    fenced, end = simulated(2, periods, "adam")
    for place, (lost, resumed) in enumerate(zip(first, second, strict=True)):
        assert resumed["began"] == WARMUP + sum(period[place] for period in kept)
        assert min(resumed["fenced"]) == resumed["began"] + 1
        for step, digest in resumed["fenced"].items():
            assert digest == fenced[place][step], f"rank {place}, iteration {step}"
        assert resumed["end"] == end[place]
        assert lost["following"] == set(range(1, WARMUP + 1)), "later no update is known to be followed by a version"
        version = WARMUP + len(kept)
        assert version in lost["versions"] and resumed["versions"][version] == lost["versions"][version]
    assert [event["number"] for event in second[0]["events"]][0] == len(kept) + 1
    assert second[0]["began"] != second[1]["began"]


def test_a_job_that_had_all_its_work_done_trains_no_further(ranks, node):
    node.start()
    first = ranks(life, 2, PROTECTED, LAST, "sgd", node.run_dir, node.fence())
    second = ranks(life, 2, PROTECTED, LAST, "sgd", node.run_dir, node.fence())
    for one, again in zip(first, second, strict=True):
        assert again["fenced"] == {} and again["end"] == one["end"]
        assert again["state"] == one["state"] and again["steps"] == one["steps"]


# ---- refusals ----


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"sync": {"policy": "a_edit", "tau": 4}}, "no effect with a_edit, which synchronises by the clock"),
        ({"sync": {"policy": "edit", "seconds": 4.0}}, "seconds: has no effect with edit: a_edit alone has it"),
        ({"sync": {"policy": "edit", "weights": "tokens"}}, "weights: has no effect with edit: a_edit alone has it"),
        ({"sync": {"policy": "a_edit", "apply": "update"}}, "update is impossible with a_edit"),
        ({"reft": {"versions": "every"}, "sync": {"policy": "a_edit"}}, "every is impossible with a_edit"),
    ],
)
def test_keys_that_contradict_the_policy_are_refused(block, expected):
    with pytest.raises(ConfigError, match=expected):
        Config.from_json(block)


def test_loops_that_cannot_differ_in_iterations_are_refused(ranks):
    assert ranks(_refusals, 2) == [("ConfigError", "ConfigError", "UnsupportedError")] * 2


def _refusals(rank, world):
    names = []
    block = {"sync": {"policy": "a_edit", "warmup": 9}}
    for trial in (
        lambda session: session.resume(),  # no known end
        lambda session: session.resume(0, 9),  # ends in the warm-up
    ):
        training = local.LocalTraining(rank, world)
        session = attach(training.host, Config.from_json(block), context(rank, world))
        with pytest.raises(ConfigError) as refused:
            trial(session)
        names.append(type(refused.value).__name__)
        session.shutdown()

    class Coupled(local.ReducedHost):
        def require_own_pace(self):
            raise UnsupportedError("its replicas agree in each iteration")

    training = local.LocalTraining(rank, world)
    training.host.__class__ = Coupled
    with pytest.raises(UnsupportedError, match="agree in each iteration"):
        attach(training.host, Config.from_json(block), context(rank, world))
    return (*names, "UnsupportedError")


def test_a_snapshot_of_a_edit_is_not_taken_for_one_of_another_policy(ranks, node):
    node.start()
    ranks(life, 2, PROTECTED, 60, "sgd", node.run_dir, node.fence(), 2)
    other = {**PROTECTED, "sync": {"policy": "edit", "tau": 2, "penalty": False}}
    found = ranks(_other_policy, 2, other, node.run_dir, node.fence())
    assert all("resume with a_edit, not edit" in text for text in found)


def _other_policy(rank, world, block, run_dir, token):
    with pytest.raises(ResumeError) as refused:
        life(rank, world, block, 60, "sgd", run_dir, token)
    return str(refused.value)


def test_a_job_that_is_shorter_than_a_period_ends_after_few_iterations_more(ranks):
    found = ranks(life, 2, {"sync": {**POLICY, "seconds": 600.0, "warmup": 0, "apply": "forward"}}, 20)
    done = [one["steps"] for one in found]
    # how many more depends on when the machine lets each replica run; a whole period would be tens of thousands
    assert 40 <= sum(done) <= 400, "the last period is shortened to fit, by the speed of the one before"
    assert found[0]["end"] == found[1]["end"]
