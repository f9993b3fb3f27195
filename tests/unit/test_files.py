"""Files are written whole or not at all, and durably where that is asked for."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ft_plugins.base import files
from ft_plugins.base.intake import within


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_file_is_replaced_whole_for_its_owner_alone_and_no_pipe_or_link_is_written_to(
    tmp_path: Path, kind: str
) -> None:
    path, foreign, building = tmp_path / "x", tmp_path / "foreign", tmp_path / "x.new"
    foreign.write_text("foreign")
    path.write_text("old")
    os.mkfifo(building) if kind == "pipe" else building.symlink_to(foreign)
    within(10.0, lambda: files.write(path, "new"), "the writer")
    assert path.read_text() == "new" and foreign.read_text() == "foreign"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(tmp_path.iterdir()) == [foreign, path]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x"
    files.write_json(path, [1])
    with pytest.raises(ZeroDivisionError), files.replacing(path) as descriptor:
        files.write_all(descriptor, b"half")
        raise ZeroDivisionError
    assert path.read_text() == "[1]" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("durable", [True, False])
def test_content_is_synced_before_the_rename_and_the_folder_after_it(
    durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, rename = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        done.append("sync folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "sync file")
        sync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        done.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    with files.replacing(tmp_path / "x", durable=durable, before_rename=lambda _: done.append("before rename")):
        pass
    steps = ["sync file", "before rename", "rename", "sync folder"]
    assert done == (steps if durable else steps[1:3])
