"""What looks back at a job speaks of one run: the last one."""

from ft_plugins.cli.job_events import of_last_run
from ft_plugins.events import Event

A, B = "a" * 32, "b" * 32


def started(time):
    return Event("job.started", time, fields={"nproc": 1, "script": "train.py"})


def event(name, time, **fields):
    return Event(name, time, fields=fields)


def test_two_runs_of_one_name_are_told_apart_also_where_their_starts_alternate():
    first = [started(1), event("training.started", 2, run=A), event("worker.failed", 3, rank=0)]
    failed = [started(4), event("job.ended", 5, status="refused")]  # before its run is known
    second = [started(6), event("state.restored", 7, run=B), event("worker.failed", 8, rank=1)]
    again = [started(9), event("job.ended", 10, status="failed")]
    assert of_last_run([[*first, *failed, *second, *again]]) == [*second, *again]
    other_node = [started(6.5), event("training.started", 7, run=B)]
    assert of_last_run([[*first, *second], other_node]) == [*second, *other_node]
    stale_node = [started(1.5), event("training.started", 2, run=A), started(7.5), event("job.ended", 8, status="x")]
    assert of_last_run([[*first, *second], stale_node]) == [*second, *stale_node[2:]]


def test_restarts_of_one_run_and_histories_without_any_are_whole():
    run = [event("smp.started", 0), started(1), event("training.started", 2, run=A), started(3)]
    restored = [*run, event("state.restored", 4, run=A)]
    assert of_last_run([restored]) == restored
    older = [event("smp.started", 0), started(1), event("training.started", 2)]
    assert of_last_run([older, []]) == older
