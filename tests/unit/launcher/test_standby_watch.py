"""What a standby worker sees of its imports, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

HEAD = "import os, socket, sys\nfrom ft_plugins.launcher.preload.standby_watch import EnvironmentWatch, connected\n"


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
exec('os.environ.setdefault("E", "new"), os.environ.pop("GONE")', {"os": os, "__name__": "module"})
first = sorted(watch.read())
os.environ["A"]
second = sorted(watch.read())
print(first, second, watch.end(), type(os.environ._data) is dict, os.environ["E"])
"""
    assert printed(code, A="1", GONE="2") == (
        "['A', 'B', 'C', 'D', 'E', 'GONE'] ['A'] {'GONE': None, 'E': 'new'} True new"
    )


def test_what_the_script_sets_is_left_to_the_script_unless_modules_set_it_too() -> None:
    code = """
watch = EnvironmentWatch()
os.environ["OWN"] = "1"
exec('os.environ["OTHER"] = "2"', {"os": os, "__name__": "module"})
first = watch.conflict()
os.environ.get("OTHER")
set_by_modules = watch.end()
print([first, watch.conflict()], set_by_modules)
"""
    assert printed(code) == "['', 'OTHER'] {'OTHER': '2'}"


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


def test_a_port_is_seen() -> None:
    code = """
before = connected()
kept = socket.socket()
print(before, connected())
"""
    assert printed(code) == "False True"
