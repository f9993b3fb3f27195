"""Look, now and then, whether the ranks that are taken for replicas of each other are.

A restore puts each item together from parts of all its replicas. Ranks that are meant to differ (a hook that averages
every few iterations, pipeline stages of equal shape) would be mixed by it. So 2, 4, 8, 16, ... iterations after a start
each rank sends all others a digest of some bytes of its replicated items, and compares at the next fence, behind
compute.

Invariant: all ranks see the same digests, and come to the same verdict. Until the eighth iteration a difference ends
the job, before a restore could do harm; later it is an alarm, as of a device that computes wrongly.

In: a host, the ranks of the job. Out: nothing, StateChangedError, or `audit.failed`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import numpy as np
import xxhash

from ...collective import Collective, PendingGather
from ...errors import ProtocolError, StateChangedError
from ...events import Events, catalogue
from ...model.host import Host
from ...model.inventory import set_digest
from ...snapshot.capture.copiers import flat_bytes
from ...snapshot.capture.samples import SampledWords

_EARLY = 8  # iterations: until then ranks that differ are meant to
_BYTES = 2048  # of an item, spread evenly over all places of a number
_LOOK_SECONDS = 0.05
_SHOWN = 4  # of the sets of replicas that differ

Found = Sequence[Mapping[int, Any]]  # what each rank has sent, by replica set


class ReplicaLook:
    """On one rank."""

    def __init__(self, host: Host, collective: Collective, events: Events) -> None:
        self._host, self._collective, self._events = host, collective, events
        sets = host.inventory().replica_sets().items()
        # by replica set, the names of its items: in the same order on all of its ranks
        self._names = {set_digest(ranks): [item.name for item in items] for ranks, items in sets if len(ranks) > 1}
        self._own: dict[int, bytes] = {}  # 8 bytes an item
        self._pending: PendingGather | None = None
        self.begun = 0  # the iteration with which this start has begun
        self._iteration = 0  # of the look under way

    def begin(self, iteration: int) -> None:
        """The version point of an iteration."""
        since = iteration - self.begun
        if since < 2 or since & (since - 1) or self._collective.world_size == 1:
            return
        self._own = {key: self._digests(names) for key, names in self._names.items()}
        self._iteration = iteration
        self._start({key: xxhash.xxh3_64_intdigest(own) for key, own in self._own.items()})

    def _digests(self, names: Sequence[str]) -> bytes:
        tensors = self._host.tensors()
        flat = {name: flat_bytes(name, tensors[name]) for name in names if not tensors[name].is_meta}
        steps = {name: max(1, one.numel() // _BYTES | 1) for name, one in flat.items()}  # odd: not one byte of each
        sampled = SampledWords({name: one[:: steps[name]].clone() for name, one in flat.items() if one.numel()})
        words = sampled.by_name(sampled.read())
        digests = [xxhash.xxh3_64_intdigest(words[name].numpy().data) if name in words else 0 for name in names]
        return np.array(digests, dtype="<u8").tobytes()

    def _start(self, payload: Mapping[int, Any]) -> None:
        pending = self._collective.start_gather(msgpack.packb(payload))
        self._pending = None if pending.refused else pending  # no rank gets it

    def fence(self, gone: str) -> None:
        """The fence of the next iteration. `gone`: the word of a rank that may have sent nothing. Raises
        StateChangedError."""
        if (found := self._found(gone)) is None or not (differing := _differing(found)):
            return
        self._start({key: self._own[key] for key in differing[:_SHOWN] if key in self._own})
        if (found := self._found(gone)) is not None and (differing := _differing(found)):
            self._judge(found, differing[0])

    def _found(self, gone: str) -> Found | None:
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        until = time.monotonic() + pending.seconds
        while pending.waits(_LOOK_SECONDS):
            if self._collective.announced(gone) or time.monotonic() > until:
                return None
        try:
            return [msgpack.unpackb(part, strict_map_key=False) for part in pending.result()]
        except ProtocolError:  # a rank was lost: the job restarts
            return None

    def _judge(self, found: Found, key: int) -> None:
        holders = [rank for rank, part in enumerate(found) if key in part]
        first = np.frombuffer(found[holders[0]][key], dtype="<u8")
        other = next(rank for rank in holders if found[rank][key] != found[holders[0]][key])
        places = np.flatnonzero(first != np.frombuffer(found[other][key], dtype="<u8")).tolist()
        what = f"'{self._names[key][places[0]]}'" if key in self._names else "a tensor"
        reason = (
            f"iteration {self._iteration}: {what} of rank {other} differs from rank {holders[0]}'s ({len(places)} "
            f"tensors do), but ranks {holders} are taken for data-parallel replicas, of which a restore puts together "
            "one state"
        )
        if self._iteration - self.begun > _EARLY:
            words: dict[str, Any] = {"majority": False, "waited_seconds": 0.0, "layers": [], "buckets": []}
            self._events.emit(
                catalogue.AUDIT_FAILED,
                iteration=self._iteration,
                reason=reason,
                ranks=holders,
                **words,
            )
            return
        raise StateChangedError(
            f"rank {self._collective.rank}: {reason}: it cannot be protected if they are meant to differ (pipeline "
            "stages, hooks that average now and then); use --sync-policy for local SGD, or make the replicas equal",
            echo=self._collective.rank != 0,
        )


def _differing(found: Found) -> list[int]:
    """The replica sets whose ranks have not all sent the same."""
    seen: dict[int, Any] = {}
    return sorted({key for part in found for key, value in part.items() if seen.setdefault(key, value) != value})
