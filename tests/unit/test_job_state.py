"""The state of a job on a node, as `ft-plugins status` says it: what is known, and what to do."""

from dataclasses import replace

import pytest

from ft_plugins.smp.watch.job_history import NOTE_FILE, FtRunNote, FtRunPhase, read_note, write_note
from ft_plugins.smp.watch.job_state import JobFacts, State, job_state, needs_restart

NOW = 10_000.0
RUNS = JobFacts("j", NOW, launched=True, note=FtRunNote(FtRunPhase.STARTING, time=NOW - 90))
GONE = replace(RUNS, launched=False, smp_answers=False)
KEPT = replace(GONE, smp_answers=True, holds=True, newest=41, kept_seconds=1770.0)
AGAIN = "give the same command again to resume from memory, or drop it: ft-plugins end j"
FROM_THE_BEGINNING = (
    "give the same command again: it starts from a checkpoint if storage has one, else from the beginning"
)


def ended(status, exit_status, reason=""):
    return FtRunNote(FtRunPhase.ENDED, reason, status, exit_status, NOW - 30)


@pytest.mark.parametrize(
    ("facts", "state", "headline", "remedy"),
    [
        (RUNS, State.STARTING, "the ranks start", "nothing to do"),
        (replace(RUNS, restarts=2), State.STARTING, "the ranks start, restart 2", "nothing to do"),
        (
            replace(RUNS, trains=True, failed=True),
            State.STARTING, "a training process has died: the ranks start again", "nothing to do",
        ),
        (replace(RUNS, trains=True), State.TRAINING, "all ranks of this node train", "nothing to do"),
        (
            replace(RUNS, note=FtRunNote(FtRunPhase.WAITING, "waiting for 1 more of 2 nodes", time=NOW - 90)),
            State.WAITING, "waiting for 1 more of 2 nodes, for 90 s so far",
            "start the missing nodes with the same command; the job's log has it",
        ),
        (
            replace(RUNS, note=FtRunNote(FtRunPhase.WAITING, "b does not know the secret", remedy="copy it")),
            State.WAITING, "b does not know the secret, for 0 s so far", "copy it",
        ),
        (
            replace(
                RUNS, trains=True, failed=True, smp_answers=False, alarm=True,
                note=FtRunNote(FtRunPhase.STOPPING, "SIGTERM has come: the ranks end"),
            ),
            State.WAITING, "SIGTERM has come: the ranks end", "nothing to do",
        ),
        (replace(RUNS, note=FtRunNote(FtRunPhase.SPARE, "a spare")), State.WAITING, "a spare", "nothing to do"),
        (
            replace(RUNS, note=FtRunNote(FtRunPhase.SPARE, "a spare"), went_on="iteration 77 on node b"),
            State.WAITING, "a spare; what is in memory here is older than what the job has (iteration 77 on node b)",
            "nothing to do",
        ),
        (
            replace(RUNS, trains=True, failed=True, stopped=(3,)),
            State.HUNG, "rank 3 is stopped by a signal; the others wait",
            "continue the process (kill -CONT); otherwise ft-run soon takes it for lost and starts all ranks again",
        ),
        (
            replace(RUNS, trains=True, idle_seconds=61.0, hang_seconds=60.0),
            State.HUNG, "no iteration was completed for 61 s; 60 s are a hang",
            "ft-run writes the stacks of all ranks and starts them again; without ft-run: end the ranks and give the "
            "same command again",
        ),
        (
            replace(RUNS, trains=True, idle_seconds=61.0, hang_seconds=60.0, waits_for="rank 0 of node n, in a phase"),
            State.WAITING,
            "no iteration was completed for 61 s; rank 0 of node n, in a phase, may be at work: nothing is killed for "
            "half an hour",
            "read its stack, see job.waiting; if it hangs, end the job and give the same command again",
        ),
        (
            replace(RUNS, smp_answers=False, smp_hangs=True),
            State.UNPROTECTED,
            "ft-run is running, but the SMP gives no answer; ft-run replaces it", "nothing to do",
        ),
        (replace(RUNS, smp_answers=False), State.STARTING, "the ranks start", "nothing to do"),
        (
            replace(RUNS, smp_answers=False, note=FtRunNote(FtRunPhase.WAITING, "waiting for nodes", time=NOW - 5)),
            State.WAITING, "waiting for nodes, for 5 s so far",
            "start the missing nodes with the same command; the job's log has it",
        ),
        (
            replace(RUNS, smp_answers=False, alarm=True),
            State.UNPROTECTED, "ft-run is running, but the SMP is gone; ft-run replaces it", "nothing to do",
        ),
        (
            replace(GONE, note=ended("succeeded", 0)),
            State.ENDED, "30 s ago, succeeded, exit status 0", "nothing to do",
        ),
        (
            replace(KEPT, note=ended("succeeded", 0)),
            State.ENDED,
            "30 s ago, succeeded, exit status 0; iteration 41 in memory is kept for another 29.5 min",
            "when the job is over on all nodes: ft-plugins end j",
        ),
        (
            replace(KEPT, note=ended("drained", 199, "node n is drained after iteration 41")),
            State.DRAINED,
            "30 s ago, drained, exit status 199: node n is drained after iteration 41; iteration 41 in memory is kept "
            "for another 29.5 min",
            "when the job is over on all nodes: ft-plugins end j",
        ),
        (
            replace(KEPT, note=ended("signalled", 143, "by SIGTERM")),
            State.ENDED,
            "30 s ago, signalled, exit status 143: by SIGTERM; iteration 41 in memory is kept for another 29.5 min",
            AGAIN,
        ),
        (
            replace(GONE, note=ended("signalled", 143, "by SIGTERM")),
            State.ENDED, "30 s ago, signalled, exit status 143: by SIGTERM; nothing is in memory", FROM_THE_BEGINNING,
        ),
        (
            replace(GONE, note=ended("refused", 78, "the seed differs; give the previous one")),
            State.REFUSED, "30 s ago, exit status 78: the seed differs; give the previous one; nothing is in memory",
            f"remove the reason, then {FROM_THE_BEGINNING}",
        ),
        (
            KEPT,
            State.ORPHANED,
            "ft-run is gone and left no reason: killed, perhaps; iteration 41 in memory is kept for another 29.5 min",
            AGAIN,
        ),
        (
            replace(KEPT, note=ended("signalled", 143), went_on="iteration 77 on node b"),
            State.ENDED,
            "30 s ago, signalled, exit status 143; iteration 41 in memory, older than what the job has without this "
            "node (iteration 77 on node b), is kept for another 29.5 min",
            "give the command that the job's log names to take part in it again, perhaps as a spare, or drop it: "
            "ft-plugins end j",
        ),
        (
            replace(KEPT, smp_answers=False, kept_seconds=None),
            State.ORPHANED,
            "ft-run is gone and left no reason: killed, perhaps; iteration 41 in memory is kept until a sweep: the SMP "
            "is gone too",
            "give the same command again to resume from memory, or drop it: ft-plugins sweep --job j --older-than 0",
        ),
        (
            replace(KEPT, holds=False, newest=None, note=None),
            State.ORPHANED, "the launcher is gone and left no reason: killed, perhaps; memory holds no version",
            f"{FROM_THE_BEGINNING}; or ft-plugins end j",
        ),
        (
            replace(GONE, smp_hangs=True),
            State.ORPHANED,
            "ft-run is gone and left no reason: killed, perhaps; the SMP gives no answer, so what memory holds is not "
            "known",
            FROM_THE_BEGINNING,
        ),
        (
            replace(KEPT, holds=False, newest=None, had_others=True, node="n"),
            State.ORPHANED, "ft-run is gone and left no reason: killed, perhaps; memory holds no version",
            "if the job goes on without this node, give the command that its log there names to bring this node "
            "back; else "
            f"{FROM_THE_BEGINNING}; or ft-plugins end j --node n",
        ),
        (
            GONE,
            State.ENDED, "ft-run is gone and left no reason: killed, perhaps; nothing is in memory",
            FROM_THE_BEGINNING,
        ),
    ],
)  # fmt: skip
def test_each_state_says_what_is_known_and_what_to_do(facts, state, headline, remedy):
    found = job_state(facts)
    assert (found.state, found.headline, found.remedy) == (state, headline, remedy)


def test_a_note_is_read_as_it_was_written_and_a_damaged_one_is_none(tmp_path):
    note = FtRunNote(FtRunPhase.ENDED, "by SIGTERM", "signalled", 143, 12.5, "a remedy")
    write_note(tmp_path, note)
    assert read_note(tmp_path) == note
    for content in ("", "[]", '{"phase": "soon"}', (tmp_path / NOTE_FILE).read_text().replace("143", '"143"')):
        (tmp_path / NOTE_FILE).write_text(content)
        assert read_note(tmp_path) is None
    write_note(tmp_path / "absent", note)
    assert read_note(tmp_path / "absent") is None


def test_only_what_ft_run_does_not_mend_by_itself_needs_a_restart_of_the_container():
    mended = {State.STARTING, State.TRAINING, State.WAITING, State.DRAINED, State.HUNG}
    assert {state for state in State if not needs_restart(state, ft_run_alive=True)} == mended
    assert {state for state in State if not needs_restart(state, ft_run_alive=False)} == mended - {State.HUNG}
