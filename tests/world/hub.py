"""The world's one thread: simulated processes and their threads as tasks, a clock, and nothing that is not in the seed.

A task is a greenlet, so the product's code runs in it as it is: where that would wait, the task gives way, and the hub
goes on with whatever is due next. Time passes only when no task can run.

Invariant: tasks run in the order of (time, number), so a seed replays. A killed process is never resumed: none of its
`finally` blocks run, as after SIGKILL.
"""

import heapq
import itertools
import random

from greenlet import getcurrent, greenlet

ACTIVE = None  # the hub that runs now; None outside of a world


class Over(BaseException):
    """The world has ended; only tasks that were left see it."""


class Process:
    """A simulated process. `parent` is what a real one would notice: nothing is inherited."""

    def __init__(self, hub, name, machine=None):
        self.hub, self.name, self.machine = hub, name, machine
        self.pid = next(hub.pids)
        self.alive, self.stopped = True, False
        self.status = None  # once it has ended
        self.began = hub.now
        self.ended = Signal(hub)
        self.late = []  # tasks that were due while it was stopped
        self.globals = {}  # of the product's modules, in this process: locks
        self.at_end = []  # calls, when it is gone: connections are reset

    def spawn(self, what, name=""):
        """A thread of it."""
        return Task(self, what, name)

    def end(self, status):
        """It is gone, with an exit status, or the negative number of a signal."""
        if self.alive:
            self.alive, self.status = False, status
            self.hub.processes.pop(self.pid, None)
            self.hub.note(f"{self.name} ended with {status}")
            for call in self.at_end:
                call()
            self.ended.set()

    def stop(self):
        """SIGSTOP."""
        self.stopped = True

    def resume(self):
        """SIGCONT."""
        self.stopped = False
        late, self.late = self.late, []
        for task, number in late:
            task.schedule(self.hub.now, number)


class Signal:
    """Wakes the tasks that wait for it, once each time."""

    def __init__(self, hub):
        self.hub, self.is_set, self.waiting = hub, False, []

    def set(self):
        self.is_set = True
        waiting, self.waiting = self.waiting, []
        for task, number in waiting:
            task.schedule(self.hub.now, number)

    def wait(self, seconds=None):
        """Whether it was set within that time."""
        if self.is_set:
            return True
        task = self.hub.current
        self.waiting.append((task, task.number + 1))
        task.sleep(seconds)
        return self.is_set


class Task:
    """A simulated thread."""

    def __init__(self, process, what, name=""):
        self.process, self.name, self.hub = process, name, process.hub
        self.number = 0  # of its wait: what was scheduled for an earlier one is void
        self.over = Signal(process.hub)
        self._greenlet = greenlet(lambda: self._run(what), process.hub.main)
        self._greenlet.task = self
        self.hub.tasks[self] = None
        self.schedule(self.hub.now)

    def _run(self, what):
        try:
            what()
        except Over:
            return
        except BaseException as error:
            self.hub.failed(self, error)
        finally:
            self.hub.tasks.pop(self, None)
            self.over.set()

    def schedule(self, when, number=None):
        heapq.heappush(self.hub.heap, (when, next(self.hub.numbers), self, self.number if number is None else number))

    def sleep(self, seconds=None):
        """Give way; None: until something wakes it."""
        if self.hub.over:
            raise Over
        self.number += 1
        if seconds is not None:
            self.schedule(self.hub.now + max(0.0, seconds))
        self.hub.main.switch()


class Hub:
    """The world's scheduler. `notes` receives what happened, as (time, text)."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.now = 1000.0
        self.heap, self.numbers, self.pids = [], itertools.count(), itertools.count(100)
        self.tasks, self.processes, self.notes, self.errors = {}, {}, [], []
        self.main = None
        self.current = None
        self.over = False
        self.steps = 0

    def process(self, name, machine=None):
        made = Process(self, name, machine)
        self.processes[made.pid] = made
        return made

    def note(self, text):
        self.notes.append((self.now, text))

    def failed(self, task, error):
        """A thread ended by an error that nothing caught."""
        self.errors.append((self.now, task, error))

    def later(self, seconds, what):
        """Call `what` in the hub, after so many seconds: the network, faults."""
        heapq.heappush(self.heap, (self.now + seconds, next(self.numbers), what, None))

    def run(self, until, done=lambda: False):
        """Until that time, or `done`. Returns whether it was that."""
        global ACTIVE
        self.main, before = getcurrent(), ACTIVE
        ACTIVE = self
        try:
            while self.heap and not done():
                when, _, what, number = self.heap[0]
                if when > until:
                    break
                heapq.heappop(self.heap)
                self.now = max(self.now, when)
                self.steps += 1
                if number is None:
                    what()
                elif number == what.number and what.process.alive and not what._greenlet.dead:
                    if what.process.stopped:
                        what.process.late.append((what, number))
                        continue
                    self.current = what
                    what._greenlet.switch()
                    self.current = None
            return done()
        finally:
            ACTIVE = before

    def close(self):
        """Let go of all tasks."""
        global ACTIVE
        self.over = True
        self.main, before = getcurrent(), ACTIVE
        ACTIVE = self
        try:
            for task in list(self.tasks):
                self.current = task
                if task._greenlet:  # it has begun, and not ended
                    task._greenlet.throw(Over)
            self.tasks.clear()
            self.heap.clear()
        finally:
            self.current, ACTIVE = None, before
