"""Make a forked process what a new one is: all that a rank gets from its agent, and all that must differ between ranks.

    from the agent   environment, working folder, standard output and error
    of its own       random generators, times and process ids that modules have noted in global variables, the name

Invariant: modules that hold an object of this process, such as `sys.stdout`, keep it: it is changed in place. What is
not here is as in the preloader, which the agent starts as it starts ranks: command, signals, limits, priority, standard
input. The test compares with a new process field by field.

`bind_to_agent` has the kernel end a process when the one that started it dies.

In: what the agent sent. Out: this process.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from ...base import stamps

_NAME = Path("/proc/self/comm")
_CLOCKS = ((time.time, float, 1), (time.monotonic, float, 1), (time.time_ns, int, 10**9), (time.time, int, 1))
_TIMES = re.compile(r"time|clock|start|beg[ai]n|born|epoch|since|last|now|tick|stamp|note|t0", re.IGNORECASE)
_YOUNG = 1000.0  # seconds: a clock that shows less may be mistaken for a constant, as 45.5
_DAYS = 1e9  # seconds: only a time of day shows more
_EARLIER = 10.0  # seconds: for what this process had imported before it looked at the clocks
_PR_SET_PDEATHSIG = 1


def name_process(name: str) -> str:
    """Set the name that `ps -o comm` shows; returns the one before."""
    before = _NAME.read_text().rstrip("\n")
    _NAME.write_text(name)
    return before


@dataclass(frozen=True)
class Noted:
    """A global variable in `names` that holds a time, with so many units a second, or with 0 this process's id."""

    names: dict[str, Any]
    name: str
    value: float
    units: int

    def renew(self, seconds: float) -> None:
        """Make it that of a process that began so much later; not if it holds another value by now. Else a limit on
        the duration of training, which frameworks count from such a variable, would count the hours before a restart.
        """
        if self.names.get(self.name) is self.value:
            later = self.value + type(self.value)(seconds * self.units)
            self.names[self.name] = later if self.units else os.getpid()


class Clocks:
    """Finds what modules that are imported from now on note. A number without a fraction counts only as time of day.
    What is no time of day counts only if it is called a time, because it may be a constant, about as large as the
    seconds since the machine was started."""

    def __init__(self) -> None:
        self._began = [clock() - _EARLIER * units for clock, _, units in _CLOCKS]

    def noted(self) -> list[Noted]:
        """What all modules have noted by now."""
        spans = [(b, clock(), kind, units) for b, (clock, kind, units) in zip(self._began, _CLOCKS, strict=True)]
        found = []
        for module in list(sys.modules.values()):
            for name, value in list(vars(module).items()) if isinstance(module, ModuleType) else ():
                if type(value) is int and value == os.getpid() and "pid" in name.lower():
                    found.append(Noted(vars(module), name, value, 0))
                elif type(value) is int or type(value) is float and not value.is_integer():
                    least = _YOUNG if _TIMES.search(name) else _DAYS
                    fits = (u for b, e, kind, u in spans if kind is type(value) and least < b <= value <= e)
                    if units := next(fits, 0):
                        found.append(Noted(vars(module), name, value, units))
        return found


def become(environment: Mapping[str, str], written: Mapping[str, str | None], folder: str, name: str) -> None:
    """Take over what the agent gives; `written` is what modules have set of the environment when they were imported.
    Standard output and error are those of the agent already."""
    stamps.begin()
    _reopen(sys.stdout, 1)
    _reopen(sys.stderr, 2)
    whole = dict.fromkeys(os.environ) | dict(environment) | dict(written)
    for variable, value in whole.items():
        if value is None:
            os.environ.pop(variable, None)
        elif os.environ.get(variable) != value:
            os.environ[variable] = value
    os.chdir(folder)
    importlib.invalidate_caches()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    importlib.import_module("torch").default_generator.seed()  # chosen at random in each process; no GPU has one yet
    cast(Any, threading.main_thread())._set_native_id()  # as Python does from 3.13 on
    multiprocessing.current_process().authkey = os.urandom(32)
    name_process(name)


def _reopen(stream: Any, descriptor: int) -> None:
    """Have an unbuffered standard stream be what Python makes of a descriptor when it starts."""
    raw: Any = io.FileIO(descriptor, "w", closefd=False)  # a file remembers whether one can seek in it
    raw.name = stream.name
    stream.__init__(raw, stream.encoding, stream.errors, "\n", stream.line_buffering, stream.write_through)


# ---- its end ----


def bind_to_agent(agent_pid: int) -> None:
    """Have the kernel SIGKILL this process when the agent dies. Ends at once if it has already died."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed: a rank could outlive its ft-run")
    if os.getppid() != agent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
