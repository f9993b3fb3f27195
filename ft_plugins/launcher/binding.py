"""Bind a process to the one that started it: the kernel ends it when that one dies."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def bind_to_agent(agent_pid: int) -> None:
    """Have the kernel SIGKILL this process when the agent dies. Ends at once if it has already died."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed: a rank could outlive its ft-run")
    if os.getppid() != agent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
