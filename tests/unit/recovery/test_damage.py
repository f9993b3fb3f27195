"""Bytes of segments change by themselves: a job still resumes from what is whole, or says what is not; never from zero.

The SMP's own code attaches, a rank is a thread; around them stands a gather in miniature. Bits and words of one rank's
segment are changed between two starts of a job: its header page, headers, digest tables and small state of its slots.
"""

import itertools
import os
import threading
from dataclasses import asdict, dataclass, field
from functools import partial

import msgpack
import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ft_plugins import errors
from ft_plugins.errors import CorruptSlotError, FtError, ProtocolError, ResumeError, SegmentError
from ft_plugins.events import Events
from ft_plugins.recovery.facts import NodeFacts
from ft_plugins.recovery.recovery_plan import RecoveryPlan, Way, plan_recovery
from ft_plugins.recovery.restore import _facts, _read_facts, agree_on_version
from ft_plugins.recovery.source_choice import choose_source
from ft_plugins.redundancy.exchange_plan import plan_exchange
from ft_plugins.smp.serve.owner import SnapshotProcess
from ft_plugins.snapshot.segment.header import _RECORDS, MirroredRecord
from ft_plugins.snapshot.segment.paths import path_of, remove
from ft_plugins.snapshot.segment.segment import Segment
from ft_plugins.snapshot.segment.shape import PAGE, Shape
from ft_plugins.snapshot.segment.slots import SlotState, Version, choose, voided_slots

RANKS = (0, 1, 2)
SHAPE = Shape(nbytes=300, small_nbytes=100, buckets=3, layout=0xFEEDFACECAFEBEEF)
RANGES = [(0, 128), (128, 128), (256, 44)]
FINGERPRINT = {"layers": 2, "order": ["tp", "dp"]}
ITERATIONS = (4, 5, 6)
_WAIT_SECONDS = 90.0

LINEAGE_WORD = 8  # offset in the header of a slot
HEADER = range(0, 512)
FIRST_SLOT = SHAPE.slots_start
AREAS = {  # in which bytes are changed, by what they belong to
    "header": [HEADER, range(1024, 1024 + 60)],
    "ranges": [range(PAGE, PAGE + 16 * SHAPE.buckets)],
    **{
        f"slot {index}": [
            range(start, start + 72),
            range(start + PAGE, start + PAGE + 8 * SHAPE.digests),
            range(start + PAGE + SHAPE.table_room, start + PAGE + SHAPE.table_room + 8),
            range(start + SHAPE.slot_room - PAGE, start + SHAPE.slot_room - PAGE + SHAPE.nbytes),
        ]
        for index in range(SHAPE.slots)
        for start in [FIRST_SLOT + index * SHAPE.slot_room]
    },
}


@dataclass
class Start:
    """What one start of the job came to: a plan, or what refused it."""

    plan: RecoveryPlan | None = None
    refused: str = ""
    error: FtError | None = None
    reported: list[FtError] = field(default_factory=list)
    restored: list[bool] = field(default_factory=list)


class Gather:
    """All ranks of the job, as threads of this process."""

    def __init__(self, rank, said, barrier):
        self.rank, self.world_size = rank, len(said)
        self._said, self._barrier = said, barrier

    def gather(self, payload):
        self._said[self.rank] = payload
        self._barrier.wait(_WAIT_SECONDS)
        found = list(self._said)
        self._barrier.wait(_WAIT_SECONDS)
        return found


class Job:
    """A job of three ranks on one node, between two starts, if not of other `ranks`."""

    def __init__(self, name, run_dir, ranks=RANKS):
        self.name, self.run_dir, self.ranks = name, run_dir, ranks
        self.seen = []

    def path(self, rank):
        return path_of(self.name, "n", rank)

    def smp(self):
        """An SMP that has adopted what is there."""
        events = Events("n")
        events.subscribe(self.seen.append)
        return SnapshotProcess(self.run_dir, self.name, "n", events)

    def attach(self, smp, rank, token, fresh=False):
        return smp.answer(
            {"do": "attach", "rank": rank, "token": token, "shape": asdict(SHAPE), "fingerprint": FINGERPRINT,
             "pid": 0, "fresh": fresh, "world_size": len(self.ranks)}
        )  # fmt: skip

    def train(self):
        """From the beginning, to three versions on every rank."""
        smp = self.smp()
        token = smp.answer({"do": "fence"})["token"]
        for rank in self.ranks:
            assert self.attach(smp, rank, token)["ok"]
            assert smp.answer({"do": "restore", "rank": rank, "token": token, "lineage": 1, "base": None})["ok"]
            segment = Segment(self.path(rank))
            segment.ranges = RANGES
            for index, iteration in enumerate(ITERATIONS):
                capture(segment, index, Version(1, iteration), token)
            segment.header.completed = max(ITERATIONS)

    def start(self, smp, mode="auto"):
        """The same command again, until a lineage is opened or something is refused."""
        fenced = smp.answer({"do": "fence"})
        assert fenced["ok"], fenced
        token = fenced["token"]
        for rank in RANKS:
            reply = self.attach(smp, rank, token, mode == "fresh")
            if not reply["ok"]:
                assert issubclass(getattr(errors, reply["error"]), FtError)
                return Start(refused=reply["message"])
        assert smp.answer({"do": "status"})["ok"] and smp.answer({"do": "inventory"})["ok"]
        begun = Start()
        segments = [Segment(self.path(rank)) for rank in RANKS]
        for segment in segments:
            segment.ranges = RANGES  # the trainer's layout
        try:
            begun.plan = choose_source(agreed(segments, begun.reported.append), mode, 0)
        except FtError as error:
            begun.error = error
            return begun
        base = begun.plan.version
        begun.restored = [base is None or restorable(segment, base) for segment in segments]
        for rank in RANKS:
            opened = {"lineage": begun.plan.lineage, "base": [base.lineage, base.iteration] if base else None}
            assert smp.answer({"do": "restore", "rank": rank, "token": token, **opened})["ok"]
        return begun


def small_of(rank, version):
    return f"{rank} at {version.iteration}".encode()


def data_of(rank, version):
    return np.random.default_rng([rank, version.iteration]).integers(0, 256, SHAPE.nbytes, dtype=np.uint8)


def capture(segment, index, version, token):
    data, small = data_of(segment.rank, version), small_of(segment.rank, version)
    digests = np.array([xxhash.xxh3_64_intdigest(data[a : a + n].tobytes()) for a, n in RANGES], dtype=np.uint64)
    segment.dirty(index, version, token)
    segment.write_small(index, small)
    segment.data(index)[:] = data
    segment.digests(index)[:] = digests
    segment.set_cursor(index, None)
    segment.seal(index, version, token, small, digests)


def restorable(segment, version):
    """Whether what would be restored is what was captured."""
    (index,) = [slot.index for slot in segment.slots() if slot.version == version and slot.state is SlotState.CLEAN]
    same = (segment.data(index) == data_of(segment.rank, version)).all()
    return bool(same) and segment.small(index) == small_of(segment.rank, version)


def agreed(segments, report, nodes=None):
    """What all ranks agree on. Raises what all of them raise alike."""
    said, barrier = [b""] * len(segments), threading.Barrier(len(segments))
    found = [None] * len(segments)

    def run(rank):
        try:
            gather = Gather(rank, said, barrier)
            found[rank] = agree_on_version(segments[rank], gather, report, nodes and nodes[rank])
        except BaseException as error:
            found[rank] = error
            if not isinstance(error, FtError):
                barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(segments))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _WAIT_SECONDS)
    for outcome in found:
        if isinstance(outcome, BaseException) and not isinstance(outcome, FtError | threading.BrokenBarrierError):
            raise outcome
    assert len({repr(outcome) for outcome in found}) == 1, found
    if isinstance(found[0], FtError):
        raise found[0]
    return found[0]


@pytest.fixture
def trained(job, tmp_path):
    """A job that has trained, and the bytes of its segments."""
    made = Job(job, tmp_path)
    made.train()
    yield made, {rank: made.path(rank).read_bytes() for rank in RANKS}
    remove(job, "n")


def put_back(job, kept):
    for rank, content in kept.items():
        job.path(rank).unlink(missing_ok=True)
        fd = os.open(job.path(rank), os.O_RDWR | os.O_CREAT, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(content)
    (job.run_dir / "token").unlink(missing_ok=True)
    job.seen.clear()


def flip(job, rank, at, mask):
    with open(job.path(rank), "r+b") as file:
        file.seek(at)
        (before,) = file.read(1)
        file.seek(at)
        file.write(bytes([before ^ mask]))


@st.composite
def changes(draw):
    """What is hit, and by what: see `apply`."""
    area = draw(st.sampled_from(sorted(AREAS)))
    found = []
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.sampled_from([place for part in AREAS[area] for place in part]))
        if draw(st.booleans()):
            found.append((at, bytes([1 << draw(st.integers(0, 7))])))
        else:
            words = st.one_of(st.sampled_from([0, 1, 2, 3, 7, 2**32, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1))
            found.append((at // 8 * 8, draw(words).to_bytes(8, "little")))
    return area, found


def apply(job, rank, hits):
    """Change bytes at these offsets: one byte is a bit that flips, eight are a word that is written."""
    content = bytearray(job.path(rank).read_bytes())
    for at, what in hits:
        if len(what) == 1:
            content[at] ^= what[0]
        else:
            content[at : at + 8] = what
    with open(job.path(rank), "r+b") as file:
        file.write(content)


@settings(
    max_examples=200, derandomize=True, deadline=None, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # every example puts the files back
)  # fmt: skip
@given(data=st.data())
def test_whatever_changes_in_one_ranks_segment_the_job_resumes_from_what_is_whole_or_refuses(trained, data):
    job, kept = trained
    put_back(job, kept)
    adopted = data.draw(st.booleans(), "the SMP has the segment mapped when it changes")
    smp = job.smp() if adopted else None
    rank = data.draw(st.sampled_from(RANKS), "rank")
    area, hits = data.draw(changes(), "changes")
    apply(job, rank, hits)
    begun = job.start(smp or job.smp())
    if begun.plan is None:
        assert area == "header", f"{begun.refused or begun.error}: slots are whole everywhere"
        assert begun.refused or isinstance(begun.error, ResumeError)
        again = job.start(job.smp())
        assert again.plan is None, "what was refused is not forgotten"
        assert job.start(job.smp(), "fresh").plan is not None
        return
    assert begun.plan.version is not None, "training started from the beginning"
    whole = ITERATIONS[:-1] if area == "slot 2" else ITERATIONS
    assert begun.plan.version.iteration >= max(whole) and all(begun.restored)
    assert begun.plan.lineage > 1
    again = job.start(job.smp())
    assert again.plan is not None and again.plan.version == begun.plan.version and all(again.restored)


def zero(job, rank, slots):
    """The header pages of these slots are lost: they read as zeros."""
    for slot in slots:
        apply(job, rank, [(FIRST_SLOT + slot * SHAPE.slot_room + at, bytes(8)) for at in range(0, PAGE, 8)])


@settings(
    max_examples=60, derandomize=True, deadline=None, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # every example puts the files back
)  # fmt: skip
@given(
    slots=st.sets(st.integers(0, SHAPE.slots - 1), min_size=1),
    ranks=st.sets(st.sampled_from(RANKS), min_size=1),
    adopted=st.booleans(),
)
@example(slots={0, 1, 2}, ranks=set(RANKS), adopted=False)
@example(slots={0, 1, 2}, ranks={1}, adopted=True)
def test_pages_that_read_as_zeros_are_damage_and_never_a_job_that_has_not_begun(trained, slots, ranks, adopted):
    job, kept = trained
    put_back(job, kept)
    smp = job.smp() if adopted else None
    for rank in ranks:
        zero(job, rank, slots)
    begun = job.start(smp or job.smp())
    for rank, slot in itertools.product(ranks, slots):
        assert any(f"rank {rank}: slot {slot} is not used" in str(error) for error in begun.reported)
    left = [iteration for slot, iteration in enumerate(ITERATIONS) if slot not in slots]
    if left:
        assert begun.plan is not None and begun.plan.version == Version(1, max(left)) and all(begun.restored)
        return
    for _ in range(2):
        assert isinstance(begun.error, ResumeError), begun.plan
        assert f"rank {min(ranks)}: slot 0, slot 1, slot 2 damaged" in str(begun.error)
        begun = job.start(job.smp())  # what was refused is not forgotten
    fresh = job.start(job.smp(), "fresh")
    assert fresh.plan is not None and fresh.plan.version is None
    auto = job.start(job.smp())
    assert auto.plan is not None and auto.plan.version is None and not auto.reported, "as the user had said"


@pytest.mark.parametrize("done", [0, 1, 2], ids=lambda done: f"{done} ranks have opened it")
@pytest.mark.parametrize("hurt", [(), (1,), RANKS], ids=lambda hurt: f"slots of ranks {hurt} damaged")
def test_whenever_a_fresh_start_dies_while_it_is_opened_the_next_start_goes_on(trained, hurt, done, dies_at):
    """One rank's segment is half done, `done` are through, the others have not begun. The user has asked for it once;
    what comes after that is the same command again."""
    job, _ = trained
    for rank in hurt:
        zero(job, rank, range(SHAPE.slots))
    segments = [Segment(job.path(rank)) for rank in RANKS]

    def planned():
        return plan_recovery([_read_facts(segment.rank, _facts(segment)) for segment in segments])

    def begin(segment):
        segment.open_lineage(2, None, voided_slots(segment.slots(), None))

    assert planned().version == (None if hurt else Version(1, 6))
    for segment in segments[:done]:
        begin(segment)
    struck, asked = segments[done], planned()
    before = struck.bytes.copy()
    seen = []
    for at in itertools.count():
        struck.bytes[:] = before
        died = dies_at(at, partial(begin, struck))
        plan = planned()
        if plan == asked and not done:
            assert not seen or seen[-1] == asked.version, "once begun, it stays so"
            seen.append(plan.version)  # as if it had not been asked for
            continue
        assert choose_source(plan, "auto", 0).version is None, f"line {at}"
        assert plan.lineage == 3
        seen.append(None)
        if not died:
            break
    assert len(seen) > 30 and (done or hurt or seen.count(Version(1, 6)) < len(seen) // 2)


def test_whenever_a_start_from_a_version_dies_while_it_is_opened_the_next_one_takes_the_same(trained, dies_at):
    job, _ = trained
    zero(job, 0, [0])
    segments = [Segment(job.path(rank)) for rank in RANKS]
    base, before = Version(1, 5), segments[0].bytes.copy()
    for index in (1, 2):  # where one has lost its newest, the others have it to void
        segments[index].dirty(2, None, 1)
    for at in itertools.count():
        segments[0].bytes[:] = before
        died = dies_at(at, lambda: segments[0].open_lineage(2, base, voided_slots(segments[0].slots(), base)))
        plan = plan_recovery([_read_facts(segment.rank, _facts(segment)) for segment in segments])
        assert choose_source(plan, "auto", 0).version == base, f"line {at}"
        if not died:
            break
    assert at > 30


@pytest.mark.parametrize("slot", [0, 1, 2])
@pytest.mark.parametrize("bit", [1, 3, 40, 63])
def test_a_flipped_bit_of_a_slots_lineage_loses_that_slot_alone_and_is_reported(trained, slot, bit):
    job, _ = trained
    flip(job, 1, FIRST_SLOT + slot * SHAPE.slot_room + LINEAGE_WORD + bit // 8, 1 << bit % 8)
    begun = job.start(job.smp())
    assert begun.plan is not None and begun.plan.version == Version(1, 5 if slot == 2 else 6)
    assert begun.plan.lineage == 2 and all(begun.restored)
    assert [str(error) for error in begun.reported] == [
        f"rank 1: slot {slot} is not used: its header, digest table or small state does not match its digest"
    ]
    assert f"rank 1: slot {slot} damaged and not used" in begun.plan.table()
    assert job.start(job.smp()).reported == [], "once"


@pytest.mark.parametrize("adopted", [True, False])
def test_a_damaged_constant_header_is_a_lost_segment_and_never_a_new_one(trained, adopted):
    job, _ = trained
    smp = job.smp() if adopted else None
    flip(job, 1, 1030, 0x04)  # in the fingerprint
    for _ in range(2):
        begun = job.start(smp or job.smp())
        assert isinstance(begun.error, ResumeError)
        for part in (
            "ranks 0, 2: 4 (lineage 1), 5 (lineage 1), 6 (lineage 1); rank 1: none",
            "rank 1: its segment was damaged",
            "--ftp-resume fresh",
        ):
            assert part in str(begun.error)
        assert any(event.name == "segment.corrupted" for event in job.seen)
        smp = None
    fresh = job.start(job.smp(), "fresh")
    assert fresh.plan is not None and fresh.plan.version is None
    auto = job.start(job.smp())
    assert auto.plan is not None and auto.plan.version is None, "as the user had said"


def test_a_job_of_which_every_segment_is_damaged_does_not_begin_again_unasked(trained):
    job, _ = trained
    for rank in RANKS:
        flip(job, rank, 8, 0x01)
    for _ in range(2):
        begun = job.start(job.smp())
        assert isinstance(begun.error, ResumeError)
        assert "rank 2: its segment was damaged" in str(begun.error)
    assert job.start(job.smp(), "fresh").plan is not None
    assert job.start(job.smp()).plan is not None


def test_a_job_of_which_every_slot_of_one_rank_is_damaged_names_what_the_others_hold(trained):
    job, _ = trained
    for slot in range(SHAPE.slots):
        flip(job, 1, FIRST_SLOT + slot * SHAPE.slot_room + LINEAGE_WORD, 0x02)
    begun = job.start(job.smp())
    assert isinstance(begun.error, ResumeError)
    for part in ("ranks 0, 2: 4 (lineage 1)", "rank 1: slot 0, slot 1, slot 2 damaged", "--ftp-resume fresh"):
        assert part in str(begun.error)


def test_where_the_lineage_of_every_rank_is_damaged_the_sealed_slots_decide(trained):
    job, _ = trained
    for rank in RANKS:
        for at in range(8 * _RECORDS, 8 * (_RECORDS + MirroredRecord.room(4) + MirroredRecord.room(5)), 8):
            flip(job, rank, at, 0x08)
    begun = job.start(job.smp())
    assert begun.plan is not None and begun.plan.version == Version(1, 6) and begun.plan.lineage == 2
    assert {str(error) for error in begun.reported} == {
        f"rank {rank}: the segment's lineage is not used: it does not match its digest" for rank in RANKS
    }


def test_a_segment_in_another_ranks_place_is_refused_by_name(trained):
    """A whole header that says it is rank 2's, under the name of rank 1's."""
    job, kept = trained
    put_back(job, {**kept, 1: kept[2]})
    begun = job.start(job.smp())
    assert "rank 1" in begun.refused and "--ftp-resume fresh" in begun.refused
    with pytest.raises(SegmentError, match="rank 1 has mapped the segment of rank 2"):
        _read_facts(1, _facts(Segment(job.path(2))))


@pytest.mark.parametrize(
    "said",
    [
        None, 7, [], [0] * 7, [0, [[0]], 1, 1, False, [], False], [0, [[0, 9, 1, 1, 0, False]], 1, 1, False, [], False],
        [0, [[0, 2, -1, 1, 0, False]], 1, 1, False, [], False], ["0", [], 1, 1, False, [], False],
        [0, [], 1, 1, False, ["x" * (1 << 16)], False], [0, [[0, 2, 1, 1, 99, False]], 1, 1, False, [], False],
    ],
)  # fmt: skip
def test_what_a_rank_says_of_its_segment_is_typed_and_bounded(said):
    with pytest.raises(ProtocolError, match="rank 0: its report on its segment cannot be read"):
        _read_facts(0, msgpack.packb(said))


def test_what_is_not_msgpack_is_refused():
    with pytest.raises(ProtocolError, match="rank 3"):
        _read_facts(3, b"\xc1")


# ------------------------------------------------------------------------------------------- rebuilt from other nodes

FOUR = (0, 1, 2, 3)  # RAIM6 needs as many nodes
DIGEST = 7
V5, V6 = Version(1, 5), Version(1, 6)
LOST = NodeFacts({})


class Smps:
    """The SMPs of four nodes of one rank, as the rank of `segment` reaches them: a rebuild that reads from a node in
    `flipped` finds a wrong digest, and the first `broken` ones lose their connection."""

    digest = DIGEST

    def __init__(self, segment, seen, losses, flipped=(), broken=0):
        self.segment, self.seen, self.flipped, self.broken = segment, seen, flipped, broken
        self.exchange = plan_exchange("abcd", [FOUR], [SHAPE.nbytes] * len(FOUR), losses)
        self.attempts = []

    def facts(self):
        return self.seen

    def rebuild(self, plan):
        assert plan.version is not None
        source = plan.sources[self.segment.rank]
        self.attempts.append((plan.version, source.way, plan.gone))
        if len(self.attempts) <= self.broken:
            raise ProtocolError("it hung up")
        read = {source.node} if source.way is Way.FETCH else set(plan.holders.values())
        if not read.isdisjoint(self.flipped):
            raise CorruptSlotError(f"rank {self.segment.rank}: what was rebuilt does not match its digest")
        for slot in self.segment.slots():
            if slot.version == plan.version:
                self.segment.dirty(slot.index, None, 1)
        capture(self.segment, choose(self.segment.slots()), plan.version, 1)


def held_by(rank):
    """A node on which that rank ran."""
    return NodeFacts({rank: frozenset([V5, V6])}, frozenset([V5, V6]), rank, DIGEST)


@pytest.fixture
def four(job, tmp_path):
    """The segments of a job of four ranks that has trained."""
    made = Job(job, tmp_path, FOUR)
    made.train()
    segments = [Segment(made.path(rank)) for rank in FOUR]
    for segment in segments:
        segment.ranges = RANGES
    yield segments
    remove(job, "n")


def empty(segment):
    for slot in segment.slots():
        segment.dirty(slot.index, None, 1)


def test_a_bit_that_flips_on_a_node_that_is_left_is_one_more_loss_and_not_the_end_of_the_version(four):
    """RAIM6: what was lost is decoded from the flipped bit, in the round in which its own rank finds it."""
    empty(four[0])
    four[1].data(2)[17] ^= 4
    nodes = [Smps(segment, [LOST, held_by(1), held_by(2), held_by(3)], 2, flipped=[1]) for segment in four]
    reported = []
    plan = agreed(four, reported.append, nodes)
    assert plan.version == V6 and all(restorable(segment, V6) for segment in four)
    assert nodes[0].attempts == [(V6, Way.DECODE, (0,)), (V6, Way.DECODE, (0, 1))]
    assert [node.attempts for node in nodes[1:]] == [[(V6, Way.DECODE, (0, 1))], [], []]
    assert sorted(str(error)[:7] for error in reported) == ["rank 0:", "rank 1:"], "both are said"


def test_what_another_node_cannot_hand_out_whole_is_decoded(four):
    """All nodes have changed places."""
    for segment in four:
        empty(segment)
    nodes = [Smps(segment, [held_by(rank) for rank in (1, 2, 3, 0)], 1, flipped=[0]) for segment in four]
    reported = []
    plan = agreed(four, reported.append, nodes)
    assert plan.version == V6 and all(restorable(segment, V6) for segment in four)
    assert nodes[1].attempts == [(V6, Way.FETCH, ()), (V6, Way.FETCH, ()), (V6, Way.DECODE, (1,))]
    assert [len(node.attempts) for node in nodes] == [1, 3, 1, 1] and len(reported) == 2


def test_what_one_lost_connection_kept_from_being_fetched_is_fetched_again(four):
    """Were its slot taken for a corrupt one, that node would be no holder of others' parity."""
    for segment in four:
        empty(segment)
    broken = (1, 1, 0, 0)
    moved = [held_by(rank) for rank in (1, 2, 3, 0)]
    nodes = [Smps(segment, moved, 1, broken=count) for segment, count in zip(four, broken, strict=True)]
    plan = agreed(four, [].append, nodes)
    assert plan.version == V6 and all(restorable(segment, V6) for segment in four)
    assert [node.attempts for node in nodes] == [(1 + count) * [(V6, Way.FETCH, ())] for count in broken]


@pytest.mark.parametrize(("broken", "versions"), [(1, [V6, V6]), (2, [V6, V6, V5])])
def test_one_lost_connection_costs_no_version_and_a_second_one_only_that_version(four, broken, versions):
    empty(four[0])
    seen = [LOST, held_by(1), held_by(2), held_by(3)]
    nodes = [Smps(segment, seen, 1, broken=broken) for segment in four]
    reported = []
    plan = agreed(four, reported.append, nodes)
    assert plan.version == versions[-1] and all(restorable(segment, versions[-1]) for segment in four)
    assert [version for version, _, _ in nodes[0].attempts] == versions
    assert [str(error) for error in reported] == ["it hung up"] * broken, "each failure is said"
