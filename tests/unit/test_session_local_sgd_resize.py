"""Local SGD over a resize: equal to a simulation in one process whose number of replicas changes, bit for bit.

The simulation copies what each replica has of its own by the replica's number; parameters at a synchronisation, anchors
and outer momentum it keeps. The job does that by way of shared memory.
"""

import copy
from typing import Any

import pytest

from ft_plugins.errors import ResumeError, UnsupportedError

from .incarnation import Incarnation
from .systems import local_replicas as local

Node = Any  # the fixture's class lives in conftest

TAU = 3
RATES = {"diloco": (0.7, 0.9), "edit": (0.8, 0.85)}


def _life(rank, world, block, until, run_dir, token, ends):
    one = Incarnation(local.LocalTraining(rank, world, "adam"), block, run_dir, token).run(until)
    if ends:
        one.session.shutdown()
    else:
        one.session._reft.wait_for_capture()
    state = one.session._sync.state()
    return {"resumed": one.resumed, "fenced": one.fenced, "end": one.training.parameters(), "state": state}


class Job:
    """A job on one node, at one size after the other."""

    def __init__(self, node, ranks, sync, versions="sync"):
        self.node, self.ranks = node, ranks
        self.block = {"sync": {"tau": TAU, **sync}, "reft": {"versions": versions}, "node_name": "n"}
        node.start()

    def live(self, world, until, ends=False):
        return self.ranks(_life, world, self.block, until, self.node.run_dir, self.node.fence(), ends)


class Simulated:
    """All replicas in one process."""

    def __init__(self, replicas, policy, late):
        self.simulation = local.Simulation(replicas, "adam")
        self.rates, self.late = RATES[policy], late
        self.completed, self.due = 0, False

    def _targets(self):
        simulation = self.simulation
        return {name: simulation.outer(name, simulation.mean(name), *self.rates) for name in simulation.anchors}

    def _synchronise(self, targets):
        for name, target in targets.items():
            self.simulation.write(name, target)
        self.simulation.remember()
        self.due = False

    def run(self, until):
        """A late synchronisation is of the replicas that there are when it is applied: its version was taken before."""
        fenced = {}
        for step in range(self.completed + 1, until + 1):
            targets = self._targets() if self.due else {}
            self.simulation.backward(step, together=False)
            fenced[step] = self.simulation.digests()
            if self.due:
                self._synchronise(targets)
            self.simulation.update()
            self.due = step % TAU == 0
            if self.due and not self.late:
                self._synchronise(self._targets())
        self.completed = until
        return fenced

    def end(self):
        if self.due:
            self._synchronise(self._targets())
        return list(self.simulation.digests())

    def resize(self, replicas):
        before = self.simulation
        self.simulation = local.Simulation(replicas, "adam")
        self.simulation.anchors, self.simulation.outer_optimizers = before.anchors, before.outer_optimizers
        for number, (model, optimizer) in enumerate(
            zip(self.simulation.models, self.simulation.optimizers, strict=True)
        ):
            source = number % len(before.models)
            model.load_state_dict(before.models[source].state_dict())
            optimizer.load_state_dict(copy.deepcopy(before.optimizers[source].state_dict()))


CASES = [
    pytest.param(3, 2, "wait", "sync", id="one-less"),
    pytest.param(2, 3, "wait", "sync", id="one-more"),
    pytest.param(3, 2, "forward", "sync", id="one-less-forward"),
    pytest.param(3, 2, "update", "sync", id="one-less-in-flight"),
    pytest.param(2, 3, "update", "sync", id="one-more-in-flight"),
    pytest.param(3, 2, "wait", "every", id="one-less-between-synchronisations"),
    pytest.param(2, 3, "update", "every", id="one-more-between-synchronisations"),
]


@pytest.mark.parametrize(("before", "now", "apply", "versions"), CASES)
def test_another_number_of_replicas_continues_as_the_simulation_does(node, ranks, before, now, apply, versions):
    """Interrupted after iteration 8 of a job that is synchronised after 3, 6 and 9."""
    job = Job(node, ranks, {"policy": "diloco", "apply": apply}, versions)
    restored = 6 if versions == "sync" else 8
    expected = Simulated(before, "diloco", late=apply == "update")
    first = job.live(before, 8)
    fenced = expected.run(restored)
    assert all(first[rank]["fenced"][step] == fenced[step][rank] for step in fenced for rank in range(before))
    expected.resize(now)
    second = job.live(now, 13, ends=True)
    fenced, end = expected.run(13), expected.end()
    for rank in range(now):
        assert second[rank]["resumed"] == restored
        assert second[rank]["fenced"] == {step: digests[rank] for step, digests in fenced.items()}
        assert second[rank]["end"] == end[rank]
        assert second[rank]["state"]["number"] == 4, "synchronisations of the whole job"


def test_the_last_replica_continues_through_the_outer_optimizer_alone_and_others_join_it(node, ranks, capfd):
    job = Job(node, ranks, {"policy": "edit", "penalty": False, "apply": "wait"})
    expected = Simulated(2, "edit", late=False)
    job.live(2, 4)
    expected.run(3)
    expected.resize(1)
    (alone,) = job.live(1, 7)
    fenced = expected.run(6)
    assert alone["resumed"] == 3 and all(alone["fenced"][step] == fenced[step][0] for step in fenced)
    (again,) = job.live(1, 8)
    assert again["resumed"] == 6, "alone from the beginning of this incarnation"
    assert again["fenced"][7] == alone["fenced"][7] == expected.simulation.digests()[0]
    expected.resize(3)
    found = job.live(3, 10, ends=True)
    fenced, end = expected.run(10), expected.end()
    for rank in range(3):
        assert found[rank]["resumed"] == 6
        assert found[rank]["fenced"] == {step: digests[rank] for step, digests in fenced.items()}
        assert found[rank]["end"] == end[rank]


def test_statistics_of_norms_start_again_at_another_number_of_replicas_alone(node, ranks):
    job = Job(node, ranks, {"policy": "edit", "apply": "wait"})
    job.live(3, 7)
    same = job.live(3, 10)
    counts = {name: [count for _, _, count in each] for name, each in same[0]["state"]["statistics"].items()}
    assert counts == {name: [3.0] * 3 for name in ("0", "2", "4")}
    fewer = job.live(2, 13, ends=True)
    counts = {name: [count for _, _, count in each] for name, each in fewer[0]["state"]["statistics"].items()}
    assert counts == {name: [1.0] * 2 for name in ("0", "2", "4")} and fewer[0]["resumed"] == 9
    assert fewer[0]["end"] == fewer[1]["end"] or fewer[0]["resumed"] < 13, "iteration 13 is local"


def _refused(rank, world, block, run_dir, token):
    try:
        Incarnation(local.LocalTraining(rank, world, "adam"), block, run_dir, token)
    except (ResumeError, UnsupportedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_one_replica_is_refused_at_a_fresh_start(node, ranks):
    job = Job(node, ranks, {"policy": "edit"})
    (line,) = ranks(_refused, 1, job.block, node.run_dir, node.fence())
    assert line.startswith("UnsupportedError") and "no other replica" in line


def test_local_sgd_is_neither_dropped_nor_switched_on_by_a_resize(node, ranks):
    job = Job(node, ranks, {"policy": "edit"})
    without = {key: value for key, value in job.block.items() if key != "sync"} | {"reft": {}}
    job.live(3, 7)
    for line in ranks(_refused, 2, without, node.run_dir, node.fence()):
        assert "captured under local SGD" in line and "give --sync as before" in line
    node.end()
    node.start()
    ranks(_plain, 3, without, 4, node.run_dir, node.fence())
    for line in ranks(_refused, 2, job.block, node.run_dir, node.fence()):
        assert "captured without local SGD" in line


def _plain(rank, world, block, until, run_dir, token):
    one = Incarnation(local.LocalTraining(rank, world, "adam"), block, run_dir, token)
    one.run(until)
    one.session._reft.wait_for_capture()
