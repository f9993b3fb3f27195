"""Checkpoints on disk: what was captured comes back bit for bit, and whatever is wrong with a file is found."""

import ctypes
import errno
import gc
import os
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file

from ft_plugins.base import faults
from ft_plugins.base.files import read_digested, write_digested
from ft_plugins.errors import BudgetError, CorruptSlotError, FencedError, ResumeError, StorageError
from ft_plugins.snapshot.capture import manifest
from ft_plugins.snapshot.capture.manifest import Manifest, TensorRange
from ft_plugins.snapshot.checkpoint import checkpoint, persist
from ft_plugins.snapshot.checkpoint.checkpoint import CheckpointManifest, Origin
from ft_plugins.snapshot.segment import segment as segments
from ft_plugins.snapshot.segment.segment import Segment
from ft_plugins.snapshot.segment.shape import Shape
from ft_plugins.snapshot.segment.slots import Mark, Pin, SlotState, Version, slots_for

V = Version(2, 300)
ORIGIN = Origin("job", 2, {"layers": 4, "seed": 1})
RANGES = [(0, 4000), (4032, 3000), (7040, 960)]  # gaps between them, as between items
NBYTES = 8000
SHAPE = Shape(NBYTES, 1000, len(RANGES), 2**64 - 5, slots_for(Pin.STORAGE))
TOKEN = 9


@pytest.fixture
def make(tmp_path_factory):
    """Segments by rank, on any node name; in files, for which nobody sweeps."""
    folder = tmp_path_factory.mktemp("segments")

    def segment(rank, node="n", shape=SHAPE):
        path = folder / f"{node}-r{rank}"
        segments.create(path, shape, rank, dict(ORIGIN.fingerprint))
        found = Segment(path)
        found.ranges = RANGES[: shape.buckets]
        found.header.token = TOKEN
        return found

    return segment


def small_of(segment, state):
    """Small state whose manifest has a tensor in each bucket."""
    held = [TensorRange(f"t{at}", "int16", "parameter", "own", n, 0, n, at, (2, n // 4)) for at, n in segment.ranges]
    described = Manifest(segment.rank, 2, (0, 0), tuple(segment.ranges), tuple(held))
    return manifest.join(manifest.write(described), state)


def capture(segment, version, seed, index=0):
    """Put a version into a slot as a trainer does: random bytes, rubbish in the gaps."""
    segment.dirty(index, version, TOKEN)
    small = small_of(segment, f"small state of rank {segment.rank}, {version}".encode())
    segment.write_small(index, small)
    segment.data(index)[:] = np.random.default_rng(seed).integers(0, 256, segment.shape.nbytes, dtype=np.uint8)
    digests = np.array(
        [xxhash.xxh3_64_intdigest(segment.data(index)[o : o + n].tobytes()) for o, n in segment.ranges], dtype=np.uint64
    )
    segment.digests(index)[:] = digests
    segment.seal(index, version, TOKEN, small, digests)


def written(make, base, version=V):
    """A complete checkpoint of two ranks, and the segments that it was written from."""
    sources = []
    for rank in range(ORIGIN.world_size):
        source = make(rank, f"from{version.iteration}")
        capture(source, version, seed=100 * rank + version.iteration)
        persist.write_rank(checkpoint.partial_of(base, version), source, version, ORIGIN)
        sources.append(source)
    return checkpoint.commit(base, version, ORIGIN), sources


def bytes_of(segment, index):
    """What counts of a slot: the buckets, not the gaps."""
    data = segment.data(index)
    return [data[offset : offset + nbytes].tobytes() for offset, nbytes in segment.ranges]


# ---- there and back ----


def test_what_was_captured_comes_back_bit_for_bit_and_sealed(make, tmp_path):
    folder, sources = written(make, tmp_path)
    assert folder == tmp_path / "v2-300" and sorted(os.listdir(tmp_path)) == ["v2-300"]
    for source in sources:
        target = make(source.rank, "to")
        index = persist.read_rank(folder, target, V, TOKEN)
        slot = target.slot(index)
        assert (slot.state, slot.version, slot.token) == (SlotState.CLEAN, V, TOKEN)
        assert bytes_of(target, index) == bytes_of(source, 0)
        assert target.small(index) == source.small(0)
        target.verify(index)


def test_anyones_reader_of_safetensors_finds_the_tensors_by_name(make, tmp_path):
    folder, (source, _) = written(make, tmp_path)
    with safe_open(folder / "rank-00000.safetensors", framework="np") as file:
        gaps = ["ft_plugins.gap.4000", "ft_plugins.gap.7032"]
        assert sorted(file.keys()) == ["ft_plugins.digests", *gaps, "ft_plugins.small", "t0", "t4032", "t7040"]
        told = file.metadata()
        assert (told["rank"], told["lineage"], told["iteration"], told["world_size"]) == ("0", "2", "300", "2")
        assert told["fingerprint"] == ORIGIN.fingerprint_digest and told["layout"] == str(SHAPE.layout)
        assert np.array_equal(file.get_tensor("ft_plugins.digests"), source.digests(0))
        assert file.get_tensor("ft_plugins.small").tobytes() == source.small(0)
        for offset, nbytes in RANGES:
            tensor = file.get_tensor(f"t{offset}")
            assert (tensor.dtype, tensor.shape) == (np.int16, (2, nbytes // 4))
            assert tensor.tobytes() == source.data(0)[offset : offset + nbytes].tobytes()
        assert not any(file.get_tensor(gap).any() for gap in gaps), "what belongs to no item stays in memory"


ITEMS = {
    "a whole tensor": (TensorRange("w", "bfloat16", "", "", 24, 0, 24, 64, (3, 4)), "w", torch.arange(12).view(3, 4)),
    "a scalar": (TensorRange("w", "float64", "", "", 8, 0, 8, 64), "w", torch.tensor(0.0)),
    "a part": (TensorRange("w", "float32", "", "", 400, 128, 192, 64, (10, 10)), "w[32:48]", torch.arange(16)),
    "another order in memory": (TensorRange("w", "int32", "", "", 24, 0, 24, 64), "w", torch.arange(6)),
    "a dtype that the format lacks": (TensorRange("w", "complex128", "", "", 32, 0, 32, 64, (2,)), "w", None),
}


@pytest.mark.parametrize("what", ITEMS)
def test_an_item_is_stored_as_what_it_is(make, tmp_path, what):
    held, name, expected = ITEMS[what]
    size = held.stop - held.start
    source = make(0, "from", Shape(320, 1000, 1, 1, SHAPE.slots))
    source.ranges = [(64, size)]
    small = manifest.join(manifest.write(Manifest(0, 1, (0, 0), ((64, size),), (held,))), b"")
    source.dirty(0, V, TOKEN)
    source.write_small(0, small)
    raw = np.arange(size, dtype=np.uint8)
    if expected is not None:
        expected = expected.to(getattr(torch, held.dtype))
        raw = expected.reshape(-1).view(torch.uint8).numpy()
    source.data(0)[64 : 64 + size] = raw
    digests = np.array([xxhash.xxh3_64_intdigest(raw.tobytes())], dtype=np.uint64)
    source.digests(0)[:] = digests
    source.seal(0, V, TOKEN, small, digests)
    persist.write_rank(tmp_path, source, V, ORIGIN)
    tensors = load_file(tmp_path / "rank-00000.safetensors")
    found = tensors.pop(name)
    assert torch.equal(found, torch.from_numpy(raw) if expected is None else expected) and found.shape == (
        (size,) if expected is None else expected.shape
    )
    assert all(other.startswith("ft_plugins.") for other in tensors)


@pytest.mark.parametrize(
    ("held", "why"),
    [
        ([("a", 0, 64), ("b", 32, 64)], "64 bytes of 'b' at 32, expected from 64 on"),
        ([("a", 0, 64), ("a", 64, 64)], "two tensors are called 'a'"),
        ([("ft_plugins.small", 0, 64)], "two tensors are called 'ft_plugins.small'"),
        ([("__metadata__", 0, 64)], "two tensors are called '__metadata__'"),
        ([("a", 0, 8064)], "up to byte 8064 of 8000"),
    ],
)
def test_a_manifest_that_does_not_describe_the_slot_gets_no_file(make, tmp_path, held, why):
    source = make(0)
    capture(source, V, 1)
    tensors = tuple(TensorRange(name, "uint8", "", "", n, 0, n, at, (n,)) for name, at, n in held)
    small = manifest.join(manifest.write(Manifest(0, 1, (0, 0), tuple(RANGES), tensors)), b"")
    source.dirty(0, V, TOKEN)
    source.write_small(0, small)
    source.seal(0, V, TOKEN, small, source.digests(0).copy())
    with pytest.raises(StorageError, match=why):
        persist.write_rank(tmp_path / "p", source, V, ORIGIN)
    assert os.listdir(tmp_path / "p") == []


@pytest.mark.parametrize("piece", [1000, 4000, 4001])
def test_buckets_larger_than_the_buffer_are_written_in_pieces(make, tmp_path, monkeypatch, piece):
    monkeypatch.setattr(persist, "COPY_BYTES", piece)
    monkeypatch.setattr(persist, "SYNC_BYTES", 3000)
    folder, (source, _) = written(make, tmp_path)
    target = make(0, "to")
    assert bytes_of(target, persist.read_rank(folder, target, V, TOKEN)) == bytes_of(source, 0)


def test_a_rank_without_a_share_has_a_file_all_the_same(make, tmp_path):
    nothing = Shape(0, 1000, 0, 1, SHAPE.slots)
    source, target = make(0, "from", nothing), make(0, "to", nothing)
    capture(source, V, 0)
    origin = replace(ORIGIN, world_size=1)
    persist.write_rank(checkpoint.partial_of(tmp_path, V), source, V, origin)
    folder = checkpoint.commit(tmp_path, V, origin)
    index = persist.read_rank(folder, target, V, TOKEN)
    assert target.slot(index).version == V and target.small(index) == source.small(0)


def test_reading_takes_the_slot_that_a_capture_would_take_or_the_one_that_holds_the_version(make, tmp_path):
    folder, _ = written(make, tmp_path)
    target = make(0, "to")
    for index, iteration in enumerate((1, 2, 3)):
        capture(target, Version(1, iteration), 5, index)
    assert persist.read_rank(folder, target, V, TOKEN) == 3, "an empty slot before the oldest version"
    target.data(3)[10] ^= 1
    assert persist.read_rank(folder, target, V, TOKEN) == 3, "two slots never hold one version"
    target.verify(3)
    assert [slot.version for slot in target.slots()] == [Version(1, 1), Version(1, 2), Version(1, 3), V]


@pytest.mark.parametrize("lacking", [False, True])
def test_a_checkpoint_is_read_although_all_slots_that_have_memory_are_pinned(make, tmp_path, monkeypatch, lacking):
    """More nodes are lost than others can replace: here are the version that they kept, and the one being sent."""
    folder, (source, _) = written(make, tmp_path)
    shape = replace(SHAPE, slots=slots_for(Pin.NODE, Pin.SOURCE, Pin.STORAGE), first=2)
    target = make(0, "to", shape)
    for index, pin in enumerate((Pin.NODE, Pin.SOURCE)):
        capture(target, Version(1, 1 + index), 5, index)
        assert target.pin(Version(1, 1 + index), pin, idle=True) == index
    if lacking:

        def refuse(*args):
            raise BudgetError("no room")

        monkeypatch.setattr("ft_plugins.snapshot.segment.claims.check_room", refuse)
    index = persist.read_rank(folder, target, V, TOKEN)
    assert bytes_of(target, index) == bytes_of(source, 0)
    assert index == (1 if lacking else 2), "without memory the version has to go that was being sent"


# ---- what is wrong ----


def test_a_slot_that_does_not_match_its_digests_is_not_written(make, tmp_path):
    source = make(0)
    capture(source, V, 1)
    source.data(0)[7999] ^= 1
    with pytest.raises(CorruptSlotError, match="rank 0: bucket 2 of slot 0 does not match"):
        persist.write_rank(tmp_path / "v2-300.partial", source, V, ORIGIN)
    assert os.listdir(tmp_path / "v2-300.partial") == []


def test_a_version_that_is_given_up_while_it_is_written_gets_no_file(make, tmp_path):
    source = make(0)
    capture(source, V, 1)
    with pytest.raises(CorruptSlotError, match="no slot holds version 300"):
        persist.write_rank(tmp_path / "p", source, V, ORIGIN, lambda nbytes: source.dirty(0, None, TOKEN))
    capture(source, V, 1)
    pieces = iter(range(9))

    def elsewhere(nbytes):
        if next(pieces) == 4:  # the last one: every bucket has been read
            source.dirty(0, None, TOKEN)
            capture(source, V, 1, index=1)

    with pytest.raises(CorruptSlotError, match="changed while"):
        persist.write_rank(tmp_path / "p", source, V, ORIGIN, elsewhere)
    assert next(pieces) == 5
    assert os.listdir(tmp_path / "p") == []
    with pytest.raises(CorruptSlotError, match="no slot holds version 301"):
        persist.write_rank(tmp_path / "p", source, Version(2, 301), ORIGIN)


PARTS = {"length": 3, "header": 40, "digest table": -(NBYTES + 8), "data": -5000, "small state": -2}


@pytest.mark.parametrize("part", PARTS)
def test_a_flipped_bit_anywhere_in_a_file_is_found_and_the_slot_is_not_restorable(make, tmp_path, part):
    folder, (source, _) = written(make, tmp_path)
    path = folder / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    small = len(source.small(0))
    at = PARTS[part] - (small if part in ("digest table", "data") else 0)
    content[at] ^= 0x10
    path.write_bytes(content)
    target = make(0, "to")
    with pytest.raises(StorageError, match="rank-00000.safetensors"):
        persist.read_rank(folder, target, V, TOKEN)
    assert not any(slot.state is SlotState.CLEAN for slot in target.slots())


@pytest.mark.parametrize("left", [0, 5, 500, NBYTES // 2, -1])
def test_a_truncated_file_is_found(make, tmp_path, left):
    folder, _ = written(make, tmp_path)
    path = folder / "rank-00001.safetensors"
    size = path.stat().st_size
    os.truncate(path, left if left >= 0 else size + left)
    with pytest.raises(StorageError, match=f"bytes, but {size} were written"):
        persist.read_rank(folder, make(1, "to"), V, TOKEN)


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00000.json"])
def test_a_file_that_is_missing_is_named(make, tmp_path, name):
    folder, _ = written(make, tmp_path)
    (folder / name).unlink()
    with pytest.raises(StorageError, match=name):
        persist.read_rank(folder, make(0, "to"), V, TOKEN)


def test_the_files_of_two_ranks_exchanged_are_found(make, tmp_path):
    folder, _ = written(make, tmp_path)
    for name in (checkpoint.data_file, checkpoint.record_file):
        os.rename(folder / name(0), folder / "x")
        os.rename(folder / name(1), folder / name(0))
        os.rename(folder / "x", folder / name(1))
    with pytest.raises(StorageError, match="it was replaced after the manifest"):
        persist.read_rank(folder, make(0, "to"), V, TOKEN)


@pytest.mark.parametrize("changed", [{"layout": 7}, {"nbytes": NBYTES + 64}, {"buckets": 2}])
def test_another_layout_is_refused_by_name_and_nothing_is_touched(make, tmp_path, changed):
    folder, _ = written(make, tmp_path)
    target = make(0, "to", replace(SHAPE, **changed))
    before = target.bytes.copy()
    with pytest.raises(ResumeError, match="rank 0: .*v2-300 has another layout .*--ftp-resume fresh"):
        persist.read_rank(folder, target, V, TOKEN)
    assert np.array_equal(target.bytes, before)


def test_a_superseded_incarnation_reads_nothing_into_a_slot(make, tmp_path):
    folder, _ = written(make, tmp_path)
    target = make(0, "to")
    with pytest.raises(FencedError, match=f"token {TOKEN - 1} was superseded by {TOKEN}"):
        persist.read_rank(folder, target, V, TOKEN - 1)
    assert not any(slot.state is SlotState.CLEAN for slot in target.slots())


def test_a_full_disk_leaves_no_file(make, tmp_path):
    source = make(0)
    capture(source, V, 1)
    faults.arm("persist.write@rank=0:enospc")
    with pytest.raises(OSError) as caught:
        persist.write_rank(tmp_path / "p", source, V, ORIGIN)
    assert caught.value.errno == errno.ENOSPC and os.listdir(tmp_path / "p") == []


# ---- complete or not ----


@pytest.mark.parametrize("point", ["persist.file", "persist.rename"])
def test_a_file_has_no_name_before_it_is_durable(make, tmp_path, point):
    source = make(0)
    capture(source, V, 1)
    faults.arm(f"{point}:raise")
    with pytest.raises(RuntimeError, match=point):
        persist.write_rank(tmp_path / "p", source, V, ORIGIN)
    assert os.listdir(tmp_path / "p") == []


def test_a_file_that_is_there_is_not_written_twice_and_one_of_another_content_is_replaced(make, tmp_path):
    source = make(0)
    capture(source, V, 1)
    first = persist.write_rank(tmp_path / "p", source, V, ORIGIN)
    path = tmp_path / "p" / "rank-00000.safetensors"
    inode = path.stat().st_ino
    assert persist.write_rank(tmp_path / "p", source, V, ORIGIN) == first and path.stat().st_ino == inode
    capture(source, V, 2)
    assert persist.write_rank(tmp_path / "p", source, V, ORIGIN) != first
    os.truncate(path, 100)
    persist.write_rank(tmp_path / "p", source, V, ORIGIN)
    assert path.stat().st_size == first.nbytes


def test_a_rank_counts_when_its_file_is_there_and_is_of_this_version_and_job(make, tmp_path):
    folder = checkpoint.partial_of(tmp_path, V)
    for rank in (1, 0):
        source = make(rank)
        capture(source, V, rank)
        persist.write_rank(folder, source, V, ORIGIN)
        assert checkpoint.unusable(folder, ORIGIN, V) == ([0] if rank else [])
    assert checkpoint.unusable(folder, replace(ORIGIN, world_size=3), V) == [2]
    assert checkpoint.unusable(folder, replace(ORIGIN, fingerprint={}), V) == [0, 1]
    assert checkpoint.unusable(folder, ORIGIN, Version(2, 301)) == [0, 1]
    os.truncate(folder / "rank-00001.safetensors", 100)
    assert checkpoint.unusable(folder, ORIGIN, V) == [1]


def test_no_record_vouches_for_data_that_another_attempt_has_replaced(make, tmp_path, monkeypatch):
    alone, folder, source = replace(ORIGIN, world_size=1), checkpoint.partial_of(tmp_path, V), make(0)
    capture(source, V, 1)
    persist.write_rank(folder, source, V, alone)
    capture(source, V, 2)

    def full(path, content, **_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(persist, "write_digested", full)
    with pytest.raises(OSError, match="full"):
        persist.write_rank(folder, source, V, alone)
    assert checkpoint.unusable(folder, alone, V) == [0]


def test_a_checkpoint_whose_files_were_withdrawn_before_its_manifest_is_not_complete(make, tmp_path, monkeypatch):
    """A node gives up while rank 0 completes it."""
    building, write = checkpoint.partial_of(tmp_path, V), checkpoint.write_digested

    def late(path, content, **_):
        checkpoint.withdraw(building, [1])
        write(path, content)

    monkeypatch.setattr(checkpoint, "write_digested", late)
    with pytest.raises(StorageError, match=r"files of ranks \[1\] were removed"):
        written(make, tmp_path)
    (found,) = checkpoint.listing(tmp_path)
    assert (found.name, found.complete) == (building.name, False)
    checkpoint.withdraw(building, [0])
    assert not building.exists()


@pytest.mark.parametrize("point", ["before", "after"])
def test_the_manifest_makes_it_complete_whether_or_not_the_folder_was_renamed(make, tmp_path, point):
    faults.arm(f"persist.manifest.{point}:raise")
    with pytest.raises(RuntimeError):
        written(make, tmp_path)
    (found,) = checkpoint.listing(tmp_path)
    assert (found.name, found.version, found.complete) == ("v2-300.partial", V, point == "after")
    if point == "before":
        return
    assert found.fingerprint == ORIGIN.fingerprint_digest
    checkpoint.withdraw(tmp_path / found.name, [0, 1])
    persist.read_rank(tmp_path / found.name, make(0, "to"), V, TOKEN)  # what is complete is not withdrawn
    checkpoint.publish(tmp_path / found.name, checkpoint.folder_of(tmp_path, V))
    assert checkpoint.is_complete(tmp_path / "v2-300", ORIGIN)


def test_the_listing_tells_complete_unfinished_and_damaged_ones_and_nothing_else(make, tmp_path):
    assert checkpoint.listing(tmp_path / "nothing") == ()
    written(make, tmp_path)
    shutil.copytree(tmp_path / "v2-300", tmp_path / "v2-400")
    shutil.copytree(tmp_path / "v2-300", tmp_path / "v1-200")
    manifest = tmp_path / "v2-300" / "manifest.json"
    (tmp_path / "v1-200" / "manifest.json").write_text(manifest.read_text().replace('"seed": 1', '"seed": 2'))
    (tmp_path / "v3-1.partial").mkdir()
    for name in ("other", "v1", "v1-2-3", "wanted.json"):
        (tmp_path / name).mkdir()
    found = {each.name: each for each in checkpoint.listing(tmp_path)}
    assert sorted(found) == ["v1-200", "v2-300", "v2-400", "v3-1.partial"]
    assert [found[name].complete for name in sorted(found)] == [True, True, True, False]
    assert "does not match its digest" in found["v1-200"].problem and found["v1-200"].fingerprint == ""
    assert "of another version" in found["v2-400"].problem and found["v2-300"].problem == ""


@pytest.mark.parametrize("damaged", ["v2-300", "v2-300.partial"])
def test_of_two_folders_of_a_version_the_one_that_can_be_used_is_listed_whichever_it_is(make, tmp_path, damaged):
    """A writer that died before it renamed its folder, or a copy made by hand, may leave both."""
    written(make, tmp_path)
    shutil.copytree(tmp_path / "v2-300", tmp_path / "v2-300.partial")
    (tmp_path / damaged / "manifest.json").write_bytes(b"\0" * 100)
    (found,) = checkpoint.listing(tmp_path)
    assert (found.complete, found.problem) == (True, "") and found.name != damaged


def test_what_is_there_of_another_job_is_not_taken_for_ours(make, tmp_path):
    folder, _ = written(make, tmp_path)
    with pytest.raises(StorageError, match="is a checkpoint of another job"):
        checkpoint.is_complete(folder, replace(ORIGIN, fingerprint={"layers": 5}))
    assert not checkpoint.is_complete(tmp_path / "v9-9", ORIGIN)


def test_what_is_withdrawn_leaves_the_files_of_other_nodes(make, tmp_path):
    folder = checkpoint.partial_of(tmp_path, V)
    for rank in range(2):
        source = make(rank)
        capture(source, V, rank)
        persist.write_rank(folder, source, V, ORIGIN)
        (folder / f"rank-0000{rank}.index.json").touch()  # of an earlier format
    (folder / "rank-00000.safetensors.new").touch()
    checkpoint.withdraw(folder, [0])
    assert sorted(os.listdir(folder)) == ["rank-00001.index.json", "rank-00001.json", "rank-00001.safetensors"]
    checkpoint.withdraw(folder, [1])
    assert not folder.exists()
    checkpoint.withdraw(folder, [1])


def test_removing_is_done_whole_or_leaves_something_incomplete(make, tmp_path, monkeypatch):
    folder, _ = written(make, tmp_path)

    def dies(path):
        raise OSError(errno.EIO, "it died")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", dies)
        with pytest.raises(OSError):
            checkpoint.remove(folder)
    assert [each.complete for each in checkpoint.listing(tmp_path)] == [False]
    checkpoint.remove(folder)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("copy", [persist.COPY_BYTES, 128 << 20], ids=["as it is", "all at once"])
def test_the_memory_that_writing_takes_is_bounded(make, tmp_path, monkeypatch, copy):
    """128 MiB are written with less than 32 MiB more in memory, the mapped segment itself not counted; were they copied
    all at once, it would show."""
    monkeypatch.setattr(persist, "COPY_BYTES", copy)
    nbytes, bucket = 128 << 20, copy // 2 if copy < 128 << 20 else copy
    monkeypatch.setattr(sys.modules[__name__], "RANGES", [(at, bucket) for at in range(0, nbytes, bucket)])
    source = make(0, "big", Shape(nbytes, 10_000, nbytes // bucket, 1, 3))
    capture(source, V, 1)
    gc.collect()  # what tests before this one left: given back meanwhile, it would hide what is looked for
    ctypes.CDLL(None).malloc_trim(0)
    before = _anonymous_kib()
    peak = 0

    def look(piece):
        nonlocal peak
        peak = max(peak, _anonymous_kib() - before)

    persist.write_rank(tmp_path / "p", source, V, Origin("job", 1, {}), look)
    assert (tmp_path / "p" / "rank-00000.safetensors").stat().st_size > nbytes
    assert (peak < 32 << 10) == (copy < nbytes), f"{peak} KiB"
    shutil.rmtree(tmp_path / "p")
    source.path.unlink()


def _anonymous_kib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


@pytest.mark.parametrize("heard", [(), (0,), (1,), (0, 1)])
def test_the_manifest_says_whether_any_rank_had_heard_that_the_replicas_agreed(make, tmp_path, heard):
    for rank in range(ORIGIN.world_size):
        source = make(rank)
        capture(source, V, 5)
        source.mark(V, Mark.CERTIFIED if rank in heard else Mark.UNAUDITED)
        folder = checkpoint.partial_of(tmp_path, V)
        record = persist.write_rank(folder, source, V, ORIGIN)
        assert record.mark == (Mark.CERTIFIED if rank in heard else Mark.UNAUDITED)
        assert persist.write_rank(folder, source, V, ORIGIN).seal == record.seal, "what is there is not written again"
    folder = checkpoint.commit(tmp_path, V, ORIGIN, audited=True)
    assert checkpoint.read_manifest(folder).certified is bool(heard)
    (found,) = checkpoint.listing(tmp_path)
    assert found.certified is bool(heard)


@pytest.mark.parametrize(
    ("mark", "heard", "audited", "expected"),
    [
        (Mark.NONE, Mark.NONE, False, None),
        (Mark.UNAUDITED, Mark.NONE, False, None),
        (Mark.NONE, Mark.NONE, True, False),
        (Mark.NONE, Mark.CERTIFIED, True, True),  # the verdict came after the last byte
        (Mark.DIVERGED, Mark.NONE, True, None),  # each replica whole: there is nothing to agree
    ],
)
def test_a_checkpoint_is_called_uncertified_only_where_its_replicas_were_to_be_compared(
    make, tmp_path, mark, heard, audited, expected
):
    for rank in range(ORIGIN.world_size):
        source = make(rank)
        capture(source, V, 5)
        source.mark(V, mark)
        persist.write_rank(checkpoint.partial_of(tmp_path, V), source, V, ORIGIN)
    folder = checkpoint.commit(tmp_path, V, ORIGIN, audited=audited, mark=heard)
    assert checkpoint.read_manifest(folder).certified is expected


@pytest.mark.parametrize("told", ["record", "heard"])
def test_a_version_whose_replicas_differed_on_any_rank_gets_no_manifest_and_is_not_read(make, tmp_path, told):
    building = checkpoint.partial_of(tmp_path, V)
    for rank in range(ORIGIN.world_size):
        source = make(rank)
        capture(source, V, 5)
        source.mark(V, Mark.MISMATCHED if (rank, told) == (1, "record") else Mark.CERTIFIED)
        persist.write_rank(building, source, V, ORIGIN)
    heard = Mark.MISMATCHED if told == "heard" else Mark.NONE
    with pytest.raises(StorageError, match="version 300 .* differ( on ranks 1)?: it is a mixture"):
        checkpoint.commit(tmp_path, V, ORIGIN, audited=True, mark=heard)
    assert not any(each.complete for each in checkpoint.listing(tmp_path))
    if told == "record":
        described = CheckpointManifest(checkpoint.FORMAT, "job", 2, 300, 2, {}, 1)
        write_digested(building / "manifest.json", asdict(described))
        with pytest.raises(StorageError, match="differ on ranks 1"):
            persist.read_rank(building, make(1, "to"), V, TOKEN)


@pytest.mark.parametrize("mark", [Mark.CERTIFIED, Mark.DIVERGED, Mark.UNAUDITED])
def test_what_is_known_to_be_good_is_known_of_the_restored_slot_too(make, tmp_path, mark):
    source, target = make(0), make(0, "to")
    capture(source, V, 5)
    source.mark(V, mark)
    origin = replace(ORIGIN, world_size=1)
    persist.write_rank(checkpoint.partial_of(tmp_path, V), source, V, origin)
    index = persist.read_rank(checkpoint.commit(tmp_path, V, origin), target, V, TOKEN)
    assert target.slot(index).mark is (mark if mark.preferred else Mark.NONE)


# ---- runs ----

OURS, THEIRS = replace(ORIGIN, run="a" * 32), replace(ORIGIN, run="b" * 32)


def share(make, base, rank, origin):
    source = make(rank, f"from-{origin.run[:1]}-{rank}")
    capture(source, V, seed=rank)
    persist.write_rank(checkpoint.partial_of(base, V), source, V, origin)


def test_a_record_of_another_run_is_neither_counted_nor_overwritten_nor_removed(make, tmp_path):
    """Two jobs of one name, whose SMPs write into one folder: one with rank 0 there, the other one with rank 1."""
    building = checkpoint.partial_of(tmp_path, V)
    share(make, tmp_path, 0, OURS)
    share(make, tmp_path, 1, THEIRS)
    assert checkpoint.unusable(building, OURS, V) == [1] and checkpoint.unusable(building, THEIRS, V) == [0]
    with pytest.raises(StorageError, match=f"rank-00001.json is of another run .*{'b' * 32}.*not overwritten"):
        share(make, tmp_path, 1, OURS)
    checkpoint.withdraw(building, [0, 1], OURS.run)
    assert checkpoint.read_record(building, 1).run == THEIRS.run and not (building / "rank-00000.json").exists()


def test_a_record_that_is_replaced_after_the_manifest_makes_the_checkpoint_incomplete_by_name(make, tmp_path):
    for rank in range(ORIGIN.world_size):
        share(make, tmp_path, rank, OURS)
    folder = checkpoint.commit(tmp_path, V, OURS)
    assert checkpoint.read_manifest(folder).run == OURS.run
    whole = folder / "rank-00001.json"
    for changed, words in ({"mark": 1}, "was replaced after"), ({"run": THEIRS.run}, f"of another run \\({THEIRS.run}"):
        content = read_digested(whole)
        write_digested(whole, content | changed)  # whole, by its own digest
        with pytest.raises(StorageError, match=f"rank-00001.json: it (is )?{words}.*incomplete"):
            persist.read_rank(folder, make(1, "to"), V, TOKEN)
        write_digested(whole, content)
    persist.read_rank(folder, make(1, "to"), V, TOKEN)


def test_a_record_that_is_replaced_while_it_is_completed_is_noticed(make, tmp_path, monkeypatch):
    for rank in range(ORIGIN.world_size):
        share(make, tmp_path, rank, OURS)
    before = checkpoint.publish

    def publish(building, final):
        record = building / "rank-00001.json"
        write_digested(record, read_digested(record) | {"run": THEIRS.run})
        return before(building, final)

    monkeypatch.setattr(checkpoint, "publish", publish)
    with pytest.raises(StorageError, match=r"files of ranks \[1\] were removed or replaced"):
        checkpoint.commit(tmp_path, V, OURS)
    assert not any(each.complete for each in checkpoint.listing(tmp_path))


def test_a_checkpoint_of_the_build_before_has_no_run_and_is_read_and_counted_all_the_same(make, tmp_path):
    folder, _ = written(make, tmp_path)
    for name, left_out in ("manifest.json", ("run", "records")), ("rank-00000.json", ("run",)):
        content = read_digested(folder / name)
        older = {key: value for key, value in content.items() if key not in left_out}
        write_digested(folder / name, older | ({"format": "ft_plugins checkpoint 2"} if "format" in older else {}))
    persist.read_rank(folder, make(0, "to"), V, TOKEN)
    stored = checkpoint.listing(tmp_path)
    assert OURS.own(stored) == list(stored) and stored[0].run == ""


def test_checkpoints_of_other_runs_are_not_this_ones(make, tmp_path):
    for rank in range(ORIGIN.world_size):
        share(make, tmp_path, rank, THEIRS)
    checkpoint.commit(tmp_path, V, THEIRS)
    stored = checkpoint.listing(tmp_path)
    assert OURS.own(stored) == [] and THEIRS.own(stored) == ORIGIN.own(stored) == list(stored)
    with pytest.raises(StorageError, match="another job or run"):
        checkpoint.is_complete(checkpoint.folder_of(tmp_path, V), OURS)
