"""Compute the numbers of nodes with which the job can continue, and report them to the rendezvous.

Invariant: tensor, pipeline and context parallel sizes, the global batch and the ranks per node do not change. A number
of nodes is admissible if the model's replicas fill them, the host accepts that number of replicas and, if required, a
lost node can be survived.

In: the current topology, what the host and the redundancy allow. Out: numbers of nodes, ascending; `sizes.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from ... import files
from ...intake import Count, read_json
from ...model.topology import Topology

FILE = "sizes.json"  # in the run directory, read by the rendezvous
_MAX_NODES = 1024


def admissible(
    topology: Topology,
    nodes: Sequence[str],
    admits: Callable[[int], bool],
    impossible: Callable[[Topology, Sequence[str]], str],
) -> tuple[int, ...]:
    """The admissible numbers of nodes; () if nodes have different numbers of ranks, or experts are parallel. Pure.

    `nodes[rank]` is the current node of each rank. `admits` says whether the host accepts a number of replicas,
    `impossible` why a topology on given nodes cannot be protected ('' if it can).
    """
    names = set(nodes)
    per_node = len(nodes) // len(names)
    if any(nodes.count(name) != per_node for name in names) or topology.ep > 1:
        return ()
    model = topology.tp * topology.pp * topology.cp
    counts = []
    for count in range(1, max(_MAX_NODES, len(names)) + 1):
        ranks = count * per_node
        if ranks % model or not admits(ranks // model):
            continue
        if count <= len(names) and _unprotected(topology, ranks, per_node, impossible):
            continue
        counts.append(count)
    return tuple(counts)


def _unprotected(
    topology: Topology, ranks: int, per_node: int, impossible: Callable[[Topology, Sequence[str]], str]
) -> bool:
    """Whether a lost node could not be survived with that many ranks. Checked up to the current number of nodes: more
    nodes are never worse."""
    model = topology.tp * topology.pp * topology.cp
    resized = replace(topology, dp=ranks // model)
    return bool(impossible(resized, [f"node{rank // per_node}" for rank in range(ranks)]))


def describe(sizes: Sequence[int], now: int, protected: Collection[int]) -> str:
    """A message on the sizes around the current one; those not in `protected` do not survive a lost node."""
    warn = now in protected  # else the job is unprotected already, which was printed at start
    fewer = [f"{size}{' (unprotected)' if warn and size not in protected else ''}" for size in sizes if size < now][-4:]
    more = [str(size) for size in sizes if size > now][:4]
    shown = ", ".join([*fewer, str(now), *more])
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
