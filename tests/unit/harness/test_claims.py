"""A claim that is not true is seen not to be: each against what a job has written, right and wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from ft_plugins.events import Event
from ft_plugins.snapshot.checkpoint.checkpoint import Origin
from harness import claims

RANKS = 4
ORIGIN = Origin("j", RANKS, {"layers": 4})


@dataclass
class Node:
    """A node of two ranks that has written these events."""

    written: list[Event]
    spec: Any = field(default_factory=lambda: SimpleNamespace(node="s", nproc=2))

    def events(self, name=""):
        return [event for event in self.written if name in ("", event.name)]

    def tail(self):
        return ""


def event(name, time=-1.0, pid=1, **fields):
    return Event(name, time, pid=pid, fields={"lineage": 1, **fields})


def restored(tier, iteration, pid=1, lineage=1):
    return event("state.restored", 0.0, pid, tier=tier, iteration=iteration, lineage=lineage)


def stored(iteration, lineage=1):
    return event("checkpoint.completed", iteration=iteration, lineage=lineage)


def lost(*names):
    return event("node.lost", lost=list(names))


ATTACHED = [event("rank.attached", pid=pid, token=pid // 2, share_bytes=100) for pid in (2, 3, 4, 5)]
NODE = [restored("node", 4, 4), restored("node", 4, 5)]
STORED = [restored("storage", 6, 4), restored("storage", 6, 5)]
AT_4 = [event("exchange.started", iteration=4), event("version.committed", iteration=4)]
HALF, AT_8 = event("exchange.started", iteration=8), event("version.committed", iteration=8)
COMPARED = event("exchange.sent", compared=True, bytes=10)
CLAIMS = {
    "restored": lambda nodes: claims.assert_restored(nodes["s"], "node", 4),
    "restored exactly": lambda nodes: claims.assert_restored(nodes["s"], "node", 4, 4),
    "newest stored": claims.assert_newest_stored_restored,
    "committed": lambda nodes: claims.assert_committed_restored(nodes, "s"),
    "declared lost": lambda nodes: claims.assert_declared_lost(nodes, "n1"),
    "compared": claims.assert_replicas_compared,
}


@pytest.mark.parametrize(
    ("claim", "right", "wrong"),
    [
        ("restored", NODE, [NODE[0], restored("node", 0, 5)]),
        ("restored", [restored("node", 0, 2), restored("node", 0, 3), *NODE], [*NODE, *[restored("node", 0)] * 2]),
        ("restored", NODE, []),
        ("restored", NODE, [restored("process", 5)] * 2),
        ("restored exactly", NODE, [restored("node", 5)] * 2),
        ("newest stored", [stored(3), stored(6), *STORED, stored(9, 2)], [stored(3), stored(6), stored(9), *STORED]),
        ("newest stored", [stored(4), restored("storage", 4, 4)], [stored(4), *NODE]),
        ("committed", [*AT_4, HALF, *NODE], [*AT_4, *NODE]),
        ("committed", [*AT_4, HALF, *NODE], [*AT_4, HALF, restored("node", 8, 4)]),
        ("committed", [*AT_4, HALF, *NODE], [*AT_4, HALF, AT_8, *NODE]),
        ("committed", [*AT_4, HALF, *NODE], [HALF, *NODE]),
        (
            "committed",
            [*AT_4, HALF, *NODE, event("version.committed", 1.0, iteration=8)],
            [*AT_4, event("exchange.started", 1.0, iteration=8), *NODE],
        ),
        ("committed", [*AT_4, HALF, *NODE], [*AT_4, event("exchange.started", iteration=8, lineage=2), *NODE]),
        ("declared lost", [lost("node n1"), lost("node n1")], [lost("node n1"), lost("node n0")]),
        ("declared lost", [lost("node n1")], []),
        ("compared", [COMPARED], []),
        ("compared", [COMPARED], [COMPARED, event("replica.mismatched")]),
        ("compared", [COMPARED], [COMPARED, event("exchange.sent", compared=True, bytes=90)]),
        ("compared", [COMPARED], [COMPARED, event("exchange.sent", compared=False, bytes=10)]),
    ],
)
def test_a_claim_holds_of_what_was_written_or_does_not(claim, right, wrong):
    CLAIMS[claim]({"s": Node([*ATTACHED, *right])})
    with pytest.raises((AssertionError, IndexError)):
        CLAIMS[claim]({"s": Node([*ATTACHED, *wrong])})


def test_restores_are_those_of_each_incarnation_and_of_all_its_ranks_the_same():
    first = [restored("process", 3, pid) for pid in (2, 3)]
    assert claims.restored(Node([*ATTACHED, *NODE, *first])) == [3, 4]
    with pytest.raises(AssertionError, match="different versions"):
        claims.restored(Node([*ATTACHED, NODE[0], restored("node", 5, 5)]))
