"""A session over a loop of torch alone: real SMP, forked ranks; what it restores, refuses, and lives without."""

import functools
import json
import random
import socket
import threading
import time
from typing import Any

import pytest
import torch

from ft_plugins.config import Config
from ft_plugins.errors import FtError
from ft_plugins.session import attach
from ft_plugins.snapshot.segment.header import AT_END, EARLY, UNKNOWN
from ft_plugins.snapshot.segment.segment import Segment
from ft_plugins.systems import followed
from harness.plain_host import PlainHost

from .incarnation import context

Node = Any  # the fixture's class lives in conftest


class Loop:
    """A training loop whose state tells the iteration: `w` holds it, `drawn` is a random number of each iteration."""

    def __init__(self, rank, world, *, replicated=False, ballast=0, meets=False, **fingerprint):
        """`meets`: as in training, no rank updates before all have come so far."""
        self.meets = meets
        self.iteration = 0
        self.drawn = []
        self.ballast = "x" * ballast
        self.odd = None
        self.w = torch.zeros(1000)
        tensors = {"w": self.w, "step": torch.zeros(())}
        self.host = PlainHost(
            tensors, rank=rank, world_size=world, replicated=replicated, fingerprint=fingerprint,
            get_state=self._state, set_state=self._restore,
        )  # fmt: skip
        torch.manual_seed(7)
        random.seed(7)

    def _state(self):
        return {"iteration": self.iteration, "drawn": self.drawn, "ballast": self.ballast, "odd": self.odd}

    def _restore(self, state):
        self.iteration, self.drawn = state["iteration"], list(state["drawn"])

    def run(self, session, until):
        for step in range(self.iteration + 1, until + 1):
            session.iteration_begin(step)
            drawn = torch.rand(()).item() + random.random()
            if self.meets:
                torch.distributed.barrier()
            session.before_update(step)
            self.w.fill_(step)
            session.after_update(step)
            self.iteration = step
            self.drawn.append(drawn)
            session.iteration_end(step)


def config(**block):
    return Config.from_json({"reft": {}, **block})


def _incarnation(rank, world, run_dirs, token, until, options):
    """One life of a rank: attach, resume, train. What became of it, errors included."""
    given = dict(options)
    loaded, order = given.pop("loaded", 0), given.pop("in_order", False)
    loop = Loop(rank, world, **given.pop("loop", {}), **given.pop("loop_of", {}).get(rank, {}))
    loop.odd = given.pop("odd", {}).get(rank)
    found = {"error": None}
    try:
        settings = config(**{"node_name": run_dirs[rank].name if run_dirs[rank] else f"n{rank}", **given})
        session = attach(loop.host, settings, context(rank, world, run_dirs[rank], token))
        found["resumed"] = session.resume(loaded)
        found["restored_w"], found["restored_iteration"] = set(loop.w.tolist()), loop.iteration
        loop.iteration = found["resumed"]
        loop.run(session, until)
        session.before_update(until + 1)
        if order:
            session.shutdown()
            session.shutdown()
    except FtError as error:
        found["error"] = (type(error).__name__, str(error), error.echo)
    return found | {"iteration": loop.iteration, "drawn": loop.drawn}


@pytest.fixture
def live(node, ranks):
    """One incarnation of a job of one rank, which is then gone without an orderly end."""
    node.start()

    def incarnation(until, **options):
        token = node.fence()
        (found,) = ranks(_incarnation, 1, [node.run_dir], token, until, options)
        return found

    return incarnation


def test_the_next_incarnation_goes_on_where_the_last_one_stood_random_numbers_included(node, live):
    whole = live(9, resume="fresh")
    first = live(5, resume="fresh")
    second = live(9)
    assert (first["resumed"], second["resumed"], second["restored_iteration"]) == (0, 5, 5)
    assert second["restored_w"] == {5.0}
    assert second["drawn"] == whole["drawn"] and len(whole["drawn"]) == 9
    done = node.events("state.restored")[-1].fields
    assert (done["iteration"], done["completed"], done["lost"], done["tier"]) == (5, 5, 0, "process")
    commits = [event.fields["iteration"] for event in node.events("snapshot.sealed")]
    assert commits == [*range(1, 10), *range(1, 6), *range(6, 10)]
    assert len(node.events("fence.waited")) >= 15


def test_a_checkpoint_that_cannot_be_written_stands_in_the_jobs_own_log_once(node, ranks, tmp_path, capfd):
    node.start(armed="persist.write:enospc")
    reft = {"checkpoint_dir": str(tmp_path / "ck"), "checkpoint_interval": 1}

    def live(until):
        ranks(_incarnation, 1, [node.run_dir], node.fence(), until, {"reft": reft})

    live(2)
    deadline = time.monotonic() + 30
    while not node.events("checkpoint.failed"):
        assert time.monotonic() < deadline
    capfd.readouterr()  # the first ranks may have ended before they could print it
    live(9)
    alarms = [line for line in capfd.readouterr().err.splitlines() if "checkpoint.failed" in line]
    assert len(alarms) == 1 and alarms[0].startswith(f"ft_plugins: checkpoint.failed: node {node.name}: iteration ")
    assert "No space left on device" in alarms[0] and "training continues, none is complete yet" in alarms[0]


def test_storage_that_is_asked_for_is_resumed_from_although_memory_has_newer_and_voids_it(node, live, tmp_path):
    reft = {"checkpoint_dir": str(tmp_path / "ck"), "checkpoint_interval": 4}
    live(4, reft=reft)
    deadline = time.monotonic() + 30
    while not node.events("checkpoint.completed"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    live(6, reft=reft)
    assert live(0, reft=reft)["resumed"] == 6, "as long as memory has a version, storage is not read"
    found = live(0, resume="storage", reft=reft)
    assert (found["error"], found["resumed"], found["restored_w"]) == (None, 4, {4.0})
    assert node.events("state.restored")[-1].fields["tier"] == "storage"
    assert live(0, reft=reft)["resumed"] == 4, "versions 5 and 6 are void"


def test_a_first_start_prints_no_alarm_and_a_start_that_loses_iterations_does(node, live, capfd):
    live(3)
    printed, alarms = capfd.readouterr()
    assert "ft_plugins: training starts from the beginning (no version was captured before)" in printed
    assert "training.started" not in alarms and "state.lost" not in alarms
    assert [event.name for event in node.events("training.started") + node.events("state.lost")] == ["training.started"]
    live(1, resume="fresh")
    printed, alarms = capfd.readouterr()
    assert "recovery: from the beginning (--ftp-resume fresh), 3 lost" in printed
    assert f"state.lost: rank 0 (node {node.run_dir.name}): --ftp-resume fresh" in alarms


def test_encryption_on_a_single_node_says_that_it_has_no_effect(live, capfd, tmp_path):
    (secret := tmp_path / "secret").write_bytes(b"sixteen bytes or more")
    secret.chmod(0o600)
    assert live(1, secret_file=str(secret), encrypt=True)["error"] is None
    assert "--ftp-encrypt has no effect on snapshots: no node of this job sends any" in capfd.readouterr().out
    live(2, secret_file=str(secret))
    assert "--ftp-encrypt has no effect" not in capfd.readouterr().out


def test_an_interval_captures_every_so_many_iterations_and_counts_what_is_lost(node, live):
    live(8, reft={"interval": 3})
    assert [event.fields["iteration"] for event in node.events("snapshot.sealed")] == [3, 6]
    assert live(8, reft={"interval": 3})["resumed"] == 6
    done = node.events("state.restored")[-1].fields
    assert (done["iteration"], done["completed"], done["lost"]) == (6, 8, 2)


@pytest.mark.parametrize(
    "resume, loaded, resumed, restored",
    [
        ("auto", 0, 5, True),
        ("auto", 4, 5, True),
        ("auto", 5, 5, True),
        ("auto", 6, 6, False),
        ("memory", 0, 5, True),
        ("memory", 6, 6, False),
        ("fresh", 0, 0, False),
        ("fresh", 3, 3, False),
        ("storage", 3, 3, False),
        ("before:6", 0, 5, True),
        ("before:6", 4, 5, True),
    ],
)
def test_what_is_resumed_from(live, resume, loaded, resumed, restored):
    """Given version 5 in memory: the larger iteration wins, unless one tier only was asked for."""
    live(5)
    found = live(0, resume=resume, loaded=loaded)
    assert found["error"] is None and found["resumed"] == resumed
    assert found["restored_w"] == ({5.0} if restored else {0.0})
    assert found["restored_iteration"] == (5 if restored else 0)


def test_a_job_that_goes_back_to_before_an_iteration_has_lost_what_is_newer(live):
    live(7)  # three slots: versions 5, 6, 7
    found = live(0, resume="before:7")
    assert (found["error"], found["resumed"], found["restored_w"]) == (None, 6, {6.0})
    found = live(0)
    assert (found["error"], found["resumed"]) == (None, 6), "version 7 is void"


@pytest.mark.parametrize(
    ("resume", "loaded", "said"),
    [
        ("before:5", 0, "there is no older version that all ranks can have; in memory: rank 0: 5 (lineage 1), 6 (li"),
        ("before:7", 7, "loaded its own checkpoint of iteration 7, which every restart would load again"),
    ],
)
def test_going_back_to_what_is_not_there_is_refused_and_lists_what_is_there(live, resume, loaded, said):
    live(7)
    kind, text, _ = live(0, resume=resume, loaded=loaded)["error"]
    assert kind == "ResumeError" and f"--ftp-resume {resume} was asked for" in text and said in text
    assert live(0)["resumed"] == 7, "nothing became void"


def test_memory_that_was_asked_for_and_holds_nothing_is_refused(live):
    for loaded in (0, 4):
        kind, text, echo = live(3, resume="memory", loaded=loaded)["error"]
        assert (kind, echo) == ("ResumeError", False)
        assert "--ftp-resume memory was asked for, but no version was captured before" in text


def test_a_node_alone_does_not_begin_from_nothing_what_went_on_without_it(node, live):
    """It was a spare of a job that went on in lineage 3, and dropped what it held."""
    node.kill()
    (node.run_dir / "released.json").write_text("3")
    node.start()
    kind, text, _ = live(3)["error"]
    assert kind == "ResumeError" and "went on in lineage 3 on other nodes" in text and "--ftp-resume fresh" in text
    assert live(3, resume="fresh")["resumed"] == 0
    assert live(4)["resumed"] == 3 and node.events("state.restored")[-1].fields["lineage"] == 4


def test_memory_that_was_asked_for_without_protection_is_refused(ranks):
    """It would be a start from nothing, in silence."""
    (found,) = ranks(_incarnation, 1, [None], 0, 3, {"resume": "memory"})
    assert found["error"] is not None and found["error"][0] == "ResumeError" and found["iteration"] == 0


def test_another_jobs_memory_is_refused_and_kept_and_fresh_drops_it(live):
    live(5, loop={"seed": 1})
    kind, text, _ = live(5, loop={"seed": 2})["error"]
    assert kind == "ResumeError" and "seed: 1 -> 2" in text
    assert live(5, loop={"seed": 1})["resumed"] == 5
    assert live(2, loop={"seed": 2}, resume="fresh")["resumed"] == 0
    assert live(2, loop={"seed": 2})["resumed"] == 2


def test_small_state_that_measures_more_at_a_restart_is_still_the_same_job(live):
    """Beyond the floor its room depends on its size at start."""
    live(3, loop={"ballast": 50_000})
    assert live(3, loop={"ballast": 50_100})["resumed"] == 3
    assert live(3, loop={"ballast": 49_900})["resumed"] == 3


def test_small_state_of_an_unknown_type_ends_the_job_at_start_by_the_name_of_its_place(live):
    kind, text, _ = live(3, odd={0: {1, 2}})["error"]
    assert kind == "InventoryError" and "state['caller']['odd']" in text and "builtins.set" in text


# ---- degrading ----


def test_a_failed_capture_costs_protection_not_training_for_as_long_as_allowed(node, live):
    """Given a capture of iteration 3 that fails; its fence is before the update of 4."""
    found = live(20, faults="capture.bucket.begin@iteration=3:raise", max_unprotected_steps=4)
    kind, text, _ = found["error"]
    assert kind == "ProtectionError"
    assert "rank 0: iteration 7" in text and "after 4 iterations without protection" in text
    (lost,) = node.events("protection.lost")
    assert "capture.bucket.begin" in lost.fields["reason"] and lost.fields["max_steps"] == 4
    assert [event.fields["iteration"] for event in node.events("snapshot.sealed")] == [1, 2]
    assert live(0)["resumed"] == 2, "what was captured before is still there"
    (restored,) = node.events("state.restored")
    assert (restored.fields["completed"], restored.fields["lost"]) == (7, 5), "what ran without protection is lost too"


def test_training_ends_well_when_the_loss_of_protection_was_short_enough(node, live):
    found = live(6, faults="capture.seal.before@iteration=3:raise", max_unprotected_steps=4, in_order=True)
    assert found["error"] is None and found["iteration"] == 6 and len(found["drawn"]) == 6
    assert len(node.events("protection.lost")) == 1


def test_protection_that_was_lost_and_is_gained_again_by_a_restart_is_said_once(node, live, capfd):
    live(6, faults="capture.seal.before@iteration=3:raise")
    said = f"ft_plugins: protection.restored: rank 0 (node {node.run_dir.name}): snapshots are taken again\n"
    assert said not in capfd.readouterr().err
    live(7)
    assert capfd.readouterr().err.count(said) == 1
    live(8)
    assert said not in capfd.readouterr().err
    assert len(node.events("protection.restored")) == 1


def test_small_state_that_outgrows_its_room_costs_protection_only(node, live, monkeypatch):
    def growing(self):
        return {"iteration": self.iteration, "drawn": self.drawn, "ballast": "x" * (self.iteration // 3 * 70_000)}

    monkeypatch.setattr(Loop, "_state", growing)
    found = live(5)
    assert found["error"] is None and found["iteration"] == 5
    assert "small state has grown" in node.events("protection.lost")[-1].fields["reason"]


def test_without_an_smp_training_goes_on_unprotected_unless_protection_is_required(ranks):
    (found,) = ranks(_incarnation, 1, [None], 0, 5, {"max_unprotected_steps": 6})
    assert found["error"] is None and (found["resumed"], found["iteration"]) == (0, 5)
    (found,) = ranks(_incarnation, 1, [None], 0, 5, {"max_unprotected_steps": 5})
    assert found["error"][0] == "ProtectionError" and found["iteration"] == 5
    (found,) = ranks(_incarnation, 1, [None], 0, 5, {"require_protection": True})
    assert found["error"][:1] == ("ProtectionError",) and "ft-run" in found["error"][1] and found["iteration"] == 0


def test_a_superseded_incarnation_ends_rather_than_going_on_unprotected(node, live, monkeypatch):
    update = Loop.run

    def run(self, session, until):
        update(self, session, 2)
        Segment(node.segment(0)).header.token = 99
        update(self, session, until)

    monkeypatch.setattr(Loop, "run", run)
    found = live(5)
    assert found["error"][0] == "FencedError" and found["iteration"] in (2, 3), "at the next fence or version point"
    assert node.events("protection.lost") == []


def test_an_orderly_end_leaves_the_segment_without_an_owner(node, live):
    live(3)
    assert node.status()["segments"][0]["owner_pid"] != 0
    assert live(4, in_order=True)["error"] is None
    (told,) = node.status()["segments"]
    assert told["owner_pid"] == 0 and told["completed"] == 4
    assert live(4)["resumed"] == 4


def test_an_smp_that_is_gone_at_the_end_does_not_fail_a_training_that_is_done(node, live, monkeypatch):
    from ft_plugins.systems.reft import reft

    update = Loop.run

    def run(self, session, until):
        update(self, session, until)
        node.kill()
        monkeypatch.setattr(reft, "Client", functools.partial(reft.Client, timeout=0.2))

    monkeypatch.setattr(Loop, "run", run)
    found = live(3, in_order=True)
    assert found["error"] is None and found["iteration"] == 3
    assert "no SMP answers" in node.events("protection.lost")[-1].fields["reason"]
    node.start()


# ---- several ranks ----


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.write_text("known to the nodes of this job")
    path.chmod(0o600)
    return str(path)


def test_ranks_on_two_nodes_resume_together_what_they_share_and_what_is_their_own(nodes, ranks, secret):
    for replicated in (True, False):
        both = [nodes(f"{name}{replicated}") for name in "ab"]
        for node in both:
            node.start()
        dirs = [node.run_dir for node in both]
        options = {"loop": {"replicated": replicated}, "secret_file": secret}
        assert [node.fence() for node in both] == [1, 1]
        first = ranks(_incarnation, 2, dirs, 1, 4, options)
        assert [node.fence() for node in both] == [2, 2]
        second = ranks(_incarnation, 2, dirs, 2, 6, options)
        assert [found["error"] for found in (*first, *second)] == [None] * 4
        assert [found["resumed"] for found in second] == [4, 4]
        assert [found["restored_w"] for found in second] == [{4.0}, {4.0}]
        captured = [node.events("snapshot.sealed")[-1].fields["bytes"] for node in both]
        assert sum(captured) == (4096 if replicated else 2 * 4096), (
            "what is shared is captured once, a half on each node"
        )
        assert max(captured) - min(captured) <= 64


def until_counts(node, iteration):
    """Wait until a version of that iteration counts for the node tier."""
    deadline = time.monotonic() + 20
    while (node.status()["node_tier"]["committed"] or [0, 0])[1] != iteration:
        assert time.monotonic() < deadline, node.status()["node_tier"]
        time.sleep(0.01)


def three_nodes_that_guard_iteration_4(nodes, ranks, options):
    """A job of three ranks on three nodes that has ended at iteration 4, which counts."""
    three = [nodes(name) for name in "abc"]
    for node in three:
        node.start()
    for token in (1, 2):  # the second time what is in memory is restored, and counts as soon as all nodes agree
        assert [node.fence() for node in three] == [token] * 3
        found = ranks(_incarnation, 3, [node.run_dir for node in three], token, 4, options)
        assert [each["error"] for each in found] == [None] * 3
    for node in three:
        until_counts(node, 4)
    return three


def substitute(three, nodes, *lost, token=3):
    """End those nodes with their memory, put fresh ones in their places; all stand under `token`."""
    for position in lost:
        three[position].end()
        three[position] = nodes("s" + "abc"[position])
        three[position].start()
    for node in three:
        while node.fence() < token:
            continue


@pytest.mark.parametrize("replicated", [True, False])
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_the_ranks_of_a_lost_node_resume_on_another_one_from_parity(nodes, ranks, secret, replicated, lost):
    options = {"loop": {"replicated": replicated}, "secret_file": secret}
    three = three_nodes_that_guard_iteration_4(nodes, ranks, options)
    substitute(three, nodes, lost)
    # no iteration more: a later version could be the one that counts below
    second = ranks(_incarnation, 3, [node.run_dir for node in three], 3, 4, options)
    assert [found["error"] for found in second] == [None] * 3
    assert [found["resumed"] for found in second] == [4] * 3
    assert [found["restored_w"] for found in second] == [{4.0}] * 3
    assert second[lost]["drawn"] == second[(lost + 1) % 3]["drawn"], "its random numbers go on as the others' do"
    (done,) = [event for event in three[lost].events("state.restored") if event.rank == lost]
    assert (done.fields["tier"], done.fields["iteration"], done.fields["lost"]) == ("node", 4, 0)
    (rebuilt,) = three[lost].events("slot.rebuilt")
    assert rebuilt.fields["decoded"] and rebuilt.fields["about"] == lost
    for node in three:
        until_counts(node, 4)
        told = json.loads((node.run_dir / "protection.json").read_text())
        assert told["committed"] == told["base"] == [1, 4], "on every node, the fresh one too"


def test_ranks_that_moved_to_other_nodes_take_their_slots_along_even_when_one_is_lost(nodes, ranks, secret):
    """A rendezvous that sorts nodes anew gives every rank another node; a fresh one stands where the lost one stood."""
    options = {"secret_file": secret}
    three = three_nodes_that_guard_iteration_4(nodes, ranks, options)
    for lost, token in ((None, 3), (0, 4)):
        three = [three[1], three[2], three[0]]
        if lost is None:
            assert [node.fence() for node in three] == [token] * 3
        else:
            substitute(three, nodes, lost, token=token)
        found = ranks(_incarnation, 3, [node.run_dir for node in three], token, 4, options)
        assert [each["error"] for each in found] == [None] * 3
        assert [each["restored_w"] for each in found] == [{4.0}] * 3
        for node in three:
            until_counts(node, 4)
    decoded = {
        event.fields["about"]: event.fields["decoded"] for node in three for event in node.events("slot.rebuilt")[-1:]
    }
    # the fresh node stands first: rank 0 moved there from a node that lives, what the lost one held was rank 1's
    assert decoded == {0: False, 1: True, 2: False}
    for node in three:
        held = node.status()["segments"]
        assert len(held) == 1, "what moved away is given back"


def test_two_lost_nodes_of_a_group_are_one_too_many_and_nothing_starts_from_the_beginning(nodes, ranks, secret):
    options = {"secret_file": secret}
    three = three_nodes_that_guard_iteration_4(nodes, ranks, options)
    substitute(three, nodes, 1, 2)
    found = ranks(_incarnation, 3, [node.run_dir for node in three], 3, 6, options)
    assert {error[0] for error in (each["error"] for each in found)} == {"ResumeError"}
    assert "cannot be restored" in found[0]["error"][1] and "RAIM5" in found[0]["error"][1]


def test_what_one_rank_is_refused_for_ends_all_and_only_his_is_no_echo(node, ranks):
    node.start()
    run_dirs = [node.run_dir] * 2
    ranks(_incarnation, 2, run_dirs, node.fence(), 3, {"loop": {"seed": 1}})
    found = ranks(_incarnation, 2, run_dirs, node.fence(), 3, {"loop_of": {0: {"seed": 1}, 1: {"seed": 2}}})
    assert [outcome["error"][0] for outcome in found] == ["ResumeError"] * 2
    assert [outcome["error"][2] for outcome in found] == [True, False]
    assert all("rank 1" in outcome["error"][1] and "seed: 1 -> 2" in outcome["error"][1] for outcome in found)
    found = ranks(_incarnation, 2, run_dirs, node.fence(), 3, {"loop": {"seed": 1}})
    assert [outcome["resumed"] for outcome in found] == [3, 3]


def test_a_rank_without_protection_leaves_all_without_and_all_know(node, ranks):
    """One node has no SMP: no version would ever be complete."""
    node.start()
    found = ranks(_incarnation, 2, [node.run_dir, None], node.fence(), 3, {})
    assert [outcome["error"] for outcome in found] == [None, None]
    assert [outcome["iteration"] for outcome in found] == [3, 3]
    assert node.events("protection.lost")[-1].fields["reason"] == "rank 1 is not protected"
    assert node.events("snapshot.sealed") == []
    found = ranks(_incarnation, 2, [node.run_dir, None], node.fence(), 3, {"require_protection": True})
    assert [outcome["error"][0] for outcome in found] == ["ProtectionError"] * 2
    assert [outcome["error"][2] for outcome in found] == [True, False]


def _connections_after_a_refusal(rank, world):
    with pytest.raises(FtError):
        attach(Loop(rank, world).host, config(require_protection=True), context(rank, world, None, 0))
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ft-")]


def test_a_session_that_does_not_start_keeps_no_connection(ranks):
    assert ranks(_connections_after_a_refusal, 2) == [[], []]


def test_a_loss_of_protection_on_one_rank_alone_leaves_the_last_version_of_all(node, ranks):
    node.start()
    run_dirs = [node.run_dir] * 2
    faults = "capture.bucket.begin@iteration=3,rank=1:raise"
    found = ranks(_incarnation, 2, run_dirs, node.fence(), 4, {"faults": faults, "loop": {"meets": True}})
    assert [outcome["error"] for outcome in found] == [None, None]
    # whether rank 0 hears of it before its last iteration is a matter of time; if it does, it stops as an echo
    assert [event.rank for event in node.events("protection.lost") if not event.fields["echo"]] == [1]
    found = ranks(_incarnation, 2, run_dirs, node.fence(), 4, {})
    assert [outcome["resumed"] for outcome in found] == [2, 2]


def _cut_off(rank, world, run_dir, token, faults):
    """Ranks that lose the connection between them at the end of iteration 2, and train on."""
    followed.QUIET_SECONDS = 0.0
    loop = Loop(rank, world, meets=True)
    session = attach(loop.host, config(faults=faults), context(rank, world, run_dir, token))
    session.resume(0)
    loop.run(session, 2)
    switch = session._collective._switch
    assert switch is not None
    if rank == 0:
        (link,) = switch._links.values()
        link.connection.shutdown(socket.SHUT_RDWR)
    while not switch._reason:
        time.sleep(0.001)
    loop.run(session, 8)
    session.shutdown()
    return [loop.iteration]


def test_a_connection_that_is_lost_while_ranks_train_on_is_reported_and_costs_no_protection(node, ranks):
    node.start()
    assert ranks(_cut_off, 2, node.run_dir, node.fence(), "") == [[8], [8]]
    reported = node.events("ranks.disconnected")
    assert sorted((event.rank, event.fields["peer"]) for event in reported) == [(0, 1), (1, 0)], "once by each"
    assert all("the connection to rank" in event.fields["reason"] for event in reported)
    assert node.events("protection.lost") == []
    assert max(event.fields["iteration"] for event in node.events("snapshot.sealed")) == 8


def test_a_rank_that_loses_protection_and_cannot_notify_the_others_says_so(node, ranks):
    node.start()
    faults = "capture.bucket.begin@iteration=6,rank=1:raise"
    assert ranks(_cut_off, 2, node.run_dir, node.fence(), faults) == [[8], [8]]
    (lost,) = node.events("protection.lost")
    assert (
        lost.rank == 1 and "Other ranks may not know (rank 1: the connection to rank 0 is lost" in lost.fields["reason"]
    )


def test_ranks_that_end_in_order_report_no_loss(node, ranks):
    """One of them a while after the other."""
    node.start()
    assert ranks(_ends_later, 2, node.run_dir, node.fence()) == [8, 8]
    assert node.events("ranks.disconnected") == node.events("protection.lost") == []


def _ends_later(rank, world, run_dir, token):
    followed.QUIET_SECONDS = 0.0
    loop = Loop(rank, world)
    session = attach(loop.host, config(), context(rank, world, run_dir, token))
    session.resume(0)
    session._reft._look = None  # for which each waits; so far ahead no rank of a job is
    if rank:
        switch = session._collective._switch
        assert switch is not None
        while switch._links:
            time.sleep(0.001)
    loop.run(session, 8)
    session.shutdown()
    return loop.iteration


def test_a_configuration_without_a_system_hooks_in_and_does_nothing(capfd):
    loop = Loop(0, 1)
    session = attach(loop.host, Config(), context(0, 1, None, 0))
    assert session.resume(4) == 4
    loop.run(session, 3)
    session.shutdown()
    assert loop.iteration == 3 and "ft_plugins configuration" in capfd.readouterr().out


def test_ranks_on_other_nodes_than_before_are_told_so_where_nothing_can_be_moved(nodes, ranks):
    """Complete state lies on the same nodes: neither started over, nor ever mixed with what would be captured then."""
    three = [nodes(name) for name in "abc"]
    for node in three:
        node.start()
        node.fence()
    options = {"reft": {"redundancy": "none"}}
    ranks(_incarnation, 3, [node.run_dir for node in three], 1, 5, options)
    for node in three:
        node.fence()
    moved = [three[1], three[2], three[0]]
    found = ranks(_incarnation, 3, [node.run_dir for node in moved], 2, 9, options)
    assert {each["error"][0] for each in found} == {"ResumeError"}
    assert "the state of rank 1 is on node 0" in found[0]["error"][1] and "previous order" in found[0]["error"][1]
    for node in three:
        node.fence()
    found = ranks(_incarnation, 3, [node.run_dir for node in three], 3, 6, options)
    assert [(each["error"], each["resumed"], each["restored_w"]) for each in found] == [(None, 5, {5.0})] * 3


def _impatient(rank, world, *rest):
    """`_incarnation`, in which the last rank does not wait for an SMP that nobody starts."""
    if rank == world - 1:
        from ft_plugins.recovery import nodes

        setattr(nodes, "Client", functools.partial(nodes.Client, timeout=0.5))  # noqa: B010  this process's, which ends
    return _incarnation(rank, world, *rest)


def test_state_on_one_node_forbids_to_train_on_without_protection_on_another(nodes, ranks, tmp_path):
    both = [nodes(name) for name in "ab"]
    for node in both:
        node.start()
        node.fence()
    options = {"reft": {"redundancy": "none"}}
    ranks(_incarnation, 2, [node.run_dir for node in both], 1, 5, options)
    both[1].end()  # that node was started anew, and its SMP cannot be had
    both[0].fence()
    found = ranks(_impatient, 2, [node.run_dir for node in both], 2, 9, options)
    assert {each["error"][0] for each in found} == {"ProtectionError"}
    assert [each["iteration"] for each in found] == [0, 0]


def test_nodes_that_are_configured_otherwise_are_refused_by_key_and_rank(nodes, ranks):
    node = nodes("n")
    node.start()
    found = ranks(_differing, 2, node.run_dir, node.fence())
    assert [error[0] for error in found] == ["ConfigError"] * 2
    assert "reft of rank 1 is [{'interval': 5," in found[0][1] and "of rank 0 [{'interval': 1," in found[0][1]


def _differing(rank, world, run_dir, token):
    loop = Loop(rank, world)
    try:
        attach(loop.host, config(reft={"interval": 5} if rank else {}), context(rank, world, run_dir, token))
    except FtError as error:
        return type(error).__name__, str(error)
    return "none", ""


def test_a_start_from_the_beginning_that_one_rank_has_not_heard_of_yet_stands_for_all(node, ranks):
    """Given --ftp-resume fresh, killed when one rank's lineage was opened and the other's not."""
    node.start()
    ranks(_incarnation, 2, [node.run_dir] * 2, node.fence(), 5, {})
    ranks(_open_from_nothing, 1, node, node.fence())
    found = ranks(_incarnation, 2, [node.run_dir] * 2, node.fence(), 3, {})
    assert [(each["error"], each["resumed"]) for each in found] == [(None, 0)] * 2


def _open_from_nothing(rank, world, node, token):
    segment = Segment(node.segment(0))
    with node.client() as client:
        client.attach(0, token, segment.shape, segment.fingerprint, fresh=True)
        client.open_lineage(0, token, segment.header.opened.lineage + 1, None)


def test_another_kind_of_number_in_the_same_bytes_is_another_state(node, ranks):
    node.start()
    for token, kind in enumerate((torch.bfloat16, torch.float16), 1):
        assert node.fence() == token
        (error,) = ranks(_of_kind, 1, node.run_dir, token, kind)
    assert error is not None and "another layout" in error


def _of_kind(rank, world, run_dir, token, kind):
    host = PlainHost({"w": torch.full((100,), 5.0, dtype=kind)})
    try:
        session = attach(host, config(), context(0, 1, run_dir, token))
        session.resume()
        session.iteration_begin(1)
        session.before_update(1)
        session.iteration_end(1)
        session.before_update(2)
    except FtError as error:
        return str(error)
    return None


# ---- how far training has come, for ft-run ----


def _ending(rank, world, run_dirs, token, how):
    """What the segment says before and after a rank has ended after iteration 4, and its newest version."""
    loop = Loop(rank, world)
    settings = config(node_name=run_dirs[rank].name, reft={"interval": 3})
    session = attach(loop.host, settings, context(0, 1, run_dirs[0], token))
    session.resume(last={"own": 4, "early": 9, "last": 9}.get(how))
    loop.run(session, 3)
    reft = session._reft
    assert reft is not None and reft._segment is not None
    segment = Segment(reft._segment.path)
    before = segment.header.ending
    session.iteration_begin(4)
    session.before_update(4)
    session.after_update(4)
    session.iteration_end(4, ends=how in ("last", "own"))
    try:
        if how == "exit":
            raise SystemExit(0)
    finally:
        session.shutdown()
        found = [before, segment.header.ending]
        newest = max(slot.version.iteration for slot in segment.slots() if slot.version)
        return found, newest  # noqa: B012


@pytest.mark.parametrize(
    ("how", "endings", "newest"),
    [
        ("own", [EARLY, AT_END], 3),
        ("early", [EARLY, EARLY], 3),
        ("last", [EARLY, EARLY], 4),
        ("unknown", [UNKNOWN, UNKNOWN], 3),
        ("exit", [UNKNOWN, EARLY], 3),
    ],
)
def test_a_rank_records_whether_training_was_at_its_end_and_captures_the_last_version_before_another_end(
    node, ranks, how, endings, newest
):
    node.start()
    assert ranks(_ending, 1, [node.run_dir], node.fence(), how) == [(endings, newest)]
