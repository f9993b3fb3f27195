"""Tensors come back whole out of the files of many ranks, whoever holds which part, and damage is never given out."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from ft_plugins.base.files import read_digested, write_digested
from ft_plugins.errors import StorageError
from ft_plugins.model.inventory import Inventory, Item, Role
from ft_plugins.snapshot.capture import codec, manifest
from ft_plugins.snapshot.capture.layout import plan_layout
from ft_plugins.snapshot.checkpoint import checkpoint, index, persist
from ft_plugins.snapshot.checkpoint.checkpoint import Origin
from ft_plugins.snapshot.checkpoint.checkpoint_reader import CheckpointReader
from ft_plugins.snapshot.segment import segment as segments
from ft_plugins.snapshot.segment.segment import Segment
from ft_plugins.snapshot.segment.shape import Shape
from ft_plugins.snapshot.segment.slots import Pin, Version, slots_for

V, TOKEN = Version(1, 6), 3


def replicated(name, tensor, ranks):
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Item(name, dtype, tuple(tensor.shape), tensor.nbytes, Role.PARAMETER, ranks)


def shard(name, tensor, rank, start, stop):
    nbytes = (stop - start) * tensor.element_size()
    piece = (start, stop, tensor.numel())
    return Item(name, "float32", (stop - start,), nbytes, Role.MOMENT, (rank,), piece=piece)


def written(base, tensors, cuts, nodes, bucket_bytes, replicas=1, indexed=True):
    """A checkpoint of as many ranks as there are nodes: each tensor replicated over all of them, or cut into pieces.
    With several replicas each has its own of what is cut, larger by its number, and `cuts` of its own."""
    world = len(nodes)
    size = world // replicas
    origin = Origin("job", world, {"seed": 1})
    for rank in range(world):
        items, raw = [], {}
        replica, place = divmod(rank, size)
        for name, tensor in tensors.items():
            flat = tensor.reshape(-1).view(torch.uint8).numpy()
            if name not in cuts:
                items.append(replicated(name, tensor, tuple(range(world))))
                raw[name] = flat
                continue
            flat = (tensor + replica).reshape(-1).view(torch.uint8).numpy()
            edges = [0, *cuts[name][replica * (size - 1) : (replica + 1) * (size - 1)], tensor.numel()]
            if edges[place] < edges[place + 1]:
                start, stop = edges[place], edges[place + 1]
                items.append(shard(name, tensor, rank, start, stop))
                raw[name] = flat[start * tensor.element_size() : stop * tensor.element_size()]
        inventory = Inventory.of(rank, items)
        layout = plan_layout(inventory, nodes, bucket_bytes)
        shape = Shape(layout.nbytes, 10_000, len(layout.buckets), 77 + rank, slots_for(Pin.STORAGE))
        path = base / f"segment-{rank}"
        segments.create(path, shape, rank, dict(origin.fingerprint))
        segment = Segment(path)
        segment.ranges = [(bucket.offset, bucket.nbytes) for bucket in layout.buckets]
        segment.dirty(0, V, TOKEN)
        small = manifest.join(manifest.write(manifest.manifest_of(layout, world, (0, 0))), codec.encode({"rank": rank}))
        segment.write_small(0, small)
        data = segment.data(0)
        for piece in (piece for bucket in layout.buckets for piece in bucket.pieces):
            data[piece.offset : piece.offset + piece.nbytes] = raw[piece.item][piece.item_offset :][: piece.nbytes]
        digests = np.array([xxhash.xxh3_64_intdigest(data[o : o + n].data) for o, n in segment.ranges], dtype=np.uint64)
        segment.digests(0)[:] = digests
        segment.seal(0, V, TOKEN, small, digests)
        run_dir = base / f"run-{rank}"
        run_dir.mkdir()
        staged = index.staged_path(run_dir, rank, shape.layout)
        if indexed:
            index.stage(run_dir, index.describe(inventory, shape.layout, {"framework": "none", "rank": rank}))
        persist.write_rank(checkpoint.partial_of(base, V), segment, V, origin, staged_index=staged)
        del data
        segment.close()
    return checkpoint.commit(base, V, origin)


TENSORS = {
    "a": torch.arange(1000, dtype=torch.float32).reshape(10, 100),
    "b": torch.arange(37, dtype=torch.float32).to(torch.bfloat16),
    "c:exp_avg": torch.arange(513, dtype=torch.float32) * 3,
}


@pytest.fixture
def folder(tmp_path):
    return written(tmp_path, TENSORS, {"c:exp_avg": [200, 200]}, ("n0", "n1", "n0"), 1024)


@given(
    ranks=st.integers(1, 5),
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=4),
    bucket_bytes=st.sampled_from([64, 256, 4096]),
    cache_bytes=st.sampled_from([0, 300, 1 << 20]),
    data=st.data(),
)
@settings(max_examples=25, deadline=None)
def test_every_tensor_comes_back_whole(tmp_path_factory, ranks, sizes, bucket_bytes, cache_bytes, data):
    tensors = {f"t{number}": torch.randn(size) for number, size in enumerate(sizes)}
    cuts = {}
    for name, tensor in tensors.items():
        if data.draw(st.booleans()):
            edges = st.lists(st.integers(0, tensor.numel()), min_size=ranks - 1, max_size=ranks - 1)
            cuts[name] = sorted(data.draw(edges))
    nodes = tuple(data.draw(st.lists(st.sampled_from("xy"), min_size=ranks, max_size=ranks)))
    shares = CheckpointReader(written(tmp_path_factory.mktemp("c"), tensors, cuts, nodes, bucket_bytes), cache_bytes)
    for name, tensor in tensors.items():
        raw, dtype = shares.whole(name, range(ranks))
        assert dtype == "float32"
        assert torch.equal(torch.from_numpy(raw).view(torch.float32), tensor), name


def test_small_state_and_names_are_those_of_each_rank(folder):
    shares = CheckpointReader(folder)
    assert [shares.small(rank) for rank in range(3)] == [{"rank": rank} for rank in range(3)]
    assert [found.names for found in shares.indices()] == [{"framework": "none", "rank": rank} for rank in range(3)]
    assert shares.whole("b", (0, 1, 2))[1] == "bfloat16"


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_flipped_byte_is_found_wherever_it_is_read(folder):
    path = folder / checkpoint.data_file(2)  # which holds the rest of the pieces, and a share of the others
    with safe_open(path, framework="np") as file:
        piece = file.get_tensor("c:exp_avg[200:513]").tobytes()
    flip(path, path.read_bytes().index(piece) + len(piece) - 1)
    shares = CheckpointReader(folder)
    with pytest.raises(StorageError, match=f"{path.name}.*does not match the digest"):
        shares.whole("c:exp_avg", (0, 1, 2))


MISSING = {
    "manifest": ("manifest.json", "not a complete checkpoint"),
    "record": (checkpoint.record_file(1), "no such file"),
    "data": (checkpoint.data_file(1), "No such file"),
}


@pytest.mark.parametrize("what", MISSING)
def test_a_missing_file_is_named(folder, what):
    name, words = MISSING[what]
    (folder / name).unlink()
    with pytest.raises(StorageError, match=words) as raised:
        CheckpointReader(folder)
    assert name in str(raised.value)


def test_a_checkpoint_without_indices_has_its_tensors_and_no_names(tmp_path):
    reader = CheckpointReader(written(tmp_path, TENSORS, {}, ("n0", "n1"), 1024, indexed=False))
    assert reader.whole("a", (0, 1))[0].tobytes() == TENSORS["a"].numpy().tobytes()
    with pytest.raises(StorageError, match=r"rank-00001\.safetensors: this checkpoint was written without an index"):
        reader.index(1)


def test_an_index_that_does_not_fit_is_refused(tmp_path):
    inventory = Inventory.of(0, [replicated("a", TENSORS["a"], (0,))])
    staged = index.staged_path(tmp_path, 0, 1)
    index.stage(tmp_path, index.describe(inventory, 1, None))
    text = index.staged_text(staged) or ""
    assert index.read(text, "f").items["a"].shape == (10, 100)
    for wrong, why in [
        (text.replace('"a"', '"A"', 1), "f: its index: does not match its digest"),
        (json.dumps({"digest": ""}), "f: its index: does not match"),
        ("[]", "f: its index: cannot be read"),
    ]:
        with pytest.raises(StorageError, match=why):
            index.read(wrong, "f")
    for key, value in {"format": "other", "items": [["a"]], "rank": -1, "replicas": 5}.items():
        content = read_digested(staged)
        write_digested(tmp_path / "x", {**content, key: value})
        with pytest.raises(StorageError, match="^f: (not an index|expected format)"):
            index.read((tmp_path / "x").read_text(), "f")
    staged.unlink()
    assert index.staged_text(staged) is None, "then a checkpoint has none"


@pytest.mark.parametrize("changed", [{"rank": 1}, {"layout": 5}])
def test_the_index_of_another_rank_or_layout_is_refused(tmp_path, monkeypatch, changed):
    before = index.describe
    monkeypatch.setattr(index, "describe", lambda *told: {**before(*told), **changed})
    monkeypatch.setattr(index, "staged_path", lambda *told: tmp_path / "staged")
    reader = CheckpointReader(written(tmp_path, TENSORS, {}, ("n0",), 1024))
    with pytest.raises(StorageError, match=r"its index is of rank \d, or of another layout"):
        reader.index(0)


def test_an_earlier_format_is_refused_with_what_to_do(folder):
    content = read_digested(folder / "manifest.json")
    write_digested(folder / "manifest.json", {**content, "format": "ft_plugins checkpoint 1"})
    with pytest.raises(StorageError, match=f"{folder}: .*found 'ft_plugins checkpoint 1': resume or export it with"):
        CheckpointReader(folder)


@pytest.mark.parametrize("bucket", [(0, 1 << 62), (1 << 40, 64), (4000, 1000)])
def test_a_bucket_that_is_not_in_the_data_is_refused_before_memory_is_taken_for_it(tmp_path, monkeypatch, bucket):
    before = manifest.manifest_of

    def wrong(layout, *told):
        made = before(layout, *told)
        return replace(made, ranges=(bucket, *made.ranges[1:]))

    monkeypatch.setattr(manifest, "manifest_of", wrong)
    folder = written(tmp_path, {"a": TENSORS["a"]}, {}, ("n0",), 4096)
    with pytest.raises(StorageError, match=r"rank-00000\.safetensors: its manifest has a bucket at \d+ that is not in"):
        CheckpointReader(folder).whole("a", (0,))


@pytest.mark.parametrize("dtype", ["complex64", "nothing", "nn"])
def test_a_tensor_whose_bytes_are_no_elements_of_its_dtype_is_refused(tmp_path, monkeypatch, dtype):
    before = manifest.manifest_of

    def wrong(layout, *told):
        made = before(layout, *told)
        return replace(made, tensors=tuple(replace(one, dtype=dtype) for one in made.tensors))

    monkeypatch.setattr(manifest, "manifest_of", wrong)
    folder = written(tmp_path, {"a": torch.arange(5, dtype=torch.float32)}, {}, ("n0",), 4096)
    words = rf"rank-00000\.safetensors: its manifest has .*{dtype[:6]}.*, which is not in it"
    with pytest.raises(StorageError, match=words):
        CheckpointReader(folder)


def test_a_part_that_no_file_has_is_told_of(folder):
    shares = CheckpointReader(folder)
    with pytest.raises(StorageError, match=r"bytes 800 to [0-9]+ of .* are in no file of ranks 0, 1"):
        shares.whole("c:exp_avg", (0, 1))
    with pytest.raises(StorageError, match="no file of ranks 0, 1, 2 has item 'd'"):
        shares.whole("d", (0, 1, 2))


def test_only_the_index_of_the_newest_layout_is_kept(tmp_path):
    inventory = Inventory.of(0, [replicated("a", TENSORS["a"], (0,))])
    for digest in (1, 2):
        index.stage(tmp_path, index.describe(inventory, digest, None))
    assert [path.name for path in tmp_path.iterdir()] == [index.staged_path(tmp_path, 0, 2).name]


def test_a_tensor_without_elements_is_whole_though_no_file_has_a_part(tmp_path):
    reader = CheckpointReader(written(tmp_path, {**TENSORS, "empty": torch.empty(0, 3)}, {}, ("n0", "n1"), 1024))
    raw, dtype = reader.whole("empty", (0, 1))
    assert (raw.nbytes, dtype) == (0, "float32")


def test_where_replicas_differ_the_chosen_one_is_read_alone_also_if_others_are_cut_elsewhere(tmp_path):
    """Rank 3 begins before rank 0 ends: without a choice its bytes would follow those of rank 0."""
    nodes = ("n0", "n1", "n2", "n3")
    reader = CheckpointReader(written(tmp_path, TENSORS, {"c:exp_avg": [300, 200]}, nodes, 1024, replicas=2))
    for replica, ranks in enumerate([(0, 1), (2, 3)]):
        reader.chosen = ranks
        raw, _ = reader.whole("c:exp_avg", range(4))
        assert torch.equal(torch.from_numpy(raw).view(torch.float32), TENSORS["c:exp_avg"] + replica)
        raw, _ = reader.whole("a", range(4))
        assert torch.equal(torch.from_numpy(raw).view(torch.float32), TENSORS["a"].reshape(-1)), "from all of them"
