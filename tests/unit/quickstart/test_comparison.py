"""The report: every figure from the events, and no proof without one restore from memory."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from ft_plugins.events import Event, Events, catalogue, file_sink, read
from ft_plugins.rehearse.driver import Loss
from quickstart_report.comparison import (
    EvidenceError,
    RestoredVersion,
    RunRecord,
    compare_runs,
    sealed_by_all,
    stall,
)
from quickstart_report.comparison_text import table, verdict
from quickstart_report.run_pictures import difference, draw_comparison

RANKS = 4
BEGAN, KILLED = 1000.0, 1038.2


def event(name, time, rank=None, **fields):
    return Event(name, time, "node0", rank, 100 + (rank or 0), fields)


def incarnation(start, token, lineage, iterations):
    """What `RANKS` trainers emit: they attach, pass fences of 1, 2, 3, ... ms and commit a version a second."""
    found = [
        event(
            "rank.attached",
            start + rank / 10,
            rank,
            token=token,
            budget_bytes=3100,
            resident_bytes=3000,
            share_bytes=1000,
        )
        for rank in range(RANKS)
    ]
    for k in iterations:
        for rank in range(RANKS):
            now = start + 1 + k - iterations.start + rank / 100
            found.append(event("fence.waited", now, rank, iteration=k, seconds=(k + rank) / 1000))
            found.append(event("snapshot.sealed", now, rank, lineage=lineage, iteration=k, seconds=0.25, bytes=1000))
    return found


def losses(start, iterations):
    return [Loss(k, 5.0 / k, start + 1 + k - iterations.start + 0.01) for k in iterations]


def unfailed_run():
    return RunRecord(BEGAN, BEGAN + 45, incarnation(1030.0, 1, 1, range(1, 13)), losses(1030.0, range(1, 13)))


def restored(rank, **changes):
    found = {"lineage": 1, "iteration": 7, "tier": "process", "completed": 8, "lost": 1, "seconds": 0.1 + rank / 100}
    return event("state.restored", 1071.0, rank, **(found | changes))


def failed_run(restores=None, **changes):
    """Killed in iteration 9, when 8 were completed and 7 was the newest version: resumes from 7."""
    attempt = incarnation(1030.0, 1, 1, range(1, 9))
    events = [
        *(e for e in attempt if not (e.name == "snapshot.sealed" and e.rank == 3 and e.fields["iteration"] == 8)),
        event("signal.sent", KILLED, 2, signal="SIGKILL", iteration=8),
        event("worker.failed", KILLED + 0.5, 2, local_rank=2, exitcode=-9, signal="SIGKILL", message=""),
        event("workers.restarted", KILLED + 1.0, restart=1, token=2),
        *([restored(rank) for rank in range(RANKS)] if restores is None else restores),
        *incarnation(1070.0, 2, 2, range(8, 13)),
    ]
    events.sort(key=lambda e: e.time)
    run = RunRecord(BEGAN, BEGAN + 80, events, losses(1030.0, range(1, 9)) + losses(1071.5, range(8, 13)))
    return replace(run, **changes)


def report(**changes):
    return compare_runs(failed_run(**changes), unfailed_run())


def test_a_kill_that_left_no_trace_is_proven_with_its_figures():
    found = report()
    assert found.proven and found.identical and found.unproven == ()
    assert found.iterations == found.iterations_unfailed == 12
    assert found.iterations_lost == 1
    assert found.restores == 1
    assert found.restored_from == RestoredVersion("process", 1, 7)
    assert found.killed == {"rank": 2, "time": KILLED, "signal": "SIGKILL", "iteration": 8}
    assert found.host_memory_bytes == RANKS * 3000
    assert found.captured_bytes == RANKS * 1000
    more = event("slot.claimed", KILLED + 1, 3, count=4, bytes=4000)
    grown = compare_runs(replace(failed_run(), events=[*failed_run().events, more]), unfailed_run())
    assert grown.host_memory_bytes == RANKS * 3000 + 1000, "what a rank claimed while it trained counts"
    assert found.snapshot_seconds == 0.25
    assert found.snapshots == 7 + 5


def test_the_downtime_is_told_apart():
    seconds = report().seconds
    assert seconds.detect == pytest.approx(0.5)
    assert seconds.restart == pytest.approx(1070.3 - KILLED - 0.5)  # the last of four ranks attaches at 1070.3
    assert seconds.load == pytest.approx(0.13)  # the slowest of four ranks
    assert seconds.proof == pytest.approx(1072.51 - KILLED), "iteration 8, which was logged before"
    assert seconds.down == pytest.approx(1073.51 - KILLED)


def test_the_stall_is_the_median_over_fences_of_the_slowest_rank():
    assert stall(unfailed_run().events) == pytest.approx((6.5 + 3) / 1000)
    # the fences of the first incarnation and of the second, iteration 8 in both
    assert stall(failed_run().events) == pytest.approx((sorted([*range(1, 9), *range(8, 13)])[6] + 3) / 1000)
    assert stall([]) is None


def test_a_version_counts_as_a_snapshot_when_every_rank_has_sealed_it():
    found = sealed_by_all(failed_run().events)
    assert [k for _, k in found] == [*range(1, 8), *range(8, 13)]
    assert found[0][0] == pytest.approx(1031.03)  # when the last of the four had it


@pytest.mark.parametrize("name", ["training.started", "state.lost"])
def test_a_restart_from_scratch_is_no_proof_even_with_identical_state(name):
    scratch = [event(name, 1071.0, rank, reason="no version was captured before") for rank in range(RANKS)]
    found = report(restores=scratch)
    assert found.identical and found.restores == 0 and found.restored_from is None and found.scratch_restarts == 1
    assert not found.proven
    assert "started 1 time(s) from scratch" in verdict(found) and "restored 0 time(s)" in verdict(found)


def test_starting_from_scratch_before_the_kill_is_how_every_job_starts():
    run = failed_run()
    first = [event("training.started", 1030.5, rank, reason="no version was captured before") for rank in range(RANKS)]
    assert compare_runs(replace(run, events=[*first, *run.events]), unfailed_run()).proven


@pytest.mark.parametrize(
    "restores, reason",
    [
        (
            [restored(rank, tier="storage") for rank in range(RANKS)],
            "from the storage tier, expected a memory tier (process, node)",
        ),
        ([restored(rank) for rank in range(RANKS)] * 2, "restored 2 time(s), expected 1"),
    ],
)
def test_other_than_one_restore_from_memory_is_no_proof(restores, reason):
    found = report(restores=restores)
    assert not found.proven
    assert reason in verdict(found)


def test_without_a_kill_nothing_is_proven():
    found = compare_runs(unfailed_run(), unfailed_run())
    assert found.identical and not found.proven
    assert "0 processes were killed" in verdict(found)
    assert found.seconds.detect is None and found.iterations_lost is None


def test_a_lost_node_is_named_and_what_was_logged_and_not_restored_is_lost():
    run = failed_run([restored(rank, tier="node", iteration=6, completed=6, lost=0) for rank in range(RANKS)])
    kill = event("signal.sent", KILLED, lost="node1", ranks=[2, 3], signal="SIGKILL", iteration=8)
    events = [kill if e.name == "signal.sent" else e for e in run.events]
    found = compare_runs(replace(run, events=events), unfailed_run())
    assert found.proven and found.victim == "node1" and found.iterations_lost == 2
    assert "after a SIGKILL of node1 and one restore" in verdict(found)
    assert "with one node killed" in str(table(found).title)


def test_what_went_in_bubbles_stands_in_the_table_where_any_were_planned():
    idle = {"seconds": 1.0, "spans": [], "bubbles": [[0, 0.0, 0.4]], "windows": [], "bytes": 9, "receiver": 0}
    planned = [event("bubbles.planned", 1031.0, 0, iterations=2, idle_seconds=0.4)]
    planned += [event("timeline.recorded", 1031.0, 0, iteration=2, reason="", **idle)]
    counts = [
        event("version.committed", 1032.0 + k, iteration=3 * k, in_bubbles=90 * k, late=10 * k, by_rate=7)
        for k in (1, 2, 3)
    ]
    unfailed = unfailed_run()
    found = compare_runs(failed_run(), replace(unfailed, events=[*unfailed.events, *planned, *counts]))
    assert found.bubbles is None and found.bubbles_unfailed is not None
    assert json.loads(found.json())["bubbles_unfailed"]["in_bubbles"] == 180
    text = io.StringIO()
    Console(file=text, width=120).print(table(found))
    for name, value in (("bubbles, share of", "40%"), ("a version committed every", "3.0"), ("bytes sent", "90%")):
        (line,) = [line for line in text.getvalue().splitlines() if name in line]
        assert value in line
    assert "bubbles" not in str([column._cells for column in table(report()).columns])


def test_ranks_that_restored_different_versions_are_reported_as_such():
    mixed = [restored(rank, iteration=7 if rank else 6) for rank in range(RANKS)]
    with pytest.raises(EvidenceError, match="different versions"):
        report(restores=mixed)
    with pytest.raises(EvidenceError, match="different numbers of restores"):
        report(restores=[restored(0)])


def test_a_difference_of_the_transcripts_is_named():
    found = compare_runs(failed_run(), unfailed_run(), ["NOT EXACT: iteration 9, rank 1: the batch: b1 != b9"])
    assert not found.identical and not found.proven
    assert "are NOT identical: NOT EXACT: iteration 9, rank 1: the batch" in verdict(found)


def test_runs_that_left_nothing_are_refused():
    with pytest.raises(EvidenceError, match="failed run left no losses"):
        report(losses=[])


def test_report_json_has_the_promised_keys():
    found = json.loads(report().json())
    assert found["identical"] is True and found["proven"] is True
    assert found["iterations_lost"] == 1
    assert found["restored_from"] == {"tier": "process", "lineage": 1, "iteration": 7}
    assert {"detect", "restart", "load"} <= found["seconds"].keys()
    assert found["snapshot_stall_seconds"] > 0 and found["host_memory_bytes"] == RANKS * 3000


def test_the_table_shows_every_figure():
    text = io.StringIO()
    Console(file=text, width=120).print(table(report()))
    for shown in (
        "12",
        "iteration 7 (lineage 1, process tier)",
        "500.00 ms",
        "130.00 ms",
        "3.00 x the state",
        "identical",
    ):
        assert shown in text.getvalue()
    text = io.StringIO()
    Console(file=text, width=120).print(table(report(losses=losses(1030.0, range(1, 12)))))
    (line,) = [line for line in text.getvalue().splitlines() if "iterations  " in line]
    assert [word for word in line.split() if word.isdigit()] == ["12", "11"], "the failed run logged one less"
    text = io.StringIO()
    Console(file=text, width=120).print(table(compare_runs(failed_run(), unfailed_run(), ["a difference"])))
    assert "DIFFERS" in text.getvalue()


def test_the_picture_is_drawn(tmp_path):
    failed, unfailed = failed_run(), unfailed_run()
    draw_comparison(failed, unfailed, compare_runs(failed, unfailed), tmp_path / "report.png")
    written = (tmp_path / "report.png").read_bytes()
    assert written.startswith(b"\x89PNG") and len(written) > 20_000
    synchronised = [event("replicas.synchronised", BEGAN + 35, 0)]
    other = replace(unfailed, events=[*unfailed.events, *synchronised])
    draw_comparison(other, unfailed, compare_runs(other, unfailed), tmp_path / "other.png")  # without a kill


def test_the_difference_of_the_runs_is_that_of_each_iteration_also_of_one_that_was_computed_twice():
    unfailed = unfailed_run()
    whole = [(entry.iteration, 0.0) for entry in failed_run().losses]
    assert difference(failed_run(), unfailed) == whole and len(whole) > 12 - 1
    twice = [*unfailed.losses, Loss(8, unfailed.losses[7].loss + 0.5, 1090.0), Loss(99, 1.0, 1091.0)]
    assert difference(replace(unfailed, losses=twice), unfailed)[-1] == (8, 0.5)


def test_a_kill_written_by_another_process_is_read_with_its_rank(tmp_path):
    stream = Events()
    stream.subscribe(file_sink(tmp_path / "events.jsonl"))
    stream.emit(catalogue.SIGNAL_SENT, rank=2, signal="SIGKILL")
    (found,) = read(tmp_path / "events.jsonl")
    assert found.rank == 2 and found.fields == {"signal": "SIGKILL"}
