"""Which ends of a script are orderly: only those that are known to be."""

import subprocess
import sys

import pytest

_FOLLOW = """
import atexit, sys
from ft_plugins.adapters.script.script_hooks import follow_end
def follow():
    orderly = follow_end(sys._getframe())
    atexit.register(lambda: print(orderly()))
"""


@pytest.mark.parametrize(
    "script, status, orderly",
    [
        ("", 0, True),
        ("def main():\n    return 3\nmain()", 0, True),
        ("try:\n    sys.exit(3)\nexcept SystemExit:\n    pass", 0, True),
        ("sys.exit()", 0, True),
        ("sys.exit(0)", 0, True),
        ("sys.exit(3)", 3, False),
        ("sys.exit('why')", 1, False),
        ("raise SystemExit(3)", 3, False),
        ("raise LookupError", 1, False),
        ("try:\n    sys.exit(0)\nexcept SystemExit:\n    raise LookupError from None", 1, False),
        ("sys.excepthook = lambda *what: None\nraise LookupError", 1, False),
    ],
)
@pytest.mark.parametrize("module", [False, True])
def test_an_end_is_orderly_where_nothing_was_raised(tmp_path, module, script, status, orderly):
    (tmp_path / "line.py").write_text(_FOLLOW)
    (tmp_path / "script.py").write_text(f"import sys\nimport line\nline.follow()\n{script}\n")
    words = [sys.executable, *(("-m", "script") if module else ("script.py",))]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (status, f"{orderly}\n"), done.stderr
