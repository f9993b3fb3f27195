"""Run a script as Python does, and end the process when the script has ended, without taking the interpreter down.

    torchrun ... tests/harness/orderly_end.py SCRIPT ARGUMENTS...

For unprotected runs of scripts that end without destroy_process_group, as Megatron's and Hugging Face's do. There a
thread of gloo (`ProcessGroupGloo::runLoop`) may still hold a tensor of the last collective. If it releases it while the
interpreter is being taken down, it asks for the GIL, Python ends the thread within a destructor, and the process aborts
after its last iteration: SIGABRT, 'terminate called without an active exception'. Seen with torch 2.13, in every second
run of four ranks on a busy machine.

Threads, functions registered with atexit, output and the exit status are as without it.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import threading
from pathlib import Path


def main() -> None:
    """Run `sys.argv[1:]`. Does not return; an exception of the script is Python's to report."""
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    code: object = None
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as stop:
        code = stop.code
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons, as Python does first
    atexit._run_exitfuncs()
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    main()
