"""Scalars for the framework's writer: asked for behind training, written once, given up where the writer fails."""

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ft_plugins.config import Config
from ft_plugins.events import Event, Events, catalogue, file_sink
from ft_plugins.systems.scalar_report import scalar_report

BOUND = 60.0  # seconds


@pytest.fixture
def start(node):
    """A report of a node whose SMP runs, and its events; the first scalars are there."""
    made = []
    node.start()
    history = Events("n", 0)
    history.subscribe(file_sink(node.run_dir / "events.jsonl"))
    history.emit(catalogue.FENCE_WAITED, iteration=3, seconds=1.5)

    def begin(write, seconds=BOUND):
        events, emitted = Events("n", 0), list[Event]()
        events.subscribe(emitted.append)
        host = SimpleNamespace(write_scalars=write)
        config = Config.from_json({"reft": True, "scalar_seconds": seconds})
        report = scalar_report(cast(Any, host), config, node.run_dir, events)
        assert report is not None
        made.append(report)
        return report, emitted

    yield begin
    for report in made:
        report.close()
        assert not report._thread.is_alive()


def until_written(report, written, step):
    until = threading.Event()
    for _ in range(int(BOUND / 0.01)):
        report.completed(step)
        if written:
            return
        until.wait(0.01)
    raise AssertionError("no scalars came")


def test_what_the_smp_and_the_events_say_is_written_once_with_the_iteration(start):
    written = []
    report, emitted = start(lambda scalars, step: written.append((scalars, step)))
    until_written(report, written, 7)
    report.completed(8)
    [(scalars, step)] = written
    assert step == 7 and scalars["ft/fence_wait_seconds"] == 1.5 and scalars["ft/restarts"] == 0.0
    assert emitted == []


def test_they_are_asked_for_again(start):
    written = []
    report, _ = start(lambda scalars, step: written.append(step), 0.01)
    for step in (1, 2):
        written.clear()
        until_written(report, written, step)
        assert written == [step]


def test_a_writer_that_fails_gets_none_any_more_and_the_job_goes_on(start):
    tried = []

    def write(scalars, step):
        tried.append(step)
        raise OSError("No space left on device")

    report, emitted = start(write, 0.01)
    until_written(report, tried, 1)
    report._thread.join(BOUND)
    report.completed(2)
    assert tried == [1]
    assert [(event.name, event.fields["reason"]) for event in emitted] == [
        ("scalars.failed", "OSError: No space left on device")
    ]


def test_a_writer_for_which_training_waits_gets_none_any_more(start, monkeypatch):
    monkeypatch.setattr("ft_plugins.systems.scalar_report._LONGEST_SECONDS", 0.0)
    written = []
    report, emitted = start(lambda scalars, step: written.append(step), 0.01)
    until_written(report, written, 1)
    report._thread.join(BOUND)
    report.completed(2)
    assert written == [1]
    assert ["writer took" in event.fields["reason"] for event in emitted] == [True]


def test_a_rank_without_a_writer_and_a_job_that_wants_none_have_no_thread(tmp_path):
    def none(host, seconds=1.0, run_dir=tmp_path):
        config = Config.from_json({"reft": True, "scalar_seconds": seconds})
        return scalar_report(host, config, run_dir, Events("n")) is None

    writer = SimpleNamespace(write_scalars=print)
    assert none(SimpleNamespace()) and none(SimpleNamespace(write_scalars=None))
    assert none(writer, seconds=0.0) and none(writer, run_dir=None)
