"""Whatever number of connections is rejected, it is one event a minute, of bounded size."""

from __future__ import annotations

import time

import pytest

from ft_plugins.events import Event, Events
from ft_plugins.smp.rejected import EVERY_SECONDS, Rejected


def counted(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Event], Rejected, list[float]]:
    """What was emitted, the counter, and the time it goes by."""
    seen: list[Event] = []
    events = Events("n")
    events.subscribe(seen.append)
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return seen, Rejected(events), now


def test_the_first_is_reported_at_once_and_those_after_it_together_a_minute_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_an_event_is_small_whatever_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
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
