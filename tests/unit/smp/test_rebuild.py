"""A slot is put together from lines that answer late, wrong or not at all: it is CLEAN with every byte right, or DIRTY.

Lines are played by the test; those to other nodes by a server that misbehaves.
"""

import itertools
import socket
import threading
from collections import deque
from contextlib import closing
from dataclasses import replace

import msgpack
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.errors import CorruptSlotError, FtError, ProtocolError, ResumeError
from ft_plugins.redundancy import kernels
from ft_plugins.redundancy.exchange_plan import plan_exchange
from ft_plugins.redundancy.field import power, times
from ft_plugins.smp.exchange import rebuild
from ft_plugins.smp.exchange.frames import Data, Frame, Parity, Part
from ft_plugins.smp.exchange.readers import PipelinedPeer
from ft_plugins.snapshot.segment.paths import path_of, remove
from ft_plugins.snapshot.segment.segment import NOT_COMPUTED, Segment, create
from ft_plugins.snapshot.segment.shape import Shape
from ft_plugins.snapshot.segment.slots import SlotState, Version
from ft_plugins.transport import calls, channel, protocol
from ft_plugins.transport.channel import TAG, Party
from ft_plugins.transport.dial import Dialer
from ft_plugins.transport.frame_codec import PAYLOAD_LIMIT
from ft_plugins.transport.framed import FramedSocket

NBYTES = 7 * PAYLOAD_LIMIT + 12_345
BUCKET = 3_000_000  # straddles frames
VERSION = Version(2, 5)
SMALL = b"small state"
SECRET = b"a secret of the job"
SECONDS = 90
TIMES = np.array([[times(a, b) for b in range(256)] for a in range(256)], dtype=np.uint8)


@pytest.fixture
def segment(job):
    ranges = [*((at, min(BUCKET, NBYTES - at)) for at in range(0, NBYTES, BUCKET)), (NBYTES, 0)]
    path = path_of(job, "n0", 3)
    create(path, Shape(NBYTES, 1000, len(ranges), 7, 3), 3, {})
    made = Segment(path)
    made.ranges = ranges
    yield made
    made.close()
    remove(job, "n0")


class Memory:
    """A reader of bytes that are in this process."""

    over_wire = True

    def __init__(self, segment):
        self.bytes = np.random.default_rng(1).integers(0, 256, NBYTES, dtype=np.uint8)
        self.digests = [xxhash.xxh3_64_intdigest(self.bytes[at : at + size].tobytes()) for at, size in segment.ranges]
        self.made = []
        self.before = lambda wanted: None

    def slot(self, rank, version):
        assert (rank, version) == (3, VERSION)
        return bytes(msgpack.packb([SMALL, np.array(self.digests, dtype=np.uint64).tobytes()]))

    copy = slot

    def held(self, wanted):
        assert isinstance(wanted, Data)
        return self.bytes[wanted.at : wanted.at + wanted.nbytes]

    def stream(self):
        self.made.append(Memory.Line(self))
        return self.made[-1]

    class Line:
        def __init__(self, memory):
            self.memory = memory
            self.asked = deque()
            self.most = 0
            self.closed = threading.Event()
            self.released = False

        def ask_for(self, wanted):
            self.asked.append(wanted)
            self.most = max(self.most, len(self.asked))

        def take(self, into):
            wanted = self.asked.popleft()
            self.memory.before(wanted)
            into[:] = self.memory.held(wanted)

        def close(self):
            self.closed.set()

        def release(self):
            self.released = True


def states(segment):
    return {slot.state for slot in segment.slots()}


def test_a_slot_is_fetched_whole_with_a_bounded_number_of_frames_under_way(segment):
    memory = Memory(segment)
    assert rebuild.fetch(segment, VERSION, 9, memory) == NBYTES
    (slot,) = [slot for slot in segment.slots() if slot.state is SlotState.CLEAN]
    assert (slot.version, slot.token) == (VERSION, 9)
    assert (segment.data(slot.index) == memory.bytes).all() and segment.small(slot.index) == SMALL
    segment.verify(slot.index)
    assert 0 < len(memory.made) <= rebuild.THREADS
    assert all(line.most <= rebuild.AHEAD and line.released and not line.asked for line in memory.made)


@pytest.mark.parametrize("at", [0, BUCKET, NBYTES - 1])
def test_a_byte_that_does_not_fit_the_table_leaves_the_slot_dirty(segment, at):
    memory = Memory(segment)
    memory.bytes[at] ^= 1
    with pytest.raises(CorruptSlotError, match=f"bucket {at // BUCKET} .*does not match its digest"):
        rebuild.fetch(segment, VERSION, 9, memory)
    assert SlotState.CLEAN not in states(segment)
    assert all(line.released for line in memory.made)


def test_a_bucket_without_bytes_has_a_digest_too(segment):
    memory = Memory(segment)
    memory.digests[-1] ^= 1
    with pytest.raises(CorruptSlotError):
        rebuild.fetch(segment, VERSION, 9, memory)
    assert SlotState.CLEAN not in states(segment)


def test_who_fails_first_is_told_of_and_the_others_are_woken(segment):
    memory = Memory(segment)
    waiting = threading.Barrier(2)
    woken = []

    def fail_or_wait(wanted):
        waiting.wait(SECONDS)  # both threads are in an answer
        if wanted.at == 0:
            raise ResumeError("the first cause")
        woken.append(all(line.closed.wait(SECONDS) for line in memory.made))
        raise ProtocolError("this side has hung up")

    memory.before = fail_or_wait
    with pytest.raises(ResumeError, match="the first cause"):
        rebuild.fetch(segment, VERSION, 9, memory)
    assert woken == [True]
    assert SlotState.CLEAN not in states(segment) and all(line.released for line in memory.made)


def test_another_layout_is_refused_before_anything_is_overwritten(segment):
    memory = Memory(segment)
    memory.digests.append(0)
    with pytest.raises(ResumeError, match="has another layout"):
        rebuild.fetch(segment, VERSION, 9, memory)
    assert states(segment) == {SlotState.EMPTY}


# ---- frames of many parts ----


@st.composite
def frames_of_parts(draw):
    """A frame whose parts begin and end anywhere in it, more of them than are added in one pass."""
    nbytes = draw(st.integers(1, 300))
    parts = []
    for number in range(draw(st.integers(0, 2 * kernels.MAX_SOURCES + 1))):
        at = draw(st.just(0) | st.integers(0, nbytes - 1))
        size = draw(st.just(nbytes - at) | st.integers(1, nbytes - at))
        factor = draw(st.just(1) | st.integers(1, 255))
        parts.append(Part(draw(st.integers(0, 3)), Data(3, VERSION, 1000 * number, size), factor, at))
    return Frame(
        0, nbytes, tuple(sorted(parts, key=lambda part: not (part.factor == 1 and part.wanted.nbytes == nbytes)))
    )


@settings(max_examples=150, deadline=None)
@given(frames_of_parts())
def test_the_parts_of_a_frame_add_up_in_the_slot_wherever_they_lie(frame):
    """Given a slot with bytes of an older version."""
    store = np.random.default_rng(1).integers(0, 256, 1000 * (2 * kernels.MAX_SOURCES + 2), dtype=np.uint8)
    slot = np.random.default_rng(2).integers(0, 256, frame.nbytes, dtype=np.uint8)
    expected = np.zeros(frame.nbytes, dtype=np.uint8)
    for part in frame.parts:
        source = store[part.wanted.at : part.wanted.at + part.wanted.nbytes]
        expected[part.at : part.at + len(source)] ^= TIMES[part.factor][source]

    class Stored(Memory):
        def __init__(self):
            self.bytes, self.made, self.before = store, [], lambda wanted: None

    streams = {position: Stored().stream() for position in range(4)}
    for part in frame.parts:
        streams[part.position].ask_for(part.wanted)
    scratch = list(np.full((kernels.MAX_SOURCES, 300), 99, dtype=np.uint8))
    rebuild._sum_parts(slot, frame, streams, scratch)
    assert (slot == expected).all()


@pytest.mark.parametrize("nodes, lost", [(4, (0, 1)), (4, (1, 3)), (5, (4, 0)), (9, (2, 6)), (14, (0, 13))], ids=str)
def test_two_lost_slots_are_decoded_from_all_nodes_that_are_left(job, nodes, lost):
    """Given streams of unequal length, so that frames and pieces end anywhere; with 14 nodes a frame has 12 parts."""
    sizes = [nodes * PAYLOAD_LIMIT // 2 + 4099 * node for node in range(nodes)]
    plan = plan_exchange([f"n{node}" for node in range(nodes)], [range(nodes)], sizes, 2)
    slots = [np.random.default_rng(node).integers(0, 256, size, dtype=np.uint8) for node, size in enumerate(sizes)]
    parity = {(a.section, a.stripe, a.which): np.zeros(a.nbytes, dtype=np.uint8) for areas in plan.areas for a in areas}
    for send in itertools.chain(*plan.sends):
        area, source = send.area, slots[send.node][send.start : send.stop]
        parity[area.section, area.stripe, area.which][: len(source)] ^= TIMES[power(send.exponent)][source]

    class Survivor(Memory):
        """Holds its own slot and parity, and small states and digest tables of others."""

        def __init__(self):
            self.made, self.before = [], lambda wanted: None

        def copy(self, rank, version):
            table = [
                xxhash.xxh3_64_intdigest(slots[rank][at : at + BUCKET].data) for at in range(0, sizes[rank], BUCKET)
            ]
            return bytes(msgpack.packb([SMALL, np.array(table, dtype=np.uint64).tobytes()]))

        def held(self, wanted):
            whole = slots[wanted.rank] if isinstance(wanted, Data) else parity[wanted.key]
            return whole[wanted.at : wanted.at + wanted.nbytes]

    readers = {node: Survivor() for node in range(nodes) if node not in lost}
    for rank in lost:
        path = path_of(job, "n0", rank)
        create(path, Shape(sizes[rank], 1000, -(-sizes[rank] // BUCKET), 7, 3), rank, {})
        with closing(Segment(path)) as made:
            made.ranges = [(at, min(BUCKET, sizes[rank] - at)) for at in range(0, sizes[rank], BUCKET)]
            rebuild.decode(made, VERSION, 9, plan, lost, readers)
            (slot,) = [slot for slot in made.slots() if slot.state is SlotState.CLEAN]
            assert (made.data(slot.index) == slots[rank]).all()
    remove(job, "n0")


# ---- a line to another node ----


class Answering:
    """A node's SMP that has let the caller in, and answers requests with what the test gives."""

    def __init__(self, monkeypatch, encrypt):
        ours, self.theirs = socket.socketpair()
        me = Party("smp", "a-job", "here", encrypt)
        client, server = channel.ClientHandshake(SECRET, me), channel.ServerHandshake(SECRET, me)
        proof, near = client.answer(server.challenge(client.hello()))
        self.link = FramedSocket(self.theirs, server.finish(proof), calls.BOUNDS)

        def connect(dialer, until, greet):
            dialer.connection = ours
            return greet(ours, near)

        monkeypatch.setattr(Dialer, "connect", connect)
        self.line = PipelinedPeer(("127.0.0.1", 1), me, SECRET, 1.0)

    def answer(self, payload):
        self.link.send({"ok": True}, payload)


@pytest.fixture(params=[False, True], ids=["authenticated", "encrypted"])
def node(monkeypatch, request):
    found = Answering(monkeypatch, request.param)
    yield found
    found.theirs.close()
    found.line.release()


WANTED = Data(1, VERSION, 5, 100)


def test_answers_come_in_the_order_in_which_was_asked(node):
    node.line.ask_for(WANTED)
    node.line.ask_for(Parity((2, 3, 1), VERSION, 7, 60))
    asked = [received[0] for _ in range(2) if (received := node.link.receive())]
    told = {"do": "read", "version": [2, 5]}
    assert asked[0] == {**told, "what": "data", "rank": 1, "at": 5, "nbytes": 100}
    assert asked[1] == {**told, "what": "parity", "key": [2, 3, 1], "at": 7, "nbytes": 60}
    node.answer(b"a" * 100)
    node.answer(b"b" * 60)
    first, second = np.zeros(100, dtype=np.uint8), np.zeros(60, dtype=np.uint8)
    node.line.take(first)
    node.line.take(second)
    assert first.tobytes() == b"a" * 100 and second.tobytes() == b"b" * 60


def test_a_payload_that_was_changed_on_the_way_is_an_error_and_nothing_after_it_is_taken(node):
    node.line.ask_for(WANTED)
    node.link.send({"ok": True, "bytes": 100})
    node.theirs.sendall(b"a" * 100 + bytes(TAG))
    with pytest.raises(ProtocolError, match="changed on the way"):
        node.line.take(np.zeros(100, dtype=np.uint8))
    with pytest.raises(ProtocolError, match="hung up"):
        node.line.take(np.zeros(100, dtype=np.uint8))


@pytest.mark.parametrize("nbytes", [0, 99, 101])
def test_another_number_of_bytes_than_was_asked_for_is_refused(node, nbytes):
    node.line.ask_for(WANTED)
    node.answer(b"a" * nbytes)
    with pytest.raises(ProtocolError, match=f"expected 100 bytes, found {nbytes}"):
        node.line.take(np.zeros(100, dtype=np.uint8))


def test_a_refusal_arrives_as_the_error_it_was(node):
    node.line.ask_for(WANTED)
    node.link.send(protocol.refusal(CorruptSlotError("version 2.5 is not in memory any more")))
    with pytest.raises(CorruptSlotError, match="not in memory"):
        node.line.take(np.zeros(100, dtype=np.uint8))


@pytest.mark.parametrize("sent", [b"", b"a" * 60], ids=["nothing", "a part"])
def test_silence_ends_by_itself_and_names_the_node(node, sent):
    node.line.ask_for(WANTED)
    if sent:
        node.link.send({"ok": True, "bytes": 100})
        node.theirs.sendall(sent)
    with pytest.raises(ProtocolError, match=r"127\.0\.0\.1:1 cannot be read: no answer within 1 s"):
        node.line.take(np.zeros(100, dtype=np.uint8))


def test_a_line_that_is_closed_by_another_thread_wakes_who_waits(node):
    node.line.ask_for(WANTED)
    failures = []

    def wait():
        try:
            node.line.take(np.zeros(100, dtype=np.uint8))
        except FtError as error:
            failures.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    node.line.close()
    waiting.join(SECONDS)
    assert not waiting.is_alive() and isinstance(failures[0], ProtocolError)


def test_what_a_rank_computes_again_is_not_fetched_and_data_without_a_digest_is_corrupt(segment):
    path = segment.path.with_name(f"{segment.path.name}0")
    create(path, replace(segment.shape, parity_nbytes=NBYTES - BUCKET), segment.rank, {})
    try:
        other = Segment(path)
        other.ranges = segment.ranges
        memory = Memory(segment)
        memory.digests[1] = NOT_COMPUTED
        rebuild.fetch(other, VERSION, 9, memory)
        assert not other.has_parity(VERSION)
        memory.digests[0] = NOT_COMPUTED
        with pytest.raises(CorruptSlotError, match="bucket 0 "):
            rebuild.fetch(other, VERSION, 9, memory)
    finally:
        path.unlink()
