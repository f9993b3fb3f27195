"""What one rank captures: the layout of its share, the shape of its segment, and what is stored with each version.

Invariant: all of it follows from the host's state at start and the configuration, so a restart of the same job computes
the same plan and can use its segment.

In: host, configuration, layout. Out: `Shape`, `Manifest`, `Storage`, small state as bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import msgpack
import xxhash

from ...collective import Collective
from ...config import Config, ReftConfig
from ...errors import InventoryError
from ...model.host import Host
from ...model.inventory import Inventory, set_digest
from ...snapshot.capture import codec, manifest
from ...snapshot.capture.layout import Layout, layout_digest
from ...snapshot.capture.manifest import Manifest
from ...snapshot.capture.retention import Storage
from ...snapshot.checkpoint import index
from ...snapshot.segment.shape import Shape
from ...snapshot.segment.slots import FIRST, Pin, free_of, needed_free, slots_for
from .reft_nodes import schedule_of

_SMALL_FLOOR = 64 << 10  # minimum bytes claimed for small state, else twice its first size
_NUMBERS = 256  # bytes of the numbers that come with an item that only an update makes, as 'step' does


class CapturePlan:
    """The content of one rank's versions. `losses`: how many nodes of a redundancy group may be lost."""

    def __init__(
        self, host: Host, config: Config, reft: ReftConfig, layout: Layout, losses: int, world_size: int
    ) -> None:
        """Raises ConfigError for a number of slots that cannot do here."""
        self.layout = layout
        self._host = host
        self._config = reft
        self._losses = losses
        self._world_size = world_size
        self.schedule = schedule_of(config)
        needed = needed_free(self.schedule.captured, aligned=not self.schedule.compared and config.sync is None)
        others = set(self._purposes()) - {Pin.NODE, Pin.SOURCE}
        self._free = needed if reft.slots is None else free_of(reft.slots, needed, losses > 0, others)
        self.lacking = needed - self._free  # slots, for the newest version that all ranks have to be never overwritten

    @cached_property
    def shape(self) -> Shape:
        absent = sum(tensor.is_meta for tensor in self._host.tensors().values())
        small = max(_SMALL_FLOOR, 2 * (len(self.small()) + _NUMBERS * absent))
        kinds = [(item.name, item.dtype, item.shape) for item in self._host.inventory().items]
        digest = layout_digest(self.layout, self._config.bucket_mib, kinds)
        nbytes, parity = self.layout.nbytes, self.layout.parity_nbytes
        slots = slots_for(*self._purposes(), free=self._free)
        return Shape(
            nbytes + parity, small, len(self.layout.ranges), digest, slots, parity, self.layout.source_digest_count,
            self._free, FIRST if self._losses and self._config.slots is None else 0,
        )  # fmt: skip

    def _purposes(self) -> list[Pin]:
        """The purposes for which versions are pinned: each adds a slot."""
        pins = [Pin.NODE, Pin.SOURCE] if self._losses else []
        pins += [Pin.STORAGE] if self.storage else []
        return pins + ([Pin.CERTIFIED] if self.schedule.compared else [])

    @cached_property
    def storage(self) -> Storage | None:
        """How the SMP writes checkpoints; None if it writes none."""
        config = self._config
        if config.checkpoint_dir is None:
            return None
        return Storage(
            str(Path(config.checkpoint_dir).absolute()), config.begins_with[1], self.schedule.captured,
            config.checkpoint_keep, self._world_size, self.schedule.compared,
        )  # fmt: skip

    @cached_property
    def manifest(self) -> Manifest:
        """The place of each tensor's bytes in this rank's slots."""
        at = self._host.topology().coords(self._host.rank)
        permuted = [name for name, tensor in self._host.tensors().items() if not tensor.is_contiguous()]
        return manifest.manifest_of(self.layout, self._world_size, (at.pp, at.tp), permuted)

    @cached_property
    def _encoded_manifest(self) -> bytes:
        return manifest.write(self.manifest)

    def small(self) -> bytes:
        """The host's small state now, as stored in a slot."""
        return self.encoded(self._host.small_state())

    def encoded(self, small: Mapping[str, Any]) -> bytes:
        """A small state as stored in a slot: preceded by the manifest."""
        return manifest.join(self._encoded_manifest, codec.encode(small))

    def index(self, names: Mapping[str, Any] | None) -> dict[str, Any]:
        """The index for checkpoints of this start; `names`: the framework's names of the items."""
        return index.describe(self._host.inventory(), self.shape.layout, names)


def check_replicas(inventory: Inventory, collective: Collective) -> None:
    """Check that the ranks of each replica set hold the same items. Every rank calls. Raises InventoryError."""
    shared = {replicas: items for replicas, items in inventory.replica_sets().items() if len(replicas) > 1}
    own = {
        replicas: (
            set_digest(replicas),
            xxhash.xxh3_64_intdigest(repr([(i.name, i.dtype, i.shape, i.background) for i in items]).encode()),
        )
        for replicas, items in shared.items()
    }
    gathered = collective.gather(msgpack.packb(dict(own.values())))
    named = {rank: msgpack.unpackb(gathered[rank], strict_map_key=False) for rank in set().union(*own)}
    for replicas, (key, digest) in own.items():
        for rank in replicas:
            if named[rank].get(key) != digest:
                raise InventoryError(
                    f"rank {inventory.rank}: expected rank {rank} to hold the same {len(shared[replicas])} items as "
                    f"the other replicas in {replicas}, but it has different ones; build the replicas of a parameter "
                    "the same way on all ranks"
                )
