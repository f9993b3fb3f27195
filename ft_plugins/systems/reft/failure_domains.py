"""The nodes of a job and their failure domains, as every rank knows them.

A substitute inherits the position of a lost node and, for the cut into redundancy groups, its failure domain too, even
if it is somewhere else: other groups could not decode the parity that the survivors hold. So the domains by which the
snapshots in memory were protected count until the job has another size or starts fresh; the SMPs record them.

Invariant: all ranks return the same. Every rank of the job calls. Nothing is sent in addition to the names unless the
record of a node differs from what the nodes report.

In: name and domain of this node, its run directory. Out: `JobNodeNames`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgpack
import xxhash

from ...collective import Collective
from ...redundancy.exchange_plan import positions
from ...smp.serve.job_file import RecordedDomains, read_domains


@dataclass(frozen=True)
class JobNodeNames:
    """`nodes[rank]` is the node of each rank. `domains` are the failure domains by which groups are cut, by position,
    '' for a node that is one of its own; () if all are. `reported` are those that the nodes name now."""

    nodes: tuple[str, ...]
    domains: tuple[str, ...] = ()
    reported: tuple[str, ...] = ()


def exchange_names(
    collective: Collective, node: str, domain: str | None, run_dir: Path | None, fresh: bool
) -> JobNodeNames:
    """Exchange names, domains and a digest of the record with all ranks, and the record's differences if there are any.

    `fresh`: the job starts from the beginning, so no record counts.
    """
    record = None if fresh or run_dir is None else read_domains(run_dir)
    if record is not None and len(record.nodes) != collective.world_size:
        record = None  # of another size
    payload = [node, domain or "", _digest(record.domains) if record else 0]
    reports = [msgpack.unpackb(part) for part in collective.gather(msgpack.packb(payload))]
    nodes = tuple(str(name) for name, _, _ in reports)
    names, ranks = positions(nodes)
    reported = without_own([str(reports[members[0]][1]) for members in ranks])
    if all(digest in (0, _digest(reported)) for _, _, digest in reports):
        return JobNodeNames(nodes, reported, reported)
    leads = ranks[names.index(node)][0] == collective.rank
    own = [record.lineage, differences(record, reported, len(names))] if record is not None and leads else None
    answers = [msgpack.unpackb(part) for part in collective.gather(msgpack.packb(own))]
    return JobNodeNames(nodes, kept(reported, [answer for answer in answers if answer], len(names)), reported)


def without_own(domains: Sequence[str]) -> tuple[str, ...]:
    """The domains by position; () if every node is a domain of its own."""
    return tuple(domains) if any(domains) else ()


def differences(record: RecordedDomains, reported: Sequence[str], count: int) -> list[tuple[int, str]] | None:
    """What the record of one node says of other domains than the `count` nodes report: position and domain; None if the
    job had another number of nodes."""
    if len(positions(record.nodes)[0]) != count:
        return None
    before, now = record.domains or [""] * count, reported or [""] * count
    return [(position, before[position]) for position in range(count) if before[position] != now[position]]


def kept(
    reported: Sequence[str], answers: Sequence[tuple[int, Sequence[tuple[int, str]] | None]], count: int
) -> tuple[str, ...]:
    """The domains that count: those of the record of the newest lineage, where there is one.

    `answers` are lineage and differences of each record.
    """
    domains = list(reported or [""] * count)
    usable = [(lineage, changes) for lineage, changes in answers if changes is not None]
    if usable:
        for position, domain in max(usable, key=lambda answer: answer[0])[1]:
            domains[position] = str(domain)
    return without_own(domains)


def _digest(domains: Sequence[str]) -> int:
    """Never 0."""
    return xxhash.xxh3_64_intdigest(msgpack.packb(list(domains))) | 1
