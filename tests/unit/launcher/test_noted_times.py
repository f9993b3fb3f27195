"""Times in global variables of modules, as a process that has waited hands them on."""

from __future__ import annotations

import time
from types import ModuleType

import pytest

from ft_plugins.launcher.preload import noted_times
from ft_plugins.launcher.preload.noted_times import ImportTimes


def test_a_time_of_the_imports_is_moved_and_any_other_number_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noted_times, "_YOUNG", 0.0)
    module, before = ModuleType("module"), time.time()
    time.sleep(0.01)
    times = ImportTimes()
    noted = {"STARTED": time.time(), "TICK": time.monotonic(), "SECOND": int(time.time()), "EXACT": time.time_ns()}
    others = {"BEFORE": before, "WHOLE": float(int(time.monotonic())), "RATE": 0.1, "YES": True, "SIZE": 1 << 20}
    vars(module).update(noted, **others, CHANGED=time.time())
    found = times.found([module, None, others])
    vars(module)["CHANGED"] = 5.0
    for each in found:
        each.move(100.0)
    after = {name: vars(module)[name] for name in (*noted, *others)}
    assert {name: after[name] - value for name, value in noted.items()} == {
        "STARTED": pytest.approx(100.0), "TICK": pytest.approx(100.0), "SECOND": 100, "EXACT": 100 * 10**9,
    }  # fmt: skip
    assert all(after[name] is value for name, value in others.items())
    assert vars(module)["CHANGED"] == 5.0
