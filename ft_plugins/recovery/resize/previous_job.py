"""Find the state of the job at a previous size in the memory of the nodes, and gather it on the nodes of this size.

Invariant: all ranks choose the same version, and every slot of it is verified or rebuilt before it is used. Older state
is dropped only for a version that every rank of the previous job has. State of the current size is preferred if it is
as new. State that exists but cannot be restored is an error that says why; the job never silently starts from
nothing. Every rank of the job makes each call.

Spares, and nodes that joined too late to take part, are sources like other nodes: their SMPs are asked at the endpoints
that the other SMPs remember. What only they have is fetched before anything is restored; after that the job does not
need them. A spare that is lost meanwhile is a lost node, and the plan is made again.

In: reports of the SMPs (`smp.resize`). Out: a `ResizePlan`; segments with its state on the nodes that it names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack

from ...collective import Collective
from ...errors import FtError, ResumeError
from ...model.host import resizable
from ...snapshot.segment.paths import previous_path_of
from ...snapshot.segment.segment import Segment
from ...snapshot.segment.slots import SlotState, Version
from ..nodes import Endpoint, SeenNodes, Spare
from ..recovery_plan import RecoveryPlan, Way
from .previous_size import (
    Coordinates,
    PreviousSize,
    ResizePlan,
    assign_nodes,
    newest_references,
    plan_current_size,
    plan_previous_size,
    read_previous_sizes,
)


class PreviousJob:
    """The job at its previous sizes, as far as its state is left in memory."""

    def __init__(
        self, collective: Collective, nodes: SeenNodes, token: int, run_dir: Path, report: Callable[[FtError], None]
    ) -> None:
        """`report` is called with errors that the job survives: a corrupt slot, a spare that does not answer."""
        self._collective = collective
        self._nodes = nodes
        self._token = token
        self._run_dir = run_dir
        self._report = report
        self._spares: list[Spare] = []
        self.run = ""  # the newest that any report knows, '' if none does

    def plan_resize(self, fingerprint: Mapping[str, Any]) -> ResizePlan | None:
        """Choose the state to restore, and gather it on the nodes that the plan names.

        None if there is none, or the current size has a version as new. Raises ResumeError on all ranks."""
        reports = self._nodes.ask(lambda client: client.previous_sizes())
        self._spares = self._ask_spares(reports)
        self._share_jobs(reports)
        every = [*reports, *(spare.report for spare in self._spares)]
        self.run = max(tuple(each.get("run", (0, ""))) for each in every)[1]
        for report in every:
            if any(resizable(previous) != resizable(fingerprint) for _, previous in report["fingerprints"]):
                raise self._refusal(
                    "the state in memory belongs to a job that differs in more than its data-parallel size; start the "
                    "previous job again, give this one another name with --ftp-job, or drop the state with "
                    "--ftp-resume fresh"
                )
        world_size = self._collective.world_size
        facts = self._nodes.facts()
        current = plan_current_size(facts, world_size, self._nodes.exchange, self._nodes.digest)
        sizes = self._read(reports)
        plans = [(plan_previous_size(size), size) for size in sizes]
        plan, size = max(plans, key=lambda entry: entry[0].version or Version(0, 0))
        if current.version is not None and (plan.version is None or current.version >= plan.version):
            return None
        if plan.version is None:
            if any(other.state_lost for other, _ in plans):
                raise self._refusal(
                    f"the state of the job of {size.world_size} ranks cannot be restored on {world_size} ranks "
                    f"({plan.reason}); start with the previous number of nodes to try again, or start from the "
                    "beginning with --ftp-resume fresh"
                )
            return None
        newest = max([0, *(v.lineage for node in facts for held in node.slots.values() for v in held)])
        newest = max([newest, *(int(spare.report["lineage"]) for spare in self._spares)])
        gathered = self._gather(size)
        lineage = 1 + max(newest, gathered.version.lineage, *(node.lineage for node in facts))
        return replace(gathered, now=Version(lineage, gathered.version.iteration))

    def keep_only(self, plan: ResizePlan) -> None:
        """Free the memory of everything but the state in `plan`. Spares keep theirs until the job is safe without."""
        rank = self._collective.rank
        self._nodes.ask(lambda client: client.settle(rank, self._token, plan.world_size, plan.version))

    def drop(self) -> None:
        """Remove all state of previous sizes, at the user's request."""
        rank = self._collective.rank
        self._nodes.ask(lambda client: client.settle(rank, self._token, 0, None))

    def _ask_spares(self, reports: Sequence[Mapping[str, Any]]) -> list[Spare]:
        """The spares that answer now, each once: nodes of the jobs that were last protected at the previous sizes."""
        spares: dict[Endpoint, Spare] = {}
        self._share_jobs(reports, spares=False)
        for size in read_previous_sizes(reports, described=self._nodes.protection):
            if size.protection is not None:
                spares |= {spare.endpoint: spare for spare in self._nodes.spares(size.protection, self._report)}
        return list(spares.values())

    def _share_jobs(self, reports: Sequence[Mapping[str, Any]], spares: bool = True) -> None:
        """Have the job files that are needed to read the reports copied to all nodes."""
        asked = [(spare.report, spare.asker) for spare in self._spares] if spares else []
        self._nodes.share_jobs(newest_references(reports, asked))

    def _read(self, reports: Sequence[Mapping[str, Any]]) -> tuple[PreviousSize, ...]:
        return read_previous_sizes(reports, [spare.report for spare in self._spares], self._nodes.protection)

    def _read_again(self, size: PreviousSize) -> PreviousSize:
        """The previous size with the spares that still answer."""
        reports = self._nodes.ask(lambda client: client.previous_sizes())
        self._spares = self._ask_spares(reports)
        self._share_jobs(reports)
        return next((updated for updated in self._read(reports) if updated.world_size == size.world_size), size)

    def _refusal(self, message: str) -> ResumeError:
        return ResumeError(message, echo=self._collective.rank != 0)  # all ranks have the same reports

    def _gather(self, size: PreviousSize) -> ResizePlan:
        """Verify the slot of every rank of the previous job, or have it rebuilt on a node of this job."""
        corrupt: set[tuple[int, Version]] = set()
        banned: set[Version] = set()
        rebuilt: dict[tuple[int, Version], int] = {}
        tried: set[tuple[int, Version]] = set()  # failed once: that round may have found the corrupt slot
        while True:
            plan = plan_previous_size(size, corrupt, banned)
            version = plan.version
            if version is None:
                raise self._refusal(
                    f"the state of the job of {size.world_size} ranks is damaged ({plan.reason}); start with the "
                    "previous number of nodes to try again, or start from the beginning with --ftp-resume fresh"
                )
            nodes = assign_nodes(size, plan, rebuilt)
            results = self._verify_or_rebuild(size, plan, nodes, rebuilt)
            bad = {rank for rank, result in results.items() if result == "corrupt"}
            failed = {(rank, version) for rank, result in results.items() if result == "failed"}
            rebuilt |= {(rank, version): nodes[rank] for rank, result in results.items() if result == "rebuilt"}
            unread = {rank for rank, result in results.items() if result == "unread"}
            if (failed or unread) and self._spares:
                before = len(self._spares)
                size = self._read_again(size)
                if len(self._spares) < before:
                    continue  # plan again without them
            bad |= unread
            corrupt |= {(rank, version) for rank in bad}
            if failed & tried or any((rank, version) in rebuilt for rank in bad):
                banned.add(version)
            elif not bad and not failed:
                coordinates = self._coordinates(nodes, version, size)
                return ResizePlan(size.world_size, version, version, nodes, coordinates, plan.completed, plan.mark)
            tried |= failed

    def _verify_or_rebuild(
        self, size: PreviousSize, plan: RecoveryPlan, nodes: Mapping[int, int],
        rebuilt: Collection[tuple[int, Version]],
    ) -> dict[int, str]:  # fmt: skip
        """The result for each rank of the previous job, obtained by one rank of its node in `nodes`.

        whole    its slot passed verification     corrupt  it did not
        rebuilt  from parity or from a spare      failed   not decoded from parity     unread  not read from a spare
        """
        assert plan.version is not None
        own: list[list[Any]] = []
        for rank in sorted(nodes):
            if not self._is_mine(rank, nodes[rank]):
                continue
            rebuilt_before = (rank, plan.version) in rebuilt
            decode = plan.sources[rank].way is Way.DECODE and not rebuilt_before
            holder = size.holder(rank, plan.version)
            spare = None
            if not decode and not rebuilt_before and holder is not None and holder >= size.members:
                spare = self._spares[holder - size.members].endpoint
            try:
                if decode or spare is not None:
                    assert size.protection is not None  # without it nothing is decoded, and no spares are known
                    spares = [one.endpoint for one in self._spares]
                    self._nodes.rebuild_previous(rank, plan, size.protection, size.fingerprint, spare, spares)
                    own.append([rank, "rebuilt"])
                else:
                    self._verify(size.world_size, rank, plan.version)
                    own.append([rank, "whole"])
            except FtError as error:
                self._report(error)
                own.append([rank, "failed" if decode else "unread" if spare else "corrupt"])
        parts = self._collective.gather(msgpack.packb(own))
        return {rank: result for part in parts for rank, result in msgpack.unpackb(part)}

    def _is_mine(self, previous_rank: int, node: int) -> bool:
        """Whether this rank handles that rank of the previous job; the ranks of its node divide them up."""
        members = self._nodes.ranks[node]
        return members[previous_rank % len(members)] == self._collective.rank

    def _verify(self, world_size: int, rank: int, version: Version) -> None:
        segment = open_previous(self._run_dir, world_size, rank)
        try:
            for slot in segment.slots():
                if slot.version == version and slot.state is SlotState.CLEAN:
                    segment.verify(slot.index)
                    return
            raise ResumeError(f"rank {rank} of {world_size}: version {version} is no longer in memory")
        finally:
            segment.close()

    def _coordinates(self, ranks: Collection[int], version: Version, size: PreviousSize) -> dict[int, Coordinates]:
        """The part of the model that each rank of the previous job held; rebuilt segments report it now."""
        known = dict(size.coordinates)
        if any(rank not in known for rank in ranks):
            for updated in read_previous_sizes(self._nodes.ask(lambda client: client.previous_sizes())):
                if updated.world_size == size.world_size:
                    known |= updated.coordinates
        missing = [rank for rank in ranks if rank not in known]
        if missing:
            raise self._refusal(
                f"version {version}: the segments of ranks {missing} of {size.world_size} do not say which part of "
                "the model they hold; start with the previous number of nodes"
            )
        return {rank: known[rank] for rank in ranks}


def open_previous(run_dir: Path, world_size: int, rank: int) -> Segment:
    """Map a segment of a previous size on this node. Raises SegmentError."""
    return Segment(previous_path_of(run_dir.parent.name, run_dir.name, rank, world_size))
