"""Comparing what Megatron saved: every bit of an entry matters, padding does not, and what is masked is padding."""

import argparse
import enum
import io
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from harness import megatron_checkpoints
from harness.megatron_checkpoints import CheckpointFormatError, LoadedCheckpoint, compare, padding

BUCKET = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg"
WEIGHT, BIAS = 96, 32  # elements: both end off the alignment of 64, though at a multiple of 32


def described(elements, *shards):
    """A tensor of one dimension, saved in shards (begin, size)."""
    chunks = [ChunkStorageMetadata(torch.Size([begin]), torch.Size([size])) for begin, size in shards]
    return TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([elements]), chunks)


# weight 0..96, a gap to 128, bias 128..160; the gap after it is cut off, as Megatron does
LAYOUT = {
    "weight": described(WEIGHT, (0, WEIGHT)),
    "bias": described(BIAS, (0, BIAS)),
    BUCKET: described(160, (0, 64), (64, 32), (96, 32), (128, 32)),
}
PLACE = f"/tensors/{BUCKET}"


def checkpoint(**changed):
    """With a bucket of that layout, the padding filled with what memory happened to hold."""
    moment = torch.arange(160, dtype=torch.float32)
    state = {"tensors": {BUCKET: moment}, "common": {"args": argparse.Namespace(save="/a", iteration=0, lr=0.1)}}
    return LoadedCheckpoint({**state, **changed}, {f"/tensors/{key}": mask for key, mask in padding(LAYOUT).items()})


def with_bit_flipped(element):
    moment = torch.arange(160, dtype=torch.float32)
    moment.view(torch.int32)[element] ^= 1
    return checkpoint(tensors={BUCKET: moment})


def test_padding_is_what_lies_between_a_parameter_and_the_next_alignment():
    (mask,) = padding(LAYOUT).values()
    assert mask.nonzero().flatten().tolist() == list(range(96, 128))


@pytest.mark.parametrize("element", [0, 63, 64, 95, 128, 159])
def test_one_flipped_bit_in_any_part_of_a_parameter_is_found(element):
    found = compare(checkpoint(), with_bit_flipped(element))
    assert found.differences == (f"{PLACE}: 1 of 160 elements differ, the first is {element}",)


@pytest.mark.parametrize("element", [96, 127])
def test_a_flipped_bit_in_the_padding_is_not(element):
    found = compare(checkpoint(), with_bit_flipped(element))
    assert found.differences == ()
    assert found.masked == {PLACE: 32}
    assert "128 elements of 1 tensors" in str(found) and "masked: 32 elements of padding" in str(found)
    assert f"{PLACE}: 128 elements, 32 of padding masked" in found.listing()


@pytest.mark.parametrize(
    ("shards", "held"),
    [
        (((0, 64), (64, 32), (96, 64)), 96),  # the bias does not begin at the alignment
        (((0, 128), (128, 32)), 160),  # the gap is no shard of its own
    ],
)
def test_what_is_masked_must_leave_exactly_the_model(shards, held):
    message = rf"'exp_avg' of the optimizer has {held} elements, expected the model's 128"
    with pytest.raises(CheckpointFormatError, match=message):
        padding({**LAYOUT, BUCKET: described(160, *shards)})


def test_another_format_has_no_padding():
    whole = {key: entry for key, entry in LAYOUT.items() if key != BUCKET}
    assert padding({**whole, "optimizer.state.exp_avg.weight": described(WEIGHT, (0, 32), (32, 64))}) == {}


def test_two_checkpoints_whose_padding_lies_elsewhere_differ():
    other = checkpoint()
    moved = LoadedCheckpoint(other.state, {PLACE: torch.zeros(160, dtype=torch.bool)})
    assert compare(checkpoint(), moved).differences == (f"{PLACE}: its padding is elsewhere",)
    assert compare(checkpoint(), LoadedCheckpoint(other.state)).differences == (f"{PLACE}: its padding is elsewhere",)


def test_arguments_that_describe_a_start_are_left_out_and_said_and_no_other():
    other = checkpoint(common={"args": argparse.Namespace(save="/b", iteration=7, lr=0.2)})
    found = compare(checkpoint(), other)
    assert found.differences == ("/common/args/lr: 0.1 and 0.2",)
    assert found.left_out == ("/common/args/iteration", "/common/args/save")
    assert "left out: the start arguments iteration, save" in str(found)


PAIRS = {
    "sign-of-zero": (0.0, -0.0),
    "tensor-sign-of-zero": (torch.tensor([0.0]), torch.tensor([-0.0])),
    "dtype": (torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)),
    "shape": (torch.zeros(2), torch.zeros(1, 2)),
    "array": (np.arange(3), np.arange(3) + 1),
    "array-dtype": (np.zeros(2, np.int32), np.zeros(2, np.int64)),
    "kind": (1, 1.0),
    "shorter": ([1, 2], [1]),
    "empty": ({}, []),
    "absent": ({"a": 1}, {}),
    "more": ({"a": 1}, {"a": 1, "b": 2}),
    "bytes": (b"a", b"b"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_no_difference_is_tolerated(name):
    left, right = PAIRS[name]
    assert megatron_checkpoints.differences({"entry": left}, {"entry": right})
    assert megatron_checkpoints.differences({"entry": right}, {"entry": left})
    assert not megatron_checkpoints.differences({"entry": left}, {"entry": left})


def test_equal_bits_are_equal_even_where_numbers_are_not():
    assert megatron_checkpoints.differences(torch.tensor([float("nan")]), torch.tensor([float("nan")])) == []
    assert megatron_checkpoints.differences(float("nan"), float("nan")) == []


def test_objects_of_a_megatron_that_is_not_installed_are_compared(tmp_path, monkeypatch):
    newer = ModuleType("megatron.core.newer")
    scope = enum.Enum("Scope", ["LAYER", "BLOCK"], module=newer.__name__)
    spec = type("Spec", (), {"__module__": newer.__name__})
    newer.Scope, newer.Spec = scope, spec
    monkeypatch.setitem(sys.modules, newer.__name__, newer)
    for name, value, size in (("first", scope.LAYER, 1), ("same", scope.LAYER, 1), ("other", scope.BLOCK, 2)):
        described = spec()
        described.size = torch.ones(size)
        dcp.save({"rng": {"scope": value}}, checkpoint_id=tmp_path / name, no_dist=True)
        torch.save({"args": argparse.Namespace(scope=value, spec=described)}, tmp_path / name / "common.pt")
    monkeypatch.delitem(sys.modules, newer.__name__)

    first, same, other = (megatron_checkpoints.read(tmp_path / name) for name in ("first", "same", "other"))
    assert compare(first, same).differences == ()
    assert compare(first, other).differences == (
        "/common/args/scope/arguments[0]: 1 and 2",
        "/common/args/spec/state/size: torch.float32 (1,) and torch.float32 (2,)",
        "/objects/rng.scope/arguments[0]: 1 and 2",
    )


def test_both_formats_are_read(tmp_path):
    own, distributed = tmp_path / "torch", tmp_path / "torch_dist"
    (own / "mp_rank_00").mkdir(parents=True)
    torch.save({"weight": torch.ones(2)}, own / "mp_rank_00" / "model_optim_rng.pt")
    assert dict(megatron_checkpoints.leaves(megatron_checkpoints.read(own).state)).keys() == {
        "/mp_rank_00/model_optim_rng.pt/weight"
    }

    dcp.save({"weight": torch.ones(2), "rng": {"seed": 5}}, checkpoint_id=distributed, no_dist=True)
    torch.save({"iteration": 7}, distributed / "common.pt")
    first = megatron_checkpoints.read(distributed)
    dcp.save({"weight": torch.tensor([1.0, 2.0]), "rng": {"seed": 6}}, checkpoint_id=distributed, no_dist=True)
    torch.save({"iteration": 8}, distributed / "common.pt")
    assert len(compare(first, megatron_checkpoints.read(distributed)).differences) == 3

    (distributed / "common.pt").unlink()
    with pytest.raises(CheckpointFormatError, match="expected the common state"):
        megatron_checkpoints.read(distributed)
    newer = tmp_path / "newer"
    dcp.save({"common_state/shard_0_1": io.BytesIO(), "weight": torch.ones(2)}, checkpoint_id=newer, no_dist=True)
    assert megatron_checkpoints.read(newer).state.keys() == {"tensors", "objects", "common"}
    assert megatron_checkpoints.read(newer).state["objects"] == {}
