"""A rank is held between two iterations, at the version that is exchanged next and nowhere else."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from ft_plugins.snapshot.segment.header import END, Header
from ft_plugins.snapshot.segment.shape import PAGE
from ft_plugins.snapshot.segment.slots import Version
from ft_plugins.systems.reft import reft
from ft_plugins.systems.reft.reft import Reft

WAIT = 120.0
LINEAGE = 2


@pytest.fixture
def header():
    header = Header(np.zeros(PAGE // 8, dtype=np.uint64))
    header.begin(lost=False)
    header.completed = 7
    return header


def held(header, captured=True):
    """A rank between two iterations, in a thread."""
    times = SimpleNamespace(captures=lambda iteration: captured)
    rank = SimpleNamespace(
        _mapped=lambda: SimpleNamespace(header=header), _lineage=LINEAGE, _times=times, _capture=times
    )
    thread = threading.Thread(target=Reft.hold, args=(rank,), daemon=True)
    thread.start()
    return thread


def test_a_rank_whose_node_is_to_leave_waits_at_the_version_that_is_exchanged_until_it_is_released(header):
    header.held = True
    header.await_version(Version(LINEAGE, 7))
    thread = held(header)
    thread.join(0.2)
    assert thread.is_alive()
    header.await_version(Version(LINEAGE, 11))  # that one is committed: the next one is announced
    thread.join(0.2)
    assert thread.is_alive() and header.held_at == 7, "where it waits is known"
    header.held = False
    thread.join(WAIT)
    assert not thread.is_alive() and header.held_at == 0


def test_a_rank_that_waits_goes_on_when_the_whole_job_is_to_end(header):
    header.held = True
    header.await_version(Version(LINEAGE, 7))
    thread = held(header)
    thread.join(0.2)
    assert thread.is_alive()
    header.held = END
    thread.join(WAIT)
    assert not thread.is_alive() and header.held_at == 0


@pytest.mark.parametrize("version", [None, Version(LINEAGE, 6), Version(LINEAGE, 8), Version(1, 7)])
def test_a_rank_goes_on_to_the_version_that_is_exchanged_next(header, version):
    header.held = True
    if version:
        header.await_version(version)
    thread = held(header)
    thread.join(WAIT)
    assert not thread.is_alive() and header.held_at == 0


def test_a_rank_of_a_node_that_stays_waits_nowhere(header):
    header.await_version(Version(LINEAGE, 7))
    assert not header.held
    thread = held(header)
    thread.join(WAIT)
    assert not thread.is_alive()


def test_a_rank_that_nothing_releases_goes_on_by_itself(header, monkeypatch):
    monkeypatch.setattr(reft, "HOLD_SECONDS", 0.05)
    header.held = True
    header.await_version(Version(LINEAGE, 7))
    thread = held(header)
    thread.join(WAIT)
    assert not thread.is_alive() and header.held


def test_the_word_that_holds_a_rank_changes_no_other(header):
    header.agreed, before = 5, header.opened
    header.doubt(3, 4)
    header.held, header.held_at = True, 7
    assert (header.agreed, header.doubted, header.completed, header.opened) == (5, (3, 4), 7, before)
    assert not header.damaged


def test_a_rank_goes_on_if_it_chose_not_to_capture_the_version_that_was_announced(header):
    header.held = True
    header.await_version(Version(LINEAGE, 7))
    thread = held(header, captured=False)
    thread.join(WAIT)
    assert not thread.is_alive()
