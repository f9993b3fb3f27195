"""Signs that a rank which completes nothing works all the same, of real processes."""

import pytest

from ft_plugins.model.progress import WorkPhase
from ft_plugins.smp.watch import hang_watch, liveness
from ft_plugins.smp.watch.hang_watch import SignsOfWork
from ft_plugins.snapshot.segment.progress_words import RankProgress
from harness.job_control import wait_until

LISTENS = "from pathlib import Path; from ft_plugins.smp.watch import stacks; stacks.listen(Path({folder!r}), 0)\n"
READY = "print(flush=True)\n"
SLEEPS = READY + "import time; time.sleep(600)\n"
SPINS = READY + "while True: pass\n"
MOVES = READY + "def one():\n  sum(range(10**5))\ndef other():\n  sum(range(10**5))\nwhile True: one(); other()\n"
CHILD_SPINS = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'while True: pass'])\n" + SLEEPS
BOUND = 60.0


@pytest.fixture
def start(tmp_path, monkeypatch, run_python):
    monkeypatch.setattr(hang_watch, "LOOK_SECONDS", 0.2)
    return lambda what: run_python(LISTENS.format(folder=str(tmp_path)) + what)


def rank(phase):
    return RankProgress(0, 7, 3, phase, 0.0, 0.0, 6, None, 0, 1, 1, False)


def looks(tmp_path, process, phase):
    """A look, and whether the rank has been seen at work."""
    signs = SignsOfWork(tmp_path)

    def look():
        signs.look([rank(phase)], {0: process})
        return 0 in signs.worked

    return look


@pytest.mark.parametrize("what", [SPINS, CHILD_SPINS], ids=["spins", "its-child-spins"])
def test_a_rank_that_works_alone_is_seen_by_the_processors_of_all_its_processes(start, tmp_path, what):
    wait_until(looks(tmp_path, start(what), WorkPhase.DATA), BOUND, lambda: "not seen")


def test_in_a_collective_only_a_rank_whose_stack_moves_is_at_work(start, tmp_path):
    wait_until(looks(tmp_path, start(MOVES), WorkPhase.AFTER_FORWARD), BOUND, lambda: "not seen")


@pytest.mark.parametrize(
    ("what", "phase"),
    [(SLEEPS, WorkPhase.FORWARD), (SLEEPS, WorkPhase.AFTER_FORWARD), (SPINS, WorkPhase.AFTER_FORWARD)],
)
def test_a_rank_that_sleeps_and_one_that_polls_in_a_collective_are_not(start, tmp_path, what, phase):
    process, looked = start(what), 0

    def used():
        return liveness.use_of_trees({0: process[0]})[0][0]

    if what is SPINS:  # it is past the line that printed
        began = used()
        wait_until(lambda: used() > began + 0.2, BOUND, lambda: f"{used() - began} s of a processor")
    signs = SignsOfWork(tmp_path)
    while looked < 4:
        before = signs._looked
        signs.look([rank(phase)], {0: process})
        looked += signs._looked != before
    assert signs.worked == {} and liveness.started(process[0]) == process[1]


def test_a_process_that_has_ended_shows_no_work(tmp_path):
    signs = SignsOfWork(tmp_path)
    signs.look([rank(WorkPhase.FORWARD)], {0: (2**22 + 1, 1)})
    assert signs.worked == {}
