"""A server keeps descriptors for itself, and reports rejected connections in one bounded event a minute."""

import resource
import time

import pytest

from ft_plugins.events import Events
from ft_plugins.transport import door
from ft_plugins.transport.door import EVERY_SECONDS, RejectedConnections


@pytest.fixture
def limits():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_is_raised_and_never_lowered(limits):
    _, hard = limits
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    raised = door.raise_limit()
    assert raised == resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, door.ENOUGH)
    if hard > door.ENOUGH:
        resource.setrlimit(resource.RLIMIT_NOFILE, (door.ENOUGH + 1, hard))
        assert door.raise_limit() == door.ENOUGH + 1
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] == hard, "the hard limit stays"


@pytest.mark.parametrize("soft, wanted, expected", [(1024, 4096, 768), (1024, 64, 64), (200, 4096, 100)])
def test_connections_leave_a_reserve(limits, soft, wanted, expected):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))
    assert door.places(wanted) == expected


def test_a_limit_that_cannot_be_raised_is_no_error(monkeypatch):
    def refuse(what, limits):
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda what: (512, 4096))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert door.raise_limit() == 512


def counted(monkeypatch):
    """What was emitted, the counter, and the time it goes by."""
    seen = []
    events = Events("n")
    events.subscribe(seen.append)
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return seen, RejectedConnections(events), now


def test_the_first_is_reported_at_once_and_those_after_it_together_a_minute_later(monkeypatch):
    seen, rejected, now = counted(monkeypatch)
    rejected.count("10.0.0.1", "no secret")
    assert [event.fields["count"] for event in seen] == [1] and rejected.due is None
    for number in range(100_000):
        rejected.count(f"10.0.0.{number % 2}", "silent" if number % 4 else "no secret")
    assert len(seen) == 1 and rejected.due == 1000 + EVERY_SECONDS
    now[0] += EVERY_SECONDS - 0.1
    rejected.report()
    assert len(seen) == 1
    now[0] += 0.1
    rejected.report()
    assert len(seen) == 2 and seen[1].name == "peer.rejected"
    assert seen[1].fields == {
        "count": 100_000,
        "reasons": {"silent": 75_000, "no secret": 25_000},
        "addresses": {"10.0.0.0": 50_000, "10.0.0.1": 50_000},
    }
    now[0] += 1000
    rejected.report()
    assert len(seen) == 2 and rejected.due is None, "nothing happened"


def test_an_event_is_small_whatever_is_counted(monkeypatch):
    seen, rejected, now = counted(monkeypatch)
    rejected.count("first", "first")
    for number in range(1000):
        rejected.count(f"10.0.0.{number}", f"{number} \x1b[2J" + "x" * 100_000)
    now[0] += EVERY_SECONDS
    rejected.report()
    assert len(seen[1].line()) < 4000 and seen[1].fields["count"] == 1000
    for counts in (seen[1].fields["reasons"], seen[1].fields["addresses"]):
        assert len(counts) == 9 and counts["others"] == 992
    assert "\x1b" not in str(seen[1].fields)
