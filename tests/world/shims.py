"""What the product imports from the standard library, as far as it would leave the seed: clock, threads, locks, chance.

`install` replaces the functions of `time`, `threading`, `random`, `secrets` and `os.getpid` in this interpreter, once,
before anything of the product is imported. Outside of a world they are the real ones.

Invariant: a lock that the product makes at import belongs to each simulated process separately.
"""

import os
import random
import secrets
import threading
import time

from . import hub as hubs
from .hub import Signal


def _task():
    active = hubs.ACTIVE
    return active.current if active is not None else None


class Lock:
    """A lock of one process, or of each process if it was made outside of a world. Counts if `again`."""

    again = False

    def __init__(self):
        self._made_in = hubs.ACTIVE
        self._key = object()
        self._owner, self._count, self._waiting = None, 0, []

    def _of_process(self):
        task = _task()
        if self._made_in is not None or task is None:
            return self
        found = task.process.globals.get(self)
        if found is None:
            found = task.process.globals[self] = type(self)()
        return found

    def acquire(self, blocking=True, timeout=-1):
        lock, task = self._of_process(), _task()
        if lock._owner is not None and not (lock.again and lock._owner is task):
            if not blocking or task is None:
                return False
            until = None if timeout is None or timeout < 0 else task.hub.now + timeout
            while lock._owner is not None:
                signal = Signal(task.hub)
                lock._waiting.append(signal)
                if not signal.wait(None if until is None else max(0.0, until - task.hub.now)):
                    if signal in lock._waiting:
                        lock._waiting.remove(signal)
                    return False
        lock._owner = task if task is not None else lock
        lock._count += 1
        return True

    def release(self):
        lock = self._of_process()
        lock._count -= 1
        if not lock._count:
            lock._owner = None
            if lock._waiting:
                lock._waiting.pop(0).set()

    def locked(self):
        return self._of_process()._owner is not None

    def held(self):
        """Whether this thread has it."""
        return self._of_process()._owner is _task()

    def __enter__(self):
        self.acquire()
        return self

    def __exit__(self, *_):
        self.release()


class RLock(Lock):
    again = True


class Event:
    def __init__(self):
        self._set, self._signal = False, None

    def is_set(self):
        return self._set

    def set(self):
        self._set = True
        if self._signal is not None:
            signal, self._signal = self._signal, None
            signal.set()

    def clear(self):
        self._set = False

    def wait(self, timeout=None):
        if not self._set:
            task = _task()
            if task is None:
                return False
            if self._signal is None:
                self._signal = Signal(task.hub)
            self._signal.wait(timeout)
        return self._set


class Semaphore:
    def __init__(self, value=1):
        self._value, self._event = value, Event()

    def acquire(self):
        while not self._value:
            self._event.clear()
            self._event.wait()
        self._value -= 1
        return True

    def release(self):
        self._value += 1
        self._event.set()


class Thread:
    def __init__(self, target=None, name="", args=(), kwargs=None, daemon=None):
        self._what, self.name, self.daemon = (lambda: target(*args, **(kwargs or {}))), name, daemon
        self.task = None

    def start(self):
        self.task = _task().process.spawn(self._what, self.name)
        self.task.thread = self

    def join(self, timeout=None):
        if self.task is not None:
            self.task.over.wait(timeout)

    def is_alive(self):
        return self.task is not None and not self.task.over.is_set


def _current_thread():
    task = _task()
    if task is None:
        return _REAL_CURRENT()
    return getattr(task, "thread", task)


_REAL_CURRENT, _MONOTONIC, _TIME, _SLEEP = threading.current_thread, time.monotonic, time.time, time.sleep
_PERF, _GETPID, _UNIFORM, _HEX, _BYTES = time.perf_counter, os.getpid, random.uniform, secrets.token_hex, os.urandom


def _now(real):
    def now():
        active = hubs.ACTIVE
        return active.now if active is not None else real()

    return now


def _sleep(seconds):
    task = _task()
    if task is None:
        _SLEEP(seconds)
    else:
        task.sleep(seconds)


def _drawn(real, drawn):
    def draw(*arguments):
        active = hubs.ACTIVE
        return drawn(active, *arguments) if active is not None else real(*arguments)

    return draw


def install():
    """Replace them. Import what is heavy and foreign (torch) before."""
    time.monotonic, time.perf_counter = _now(_MONOTONIC), _now(_PERF)
    time.time = _now(_TIME)
    time.sleep = _sleep
    for name, kind in {
        "Lock": Lock, "RLock": RLock, "Event": Event, "Thread": Thread, "Semaphore": Semaphore,
        "current_thread": _current_thread,
    }.items():  # fmt: skip
        setattr(threading, name, kind)
    random.uniform = _drawn(_UNIFORM, lambda hub, low, high: hub.random.uniform(low, high))
    secrets.token_hex = _drawn(_HEX, lambda hub, count=32: f"{hub.random.getrandbits(8 * count):0{2 * count}x}")
    os.getpid = _drawn(_GETPID, lambda hub: hub.current.process.pid if hub.current is not None else _GETPID())
