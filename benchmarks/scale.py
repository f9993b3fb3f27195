"""Measure what grows when a job grows: plans, how ranks and SMPs reach each other, the rendezvous.

    python benchmarks/scale.py [--quick] [--most N] [--parts plans ranks smps rendezvous] [--output FOLDER]

Nothing trains here: the project's own plans and its own control plane run with as many emulated ranks and nodes as a
job has, 8 ranks a node. What is real in each part is said in its module.

    plans        workloads/plan_scale.py: seconds and peak bytes of each plan on the process that computes it, for 64,
                 512, 4,096 and 16,384 ranks and the shapes tp8 pp16, tp4 pp4, tp1 pp4. `plans_R_seconds` is the sum of
                 the seconds, `plans_R_mib` the largest peak, both of the worst shape
    ranks        workloads/rank_scale.py: the ranks meet and agree over real sockets, up to 4,096 of them on this
                 machine. `ranks_R_meet_seconds`, `_barrier_seconds`, `_gather_seconds` are of the whole job on two
                 cores; `ranks_R_store_operations` of a rank; `_sockets`, `_threads` of a node
    smps         workloads/tree_scale.py: the SMPs report and agree, up to 2,048 in one process. `smps_N_share`: of a
                 processor, of the busiest node; `_messages` per node and iteration; `_commit_seconds`, `_lost_seconds`
    rendezvous   workloads/rendezvous_scale.py: one real lead, up to 2,048 emulated nodes. `lead_N_form_seconds`,
                 `lead_N_waiting_share`, `_descriptors`, `_threads`

Claims: at 4,096 ranks all plans within 10 s and 1 GiB a process; at 16,384 ranks (2,048 nodes) no process takes more
than 10% of a processor in steady state, a node has at most 64 sockets and 32 threads for all of this, a rank at most 20
store operations at start; the lead takes less than 5% of a processor while 512 nodes wait, which form a round within
3 s, and 2,048 nodes form one. Not a figure, because by construction: the step path sends nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict

from ft_plugins.smp.tree import tree as smp_tree
from workloads import plan_scale, rank_scale, rendezvous_scale, scale_pictures, tree_scale
from workloads.running import PROGRESS, Figures, arguments, run, say

SHAPES = ("tp8 pp16", "tp4 pp4", "tp1 pp4")
RANKS = (64, 512, 4096, 16384)
MET = (64, 512, 4096)  # ranks that meet for real: more do not fit a machine
NODES = (8, 64, 512, 2048)
QUICK = 4096  # ranks of --quick; nodes: an eighth
ON_NODE = 8
GROUP_NODES = 8  # of a redundancy group: the default of --reft-group-nodes
WAITING_SECONDS, TREE_SECONDS = 15.0, 10.0
PLANS_SECONDS, PLANS_MIB = 10.0, 1024.0
STEADY_SHARE, WAITING_SHARE = 0.10, 0.05
SOCKETS, THREADS, STORE_OPERATIONS, FORM_SECONDS = 64, 32, 20.0, 3.0
MIB = 1 << 20
PARTS = ("plans", "ranks", "smps", "rendezvous")
_SMP_THREADS = 16  # of an SMP, besides its lanes: 8 that serve other nodes, 4 of the node tier, 4 of the process

Found = dict[str, float]


def plans(wanted: range) -> tuple[Found, list[dict[str, object]]]:
    """Seconds and memory of every plan; all single figures for the picture."""
    found: Found = {}
    rows: list[dict[str, object]] = []
    for ranks in (number for number in RANKS if number in wanted):
        seconds, peak = 0.0, 0.0
        for shape in SHAPES:
            PROGRESS.step(f"plans of {ranks} ranks, {shape}")
            figures = plan_scale.plan_figures(ranks, shape)
            seconds = max(seconds, sum(one.seconds for one in figures))
            peak = max(peak, *(one.peak_bytes / MIB for one in figures))
            rows += [{"ranks": ranks, "shape": shape, **asdict(one)} for one in figures]
            slowest = max(figures, key=lambda one: one.seconds)
            say(f"{ranks:6} ranks, {shape}: {sum(one.seconds for one in figures):.2f} s, most for {slowest.plan}")
        found |= {f"plans_{ranks}_seconds": seconds, f"plans_{ranks}_mib": peak}
    return found, rows


def ranks_meet(wanted: range) -> Found:
    """How the ranks of a job meet and agree."""
    found: Found = {}
    for ranks in (number for number in MET if number in wanted):
        PROGRESS.step(f"{ranks} ranks meet")
        figures = asdict(rank_scale.measure(ranks, ON_NODE))
        say(f"{ranks:6} ranks met in {figures['meet_seconds']:.1f} s, a gather takes {figures['gather_seconds']:.2f} s")
        found |= {f"ranks_{ranks}_{name}": value for name, value in figures.items() if name != "ranks"}
    return found


def smps(wanted: range) -> Found:
    """How the SMPs of a job report and agree. Nothing for a size whose emulation this machine cannot keep up with."""
    found: Found = {}
    for nodes in (number for number in NODES if number * ON_NODE in wanted):
        PROGRESS.step(f"{nodes} SMPs")
        figures = tree_scale.measure(nodes, TREE_SECONDS)
        if not figures.kept_up:
            share = f"{figures.processor_share_all:.2f} of a processor"
            say(f"{nodes:6} SMPs: not measured: one process with {share} did not keep up with all of them")
            continue
        say(
            f"{nodes:6} SMPs: {figures.processor_share_busiest:.2%} of a processor on the busiest, a commit takes "
            f"{figures.commit_seconds:.3f} s, a lost node is known after {figures.lost_seconds:.1f} s"
        )
        found |= {
            f"smps_{nodes}_share": figures.processor_share_busiest,
            f"smps_{nodes}_mean_share": figures.processor_share,
            f"smps_{nodes}_messages": figures.messages_busiest,
            f"smps_{nodes}_bytes": figures.bytes_busiest,
            f"smps_{nodes}_commit_seconds": figures.commit_seconds,
            f"smps_{nodes}_lost_seconds": figures.lost_seconds,
            f"smps_{nodes}_sockets": figures.sockets,
        }
    return found


def rendezvous(wanted: range) -> Found:
    """What a job costs its rendezvous lead."""
    found: Found = {}
    for nodes in (number for number in NODES if number * ON_NODE in wanted):
        PROGRESS.step(f"{nodes} nodes form rounds")
        figures = rendezvous_scale.measure(nodes, WAITING_SECONDS)
        say(
            f"{nodes:6} nodes formed a round in {figures.first_round_seconds:.1f} s; {figures.waiting_share:.1%} of a "
            "processor while they wait"
        )
        found |= {
            f"lead_{nodes}_form_seconds": figures.first_round_seconds,
            f"lead_{nodes}_next_seconds": figures.next_round_seconds,
            f"lead_{nodes}_waiting_share": figures.waiting_share,
            f"lead_{nodes}_running_share": figures.running_share,
            f"lead_{nodes}_threads": figures.threads,
            f"lead_{nodes}_descriptors": figures.descriptors,
        }
    return found


def of_a_node(nodes: int) -> Found:
    """Sockets and threads of one node in a job of `nodes`, for protection: of its ranks with each other, with other
    nodes and with their SMP; of the SMP in the tree and in its redundancy group. Counted from the plans."""
    own, threads = rank_scale.connections_of_a_node(nodes * ON_NODE, ON_NODE)
    tree = max(len(smp_tree.children_of(position, nodes)) + bool(position) for position in range(nodes))
    group = 2 * (min(GROUP_NODES, nodes) - 1)  # one to each other member, one from each
    return {
        f"node_{nodes}_sockets": own + 2 * ON_NODE + tree + group,
        f"node_{nodes}_threads": threads + group // 2 + _SMP_THREADS,
    }


def claims(found: Mapping[str, float]) -> dict[str, bool]:
    """Which claims hold, of those that were measured."""
    most: dict[str, tuple[float, tuple[str, ...]]] = {
        "plans_seconds_hold": (PLANS_SECONDS, ("plans_4096_seconds",)),
        "plans_memory_holds": (PLANS_MIB, ("plans_4096_mib",)),
        "steady_share_holds": (STEADY_SHARE, ("smps_2048_share", "lead_2048_running_share")),
        "sockets_hold": (SOCKETS, ("node_2048_sockets",)),
        "threads_hold": (THREADS, ("node_2048_threads",)),
        "store_operations_hold": (STORE_OPERATIONS, ("ranks_4096_store_operations",)),
        "waiting_share_holds": (WAITING_SHARE, ("lead_512_waiting_share",)),
        "forming_holds": (FORM_SECONDS, ("lead_512_form_seconds",)),
    }
    return {
        claim: all(found[name] <= bound for name in names)
        for claim, (bound, names) in most.items()
        if all(name in found for name in names)
    }


def measure(chosen: argparse.Namespace) -> Figures:
    """All parts that are chosen."""
    most = chosen.most or (RANKS[0] if chosen.smoke else QUICK if chosen.quick else RANKS[-1])
    wanted = range(most if chosen.quick else 0, most + 1)  # a quick run has one size
    found, rows = Found(), list[dict[str, object]]()
    nodes = [number for number in NODES if number * ON_NODE in wanted]
    steps = {"plans": len(SHAPES) * sum(n in wanted for n in RANKS), "ranks": sum(n in wanted for n in MET)}
    PROGRESS.plan(sum(steps.get(part, len(nodes)) for part in chosen.parts))
    if "plans" in chosen.parts:
        found, rows = plans(wanted)
    for name, part in (("ranks", ranks_meet), ("smps", smps), ("rendezvous", rendezvous)):
        if name in chosen.parts:
            found |= part(wanted)
    for number in nodes:
        found |= of_a_node(number)
    if chosen.output is not None:
        (chosen.output / "plans.json").write_text(json.dumps(rows, indent=1))
        scale_pictures.draw_growth(found, chosen.output / "growth.png")
        if rows:
            scale_pictures.draw_plans(rows, chosen.output / "plans.png")
    return {**found, **claims(found)}


if __name__ == "__main__":
    parser = arguments(__doc__, f"only {QUICK} ranks, {QUICK // ON_NODE} nodes")
    parser.add_argument("--most", type=int, choices=RANKS, help="the most ranks; nodes: an eighth")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    run("scale", measure, parser)
