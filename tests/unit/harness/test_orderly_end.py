"""A script under `orderly_end` ends as under Python, but nothing runs while the interpreter is taken down."""

import signal
import subprocess
import sys

import pytest

from harness import orderly_end

AT_LAST = """
import os
class AtLast:
    def __del__(self):
        os.abort()
kept = AtLast()
"""  # what is left at the end of a script is deleted while the interpreter is taken down


def ended(folder, text, *words):
    script = folder / "script.py"
    script.write_text(text)
    return subprocess.run([sys.executable, *words, str(script), "word"], capture_output=True, text=True, timeout=120)


def test_what_aborts_a_process_whose_script_has_ended_does_not_abort_this_one(tmp_path):
    assert ended(tmp_path, AT_LAST).returncode == -signal.SIGABRT
    assert ended(tmp_path, AT_LAST, orderly_end.__file__).returncode == 0


@pytest.mark.parametrize(
    "text",
    [
        "import sys; print(sys.argv, sys.path[0], __name__)",
        "import sys; sys.exit(3)",
        "import sys; sys.exit('a reason')",
        "import sys; sys.exit()",
        "import atexit; atexit.register(print, 'registered'); print('script')",
        "import threading; threading.Thread(target=lambda: print('thread')).start()",
    ],
)
def test_arguments_output_and_status_are_those_of_python(tmp_path, text):
    plain, orderly = ended(tmp_path, text), ended(tmp_path, text, orderly_end.__file__)
    assert (orderly.returncode, orderly.stdout, orderly.stderr) == (plain.returncode, plain.stdout, plain.stderr)


def test_an_exception_is_reported_and_fails(tmp_path):
    done = ended(tmp_path, "raise ValueError('a reason')", orderly_end.__file__)
    assert done.returncode == 1 and done.stderr.endswith("ValueError: a reason\n")
