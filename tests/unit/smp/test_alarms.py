"""What a trainer prints for its SMP: the first of many failures, rarely again, and that it is over."""

import json

from ft_plugins.events import catalogue
from ft_plugins.smp.watch.alarms import REPEAT_SECONDS, Alarms, RepeatedFailure
from ft_plugins.transport.protocol import ALARM

FAILED, WORKS = catalogue.CHECKPOINT_FAILED, catalogue.CHECKPOINT_COMPLETED
DIFFER = catalogue.REPLICA_MISMATCHED


def shown(folder):
    path = folder / ALARM
    return dict(json.loads(path.read_text())) if path.exists() else {}


def test_of_a_hundred_failures_the_first_is_said_then_one_in_ten_minutes_with_their_number(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    failing = RepeatedFailure(Alarms(tmp_path), "storage", FAILED, WORKS, "n")
    said = []
    for number in range(100):
        failing.failed(f"iteration {number}: no space")
        now[0] += REPEAT_SECONDS / 40
        if shown(tmp_path)["storage"] not in said:
            said.append(shown(tmp_path)["storage"])
    assert said == [
        FAILED.sentence("node n", "iteration 0: no space"),
        FAILED.sentence("node n", "iteration 40: no space; 41 attempts in a row"),
        FAILED.sentence("node n", "iteration 80: no space; 81 attempts in a row"),
    ]
    failing.worked("iteration 100 is there")
    assert shown(tmp_path) == {"storage": WORKS.sentence("node n", "iteration 100 is there, after 100 failed attempts")}
    failing.failed("iteration 101: no space")
    assert shown(tmp_path) == {"storage": FAILED.sentence("node n", "iteration 101: no space")}, "the first again"


def test_what_has_never_failed_says_nothing(tmp_path):
    RepeatedFailure(Alarms(tmp_path), "storage", FAILED, WORKS).worked("iteration 100 is there")
    assert shown(tmp_path) == {}


def test_a_new_incarnation_hears_what_still_holds_and_not_what_is_over(tmp_path):
    run_dir = tmp_path / "b"
    run_dir.mkdir()
    alarms = Alarms(run_dir)
    alarms.say("storage", WORKS, "it works")
    alarms.say("replicas", DIFFER, "they differ")
    alarms.say("disk", FAILED, "it is full")
    alarms.forget("replicas")
    assert shown(run_dir) == {"disk": FAILED.sentence("node b", "it is full")}
    Alarms(run_dir).forget()
    assert shown(run_dir) == {}, "an SMP knows nothing of what the one before it wanted to say"


def test_a_full_disk_costs_words_and_the_next_ones_are_written_with_those(tmp_path):
    alarms = Alarms(tmp_path / "run")
    alarms.say("storage", FAILED, "full")
    (tmp_path / "run").mkdir()
    alarms.say("replicas", DIFFER, "they differ")
    assert shown(tmp_path / "run") == {
        "storage": FAILED.sentence("node run", "full"),
        "replicas": DIFFER.sentence("node run", "they differ"),
    }
