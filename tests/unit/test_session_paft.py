"""PAFT in a session: refused on all ranks alike, driven by the host's hooks, and exact over a lost incarnation."""

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from ft_plugins.config import Config
from ft_plugins.errors import ConfigError, ReplicaError
from ft_plugins.model.inventory import Item, Role
from ft_plugins.session import Session
from ft_plugins.smp.serve.client import Client
from ft_plugins.smp.serve.status import marks_in, newest_common
from ft_plugins.snapshot.segment.paths import remove
from ft_plugins.snapshot.segment.slots import SLOTS, Mark, Version
from ft_plugins.systems.reft.carried import CarryingHost
from harness.plain_host import PlainHost

from .incarnation import Incarnation, context
from .systems import replicas

Node = Any  # the fixture's class lives in conftest

NOISE = "update.gradients:gauss=0.05"
PAFT = {"h": 5, "h_min": 4, "h_max": 6}


def test_one_rank_alone_is_refused_by_the_session():
    with pytest.raises(ConfigError, match="has no effect with one data-parallel replica"):
        Session(PlainHost({"w": torch.zeros(4)}), Config.from_json({"paft": True}), context(0, 1))


def test_ranks_that_are_configured_differently_are_refused_by_name(ranks):
    for error in ranks(_differently, 2):
        assert "not configured the same way on all ranks: paft of rank 1" in error


def _differently(rank, world):
    training = replicas.Training(rank, world)
    try:
        Session(training.host, Config.from_json({"paft": {"h": 5 + rank}}), context(rank, world))
    except ConfigError as error:
        return str(error)
    return ""


def _life(rank, world, block, run_dir, token, until, loaded=0):
    one = Incarnation(replicas.Training(rank, world), block, run_dir, token, loaded).run(until)
    if run_dir is not None:
        one.session._reft.wait_for_capture()  # the last version is sealed, as at the next fence
    return one.resumed, one.versions


def test_a_noised_job_that_ends_while_an_averaging_is_in_flight_goes_on_bit_for_bit(node, ranks):
    """Its replicas have drifted apart: each is resumed with its own state, and the averaging starts again."""
    block = {"paft": PAFT, "faults": NOISE}
    whole = ranks(_life, 2, block, None, 0, 12)
    assert whole[0][1][5] != whole[1][1][5], "apart at the turn"
    node.start()
    protected = {**block, "reft": {}, "node_name": "n"}
    first = ranks(_life, 2, protected, node.run_dir, node.fence(), 5)
    second = ranks(_life, 2, protected, node.run_dir, node.fence(), 12)
    for rank in range(2):
        assert (first[rank][0], second[rank][0]) == (0, 5)
        assert first[rank][1] | second[rank][1] == whole[rank][1]
    slots = node.status()["segments"][0]["slots"]
    assert {slot["iteration"]: slot.get("mark") for slot in slots} == {10: "diverged", 11: "diverged", 12: None}
    turns = node.events("replicas.averaged")
    assert {event.fields["iteration"] for event in turns} >= {5, 9}


def _loaded_after(rank, world):
    """A restore from memory has carried a turn; then the framework's own checkpoint of 30 is loaded."""
    one = Incarnation(replicas.Training(rank, world), {"paft": PAFT})
    turns = {"turn": [34, 6, ""], "diverged": True, "rates_squared": 1.0, "signal": None}
    one.session._carrying.restored_state = {"turns": turns, "offences": {}}
    return one.session.resume(30), one.session._sync._turns.turn.at, one.session._sync._turns.diverged


def test_what_was_carried_before_is_none_of_a_checkpoint_that_is_loaded_later(ranks):
    assert ranks(_loaded_after, 2) == [(30, 35, False)] * 2


AUDIT = {"mode": "audit", "audit_interval": 1}
FLIP = "update.gradients@iteration=4,rank=1,restart=0:flip=29~5"


def _until_found(rank, world, block, run_dir, token, audited=4):
    """Until the verdict on iteration `audited` is there, right before the update after; then the job is gone."""
    one = Incarnation(replicas.Training(rank, world), block, run_dir, token).run(audited)
    one.session.iteration_begin(audited + 1)
    one.training.backward(audited + 1)
    try:
        one.session.before_update(audited + 1)
    except ReplicaError as error:
        return one.versions, str(error)
    return one.versions, ""


@pytest.mark.parametrize("chosen", ["repair", "rollback"])
def test_a_snapshot_of_replicas_that_differ_is_never_resumed_from_and_the_run_is_the_clean_one(node, ranks, chosen):
    clean = ranks(_life, 2, {"paft": AUDIT}, None, 0, 8)
    node.start()
    block = {"paft": {**AUDIT, "on_corruption": chosen}, "reft": {}, "node_name": "n", "faults": FLIP}
    first = ranks(_until_found, 2, block, node.run_dir, node.fence())
    assert first[0][0][4] != first[1][0][4], "two that differ: one of these two"
    assert all(("replicas of iteration 4 differ" in error) == (chosen == "rollback") for _, error in first)
    assert [event.fields["iterations"] for event in node.events("version.voided")] == [[4], [4]]
    second = ranks(_life, 2, {**block, "faults": ""}, node.run_dir, node.fence(), 8)
    for rank in range(2):
        assert second[rank][0] == 3
        assert {step: clean[rank][1][step] for step in range(4, 9)} == second[rank][1]


def _until_agreed(rank, world, block, run_dir, token, first):
    """Until the last version is sealed and its replicas are compared, in either order, but no fence has come."""
    one = Incarnation(replicas.Training(rank, world), block, run_dir, token)
    reft, held = one.session._reft, threading.Event()
    if first == "compared":
        sealed = reft.sealed
        reft.sealed = lambda commit: (commit.version.iteration < 3 or held.wait(60)) and sealed(commit)
    one.run(3)
    if first == "sealed":
        reft.wait_for_capture()
    one.session._sync._verdicts.under_way.wait()
    held.set()
    reft.wait_for_capture()


@pytest.mark.parametrize("first", ["sealed", "compared"])
def test_a_version_is_certified_as_soon_as_it_is_sealed_and_compared_so_that_a_node_may_leave_at_it(node, ranks, first):
    node.start()
    block = {"paft": AUDIT, "reft": {}, "node_name": "n"}
    ranks(_until_agreed, 2, block, node.run_dir, node.fence(), first)
    for segment in node.status()["segments"]:
        assert {slot["iteration"]: slot.get("mark") for slot in segment["slots"]}[3] == "certified"


EVERY = 5  # iterations between two audits: more than there are slots for
ROLLBACK = {**AUDIT, "audit_interval": EVERY, "on_corruption": "rollback"}
LATE_FLIP = "update.gradients@iteration=13,rank=1,restart=0:flip=29~5"  # seen by the audit of 15


def _until_sent_back(rank, world, block, run_dir, token, until):
    """As a job lives until an audit sends it back; what each rank was told then."""
    one = Incarnation(replicas.Training(rank, world), block, run_dir, token)
    try:
        one.run(until)
    except ReplicaError as error:
        return one.resumed, one.versions, str(error)
    return one.resumed, one.versions, ""


def _rests(rank, world, block, run_dir, token):
    """Before which iterations a verdict had the capture under way waited for."""
    one = Incarnation(replicas.Training(rank, world), block, run_dir, token)
    found = []
    wait = one.session._reft.wait_for_capture
    one.session._reft.wait_for_capture = lambda: (found.append(one.completed + 1), wait())
    one.run(6)
    return found


def test_replicas_that_agree_before_the_forward_have_no_capture_waited_for(node, ranks):
    node.start()
    block = {"paft": {**AUDIT, "audit_at": "forward"}, "reft": {}, "node_name": "n", "faults": FLIP}
    assert ranks(_rests, 2, block, node.run_dir, node.fence()) == [[5], [5]]


def test_a_job_that_is_sent_back_resumes_from_the_version_in_which_replicas_agreed_last_and_is_the_clean_one(
    node, ranks
):
    """Captured after each iteration, compared after each fifth: without a slot of its own what agreed would be gone."""
    clean = ranks(_life, 2, {"paft": {**AUDIT, "audit_interval": EVERY}}, None, 0, 17)
    node.start()
    block = {"paft": ROLLBACK, "reft": {}, "node_name": "n", "faults": LATE_FLIP}
    first = ranks(_until_sent_back, 2, block, node.run_dir, node.fence(), 17)
    assert all(resumed == 0 and "replicas of iteration 15 differ" in error for resumed, _, error in first)
    assert first[0][1][13] != first[1][1][13]
    assert sorted(first[0][1]) == list(range(1, 16))
    node.kill()
    node.start()  # what was said of a version outlives the process that keeps it, too
    assert {newest_common(node.status()), *marks_in(node.status())} == {Version(1, 10)}
    assert marks_in(node.status())[Version(1, 10)] is Mark.CERTIFIED
    second = ranks(_life, 2, {**block, "faults": ""}, node.run_dir, node.fence(), 17)
    for rank in range(2):
        assert second[rank][0] == 10
        assert second[rank][1] == {step: clean[rank][1][step] for step in range(11, 18)}


EARLY_FLIP = "update.gradients@iteration=3,rank=2,restart=0:flip=29~5"  # seen by the first audit there is


@pytest.mark.parametrize("chosen", ["repair", "rollback"])
def test_a_job_that_went_wrong_before_its_first_certified_version_starts_from_the_beginning(node, ranks, chosen):
    """One of three ranks is named; what the right ones hold is of no use without its share."""
    clean = ranks(_life, 3, {"paft": {**AUDIT, "audit_interval": EVERY}}, None, 0, 8)
    node.start()
    paft = {**ROLLBACK, "on_corruption": chosen}
    block = {"paft": paft, "reft": {}, "node_name": "n", "faults": EARLY_FLIP}
    first = ranks(_until_found, 3, block, node.run_dir, node.fence(), EVERY)
    assert all(("replicas of iteration 5 differ" in error) == (chosen == "rollback") for _, error in first)
    assert {event.rank: event.fields["since"] for event in node.events("version.voided")} == {0: 0, 1: 0, 2: 0}
    second = ranks(_life, 3, {**block, "faults": ""}, node.run_dir, node.fence(), 8)
    assert second == [(0, versions) for _, versions in clean]


def test_a_verdict_behind_an_update_voids_snapshots_as_one_before_an_update_does(node, ranks):
    """An averaging that is waited for has the verdict on its own iteration awaited before it."""
    node.start()
    block = {"paft": {**ROLLBACK, "mode": "sync", "h": EVERY}, "reft": {}, "node_name": "n"}
    first = ranks(_until_sent_back, 2, {**block, "faults": SEEN_BY_FIRST}, node.run_dir, node.fence(), 8)
    assert all("replicas of iteration 5 differ" in error for _, _, error in first)
    assert [event.fields["since"] for event in node.events("version.voided")] == [0, 0]
    assert not marks_in(node.status())


SEEN_BY_FIRST = "update.gradients@iteration=3,rank=1,restart=0:flip=29~5"


def test_a_job_that_is_killed_before_the_verdict_goes_back_past_what_was_not_compared(node, ranks):
    """The parts of 14 are of unlike replicas; put together they would look alike to every audit to come."""
    clean = ranks(_life, 2, {"paft": {**AUDIT, "audit_interval": EVERY}}, None, 0, 17)
    node.start()
    block = {"paft": {**AUDIT, "audit_interval": EVERY}, "reft": {}, "node_name": "n", "faults": LATE_FLIP}
    first = ranks(_life, 2, block, node.run_dir, node.fence(), 14)
    assert first[0][1][14] != first[1][1][14]
    held = {slot["iteration"]: slot.get("mark") for slot in node.status()["segments"][0]["slots"]}
    assert held == {10: "certified", 12: "unaudited", 13: "unaudited", 14: None}
    second = ranks(_life, 2, {**block, "faults": ""}, node.run_dir, node.fence(), 17)
    for rank in range(2):
        assert second[rank] == (10, {step: clean[rank][1][step] for step in range(11, 18)})
    (done,) = {(event.fields["iteration"], event.fields["mark"]) for event in node.events("state.restored")}
    assert done == (10, "certified")


def test_a_checkpoint_that_the_framework_saved_before_the_verdict_is_not_loaded_now_nor_at_a_later_restart(node, ranks):
    """Replicas differ since 13; the framework has saved 14 and loads it at every start. Audits are after 5, 10, 15."""
    clean = ranks(_life, 2, {"paft": {**AUDIT, "audit_interval": EVERY}}, None, 0, 17)
    node.start()
    block = {"paft": {**AUDIT, "audit_interval": EVERY}, "reft": {}, "node_name": "n", "faults": LATE_FLIP}
    ranks(_life, 2, block, node.run_dir, node.fence(), 14)
    block["faults"] = ""
    assert ranks(_life, 2, block, node.run_dir, node.fence(), 11, 14)[0][0] == 10
    again = ranks(_life, 2, block, node.run_dir, node.fence(), 17, 14)
    for rank in range(2):
        assert again[rank] == (10, {step: clean[rank][1][step] for step in range(11, 18)})


COUNTS_SECONDS = 50.0


def _on_two_nodes(rank, world, block, places, rest, until):
    """A life with a node for each rank, that pauses after iteration `rest` until a version counts on its node."""
    run_dir, token = places[rank]
    one = Incarnation(replicas.Training(rank, world), {**block, "node_name": run_dir.name}, run_dir, token)
    with Client(run_dir) as client:

        def told(name):
            deadline = time.monotonic() + COUNTS_SECONDS
            while client.status()["node_tier"][name] != [1, EVERY]:
                assert time.monotonic() < deadline, f"no version {name} within {COUNTS_SECONDS:.0f} s"
                time.sleep(0.01)

        if rest:
            told("exchange")
            one.run(rest)
            told("committed")
    one.run(until)
    one.session._reft.wait_for_capture()
    return one.resumed, one.versions


def test_a_lost_node_is_rebuilt_from_a_version_that_is_certified(nodes, ranks, tmp_path):
    """Only versions that are compared go to other nodes, though every one is captured; 11 to 13 nobody has compared."""
    secret = tmp_path / "secret"
    secret.write_text("a secret of this job alone")
    secret.chmod(0o600)
    audit = {**AUDIT, "audit_interval": EVERY}
    clean = ranks(_life, 2, {"paft": audit}, None, 0, 15)
    block = {"paft": audit, "reft": {"redundancy": "raim5"}, "secret_file": str(secret), "interface": "lo"}

    def places(*names):
        for name in names:
            nodes(name).start()
        return [(nodes(name).run_dir, nodes(name).fence()) for name in names]

    ranks(_on_two_nodes, 2, {**block, "faults": LATE_FLIP}, places("n0", "n1"), 6, 13)
    assert len(nodes("n0").status()["segments"][0]["slots"]) == SLOTS + 3
    nodes("n1").kill()
    remove(nodes("n1").job, "n1")
    second = ranks(_on_two_nodes, 2, block, places("n0", "n2"), 0, 15)
    (resumed,) = {found for found, _ in second}
    assert resumed in (5, 10), "whichever had come to count"
    restored = nodes("n2").events("state.restored")
    (done,) = {(e.fields["iteration"], e.fields["tier"], e.fields["mark"]) for e in restored}
    assert done == (resumed, "node", "certified")
    for rank, (_, versions) in enumerate(second):
        assert versions == {step: clean[rank][1][step] for step in range(resumed + 1, 16)}


def test_where_nothing_is_compared_there_is_no_slot_more_and_the_newest_is_resumed_from(node, ranks):
    node.start()
    block = {"reft": {}, "node_name": "n"}
    assert [resumed for resumed, _ in ranks(_life, 2, block, node.run_dir, node.fence(), 5)] == [0, 0]
    slots = node.status()["segments"][0]["slots"]
    assert len(slots) == SLOTS and not any("mark" in slot for slot in slots)
    assert [resumed for resumed, _ in ranks(_life, 2, block, node.run_dir, node.fence(), 6)] == [5, 5]


class Carried:
    """A synchronizer with a tensor and a number, whose replicas may differ."""

    name = "carried"

    def captured(self, item):
        return replace(item, replicas=(0,))

    def items(self):
        return [Item("carried:w", "float32", (4,), 16, Role.OUTER, (0, 1))]

    def tensors(self):
        return {"carried:w": torch.zeros(4)}

    def state(self):
        return {"turn": 3}

    def inherited(self, previous):
        return [number for number, state in enumerate(previous) if state is not None]

    def continued(self, taken_over):
        return {"turn": 4, "of": len(taken_over)}


def test_what_is_carried_comes_back_and_the_host_does_not_see_it():
    seen = []
    host = PlainHost({"w": torch.zeros(4)}, world_size=2, replicated=True, set_state=lambda state: seen.append(state))
    carrying = CarryingHost(host)
    assert carrying.small_state().keys() == host.small_state().keys() and carrying.framework == host.framework
    carrying.synchronizer = Carried()
    small = carrying.small_state()
    carrying.restore(small)
    assert carrying.restored_state == {"turn": 3} and seen == [{}]
    carrying.restore(host.small_state())
    assert carrying.restored_state is None
    assert carrying.inherited([host.small_state(), small]) == [1]
    merged = carrying.merged([small])
    assert merged.pop("ft_plugins.carried") == {"turn": 4, "of": 1} and merged.keys() == host.small_state().keys()
    assert [(item.name, item.replicas) for item in carrying.inventory().items] == [("carried:w", (0, 1)), ("w", (0,))]
    assert carrying.tensors().keys() == {"carried:w", "w"}
