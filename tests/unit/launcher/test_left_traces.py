"""What a killed rank leaves: the kernel's count, and NCCL's file."""

import os

import pytest

from ft_plugins.launcher.agent.left_traces import flight_record, oom_kills
from ft_plugins.snapshot.segment import paths


@pytest.fixture
def groups(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "CGROUPS", tmp_path)
    monkeypatch.setattr(paths, "OWN_CGROUPS", tmp_path / "own")
    return tmp_path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(("own", "file"), [("0::/job/step", "memory.events"), ("4:memory:/job", "memory.oom_control")])
def test_the_kernels_count_is_that_of_the_own_group_or_of_the_parent_that_is_seen(groups, own, file):
    write(groups / "own", f"9:name=systemd:/\n{own}\n")
    assert oom_kills() is None
    mount = groups if "::" in own else groups / "memory"
    write(mount / file, "low 0\noom_kill 3\n")
    assert oom_kills() == 3
    write(mount / "job" / file, "under_oom 0\noom_kill 1\n")
    assert oom_kills() == 1


def test_a_count_that_cannot_be_read_is_unknown(groups):
    assert oom_kills() is None
    write(groups / "own", "nonsense\n")
    assert oom_kills() is None


def test_a_flight_record_is_named_if_it_was_written_by_this_incarnation(tmp_path):
    environment = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(tmp_path / "trace_")}
    assert flight_record(3, 0.0, environment) == flight_record(3, 0.0, {}) == ""
    path = tmp_path / "trace_3"
    path.write_text("x")
    os.utime(path, (1000.0, 1000.0))
    assert flight_record(3, 999.0, environment) == str(path) and flight_record(3, 1001.0, environment) == ""
