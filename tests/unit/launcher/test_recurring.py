"""A failure that follows every resume, as stories of incarnations: told from one that only comes again."""

import signal

import pytest

from ft_plugins.launcher.agent.restarts import (
    LIVES,
    NEAR,
    HeldVersion,
    Life,
    LostPeers,
    WorkerFailure,
    advice,
    judge,
    recurring,
)

NAN = "RuntimeError: loss is NaN at iteration {}"


def failed(message=NAN, rank=0, exitcode=1):
    return WorkerFailure(rank, rank, 100, exitcode, message, 1.0)


def killed(rank=0):
    return failed("Signal 9 (SIGKILL) received by PID 77", rank, -signal.SIGKILL)


def nan(resumed, completed, rank=0):
    return Life(failed(NAN.format(completed + 1), rank), resumed, completed)


POISONED = [nan(4, 6), nan(6, 8), nan(8, 10)]


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        (POISONED, (4, 6, 8)),
        ([nan(0, 4), *POISONED], (4, 6, 8)),
        ([nan(4, 7, rank=1), nan(6, 9, rank=0), nan(9, 11, rank=3)], (4, 6, 9)),  # other ranks, within one iteration
        ([nan(4, 12), nan(7, 12), nan(11, 12)], (4, 7, 11)),  # at one iteration: its data, say
        ([Life(failed("AcceleratorError: CUDA error: device-side assert triggered"), *at)
          for at in ((4, 6), (6, 8), (8, 10))], (4, 6, 8)),
        ([Life(failed("", exitcode=16), *at) for at in ((4, 6), (5, 6), (5, 6))], (4, 5, 5)),  # a status without words
        ([Life(killed(2), at, at + 2) for at in (4, 6, 8)], (4, 6, 8)),  # one rank, the same distance
        ([Life(killed(), 4, 90), *POISONED], (4, 6, 8)),
        ([nan(0, 9), nan(0, 9), nan(0, 9)], (0, 0, 0)),  # nothing was restored: the data lead to it, or the script
    ],
    ids=["poisoned", "with the first life", "any rank", "one iteration", "assert on a device", "exit status", "signal",
         "after another failure", "from the beginning"],
)  # fmt: skip
def test_the_same_failure_shortly_after_each_resume_is_recurring(history, expected):
    found = recurring(history)
    assert tuple(life.resumed for life in found) == expected and list(found) == history[-LIVES:]


@pytest.mark.parametrize(
    "history",
    [
        [],
        POISONED[:2],
        [nan(0, 4), *POISONED[:2]],  # the first life restored nothing
        [*POISONED[:2], nan(8, 8 + NEAR + 1)],  # it went far
        [*POISONED[:2], Life(failed("OSError: no space left"), 8, 10)],
        [*POISONED[:2], Life(failed(NAN, exitcode=2), 8, 10)],
        [*POISONED[:2], Life(LostPeers(("node b",)), 8, 10)],
        [Life(LostPeers(("node b",)), at, at + 2) for at in (4, 6, 8)],
        [Life(killed(), 4, 6), Life(killed(), 6, 9), Life(killed(), 9, 11)],  # from outside, whenever it comes
        [Life(killed(rank), at, at + 2) for rank, at in enumerate((4, 6, 8))],  # other ranks
        [Life(killed(), at, at + 400) for at in (4, 404, 804)],
        [Life(failed(f"RuntimeError: [pair.cc:525] Connection closed by peer [10.0.0.{at}]:99"), at, at + 2)
         for at in (4, 6, 8)],
        [Life(failed("torch.distributed.DistBackendError: NCCL error"), at, at + 2) for at in (4, 6, 8)],
        [Life(failed(), None, 0)] * 3,  # it ended before it had resumed: bounded by restores of one version
    ],
    ids=["nothing", "twice", "first life", "far", "other error", "other status", "lost node at last", "lost nodes",
         "kills at other distances", "kills of other ranks", "kills far away", "lost peers", "lost by NCCL",
         "no resume"],
)  # fmt: skip
def test_anything_else_is_not(history):
    assert not recurring(history)


def test_a_life_that_began_from_the_beginning_has_gone_as_far_as_it_has_completed():
    assert [Life(killed(), resumed, 4).after for resumed in (None, 0, 3)] == [4, 4, 1]


LOADER = "OSError: Caught OSError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"


@pytest.mark.parametrize(
    "message",
    [
        "OSError: [Errno 116] Stale file handle: '/data/shard-3.bin'",
        LOADER + "OSError: [Errno 5] Input/output error: '/data/shard-3.bin'",
        "OSError: [Errno 28] No space left on device",
        "RuntimeError: unable to write to file </torch_8>: No space left on device (28)",
        "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be",
        "RuntimeError: No CUDA-capable device is detected",
        LOADER + "ConnectionResetError: [Errno 104] Connection reset by peer",
    ],
)
def test_an_outage_that_three_quick_restarts_do_not_outlast_is_not_recurring(message):
    assert recurring([Life(failed(message), at, at + 2) for at in (4, 6, 8)]) == ()


@pytest.mark.parametrize(
    "lives", [((4, 6), (6, 6), (6, 16)), ((4, 7), (7, 8), (8, 17)), ((10, 12), (12, 12), (12, 14))], ids=str
)
def test_failures_after_various_numbers_of_iterations_come_by_chance(lives):
    assert recurring([nan(*at) for at in lives]) == ()


def test_versions_that_grow_are_progress_to_the_count_of_restores_which_is_why_lives_are_compared():
    assert judge([nan(4, 6)], [4, 6, 8, 10], None).restart


@pytest.mark.parametrize("begin", [9, 0], ids=["resumed", "from the beginning"])
def test_an_error_at_one_iteration_of_each_start_is_recurring_also_where_no_newer_version_came(begin):
    lives, versions = [nan(0, 9)], [begin or None]
    while (verdict := judge(lives, versions, None, lambda: [HeldVersion(8, "memory")])).restart:
        lives, versions = [*lives, nan(begin, 9)], [*versions, begin or None]
    assert (verdict.status, [life.resumed for life in verdict.recurring]) == ("recurring", [begin] * LIVES)
    how = f"before:{begin}, which restores iteration 8" if begin else "remove the cause and give the same command again"
    assert how in verdict.reason


def test_various_errors_after_one_version_are_bounded_by_its_restores():
    lives = [Life(failed(f"RuntimeError: {word}"), 9, 9) for word in ("one", "two", "three", "four")]
    assert [judge(lives[: n + 1], [9] * (n + 1), None).status for n in range(4)] == ["failed"] * 3 + ["stuck"]


def test_the_advice_names_failure_resumes_and_the_newest_version_older_than_all_of_them():
    said = advice(POISONED, [HeldVersion(10, "memory"), HeldVersion(2, "storage"), HeldVersion(3, "storage")])
    for part in (
        "rank 0 exited with status 1: RuntimeError: loss is NaN",
        "3 incarnations in a row",
        "resumed at 4, failed after 6, resumed at 6",
        "--ftp-resume before:4, which restores iteration 3 from storage",
    ):
        assert part in said
    assert "\n" not in said


def test_a_certified_version_is_advised_before_a_newer_one_that_is_not():
    held = [HeldVersion(3, "storage"), HeldVersion(2, "storage", certified=True), HeldVersion(10, "memory", True)]
    assert "--ftp-resume before:3, which restores certified iteration 2 from storage" in advice(POISONED, held)


def test_where_nothing_older_is_left_the_advice_lists_what_is_there():
    said = advice(POISONED, [HeldVersion(10, "memory"), HeldVersion(4, "storage")])
    assert "no version older than iteration 4" in said and "10 in memory; 4 in storage" in said
    assert "--ftp-resume fresh" in said and "left: none" in advice(POISONED, [])
