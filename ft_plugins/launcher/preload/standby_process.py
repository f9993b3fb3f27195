"""A standby worker as its agent sees it: a process in a session of its own, and the channel to it.

Invariant: it is never stopped before it is bound to the agent, so that the agent's death always ends it. What its
imports have started is stopped and ended with it, unless it has a session of its own.

In: signals to send. Out: what it uses.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .standby_channel import StandbyChannel

_END_SECONDS = 10.0  # for the kernel to end one

Command = tuple[str, ...]


@dataclass
class StandbyProcess:
    """`bound`: it ends with the agent. `ready`: it has imported, and waits."""

    process: subprocess.Popen[bytes]
    channel: StandbyChannel
    command: Command
    began: float  # monotonic
    bound: bool = False
    ready: bool = False
    stopped: bool = False  # by a signal, for a turn
    used: float = 0.0  # seconds of a processor, until the last turn

    def let_run(self, run: bool) -> None:
        """Let it run, or stop it until the next call."""
        if run is self.stopped and (run or self.bound):
            self._signal(signal.SIGCONT if run else signal.SIGSTOP)
            self.stopped = not run

    def end(self) -> None:
        """Kill it, and wait until it is gone."""
        self.channel.close()
        self._signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel
            self.process.wait(_END_SECONDS)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(OSError):  # it is gone
            os.killpg(self.process.pid, number)


def own_bytes(pid: int) -> int:
    """The memory of a process that it shares with no other; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))
