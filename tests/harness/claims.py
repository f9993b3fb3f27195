"""What jobs are claimed to have done, checked against what they wrote: events, checkpoints, final states.

Each function that asserts raises an AssertionError that shows what was written instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from ft_plugins.events import catalogue
from ft_plugins.snapshot.capture import manifest as captured
from ft_plugins.snapshot.checkpoint import checkpoint, persist
from ft_plugins.snapshot.checkpoint.checkpoint import Origin
from ft_plugins.snapshot.segment.slots import Version

from .forkserver import RunningJob

Nodes = Mapping[str, RunningJob]


def restores(job: RunningJob) -> list[dict[str, Any]]:
    """What each incarnation of a node restored, in order: the fields of one of its ranks.

    Raises AssertionError if ranks of one incarnation restored different versions, or not all of them did.
    """
    tokens = {event.pid: event.fields["token"] for event in job.events(catalogue.RANK_ATTACHED.name)}
    found: dict[int, list[dict[str, Any]]] = {}
    for event in job.events(catalogue.STATE_RESTORED.name):
        found.setdefault(tokens[event.pid], []).append(event.fields)
    for fields in found.values():
        assert len({(each["tier"], each["iteration"]) for each in fields}) == 1, f"different versions: {fields}"
    return [found[token][0] for token in sorted(found)]


def restored(job: RunningJob) -> list[int]:
    """The iteration that each incarnation of a node restored."""
    return [fields["iteration"] for fields in restores(job)]


def assert_proven(job: RunningJob, *reasons: str) -> None:
    """Iterations that a node computed again after a restore came out the same, and nothing that begins again was named.
    `reasons`: why a restore of it may be unproven; without one, each is proven."""
    for kind in (catalogue.RESUME_DIFFERED, catalogue.VALUES_RESTARTED):
        assert not job.events(kind.name), job.events(kind.name)
    for event in job.events(catalogue.RESUME_UNPROVEN.name):
        assert any(reason in event.fields["reason"] for reason in reasons), event
    said = len(job.events(catalogue.RESUME_PROVEN.name)) + len(job.events(catalogue.RESUME_UNPROVEN.name))
    assert 1 <= said <= len(restores(job)), job.tail()


def assert_restored(job: RunningJob, tier: str, least: int, most: int | None = None) -> None:
    """All ranks of a node restored one version in its last incarnation, from this tier, of `least` to `most`."""
    last = job.events(catalogue.STATE_RESTORED.name)[-job.spec.nproc :]
    assert last, f"nothing was restored on node {job.spec.node}:\n{job.tail()}"
    versions = {(event.fields["tier"], event.fields["iteration"]) for event in last}
    assert len(versions) == 1, f"node {job.spec.node}: {last}"
    [(found, iteration)] = versions
    assert found == tier and least <= iteration <= (most or iteration), f"node {job.spec.node}: {versions}"


def assert_newest_stored_restored(nodes: Nodes) -> None:
    """Every node restored the newest checkpoint that was complete by then."""
    completed = [e.fields for job in nodes.values() for e in job.events(catalogue.CHECKPOINT_COMPLETED.name)]
    for job in nodes.values():
        fields = restores(job)[-1]
        newest = max((e["iteration"] for e in completed if e["lineage"] <= fields["lineage"]), default=0)
        assert fields["tier"] == "storage" and fields["iteration"] == newest, f"{fields}; checkpoint {newest} was there"


def exchanged_before_restore(nodes: Nodes) -> tuple[list[int], list[int]]:
    """Iterations whose exchange was started, and those committed, before the first restore and in its lineage."""
    events = [event for job in nodes.values() for event in job.events()]
    of_restores = [event for event in events if event.type is catalogue.STATE_RESTORED]
    first = min(of_restores, key=lambda event: event.time, default=None)
    assert first is not None, "nothing was restored"
    before = [e for e in events if e.time < first.time and e.fields.get("lineage") == first.fields["lineage"]]

    def iterations(kind: Any) -> list[int]:
        return sorted({event.fields["iteration"] for event in before if event.type is kind})

    return iterations(catalogue.EXCHANGE_STARTED), iterations(catalogue.VERSION_COMMITTED)


def assert_committed_restored(nodes: Nodes, name: str) -> None:
    """A node restored the newest committed version while nodes were exchanging a newer one."""
    started, committed = exchanged_before_restore(nodes)
    assert committed and max(committed) < max(started), f"started {started}, committed {committed}"
    fields = restores(nodes[name])[-1]
    assert fields["iteration"] == max(committed), f"committed {committed}: {fields}"


def assert_declared_lost(nodes: Nodes, name: str) -> None:
    """The remaining nodes declared this node lost, and no other one."""
    declared = [event for job in nodes.values() for event in job.events(catalogue.NODE_LOST.name)]
    assert declared and all(event.fields["lost"] == [f"node {name}"] for event in declared), declared


def assert_replicas_compared(nodes: Nodes) -> None:
    """Nodes found their replicas equal and sent each other digests instead of state."""

    def fields_of(name: str) -> list[dict[str, Any]]:
        return [event.fields for job in nodes.values() for event in job.events(name)]

    assert not fields_of(catalogue.REPLICA_MISMATCHED.name)
    sent = fields_of(catalogue.EXCHANGE_SENT.name)
    slot = min(fields["share_bytes"] for fields in fields_of(catalogue.RANK_ATTACHED.name))
    # small state, digest tables and compared digests; sending state would take several slots
    assert sent and all(fields["compared"] and fields["bytes"] < slot / 5 for fields in sent), sent


def synchronisations(*nodes: RunningJob) -> dict[Any, Any]:
    """What each rank reports of the last synchronisation of each iteration, time excluded."""
    return {
        (event.rank, event.fields["iteration"]): {k: v for k, v in event.fields.items() if k != "waited_seconds"}
        for job in nodes
        for event in job.events(catalogue.REPLICAS_SYNCHRONISED.name)
    }


def stored(base: Path) -> set[int]:
    """The iterations of the complete checkpoints of a job."""
    return {each.version.iteration for each in checkpoint.listing(base) if each.complete}


def assert_checkpoints_intact(base: Path, ranks: int, newest: int) -> None:
    """Every complete checkpoint of a job matches its digests; the newest is of this iteration or later."""
    assert max(stored(base), default=0) >= newest, sorted(path.name for path in base.glob("*"))
    for each in checkpoint.listing(base):
        if each.complete:
            assert_whole(base / each.name, ranks)


def assert_whole(folder: Path, ranks: int) -> None:
    """The file of every rank of a checkpoint exists and matches its digests."""
    manifest = checkpoint.read_manifest(folder)
    origin = Origin(manifest.job, manifest.world_size, manifest.fingerprint, manifest.run)
    assert manifest.world_size == ranks, f"{folder} is of {manifest.world_size} ranks, expected {ranks}"
    absent = checkpoint.unusable(folder, origin, Version(manifest.lineage, manifest.iteration))
    assert not absent, f"{folder}: the files of ranks {absent} are missing or of another version"
    for rank in range(ranks):
        path = folder / checkpoint.data_file(rank)
        head, digests, small = persist.read_head(path, checkpoint.read_record(folder, rank))
        data = path.read_bytes()[len(head) + digests.nbytes :]
        ranges = captured.read(captured.split(small)[0]).ranges
        for number, ((offset, nbytes), digest) in enumerate(zip(ranges, digests, strict=False)):
            found = xxhash.xxh3_64_intdigest(data[offset : offset + nbytes])
            assert found == int(digest), f"{path}: bucket {number} does not match its digest"
