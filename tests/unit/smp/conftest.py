"""Processes for tests of the SMP: trainers that attach to it, scripts, and one that only lives."""

import os
import signal
import subprocess
import threading

import pytest


@pytest.fixture
def sleeper():
    """A process that does nothing for as long as nobody ends it."""
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    yield process
    process.kill()
    process.communicate()


class Trainer:
    """A forked process that attaches as `rank` and then stands still: for ever, or stopped."""

    def __init__(self, attach, rank, token, stopped):
        readable, writable = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                attach(rank, token)
                os.write(writable, b"1")
                if stopped:
                    os.kill(os.getpid(), signal.SIGSTOP)
                threading.Event().wait(60)
            finally:
                os._exit(1)
        os.close(writable)
        assert os.read(readable, 1) == b"1", "the trainer could not attach"
        os.close(readable)
        if stopped:
            assert os.WIFSTOPPED(os.waitpid(self.pid, os.WUNTRACED)[1])

    def ended_by(self):
        """The signal that ended it; waits."""
        status = os.waitid(os.P_PID, self.pid, os.WEXITED)
        self.pid, pid = 0, self.pid
        assert status is not None and status.si_pid == pid and status.si_code == os.CLD_KILLED
        return status.si_status

    def end(self):
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0


@pytest.fixture
def trainer(node, request):
    """Trainers by rank and token, with the SHAPE and the FINGERPRINT of the test's file; none outlives its test."""
    made = []
    shape, fingerprint = request.module.SHAPE, getattr(request.module, "FINGERPRINT", {})

    def attach(rank, token):
        with node.client() as client:
            client.attach(rank, token, shape, fingerprint, fresh=False)

    def attached(rank, token, stopped=False):
        made.append(Trainer(attach, rank, token, stopped))
        return made[-1]

    yield attached
    for each in made:
        each.end()
