"""`ft-plugins status` on one node shows the others of its job: real SMPs, of which one dies and one is stopped."""

import json
import os
import signal
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ft_plugins.cli import status_command, status_facts
from ft_plugins.errors import ProtocolError
from ft_plugins.events import Events, catalogue, file_sink
from ft_plugins.smp.serve.node_context import NodeContext
from ft_plugins.smp.tree import other_nodes
from ft_plugins.smp.tree.node import NodeTier
from ft_plugins.smp.tree.protection import Protection
from ft_plugins.snapshot.segment.segment import Segment
from ft_plugins.snapshot.segment.shape import Shape
from ft_plugins.snapshot.segment.slots import Pin, Version, slots_for

from .smp.node_clusters import capture, wait, write_secret
from .test_cli import FACTS

SHAPE = Shape(8192, 4096, 1, 1, slots_for(Pin.NODE, Pin.SOURCE))
ANSWERS = 60.0  # seconds: a node that lives answers on any machine


@pytest.fixture
def protected(nodes, tmp_path, monkeypatch):
    """Nodes of these names that protect each other; `status` finds the run directory of the first one alone."""

    def make(*names):
        made = [nodes(name) for name in names]
        secret, endpoints, tokens = write_secret(tmp_path), [], []
        for rank, node in enumerate(made):
            node.start()
            tokens.append(node.fence())
            with node.client() as client:
                client.attach(rank, tokens[-1], SHAPE, {}, fresh=False, world_size=len(names))
                endpoints.append(client.endpoint("127.0.0.1", str(secret)))
        ranks = tuple(range(len(names)))
        for rank, node in enumerate(made):
            with node.client() as client:
                client.open_lineage(rank, tokens[rank], 1, None)
                shapes, where = (SHAPE,) * len(names), tuple(endpoints)
                job = Protection(1, None, names, (ranks,), shapes, 1, rank, where, 1, 0.0, 600.0)
                client.protect(rank, tokens[rank], job)
        here = tmp_path / "ft_plugins" / made[0].job
        here.mkdir(parents=True)
        (here / names[0]).symlink_to(made[0].run_dir)
        here.parent.chmod(0o700)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        monkeypatch.setattr(status_facts, "OTHER_SECONDS", ANSWERS)
        monkeypatch.setattr(status_facts, "OTHERS_SECONDS", ANSWERS)
        return made

    return make


def shown(capsys, *words):
    status_command.status(**(status_command.arguments(words) or {}))
    return capsys.readouterr().out


def others(capsys):
    (job,) = json.loads(shown(capsys, "--json"))["jobs"]
    return {each["node"]: each for each in job["others"]}


def test_status_shows_the_other_nodes_and_which_of_them_gives_no_answer(protected, capsys, monkeypatch):
    _, b, c = protected("a", "b", "c")
    events = Events("b")
    events.subscribe(file_sink(b.run_dir / "events.jsonl"))
    events.emit(catalogue.CHECKPOINT_FAILED, lineage=1, iteration=20, reason="No space left \x1b[31mon device")
    with monkeypatch.context() as bounded:
        bounded.setattr(status_facts, "OTHER_SECONDS", 0.3)
        os.kill(c.pids[-1], signal.SIGSTOP)
        assert " 0.3 s" in others(capsys)["c"]["error"], "it holds up nothing"
    c.kill()
    found = others(capsys)
    assert list(found) == ["b", "c"]
    assert (found["b"]["state"], found["b"]["ranks"], found["b"]["error"]) == ("ORPHANED", 1, "")
    assert found["b"]["alarm"].startswith("checkpoint.failed: node b: No space left \\x1b[31mon device.")
    assert found["c"]["state"] is None and "did not answer 'status': Connection refused" in found["c"]["error"]
    text = shown(capsys)
    assert "\n  nodes        b: ORPHANED: the launcher is gone" in text and "; last alarm: checkpoint.failed" in text
    assert "\n               c: no answer: the SMP at 127.0.0.1:" in text
    c.start()
    assert others(capsys)["c"]["error"] == "", "one that takes its place listens at the same port"


def test_a_node_without_which_the_job_went_on_is_not_told_to_resume(protected, capsys):
    for rank, (node, version) in enumerate(zip(protected("a", "b"), (Version(1, 41), Version(2, 77)), strict=True)):
        segment = Segment(node.segment(rank))
        segment.header.completed = version.iteration
        capture(segment, 0, version, token=segment.header.token)
        wait(lambda node=node: node.status()["history"]["tiers"]["process"] is not None)
    (job,) = json.loads(shown(capsys, "--json"))["jobs"]
    older = "iteration 41 in memory, older than what the job has without this node (iteration 77 on node b), is kept"
    assert (job["state"], older in job["headline"]) == ("ORPHANED", True)
    assert (job["iteration"], job["down_for_seconds"], job["iteration_age_seconds"]) == (None, None, None)
    assert job["remedy"].startswith("give the command that the job's log names") and "to resume" not in job["remedy"]


def test_an_answer_that_is_not_one_is_an_error_of_that_node_alone():
    class Sent:
        """A peer whose reply is `facts`."""

        def __init__(self, facts):
            self.facts, self.closed = facts, False

        def ask(self, name):
            return {"facts": self.facts}, None

        def drop(self):
            pass

        def close(self):
            self.closed = True

    sound = other_nodes.reported(
        {"state": "TRAINING", "headline": "all \x1b[31m" + "x" * 5000, "remedy": "", "ranks": 8, "iteration": 7,
         "iteration_age_seconds": None, "restarts": 0, "downtime_seconds": 0.0, "newest": {"process": None},
         "alarm": None, "details": {"safe_lineage": 0}}
    )  # fmt: skip
    peers = {"a": Sent(None), "b": Sent({**sound, "ranks": -1}), "c": Sent(sound)}
    a, b, c = other_nodes.ask(peers, ANSWERS)
    assert a["error"].startswith("status: ") and "ranks" in b["error"] and b["state"] is None
    assert (c["error"], c["iteration"]) == ("", 7) and c["headline"].startswith("all \\x1b[31m")
    assert len(c["headline"]) < 700 and all(peer.closed for peer in peers.values())


class Silent:
    """A peer that answers when it is closed, or not at all; `most`: so many were asked at once."""

    asked = set()
    most = 0

    def __init__(self):
        self._closed = threading.Event()

    def ask(self, name):
        self.asked.add(self)
        Silent.most = max(Silent.most, len(self.asked))
        assert self._closed.wait(ANSWERS)
        raise ProtocolError("this side has hung up")

    def drop(self):
        self.asked.discard(self)

    def close(self):
        self._closed.set()


def test_silent_nodes_take_a_bounded_time_together_and_those_that_were_not_asked_say_so():
    count, seconds = 3 * other_nodes.AT_ONCE, 2.0  # in which the first ones are asked also on a busy machine
    answers = other_nodes.ask({f"n{at}": cast(Any, Silent()) for at in range(count)}, seconds)
    assert [each["node"] for each in answers] == [f"n{at}" for at in range(count)]
    asked, others = answers[: other_nodes.AT_ONCE], answers[other_nodes.AT_ONCE :]
    assert {each["error"] for each in asked} == {f"none within the {seconds:g} s for all nodes"}
    assert {each["error"] for each in others} == {f"not asked: others took the {seconds:g} s for all nodes"}
    assert Silent.most == other_nodes.AT_ONCE


def test_the_answers_of_many_nodes_come_in_pages_and_are_asked_for_once(tmp_path, monkeypatch):
    names = [f"n{at}" for at in range(other_nodes.PAGE + 3)]
    asked = []
    monkeypatch.setattr(other_nodes, "ask", lambda peers, seconds: asked.append(list(peers)) or list(peers))
    tier = NodeTier(NodeContext.of(tmp_path, "job", "n1", Events("n1"), {}))
    assert tier.other_nodes(0, 1.0, 1.0) == ([], None), "no job is protected"
    monkeypatch.setattr(tier, "peer", lambda where, seconds, node: None)
    plan, endpoints = SimpleNamespace(nodes=names), [("::1", at) for at in range(len(names))]
    tier._protection = cast(Any, SimpleNamespace(plan=lambda: plan, endpoints=endpoints))
    first, following = tier.other_nodes(0, 1.0, 1.0)
    assert following == other_nodes.PAGE
    rest, end = tier.other_nodes(following, 1.0, 1.0)
    names.remove("n1")
    assert [*first, *rest] == names and end is None and asked == [[], names]


WELL = {"state": "TRAINING", "alarm": "", "error": "", "headline": "all", "remedy": "nothing to do"}


def test_nodes_that_train_share_a_line_and_hundreds_that_do_not_take_nine():
    def text(others):
        return status_command.text_of([{**FACTS, "others": others}], 80).split("\n  nodes        ")[1]

    train = [WELL | {"node": f"n{at}", "iteration": 1203 + at % 2} for at in range(2000)]
    assert " ".join(text(train).split()).startswith(
        "n0, n1, n2, n3, n4, n5, n6, n7, 1992 more: TRAINING, iteration 1203 to 1204 processes"
    )
    hung = {"state": "HUNG", "headline": "rank 3 is stopped by a signal", "remedy": "continue it"}
    lost = [WELL | hung | {"node": f"m{at}", "iteration": 9} for at in range(300)]
    shown = text([WELL | {"node": "b", "iteration": 7}, *lost])
    assert max(map(len, shown.splitlines())) <= 80 and shown.startswith("b: TRAINING, iteration 7\n")
    assert "m0: HUNG, iteration 9: rank 3 is stopped by a signal; to do: continue it" in " ".join(shown.split())
    assert " m8, m9, " in shown and "292 more" not in shown and "284 more: neither" in " ".join(shown.split())
