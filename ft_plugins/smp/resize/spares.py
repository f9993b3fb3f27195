"""Restore state from spares: nodes that hold state of a previous size and take no part in the job at its current size.

Invariant: a spare keeps its state as long as the job may need it, and drops it only when the job reports that a newer
lineage is safe without it. A node with live trainers is not a spare: it reports nothing and drops nothing. A node on
which an incarnation has begun since it was asked drops nothing either. Once asked, a spare exchanges and commits
nothing more. It remembers the lineage that released it, so that no lineage is opened twice and no job silently starts
from nothing.

    spare    report your state of sizes other than this one
    release  the job is safe in this lineage: drop what is older

In: on a spare, requests of other nodes' SMPs; on a node of the job, the spares' endpoints, kept in `spares.json` of the
run directory for a replacement SMP. Out: reports; memory freed; `spare.queried`, `spare.released`, `release.failed`
events.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from pydantic import TypeAdapter

from ...base import files
from ...base.intake import Count, parsed, read_json
from ...errors import FtError, ProtocolError
from ...events import catalogue
from ...snapshot.segment.segment import Segment
from ...transport.calls import Peer
from ..serve import job_file
from ..serve.job_file import ProtectionReference
from ..serve.node_context import NodeContext
from ..serve.requests import HostPort, ReleaseSpare, SpareState
from ..tree.node import NodeTier
from ..watch import liveness
from .context import ResizeContext

_TO_RELEASE_FILE = "spares.json"  # in the run directory: endpoints of the spares that this node has to release
_ASKED_TOKEN_FILE = "asked.json"  # in the run directory: this node's fencing token when it was asked as a spare
_RETRY_SECONDS = 0.2  # between two calls to a spare whose SMP is being replaced
_TOKEN, _ENDPOINTS = TypeAdapter(Count), TypeAdapter(tuple[HostPort, ...])
_AHEAD = 1 << 20  # lineages, one for each restart, that a spare may have missed
_RELEASE_TRIES, _RELEASE_PAUSE_SECONDS = 10, 3.0

Endpoint = tuple[str, int]


class SpareServer:
    """Answers for this node while it is a spare."""

    def __init__(self, smp: ResizeContext) -> None:
        self._asked_token_file = smp.run_dir / _ASKED_TOKEN_FILE
        self._smp = smp

    def answer(self, request: SpareState | ReleaseSpare) -> dict[str, Any]:
        """The reply to a request. Raises ProtocolError."""
        with self._smp.lock:
            alive = [rank for rank, segment in self._smp.segments.items() if _has_trainer(segment)]
            if alive:
                return {"busy": sorted(alive)}
            if isinstance(request, ReleaseSpare):
                return self._release(request.lineage)
            if request.node != self._smp.node:
                raise ProtocolError(f"this is node {self._smp.node}; the request is for node {request.node}")
            return self._report(request.world_size)

    def _report(self, world_size: int) -> dict[str, Any]:
        smp = self._smp
        smp.tier.suspend()
        files.write_json(self._asked_token_file, smp.token)
        own = smp.segments_of_other_sizes(world_size)
        reported = [*own, *smp.previous.all()]
        smp.events.emit(catalogue.SPARE_QUERIED, ranks=world_size, segments=len(reported))
        return {
            **smp.previous.report(own),
            "lineage": max((segment.newest_lineage for segment in reported), default=0),
            **smp.tier.parity(),
        }

    def _release(self, lineage: int) -> dict[str, Any]:
        smp = self._smp
        newest = max([smp.previous.lineage, *(segment.newest_lineage for segment in smp.segments.values())])
        if newest >= lineage or self._asked_token() != smp.token:
            return {"dropped": 0}  # it takes part in the job again, or was released already
        if lineage - newest > _AHEAD:
            raise ProtocolError(f"release: expected a lineage up to {newest + _AHEAD}, found {lineage}")
        ranks = sorted(smp.segments)
        smp.persister.release(ranks)
        for rank in ranks:
            segment = smp.segments.pop(rank)
            segment.path.unlink(missing_ok=True)
            segment.close()
        smp.previous_storage.stop()
        dropped = len(ranks) + smp.previous.drop()
        smp.tier.release(lineage)
        self.forget()
        if dropped:
            smp.events.emit(catalogue.SPARE_RELEASED, segments=dropped, lineage=lineage)
        return {"dropped": dropped}

    def forget(self) -> None:
        """Remove the file in which this node remembers that it was asked."""
        self._asked_token_file.unlink(missing_ok=True)

    def _asked_token(self) -> int | None:
        try:
            return read_json(self._asked_token_file, _TOKEN)
        except (OSError, ValueError):
            return None


def _has_trainer(segment: Segment) -> bool:
    pid, began = segment.header.owner
    return bool(began) and liveness.started(pid) == began


class SpareClient:
    """Asks spares for their state, and releases them once the job no longer needs it."""

    def __init__(self, smp: NodeContext, tier: NodeTier) -> None:
        """Continue with the spares that an earlier SMP of this node had to release."""
        self._run_dir, self._events = smp.run_dir, smp.events
        self._path = smp.run_dir / _TO_RELEASE_FILE
        self._tier = tier
        self._lock = threading.Lock()
        self._releasing: set[Endpoint] = set()
        try:
            self._to_release = {*read_json(self._path, _ENDPOINTS)}
        except (OSError, ValueError):
            self._to_release = set()

    @property
    def has_unreleased(self) -> bool:
        """Whether there are spares for which `release` was not called yet."""
        return bool(self._to_release)

    def ask(self, node: str, where: Endpoint, world_size: int, timeout: float) -> dict[str, Any]:
        """The report of the SMP of `node` at `where` on sizes other than `world_size`, or `busy`. The job file that it
        names is here afterwards.

        Retries for `timeout` seconds while that SMP refuses or resets the connection: it is being replaced. Raises
        ProtocolError, or the error with which it refused."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                with closing(self._tier.peer(where, timeout, node)) as peer:
                    reply, _ = peer.ask("spare", node=node, world_size=world_size)
                    self._fetch_job(peer, reply)
                    return {name: value for name, value in reply.items() if name != "ok"}
            except ProtocolError as error:
                if not isinstance(error.__cause__, ConnectionError) or time.monotonic() > deadline:
                    raise
            time.sleep(_RETRY_SECONDS)

    def _fetch_job(self, peer: Peer, reply: Mapping[str, Any]) -> None:
        """Copy the job file that a spare's report names to this node, unless it is here. Raises ProtocolError."""
        if reply.get("protection") is None:
            return
        reference = parsed(ProtectionReference, reply["protection"], "spare")
        if job_file.holds(self._run_dir, reference.job):
            return
        content = bytearray()
        while len(content) < reference.nbytes:
            _, part = peer.ask("read", what="job", job=reference.job, offset=len(content))
            if not len(part):
                break
            content += part.tobytes()
        job_file.write_content(self._run_dir, reference.job, bytes(content))

    def release_later(self, endpoints: Sequence[Endpoint]) -> None:
        """Remember spares to release when the job is safe without their state."""
        with self._lock:
            self._to_release |= set(endpoints)
            self._remember()

    def _remember(self) -> None:
        """Write the spares still to be released, for a replacement SMP."""
        unreleased = self._to_release | self._releasing
        if unreleased:
            files.write_json(self._path, sorted(unreleased))
        else:
            self._path.unlink(missing_ok=True)

    def release(self, lineage: int, timeout: float) -> None:
        """The job is safe in `lineage`: release the spares in the background."""
        with self._lock:
            endpoints, self._to_release = sorted(self._to_release), set()
            self._releasing |= set(endpoints)
        if endpoints:
            threading.Thread(
                target=self._release, args=(endpoints, lineage, timeout), name="smp-release", daemon=True
            ).start()

    def _release(self, endpoints: Sequence[Endpoint], lineage: int, timeout: float) -> None:
        """The thread. A spare that cannot be reached keeps its state until it takes part in the job again, or ends."""
        handled, reason = set(endpoints), ""
        for _ in range(_RELEASE_TRIES):
            unreached = []
            for endpoint in endpoints:
                peer: Peer = self._tier.peer(endpoint, timeout)
                try:
                    with closing(peer):
                        peer.ask("release", lineage=lineage)
                except FtError as error:
                    reason = str(error)
                    unreached.append(endpoint)
            endpoints = unreached
            if not endpoints:
                break
            time.sleep(_RELEASE_PAUSE_SECONDS)
        else:
            self._events.emit(catalogue.RELEASE_FAILED, spares=[list(one) for one in endpoints], reason=reason)
        with self._lock:
            self._releasing -= handled
            self._remember()

    def forget(self) -> None:
        """Remove the list of spares to release: the job ends."""
        with self._lock:
            self._to_release, self._releasing = set(), set()
            self._remember()
