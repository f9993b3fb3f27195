"""A story that is not true is seen not to be: every claim against what a job has written, right and wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash

from ft_plugins.events import Event
from ft_plugins.snapshot.capture import manifest
from ft_plugins.snapshot.capture.manifest import Manifest, TensorRange
from ft_plugins.snapshot.checkpoint import checkpoint, persist
from ft_plugins.snapshot.checkpoint.checkpoint import Origin
from ft_plugins.snapshot.segment import segment as segments
from ft_plugins.snapshot.segment.segment import Segment
from ft_plugins.snapshot.segment.shape import Shape
from ft_plugins.snapshot.segment.slots import Pin, Version, slots_for
from harness import story, story_runner
from harness.emulated_nodes import EmulatedHost
from harness.story_parser import parse
from harness.story_runner import StoryRunner, assert_whole

RANKS = 4
ORIGIN = Origin("j", RANKS, {"layers": 4})
PLACES = [EmulatedHost("", f"127.77.0.{host}", "lo") for host in story_runner.HOSTS]


def test_every_story_that_is_understood_finds_its_framework_and_hosts() -> None:
    assert tuple(story_runner.FRAMEWORKS) == story.FRAMEWORK_NAMES
    assert len(story_runner.HOSTS) == story.MOST_NODES + 2, "one substitute that sorts first, one that sorts last"


@dataclass
class Told:
    """A node that has written these events, and ended so."""

    node: str
    outcome: dict[str, Any] = field(default_factory=lambda: {"status": "succeeded", "reason": ""})
    written: list[Event] = field(default_factory=list)
    ended: bool = True

    def __post_init__(self) -> None:
        self.spec = SimpleNamespace(name="j", node=self.node)

    def events(self, name: str) -> list[Event]:
        return [event for event in self.written if event.name == name]

    def wait(self, seconds: float) -> dict[str, Any]:
        return self.outcome

    def tail(self) -> str:
        return ""


def restored(tier: str, iteration: int, lineage: int = 1, reason: str = "why", mark: str = "") -> Event:
    fields = {"tier": tier, "iteration": iteration, "lineage": lineage, "reason": reason}
    fields |= {"mark": mark} if mark else {}
    return Event("state.restored", 0.0, fields=fields)


def sent(what: str, iteration: int, time: float = -1.0, lineage: int = 1) -> Event:
    return Event(what, time, fields={"iteration": iteration, "lineage": lineage})


def lost(*names: str) -> Event:
    return Event("node.lost", 0.0, fields={"lost": list(names)})


def stored(iteration: int, lineage: int = 1) -> Event:
    return Event("checkpoint.completed", 0.0, fields={"iteration": iteration, "lineage": lineage})


def differs(iteration: int, *ranks: int) -> Event:
    return Event("audit.failed", 0.0, fields={"iteration": iteration, "ranks": list(ranks)})


def bubbled(nbytes: int) -> Event:
    return Event("version.committed", 0.0, fields={"in_bubbles": nbytes})


def anew(completed: int) -> Event:
    return Event("state.lost" if completed else "training.started", 0.0, fields={"completed": completed})


def follow(folder: Path, said: str, *nodes: Told) -> None:
    """What a story says at its end, of these nodes; n1 was lost."""
    head = "A story\njob megatron, tp2 pp2 dp1, 2 nodes\nstore every 3 iterations\ndo kill n1\ndo start s first\n"
    story = parse(f"{head}{said}")
    runner = StoryRunner(None, None, story, "megatron", folder, PLACES, 1, None)  # type: ignore[arg-type]
    runner._job.nodes = {node.node: node for node in nodes}  # type: ignore[misc]
    for line in story.lines[2:]:
        runner._run_line(line)


NODE, FIRST, LAST = restored("node", 4), restored("node", 0), restored("storage", 6)
CERTIFIED = restored("node", 4, mark="certified")
ENDED = "when the job has ended\nthen "
AT_4 = [sent("exchange.started", 4), sent("version.committed", 4)]
AT_8, HALF = sent("version.committed", 8), sent("exchange.started", 8)
COUNTED = "s restored the committed version, not the one being exchanged"
BEING_EXCHANGED = "version 8 was being exchanged"
EVERY_6 = "every node restored from storage, iteration >= 6"


@pytest.mark.parametrize(
    ("said", "right", "wrong"),
    [
        ("s restored from node, iteration >= 4", [NODE, NODE], [NODE, FIRST]),
        ("s restored from node, iteration >= 4", [FIRST, FIRST, NODE, NODE], [NODE, NODE, FIRST, FIRST]),
        ("s restored from node, iteration >= 4", [NODE], []),
        ("s restored from node, iteration >= 4", [NODE], [restored("process", 5)]),
        (EVERY_6, [stored(3), stored(6), LAST, stored(9, 2)], [stored(3), stored(6), stored(9), LAST]),
        (EVERY_6, [stored(6), LAST], [stored(6), NODE]),
        ("n1 was declared lost", [lost("node n1")], []),
        ("n1 was declared lost", [lost("node n1"), lost("node n1")], [lost("node n1"), lost("node n0")]),
        ("the reason contains: parts of rank", [restored("storage", 6, reason="the parts of ranks 2, 3 go")], [LAST]),
        ("s restored from node, iteration = 4", [NODE, NODE], [restored("node", 5)] * 2),
        (COUNTED, [*AT_4, HALF, NODE], [*AT_4, NODE]),
        (COUNTED, [*AT_4, HALF, NODE], [*AT_4, HALF, restored("node", 8)]),
        (COUNTED, [*AT_4, HALF, NODE], [*AT_4, HALF, AT_8, NODE]),
        (COUNTED, [*AT_4, HALF, NODE], [HALF, NODE]),
        (
            COUNTED,
            [*AT_4, HALF, NODE, sent("version.committed", 8, 1.0)],
            [*AT_4, sent("exchange.started", 8, 1.0), NODE],
        ),
        (BEING_EXCHANGED, [*AT_4, HALF, LAST, sent("version.committed", 8, 1.0)], [*AT_4, HALF, AT_8, LAST]),
        (BEING_EXCHANGED, [HALF, LAST], [*AT_4, LAST]),
        (BEING_EXCHANGED, [HALF, LAST], [sent("exchange.started", 8, lineage=2), LAST]),
        (BEING_EXCHANGED, [HALF, LAST], [HALF]),
        ("no rank started from scratch", [anew(0)], [anew(0), anew(3)]),
        ("rank 2 differed in iteration 3", [differs(3, 2), differs(3, 2)], []),
        ("rank 2 differed in iteration 3", [differs(3, 2)], [differs(3, 1, 2)]),
        ("rank 2 differed in iteration 3", [differs(3, 2)], [differs(3, 2), differs(4, 2)]),
        ("s restored a certified version", [CERTIFIED], [NODE]),
        ("s restored a certified version", [CERTIFIED], [restored("node", 4, mark="unaudited")]),
        ("copies went out in bubbles", [bubbled(0), bubbled(9)], [bubbled(0)]),
    ],
)
def test_a_claim_holds_of_what_was_written_or_does_not(
    tmp_path: Path, said: str, right: list[Event], wrong: list[Event]
) -> None:
    follow(tmp_path, f"{ENDED}{said}", Told("s", written=right))
    with pytest.raises(AssertionError):
        follow(tmp_path, f"{ENDED}{said}", Told("s", written=wrong))
    if said.startswith("every"):
        with pytest.raises(AssertionError, match="node n0"):
            follow(tmp_path, f"{ENDED}{said}", Told("s", written=right), Told("n0", written=[stored(6)]))


def test_every_node_has_to_end_as_it_is_said_and_to_give_the_reason(tmp_path: Path) -> None:
    ended, refused = Told("n0"), Told("n0", {"status": "refused", "reason": "too much is gone"})
    other = Told("s", {"status": "refused", "reason": "it is Monday"})
    end, refusal = f"{ENDED}no rank started from scratch", "when the job is refused\nthen the reason contains: too much"
    follow(tmp_path, end, ended, Told("s"))
    follow(tmp_path, refusal, refused)
    for said, nodes in ((end, (ended, other)), (refusal, (refused, Told("s"))), (refusal, (refused, other))):
        with pytest.raises(AssertionError):
            follow(tmp_path, said, *nodes)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Version], Path]:
    """A complete checkpoint where a story looks for it."""

    def written(version: Version) -> Path:
        base = tmp_path / "checkpoints" / "j"
        for rank in range(RANKS):
            path = tmp_path / f"segment-{version.iteration}-{rank}"
            segments.create(path, Shape(8000, 1000, 1, 5, slots_for(Pin.STORAGE)), rank, dict(ORIGIN.fingerprint))
            segment = Segment(path)
            segment.ranges = [(0, 8000)]
            segment.dirty(0, version, 0)
            held = TensorRange("t", "uint8", "parameter", "own", 8000, 0, 8000, 0, (8000,))
            described = Manifest(rank, RANKS, (0, 0), ((0, 8000),), (held,))
            small = manifest.join(manifest.write(described), b"small")
            segment.write_small(0, small)
            segment.data(0)[:] = np.arange(8000, dtype=np.uint8) + rank
            digests = np.array([xxhash.xxh3_64_intdigest(segment.data(0).tobytes())], dtype=np.uint64)
            segment.digests(0)[:] = digests
            segment.seal(0, version, 0, small, digests)
            persist.write_rank(checkpoint.partial_of(base, version), segment, version, ORIGIN)
            segment.close()
        return checkpoint.commit(base, version, ORIGIN)

    return written


def test_checkpoints_that_are_there_and_whole_are_told_from_others(
    tmp_path: Path, write: Callable[[Version], Path]
) -> None:
    whole = "complete checkpoints are intact, the newest >= 6"
    write(Version(1, 3))
    before = "when checkpoint 3 is complete\nthen checkpoint 6 is not complete\n"
    follow(tmp_path, f"{before}{ENDED}no rank started from scratch", Told("n0"))
    with pytest.raises(AssertionError, match="v1-3"):
        follow(tmp_path, f"{ENDED}{whole}", Told("n0"))
    folder = write(Version(1, 6))
    follow(tmp_path, f"{ENDED}{whole}", Told("n0"))
    with pytest.raises(AssertionError, match="v1-6"):
        follow(tmp_path, f"then checkpoint 6 is not complete\n{ENDED}{whole}", Told("n0"))
    with pytest.raises(AssertionError, match="is of 4 ranks, expected 8"):
        assert_whole(folder, 8)
    with open(folder / checkpoint.data_file(2), "r+b") as file:
        file.seek(4000)
        byte = file.read(1)
        file.seek(4000)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(AssertionError, match="rank-00002.*does not match its digest"):
        follow(tmp_path, f"{ENDED}{whole}", Told("n0"))
    (folder / checkpoint.record_file(3)).unlink()
    with pytest.raises(AssertionError, match=r"the files of ranks \[3\] are missing"):
        assert_whole(folder, RANKS)
