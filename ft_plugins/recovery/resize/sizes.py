"""Compute the numbers of nodes with which the job can continue, and report them to the rendezvous.

Invariant: tensor, pipeline and context parallel sizes, the global batch and the ranks per node do not change. A number
of nodes is admissible if the model's replicas fill them, the host accepts that number of replicas and, if required, a
lost node can be survived. Rank 0 computes them, at a cost linear in the number of nodes, and sends them to the others.

In: the current topology, what the host and the redundancy allow. Out: numbers of nodes, ascending; `sizes.json`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, TypeAdapter

from ...base import files
from ...base.intake import Count, read_json
from ...errors import TopologyError
from ...model.topology import Topology

FILE = "sizes.json"  # in the run directory, read by the rendezvous
_MAX_NODES = 1024


def admissible(
    topology: Topology, nodes: Sequence[str], admits: Callable[[int], bool], survives: Callable[[Topology, int], bool]
) -> tuple[int, ...]:
    """The admissible numbers of nodes; () if nodes have different numbers of ranks, or experts are parallel. Pure.

    `nodes[rank]` is the current node of each rank. `admits` says whether the host accepts a number of replicas,
    `survives` whether a lost node can be survived with a topology whose ranks lie in order on nodes of that many ranks.
    It is asked up to the current number of nodes: more nodes are never worse.
    """
    ranks_on = Counter(nodes)
    per_node = ranks_on[nodes[0]]
    if topology.ep > 1 or any(count != per_node for count in ranks_on.values()):
        return ()
    model = topology.tp * topology.pp * topology.cp
    counts = []
    for count in range(1, max(_MAX_NODES, len(ranks_on)) + 1):
        replicas, rest = divmod(count * per_node, model)
        resized = None if rest or not admits(replicas) else _resized(topology, replicas)
        if resized is not None and (count > len(ranks_on) or survives(resized, per_node)):
            counts.append(count)
    return tuple(counts)


def _resized(topology: Topology, replicas: int) -> Topology | None:
    """The topology with so many replicas; None if they cannot be laid out, for example as experts need it."""
    try:
        return replace(topology, dp=replicas)
    except TopologyError:
        return None


def packed(numbers: Sequence[int]) -> bytes:
    """Numbers of nodes as a message: a bit for each."""
    present = np.zeros(max(numbers, default=0) + 1, dtype=np.uint8)
    present[list(numbers)] = 1
    return np.packbits(present).tobytes()


def unpacked(message: bytes) -> tuple[int, ...]:
    return tuple(np.flatnonzero(np.unpackbits(np.frombuffer(message, dtype=np.uint8))).tolist())


def describe(sizes: Sequence[int], now: int, protected: Collection[int]) -> str:
    """A message on the sizes around the current one; those not in `protected` do not survive a lost node."""
    warn = now in protected  # else the job is unprotected already, which was printed at start
    fewer = [size for size in sizes if size < now][-4:]
    named = [f"{size}{' (unprotected)' if warn and size not in protected else ''}" for size in fewer]
    more = [str(size) for size in sizes if size > now][:4]
    shown = ", ".join([*named, str(now), *more])
    return f"the job has {now} nodes and can continue with {shown} nodes (choose a range with --nnodes MIN:MAX)"


@dataclass(frozen=True)
class SizeReport:
    """What ranks report to the rendezvous: admissible numbers of nodes, () for any number, and whether the job can
    restore from spares."""

    sizes: tuple[Count, ...] = ()
    spares_asked: Annotated[bool, Field(strict=True)] = False


_REPORT = TypeAdapter(SizeReport)


def read(run_dir: Path) -> SizeReport:
    """The report of this node's ranks; an empty one if there is none."""
    try:
        return read_json(run_dir / FILE, _REPORT)
    except (OSError, ValueError):
        return SizeReport()


def write(run_dir: Path, report: SizeReport) -> None:
    """Report to the rendezvous of this node."""
    files.write_json(run_dir / FILE, {"sizes": list(report.sizes), "spares_asked": report.spares_asked})
