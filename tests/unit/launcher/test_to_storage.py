"""What ft-run says about the newest snapshot when it is told to end."""

from __future__ import annotations

from typing import Any

import pytest

from ft_plugins.errors import ProtectionError
from ft_plugins.events import Event, Events
from ft_plugins.launcher.node_launch import _to_storage


class Watcher:
    """One whose SMP answers `outcome`."""

    def __init__(self, outcome: dict[str, Any] | None) -> None:
        self.outcome = outcome
        self.asked: list[tuple[str, bool]] = []

    def checkpoint(self, reason: str, only_due: bool = False) -> dict[str, Any]:
        self.asked.append((reason, only_due))
        if self.outcome is None:
            raise ProtectionError("there is no SMP")
        return self.outcome


@pytest.mark.parametrize(
    ("outcome", "said", "told"),
    [
        ({"state": "done", "iteration": 7, "path": "/ck/v1-7"}, "iteration 7 is in /ck/v1-7", False),
        ({"state": "off"}, "", False),
        ({"state": "nothing"}, "", False),
        ({"state": "failed", "reason": "No space left on device"}, "not in storage: No space left on device", True),
        ({"state": "writing"}, "--reft-checkpoint-seconds", True),
        (None, "not in storage: there is no SMP", True),
    ],
)
def test_what_became_of_the_newest_snapshot_is_one_line_or_nothing(
    outcome: dict[str, Any] | None, said: str, told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[Event] = []
    events = Events("n")
    events.subscribe(found.append)
    watcher = Watcher(outcome)
    _to_storage(watcher, events, "ft-run was told to end")  # type: ignore[arg-type]
    error = capsys.readouterr().err
    assert (said in error and error.count("\n") == 1) if said else error == ""
    assert [event.name for event in found] == (["checkpoint.missed"] if told else [])
    assert watcher.asked == [("ft-run was told to end", False)]


def test_at_the_end_in_order_only_what_is_missing_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    watcher = Watcher({"state": "done", "iteration": 7, "path": "/ck/v1-7"})
    _to_storage(watcher, Events("n"), "the job ends", only_due=True)  # type: ignore[arg-type]
    assert capsys.readouterr().err == "" and watcher.asked == [("the job ends", True)]
