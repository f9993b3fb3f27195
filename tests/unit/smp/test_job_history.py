"""What an operator sees of a job's past: restarts, downtime, and how old the newest iteration and versions are."""

import json
import time
from pathlib import Path

import pytest

from ft_plugins.smp.watch.job_history import (
    HISTORY_FILE,
    NODE,
    PROCESS,
    FtRunNote,
    FtRunPhase,
    History,
    JobHistory,
    Sight,
    read_history,
    write_note,
)
from ft_plugins.snapshot.segment.segment import Segment
from ft_plugins.snapshot.segment.shape import Shape
from ft_plugins.snapshot.segment.slots import Version

SHAPE = Shape(nbytes=100, small_nbytes=10, buckets=1, layout=1)
SECONDS = 90.0


def story(*steps):
    """The history after some steps, each at a time."""
    history = History()
    for now, step in steps:
        history = step(history, now)
    return history


def saw(completed=None, failed=False):
    return lambda history, now: history.seen(now, Sight(failed, completed))


def fenced(attached):
    return lambda history, now: history.fenced(now, attached)


def opened(base):
    return lambda history, now: history.opened(base)


START = ((10.0, fenced(False)), (11.0, opened(0)), (12.0, saw(0)), (13.0, saw(1)), (14.0, saw(2)))
KILLED = (*START, (20.0, saw(2, failed=True)), (22.0, fenced(True)), (25.0, saw(None)), (26.0, opened(1)))


def test_the_first_start_is_no_restart_and_no_downtime():
    report = story(*START).report(15.0)
    assert (report["restarts"], report["downtime_seconds"], report["down_for_seconds"]) == (0, 0.0, None)
    assert (report["iteration"], report["iteration_age_seconds"]) == (2, 1.0)


def test_downtime_lasts_from_the_failure_until_an_iteration_is_completed_again():
    down = story(*KILLED, (27.0, saw(1)))
    assert (down.report(28.0)["downtime_seconds"], down.report(28.0)["down_for_seconds"]) == (8.0, 8.0)
    up = story(*KILLED, (27.0, saw(1)), (29.0, saw(2)), (60.0, saw(9)))
    assert up.report(99.0)["restarts"] == 1
    assert (up.report(99.0)["downtime_seconds"], up.report(99.0)["down_for_seconds"]) == (9.0, None)
    twice = story(*KILLED, (29.0, saw(2)), (40.0, saw(2, failed=True)), (41.0, fenced(True)), (41.5, opened(2)))
    assert twice.report(45.0)["restarts"] == 2 and twice.report(45.0)["downtime_seconds"] == 9.0 + 5.0


def test_ranks_that_were_killed_for_another_nodes_sake_are_down_from_the_fence_at_the_latest():
    assert story(*START, (20.0, fenced(True))).report(23.0)["downtime_seconds"] == 3.0


def test_an_iteration_that_was_already_completed_before_does_not_end_an_outage():
    """Ranks that restore iteration 1 report 1 as completed, without having trained."""
    assert story(*KILLED, (27.0, saw(1)), (29.0, saw(1))).report(30.0)["down_for_seconds"] == 10.0


def test_an_iteration_that_was_restored_is_not_one_that_was_just_completed():
    """A job that restarts for ever without progress must not look young."""
    report = story(*KILLED, (27.0, saw(1))).report(30.0)
    assert (report["iteration"], report["iteration_age_seconds"]) == (1, 16.0), "since the last one that was completed"
    new = story((10.0, fenced(False)), (11.0, opened(40)), (12.0, saw(40)))
    assert (new.report(30.0)["iteration"], new.report(30.0)["iteration_age_seconds"]) == (40, None)
    assert new.seen(31.0, Sight(False, 41)).report(33.0)["iteration_age_seconds"] == 2.0


def test_a_node_that_takes_no_part_is_not_down_and_names_no_iteration_of_its_past(tmp_path):
    spare = story(*KILLED, (30.0, lambda history, now: history.seen(now, Sight(apart=True))))
    report, again = spare.report(900.0), spare.fenced(1000.0, True).report(1005.0)
    assert (report["down_for_seconds"], report["downtime_seconds"], report["iteration"]) == (None, 0.0, None)
    assert again["down_for_seconds"] == 5.0, "the time as a spare was no outage"
    kept = JobHistory(tmp_path, continues=False)
    for phase in (FtRunPhase.WAITING, FtRunPhase.SPARE):
        kept.now = story(*KILLED)
        write_note(tmp_path, FtRunNote(phase))
        kept.look([], 1, {}, always=True)
        assert (kept.report()["down_for_seconds"] is None) is (phase is FtRunPhase.SPARE)


def test_a_version_is_as_old_as_its_first_sight():
    history = History()
    for now, committed in ((10.0, None), (12.0, Version(1, 4)), (15.0, Version(1, 4)), (16.0, Version(1, 8))):
        history = history.seen(now, Sight(versions={PROCESS: Version(1, 8), NODE: committed}))
    tiers = history.report(18.0)["tiers"]
    assert tiers[PROCESS] == {"lineage": 1, "iteration": 8, "age_seconds": 8.0}
    assert tiers[NODE] == {"lineage": 1, "iteration": 8, "age_seconds": 2.0} and tiers["storage"] is None


def test_a_trainer_that_died_while_no_smp_ran_is_down_since_that_smp_last_wrote():
    """Both were killed, and an hour later the same command is given."""
    history = History(written=100.0, base=1, iteration=5).seen(3700.0, Sight(failed=True))
    assert history.report(3700.0)["down_for_seconds"] == 3600.0
    assert History(written=100.0).seen(110.0, Sight(failed=True)).down_since == 110.0, "it was replaced at once"


def test_the_file_is_continued_only_with_the_segments(tmp_path):
    first = JobHistory(tmp_path, continues=False)
    first.fenced(attached=True)
    first.opened(7)
    assert JobHistory(tmp_path, continues=True).now == first.now
    assert JobHistory(tmp_path, continues=False).now == History() and not (tmp_path / HISTORY_FILE).exists()


@pytest.mark.parametrize(
    "change",
    [
        {"restarts": -1},
        {"restarts": True},
        {"down_seconds": "1"},
        {"down_since": -2.0},
        {"moments": [1]},
        {"base": 1.5},
    ],
    ids=str,
)
def test_a_damaged_file_is_no_history(tmp_path, change):
    history = JobHistory(tmp_path, continues=False)
    history.fenced(attached=True)
    whole = json.loads((tmp_path / HISTORY_FILE).read_text())
    assert read_history(tmp_path) == history.now
    (tmp_path / HISTORY_FILE).write_text(json.dumps(whole | change))
    assert read_history(tmp_path) is None
    (tmp_path / HISTORY_FILE).write_text("{")
    assert read_history(tmp_path) is None


# ------------------------------------------------------------------------------------------------ a real SMP


def history_of(node, until):
    """The SMP's history once it is as expected."""
    deadline = time.monotonic() + SECONDS
    while True:
        with node.client() as client:
            history = dict(client.status()["history"])
        if until(history) or time.monotonic() > deadline:
            assert until(history), history
            return history
        time.sleep(0.05)


def test_an_smp_counts_restarts_and_downtime_and_its_replacement_goes_on_counting(node, trainer):
    node.start()
    token = node.fence()
    killed = trainer(0, token)
    with node.client() as client:
        client.open_lineage(0, token, 1, None)
        segment = Segment(Path(client.status()["segments"][0]["path"]))
        segment.header.completed = 1
    began = history_of(node, lambda history: history["iteration"] == 1)
    assert (began["restarts"], began["downtime_seconds"]) == (0, 0.0)
    killed.end()
    history_of(node, lambda history: history["down_for_seconds"] is not None)
    token = node.fence()
    trainer(0, token)
    node.kill()
    node.start()
    assert history_of(node, lambda history: True)["restarts"] == 1
    with node.client() as client:
        client.open_lineage(0, token, 2, None)
    assert history_of(node, lambda history: True)["down_for_seconds"] is not None
    segment.header.completed = 1
    again = history_of(node, lambda history: history["down_for_seconds"] is None)
    assert (again["restarts"], again["iteration"]) == (1, 1) and 0 < again["downtime_seconds"] < SECONDS
    segment.close()
