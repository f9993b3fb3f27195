"""Whatever lies in a folder of checkpoints, and whatever small state is made of: its readers take it or say so in the
project's own errors, and what is restored is what was written."""

import json
import os
import shutil
import stat
from contextlib import suppress
from dataclasses import replace

import msgpack
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.base import intake
from ft_plugins.base.files import write_digested
from ft_plugins.collective import Collective
from ft_plugins.errors import FtError, InventoryError, ProtocolError, SegmentError, StorageError
from ft_plugins.recovery.recovery_plan import RecoveryPlan
from ft_plugins.recovery.storage import StorageTier
from ft_plugins.smp.storage.notices import Notices
from ft_plugins.snapshot.capture import codec, manifest, retention
from ft_plugins.snapshot.capture.manifest import Manifest, TensorRange
from ft_plugins.snapshot.checkpoint import checkpoint, index, persist
from ft_plugins.snapshot.checkpoint.checkpoint import Origin
from ft_plugins.snapshot.checkpoint.checkpoint_reader import CheckpointReader
from ft_plugins.snapshot.segment import segment as segments
from ft_plugins.snapshot.segment.segment import Segment
from ft_plugins.snapshot.segment.shape import Shape
from ft_plugins.snapshot.segment.slots import Mark, Pin, Version, slots_for
from harness.hostile import altered, damaged

V, TOKEN = Version(2, 300), 9
ORIGIN = Origin("job", 2, {"layers": 4, "seed": 1})
NBYTES = 3000
SHAPE = Shape(NBYTES, 2000, 2, 7, slots_for(Pin.STORAGE))
ITEM = TensorRange("w", "uint8", "parameter", "replicated", NBYTES, 0, NBYTES, 0, (NBYTES,))
MANY = settings(derandomize=True, max_examples=150)
RANDOM = st.randoms(use_true_random=False)


def segment(path, rank):
    segments.create(path, SHAPE, rank, dict(ORIGIN.fingerprint))
    found = Segment(path)
    found.ranges, found.header.token = [(0, 2000), (2000, 1000)], TOKEN
    return found


def data(rank):
    return np.random.default_rng(rank).integers(0, 256, NBYTES, dtype=np.uint8)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A job's folder with one complete checkpoint of two ranks, and notices of a node."""
    base = tmp_path_factory.mktemp("storage") / "job"
    for rank in range(2):
        source = segment(base.parent / f"segment-{rank}", rank)
        described = Manifest(rank, 2, (0, 0), ((0, 2000), (2000, 1000)), (ITEM,))
        small = manifest.join(manifest.write(described), codec.encode({"rank": rank}))
        source.dirty(0, V, TOKEN)
        source.write_small(0, small)
        source.data(0)[:] = data(rank)
        digests = [xxhash.xxh3_64_intdigest(source.data(0)[at : at + n].tobytes()) for at, n in source.ranges]
        source.digests(0)[:] = np.array(digests, dtype=np.uint64)
        source.seal(0, V, TOKEN, small, source.digests(0).copy())
        content = {"format": index.FORMAT, "rank": rank, "layout": 7, "replicas": [[0, 1]], "names": None}
        index.stage(base.parent, {**content, "items": [["w", "uint8", [NBYTES], 0, None]]})
        staged = index.staged_path(base.parent, rank, 7)
        persist.write_rank(checkpoint.partial_of(base, V), source, V, ORIGIN, staged_index=staged)
        source.close()
    checkpoint.commit(base, V, ORIGIN)
    Notices(base, "n").offer([0, 1], [V], 2, {V: Mark.CERTIFIED})
    Notices(base, "n").want(Version(2, 301))
    return base


class Alone(Collective):
    """A job of two ranks of which only rank 0 takes part."""

    def __init__(self):
        super().__init__()
        self.world_size = 2


def read_everything(base, folder):
    """Each way in which a checkpoint is read. Raises what is none of the project's own errors."""
    checkpoint.listing(base)
    retention.surplus(checkpoint.listing(base), 1, ORIGIN.fingerprint_digest)
    Notices(base, "n").offers(2)
    Notices(base, "n").have(V)
    with suppress(FtError, OSError):
        checkpoint.unusable(folder, ORIGIN, V)
    with suppress(FtError, OSError):
        checkpoint.is_complete(folder, ORIGIN)
    with suppress(FtError):
        shares = CheckpointReader(folder)
        assert (shares.small(1), shares.whole("w", (0, 1))[0].tolist()) == ({"rank": 1}, data(0).tolist())
        assert shares.index(0).items["w"].shape == (NBYTES,)
    for rank in range(2):
        path = base.parent / "target"
        path.unlink(missing_ok=True)
        target = segment(path, rank)
        with suppress(FtError):
            slot = persist.read_rank(folder, target, V, TOKEN)
            assert target.data(slot).tolist() == data(rank).tolist()
        if rank == 0:
            nothing = RecoveryPlan(None, "none", 1, 0, 0, "no version was captured before")
            with suppress(FtError):
                StorageTier(base.parent, "job", Alone(), lambda *event: None).recover(nothing, "auto", 0, target, TOKEN)
        target.close()


def damage(base, source):
    path = source.choice(sorted(path for path in base.rglob("*") if path.is_file()))
    content = path.read_bytes()
    if path.suffix == ".json" and source.random() < 0.6:  # as if it had been written so: the digest fits
        plain = altered({key: value for key, value in json.loads(content).items() if key != "digest"}, source)
        with suppress(TypeError, ValueError, RecursionError):
            write_digested(path, plain)
    elif source.random() < 0.1:
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(damaged(content, source))


@given(RANDOM)
@MANY
def test_damage_of_a_checkpoint_is_found_in_our_own_words(original, tmp_path_factory, source):
    base = tmp_path_factory.mktemp("damaged") / "job"
    shutil.copytree(original, base)
    damage(base, source)
    read_everything(base, checkpoint.folder_of(base, V))
    shutil.rmtree(base.parent)


@pytest.mark.parametrize(
    "name", ["v99999999999999999999999-1", "v1-99999999999999999999999", "v٣-1", "v007-3", "v9-9", "v1-²", "v\udcff-1"]
)
def test_a_name_that_is_no_versions_is_passed_over_with_a_line(original, tmp_path, name):
    base = tmp_path / "job"
    shutil.copytree(original, base)
    if name == "v9-9":
        (base / name).write_text("a file")
    else:
        (base / name).mkdir()
    alarms = []
    target = segment(tmp_path / "target", 0)
    tier = StorageTier(tmp_path, "job", Alone(), lambda *alarm: alarms.append(alarm))
    plan = tier.recover(RecoveryPlan(None, "none", 1, 0, 0, "no version"), "auto", 0, target, TOKEN)
    assert (plan.version, plan.tier, plan.lineage) == (V, "storage", V.lineage + 1)
    assert [event.name for event, _ in alarms] == ["checkpoint.ignored"]
    assert "not a checkpoint name" in alarms[0][1]
    assert name.encode(errors="replace").decode().strip("v?-1") in alarms[0][1] and alarms[0][1].isprintable()
    retention_left = retention.surplus(checkpoint.listing(base), 1, ORIGIN.fingerprint_digest)
    assert retention_left == () and (base / name).exists()


def test_files_are_for_their_owner_alone(original):
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in original.rglob("*")}
    folders = {"v2-300": 0o700}
    assert modes == {name: folders.get(name, 0o600) for name in modes} and len(modes) == 8
    assert stat.S_IMODE(original.stat().st_mode) == 0o700


def test_what_was_begun_before_is_removed_as_nobody_else_writes_there(original, tmp_path):
    """Given a job that holds the folder's lease, and what two others of its name had begun before."""
    base = tmp_path / "job"
    shutil.copytree(original, base)
    source = Segment(original.parent / "segment-0")
    for iteration, layers in ((100, 5), (200, 4)):
        version = Version(1, iteration)
        source.dirty(1, version, TOKEN)
        source.data(1)[:] = source.data(0)
        source.digests(1)[:] = source.digests(0)
        source.write_small(1, source.small(0))
        source.seal(1, version, TOKEN, source.small(0), source.digests(0).copy())
        origin = Origin("job", 2, {"layers": layers, "seed": 1})
        folder = checkpoint.partial_of(base, version)
        persist.write_rank(folder, source, version, origin)
        os.rename(folder / checkpoint.data_file(0), folder / f"{checkpoint.data_file(0)}.new")  # it is being written
        (folder / checkpoint.record_file(0)).unlink()
    source.dirty(1, None, TOKEN)
    source.close()
    found = retention.surplus(checkpoint.listing(base), 1, ORIGIN.fingerprint_digest)
    assert [each.name for each in found] == ["v1-100.partial", "v1-200.partial"]


def test_a_checkpoint_that_is_a_link_is_unlinked_and_what_it_leads_to_stays(original, tmp_path):
    shutil.copytree(original / "v2-300", tmp_path / "archive")
    (tmp_path / "v2-300").symlink_to(tmp_path / "archive")
    checkpoint.remove(tmp_path / "v2-300")
    assert not (tmp_path / "v2-300").is_symlink() and (tmp_path / "archive" / "manifest.json").exists()


@pytest.mark.parametrize("name", [checkpoint.data_file(0), checkpoint.record_file(0)])
def test_a_pipe_in_the_place_of_a_file_keeps_no_reader_waiting(original, tmp_path, name):
    base = tmp_path / "job"
    shutil.copytree(original, base)
    folder = checkpoint.folder_of(base, V)
    record, shares = checkpoint.read_record(folder, 0), CheckpointReader(folder)
    shares.small(0)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    intake.within(10.0, lambda: read_everything(base, folder), "a reader")
    if name == checkpoint.data_file(0):
        with pytest.raises(StorageError, match="not a regular file"):
            intake.within(10.0, lambda: persist.read_head(folder / name, record))
        with pytest.raises(StorageError, match="not a regular file"):
            intake.within(10.0, lambda: shares.whole("w", (0,)))
    (folder / "manifest.json").unlink()
    (folder / checkpoint.record_file(0)).unlink()
    (folder / checkpoint.record_file(1)).unlink()
    assert len(intake.within(10.0, lambda: checkpoint.listing(base), "the listing")) == 1


@pytest.mark.parametrize("kind", ["pipe", "link", "nowhere"])
def test_whatever_is_called_keep_keeps_a_checkpoint(original, tmp_path, kind):
    base = tmp_path / "job"
    shutil.copytree(original, base)
    mark = checkpoint.folder_of(base, V) / "keep"
    os.mkfifo(mark) if kind == "pipe" else mark.symlink_to(tmp_path / ("nowhere" if kind == "nowhere" else "job"))
    intake.within(10.0, lambda: checkpoint.keep(mark.parent), "the writer")
    assert [each.kept for each in checkpoint.listing(base)] == [True] and not (tmp_path / "nowhere").exists()


def test_small_state_that_has_no_room_is_passed_over_before_a_slot_is_given_up(original, tmp_path):
    segments.create(tmp_path / "narrow", replace(SHAPE, small_nbytes=8), 0, dict(ORIGIN.fingerprint))
    target = Segment(tmp_path / "narrow")
    target.ranges, target.header.token = [(0, 2000), (2000, 1000)], TOKEN
    before = target.slots()
    with pytest.raises(StorageError, match=r"rank 0: .* has [0-9]+ bytes of small state; this job claimed 8 at start"):
        persist.read_rank(original / "v2-300", target, V, TOKEN)
    assert target.slots() == before
    target.close()


# ---- small state ----

STATE = {"a": (1, (2, 3.5)), "b": np.arange(5), "c": 2**70, "d": {(1, 2): 3}, "e": [1, "x", b"y", None]}
HELD = TensorRange("w", "float32", "parameter", "own", 100, 0, 100, 0)
MANIFEST = Manifest(1, 2, (0, 0), ((0, 100),), (HELD,))


@given(RANDOM)
@MANY
def test_damaged_small_state_is_decoded_or_refused(source):
    with suppress(ProtocolError):
        codec.decode(damaged(codec.encode(STATE), source))
    small = manifest.join(manifest.write(MANIFEST), b"state")
    with suppress(SegmentError):
        manifest.split(damaged(small, source))
    with suppress(SegmentError):
        manifest.read(damaged(manifest.write(MANIFEST), source))


@given(RANDOM)
@MANY
def test_a_manifest_that_is_read_has_the_types_that_it_promises(source):
    import zlib

    plain = msgpack.unpackb(zlib.decompress(manifest.write(MANIFEST)))
    try:
        encoded = zlib.compress(msgpack.packb(altered(plain, source)))
    except (ValueError, OverflowError, UnicodeEncodeError):
        return  # msgpack itself has no such value
    with suppress(SegmentError):
        found = manifest.read(encoded)
        assert all(type(one.name) is str and type(one.offset) is int for one in found.tensors)
        assert type(found.rank) is int and all(type(size) is int for _, size in found.ranges)


def test_a_manifest_that_would_take_gigabytes_to_read_is_refused_and_none_is_written():
    import zlib

    small = zlib.compress(bytes(9 << 20))  # of zeros: a few kilobytes
    with pytest.raises(SegmentError, match="more than 8388608 bytes"):
        manifest.read(small)
    held = tuple(TensorRange("w" * 4096, "float32", "parameter", "own", 100, 0, 100, 0) for _ in range(2048))
    with pytest.raises(SegmentError, match="rank 1: the manifest of its 2048 pieces .* expected at most 8388608"):
        manifest.write(Manifest(1, 2, (0, 0), ((0, 100),), held))
    assert len(manifest.read(manifest.write(Manifest(1, 2, (0, 0), ((0, 100),), held[:1000]))).tensors) == 1000


@pytest.mark.parametrize("parts", [[b"", 5], [10**12, b""], 1, {"a": b"b", "c": b"d"}, [b"a"], "ab", None])
def test_what_is_no_pair_of_bytes_is_no_small_state(parts):
    with pytest.raises(SegmentError, match="two byte strings"):
        manifest.split(msgpack.packb(parts))


@pytest.mark.parametrize("wrap", [tuple, list, lambda parts: {"a": parts[0]}])
def test_nesting_is_bounded_before_it_costs_the_stack(wrap):
    state = 2**70
    for _ in range(codec.DEPTH):
        state = wrap([state])
    assert codec.decode(codec.encode(state)) == state
    with pytest.raises(InventoryError, match=r"^state\[.*nested more than 32 deep"):
        codec.encode(wrap([state]))


def test_an_encoding_that_is_nested_deeper_than_any_of_ours_is_refused():
    """Two hundred tuples in each other ended the process."""
    encoded = msgpack.packb([])
    for _ in range(200):
        encoded = msgpack.packb([msgpack.ExtType(1, encoded)])
    with pytest.raises(ProtocolError, match="nested more than 32 deep"):
        codec.decode(encoded)


@pytest.mark.parametrize("state", [{"a": 1 << 100_000}, {"a": "\ud800"}])
def test_state_that_could_not_be_read_back_is_refused_when_it_is_captured(state):
    with pytest.raises(InventoryError):
        codec.encode(state)


def test_a_manifest_that_is_no_object_is_a_damaged_checkpoint_by_name(original, tmp_path):
    base = tmp_path / "job"
    shutil.copytree(original, base)
    (base / "v2-300" / "manifest.json").write_text("[]")
    with pytest.raises(StorageError, match=r"manifest\.json: cannot be read \(expected an object"):
        checkpoint.read_manifest(base / "v2-300")
    (found,) = checkpoint.listing(base)
    assert found.complete and "manifest.json" in found.problem
