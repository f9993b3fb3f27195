"""Say how a job could claim less memory for protection, where a node has too little. Pure.

In: a configuration. Out: words.
"""

from __future__ import annotations

from ...config import Config
from ...snapshot.segment.slots import FIRST


def smaller_claims(config: Config, losses: int) -> str:
    """Ways for a message, separated by semicolons; '' for none. `losses`: lost nodes that a group survives."""
    reft, ways = config.capture, []
    if reft is None:
        return ""
    if losses and (reft.slots or 0) > FIRST:
        ways.append(
            f"no --reft-slots ({FIRST} of the {reft.slots} snapshots are then claimed at start, others when needed)"
        )
    if losses and reft.redundancy in ("raim5", "raim6", "both"):
        ways.append(
            "larger redundancy groups (--reft-group-nodes, and data parallelism over more nodes), in which each node "
            "keeps less parity"
        )
    if losses and reft.redundancy == "raim6":
        ways.append("--reft-redundancy raim5 (one lost node of a group instead of two)")
    if losses and config.baft is None:
        ways.append("--reft-redundancy none (a lost node is then survived from checkpoints only)")
    return "; ".join(ways)
