"""Handlers of several nodes, each a process with an address of its own, on the ports that real ones would have."""

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import stat
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from multiprocessing import get_context
from types import SimpleNamespace

import psutil
import pytest
from torch.distributed import DistError, DistStoreError, HashStore, PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import (
    SimpleElasticAgent,
    WorkerSpec,
    WorkerState,
    _RoleInstanceInfo,
)
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.launcher.api import LaunchConfig

from ft_plugins.base.intake import within
from ft_plugins.config import Config
from ft_plugins.errors import ConfigError, FtError
from ft_plugins.events import Events
from ft_plugins.launcher import plugin
from ft_plugins.launcher.agent.agent import ProgressAgent
from ft_plugins.launcher.agent.node_check import NodeCheck
from ft_plugins.launcher.agent.signals import SignalStop
from ft_plugins.launcher.agent.watcher import Job
from ft_plugins.launcher.job_identity import load_secret
from ft_plugins.launcher.node_launch import _specify
from ft_plugins.launcher.rendezvous import control, leader_search, peers, rendezvous, round_join
from ft_plugins.launcher.rendezvous.endpoint import Endpoint
from ft_plugins.launcher.rendezvous.peers import Credentials
from ft_plugins.launcher.rendezvous.rendezvous import Rendezvous
from ft_plugins.launcher.rendezvous.rendezvous_settings import BACKEND, RendezvousSettings
from ft_plugins.launcher.rendezvous.wait_report import command
from ft_plugins.launcher.rounds import round_store
from ft_plugins.launcher.rounds.field_types import MOST_NODES
from ft_plugins.launcher.rounds.node_service import NodeService
from ft_plugins.launcher.rounds.roster_file import RosterFile
from ft_plugins.launcher.rounds.round_machine import Place, Roster
from ft_plugins.launcher.rounds.rounds import ALL
from ft_plugins.rehearse.driver import free_port
from ft_plugins.smp.watch.job_history import had_others, read_note
from ft_plugins.smp.watch.job_state import JobFacts, State, job_state
from ft_plugins.transport.dial import REFUSED
from ft_plugins.transport.frame_codec import seal
from harness.job_control import wait_until

WAIT = 120.0
SILENCE = 2.0  # seconds after which a node is lost, where a test loses one, or is to be refused soon
PATIENCE = 30.0  # and elsewhere: more than a process is kept waiting for a core here
fork = get_context("fork")
happened = []  # in the process of a node
numbers = itertools.count()


def serve(connection, fields, config):
    """A node: does what it is told, tells how it went."""
    try:
        handler = plugin.create(RendezvousParameters("ft_plugins", **fields, **config))
        handler.events.subscribe(happened.append)
        connection.send(("ok", "up"))
        while True:
            name, arguments = connection.recv()
            try:
                own = OWN.get(name)
                connection.send(("ok", own(handler, *arguments) if own else getattr(handler, name)(*arguments)))
            except Exception as error:
                connection.send(("error", type(error).__name__, str(error)))
    except EOFError:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def joined(handler):
    """Take part in a round; the names of all its nodes, exchanged over its store."""
    info = handler.next_rendezvous()
    info.store.set(f"name/{info.rank}", handler._node.me.node)
    names = info.store.multi_get([f"name/{rank}" for rank in range(info.world_size)])
    master = info.bootstrap_store_info
    return {
        "rank": info.rank,
        "names": [name.decode() for name in names],
        "round": handler._round,
        "master": f"{master.master_addr}:{master.master_port}",
        "leads": handler._node.service.leading is not None,
    }


def begun(handler):
    """As `joined`; again, as an agent does, where the round is lost before or just after all were in."""
    while True:
        try:
            found = joined(handler)
        except DistError:
            continue
        for _ in range(int(SILENCE / 0.05)):
            if handler.num_nodes_waiting():
                break
            time.sleep(0.05)
        else:
            return found


def checked_by(handler, path):
    """Take part only while there is no file at `path`."""
    check = f"{sys.executable} -c 'import os, sys; sys.exit(os.path.exists(sys.argv[1]))' {path}"
    handler.check_before_rounds(NodeCheck(check, WAIT, handler._node.me.node, Events()))


def refused(handler):
    """End as ft-run does where this node was refused."""
    handler.status = "refused"
    handler.shutdown()


OWN = {
    "join": joined,
    "begin": begun,
    "me": lambda handler: handler._node.me,
    "checked by": checked_by,
    "refused": refused,
    "draining": lambda handler: bool(handler.leaves),
    "no drain": lambda handler: handler.refuse_requests("of this job no node can leave", "nor can it be stopped"),
    "replaced": lambda handler: [event.fields for event in happened if event.name == "node.replaced"],
    "why": lambda handler: handler.waiting_reason,
    "left": lambda handler: handler.left,
    "asked": lambda handler: handler._join.asked,
    "present": lambda handler: [place.node for place in handler._node.service.present],  # on the leader
    "look again": lambda handler: (setattr(handler, "_next_look", 0.0), handler.num_nodes_waiting())[1],
    "fail at the port": lambda handler: setattr(handler._node.server, "_failure", KeyError("a request")),
}


class Node:
    """A process with a handler, at 127.0.0.`number`."""

    def __init__(self, number, name, fields, config):
        self.name = name
        self.port = int(fields["endpoint"].rpartition(":")[2])
        self.connection, theirs = fork.Pipe()
        told = {"local_addr": f"127.0.0.{number}", **fields}
        self.process = fork.Process(target=serve, args=(theirs, told, {"node_name": name, **config}), daemon=True)
        self.process.start()
        theirs.close()
        assert self.hear() == "up"

    def tell(self, name, *arguments):
        self.connection.send((name, arguments))
        return self

    def hear(self, seconds=WAIT):
        assert self.connection.poll(seconds), f"{self.name} said nothing within {seconds:.0f} s"
        kind, *found = self.connection.recv()
        assert kind == "ok", f"{self.name}: {found}"
        return found[0]

    def error(self):
        assert self.connection.poll(WAIT), f"{self.name} said nothing"
        kind, *found = self.connection.recv()
        assert kind == "error", f"{self.name}: {found}"
        return found[0], found[1]

    def quiet(self, seconds):
        """Whether it says nothing for so long."""
        return not self.connection.poll(seconds)

    def ask(self, name, *arguments):
        return self.tell(name, *arguments).hear()

    def kill(self, number=signal.SIGKILL):
        if self.process.is_alive():
            os.kill(self.process.pid or 0, number)
        if number == signal.SIGKILL:
            self.process.join(WAIT)


@pytest.fixture
def start():
    """Starts nodes of one job. `number` is that of its address; `endpoints` those where others are found."""
    port, run, made = free_port(), f"job-{os.getpid()}-{next(numbers)}", []

    def node(number, name, *, nodes="3:3", endpoints="1", run=run, **config):
        least, most = nodes.split(":")
        fields = {
            "endpoint": ",".join(f"127.0.0.{each}:{port}" for each in endpoints.split(",")),
            "run_id": run,
            "min_nodes": int(least),
            "max_nodes": int(most),
        }
        made.append(Node(number, name, fields, {"detect_seconds": PATIENCE, "join_timeout": WAIT, **config}))
        return made[-1]

    yield node
    for each in made:
        each.kill()


def join(*nodes):
    """Have all of them take part in a round."""
    for node in nodes:
        node.tell("join")
    return {node.name: node.hear() for node in nodes}


def until(node, waiting):
    """Ask as an agent does, until so many nodes wait."""
    deadline = threading.Event()
    for _ in range(int(WAIT / 0.05)):
        if node.ask("num_nodes_waiting") == waiting:
            return
        deadline.wait(0.05)
    raise AssertionError(f"{node.name} never saw {waiting} nodes wait")


# ---- rounds ----


def test_nodes_are_ranked_by_name_and_each_round_has_a_store_of_its_own(start):
    nodes = [start(1, "n10"), start(2, "n2"), start(3, "n1")]
    first = join(*nodes)
    assert {name: found["rank"] for name, found in first.items()} == {"n1": 0, "n2": 1, "n10": 2}
    assert all(found["names"] == ["n1", "n2", "n10"] for found in first.values())
    assert [node.ask("num_nodes_waiting") for node in nodes] == [0, 0, 0]
    second = join(*nodes)
    assert {found["round"] for found in first.values()} == {1} and {found["round"] for found in second.values()} == {2}
    [before], [after] = ({found["master"] for found in each.values()} for each in (first, second))
    assert before.startswith("127.0.0.3:") and after.startswith("127.0.0.3:") and before != after


def test_nodes_and_spares_are_checked_before_each_round_and_one_that_fails_is_replaced(start, tmp_path):
    nodes = {name: start(at, name, nodes="2:2", wait_seconds=WAIT) for at, name in enumerate("abcd", 1)}
    for name, node in nodes.items():
        node.ask("checked by", str(tmp_path / name))
    join(nodes["a"], nodes["b"])
    for name in "cd":
        nodes[name].tell("join")
    wait_until(lambda: sorted(nodes["a"].ask("present")) == ["c", "d"], WAIT, lambda: "the spares have not come")
    for name in "bc":  # one of the nodes, and the spare that would take its place
        (tmp_path / name).touch()
    nodes["b"].tell("join")
    until(nodes["a"], 3)
    nodes["a"].tell("join")
    for name in "bc":
        kind, said = nodes[name].error()
        assert kind == "NodeError" and f"node {name}: the check " in said and "ended with status 1" in said
        nodes[name].ask("refused")
    assert nodes["a"].hear()["names"] == nodes["d"].hear()["names"] == ["a", "d"]


def test_a_node_is_drained_by_one_that_knows_the_secret_and_the_others_go_on_with_a_spare(start, tmp_path):
    folders = {name: tmp_path / name for name in "abcd"}
    for folder in folders.values():
        folder.mkdir()
    right = write_secret(tmp_path / "right", "what the nodes of this job know")
    wrong = write_secret(tmp_path / "wrong", "what no node of this job knows")
    a, b, c, d = (
        start(at, name, nodes="2:2", wait_seconds=WAIT, run_dir=folders[name], secret_file=right)
        for at, name in enumerate("abcd", 1)
    )
    join(a, b)
    c.tell("join")
    wait_until(lambda: a.ask("present") == ["c"], WAIT, lambda: "the spare has not come")
    d.tell("join")  # as many spares as nodes: they could be a round without a
    wait_until(lambda: a.ask("present") == ["c", "d"], WAIT, lambda: "the second spare has not come")
    left = json.loads((folders["b"] / "rendezvous.json").read_text())
    (folders["c"] / "rendezvous.json").write_text(json.dumps({**left, "secret_file": str(wrong)}))
    with pytest.raises(ConnectionError):  # with another secret
        control.drain(folders["c"], "b")
    assert control.drain(folders["b"], "x") == "there is no node x in this job; its nodes are a, b"
    until(a, 0)
    until(b, 0)
    assert not b.ask("draining")
    assert control.drain(folders["b"], "b") == ""
    wait_until(lambda: b.ask("num_nodes_waiting") == 0 and b.ask("draining"), WAIT, lambda: "b is not told")
    assert a.ask("num_nodes_waiting") == 0 and not a.ask("draining")
    b.ask("depart")
    b.ask("shutdown")
    until(a, 2)
    assert a.ask("left") == "b" and a.ask("why").startswith("round 1 is over: node b has left, as it was asked")
    assert a.tell("join").hear()["names"] == c.hear()["names"] == ["a", "c"]
    assert a.ask("left") == ""
    assert a.ask("replaced") == [{"gone": ["b"], "new": ["c"], "asked": ["b"]}]
    a.ask("no drain")
    assert control.drain(folders["a"], "c") == "of this job no node can leave"
    assert control.drain(folders["a"], ALL) == "nor can it be stopped"


def test_a_node_that_led_and_was_drained_has_left_as_it_was_asked(start, tmp_path):
    for name in "abc":
        (tmp_path / name).mkdir()
    a, b, c = (
        start(at, name, nodes="2:2", wait_seconds=WAIT, run_dir=tmp_path / name, detect_seconds=SILENCE)
        for at, name in enumerate("abc", 1)
    )
    assert leader(join(a, b)) == "a"
    c.tell("join")
    wait_until(lambda: a.ask("present") == ["c"], WAIT, lambda: "the spare has not come")
    assert control.drain(tmp_path / "a", "a") == ""
    wait_until(lambda: b.ask("look again") == 0 and b.ask("asked") == "a", WAIT, lambda: "b does not know of it")
    a.kill()
    until(b, 1)
    assert (b.ask("left"), b.ask("why")) == ("a", "round 1 is over: node a has left, as it was asked")
    assert had_others(tmp_path / "b")


@pytest.mark.parametrize("name", ["", " ", "a b", "../b", "b\n"])
def test_what_is_not_the_name_of_a_node_is_refused_before_the_job_is_asked(tmp_path, name):
    with pytest.raises(ConfigError, match="is not the name of a node; expected one that `ft-plugins status` shows"):
        control.drain(tmp_path, name)


def test_a_command_line_without_a_job_of_several_nodes_says_what_it_looked_for(tmp_path):
    with pytest.raises(FtError, match=r"rendezvous.json: cannot be read .*is --rdzv-backend given\?"):
        control.drain(tmp_path, "b")


def test_a_spare_hears_seldom_from_the_lead_and_does_not_give_up_meanwhile(start):
    a, b = start(1, "a", nodes="2:2", detect_seconds=10), start(2, "b", nodes="2:2", detect_seconds=10)
    join(a, b)
    spare = start(3, "c", nodes="2:2", detect_seconds=10, join_timeout=3, wait_seconds=0).tell("join")
    assert spare.quiet(9)


def test_a_node_that_begins_anew_is_seen_by_those_whose_workers_run(start):
    nodes = [start(1, "a"), start(2, "b"), start(3, "c")]
    join(*nodes)
    nodes[1].tell("join")
    until(nodes[0], 1)
    until(nodes[2], 1)
    reason = nodes[2].ask("why")
    assert reason == "round 1 is over: node b starts its workers again"
    nodes[0].tell("join")
    until(nodes[2], 2)
    assert nodes[2].tell("join").hear()["names"] == ["a", "b", "c"]


# ---- the node that leads is lost ----


def leader(found):
    [name] = [name for name, each in found.items() if each["leads"]]
    return name


def test_a_node_with_the_address_of_the_lost_one_is_found_by_the_survivors(start):
    a, b, c = (start(number, name) for number, name in ((1, "a"), (2, "b"), (3, "c")))
    assert leader(join(a, b, c)) == "a"
    a.kill()
    until(b, 1)
    until(c, 1)
    b.tell("join"), c.tell("join")
    assert b.quiet(1)
    new = start(1, "new")  # the one endpoint is its own: it knows nobody
    found = {"new": new.tell("join").hear(), "b": b.hear(), "c": c.hear()}
    assert found["new"]["names"] == ["new", "b", "c"] and found["new"]["round"] == 2
    leader(found)


def test_a_spare_at_the_address_of_the_lost_one_is_found_while_workers_run(start):
    config = {"nodes": "2:3", "last_call_timeout": 1, "wait_seconds": 1, "detect_seconds": SILENCE}
    a, b, c = (start(number, name, **config) for number, name in ((1, "a"), (2, "b"), (3, "c")))
    join(a, b, c)
    a.kill()
    found = join(b, c)
    assert found["b"]["names"] == ["c", "b"]
    new = start(1, "new", **config).tell("join")
    until(b, 1)
    until(c, 1)
    b.tell("join"), c.tell("join")
    assert new.hear()["names"] == ["c", "b", "new"]


# ---- memory ----


def test_a_node_that_is_started_again_knows_the_others_and_its_rank(start, tmp_path):
    folders = {name: tmp_path / name for name in "abc"}
    for folder in folders.values():
        folder.mkdir()
    a, b, c = (start(number, name, run_dir=folders[name]) for number, name in ((1, "c"), (2, "b"), (3, "a")))
    assert join(a, b, c)["a"]["names"] == ["a", "b", "c"]
    written = folders["b"] / "nodes.json"
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    assert [place["node"] for place in json.loads(written.read_text())["roster"]["members"]] == ["a", "b", "c"]
    for node in (a, b, c):
        node.kill()
    (folders["a"] / "nodes.json").write_text("{")  # this one has forgotten
    again = ((1, "c", "c"), (2, "b", "b"), (3, "0", "a"))
    a, b, c = (start(number, name, run_dir=folders[old], wait_seconds=10) for number, name, old in again)
    found = join(a, b, c)
    assert found["0"]["names"] == ["0", "b", "c"] and found["0"]["round"] == 2


def test_a_node_that_remembers_finds_the_others_without_the_endpoint(start, tmp_path):
    a, b, c = (start(1, "a"), start(2, "b"), start(3, "c", run_dir=tmp_path))
    join(a, b, c)
    a.kill()
    until(b, 1)
    b.tell("join")
    c.kill()
    again = start(3, "c", run_dir=tmp_path).tell("join")  # the endpoint is that of a, which is no more
    new = start(4, "d", endpoints="2").tell("join")
    assert new.quiet(1)  # nor does anybody listen there
    other = start(1, "e").tell("join")
    assert other.hear()["names"] == ["e", "b", "c"]
    assert again.hear()["rank"] == 2 and b.hear()["rank"] == 1


# ---- the end ----


def test_those_who_are_done_wait_for_the_others_and_a_spare_is_told_that_it_is_not_needed(start, capfd):
    a, b, c = (start(number, name, nodes="2:2") for number, name in ((1, "a"), (2, "b"), (3, "c")))
    join(a, b)
    c.tell("join")
    wait_until(lambda: "c" in a.ask("present"), WAIT, lambda: "the spare has not come")
    a.tell("wait_for_all")
    assert a.quiet(1)
    assert b.ask("wait_for_all") is True
    assert a.hear() is True
    assert [node.ask("__getattribute__", "all_succeeded") for node in (a, b)] == [True, True]
    a.ask("__setattr__", "status", "succeeded")
    assert a.ask("shutdown") is True and a.ask("shutdown") is True
    kind, text = c.error()
    assert kind == "RendezvousGracefulExitError" and "node c was a spare" in text and "has succeeded" in text
    assert capfd.readouterr().out.count("ft-run: this node is a spare: every place in the job is taken; c waits") == 1
    assert c.ask("__getattribute__", "over")[0] == "succeeded"
    assert b.ask("is_closed") is True
    assert b.ask("shutdown") is True


@pytest.mark.parametrize("lost", ["a", "b"])
def test_those_who_are_done_are_told_when_another_node_is_lost_and_its_substitute_waits(start, lost):
    nodes = {name: start(number, name, nodes="2:2", detect_seconds=SILENCE) for number, name in ((1, "a"), (2, "b"))}
    join(*nodes.values())
    gone = nodes.pop(lost)
    [stays] = nodes.values()
    stays.tell("wait_for_all")
    assert stays.quiet(0.5)
    gone.kill()
    start(1 if lost == "a" else 2, "new", nodes="2:2", detect_seconds=SILENCE).tell("join")
    assert stays.hear() is False


def test_those_who_are_done_do_not_take_a_lost_node_for_one_that_is_done(start):
    a, b = (start(number, name, nodes="2:2", detect_seconds=SILENCE) for number, name in ((1, "a"), (2, "b")))
    join(a, b)
    a.tell("wait_for_all")
    b.kill()
    assert a.hear() is False


@pytest.mark.parametrize("fails", ["a", "b"], ids=["where-the-lead-is", "where-the-lead-is-not"])
def test_those_who_are_done_learn_that_the_job_has_failed_elsewhere(start, fails):
    nodes = {name: start(number, name, nodes="2:2") for number, name in ((1, "a"), (2, "b"))}
    assert leader(join(*nodes.values())) == "a"
    failed = nodes.pop(fails)
    [done] = nodes.values()
    done.tell("wait_for_all")
    assert done.quiet(0.5)
    failed.ask("__setattr__", "status", "refused")
    failed.ask("shutdown")
    assert done.hear() is True and done.ask("__getattribute__", "all_succeeded") is False


def test_workers_that_still_save_are_not_started_again_when_the_lead_has_ended_with_a_success(start):
    a, b = start(1, "a", nodes="2:2"), start(2, "b", nodes="2:2")
    assert leader(join(a, b)) == "a"
    a.ask("__setattr__", "status", "succeeded")
    a.ask("shutdown")  # as a launcher does that waits no longer than torch's
    a.kill()
    assert [b.ask("look again") for _ in range(3)] == [0, 0, 0], b.ask("why")
    assert b.ask("wait_for_all") is True and b.ask("__getattribute__", "all_succeeded") is True


def test_those_who_are_done_wait_without_a_limit_and_say_for_how_many(start, monkeypatch, capfd):
    monkeypatch.setattr(rendezvous, "_DONE_REPORT_SECONDS", 0.2)  # as it would be said every few minutes
    a, b = start(1, "a", nodes="2:2"), start(2, "b", nodes="2:2")
    join(a, b)
    a.tell("wait_for_all")
    said = []

    def twice():
        said.append(capfd.readouterr().out)
        return "".join(said).count(" on 1 of 2 nodes they have not ended yet\n") >= 2

    wait_until(twice, WAIT, lambda: "".join(said))
    assert a.quiet(0)
    assert b.ask("wait_for_all") is True and a.hear() is True


def test_a_lead_whose_port_answers_no_more_does_not_wait_for_those_who_cannot_reach_it(start):
    a, b = start(1, "a", nodes="2:2"), start(2, "b", nodes="2:2")
    assert leader(join(a, b)) == "a"
    a.tell("fail at the port").hear()
    assert a.ask("wait_for_all") is False


def test_after_the_end_nobody_takes_part_any_more(start):
    a, b, c = start(1, "a"), start(2, "b"), start(3, "c")
    join(a, b, c)
    b.ask("set_closed")
    assert a.ask("is_closed") is True
    for node in (a, b, c):
        kind, text = node.tell("join").error()
        assert kind == "RendezvousClosedError" and "node b reports" in text and "start it again" in text


def test_a_node_that_was_never_in_ends_alone(start):
    a, b = start(1, "a", nodes="2:2"), start(2, "b", nodes="2:2")
    join(a, b)
    late = start(3, "c", nodes="2:2")
    late.tell("join")
    assert late.quiet(1)
    late.kill(signal.SIGKILL)
    other = start(4, "d", nodes="2:2")
    assert other.ask("shutdown") is True
    assert a.ask("is_closed") is False and a.ask("num_nodes_waiting") == 0


# ---- what goes wrong is said ----


def test_a_node_that_is_waited_for_is_named_in_the_output_with_the_command(start, capfd):
    a, b = (start(number, name, nodes="2:2", detect_seconds=SILENCE) for number, name in ((1, "a"), (2, "b")))
    join(a, b)
    capfd.readouterr()  # a node that starts slowly is missed too
    b.kill()
    a.tell("join")  # as its agent does when the SMPs have declared the other one lost
    said = ""

    def is_said():
        nonlocal said
        said += capfd.readouterr().err
        return said.endswith("\n")

    wait_until(is_said, WAIT, lambda: "nothing was said")
    assert said.startswith("ft-run: waiting for a node in the place of b (for ")
    assert f"to bring b back, in {os.getcwd()}: {command()}\n" in said
    substitute = start(3, "c", nodes="2:2")
    assert substitute.ask("join")["names"] == a.hear()["names"] == ["a", "c"]
    back = f"to bring b back, as a spare, in {os.getcwd()}: {command()}"
    assert f"ft-run: the job goes on without b (lost); new: c; {back}\n" in capfd.readouterr().err
    assert [a.ask("replaced"), substitute.ask("replaced")] == [[{"gone": ["b"], "new": ["c"], "asked": []}], []]


def noted(folder):
    """What `status` says of a node that waits, and what to do."""
    note = read_note(folder)
    return f"{note.reason} | {note.remedy}" if note else ""


def test_a_node_that_lives_and_is_slow_to_come_back_is_not_said_to_need_a_substitute(start, tmp_path):
    a, b, c, d = (start(at, name, nodes="4:4", run_dir=tmp_path / name) for at, name in enumerate("abcd", 1))
    (tmp_path / "a").mkdir()
    join(a, b, c, d)
    c.kill()
    a.tell("join")
    for node, said in (
        (b, "waiting for a node in the place of c and for b, d, alive, to end the old ranks | "),
        (d, "waiting for a node in the place of c and for d, alive, to end the old ranks | "),
        (None, "waiting for a node in the place of c | "),
    ):
        wait_until(lambda said=said: noted(tmp_path / "a") == said, WAIT, lambda: noted(tmp_path / "a"))
        if node:
            node.tell("join")


def test_nodes_of_which_one_has_another_secret_say_that_and_not_that_a_node_is_missing(start, tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        secret = write_secret(tmp_path / f"secret-{name}", f"what node {name} knows and no other one")
        common = {"nodes": "2:2", "detect_seconds": 1, "wait_seconds": WAIT, "secret_file": secret}
        start(ord(name) - ord("a") + 1, name, run_dir=tmp_path / name, **common).tell("join")

    def said():
        leads, other = noted(tmp_path / "a"), noted(tmp_path / "b")
        return (
            re.fullmatch(
                "waiting for 1 more of 2 nodes: a connection from 127.* was rejected: .*secret.* [|] if it is a node "
                "of this job, give the same --ftp-secret-file .*",
                leads,
            )  # fmt: skip
            is not None
            and "does not know the secret of this job" in other
            and " | " in other
            and "--ftp-secret-file on all nodes" in other.partition(" | ")[2]
        )

    wait_until(said, WAIT, lambda: f"{noted(tmp_path / 'a')}; {noted(tmp_path / 'b')}")


def test_a_start_of_one_node_alone_is_refused_while_the_job_that_it_has_a_part_in_waits_for_it(start, tmp_path):
    """As where the command that brings it back has lost its --nnodes and --rdzv-endpoint."""
    a = start(1, "a", nodes="2:2", detect_seconds=SILENCE)
    b = start(2, "b", nodes="2:2", detect_seconds=SILENCE, run_dir=str(tmp_path))
    join(a, b)
    run = a.ask("me").run
    own = Credentials(load_secret(None), run, "b")
    b.kill()
    a.tell("join")  # and waits
    said = rf"node b has a part in job '{run}', whose node a lives: .*127.0.0.1:{a.port}"
    with pytest.raises(ConfigError, match=said):
        round_join.require_alone(own, tmp_path)
    round_join.require_alone(replace(own, node="a"), tmp_path / "absent")
    round_join.require_alone(replace(own, run="other"), tmp_path)
    back = start(2, "b", nodes="2:2", detect_seconds=SILENCE, run_dir=str(tmp_path))
    assert back.ask("join")["names"] == a.hear()["names"] == ["a", "b"]
    a.kill()
    back.kill()
    round_join.require_alone(own, tmp_path)


def test_too_late_is_told_with_who_is_there_and_who_is_not(start):
    a = start(1, "a", join_timeout=5, wait_seconds=0)  # long enough to find itself on a busy machine
    kind, text = a.tell("join").error()
    assert kind == "RendezvousTimeoutError"
    assert "node a" in text and "round 1 expected 3 to 3 nodes, found 1 (a)" in text and "--nnodes" in text
    with socket.socket() as nobody:  # has the address, but does not listen
        nobody.bind(("127.0.0.7", a.port))
        b = start(2, "b", endpoints="7", join_timeout=5, wait_seconds=0)
        kind, text = b.tell("join").error()
    assert kind == "RendezvousTimeoutError" and "127.0.0.7:" in text and "refused" in text and "--rdzv-endpoint" in text


def test_a_second_node_of_a_name_is_refused_and_disturbs_nobody(start):
    a, b = start(1, "a", nodes="2:2"), start(2, "b", nodes="2:2")
    join(a, b)
    stop = threading.Event()

    def live():
        while not stop.wait(0.05):
            assert (a.ask("num_nodes_waiting"), b.ask("num_nodes_waiting")) == (0, 0)

    agents = threading.Thread(target=live)
    agents.start()
    second = start(3, "b", nodes="2:2", detect_seconds=SILENCE)
    kind, text = second.tell("join").error()
    stop.set()
    agents.join()
    assert second.ask("shutdown") is True  # as its agent does then
    assert not a.ask("is_closed") and not b.ask("is_closed")
    assert kind == "ConfigError" and "node name 'b'" in text and "--ftp-node-name" in text


def test_an_endpoint_of_another_job_is_refused(start):
    a = start(1, "a", nodes="1:2", last_call_timeout=0)
    join(a)
    kind, text = start(2, "b", run="another", detect_seconds=SILENCE).tell("join").error()
    assert kind == "ConfigError" and "node of job 'another'" in text and "--rdzv-id" in text


def write_secret(path, text):
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_a_node_with_another_secret_is_refused_and_disturbs_no_one(start, tmp_path, capfd):
    right = write_secret(tmp_path / "right", "what the nodes of this job know")
    wrong = write_secret(tmp_path / "wrong", "what no node of this job knows")
    a, b = (start(n, name, nodes="2:2", secret_file=right) for n, name in ((1, "a"), (2, "b")))
    join(a, b)
    without = start(4, "c", nodes="2:2", detect_seconds=SILENCE)
    kind, text = without.tell("join").error()
    assert kind == "ConfigError" and "does not know the secret of this job" in text and "--ftp-secret-file" in text
    assert without.ask("shutdown") is True
    other = start(3, "c", nodes="2:2", detect_seconds=SILENCE, secret_file=wrong, join_timeout=6, wait_seconds=0)
    kind, text = other.tell("join").error()
    assert kind == "RendezvousTimeoutError" and "does not know the secret" in text and "--ftp-secret-file" in text
    said = capfd.readouterr().err
    assert said.count("does not know the secret of this job") == 1, "once, while it goes on looking"
    assert "--rdzv-endpoint 127.0.0.1:" in said and "--ftp-secret-file" in said and "goes on looking" in said
    assert other.ask("shutdown") is True
    assert [node.ask("num_nodes_waiting") for node in (a, b)] == [0, 0]
    assert not a.ask("is_closed")


def test_who_says_without_a_proof_that_a_node_is_not_of_the_job_does_not_end_it(start, tmp_path):
    right = write_secret(tmp_path / "right", "what the nodes of this job know")
    config = {"nodes": "1:2", "endpoints": "1", "detect_seconds": 0.5, "secret_file": right}
    b = start(2, "b", **config)
    with socket.create_server(("127.0.0.1", b.port)) as stranger:
        stranger.settimeout(WAIT / 6)
        b.tell("join")
        refusal = b"".join(seal(REFUSED)[1])
        began = time.monotonic()
        while time.monotonic() - began < 2:  # four times what it waits for
            connection, _ = stranger.accept()
            with connection:
                connection.recv(1 << 10)
                connection.sendall(refusal)
    start(1, "a", **config).tell("join")
    assert b.hear()["names"] == ["a", "b"]


def test_whether_any_node_has_captured_is_said_to_all(start):
    nodes = [start(1, "a"), start(2, "b"), start(3, "c")]
    join(*nodes)
    assert [node.ask("__getattribute__", "opened_anywhere") for node in nodes] == [False] * 3
    nodes[1].ask("__setattr__", "opened", True)
    join(*nodes)
    assert [node.ask("__getattribute__", "opened_anywhere") for node in nodes] == [True] * 3


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[" * 100_000,
        "\xff",
        "[]",
        json.dumps({"run": "alone", "roster": {"round": 2**32 - 1, "members": [{"node": "n", "endpoint": "h:1"}]}}),
        json.dumps({"run": "alone", "roster": {"round": 0, "members": [{"node": "n", "endpoint": "h:1"}]}}),
        json.dumps({"run": "alone", "roster": {"round": 10**400, "members": []}}),
        json.dumps({"run": "alone", "roster": {"round": 3, "members": [{"node": "n", "endpoint": "h:x"}]}}),
    ],
    ids=["cut", "nested", "bytes", "list", "forged", "zero", "huge", "endpoint"],
)
def test_a_damaged_memory_is_set_aside_with_a_line_and_the_node_starts(tmp_path, text, capsys):
    (tmp_path / "nodes.json").write_text(text, encoding="latin-1")
    parameters = RendezvousParameters("ft_plugins", "localhost:0", "alone", 1, 1, node_name="n", run_dir=tmp_path)
    handler = Rendezvous(RendezvousSettings.read(parameters))
    try:
        assert handler.next_rendezvous().rank == 0
    finally:
        handler.shutdown()
    assert (tmp_path / "nodes.json.damaged").read_text(encoding="latin-1") == text
    assert json.loads((tmp_path / "nodes.json").read_text())["roster"]["round"] == 1
    said = capsys.readouterr().err
    assert "renamed to nodes.json.damaged" in said and len(said) < 600


def test_a_memory_that_is_a_pipe_is_set_aside_and_nothing_waits_for_it(tmp_path):
    os.mkfifo(tmp_path / "nodes.json")
    assert within(WAIT / 6, lambda: RosterFile("job", tmp_path)).roster == Roster(0)
    assert stat.S_ISFIFO((tmp_path / "nodes.json.damaged").stat().st_mode)


def test_a_memory_of_more_nodes_than_there_can_be_is_set_aside(tmp_path):
    members = [{"node": f"n{number}", "endpoint": "h:1"} for number in range(MOST_NODES + 1)]
    for kept in (members[1:], members):
        text = json.dumps({"run": "job", "roster": {"round": 1, "members": kept, "spares": []}})
        (tmp_path / "nodes.json").write_text(text)
        assert RosterFile("job", tmp_path).roster.round == (1 if kept == members[1:] else 0)
    assert (tmp_path / "nodes.json.damaged").exists()


def test_a_memory_full_of_nodes_that_do_not_answer_does_not_keep_a_node_beyond_its_time(tmp_path, monkeypatch):
    asked = []  # nodes of each group that was asked together

    def ask_all(endpoints, *rest):
        asked.append(len(endpoints))
        return peers.ask_all(endpoints, *rest)

    monkeypatch.setattr(leader_search, "ask_all", ask_all)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(40)]
        members = tuple(Place(f"n{number}", f"127.0.0.1:{each.getsockname()[1]}") for number, each in enumerate(silent))
        RosterFile("job", tmp_path).remember(Roster(1, members))
        config = {"detect_seconds": 3, "join_timeout": 1.5, "wait_seconds": 0, "run_dir": tmp_path, "node_name": "a"}
        place = f"127.0.0.1:{free_port()}"
        handler = Rendezvous(RendezvousSettings.read(RendezvousParameters("ft_plugins", place, "job", 1, 2, **config)))
        try:
            with pytest.raises(RendezvousTimeoutError, match="no round was complete within 1.5 s"):
                handler.next_rendezvous()
        finally:
            handler.shutdown()
    # A silent group takes its second, so that the time is over in the second one; all 40 are more groups than that.
    assert max(asked) >= 8 and 0 < len([each for each in asked if each]) <= 2, asked


# ---- the store of a round ----


def listening(port):
    """Addresses on which some process of this machine listens on a port."""
    return {
        found.laddr.ip
        for found in psutil.net_connections("tcp")
        if found.status == "LISTEN" and found.laddr.port == port
    }


def test_the_store_of_a_round_listens_where_the_port_does_and_nowhere_else(start, alone):
    found = join(start(2, "a", nodes="1:2", endpoints="2", last_call_timeout=0))["a"]
    host, _, port = found["master"].rpartition(":")
    assert host == "127.0.0.2" and listening(int(port)) == {"127.0.0.2"}
    info = alone.next_rendezvous().bootstrap_store_info
    assert info.master_addr == "127.0.0.1" and listening(info.master_port) == {"127.0.0.1"}


def test_a_store_that_accepts_and_never_answers_is_given_up_in_time():
    bound = timedelta(seconds=1)
    silent = pytest.raises(ConnectionError, match="the store at .* did not answer within 3 s")
    with socket.create_server(("127.0.0.1", 0)) as mute, silent:
        round_store.connect(Endpoint("127.0.0.1", mute.getsockname()[1]), bound, 1)
    with pytest.raises(ConnectionError, match="the store at .* was lost: .*refused"):
        round_store.connect(Endpoint("127.0.0.1", free_port()), bound, 1)


def test_after_both_nodes_of_the_endpoints_are_lost_another_one_finds_the_job_at_the_same_port(start, tmp_path):
    secret = write_secret(tmp_path / "secret", "what the nodes of this job know")
    common = {"nodes": "2:2", "endpoints": "1,2", "secret_file": secret, "last_call_timeout": 0}
    a, b = start(1, "a", **common), start(2, "b", **common)
    assert {a.tell("begin").name, b.tell("begin").name} == {*a.hear()["names"], *b.hear()["names"]}
    c = start(3, "c", **common)
    a.kill()
    b.tell("begin")
    assert {c.tell("begin").hear()["rank"], b.hear()["rank"]} == {0, 1}
    b.kill()
    c.tell("begin")
    d = start(4, "d", **{**common, "endpoints": "3,1,2"})
    assert {d.tell("begin").hear()["rank"], c.hear()["rank"]} == {0, 1}
    assert c.ask("me").endpoint == f"127.0.0.3:{c.port}"


UNKNOWN = "job-0.unknown.invalid"  # the name of a host that resolves nowhere


def two_of_one_endpoint(tmp_path):
    """Node z at the endpoint, and a, at none, which gets rank 0 by its name and serves the store."""
    secret = write_secret(tmp_path / "secret", "what the nodes of this job know")
    endpoint = f"127.0.0.1:{free_port()}"
    common = {"secret_file": secret, "detect_seconds": SILENCE, "join_timeout": WAIT}
    of = [RendezvousParameters("ft_plugins", endpoint, "j", 2, 2, node_name=name, **common) for name in "za"]
    return [Rendezvous(RendezvousSettings.read(each)) for each in of]


def test_a_node_of_no_endpoint_whose_name_resolves_nowhere_is_reached_by_its_address(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "getfqdn", lambda: UNKNOWN)
    nodes = two_of_one_endpoint(tmp_path)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda node: node.next_rendezvous(), nodes))
    assert [info.rank for info in found] == [1, 0]
    assert {info.bootstrap_store_info.master_addr for info in found} == {"127.0.0.1"}
    for node in nodes:
        node.shutdown()


def test_a_round_whose_store_cannot_be_reached_is_printed_with_the_reason_and_what_to_do(tmp_path, monkeypatch, capsys):
    def fail(place, bound, reach):  # called by the node that serves no store
        raise ConnectionError(f"the store at {place} was lost: Name or service not known")

    nodes = two_of_one_endpoint(tmp_path)
    happened = []
    nodes[0].events.subscribe(lambda event: happened.append(event.name))
    reported = threading.Event()
    monkeypatch.setattr(round_store, "connect", fail)
    monkeypatch.setattr(rendezvous, "say", lambda words, **how: (print(words), reported.set()))
    with ThreadPoolExecutor(2) as pool:
        tries = [pool.submit(node.next_rendezvous) for node in nodes]
        assert reported.wait(WAIT)
        for node in nodes:
            node._node.service.close("the test is over", False)
        for each in tries:
            each.exception(WAIT)
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("round 1 was lost: the store at 127.0.0.1:") and "--local-addr or --ftp-interface" in line
    assert happened.count("round.lost") == 1
    for node in nodes:
        node.shutdown()


# ---- the agent ----


@pytest.fixture
def alone():
    """The handler of a job of one node."""
    found = Rendezvous(RendezvousSettings.read(RendezvousParameters("ft_plugins", "localhost:0", "alone", 1, 1)))
    yield found
    found.shutdown()


def test_a_job_that_is_over_while_ranks_run_starts_no_rank_again_and_says_why(alone):
    alone.next_rendezvous()
    assert alone.num_nodes_waiting() == 0
    alone._node.service.close("node b reports that rank 1 exited with status 78", "refused")
    deadline = time.monotonic() + WAIT
    while not alone.num_nodes_waiting():  # it looks from time to time
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert alone.waiting_reason.startswith("the job is over: node b reports that rank 1 exited with status 78")


def agent_of(handler, happened, workers=1, job=None):
    spec = WorkerSpec("default", workers, handler, entrypoint="true", max_restarts=3, monitor_interval=0.01)
    events = Events()
    events.subscribe(lambda event: happened.append(event.name))
    return ProgressAgent(
        spec, job=job, watcher=None, events=events, bounded=True, stop=None, logs_specs=DefaultLogsSpecs()
    )


@pytest.mark.parametrize(
    ("status", "ended"), [("refused", False), ("failed", False), ("succeeded", True), (None, True)]
)
def test_a_node_whose_ranks_have_ended_knows_whether_those_of_all_nodes_have(alone, status, ended):
    agent = agent_of(alone, [])
    alone.next_rendezvous()
    if status:
        alone._node.service.close(f"node b reports how the job has ended: {status}", status)
    agent._exit_barrier()
    assert agent.all_ended is ended


def forge(store):
    """What a stranger without the secret writes where torch's agents look for their ranks."""
    for rank in range(2):
        store.set(f"torchelastic/assigned_ranks/{rank}", "[0, 1, 0, 1]")
        store.set(f"torchelastic/role_info/{rank}", _RoleInstanceInfo("default", rank, 70).serialize())


def ranks_of(agent):
    return [
        (each.local_rank, each.global_rank, each.world_size, each.role_rank, each.role_world_size)
        for each in agent._worker_group.workers
    ]


RANKS = [[(0, 0, 5, 0, 5), (1, 1, 5, 1, 5)], [(0, 2, 5, 2, 5), (1, 3, 5, 3, 5), (2, 4, 5, 4, 5)]]


def test_ranks_that_a_stranger_writes_into_the_store_of_a_round_are_not_believed(monkeypatch):
    port = free_port()
    handlers = []
    for name in "ab":
        of_name = {"node_name": name, "join_timeout": WAIT}
        parameters = RendezvousParameters("ft_plugins", f"127.0.0.1:{port}", "job", 2, 2, **of_name)
        handlers.append(Rendezvous(RendezvousSettings.read(parameters)))
    joined = handlers[1].next_rendezvous

    def attacked():
        info = joined()
        place = info.bootstrap_store_info
        stranger = TCPStore(place.master_addr, place.master_port, is_master=False, wait_for_workers=False)
        forge(PrefixStore("ft_plugins/round/1", stranger))
        return info

    monkeypatch.setattr(handlers[1], "next_rendezvous", attacked)
    agents = [agent_of(handler, [], workers) for handler, workers in zip(handlers, (2, 3), strict=True)]
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda agent: agent._rendezvous(agent._worker_group), agents))
        assert [ranks_of(agent) for agent in agents] == RANKS
        places = {(agent._worker_group.master_addr, agent._worker_group.master_port) for agent in agents}
        assert places == {("127.0.0.1", handlers[0]._store.port)}
    finally:
        for handler in handlers:
            handler.shutdown()


class Foreign:
    """A dynamic rendezvous of torch's kind, complete: two nodes that share a store with strangers."""

    use_agent_store = True

    def __init__(self, store, rank):
        self.info = RendezvousInfo(store, rank, 2, RendezvousStoreInfo("127.0.0.1", 1))

    def next_rendezvous(self):
        return self.info

    def get_backend(self):
        return "c10d"

    def get_run_id(self):
        return "job"


def test_ranks_and_store_that_a_stranger_writes_into_a_foreign_rendezvous_are_not_believed(tmp_path):
    common = HashStore()
    forge(common)
    for key, value in (("MASTER_ADDR", "192.0.2.1"), ("MASTER_PORT", "1")):
        PrefixStore("ft_plugins/0", common).set(key, value)
    job = Job(Config.from_flags(["--reft"])[0], "j", "n", tmp_path)
    agents = [agent_of(Foreign(common, rank), [], workers, job) for rank, workers in enumerate((2, 3))]
    for agent in agents:
        agent._worker_group.spec.local_addr = "127.0.0.1"
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda agent: agent._rendezvous(agent._worker_group), agents))
    assert [ranks_of(agent) for agent in agents] == RANKS
    places = {(agent._worker_group.master_addr, agent._worker_group.master_port) for agent in agents}
    store = agents[0]._round.store
    assert store and places == {("127.0.0.1", store.port)}


@pytest.mark.parametrize("lost", [1, 4, 5])
def test_a_round_lost_before_workers_are_started_is_tried_again_a_few_times(alone, lost, monkeypatch):
    happened = []

    def initialize(agent, group):
        happened.append("try")
        if happened.count("try") <= lost:
            raise DistStoreError("the node of rank 0 has gone")

    monkeypatch.setattr(SimpleElasticAgent, "_initialize_workers", initialize)
    agent = agent_of(alone, happened)
    with pytest.raises(DistStoreError) if lost == 5 else nullcontext():
        agent._initialize_workers(agent._worker_group)
    assert happened.count("round.lost") == min(lost, 4) and happened.count("try") == min(lost + 1, 5)


@pytest.mark.parametrize(("failed", "left"), [(False, ""), (False, "x"), (True, "")])
def test_workers_that_start_again_because_a_round_is_over_have_a_reason_in_the_events_and_a_drain_is_no_alarm(
    alone, failed, left, monkeypatch, capfd
):
    monkeypatch.setattr(SimpleElasticAgent, "_restart_workers", lambda agent, group: None)
    monkeypatch.setattr(ProgressAgent, "_is_left", lambda agent: False)
    monkeypatch.setattr(ProgressAgent, "_signal_workers", lambda agent: None)
    happened = []
    agent = agent_of(alone, happened)
    agent._events.subscribe(lambda event: happened.append(event.fields["reason"]))
    agent._failed_at, alone.waiting_reason = (1.0 if failed else None), "node x was not heard of"
    alone.left = left
    agent._restart_workers(agent._worker_group)
    words = "node x was not heard of; the workers of this node restart too"
    assert happened == ([] if failed else ["round.changed" if left else "round.ended", words])
    assert ("round.changed: " in capfd.readouterr().out) is bool(left)
    assert agent._worker_group.spec.max_restarts == (3 if failed else 4)


def test_while_ranks_end_because_of_a_signal_status_says_so(alone, tmp_path):
    agent = agent_of(alone, [], job=Job(Config.from_json({"reft": {}}), "j", "n", tmp_path))
    agent._end_workers(SignalStop(None, Events(), WAIT), signal.SIGTERM)
    assert noted(tmp_path).startswith("SIGTERM has come: ")
    note = read_note(tmp_path)
    state = job_state(JobFacts("j", time.time(), launched=True, note=note, failed=True))
    assert state.state is State.WAITING and "SIGTERM" in state.headline and "start again" not in state.headline


@pytest.mark.parametrize("over", [True, False])
def test_at_a_signal_nothing_is_written_once_the_ranks_of_all_nodes_have_ended(alone, over, monkeypatch):
    asked = threading.Event()

    def checkpoint(*words, **more):
        asked.set()
        return {"state": "off"}

    def waits(seconds):
        raise TimeoutError

    alone.next_rendezvous()
    agent = agent_of(alone, [])
    agent._pcontext = SimpleNamespace(pids=dict, error_files={})  # no rank is left here
    if not over:
        monkeypatch.setattr(alone, "wait_for_all", waits)
    stop = SignalStop(SimpleNamespace(checkpoint=checkpoint), Events(), WAIT)
    result = agent._end_workers(stop, signal.SIGTERM)
    stop.finish()
    assert asked.is_set() is not over and (result is not None and result.state is WorkerState.SUCCEEDED) is over


def test_a_round_of_another_back_end_is_not_tried_again(monkeypatch):
    def initialize(agent, group):
        raise DistStoreError("the store has gone")

    monkeypatch.setattr(SimpleElasticAgent, "_initialize_workers", initialize)
    happened = []
    agent = agent_of(object(), happened)
    with pytest.raises(DistStoreError):
        agent._initialize_workers(agent._worker_group)
    assert happened == []


def test_the_job_tells_the_rendezvous_who_this_node_is(tmp_path):
    job = Job(Config.from_flags(["--reft"])[0], "j", "node7", tmp_path)
    config = LaunchConfig(1, 1, 1, run_id="r", rdzv_backend="ft_plugins", rdzv_endpoint="localhost:0")
    handler, _ = _specify(config, "true", (), job, False)
    try:
        info = handler.next_rendezvous()
        assert (info.rank, info.world_size, handler.use_agent_store) == (0, 1, True)
        assert (handler.get_backend(), handler.get_run_id(), handler.num_nodes_waiting()) == ("ft_plugins", "r", 0)
        assert json.loads((tmp_path / "nodes.json").read_text())["roster"]["members"][0]["node"] == "node7"
    finally:
        assert handler.shutdown() is True


def test_a_round_of_one_node_waits_for_nothing(monkeypatch):
    def paused(*args):
        raise AssertionError("it waits, though there is no other node")

    parameters = RendezvousParameters(BACKEND, "localhost:0", f"alone-{os.getpid()}", 1, 1)
    alone = Rendezvous(RendezvousSettings.read(parameters))
    alone.workers = 2
    try:
        assert alone.next_rendezvous().world_size == 1
        monkeypatch.setattr(round_join, "pause", paused)
        monkeypatch.setattr(rendezvous, "pause", paused)
        monkeypatch.setattr(NodeService, "wait_for_request", paused)
        for _ in range(3):  # as after each failure
            assert alone.next_rendezvous().rank == 0
    finally:
        alone.shutdown()
