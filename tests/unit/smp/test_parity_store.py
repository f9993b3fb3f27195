"""The store: every byte of every source goes in once, whatever comes twice, too early, cut, or of another version.

Parity is compared with sums over GF(256) that are reckoned here, bit by bit. Deaths are real ones, of forked children.
"""

import os
import signal
import threading
from collections import defaultdict
from contextlib import contextmanager
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ft_plugins.base import faults
from ft_plugins.errors import ProtocolError, SegmentError
from ft_plugins.redundancy import kernels
from ft_plugins.redundancy.exchange_plan import plan_exchange
from ft_plugins.smp.exchange import parity_store as module
from ft_plugins.smp.exchange.parity_store import ParityStore, shape_of
from ft_plugins.snapshot.segment.paths import parity_path_of, remove
from ft_plugins.snapshot.segment.segment import Segment, create
from ft_plugins.snapshot.segment.shape import Shape
from ft_plugins.snapshot.segment.slots import SlotState, Version

BUCKET = 512  # so that a few KB have several digests
FRAME = 300
LAYOUT = 4711
SECONDS = 90
V1, V2, V3 = Version(1, 1), Version(1, 2), Version(2, 3)
PLANS = {
    "RAIM5, 2+1+1 ranks": plan_exchange(list("aabc"), [(0, 1, 2, 3)], [3900, 50, 5200, 4111], 1),
    "RAIM5, two sections": plan_exchange(list("aabbcc"), [(0, 2, 4), (1, 3, 5)], [900, 10, 901, 1500, 0, 700], 1),
    "RAIM6": plan_exchange(list("abcde"), [(0, 1, 2, 3, 4)], [3000, 1, 2000, 2999, 1024], 2),
}
POSITION = 1


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(module, "BUCKET", BUCKET)


def times_two_to(exponent, part):
    """2**exponent * part over GF(256)."""
    found = part.astype(np.uint16)
    for _ in range(exponent):
        found = np.where(found & 0x80, (found << 1) ^ 0x11D, found << 1)
    return found.astype(np.uint8)


class Sources:
    """What the other nodes send to one position: all slots of a job at one version."""

    def __init__(self, plan, version, position=POSITION):
        rng = np.random.default_rng(version.iteration)
        self.version = version
        ranks = [extent for section in plan.sections for stream in section.streams for extent in stream]
        slots = {extent.rank: rng.integers(0, 256, extent.nbytes, dtype=np.uint8) for extent in ranks}
        self.blocks = {}  # by area and node of the section
        self.exponents = {}
        self.parity = {(a.section, a.stripe, a.which): np.zeros(a.nbytes, np.uint8) for a in plan.areas[position]}
        for send in (send for sends in plan.sends for send in sends if send.area.position == position):
            key = (send.area.section, send.area.stripe, send.area.which)
            parts = plan.sections[send.area.section].extents(send.node, send.start, send.stop)
            block = np.concatenate(
                [np.empty(0, np.uint8), *(slots[p.rank][p.offset : p.offset + p.nbytes] for p in parts)]
            )
            self.blocks[key, send.node] = block
            self.exponents[key, send.node] = send.exponent
            self.parity[key][: len(block)] ^= times_two_to(send.exponent, block)
        self.copies = {rank: rng.bytes(100 + 200 * rank) for rank in plan.small_state_on(position)}

    def frame(self, source, at, nbytes=FRAME):
        """The arguments of `take`."""
        key, node = source
        return self.version, key, node, at, self.exponents[source], self.blocks[source][at : at + nbytes]

    def part(self, rank, at, nbytes=FRAME):
        """The arguments of `take_copy`."""
        whole = np.frombuffer(self.copies[rank], dtype=np.uint8)
        return self.version, rank, at, len(whole), whole[at : at + nbytes]

    def send_blocks(self, store):
        """All that is not there yet, in order."""
        nodes = sorted({(key[0], node) for key, node in self.blocks})
        for *key, node, done in store.taken(self.version, nodes) or ():
            section, stripe, which = key
            source = ((section, stripe, which), node)
            while done < len(self.blocks[source]):
                done = store.take(*self.frame(source, done))

    def send_copies(self, store):
        for rank in self.copies.keys() - set(store.copied(self.version, list(self.copies))):
            at = 0
            while at < len(self.copies[rank]):
                at = store.take_copy(*self.part(rank, at))

    def give(self, store):
        """Everything, until the version is complete."""
        store.begin(self.version)
        self.send_blocks(store)
        self.send_copies(store)

    def check(self, store):
        """Every byte that the store hands out of this version is right."""
        for key, expected in self.parity.items():
            assert (store.read(self.version, key, 0, len(expected)) == expected).all(), f"parity {key}"
        for rank, copy in self.copies.items():
            assert store.copy(self.version, rank) == copy


def shapes_of(plan, small=1500):
    sizes = {e.rank: e.nbytes for section in plan.sections for stream in section.streams for e in stream}
    return [Shape(sizes[rank], small, -(-sizes[rank] // BUCKET), 7) for rank in sorted(sizes)]


def open_vault(job, plan, position=POSITION, small=1500, layout=LAYOUT):
    shape = shape_of(plan, position, shapes_of(plan, small), layout)
    return ParityStore(parity_path_of(job, "n"), plan, position, shape)


@pytest.fixture
def make(job):
    """Opens the store of the job's one node; another call opens it as a new SMP would."""
    made = []

    def open_again(plan, **kwargs):
        made.append(open_vault(job, plan, **kwargs))
        return made[-1]

    yield open_again
    for store in made:
        if hasattr(store._segment, "bytes"):  # not closed by the test itself
            store.close()
    remove(job, "n")


@pytest.fixture(params=PLANS)
def plan(request):
    return PLANS[request.param]


RAIM5 = PLANS["RAIM5, 2+1+1 ranks"]


def raw(job):
    """The store's file, to damage it."""
    return Segment(parity_path_of(job, "n"))


def incomplete(store, sources):
    assert sources.version not in store.versions()
    with pytest.raises(SegmentError, match="is not here"):
        store.read(sources.version, next(iter(sources.parity)), 0, 1)
    with pytest.raises(SegmentError, match="is not here"):
        store.copy(sources.version, next(iter(sources.copies)))


# ---- gathering ----


@contextmanager
def opened(job, plan):
    store = open_vault(job, plan)
    try:
        yield store
    finally:
        store.close()
        remove(job, "n")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(PLANS)), st.integers(0, 2**32 - 1))
def test_frames_that_come_twice_too_early_cut_or_in_any_order_go_in_once(job, name, seed):
    plan, random = PLANS[name], Random(seed)
    sources = Sources(plan, V1)
    done = dict.fromkeys(sources.blocks, 0)
    held = dict.fromkeys(sources.copies, 0)
    with opened(job, plan) as store:
        store.begin(V1)
        for _ in range(random.randrange(200)):
            if random.random() < 0.2:
                rank = random.choice(sorted(held))
                at = random.choice([held[rank], random.randrange(len(sources.copies[rank]))])
                version, _, _, total, part = sources.part(rank, at, random.randrange(1, 400))
                held[rank] += len(part) if at == held[rank] else 0
                assert store.take_copy(version, rank, at, total, part) == held[rank]
            else:
                source = random.choice(sorted(done))
                at = random.choice([done[source], random.randrange(len(sources.blocks[source]) + 1)])
                *arguments, frame = sources.frame(source, at, random.randrange(1, 700))
                done[source] += len(frame) if at == done[source] else 0
                assert store.take(*arguments, frame) == done[source]
            whole = {rank for rank in held if held[rank] == len(sources.copies[rank])}
            assert set(store.copied(V1, sorted(held))) == whole
            complete = len(whole) == len(held) and all(done[s] == len(sources.blocks[s]) for s in done)
            assert store.versions() == ((V1,) if complete else ())
        sections = sorted({(key[0], node) for key, node in done})
        for section, node in sections:
            told = store.taken(V1, [(section, node)])
            expected = [[*key, n, at] for (key, n), at in done.items() if (key[0], n) == (section, node)]
            assert sorted(told or []) == sorted(expected), "where the sender goes on"
        left = [  # and whether the rest is here already
            (sources.send_blocks, all(held[rank] == len(copy) for rank, copy in sources.copies.items())),
            (sources.send_copies, all(done[source] == len(block) for source, block in sources.blocks.items())),
        ]
        random.shuffle(left)
        (first, complete), (last, _) = left
        first(store)
        assert store.versions() == ((V1,) if complete else ())
        last(store)
        sources.check(store)


@pytest.mark.parametrize("round_", range(4))
def test_senders_and_those_who_repeat_them_may_all_come_at_once(make, plan, round_):
    """Each source by two threads, as after a broken connection whose handler is still at work."""
    store, sources = make(plan), Sources(plan, V1)
    store.begin(V1)
    failures = []
    together = threading.Barrier(2 * len(sources.blocks) + len(sources.copies) + 1)

    def send(source, random):
        together.wait(SECONDS)
        done = 0
        while done < len(sources.blocks[source]):
            at = random.choice([done, done, max(0, done - FRAME), done + 1])
            done = store.take(*sources.frame(source, at, random.randrange(1, FRAME)))

    def send_copy(rank, random):
        together.wait(SECONDS)
        at = 0
        while at < len(sources.copies[rank]):
            at = store.take_copy(*sources.part(rank, at, random.randrange(1, FRAME)))

    def begin_again(_, random):
        together.wait(SECONDS)
        for _ in range(50):
            store.begin(V1)
            store.taken(V1, [(0, 0)])

    def guarded(function, *args):
        try:
            function(*args)
        except BaseException as error:
            failures.append(error)

    work = [(send, source) for source in sources.blocks for _ in range(2)]
    work += [(send_copy, rank) for rank in sources.copies] + [(begin_again, None)]
    threads = [
        threading.Thread(target=guarded, args=(function, what, Random(round_ * 100 + number)))
        for number, (function, what) in enumerate(work)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    assert not failures
    assert store.versions() == (V1,)
    sources.check(store)


def test_nothing_of_a_complete_version_is_changed_by_frames_that_come_after(make):
    store, sources = make(RAIM5), Sources(RAIM5, V1)
    sources.give(store)
    for source, block in sources.blocks.items():
        assert store.take(*sources.frame(source, 0)) == len(block)
    for rank, copy in sources.copies.items():
        assert store.take_copy(*sources.part(rank, 0)) == len(copy)
    store.begin(V1)
    assert store.versions() == (V1,)
    sections = sorted({(key[0], node) for key, node in sources.blocks})
    told = store.taken(V1, sections) or []
    assert {((s, x, w), node): done for s, x, w, node, done in told} == {
        source: len(block) for source, block in sources.blocks.items()
    }
    sources.check(store)


def test_frames_that_no_plan_has_are_refused_and_leave_nothing_behind(make):
    store, sources = make(RAIM5), Sources(RAIM5, V1)
    store.begin(V1)
    source = max(sources.blocks, key=lambda found: len(sources.blocks[found]))
    (key, node), block = source, sources.blocks[source]
    own = next(area for area in RAIM5.areas[0])
    long = np.ones(len(block) + 1, dtype=np.uint8)
    for arguments in [
        (V1, key, node, 0, 0, long),
        (V1, key, node, len(block), 0, np.ones(1, dtype=np.uint8)),
        (V1, key, node, 1 << 62, 0, np.ones(1, dtype=np.uint8)),
        (V1, key, POSITION, 0, 0, block[:1]),  # of this node itself
        (V1, key, 99, 0, 0, block[:1]),
        (V1, (own.section, own.stripe, own.which), node, 0, 0, block[:1]),  # kept on another node
        (V1, (7, 0, 0), node, 0, 0, block[:1]),
        (V2, key, node, 0, 0, block[:1]),
    ]:
        with pytest.raises(ProtocolError):
            store.take(*arguments)
    elsewhere = next(rank for rank in range(4) if rank not in sources.copies)
    rank = next(iter(sources.copies))
    for copy in [(V1, elsewhere, 0, 10, block[:10]), (V1, rank, 0, 1 << 40, block[:10])]:
        with pytest.raises(ProtocolError):
            store.take_copy(*copy)
    assert all(not done for *_, done in store.taken(V1, [(0, other) for other in range(4)]) or [])
    sources.give(store)
    sources.check(store)


def test_a_job_without_captured_bytes_has_copies_alone(make):
    plan = plan_exchange(list("abc"), [(0, 1, 2)], [0, 0, 0], 1)
    store, sources = make(plan), Sources(plan, V1)
    store.begin(V1)
    assert store.versions() == ()
    sources.send_copies(store)
    assert store.versions() == (V1,)
    sources.check(store)


# ---- one version after another ----


def test_a_version_that_is_given_up_leaves_no_byte_in_the_next_one(make):
    store, first, second = make(RAIM5), Sources(RAIM5, V1), Sources(RAIM5, V2)
    store.begin(V1)
    first.send_blocks(store)
    store.begin(V2)
    incomplete(store, first)
    assert store.taken(V1, [(0, 0)]) is None
    with pytest.raises(ProtocolError, match="is not being received here"):
        store.take(*first.frame(next(iter(first.blocks)), 0))
    second.send_blocks(store)
    second.send_copies(store)
    assert store.versions() == (V2,)
    second.check(store)


def test_beginning_a_version_takes_no_longer_for_more_parity_each_frame_clears_what_it_comes_to(make, plan):
    """Beats and directives wait for it: gigabytes are not touched under their lock."""
    store, first, second = make(plan), Sources(plan, V1), Sources(plan, V2)
    for slot in range(2):
        store._segment.data(slot)[:] = 0xEE
    store.begin(V1)
    assert (store._segment.data(store._index) == 0xEE).all()
    first.send_blocks(store)
    first.send_copies(store)
    first.check(store)
    second.give(store)
    second.check(store)


def test_a_factor_that_the_plan_does_not_have_is_refused(make):
    plan = PLANS["RAIM6"]
    store, sources = make(plan), Sources(plan, V1)
    store.begin(V1)
    source = next(source for source in sources.blocks if sources.exponents[source] and len(sources.blocks[source]))
    version, key, node, at, exponent, frame = sources.frame(source, 0)
    with pytest.raises(ProtocolError, match=rf"2\*\*0, but the plan of this node expects 2\*\*{exponent}"):
        store.take(version, key, node, at, 0, frame)
    sources.give(store)
    sources.check(store)


def test_the_next_version_does_not_begin_while_a_frame_is_being_added(make, monkeypatch):
    store, first, second = make(RAIM5), Sources(RAIM5, V1), Sources(RAIM5, V2)
    store.begin(V1)
    source = next(source for source, block in first.blocks.items() if len(block))
    adding, go_on = threading.Event(), threading.Event()
    add, refused = kernels.combine_into, []

    def slowly(*arguments):
        adding.set()
        assert go_on.wait(SECONDS)
        add(*arguments)

    def take():
        try:
            store.take(*first.frame(source, 0))
        except ProtocolError as error:
            refused.append(error)

    monkeypatch.setattr(kernels, "combine_into", slowly)
    taking, beginning = threading.Thread(target=take), threading.Thread(target=store.begin, args=(V2,))
    taking.start()
    assert adding.wait(SECONDS)
    beginning.start()
    beginning.join(0.2)
    assert beginning.is_alive(), "it would clear what is being written to"
    monkeypatch.setattr(kernels, "combine_into", add)
    go_on.set()
    for thread in (taking, beginning):
        thread.join(SECONDS)
        assert not thread.is_alive()
    assert not refused, "the frame was in time"
    second.send_blocks(store)
    second.send_copies(store)
    second.check(store)


def test_what_counts_is_kept_while_others_come_and_go(make):
    store, first, second, third = make(RAIM5), *(Sources(RAIM5, version) for version in (V1, V2, V3))
    first.give(store)
    store.pin(V1)
    second.give(store)
    for version in (V1, V2):
        store.begin(version)
        assert set(store.versions()) == {V1, V2}, "what is complete is not received again"
    third.give(store)
    assert set(store.versions()) == {V1, V3}, "it took the place of what did not count"
    first.check(store)
    store.pin(V3)
    store.begin(V2)
    assert store.versions() == (V3,), "and now what counted before makes room"
    second.send_blocks(store)
    third.check(store)


def test_what_counts_is_still_kept_by_the_next_smp(make):
    store, first, second, third = make(RAIM5), *(Sources(RAIM5, version) for version in (V1, V2, V3))
    second.give(store)
    first.give(store)
    store.pin(V2)
    store.close()
    again = make(RAIM5)
    assert set(again.versions()) == {V1, V2}
    third.give(again)
    assert set(again.versions()) == {V2, V3}
    second.check(again)


@pytest.mark.parametrize(("base", "left"), [(V2, {V1, V2}), (V1, {V1}), (Version(1, 0), set()), (None, set())])
def test_what_is_newer_than_what_a_recovery_restored_is_void(make, job, base, left):
    store, first, second = make(RAIM5), Sources(RAIM5, V1), Sources(RAIM5, V2)
    first.give(store)
    second.give(store)
    store.pin(V2)
    store.void_after(base)
    assert set(store.versions()) == left
    for sources in (first, second):
        sources.check(store) if sources.version in left else incomplete(store, sources)
    segment = raw(job)
    assert all(slot.state is SlotState.CLEAN or not slot.pins for slot in segment.slots()), "pinned by what is void"
    segment.close()
    store.close()
    again, third = make(RAIM5), Sources(RAIM5, V3)
    assert set(again.versions()) == left
    third.give(again)
    assert V3 in again.versions()


def test_a_paused_parity_store_receives_nothing_and_still_serves_complete_versions(make):
    store, first, second = make(RAIM5), Sources(RAIM5, V1), Sources(RAIM5, V2)
    first.give(store)
    store.begin(V2)
    second.send_copies(store)
    store.pause()
    assert store.taken(V2, [(0, 0)]) is None
    with pytest.raises(ProtocolError, match="is not being received here"):
        store.take(*second.frame(next(iter(second.blocks)), 0))
    first.check(store)
    second.give(store)
    second.check(store)


# ---- deaths ----


def die_in_a_child(job, armed, sources, kept=None):
    """A process gathers `sources` and is killed at the fault point; returns when it is gone."""
    pid = os.fork()
    if pid == 0:
        try:
            store = open_vault(job, RAIM5)
            if kept is not None:
                kept.give(store)
                store.pin(kept.version)
            faults.arm(armed)
            sources.give(store)
        finally:
            os._exit(7)  # it has not reached the point
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize(
    "armed", [f"parity_store.xored@hit={hit}:kill" for hit in (1, 2, 9)] + ["parity_store.seal.before:kill"]
)
def test_a_death_between_any_two_steps_leaves_what_counted_and_the_rest_is_gathered_anew(make, job, armed):
    first, second = Sources(RAIM5, V1), Sources(RAIM5, V2)
    die_in_a_child(job, armed, second, kept=first)
    store = make(RAIM5)
    assert store.versions() == (V1,) and store.taken(V2, [(0, 0)]) is None
    incomplete(store, second)
    first.check(store)
    store.begin(V2)
    assert all(not done for *_, done in store.taken(V2, [(0, node) for node in range(4)]) or [[1]])
    second.give(store)
    assert set(store.versions()) == {V1, V2}
    second.check(store)
    first.check(store)


def test_an_error_between_the_bytes_and_their_cursor_leaves_nothing_that_is_taken_for_complete(make):
    store, sources = make(RAIM5), Sources(RAIM5, V1)
    store.begin(V1)
    sources.send_copies(store)
    faults.arm("parity_store.xored@hit=3:raise")
    with pytest.raises(RuntimeError, match="parity_store.xored"):
        sources.send_blocks(store)
    faults.arm("")
    incomplete(store, sources)
    store.close()
    again = make(RAIM5)
    incomplete(again, sources)
    sources.give(again)
    sources.check(again)


# ---- adoption ----


def test_a_new_smp_finds_what_is_complete_byte_by_byte(make, plan):
    store, sources = make(plan), Sources(plan, V1)
    assert store.taken(V1, [(0, 0)]) is None, "nobody gathers it yet"
    sources.give(store)
    assert store.resident_bytes >= store.nbytes
    inode = os.stat(store._segment.path).st_ino
    store.close()
    again = make(plan)
    assert again.versions() == (V1,) and os.stat(again._segment.path).st_ino == inode
    sources.check(again)
    assert set(again.copied(V1, list(sources.copies))) == set(sources.copies)
    for section, node in {(key[0], node) for key, node in sources.blocks}:
        told = again.taken(V1, [(section, node)])
        assert sorted(told or []) == sorted(
            [*key, n, len(block)] for (key, n), block in sources.blocks.items() if (key[0], n) == (section, node)
        ), "nothing is sent again"


def test_a_new_smp_with_smaller_copies_uses_the_same_pages_and_with_larger_ones_does_not(make):
    sources = Sources(RAIM5, V1)
    sources.give(make(RAIM5))
    assert make(RAIM5, small=1000).versions() == (V1,)
    assert make(RAIM5, small=9000).versions() == ()


@pytest.mark.parametrize("change", ["layout", "position", "plan"])
def test_parity_of_another_plan_or_position_is_not_taken_over(make, change):
    even = plan_exchange(list("abc"), [(0, 1, 2)], [1000] * 3, 1)
    Sources(even, V1).give(make(even))
    again = {
        "layout": lambda: make(even, layout=LAYOUT + 1),
        "position": lambda: make(even, position=2),
        "plan": lambda: make(plan_exchange(list("abc"), [(0, 1, 2)], [2000] * 3, 1)),
    }[change]()
    assert again.versions() == () and again.taken(V1, [(0, 0)]) is None


# ---- reading ----


def test_any_range_of_a_block_can_be_read_and_nothing_beyond_it(make, plan):
    store, sources = make(plan), Sources(plan, V1)
    sources.give(store)
    random = Random(3)
    for key, expected in sources.parity.items():
        for _ in range(20):
            at = random.randrange(len(expected) + 1)
            nbytes = random.randrange(len(expected) - at + 1)
            assert (store.read(V1, key, at, nbytes) == expected[at : at + nbytes]).all()
        for at, nbytes in [(0, len(expected) + 1), (len(expected), 1), (1 << 60, 1)]:
            with pytest.raises(ProtocolError, match="are not in parity"):
                store.read(V1, key, at, nbytes)
    with pytest.raises(ProtocolError, match="are not in parity"):
        store.read(V1, (9, 9, 9), 0, 1)
    with pytest.raises(SegmentError, match=r"1 \(lineage 1\)"):
        store.read(V2, next(iter(sources.parity)), 0, 1)
    with pytest.raises(SegmentError, match="holds no copy of rank"):
        store.copy(V1, next(rank for rank in range(9) if rank not in sources.copies))


def test_a_flipped_byte_is_never_handed_out(make, job, plan):
    """Every byte in turn: what is read is right or refused, and what is not near it is still read."""
    store, sources = make(plan), Sources(plan, V1)
    sources.give(store)
    segment = raw(job)
    (index,) = [slot.index for slot in segment.slots() if slot.state is SlotState.CLEAN]
    read = defaultdict(int)
    for at in range(0, segment.shape.nbytes, 97):
        segment.data(index)[at] ^= 0x10
        for area in plan.areas[POSITION]:
            key = (area.section, area.stripe, area.which)
            for start in range(0, area.nbytes, FRAME):
                nbytes = min(FRAME, area.nbytes - start)
                low, high = area.offset + start, area.offset + start + nbytes
                struck = low // BUCKET <= at // BUCKET <= (high - 1) // BUCKET
                read[struck] += 1
                if struck:
                    with pytest.raises(SegmentError, match="parity is damaged: bucket .* does not match its digest"):
                        store.read(V1, key, start, nbytes)
                else:
                    assert (store.read(V1, key, start, nbytes) == sources.parity[key][start : start + nbytes]).all()
        segment.data(index)[at] ^= 0x10
    assert read[True] and read[False]
    segment.close()
    sources.check(store)


def test_a_flipped_byte_of_copies_or_digests_makes_the_version_one_that_is_not_used_and_is_called_damaged(make, job):
    store, sources = make(RAIM5), Sources(RAIM5, V1)
    sources.give(store)
    segment = raw(job)
    small = segment._area(0, segment.shape.table_room, segment.shape.small_nbytes)
    for place in (small[40:41], segment.digests(0).view(np.uint8)[5:6]):
        assert store.damage == ""
        place ^= 1
        assert V1 not in store.versions()
        assert store.damage == "the parity in slot 0 is damaged, so the version there is not used"
        for read in (lambda: store.read(V1, next(iter(sources.parity)), 0, 1), lambda: store.copy(V1, 0)):
            with pytest.raises(SegmentError, match="cannot be read: the parity in slot 0 is damaged"):
                read()
        place ^= 1
        sources.check(store)
    del small, place
    segment.close()


# ---- what is not so yet ----


def death_between_creation_and_ranges(job, plan):
    path = parity_path_of(job, "n")
    create(path, shape_of(plan, POSITION, shapes_of(plan), LAYOUT), POSITION, {})


def test_a_vault_whose_smp_died_while_it_was_made_verifies_every_byte_all_the_same(make, job):
    death_between_creation_and_ranges(job, RAIM5)
    store, sources = make(RAIM5), Sources(RAIM5, V1)
    sources.give(store)
    segment = raw(job)
    (index,) = [slot.index for slot in segment.slots() if slot.state is SlotState.CLEAN]
    segment.data(index)[0] ^= 1
    segment.close()
    with pytest.raises(SegmentError, match="does not match its digest"):
        store.read(V1, next(iter(sources.parity)), 0, 64)


def test_a_copy_of_a_version_that_is_not_being_received_is_refused_like_its_frames(make):
    store, sources = make(RAIM5), Sources(RAIM5, V1)
    with pytest.raises(ProtocolError, match="is not being received here"):
        store.take_copy(*sources.part(next(iter(sources.copies)), 0))


def test_copies_that_are_whole_of_one_version_are_not_of_another(make):
    store, sources = make(RAIM5), Sources(RAIM5, V1)
    store.begin(V1)
    sources.send_copies(store)
    assert set(store.copied(V1, list(sources.copies))) == set(sources.copies)
    assert store.copied(V2, list(sources.copies)) == []


def test_closing_twice_is_closing(make):
    store = make(RAIM5)
    store.close()
    store.close()


def test_a_copy_does_not_grow_beyond_what_was_announced(make):
    store, sources = make(RAIM5), Sources(RAIM5, V1)
    store.begin(V1)
    rank, part = next(iter(sources.copies)), np.ones(1 << 16, dtype=np.uint8)
    with pytest.raises(ProtocolError):
        for at in range(0, 1 << 20, len(part)):
            store.take_copy(V1, rank, at, 100, part)
