"""A gate that the device opens: open within the device's bubbles, whatever the host does, and to no other bytes."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.bubbles.bubble_plan import SenderPlan
from ft_plugins.bubbles.filling import Grant, Transfer, host_leaves_early
from ft_plugins.bubbles.gate.cuda_stores import CudaStores
from ft_plugins.bubbles.gate.gate import GATE_BYTES, POLL_SECONDS, Gate, Gatekeeper, Opening
from ft_plugins.bubbles.gate.gate_pacer import GatePacer
from ft_plugins.config import BaftConfig
from ft_plugins.errors import FtError
from ft_plugins.events import Events
from ft_plugins.model.timeline import Kind, Span, Timeline
from ft_plugins.redundancy.neighbour import plan_neighbours
from ft_plugins.systems.baft import Baft
from harness.late_device import CPU, LateDevice, Queued
from harness.waited_clock import MS, Clock, Stop

BEGIN, DEADLINE, NBYTES = 2, 8, 6000  # a window of each bubble: ms since its edge, bytes
BUBBLES = 3  # of an iteration, each after a pass


@dataclass
class Until:
    """What a stream waits for: done when a pass of `ms` that began once the stream came here has ended."""

    clock: Clock
    ms: int
    end: int | None = None

    @property
    def done(self):
        self.end = self.clock.now + self.ms * MS if self.end is None else self.end
        return self.clock.now >= self.end


class Device(LateDevice):
    """One stream, whose work takes time by `clock`; memory of its gate, and when each bubble really was."""

    def __init__(self, clock):
        super().__init__([0])
        self.clock, self.memory = clock, np.zeros(GATE_BYTES, dtype=np.uint8)
        self.edges = []  # iteration and bubble that begins, at which time; -1: it is over

    def compute(self, ms):
        self.training.give(lambda: None, Until(self.clock, ms))

    def note(self, iteration, bubble):
        self.training.give(lambda: self.edges.append((iteration, bubble, self.clock.now)))

    def run_to(self, now):
        self.clock.now = now
        self.training.run(1 << 20)


def grants():
    return tuple(Grant(at, 2 * at, BEGIN / 1e3, DEADLINE / 1e3, NBYTES) for at in range(BUBBLES))


def play(device, keeper, iteration, passes, waits):
    """The host gives an iteration to its device, ahead of it: passes of so many ms, between them receives."""
    with Queued(device.training):
        keeper.iteration_begin(iteration)
        for at, (busy, idle) in enumerate(zip(passes, waits, strict=True)):
            device.note(iteration, -1)
            keeper.begin(Kind.FORWARD)
            device.compute(busy)
            device.note(iteration, at)
            keeper.end(Kind.FORWARD)
            keeper.begin(Kind.RECV)
            device.compute(idle)
            keeper.end(Kind.RECV)
        keeper.iteration_end()
        device.note(iteration, -1)


def started(device):
    gate = Gate(device.memory, device.clock)
    with Queued(device.training):
        gate.follow(CudaStores(gate.memory, CPU, device))
        keeper = Gatekeeper(gate, SenderPlan(Transfer(0, 0, 1, 1, NBYTES), (), grants(), 1.0, 1.0), device.clock)
    return gate, keeper


LENGTHS = st.lists(st.integers(1, 30), min_size=BUBBLES, max_size=BUBBLES)


@given(st.lists(st.tuples(LENGTHS, LENGTHS, st.integers(0, 60)), min_size=1, max_size=5), st.lists(st.integers(1, 9)))
@settings(deadline=None)
def test_whatever_the_host_does_it_is_open_within_the_bubbles_of_the_device_and_for_no_longer_than_planned(
    iterations, looks
):
    """The host gives each iteration to its device some ms after the one before. A reader looks now and then."""
    device = Device(Clock())
    _, keeper = started(device)
    reader = Gate(device.memory, device.clock)
    due, at = [], 0
    for passes, waits, later in iterations:
        at += later
        due.append((at, passes, waits))
    last = at + sum(sum(passes) + sum(waits) for _, passes, waits in due) + 1
    given_so_far, next_look = 0, 0
    for now in range(last + 1):
        device.run_to(now * MS)
        while given_so_far < len(due) and due[given_so_far][0] <= now:
            play(device, keeper, given_so_far, *due[given_so_far][1:])
            given_so_far += 1
        device.run_to(now * MS)
        if now < next_look:
            continue
        next_look = now + (looks[now % len(looks)] if looks else 1)
        found = reader.read()
        iteration, bubble, edge = device.edges[-1] if device.edges else (0, -1, 0)
        if found is None:
            # looked at in every ms, it is open in all of each bubble
            assert looks or bubble < 0
            continue
        assert (found.iteration, found.bubble) == (iteration, bubble), "open outside of its bubble"
        ((begin, deadline, nbytes),) = found.windows
        if nbytes:
            assert edge + BEGIN * MS <= begin < deadline <= edge + DEADLINE * MS
            assert nbytes * (DEADLINE - BEGIN) * MS <= NBYTES * (deadline - begin), "faster than the link"
        if not looks:
            assert deadline >= edge + (DEADLINE - 1) * MS and nbytes > 0
    assert reader.read() is None and not device.training.queue


def test_a_sender_that_waits_uses_each_bubble_although_the_host_was_through_all_before_the_first():
    device = Device(Clock())
    _, keeper = started(device)
    clock = device.clock
    pacer = GatePacer(Gate(device.memory, clock), None, clock_ns=clock)
    for iteration in range(4):
        play(device, keeper, iteration, [10] * BUBBLES, [12] * BUBBLES)

    class Steps(Stop):
        """Time passes, and the device goes on, while the sender waits."""

        def wait(self, timeout=None):
            device.run_to(clock.now + max(1, int(1e9 * (timeout or 0))))
            return not device.training.queue

        def is_set(self):
            return not device.training.queue

    while (allowed := pacer.take(1 << 30, Steps(clock, 0))).nbytes:
        assert device.edges[-1][1] >= 0
        device.run_to(clock.now + allowed.nbytes * (DEADLINE - BEGIN) * MS // NBYTES)
        assert pacer.ended(allowed)
    assert set(dict(pacer.filled())) == set(range(BUBBLES)) and pacer.late_bytes == 0
    assert pacer.inside_bytes > NBYTES * BUBBLES * 4 // 2


def test_nothing_wakes_who_waits_for_a_device_so_it_looks_often():
    device = Device(Clock())
    gate, _ = started(device)
    gate.plan(2, 0.5, 7.0)
    reader = Gate(device.memory)
    assert (reader.planned, reader.period_ns, reader.link_rate) == (2, 500_000_000, 7)
    assert reader.wait(reader.openings, 1.0) == POLL_SECONDS


def rank_of(device):
    baft = Baft(
        0, BaftConfig(link_mbps=8.0), Events("n", 0), (), device.clock, lambda words: CudaStores(words, CPU, device)
    )
    gate = Gate(device.memory, device.clock)
    baft.use_gate(gate, plan_neighbours(("n0", "n1"), ((0, 1),), (1000, 1000)))
    return baft, gate


AHEAD = Timeline(
    0, 0.05, (Span(Kind.FORWARD, 0.0, 0.01), Span(Kind.RECV, 0.01, 0.04), Span(Kind.BACKWARD, 0.04, 0.05)),
    leads=(0.0, 0.05, 0.0, 0.01, 0.01, 0.035, 0.035, 0.045),
)  # fmt: skip


def test_the_device_opens_it_where_the_host_has_left_its_bubbles_before_and_nowhere_else():
    device = Device(Clock())
    baft, gate = rank_of(device)
    waits = replace(AHEAD, leads=(0.0,) * len(AHEAD.leads))
    assert not host_leaves_early(waits) and baft.gated(waits) is waits and not gate.by_device
    with Queued(device.training):
        assert host_leaves_early(AHEAD) and baft.gated(AHEAD) == replace(AHEAD, leads=())
        assert gate.by_device and len(device.registered) == 1
        assert baft.gated(waits).leads == (), "it stays with the device"
        baft.iteration_begin(held=True)
        assert gate.read() is None, "not before the device is there"
        baft.release_gate()
    assert device.registered == {} and not device.training.queue, "its memory may be unmapped"
    found = gate.read()
    assert found is None, found


def test_memory_that_cannot_be_registered_leaves_the_gate_to_the_host(capsys):
    device = Device(Clock())
    device.status = 712
    baft, gate = rank_of(device)
    assert baft.gated(AHEAD) == AHEAD and not gate.by_device
    device.registered.clear()
    assert "CUDA error 712); the host opens the gate" in capsys.readouterr().out
    with pytest.raises(FtError, match="cannot be registered"):
        CudaStores(gate.memory, CPU, device)


def test_an_opening_is_the_one_that_the_host_would_have_made():
    device = Device(Clock())
    gate, _ = started(device)
    with Queued(device.training):
        gate.open([grants()[1], grants()[2]], 5, 10**15)
        device.run_to(40 * MS)
        reader = Gate(device.memory, device.clock)
        assert reader.read() is not None
        device.clock.now += 1
        late = reader.read()
    windows = ((42 * MS, 42 * MS, 0), (42 * MS, 42 * MS, 0))
    assert late == Opening(1, 5, 1, windows), "who has not looked before the edge knows no deadline"


def test_a_device_without_memory_leaves_the_gate_closed_and_training_alone(capfd):
    class Full:
        def store(self, words, at):
            raise RuntimeError("out of memory")

        def close(self):
            pass

    gate = Gate(np.zeros(GATE_BYTES, dtype=np.uint8))
    gate.follow(Full())
    keeper = Gatekeeper(gate, SenderPlan(Transfer(0, 0, 1, 1, NBYTES), (), grants(), 1.0, 1.0))
    for iteration in range(2):
        keeper.iteration_begin(iteration)
        keeper.begin(Kind.FORWARD)
        keeper.end(Kind.FORWARD)
        assert gate.read() is None
        keeper.iteration_end()
    said = capfd.readouterr()
    assert (said.out + said.err).count("the device could not open its gate") == 1


def test_a_reader_that_was_suspended_while_it_looked_counts_from_when_it_saw_the_opening():
    class Suspended(Clock):
        """The reader's process stands still right after it has read the time."""

        after = 0

        def __call__(self):
            now = super().__call__()
            self.now, self.after = self.now + self.after, 0
            return now

    clock = Suspended()
    device = Device(clock)
    gate = Gate(device.memory, clock)
    with Queued(device.training):
        gate.follow(CudaStores(gate.memory, CPU, device))
    reader = Gate(device.memory, clock)
    assert reader.read() is None
    with Queued(device.training):
        gate.open([Grant(0, 0, 0.01, 0.2, NBYTES)], 0, 0)
    device.run_to(5 * MS)
    clock.after = 60 * MS
    opening = reader.read()
    assert opening is not None and opening.windows[0][0] == 75 * MS
