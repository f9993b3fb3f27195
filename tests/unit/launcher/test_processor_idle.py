"""Idle cores, as far as ranks may use them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_plugins.launcher.preload import processor_idle
from ft_plugins.launcher.preload.processor_idle import IdleProcessors


def written(folder: Path, busy: tuple[int, int], idle: tuple[int, int], used: float = 0.0) -> None:
    counters = enumerate(zip(busy, idle, strict=True))
    rows = [f"cpu{number} {one} 0 0 {other} 0 0 0 0 0 0" for number, (one, other) in counters]
    (folder / "stat").write_text("\n".join(["cpu 0 0 0 0 0 0 0 0 0 0", *rows, "intr 1"]))
    (folder / "groups/job").mkdir(parents=True, exist_ok=True)
    (folder / "groups/job/cpu.max").write_text("150000 100000")
    (folder / "groups/job/cpu.stat").write_text(f"usage_usec {int(used * 1e6)}\nnr_periods 1")


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(processor_idle, "_STAT", tmp_path / "stat")
    monkeypatch.setattr(processor_idle, "_CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(processor_idle, "_OWN_CGROUPS", tmp_path / "none")
    monkeypatch.setattr(processor_idle, "_allowed", lambda: {0, 1})
    (tmp_path / "own").write_text("0::/job\n")
    return tmp_path


def test_processors_that_ranks_may_not_use_do_not_count(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = IdleProcessors()
    written(node, (0, 0), (0, 0))
    looked.begin()
    written(node, (100, 0), (0, 100))
    assert looked.cores(0.0) == pytest.approx(1.0)
    monkeypatch.setattr(processor_idle, "_allowed", lambda: {0})  # as taskset or a control group binds ft-run
    looked.begin()
    written(node, (200, 0), (0, 200))
    assert looked.cores(0.0) == 0.0
    looked.begin()
    written(node, (300, 0), (0, 300))
    assert looked.cores(0.5) == pytest.approx(0.5)  # its own seconds count as idle


def test_idle_processors_beyond_the_share_of_the_control_group_do_not_count(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [10.0]
    monkeypatch.setattr(processor_idle, "_OWN_CGROUPS", node / "own")
    monkeypatch.setattr(processor_idle.time, "monotonic", lambda: clock[0])
    looked = IdleProcessors()
    written(node, (0, 0), (0, 0))
    looked.begin()
    clock[0] += 1.0
    written(node, (0, 0), (100, 100), used=1.2)
    assert looked.cores(0.0) == pytest.approx(0.3)
    clock[0] += 1.0
    written(node, (0, 0), (200, 200), used=2.7)
    assert looked.cores(0.4) == pytest.approx(0.4)
