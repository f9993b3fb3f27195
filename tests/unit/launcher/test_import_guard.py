"""What an import may not do ahead of time; in a process of its own, because an audit hook stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import os, shutil, socket, sys, tempfile
from pathlib import Path
from ft_plugins.launcher.preload.import_guard import ImportGuard
guard = ImportGuard()
job, temporary = Path(sys.argv[1]) / "job", Path(sys.argv[1]) / "temporary"
guard._temporary = [temporary]
{before}
try:
    {attempt}
    print("done")
except PermissionError:
    print("stopped", guard.stopped)
guard.on = False
open(job / "train.log", "w")
"""


def tried(folder: Path, attempt: str, before: str = "") -> str:
    for name in ("job/train.log", "job/parts/a", "job/empty", "temporary/x", "home/.cache/x"):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text("" if name == "job/empty" else "of the running rank")
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(before=before, attempt=attempt), str(folder)],
        env={"PATH": "/usr/bin", "PYTHONPATH": ":".join(sys.path), "HOME": str(folder / "home")},
        capture_output=True, text=True, timeout=60, check=False, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "attempt",
    [
        "open(job / 'train.log', 'w')",
        "open(job / 'train.log', 'a')",
        "os.open(job / 'train.log', os.O_RDWR)",
        "os.remove(job / 'train.log')",
        "os.rename(job / 'train.log', job / 'train.log.1')",
        "os.replace(Path(tempfile.mkdtemp()) / 'none', job / 'train.log')",
        "os.truncate(job / 'train.log', 0)",
        "shutil.rmtree(job / 'parts')",
        "open(temporary / 'x', 'w')",
        "os.open(os.path.expanduser('~/.cache/lock'), os.O_CREAT | os.O_EXCL)",
        "open(job / 'own.lock', 'x')",
        "socket.create_connection(('127.0.0.1', 9))",
    ],
)
def test_it_may_not_change_what_running_ranks_use_take_a_lock_or_connect(tmp_path: Path, attempt: str) -> None:
    assert tried(tmp_path, attempt).startswith("stopped an import ")


@pytest.mark.parametrize(
    "attempt",
    [
        "open(job / 'train.log')",
        "open(job / 'new', 'w').close(); open(job / 'new', 'w')",
        "open(temporary / 'x', 'a')",
        "(job / '__pycache__').mkdir(); open(job / '__pycache__/x.pyc', 'wb'); os.remove(job / '__pycache__/x.pyc')",
        "shutil.rmtree(tempfile.mkdtemp())",
        "tempfile.NamedTemporaryFile(dir=job).close()",
        "open(os.path.expanduser('~/.cache/x'), 'w')",
        "open('/dev/null', 'w')",
        "os.makedirs(job / 'parts', exist_ok=True)",
        "open(job / 'n.tmp', 'w'); os.replace(job / 'n.tmp', os.path.expanduser('~/.cache/x'))",
    ],
)
def test_it_may_read_and_change_what_it_has_made_and_caches(tmp_path: Path, attempt: str) -> None:
    assert tried(tmp_path, attempt) == "done"


def test_the_files_that_it_has_read_are_known(tmp_path: Path) -> None:
    attempt = "open(job / 'train.log'); open('/proc/self/stat'); print(sorted(guard.files()))"
    assert tried(tmp_path, attempt).splitlines()[0] == str([str(tmp_path / "job/train.log")])


def test_it_does_not_choose_the_temporary_folder(tmp_path: Path) -> None:
    assert tried(tmp_path, "print(tempfile.tempdir)").startswith("None")
