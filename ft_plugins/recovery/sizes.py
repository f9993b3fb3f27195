"""With how many nodes the job could go on: the sizes at which its state can be taken over and the batch divided. Pure.

Invariant: tensor, pipeline and context parallel sizes, the global batch and the ranks of a node stay as they are. Where
a lost node has to be survivable it is at every size that is admitted; else the sizes at which it is not are named.

In: the topology as it is, the host's word on the number of replicas. Out: numbers of nodes, ascending.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from .. import files
from ..intake import Count, read_json
from ..model.topology import Topology

FILE = "sizes.json"  # in the run directory, read by the rendezvous
_MOST = 1024  # nodes


def admissible(
    topology: Topology,
    nodes: Sequence[str],
    admits: Callable[[int], bool],
    impossible: Callable[[Topology, Sequence[str]], str],
) -> tuple[int, ...]:
    """The admissible numbers of nodes. () where nodes have unequal ranks.

    `nodes[rank]` is the node of each rank now; `impossible` says why a topology on such nodes cannot be protected.
    """
    names = set(nodes)
    per_node = len(nodes) // len(names)
    if any(nodes.count(name) != per_node for name in names) or topology.ep > 1:
        return ()
    model = topology.tp * topology.pp * topology.cp
    found = []
    for count in range(1, max(_MOST, len(names)) + 1):
        ranks = count * per_node
        if ranks % model or not admits(ranks // model):
            continue
        if count <= len(names) and _cannot(topology, ranks, per_node, impossible):
            continue
        found.append(count)
    return tuple(found)


def _cannot(
    topology: Topology, ranks: int, per_node: int, impossible: Callable[[Topology, Sequence[str]], str]
) -> bool:
    """Whether a lost node could not be survived with so many ranks. More nodes than now can only help."""
    model = topology.tp * topology.pp * topology.cp
    resized = replace(topology, dp=ranks // model, nodes=())
    return bool(impossible(resized, [f"node{rank // per_node}" for rank in range(ranks)]))


def words(sizes: Sequence[int], now: int, protected: Collection[int]) -> str:
    """For people: the sizes around the present one. At those that are not `protected` a lost node is not survived."""
    bare = now in protected  # where it is not now either, that was said
    fewer = [f"{size}{'' if size in protected or not bare else ' (unprotected)'}" for size in sizes if size < now][-4:]
    more = [str(size) for size in sizes if size > now][:4]
    shown = ", ".join([*fewer, str(now), *more])
    return f"with {now} nodes now; it could go on with {shown} nodes (--nnodes MIN:MAX says which are wanted)"


@dataclass(frozen=True)
class Told:
    """What ranks tell the rendezvous: numbers of nodes, () for any, and whether the job can have what a spare holds."""

    sizes: tuple[Count, ...] = ()
    spares_asked: Annotated[bool, Field(strict=True)] = False


_TOLD = TypeAdapter(Told)


def read(run_dir: Path) -> Told:
    """What the ranks of this node have told; nothing while they have not."""
    try:
        return read_json(run_dir / FILE, _TOLD)
    except (OSError, ValueError):
        return Told()


def write(run_dir: Path, told: Told) -> None:
    """Tell the rendezvous of this node."""
    files.write_json(run_dir / FILE, {"sizes": list(told.sizes), "spares_asked": told.spares_asked})
