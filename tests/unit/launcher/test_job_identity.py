"""Names of jobs and nodes, and one ft-run per job and node."""

import os
import re
import signal
from multiprocessing import get_context

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.config.blocks import NAME_PATTERN
from ft_plugins.errors import BusyError
from ft_plugins.launcher.job_identity import NAME_LIMIT, JobLock, job_name, safe_name

COMMAND = ("none", 1000, "/home/a", "train/pretrain_gpt.py", ["--lr", "1"])


def test_a_given_name_wins_over_an_explicit_rendezvous_id_and_that_over_the_command():
    assert job_name("mine", "run7", *COMMAND[1:]) == "mine"
    assert job_name(None, "run7", *COMMAND[1:]) == "run7"
    assert re.fullmatch(r"pretrain_gpt-[0-9a-f]{10}", job_name(None, *COMMAND))


def test_the_same_command_is_the_same_job_and_any_difference_is_another():
    rendezvous, uid, folder, script, arguments = COMMAND
    same = job_name(None, *COMMAND)
    others = {
        job_name(None, rendezvous, 1001, folder, script, arguments),
        job_name(None, rendezvous, uid, "/home/b", script, arguments),
        job_name(None, rendezvous, uid, folder, "pretrain_gpt.py", arguments),
        job_name(None, rendezvous, uid, folder, script, ["--lr", "2"]),
        job_name(None, rendezvous, uid, folder, script, ["--lr 1"]),
    }
    assert job_name(None, "", uid, folder, script, arguments) == same  # torchrun's '' and 'none' are no names
    assert len(others | {same}) == 6


@given(st.text(max_size=80))
def test_every_text_becomes_a_name_that_the_configuration_accepts(text):
    name = safe_name(text)
    assert re.match(NAME_PATTERN, name) and len(name) <= NAME_LIMIT and re.fullmatch(r"[A-Za-z0-9_-]+", name)
    assert safe_name(name) == name
    script = job_name(None, "none", 0, "/", text, [])
    assert re.match(NAME_PATTERN, script) and len(script) <= NAME_LIMIT


@given(st.text(max_size=60), st.text(max_size=60))
def test_two_texts_never_share_a_name(one, other):
    assert (safe_name(one) == safe_name(other)) == (one == other)


def test_names_that_only_differ_in_characters_left_out_stay_apart():
    assert len({safe_name(text) for text in ("a.b", "a-b", "a b", "a/b")}) == 4


# ---- the lock ----

fork = get_context("fork")


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "job" / "node"
    folder.mkdir(parents=True)
    return folder


def own(run_dir, ready, forks):
    """An owner that lives until it is killed; with `forks`, a child of it has a copy of the lock and lets go of it."""
    ownership = JobLock(run_dir)
    if forks and os.fork() == 0:
        ownership.close()
        os.setpgid(0, 0)
        ready.send(os.getpid())
        signal.pause()
    if not forks:
        ready.send(os.getpid())
    signal.pause()


@pytest.fixture
def owner(run_dir, request):
    ours, theirs = fork.Pipe()
    process = fork.Process(target=own, args=(run_dir, theirs, getattr(request, "param", False)))
    process.start()
    assert ours.poll(20)
    ready = ours.recv()
    yield process.pid or 0
    process.kill()
    if ready != process.pid:
        os.kill(ready, signal.SIGKILL)
    process.join(300)


def test_a_second_one_is_refused_and_told_who_owns_the_job_and_what_to_do(run_dir, owner):
    with pytest.raises(BusyError, match=rf"job job .*node node .*pid {owner}.*--ftp-job"):
        JobLock(run_dir)


@pytest.mark.parametrize("owner", [False, True], indirect=True, ids=["alone", "with a forked worker that lives on"])
def test_the_lock_of_a_killed_owner_is_free(run_dir, owner):
    os.kill(owner, signal.SIGKILL)
    with JobLock(run_dir):
        assert (run_dir / "lock").read_text() == str(os.getpid())


def test_it_is_given_up_at_the_end_of_the_block(run_dir):
    with JobLock(run_dir) as first:
        first.close()
        first.close()
        with JobLock(run_dir):
            pass
