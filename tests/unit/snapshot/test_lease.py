"""The lease on a folder of checkpoints: what a start does about it, what it is to a run that trains, and its file."""

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from ft_plugins.snapshot.checkpoint import lease
from ft_plugins.snapshot.checkpoint.lease import HOLD_SECONDS, Claim, Lease, at_start, in_training

A, B = "a" * 32, "b" * 32
HELD = Lease(5, A, ("x", "y"), False, ("there",), 1.8e9, 1.8e9 + 60)
UNOPENED = replace(HELD, renewed=HELD.taken)
RENEWED = replace(HELD, renewed=1.8e9 + 65)
UNREADABLE = Lease(5, "")
TAKE, KEEP, WAIT, REFUSE = Claim
LONG = HOLD_SECONDS


@pytest.mark.parametrize(
    ("memory", "first", "now", "unchanged", "gone", "expected"),
    [
        ((A, 5), None, None, 0.0, False, TAKE),  # no run has used the folder
        ((A, 5), HELD, HELD, 0.0, False, TAKE),  # its own
        ((A, 7), HELD, RENEWED, 1.0, False, TAKE),  # its SMP renews it
        ((A, 4), HELD, HELD, 0.0, False, WAIT),  # the run has gone on elsewhere since
        ((A, 4), HELD, RENEWED, 1.0, False, REFUSE),
        ((B, 9), HELD, HELD, 1.0, False, WAIT),  # another run, however many lineages it has
        ((B, 9), HELD, RENEWED, 1.0, False, REFUSE),
        (("", 0), HELD, HELD, LONG - 1, False, WAIT),  # memory is gone, or this is the first start
        (("", 0), HELD, RENEWED, LONG - 1, False, REFUSE),
        (("", 0), HELD, replace(HELD, lineage=6), 1.0, False, REFUSE),  # another start was faster
        (("", 0), HELD, HELD, LONG, False, TAKE),
        (("", 9), HELD, HELD, 1.0, False, WAIT),  # a spare remembers a lineage, but holds nothing
        (("", 0), HELD, replace(HELD, released=True), 0.0, False, TAKE),
        (("", 0), HELD, HELD, 0.0, True, WAIT),  # that process is dead, but the run has other nodes
        (("", 0), replace(HELD, alone=True), replace(HELD, alone=True), 0.0, True, TAKE),
        (("", 0), replace(HELD, alone=True), replace(RENEWED, alone=True), 0.0, True, REFUSE),
        ((A, 4), UNOPENED, UNOPENED, 0.0, True, TAKE),  # its own start was killed before it opened lineage 5
        ((A, 4), UNOPENED, UNOPENED, 0.0, False, WAIT),  # or lives
        ((A, 4), HELD, HELD, 0.0, True, WAIT),  # it was opened, on other nodes as well
        ((B, 4), UNOPENED, UNOPENED, 0.0, True, WAIT),
        ((A, 5), UNREADABLE, UNREADABLE, 1.0, False, WAIT),
        (("", 9), UNREADABLE, UNREADABLE, 1.0, False, WAIT),
        ((A, 5), UNREADABLE, HELD, 1.0, False, TAKE),
        (("", 0), UNREADABLE, UNREADABLE, LONG, False, TAKE),
        (("", 0), HELD, None, 1.0, False, TAKE),  # the folder was cleared
    ],
)
def test_a_start_takes_what_is_its_own_or_does_not_change_and_refuses_what_does(
    memory, first, now, unchanged, gone, expected
):
    assert at_start(*memory, first, now, unchanged, gone) is expected


@pytest.mark.parametrize(
    ("mine", "opened", "now", "expected"),
    [
        ((A, 5), True, HELD, KEEP),
        ((A, 5), True, UNREADABLE, KEEP),
        ((A, 5), True, None, TAKE),  # the folder was cleared, or could not be reached at the start
        ((A, 6), True, HELD, TAKE),
        ((A, 6), True, replace(HELD, run=B), WAIT),  # that run may have ended, but not in order
        ((A, 6), True, replace(HELD, run=B, released=True), TAKE),
        ((A, 5), True, replace(HELD, run=B), REFUSE),
        ((A, 4), True, HELD, REFUSE),  # it was taken over, with its identity
        ((A, 4), True, replace(HELD, run=B), REFUSE),
        ((A, 4), False, HELD, WAIT),  # a start has taken the next lineage, and not opened it yet
    ],
)
def test_a_run_that_trains_keeps_its_lease_until_another_one_has_taken_a_later_lineage(mine, opened, now, expected):
    assert in_training(*mine, opened, now, now, 0.0) is expected


def test_while_training_the_lease_of_another_run_is_taken_if_it_does_not_change():
    other = replace(HELD, run=B)
    assert in_training(A, 6, True, other, other, LONG) is TAKE
    assert in_training(A, 6, True, other, replace(RENEWED, run=B), 0.0) is REFUSE
    for lineage in (4, 5):  # a later one, or the same, is of a run that took it while this one was trained
        assert in_training(A, lineage, True, other, other, LONG) is REFUSE


def test_a_lineage_is_taken_once_and_the_leases_before_it_are_removed(tmp_path):
    assert lease.newest(tmp_path) is None and lease.newest(tmp_path / "absent") is None
    lease.take(tmp_path, HELD, None)
    assert lease.newest(tmp_path) == HELD
    with pytest.raises(FileExistsError):
        lease.take(tmp_path, replace(HELD, run=B), HELD)
    assert lease.newest(tmp_path) == HELD
    lease.take(tmp_path, replace(HELD, lineage=6), HELD)
    assert os.listdir(tmp_path) == ["lease-6.json"]
    with pytest.raises(FileExistsError, match="a later lineage"):
        lease.take(tmp_path, replace(HELD, run=B), None)
    assert lease.newest(tmp_path) == replace(HELD, lineage=6), "what was late changes nothing"
    assert stat.S_IMODE((tmp_path / "lease-6.json").stat().st_mode) == 0o600


def test_a_lease_that_is_renewed_differs_and_one_that_is_damaged_is_of_nobody(tmp_path):
    lease.take(tmp_path, HELD, None)
    lease.renew(tmp_path, RENEWED)
    assert lease.newest(tmp_path) == RENEWED and os.listdir(tmp_path) == ["lease-5.json"]
    for content in (b"", b"{}", b'{"lineage": 5, "digest": "0"}', b"\xff" * 100):
        (tmp_path / "lease-5.json").write_bytes(content)
        assert lease.newest(tmp_path) == UNREADABLE
    (tmp_path / "lease-5.json").write_text((tmp_path / "lease-5.json").read_text(errors="replace") * 20000)
    assert lease.newest(tmp_path) == UNREADABLE


def test_a_lease_that_is_not_listed_yet_is_found_by_its_name(tmp_path, monkeypatch):
    lease.take(tmp_path, HELD, None)
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))
    assert lease.newest(tmp_path) is None and lease.newest(tmp_path, 5) == HELD


def test_people_are_told_whose_it_is_and_since_when():
    assert str(HELD).startswith("run aaaaaaaa on x, y, since 2027-01-1")
    assert "last renewed at 2027-01-1" in str(HELD) and "ended in order at" in str(replace(HELD, released=True))
    assert str(UNREADABLE).startswith("run unknown on unknown nodes")
