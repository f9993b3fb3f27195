"""Decide whether commits stand still while training goes on, and say which node is waited for. Pure; no I/O.

A slow exchange is no standstill: it is judged by the distances that versions have had in this incarnation, and never
within a few detection times, in which a silent node is found anyway.

In: what is known of the pace, the node that is furthest behind. Out: a decision, words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

DISTANCES = (
    10  # times the usual distance: links and disks have hiccups, and a version may be missed a few times in a row
)
DETECTIONS = 3.0  # detection times at least: iterations may take milliseconds
FIRST_DETECTIONS = 60.0  # the same, while no version was committed: how long one takes is not known yet


class Lack(IntEnum):
    """What a version lacks to be committed, the cause before its effects."""

    REPORT = 0  # the reports of a node cannot be right, and are not used
    AHEAD = 1  # it was announced for an iteration that is far ahead of a node's ranks
    SNAPSHOT = 2  # a node's ranks have not sealed it
    TRANSFER = 3  # what a node sends of it has not arrived at another one
    PARTS = 4  # what a node is to store of it is not complete


@dataclass(frozen=True, order=True)
class Behind:
    """What the version that is exchanged lacks, at the node of a position; `target` is the receiver of a TRANSFER, and
    with AHEAD the number of iterations."""

    lack: Lack
    position: int
    target: int = 0

    def words(self, nodes: Sequence[str]) -> str:
        """For people. `nodes` are the names by position."""
        node, target = (nodes[at] if at < len(nodes) else f"at position {at}" for at in (self.position, self.target))
        match self.lack:
            case Lack.REPORT:
                return f"node {node} reports what cannot be, see report.rejected"
            case Lack.AHEAD:
                return f"the version that was announced is {self.target} iterations ahead of the ranks of node {node}"
            case Lack.SNAPSHOT:
                return f"node {node} has not captured the version that is due"
            case Lack.TRANSFER:
                return f"what node {node} sends does not arrive at node {target}"
            case Lack.PARTS:
                return f"node {node} lacks parts of what others send"


@dataclass(frozen=True)
class Standing:
    """The pace of commits on one node: `waits` iterations captured since the last one, `seconds` ago. `usual` is the
    longest of the recent distances in iterations, 0 if no new one was committed in this incarnation."""

    waits: int = 0
    seconds: float = 0.0
    usual: int = 0
    interval: int = 1  # minimum distance
    detect_seconds: float = 1.0

    @property
    def still(self) -> bool:
        """Whether commits stand still."""
        least = DETECTIONS if self.usual else FIRST_DETECTIONS
        return self.waits > DISTANCES * max(self.usual, self.interval) and self.seconds >= least * self.detect_seconds

    def words(self, behind: str) -> str:
        """For people: for how long, what is waited for (`behind`, '' if that is not known), what it means."""
        usual = f"usually one in {self.usual}" if self.usual else "no new one was committed since the last start"
        return (
            f"no version was committed for {self.waits} iterations and {self.seconds:.0f} s, {usual}: "
            f"{behind or 'it is not known which node is waited for'}. A node lost now costs these iterations"
        )
