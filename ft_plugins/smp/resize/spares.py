"""Restore state from spares: nodes that hold state of the job, and take no part in it now.

Invariant: a spare keeps its state as long as the job may need it, and drops it only when a node of the job reports that
a newer lineage is safe without it. A node with live trainers is not a spare: it reports nothing and drops nothing. A
node on which an incarnation has begun since it asked drops nothing either. Once asked for state of another size, a
spare exchanges and commits nothing more. It remembers the lineage for which it dropped its state, so that no lineage is
opened twice and no job silently starts from nothing.

In: on a spare, requests of other nodes' SMPs, and what one after the other answers; on a node of the job, the spares'
endpoints. Out: reports; memory freed; `spare.queried` and `spare.released` events.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from ...base.intake import parsed
from ...errors import ProtocolError
from ...events import catalogue
from ...transport.calls import Peer
from ..serve import job_file
from ..serve.job_file import ProtectionReference
from ..serve.node_context import NodeContext
from ..serve.requests import SpareState
from ..tree import other_nodes
from ..tree.node import NodeTier
from ..watch import liveness
from .context import ResizeContext

_RETRY_SECONDS = 0.2  # between two calls to a spare whose SMP is being replaced
_AHEAD = 1 << 20  # lineages, one for each restart, that a spare may have missed
LOOK_SECONDS = 1.0  # between two looks whether the job still needs what a spare holds
_ANSWER_SECONDS = 1.0

Endpoint = tuple[str, int]


class SpareServer:
    """This node while it is a spare."""

    def __init__(self, smp: ResizeContext) -> None:
        self._smp = smp
        self._looked, self._turn = time.monotonic(), 0

    def answer(self, request: SpareState) -> dict[str, Any]:
        """The reply to a request. Raises ProtocolError."""
        smp = self._smp
        with smp.lock:
            if alive := self._alive():
                return {"busy": alive}
            if request.node != smp.node:
                raise ProtocolError(f"this is node {smp.node}; the request is for node {request.node}")
            smp.tier.suspend()
            own = smp.segments_of_other_sizes(request.world_size)
            reported = [*own, *smp.previous.all()]
            smp.events.emit(catalogue.SPARE_QUERIED, ranks=request.world_size, segments=len(reported))
            return {
                **smp.previous.report(own),
                "lineage": max((segment.newest_lineage for segment in reported), default=0),
                **smp.tier.parity(),
            }

    def drop_if_safe(self) -> None:
        """Ask another node now and then, each time the next one, and drop what is here if the job no longer needs it.
        For when no trainer lives here; takes _ANSWER_SECONDS at most."""
        smp, now = self._smp, time.monotonic()
        if now - self._looked < LOOK_SECONDS or not (others := smp.tier.others()):
            return
        self._looked, self._turn, token = now, self._turn + 1, smp.token
        node, where = others[self._turn % len(others)]
        [answer] = other_nodes.ask({node: smp.tier.peer(where, _ANSWER_SECONDS, node)}, _ANSWER_SECONDS)
        with smp.lock:
            if token == smp.token and not self._alive():
                self._release(answer["safe"] or 0)

    def _alive(self) -> list[int]:
        """The ranks here that have a live trainer."""
        owners = {rank: segment.header.owner for rank, segment in self._smp.segments.items()}
        return sorted(rank for rank, (pid, began) in owners.items() if began and liveness.started(pid) == began)

    def _release(self, lineage: int) -> None:
        """Drop what is here if it is older than that lineage, which cannot be ahead of it without bounds."""
        smp = self._smp
        newest = max([smp.previous.lineage, *(segment.newest_lineage for segment in smp.segments.values())])
        if not 0 < newest < lineage <= newest + _AHEAD:  # without segments parity may be of the newest
            return
        ranks = sorted(smp.segments)
        smp.persister.release(ranks)
        for rank in ranks:
            segment = smp.segments.pop(rank)
            segment.path.unlink(missing_ok=True)
            segment.close()
        smp.previous_storage.stop()
        dropped = len(ranks) + smp.previous.drop()
        smp.tier.release(lineage)
        if dropped:
            smp.events.emit(catalogue.SPARE_RELEASED, segments=dropped, lineage=lineage)


class SpareClient:
    """Asks spares for their state."""

    def __init__(self, smp: NodeContext, tier: NodeTier) -> None:
        self._run_dir, self._tier = smp.run_dir, tier

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
