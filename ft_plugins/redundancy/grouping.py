"""Cut sharding groups into redundancy groups: the nodes that keep parity of each other's state. Pure.

A redundancy group survives a fixed number of lost nodes, so the smaller it is, the more a job survives; but each of its
n nodes keeps 1/(n - 1) of a node's share as parity (RAIM6: 2/(n - 2)). Its size also bounds the nodes with which a
node is connected, and from which a lost one is rebuilt.

    sharding group      n0 n1 n2 n3 n4 n5 n6 n7 n8 n9     10 nodes, at most 8 in a group
    redundancy groups   n0 n2 n4 n6 n8 | n1 n3 n5 n7 n9

    in racks            A  A  A  A  B  B  B  C  C  C      four of one rack: four groups, where each node is of another
    redundancy groups   n0 n4 n8 | n1 n5 n9 | n2 n6 | n3 n7

The nodes are put in the order of their failure domains and dealt out to the groups in turn. So sizes differ by at most
one, and so do the numbers of nodes that two groups have of one domain: no cut into as many groups has fewer together.

Invariant: sharding groups on the same nodes are cut in the same way. A sharding group that is not larger than the
bound, and whose nodes are all of different domains, stays whole. A group never has fewer nodes than parity needs, even
if it is then larger than the bound.

Whether groups can be protected if ranks lie in order on nodes (rank r on r // per_node) is answered by looking at
groups that begin at different places of a node, at most `per_node`, and each only until it is on enough nodes: moved by
whole nodes, a group is on as many nodes as before. The answers are those of `why_unprotected` (groups that will be cut)
and `why_unplaced` for these nodes.

In: node of each rank, sharding groups, the failure domain of each node. Out: redundancy groups, as ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from ..model.topology import Axis, Topology
from .exchange_plan import positions
from .parity import LEAST_NODES


@dataclass(frozen=True)
class SharedDomain:
    """A failure domain with which a redundancy group loses more nodes than its parity makes up for."""

    domain: str
    nodes: tuple[str, ...]


def cut_nodes(domains: Sequence[Hashable], most: int, losses: int) -> tuple[tuple[int, ...], ...]:
    """Cut the nodes 0, 1, ... of a sharding group into groups of at most `most`; `domains[node]` is the domain of each.

    There are more, smaller groups if that puts no two nodes of a domain into one; else if it puts no more of them
    together than `losses`; else domains are spread as evenly as they can be.
    """
    count, least = len(domains), LEAST_NODES[losses]
    largest = max(Counter(domains).values(), default=0)
    limit = max(1, count // least)  # groups that have enough nodes
    groups = min(-(-count // most), limit)
    for together in range(1, losses + 1):
        apart = max(groups, -(-largest // together))
        if apart <= limit:
            groups = apart
            break
    first: dict[Hashable, int] = {}
    for node, domain in enumerate(domains):
        first.setdefault(domain, node)
    order = sorted(range(count), key=lambda node: (first[domains[node]], node))
    return tuple(tuple(sorted(order[group::groups])) for group in range(groups))


def redundancy_groups(
    nodes: Sequence[str], groups: Sequence[Sequence[int]], most: int, losses: int, domains: Sequence[str] = ()
) -> tuple[tuple[int, ...], ...]:
    """The redundancy groups of a job, as ranks, those of each of the sharding `groups` together.

    `nodes[rank]` is the node of each rank. `domains` are the failure domains by position (nodes in the order of their
    lowest ranks), '' for a node that is a domain of its own; () if all are.
    """
    names, _ = positions(nodes)
    position_of = {name: position for position, name in enumerate(names)}
    labels = _labels(len(names), domains)
    cuts: dict[tuple[int, ...], dict[int, int]] = {}
    result: list[tuple[int, ...]] = []
    for group in groups:
        there = tuple(sorted({position_of[nodes[rank]] for rank in group}))
        if there not in cuts:
            cut = cut_nodes([labels[position] for position in there], most, losses)
            cuts[there] = {there[node]: number for number, members in enumerate(cut) for node in members}
        number_of = cuts[there]
        members: dict[int, list[int]] = {number: [] for number in range(max(number_of.values(), default=-1) + 1)}
        for rank in group:
            members[number_of[position_of[nodes[rank]]]].append(rank)
        result += map(tuple, members.values())
    return tuple(result)


def shared_domains(
    nodes: Sequence[str], groups: Sequence[Sequence[int]], losses: int, domains: Sequence[str]
) -> Iterator[SharedDomain]:
    """The failure domains whose loss the redundancy `groups` do not survive, each with the nodes of one such group."""
    names, _ = positions(nodes)
    domain_of = dict(zip(names, domains, strict=False))
    found: set[str] = set()
    for group in groups:
        together: dict[str, dict[str, None]] = {}
        for rank in group:
            if domain := domain_of.get(nodes[rank]):
                together.setdefault(domain, {})[nodes[rank]] = None
        for domain, members in together.items():
            if len(members) > losses and domain not in found:
                found.add(domain)
                yield SharedDomain(domain, tuple(members))


def _labels(count: int, domains: Sequence[str]) -> list[Hashable]:
    """The domain of each of `count` positions, a number for a node that is a domain of its own."""
    return [(domains[position] if domains else "") or position for position in range(count)]


# ---- ranks in order ----


def parity_possible(topology: Topology, per_node: int, losses: int) -> bool:
    """Whether every sharding group is on enough nodes for parity against so many losses."""
    if topology.world_size <= per_node:
        return False
    starts = _starts(topology.dense_axes("tp", "pp"), per_node)
    members = topology.dense_axes("cp", "dp")
    return all(_reaches(LEAST_NODES[losses], start, members, per_node) for start in starts)


def copies_possible(topology: Topology, per_node: int) -> bool:
    """Whether every pipeline is on two nodes or more."""
    (stages,) = topology.dense_axes("pp")
    starts = _starts(topology.dense_axes("tp", "cp", "dp"), per_node)
    return all(start + (stages.size - 1) * stages.stride >= per_node for start in starts)


def _starts(axes: Sequence[Axis], per_node: int) -> set[int]:
    """The places of a node, from 0, at which the groups begin that differ along `axes`."""
    places = {0}
    for axis in axes:
        steps = {index * axis.stride % per_node for index in range(min(axis.size, per_node))}
        places = {(place + step) % per_node for place in places for step in steps}
    return places


def _reaches(needed: int, start: int, axes: Sequence[Axis], per_node: int) -> bool:
    """Whether a group that begins at the place `start` of a node and extends along two `axes` is on `needed` nodes."""
    inner, outer = sorted(axes, key=lambda axis: axis.stride)
    count, last = 0, -1
    for row in range(outer.size):
        for place in range(inner.size):
            node = (start + row * outer.stride + place * inner.stride) // per_node
            if node != last:
                count, last = count + 1, node
            if count >= needed:
                return True
    return False
