"""What a standby worker sees of its imports; in a process of its own, because an audit hook stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HEAD = (
    "import os, socket, sys\nfrom ft_plugins.launcher.standby_watch import EnvironmentWatch, ImportGuard, connected\n"
)


def printed(code: str, *words: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", HEAD + code, *words],
        env={"PATH": "/usr/bin", "PYTHONPATH": ":".join(sys.path), "HOME": "/home/nobody", **environment},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_names_that_code_reads_are_noted_and_what_it_sets_is_kept() -> None:
    code = """
watch = EnvironmentWatch()
os.environ.get("A"), os.getenv("B"), "C" in os.environ, os.environb.get(b"D")
os.environ.setdefault("E", "new"), os.environ.pop("GONE")
first = sorted(watch.read())
os.environ["A"]
second = sorted(watch.read())
print(first, second, watch.end(), type(os.environ._data) is dict, os.environ["E"])
"""
    assert printed(code, A="1", GONE="2") == (
        "['A', 'B', 'C', 'D', 'E', 'GONE'] ['A'] {'GONE': None, 'E': 'new'} True new"
    )


def test_copying_the_environment_or_searching_it_reads_no_name() -> None:
    code = """
watch = EnvironmentWatch()
copy = os.environ.copy()
found = [name for name, value in os.environ.items() if name.startswith("X")]
assert copy["A"] == "1" and watch.read() == set()
dict(os.environ); os.environ["A"]
print(watch.read())
"""
    assert printed(code, A="1") == "{'A'}"


def test_what_this_package_reads_is_read_again_when_it_is_called() -> None:
    code = """
from ft_plugins.config import launch_context
watch = EnvironmentWatch()
launch_context(os.environ)
print(watch.read())
"""
    assert printed(code) == "set()"


def test_an_import_may_not_overwrite_a_file_of_the_job_nor_connect(tmp_path: Path) -> None:
    code = """
from pathlib import Path
guard = ImportGuard()
guard._caches = [Path(sys.argv[1]) / "tmp"]
log = Path(sys.argv[1]) / "train.log"
for attempt in (lambda: open(log), lambda: open(log, "w"), lambda: os.open(log, os.O_RDWR),
                lambda: open(log.with_name("new"), "w"), lambda: open(log.parent / "tmp" / "x", "a"),
                lambda: open(log.parent / "__pycache__" / "x.pyc", "wb"),
                lambda: socket.create_connection(("127.0.0.1", 9))):
    try:
        attempt()
        print("done", end=" ")
    except PermissionError:
        print("stopped", end=" ")
assert str(log) in guard.stopped
guard.on = False
open(log, "w")
"""
    for name in ("train.log", "tmp/x", "__pycache__/x.pyc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("of the running rank")
    assert printed(code, str(tmp_path)) == "done stopped stopped done done done stopped"


def test_a_port_is_seen() -> None:
    code = """
before = connected()
kept = socket.socket()
print(before, connected())
"""
    assert printed(code) == "False True"
