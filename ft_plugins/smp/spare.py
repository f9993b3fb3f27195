"""A node that has no part in the job as it is now, but state of it at another size: asked by SMPs of nodes that have.

Invariant: what such a node holds is a source like any other as long as the job may need it, and is dropped only when
the job has said that a newer lineage counts without it. Once it was asked, nothing of an incarnation here is exchanged
or counts any more. A node whose trainers live is no spare, whatever others think: it hands out nothing and drops
nothing; nor does it drop anything once it has begun an incarnation since it was asked. What was dropped stays known by
its lineage, so that none is opened twice and nothing begins from nothing unasked.

    spare    what do you hold of other sizes than this one?
    release  the job goes on in that lineage: drop what is older

In: requests of other nodes' SMPs; on their side, where the spares are (`spares.json` in the run directory, for an SMP
that takes over). Out: facts as of `former`; memory given back; `spare.queried`, `spare.released` events.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ..errors import FtError, ProtocolError
from ..events import Events, catalogue
from ..intake import Count, read_json
from ..snapshot.segment import Segment
from . import liveness, protocol
from .former import Former
from .node import NodeTier
from .peers import written
from .requests import ENDPOINTS
from .wire import Peer

REQUESTS = frozenset({"spare", "release"})
_ASKED = "spares.json"  # in the run directory: whom this node has asked
_BY = "asked.json"  # likewise: the token under which this one was asked
_AGAIN_SECONDS = 0.2  # between two calls of a spare whose SMP is not there: it is being replaced
_TOKEN = TypeAdapter(Count)
_TRIES, _PAUSE_SECONDS = 10, 3.0  # of a spare that is told that it may drop what it holds

Endpoint = tuple[str, int]


class Spare:
    """This node, as far as it is one. `lock` is the SMP's, under which `segments` and `former` change."""

    def __init__(
        self,
        run_dir: Path,
        node: str,
        token: Callable[[], int],
        segments: MutableMapping[int, Segment],
        former: Former,
        tier: NodeTier,
        lock: AbstractContextManager[Any],
        events: Events,
        let_go: Callable[[Sequence[int]], None],
        let_go_aside: Callable[[], None],
    ) -> None:
        """`token` is the SMP's; `let_go` is told of the ranks whose segments leave, `let_go_aside` before what is set
        aside does."""
        self._by = run_dir / _BY
        self._node = node
        self._token = token
        self._segments = segments
        self._former = former
        self._tier = tier
        self._lock = lock
        self._events = events
        self._let_go = let_go
        self._let_go_aside = let_go_aside

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request of `REQUESTS`. Raises ProtocolError."""
        with self._lock:
            alive = [rank for rank, found in self._segments.items() if _has_trainer(found)]
            if alive:
                return {"busy": sorted(alive)}
            if message["do"] == "spare":
                if (wanted := protocol.field(message, "node", str)) != self._node:
                    raise ProtocolError(f"node {wanted} was asked; this is {self._node}")
                return self._hand_out(protocol.number(message, "world_size"))
            return self._release(protocol.number(message, "lineage"))

    def _hand_out(self, world_size: int) -> dict[str, Any]:
        self._tier.suspend()
        written(self._by, self._token())
        own = {rank: found for rank, found in self._segments.items() if found.world_size not in (0, world_size)}
        held = [*own.values(), *(one for held in self._former.sizes().values() for one in held.values())]
        self._events.emit(catalogue.SPARE_QUERIED, ranks=world_size, segments=len(held))
        return {
            "sizes": self._former.facts(own.values()),
            "fingerprints": self._former.fingerprints(own.values()),
            "marks": self._former.marks(own.values()),
            "damaged": self._former.damaged(own.values()),
            "lineage": max((found.newest_lineage for found in held), default=0),
            **self._tier.parity(),
        }

    def _release(self, lineage: int) -> dict[str, Any]:
        newest = max([self._former.lineage, *(found.newest_lineage for found in self._segments.values())])
        if newest >= lineage or self._asked_under() != self._token():
            return {"dropped": 0}  # it takes part again
        left = sorted(self._segments)
        self._let_go(left)
        for rank in left:
            found = self._segments.pop(rank)
            found.path.unlink(missing_ok=True)
            found.close()
        self._let_go_aside()
        dropped = len(left) + self._former.drop()
        self._tier.release(lineage)
        self._by.unlink(missing_ok=True)
        if dropped:
            self._events.emit(catalogue.SPARE_RELEASED, segments=dropped, lineage=lineage)
        return {"dropped": dropped}

    def forget(self) -> None:
        """The end of the SMP."""
        self._by.unlink(missing_ok=True)

    def _asked_under(self) -> int | None:
        try:
            return read_json(self._by, _TOKEN)
        except (OSError, ValueError):
            return None


def _has_trainer(found: Segment) -> bool:
    pid, began = found.owner
    return bool(began) and liveness.started(pid) == began


class Asked:
    """The spares of which this job has taken state over, as one node that takes part knows them."""

    def __init__(self, run_dir: Path, tier: NodeTier, events: Events) -> None:
        """Go on with what an SMP before this one was told."""
        self._path = run_dir / _ASKED
        self._tier = tier
        self._events = events
        self._lock = threading.Lock()
        self._telling: set[Endpoint] = set()
        try:
            self._where = {*read_json(self._path, ENDPOINTS)}
        except (OSError, ValueError):
            self._where = set()

    def __bool__(self) -> bool:
        return bool(self._where)

    def ask(self, node: str, where: Endpoint, world_size: int, timeout: float) -> dict[str, Any]:
        """What the SMP of `node` at `where` has of other sizes than this one, or `busy`. Where it is not there it is
        called again for `timeout` seconds. Raises ProtocolError, or what it refused with."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                with closing(self._tier.peer(where, timeout, node)) as peer:
                    reply, _ = peer.ask("spare", node=node, world_size=world_size)
                    return {name: value for name, value in reply.items() if name != "ok"}
            except ProtocolError as error:
                if not isinstance(error.__cause__, ConnectionError) or time.monotonic() > deadline:
                    raise
            time.sleep(_AGAIN_SECONDS)

    def keep(self, where: Sequence[Endpoint]) -> None:
        """These are to be released when the job can do without them."""
        with self._lock:
            self._where |= set(where)
            self._remember()

    def _remember(self) -> None:
        """Who is to be told, for a successor."""
        left = self._where | self._telling
        if left:
            written(self._path, sorted(left))
        else:
            self._path.unlink(missing_ok=True)

    def release(self, lineage: int, timeout: float) -> None:
        """The job goes on in `lineage`: tell them, in the background."""
        with self._lock:
            where, self._where = sorted(self._where), set()
            self._telling |= set(where)
        if where:
            threading.Thread(target=self._tell, args=(where, lineage, timeout), name="smp-release", daemon=True).start()

    def _tell(self, where: Sequence[Endpoint], lineage: int, timeout: float) -> None:
        """The thread. A spare that cannot be told keeps what it has until it takes part again, or ends."""
        told, reason = set(where), ""
        for _ in range(_TRIES):
            left = []
            for one in where:
                peer: Peer = self._tier.peer(one, timeout)
                try:
                    with closing(peer):
                        peer.ask("release", lineage=lineage)
                except FtError as error:
                    reason = str(error)
                    left.append(one)
            where = left
            if not where:
                break
            time.sleep(_PAUSE_SECONDS)
        else:
            self._events.emit(catalogue.RELEASE_FAILED, spares=[list(one) for one in where], reason=reason)
        with self._lock:
            self._telling -= told
            self._remember()

    def forget(self) -> None:
        """The end of the SMP."""
        with self._lock:
            self._where, self._telling = set(), set()
            self._remember()
