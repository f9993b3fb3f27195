"""A job of any size as the plans see it: ranks on nodes of eight, a 96-layer model, what each rank captures. Pure.

A layer has ten parameters in bfloat16, of which data parallelism holds replicas. The optimizer's state, three float32
values a parameter, is sharded over data parallelism as one contiguous range of a stage's parameters. Sizes are those of
a model with a hidden size of `HIDDEN`.

Invariant: what a rank does not compute itself, the facts of all other ranks, is derived from one rank of each place in
the model. So a job of 16,384 ranks is built in seconds.

In: number of ranks, name of a shape. Out: topology, nodes, inventories, layouts, segment shapes, manifests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ft_plugins.config import ReftConfig
from ft_plugins.model.inventory import Inventory, Item, Role
from ft_plugins.model.topology import Topology
from ft_plugins.redundancy.exchange_plan import positions
from ft_plugins.redundancy.grouping import redundancy_groups
from ft_plugins.redundancy.sections import Extent
from ft_plugins.snapshot.capture import manifest
from ft_plugins.snapshot.capture.double import ReplicaShare, replica_extents, replica_shares
from ft_plugins.snapshot.capture.layout import Layout, ReplicaStream, plan_layout
from ft_plugins.snapshot.capture.manifest import Manifest, TensorRange
from ft_plugins.snapshot.segment.shape import PAGE, Shape

SHAPES = {"tp8 pp16": (8, 16), "tp4 pp4": (4, 4), "tp1 pp4": (1, 4)}
RANKS = (64, 512, 4096, 16384)
PER_NODE, LAYERS, HIDDEN = 8, 96, 4096
NAME_LENGTH = 48  # characters of a node's name
BUCKET = ReftConfig().bucket_mib << 20
SMALL_BYTES = 64 << 10
_WIDTHS = (  # of a layer's parameters, in hidden sizes; whether tensor parallelism splits it
    ("attention.norm", 1, False), ("attention.norm_bias", 1, False), ("attention.qkv", 3 * HIDDEN, True),
    ("attention.qkv_bias", 3, True), ("attention.out", HIDDEN, True), ("attention.out_bias", 1, False),
    ("mlp.norm", 1, False), ("mlp.up", 4 * HIDDEN, True), ("mlp.down", 4 * HIDDEN, True), ("mlp.down_bias", 1, False),
)  # fmt: skip
_OPTIMIZER = (("main", Role.MAIN_PARAMETER), ("exp_avg", Role.MOMENT), ("exp_avg_sq", Role.MOMENT))


def topology_of(ranks: int, shape: str) -> Topology:
    """The shape at that size, with fewer stages if there would not be two replicas."""
    tp, pp = SHAPES[shape]
    while tp * pp * 2 > ranks:
        pp //= 2
    return Topology(tp, pp, ranks // (tp * pp))


@dataclass(frozen=True)
class ScaledJob:
    """A job by its topology, on nodes of PER_NODE ranks in order."""

    topology: Topology

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """The node of each rank, with a long name."""
        return tuple(f"node-{rank // PER_NODE}".ljust(NAME_LENGTH, "x") for rank in range(self.topology.world_size))

    @cached_property
    def positions(self) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
        return positions(self.nodes)

    @cached_property
    def sharding_groups(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self.topology.sharding_groups().values())

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Redundancy groups of the default size."""
        return redundancy_groups(self.nodes, self.sharding_groups, 8, 1)

    def inventory(self, rank: int) -> Inventory:
        """What a rank holds."""
        topology, at = self.topology, self.topology.coords(rank)
        replicas = topology.replicas(rank)
        layers = range(LAYERS * at.pp // topology.pp, LAYERS * (at.pp + 1) // topology.pp)
        items = [
            Item(f"layers.{layer:02}.{name}", "bfloat16", (size,), 2 * size, Role.PARAMETER, replicas, layer)
            for layer in layers for name, size in self._parameters
        ]  # fmt: skip
        items += [
            Item(f"optimizer.{state}.{item}", "float32", (stop - start,), 4 * (stop - start), role, (rank,), layer,
                 piece=(start, stop, total))
            for item, layer, start, stop, total in self._shard(at.pp, at.dp) for state, role in _OPTIMIZER
        ]  # fmt: skip
        return Inventory.of(rank, items)

    @cached_property
    def _parameters(self) -> tuple[tuple[str, int], ...]:
        """Name and elements of a rank's parameters in a layer."""
        return tuple((name, width * HIDDEN // (self.topology.tp if split else 1)) for name, width, split in _WIDTHS)

    def _shard(self, stage: int, place: int) -> Iterator[tuple[str, int, int, int, int]]:
        """The pieces of parameters whose optimizer state the replica at `place` holds: name, layer, start, stop and
        all elements."""
        layers = range(LAYERS * stage // self.topology.pp, LAYERS * (stage + 1) // self.topology.pp)
        whole = len(layers) * sum(size for _, size in self._parameters)
        low, high = whole * place // self.topology.dp, whole * (place + 1) // self.topology.dp
        at = 0
        for layer in layers:
            for name, size in self._parameters:
                start, stop = max(low, at), min(high, at + size)
                if start < stop:
                    yield f"layers.{layer:02}.{name}", layer, start - at, stop - at, size
                at += size

    def layout(self, rank: int) -> Layout:
        return plan_layout(self.inventory(rank), self.nodes, BUCKET)

    @cached_property
    def _samples(self) -> dict[tuple[int, int], Layout]:
        """The layout of the first rank of each place in the model, (stage, tensor rank)."""
        return {key: self.layout(ranks[0]) for key, ranks in self.topology.sharding_groups().items()}

    def _sample(self, rank: int) -> Layout:
        at = self.topology.coords(rank)
        return self._samples[at.pp, at.tp]

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The shape of each rank's segment: that of the first at its place, and what shares may differ by."""
        return tuple(
            Shape(sample.nbytes + PAGE, SMALL_BYTES, len(sample.ranges), rank, 5)
            for rank, sample in ((rank, self._sample(rank)) for rank in range(self.topology.world_size))
        )

    @cached_property
    def replica_shares(self) -> tuple[tuple[ReplicaShare, ...], ...]:
        """By rank, its shares of its replica sets, as `snapshot.capture.double.replica_shares` returns them."""
        by_rank: list[list[ReplicaShare]] = [[] for _ in range(self.topology.world_size)]
        done = set()
        for sample in self._samples.values():
            for stream, (digest, _, offset, _) in zip(_replicated(sample), replica_shares(sample), strict=True):
                if digest not in done:
                    done.add(digest)
                    for share in stream.shares:
                        by_rank[share.rank].append((digest, share.start, offset, share.stop - share.start))
        return tuple(map(tuple, by_rank))

    @cached_property
    def replicated(self) -> tuple[tuple[Extent, ...], ...]:
        """The extents of slots of each replica set."""
        return replica_extents(self.replica_shares)

    def manifest(self, rank: int) -> Manifest:
        """What `snapshot.capture.manifest.manifest_of` returns for the layout of a rank, without making that layout."""
        at, sample = self.topology.coords(rank), self._sample(rank)
        rows, offset = list[TensorRange](), 0
        for stream in _replicated(sample):
            own, items = stream.share_of(rank), {item.name: item for item in stream.items}
            for piece in stream.pieces(own.start, own.stop, offset):
                item, start = items[piece.item], piece.item_offset
                stop, role = start + piece.nbytes, item.role.value
                rows.append(
                    TensorRange(item.name, item.dtype, role, "replicated", item.nbytes, start, stop, piece.offset)
                )
            offset += -(-(own.stop - own.start) // 64) * 64
        for name, _, first, last, total in self._shard(at.pp, at.dp):
            for state, role in _OPTIMIZER:
                label, nbytes = f"optimizer.{state}.{name}", 4 * (last - first)
                rows.append(
                    TensorRange(label, "float32", role.value, "sharded", 4 * total, 4 * first, 4 * last, offset)
                )
                offset += -(-nbytes // 64) * 64
        return Manifest(rank, self.topology.world_size, (at.pp, at.tp), (), tuple(rows))

    def resized(self, replicas: int) -> ScaledJob:
        """The same model with another number of replicas."""
        return ScaledJob(replace(self.topology, dp=replicas))

    def encoded_manifest(self, rank: int) -> bytes:
        return manifest.write(self.manifest(rank))


def _replicated(layout: Layout) -> list[ReplicaStream]:
    return [stream for stream in layout.streams if stream.background and len(stream.replicas) > 1]
