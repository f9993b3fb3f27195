"""Look, now and then, whether the ranks that are taken for replicas of each other are.

A restore puts each item together from parts of all its replicas. Ranks that are meant to differ (a hook that averages
every few iterations, pipeline stages of equal shape) would be mixed by it. So at iterations 2, 4, 8, 16, ... each rank
sends all others a digest of some words of its replicated items, and compares at the next fence, behind compute.

Invariant: all ranks see the same digests, and come to the same verdict. Until iteration 8 a difference ends the job,
before a restore could do harm; later it is an alarm, as of a device that computes wrongly.

In: a host, the ranks of the job. Out: nothing, StateChangedError, or `audit.failed`.
"""

from __future__ import annotations

import time
from typing import Any

import msgpack
import xxhash

from ...collective import Collective, PendingGather
from ...errors import ProtocolError, StateChangedError
from ...events import Events, catalogue
from ...model.host import Host
from ...model.inventory import set_digest
from ...snapshot.capture.copiers import flat_bytes
from ...snapshot.capture.samples import SampledWords

_EARLY = 8  # iterations: until then ranks that differ are meant to
_LOOK_SECONDS = 0.05

Digests = dict[int, list[tuple[str, int]]]  # by replica set, of each item


class ReplicaLook:
    """On one rank."""

    def __init__(self, host: Host, collective: Collective, events: Events) -> None:
        self._host, self._collective, self._events = host, collective, events
        self._sets = {set_digest(ranks): (ranks, items) for ranks, items in host.inventory().replica_sets().items()}
        self._own: Digests = {}
        self._pending: PendingGather | None = None
        self._iteration = 0  # of the look under way
        self._names = False  # whether it is about items

    def begin(self, iteration: int) -> None:
        """The version point of an iteration."""
        if iteration < 2 or iteration & (iteration - 1) or self._collective.world_size == 1:
            return
        live = {name: one for name, one in self._host.tensors().items() if not one.is_meta}
        self._own = {}
        for digest, (ranks, items) in self._sets.items():
            names = [item.name for item in items if item.name in live and item.nbytes] if len(ranks) > 1 else []
            sampled = SampledWords({name: flat_bytes(name, live[name]) for name in names})
            words = sampled.by_name(sampled.read())
            self._own[digest] = [(name, xxhash.xxh3_64_intdigest(words[name].numpy().data)) for name in names]
        self._iteration, self._names = iteration, False
        self._start({digest: xxhash.xxh3_64_intdigest(repr(own).encode()) for digest, own in self._own.items()})

    def _start(self, payload: Any) -> None:
        self._pending = self._collective.start_gather(msgpack.packb(payload))
        if self._pending.refused:  # no rank gets it
            self._pending = None

    def fence(self, gone: str) -> None:
        """The fence of the next iteration. `gone`: the word of a rank that may have sent nothing. Raises
        StateChangedError."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        until = time.monotonic() + pending.seconds
        while pending.waits(_LOOK_SECONDS):
            if self._collective.announced(gone) or time.monotonic() > until:
                return
        try:
            found = [msgpack.unpackb(part, strict_map_key=False) for part in pending.result()]
        except ProtocolError:  # a rank was lost: the job restarts
            return
        seen: dict[Any, Any] = {}
        differing = {key for part in found for key, value in part.items() if seen.setdefault(key, value) != value}
        if differing and not self._names:
            self._names = True
            self._start({f"{key} {name}": digest for key in differing for name, digest in self._own.get(key, ())})
            self.fence(gone)
        elif differing:
            self._judge(found, sorted(differing))

    def _judge(self, found: list[dict[str, int]], differing: list[str]) -> None:
        first, _, name = differing[0].partition(" ")
        holders = [rank for rank, part in enumerate(found) if differing[0] in part]
        other = next(rank for rank in holders if found[rank][differing[0]] != found[holders[0]][differing[0]])
        reason = (
            f"iteration {self._iteration}: '{name}' of rank {other} differs from rank {holders[0]}'s ({len(differing)} "
            f"tensors do), but ranks {holders} are taken for data-parallel replicas, of which a restore puts together "
            "one state"
        )
        if self._iteration > _EARLY:
            words = {"majority": False, "waited_seconds": 0.0, "layers": [], "buckets": [], "ranks": holders}
            self._events.emit(catalogue.AUDIT_FAILED, iteration=self._iteration, reason=reason, **words)
            return
        raise StateChangedError(
            f"rank {self._collective.rank}: {reason}: it cannot be protected if they are meant to differ (pipeline "
            "stages, hooks that average now and then); use --sync-policy for local SGD, or make the replicas equal",
            echo=self._collective.rank != 0,
        )
