"""What a signal to ft-run does for the state in memory: a checkpoint at once, and what is newest when the workers end.

    SIGTERM and others that end ft-run   `SignalStop`: the newest version is written while the workers end; they get
                                         WORKERS_SHARE of the grace, then they are killed, and a version that they
                                         sealed meanwhile is written in the rest of it
                                         nothing, once the ranks of all nodes have ended
    SIGUSR1, SIGUSR2                     `notices`: a notice of preemption: the newest version is written, the job's log
                                         says where, and training continues

Invariant: a stop takes no longer than the grace, whatever the SMP, the storage or the workers do. A notice never harms
training. What is not in storage in the end is said.

In: signals, the watcher of the node's SMP. Out: checkpoints; lines for people; `checkpoint.missed` events.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException

from ...errors import ProtectionError
from ...events import Events, catalogue, say
from ...smp.serve.client import REQUEST, STOP
from ...smp.watch import liveness
from .watcher import Watcher

WORKERS_SHARE = 0.75  # of the grace; the rest is for a version that they seal in that time
_NOTICE_SECONDS = 600.0  # for the checkpoint of a notice, as for `ft-plugins checkpoint now`
_AGAIN_SECONDS = 0.2  # after a request that the SMP did not answer
_NOTHING = {
    "off": "nothing is written to storage: the job has no --reft-checkpoint-dir, or its ranks have not begun",
    "nothing": "nothing is written to storage, because there is no version in memory yet",
}


def missed(outcome: dict[str, Any]) -> str:
    """Why the newest version is not in storage; '' if it is, or if there is none or no storage."""
    match outcome["state"]:
        case "failed" | "unanswered":
            return str(outcome["reason"])
        case "writing":
            return "it was not written in time; as long as the SMP lives, it continues to write it"
    return ""


def report_missed(events: Events, outcome: dict[str, Any]) -> None:
    """Say that the newest version is not in storage, if that is so."""
    if reason := missed(outcome):
        events.emit(catalogue.CHECKPOINT_MISSED, reason=reason)
        say(f"the newest snapshot is not in storage: {reason}", alarm=True, who="ft-run: ")


class SignalStop:
    """The stop of a node's job by a signal, within `seconds` from `begin` on. `writer` is None if there is no SMP."""

    def __init__(self, writer: Watcher | None, events: Events, seconds: float) -> None:
        self._writer, self._events, self._seconds = writer, events, seconds
        self._until = 0.0  # monotonic; 0 before `begin`
        self._workers_ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._outcome: dict[str, Any] = {"state": "writing"}
        self._said = ""  # the path that was printed

    def begin(self, write: bool = True) -> None:
        """The grace begins. Write what is in memory, in a thread, unless `write` is false. Idempotent."""
        self._until = self._until or time.monotonic() + self._seconds
        if write and self._thread is None and self._writer is not None:
            self._thread = threading.Thread(target=self._write, args=(self._writer,), daemon=True)
            self._thread.start()

    @property
    def left(self) -> float:
        """Seconds of the grace."""
        return max(0.0, self._until - time.monotonic())

    @property
    def left_for_workers(self) -> float:
        """Seconds in which the workers may end on their own."""
        return max(0.0, self.left - (1 - WORKERS_SHARE) * self._seconds)

    def finish(self) -> None:
        """Once the workers have ended: wait until what is newest is written, and say what is not in storage; nothing,
        if it was begun without."""
        self.begin(write=not self._until)
        self._workers_ended.set()
        if self._thread is not None:
            self._thread.join(self.left)
            report_missed(self._events, self._outcome)

    def _write(self, writer: Watcher) -> None:
        """The thread: what is in memory now, then what is newest."""
        while self._ask(writer)["state"] == "unanswered" and self.left:  # the signal may have ended the SMP too
            self._workers_ended.wait(_AGAIN_SECONDS)
        self._workers_ended.wait(self.left)
        self._outcome = self._ask(writer)

    def _ask(self, writer: Watcher) -> dict[str, Any]:
        try:
            outcome = writer.checkpoint(STOP, seconds=self.left)
        except ProtectionError as error:
            outcome = {"state": "unanswered", "reason": str(error)}
        if outcome["state"] == "done" and outcome["path"] != self._said:
            self._said = outcome["path"]
            say(f"iteration {outcome['iteration']} is in {self._said}", alarm=True, who="ft-run: ")
        return outcome


def end_by_signals(taken: str, over: bool = False) -> None:
    """Have ft-run end in order by the signals `taken`, names, also before torch's agent, which handles them as this
    does, has started workers; by none of them if the job is `over`. Notices of preemption are ignored until they are
    handled. For the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return
    for name in taken.split(","):
        if number := getattr(signal, name.strip(), None):
            signal.signal(number, signal.SIG_IGN if over else _end)
    liveness.ignore_notices()


def _end(number: int, frame: FrameType | None) -> None:
    raise SignalException(f"Process {os.getpid()} got signal: {number}", signal.Signals(number))


@contextmanager
def notices(writer: Watcher, taken: str, node: str) -> Iterator[None]:
    """Meanwhile write a checkpoint at each notice of preemption, one at a time. `taken`: names of signals that end the
    job. `node`: this one. For the main thread; in another one there are no notices."""
    busy = threading.Lock()

    def notice(number: int, frame: FrameType | None) -> None:
        if busy.acquire(blocking=False):
            arguments = writer, f"{signal.Signals(number).name} on node {node}", busy
            threading.Thread(target=_answer, args=arguments, daemon=True).start()

    ends = {name.strip() for name in taken.split(",")}
    main = threading.current_thread() is threading.main_thread()
    free = [number for number in liveness.NOTICES if main and number.name not in ends]
    before = {number: signal.signal(number, notice) for number in free}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _answer(writer: Watcher, name: str, busy: threading.Lock) -> None:
    """Write a checkpoint because of a notice, say what became of it, and release `busy`."""
    try:
        outcome = writer.checkpoint(REQUEST, seconds=_NOTICE_SECONDS)
    except ProtectionError as error:
        outcome = {"state": "failed", "reason": str(error)}
    said = _NOTHING.get(outcome["state"]) or f"the newest snapshot is not in storage: {missed(outcome)}"
    if outcome["state"] == "done":
        said = f"iteration {outcome['iteration']} is in {outcome['path']}"
    busy.release()
    say(f"{name}: {said}", alarm=True, who="ft-run: ")
