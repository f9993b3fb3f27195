"""Recovery carried out: real ranks, each with its own segment on its own emulated node, put their state together."""

import numpy as np
import pytest
import torch

from ft_plugins.collective import Collective
from ft_plugins.collective import transfers as module
from ft_plugins.model.inventory import Inventory, Item, IterationSpan, Role
from ft_plugins.recovery.restore import agree_on_version, load_tensors, small_state_of
from ft_plugins.snapshot.capture.capture import Capture
from ft_plugins.snapshot.capture.copiers import flat_bytes
from ft_plugins.snapshot.capture.layout import plan_layout
from ft_plugins.snapshot.segment.paths import path_of, remove
from ft_plugins.snapshot.segment.segment import Segment, create
from ft_plugins.snapshot.segment.shape import Shape
from ft_plugins.snapshot.segment.slots import SlotState, Version

EARLY = frozenset({IterationSpan.UPDATE, IterationSpan.FORWARD})
LATE = frozenset({IterationSpan.UPDATE})
ITERATIONS = (1, 2, 3, 4)


@pytest.fixture
def cleaned(job):
    yield job
    for node in "abc":
        remove(job, node)


def tensors_of(rank, world, iteration):
    """State of a rank after `iteration`: items of everyone, of pairs, of one; in any memory order; replica sets by
    name; and the names of what the step may change."""
    everyone, pair = tuple(range(world)), tuple(sorted({rank, rank ^ 1} & set(range(world))))

    def random(seed, *shape):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * iteration + seed))

    tensors = {
        "shared.w": random(1, 37, 11),
        "shared.t": random(2, 8, 30).t(),
        "shared.scalar": random(3, 1).reshape(()),
        "shared.empty": torch.empty(0),
        "shared.amax": random(4, 5),
        "pair.w": random(10 + rank // 2, 333).bfloat16(),
        "own.moment": random(20 + rank, 129),
        "own.rng": (random(40 + rank, 50) * 50).to(torch.uint8),
    }
    replicas = {name: {"shared": everyone, "pair": pair, "own": (rank,)}[name.split(".")[0]] for name in tensors}
    return tensors, replicas, {"shared.amax", "own.rng"}


def inventory_of(rank, world):
    tensors, replicas, early = tensors_of(rank, world, 0)
    return Inventory.of(
        rank,
        [
            Item(name, str(t.dtype).removeprefix("torch."), tuple(t.shape), t.numel() * t.element_size(), Role.BUFFER,
                 replicas[name], None, EARLY if name in early else LATE)
            for name, t in tensors.items()
        ],
    )  # fmt: skip


def contents(tensors):
    return {name: flat_bytes(name, tensor).numpy().tobytes() for name, tensor in tensors.items()}


def _capture_then_restore(rank, world, job, nodes, damage):
    """Capture versions 1 to 4, damage some, then restore into fresh tensors; what became of it."""
    module.PART_BYTES = 4096
    layout = plan_layout(inventory_of(rank, world), nodes, 512)
    path = path_of(job, nodes[rank], rank)
    create(path, Shape(layout.nbytes, 100, len(layout.buckets), 1), rank, {})
    segment = Segment(path)
    segment.ranges = [(bucket.offset, bucket.nbytes) for bucket in layout.buckets]
    live = tensors_of(rank, world, 0)[0]
    capture = Capture(segment, layout, lambda: live, 0)
    for iteration in ITERATIONS:
        for name, tensor in tensors_of(rank, world, iteration)[0].items():
            live[name].copy_(tensor)
        capture.start(Version(1, iteration), f"{rank} at {iteration}".encode())
        capture.wait()
        segment.header.completed = iteration
    capture.close()
    for kind, iteration in damage.get(rank, []):
        (index,) = [slot.index for slot in segment.slots() if slot.version == Version(1, iteration)]
        match kind:
            case "flip":
                segment.data(index)[layout.buckets[-1].offset] ^= 0x10
            case "unsealed":
                segment.dirty(index, None, 0)
            case "digest":
                segment.digests(index)[0] ^= np.uint64(1)
    segment.close()

    segment = Segment(path, populate=True)
    fresh = {name: torch.zeros_like(tensor) for name, tensor in tensors_of(rank, world, 0)[0].items()}
    before = segment.bytes.tobytes()
    reported = []
    collective = Collective()
    plan = agree_on_version(segment, collective, reported.append)
    small = None if plan.version is None else small_state_of(plan.version, segment)
    if plan.version is not None:
        load_tensors(plan.version, segment, layout, fresh, collective)
    iteration = plan.version.iteration if plan.version else 0
    expected = (
        contents(tensors_of(rank, world, iteration)[0])
        if iteration
        else contents({name: torch.zeros_like(tensor) for name, tensor in fresh.items()})
    )
    return {
        "iteration": iteration,
        "exact": contents(fresh) == expected,
        "small": small,
        "reported": [str(error) for error in reported],
        "untouched": segment.bytes.tobytes() == before,
        "plan": plan,
    }


@pytest.mark.parametrize("nodes", [("a", "a"), ("a", "b"), ("a", "a", "b", "b"), ("a", "b", "b", "c")])
def test_the_newest_version_is_put_together_bit_for_bit_on_every_rank(ranks, cleaned, nodes):
    found = ranks(_capture_then_restore, len(nodes), cleaned, nodes, {})
    for rank, outcome in enumerate(found):
        assert outcome["iteration"] == 4 and outcome["exact"], rank
        assert outcome["small"] == f"{rank} at 4".encode()
        assert outcome["reported"] == [] and outcome["untouched"]
    assert len({repr(outcome["plan"]) for outcome in found}) == 1
    assert found[0]["plan"].completed == 4 and found[0]["plan"].lost == 0


@pytest.mark.parametrize(
    "damage, taken, reporting",
    [
        ({1: [("flip", 4)]}, 3, {1: 1}),
        ({1: [("unsealed", 4)]}, 3, {}),
        ({1: [("digest", 4)]}, 3, {1: 1}),
        ({0: [("flip", 4)], 1: [("flip", 3)]}, 2, {0: 1, 1: 1}),
        ({1: [("flip", 4), ("flip", 3), ("flip", 2)]}, 0, {1: 3}),
        ({0: [("unsealed", 4), ("unsealed", 2)], 1: [("unsealed", 3)]}, 0, {}),
    ],
    ids=["flip", "unsealed", "digest", "two ranks", "all of one rank", "none in common"],
)
def test_a_version_that_one_rank_cannot_restore_is_passed_over_by_all(ranks, cleaned, damage, taken, reporting):
    found = ranks(_capture_then_restore, 2, cleaned, ("a", "b"), damage)
    for rank, outcome in enumerate(found):
        assert outcome["iteration"] == taken and outcome["exact"], rank
        assert outcome["small"] == (f"{rank} at {taken}".encode() if taken else None)
        assert len(outcome["reported"]) == reporting.get(rank, 0)
        assert all(f"rank {rank}: " in text and "match" in text for text in outcome["reported"])
        assert outcome["plan"].lost == 4 - taken


def test_a_rank_that_lost_its_segment_sends_all_to_the_beginning(cleaned):
    """A job of one process, whose segment is new: nothing was captured."""
    layout = plan_layout(inventory_of(0, 1), (), 512)
    path = path_of(cleaned, "a", 0)
    create(path, Shape(layout.nbytes, 100, len(layout.buckets), 1), 0, {})
    segment = Segment(path)
    segment.ranges = [(bucket.offset, bucket.nbytes) for bucket in layout.buckets]
    plan = agree_on_version(segment, Collective(), lambda error: None)
    assert plan.version is None and plan.reason == "no version was captured before" and plan.lineage == 1
    assert [slot.state for slot in segment.slots()] == [SlotState.EMPTY] * 3
