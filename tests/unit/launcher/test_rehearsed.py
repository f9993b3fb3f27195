"""Which command is the same as one that was rehearsed, and what a start says of it."""

import os
import socket

import pytest

from ft_plugins.config import run_root
from ft_plugins.launcher import rehearsed
from ft_plugins.launcher.command import plan

COMMAND = ("--nproc-per-node", "2", "--reft", "train.py", "--lr", "1e-3", "--save", "/runs/1")


def digest(folder, *words):
    return plan(words, os.getuid(), str(folder), socket.gethostname()).digest


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)")
    return tmp_path


def test_a_command_is_the_same_whatever_it_is_called_and_wherever_it_saves(folder):
    first = digest(folder, *COMMAND)
    rehearsed.remember(first, "exact over 12 iterations")
    again = ("--nnodes=4", "--rdzv-endpoint=a:1", "--ftp-job=other", *COMMAND[2:6], "--save=/runs/2")
    assert digest(folder, *again) == first
    assert rehearsed.said(first).endswith(", exact over 12 iterations")
    others = {
        digest(folder, *COMMAND[:5], "2e-3", *COMMAND[6:]),
        digest(folder, "--reft-interval=2", *COMMAND),
        digest(folder, *COMMAND, "--more"),
    }
    (folder / "train.py").write_text("print(2)")
    others.add(digest(folder, *COMMAND))
    assert len(others) == 4 and {rehearsed.said(one)[:13] for one in others} == {"not rehearsed"}


def test_what_is_remembered_is_bounded_and_what_is_damaged_is_nothing(folder):
    for number in range(300):
        rehearsed.remember(f"digest{number}", "exact")
    assert [rehearsed.said(f"digest{number}")[:3] for number in (0, 43, 44, 299)] == ["not", "not", "reh", "reh"]
    (run_root() / "rehearsed.json").write_text('{"digest299": [1]}')
    assert rehearsed.said("digest299").startswith("not")
