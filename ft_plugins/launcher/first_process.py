"""The console script `ft-run`, before torch is imported: signals end it from the first moment on; orphans are reaped.

The kernel drops a signal to the first process of a container (pid 1) that has no handler for it, and imports take
seconds. Invariant: a signal that ends ft-run ends it before these imports too, with the status that it has later. As
pid 1 this process does not become ft-run but starts it, passes signals on to it, reaps every orphan of the container,
and ends as ft-run does.

In: the command line. Out: what `command.main` returns.
"""

from __future__ import annotations

import os
import signal

_ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
_WATCHED = _ENDING | {signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD}


def main() -> int:
    """Run `ft-run`."""
    if os.getpid() == 1:
        _supervise()
    for number in _ENDING:
        signal.signal(number, _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
    from . import command  # imports torch

    return command.main()


def _end(number: int, frame: object) -> None:
    os.write(2, f"ft-run: ended by {signal.Signals(number).name} before the job started\n".encode())
    os._exit(128 + number)


def _supervise() -> None:
    """Return in a child alone, and end as it does."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)  # a blocked signal is never dropped
    child = os.fork()
    while child:
        came = signal.sigwaitinfo(_WATCHED)
        if came.si_signo != signal.SIGCHLD and came.si_code <= 0:  # by a process: a terminal's come to the child too
            os.kill(child, came.si_signo)
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG):
            if ended.si_pid == child:
                os._exit(ended.si_status + (0 if ended.si_code == os.CLD_EXITED else 128))

