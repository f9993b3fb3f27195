"""The restart policy, as stories of failures."""

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.errors import EXIT_REFUSED
from ft_plugins.launcher.agent.restarts import (
    RESTORES_OF_ONE_VERSION,
    Life,
    LostPeers,
    Verdict,
    WorkerFailure,
    judge,
    restores_so_far,
    root_cause,
)
from ft_plugins.smp.watch.hang import HANG


def failure(rank, exitcode=1, message="RuntimeError: boom", time=10.0):
    return WorkerFailure(rank=rank, local_rank=rank, pid=100 + rank, exitcode=exitcode, message=message, time=time)


def judged(
    cause,
    versions,
    remaining=None,
    before=None,
):
    """The verdict on `cause`; with `before`, the failure before it, neither came after an iteration of the job."""
    earlier = [] if before is None else [Life(before, first=True)]
    return judge([*earlier, Life(cause, first=before is not None)], versions, remaining)


def decisions(versions):
    """Whether the job is restarted, at each failure of a story."""
    return [judged(failure(0), versions[: n + 1]).restart for n in range(len(versions))]


def test_the_line_at_a_failure_says_who_failed_where_and_what_comes_now():
    assert failure(3, -9, "").line("b") == "rank 3 (pid 103, node b) was ended by SIGKILL"
    assert failure(3, 1, "x" * 5000).line("b").startswith("rank 3 (pid 103, node b) exited with status 1: xx")
    assert len(failure(3, 1, "x" * 5000).line("b")) < 400
    assert (failure(3, 0).signal, failure(3, -15).signal) == ("", "SIGTERM")
    assert failure(3, 0, "").line() == "rank 3 exited with status 0", "too early, while others train"
    assert LostPeers(("node b", "node c")).line() == "node b, node c stopped responding"
    assert LostPeers((f"{HANG}rank 1 of node b",)).line() == "hang of rank 1 of node b"
    refused = "RuntimeError: Gloo connectFullMesh failed: Connection refused, remote=[127.0.1.1]:31424"
    assert "set GLOO_SOCKET_IFNAME" in failure(3, 1, refused).line()
    assert "GLOO" not in failure(3, 1, refused.replace("127.0.1.1", "10.0.0.1")).line()
    kinds = (
        "[enforce fail at third_party/gloo/gloo/transport/tcp/device.cc:285] ss1.ss_family == ss2.ss_family. 2 vs 10"
    )
    assert "gloo has an IPv4 address of this node and an IPv6 one of another" in failure(3, 1, kinds).line("b")
    assert "an IPv6 address of this node and an IPv4" in failure(3, 1, kinds.replace("2 vs 10", "10 vs 2")).line("b")
    ended = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5534"
    assert "GLOO" not in failure(3, 1, ended).line(), "it was there: a rank has ended"
    restart = Verdict(True, "failed", "")
    assert "resume from memory (iteration 410 is" in restart.what_comes(410, None)
    assert "nothing in memory" in restart.what_comes(None, None)
    assert restart.what_comes(None, 2) == "all workers restart (2 restarts are left)"
    assert Verdict(False, "stuck", "why").what_comes(410, None) == "the job stops"


def test_a_rank_that_left_with_status_0_was_not_killed():
    first = failure(1, 1, time=1.0)
    assert root_cause([failure(0, 0, time=2.0), first]) is first


def test_a_first_version_is_progress_from_the_beginning():
    assert restores_so_far([None, 1]) == 0 and restores_so_far([None, 0]) == 1


def test_of_all_versions_the_last_one_is_named():
    assert "iteration 7 was restored 3 times" in judged(failure(0), [7, 7, 7, 5, 7], None).reason


def test_a_job_that_gets_further_is_restarted_for_ever():
    assert decisions([None, *range(1, 200)]) == [True] * 200


def test_three_restores_of_one_version_stop_the_job():
    assert decisions([7, 7, 7, 7, 7]) == [True, True, True, False, False]
    assert decisions([5, 7, 7, 7, 7]) == [True, True, True, True, False]


def test_before_the_first_version_the_beginning_counts_as_one():
    assert decisions([None] * 4) == [True, True, True, False]


def test_a_newer_version_forgives_the_restores_before_it():
    assert decisions([7, 7, 7, 8, 8, 8, 8]) == [True] * 6 + [False]


def test_memory_that_is_lost_again_and_again_is_no_progress():
    assert decisions([100, None, 5, None, 5, None, 5, None]) == [True] * 7 + [False]


def test_after_memory_was_lost_once_each_new_version_on_the_way_up_is_progress():
    assert all(decisions([100, None, 30, 60, 90, 101]))


@given(st.lists(st.one_of(st.none(), st.integers(1, 5)), min_size=1, max_size=60))
def test_no_version_is_restored_more_than_three_times_since_the_newest_was_seen(versions):
    for n in range(len(versions)):
        if not judged(failure(0), versions[: n + 1], None).restart:
            assert restores_so_far(versions[: n + 1]) == RESTORES_OF_ONE_VERSION
            return
    newest = [version or 0 for version in versions]
    assert max(newest[newest.index(max(newest)) :].count(version) for version in newest) <= RESTORES_OF_ONE_VERSION


def test_the_reason_for_stopping_names_rank_error_version_and_remedy():
    assert "the beginning was tried again 3 times" in judged(failure(0), [5, None] * 4, None).reason, "memory was lost"
    verdict = judged(failure(3, -signal.SIGSEGV, "Signal 11 (SIGSEGV) received by PID 5"), [7] * 4, None)
    assert (verdict.restart, verdict.status) == (False, "stuck")
    for part in ("rank 3", "SIGSEGV", "iteration 7", "3 times", "--max-restarts"):
        assert part in verdict.reason
    assert "beginning" in judged(failure(0), [None] * 4, None).reason


MISSING = failure(0, 1, "FileNotFoundError: data.bin")


@pytest.mark.parametrize(
    "second",
    [
        MISSING,
        failure(3, 1, "FileNotFoundError: data.bin"),
        failure(0, 1, "FileNotFoundError: data.bin\nTraceback of another process 4711"),
    ],
    ids=["the same rank", "another rank", "another traceback"],
)
def test_the_same_error_twice_before_the_first_iteration_ends_the_job_and_is_named(second):
    assert judged(MISSING, [None], None).restart
    verdict = judged(second, [None, None], None, before=MISSING)
    assert (verdict.restart, verdict.status) == (False, "stuck")
    for part in ("twice in the same way before the first iteration", "FileNotFoundError: data.bin", "same command"):
        assert part in verdict.reason


def test_a_start_whose_ranks_are_idle_ends_no_job():
    hang = LostPeers((f"{HANG}the start on node a",))
    assert judge([Life(hang)], [7], None).restart
    assert judge([Life(hang), Life(hang)], [7, 7, 7, 7], None).restart, "they may wait for something outside"
    assert not judge([Life(hang, 7, 7)], [7, 7, 7, 7], None).restart, "that is a hang in an iteration"


def test_ranks_ports_and_process_ids_in_an_error_make_no_other_error_of_it():
    first = failure(0, 1, "ValueError: rank 0: port 29500, pid 77")
    second = failure(5, 1, "ValueError: rank 5: port 41, pid 8")
    assert not judged(second, [None, None], None, before=first).restart


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (MISSING, failure(0, 1, "ConnectionError: refused")),
        (MISSING, failure(0, 2, MISSING.message)),
        (failure(0, -signal.SIGKILL, ""), failure(0, -signal.SIGKILL, "")),  # from outside, as often as not
        (None, MISSING),
        (MISSING, LostPeers(("node b",))),
    ],
)
def test_another_error_before_the_first_iteration_is_tried_as_often_as_any_version(first, second):
    assert judged(second, [None, None], None, before=first).restart
    assert not judged(second, [None] * 4, None, before=first).restart


def test_an_explicit_count_is_torchs():
    assert judged(failure(0), [], 2).restart
    assert judged(failure(0), [], 2, before=failure(0)).restart
    verdict = judged(failure(1), [], 0)
    assert (verdict.restart, verdict.status) == (False, "failed")
    assert verdict.reason == "rank 1 exited with status 1: RuntimeError: boom"


def test_what_no_restart_can_cure_is_never_restarted():
    refusal = failure(2, EXIT_REFUSED, "ft_plugins: rank 2: no such key")
    for remaining in (None, 0, 5):
        verdict = judged(refusal, [1], remaining)
        assert (verdict.restart, verdict.status, verdict.reason) == (
            False,
            "refused",
            "ft_plugins: rank 2: no such key",
        )


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        ([failure(0, 1, time=5.0), failure(1, -signal.SIGKILL, time=9.0)], 1),  # 0 lost its peer
        ([failure(0, -signal.SIGABRT, time=9.0), failure(1, 1, time=5.0)], 1),  # a watchdog that saw it
        ([failure(0, -signal.SIGKILL), failure(1, EXIT_REFUSED, time=99.0)], 1),
        ([failure(0, 1, time=6.0), failure(1, 1, time=5.0)], 1),
        ([failure(0, 1), failure(1, 1)], 0),
    ],
)
def test_the_cause_is_told_from_what_followed(failures, cause):
    assert root_cause(failures).rank == cause
