"""An SMP steps back behind training: what goes to other nodes, and comes from them, has a lower priority than the step.

A node's cores are training's: its collectives' threads, its data loaders. A thread of an SMP that wakes at the same
moment must not be put before them; it loses nothing by being later. Threads that answer and watch keep their priority:
liveness depends on them, and they take next to no time. So do those that restore, and those that write to storage,
which may have a time limit.

Invariant: a priority is only ever lowered, so it needs no privilege. Where the system knows none of this, nothing
happens.

In, out: nothing; this thread's priority, or this session's.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

# a third of the weight of a thread of training, so that what steps back does not starve on a node that is full
NICE = 5
SESSION_NICE = 5  # where the kernel shares cores among sessions (autogroup): an SMP's would weigh as much as all ranks'
LEAST = 19  # of all priorities
_AUTOGROUP = Path("/proc/self/autogroup")


def step_back() -> None:
    """This thread gives way, from now on. Idempotent."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # on Linux, priorities are those of threads; that of the first is the process's
        wanted = min(os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICE, LEAST)
        if os.getpriority(os.PRIO_PROCESS, thread) < wanted:
            os.setpriority(os.PRIO_PROCESS, thread, wanted)


def step_back_session() -> None:
    """The session of this process, which it has begun itself, gives way where sessions are what cores are shared by."""
    with contextlib.suppress(OSError):
        _AUTOGROUP.write_text(str(SESSION_NICE))
