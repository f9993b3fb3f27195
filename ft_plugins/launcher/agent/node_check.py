"""Run the site's own check of a node (`--ftp-node-check`) before the node takes part in a round.

Invariant: the check has neither the job's secret nor this package's variables or descriptors, no input and no shell. It
is killed as a group once its time is over. It never blocks the caller: its pipe is drained at each look, and one that
does not end when it is killed (in a driver's call, or as another user) is left behind.

In: a command, its bound. Out: `CheckResult`; `node.rejected` events.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass

from ...base.intake import shown
from ...errors import NodeError, printable
from ...events import Events, catalogue

_KEPT_BYTES, _KEPT_LINES = 4096, 5  # of the end of the output
_LINE = 200  # characters
_LOOK_SECONDS = 0.05
_KILL_SECONDS = 2.0  # for a killed check to end
_OURS = "FTP_"  # variables of this package


@dataclass(frozen=True)
class CheckResult:
    """How a check ended: `status` is None if it was killed at its bound, or could not be started."""

    command: str
    status: int | None
    seconds: float
    output: tuple[str, ...] = ()  # its last lines
    failure: str = ""  # why there is no status

    @property
    def passed(self) -> bool:
        """Whether the node may take part."""
        return self.status == 0

    @property
    def reason(self) -> str:
        """One line for people, if it has not passed."""
        how = self.failure or f"ended with status {self.status}"
        output = f"; its last lines: {' | '.join(self.output)}" if self.output else ""
        return f"the check {shown(self.command)} {how}{output}"


def last_lines(output: bytes) -> tuple[str, ...]:
    """The end of what a check printed, printable, in short lines."""
    lines = [line.strip() for line in output.decode(errors="replace").splitlines()]
    return tuple(printable(line)[:_LINE] for line in lines if line)[-_KEPT_LINES:]


class NodeCheck:
    """The check of this node, of `seconds` at most; for one thread. `command` is split as a shell would. Once passed it
    holds until `forget`."""

    def __init__(self, command: str, seconds: float, node: str, events: Events) -> None:
        self._command, self.seconds, self._node, self._events = command, seconds, node, events
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0.0  # monotonic
        self._output = b""
        self._result: CheckResult | None = None

    @property
    def passed(self) -> bool:
        """Whether the node has passed since it was last to be checked."""
        return self._result is not None and self._result.passed

    def forget(self) -> None:
        """The node is to be checked again."""
        self.stop()
        self._result = None

    def require(self) -> None:
        """Check the node now, and wait. Raises NodeError."""
        try:
            while not self.look():
                time.sleep(_LOOK_SECONDS)
        finally:
            self.stop()

    def look(self) -> bool:
        """Whether the node has passed; starts the check if it does not run yet. Raises NodeError if it has failed."""
        if self.passed:
            return True
        result = self._result = self._step()
        if result and not result.passed:
            reason = f"node {self._node}: {result.reason}"
            self._events.emit(
                catalogue.NODE_REJECTED, status=result.status, seconds=round(result.seconds, 3),
                output="\n".join(result.output), reason=reason,
            )  # fmt: skip
            raise NodeError(f"{reason}; mend the node, then give the same command there again")
        return result is not None

    def stop(self) -> bool:
        """Kill a check that still runs; False if it does not end. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so the group is this one
        if process.stdout:
            process.stdout.close()
        try:
            process.wait(_KILL_SECONDS)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _step(self) -> CheckResult | None:
        if self._process is None:
            self._began, self._output = time.monotonic(), b""
            try:
                self._process = subprocess.Popen(
                    shlex.split(self._command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT, start_new_session=True,
                    env={name: value for name, value in os.environ.items() if not name.startswith(_OURS)},
                )  # fmt: skip
            except (OSError, ValueError) as error:
                why = error.strerror if isinstance(error, OSError) else str(error)
                return CheckResult(self._command, None, 0.0, failure=f"could not be started ({why})")
            assert self._process.stdout
            os.set_blocking(self._process.stdout.fileno(), False)
        seconds = time.monotonic() - self._began
        ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        self._drain(self._process)
        if not ended and seconds < self.seconds:
            return None
        status, failure, process = None, "", self._process
        if ended:  # what it started in the background may live on
            assert process.stdout
            process.stdout.close()
            status, self._process = process.wait(), None
        else:
            failure = f"was killed after {self.seconds:g} s (--ftp-node-check-seconds)"
            failure += "" if self.stop() else f" and does not end (pid {process.pid})"
        return CheckResult(self._command, status, seconds, last_lines(self._output), failure)

    def _drain(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout
        with suppress(BlockingIOError):
            for _ in range(1024):  # one that prints without end is still killed at its bound
                read = os.read(process.stdout.fileno(), 1 << 16)
                if not read:
                    return
                self._output = (self._output + read)[-_KEPT_BYTES:]
