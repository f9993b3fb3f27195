"""Stories as text: what is understood, and what is refused with file, line, what was expected and what was found."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.story import (
    EVERY,
    BeingExchanged,
    CheckpointNotStored,
    CheckpointsIntact,
    CheckpointStored,
    DeclaredLost,
    IterationCaptured,
    JobEnd,
    JobEnds,
    JobShape,
    LoseNode,
    LossKind,
    MatchesGolden,
    NoFreshStart,
    ReasonContains,
    ReplicaMismatched,
    ReplicasCompared,
    RestoredCertified,
    RestoredCommitted,
    RestoredFrom,
    SentInBubbles,
    SmpStopped,
    StartNode,
    VersionCommitted,
)
from harness.story_parser import StoryError, parse, read

STORY = """
# what goes before the title is a comment

A node is lost while its checkpoint is written

job    megatron or deepspeed, tp2 pp2 dp4, 4 nodes, distributed optimizer, global batch 12, 20 iterations
flags  --reft-redundancy raim6
flags  --reft-exchange-mbps 80
store  every 3 iterations
fault  n2 persist.file@rank=5,iteration=6:stop;attach.before:kill
fault  s  parity_store.xored@hit=2:stop
runs   with all configurations

when   version 2 is committed on every node
when   the smp  of n2 has stopped
when   iteration 5 is captured on n0
then   checkpoint 6 is not complete
do     kill n2
do     cut n1
do     freeze n3
do     start s first
do     start t last
"""
END = """
when   checkpoint 3 is complete
when   the job has ended
then   every node restored from storage, iteration >= 3
then   s restored from node, iteration >= 2
then   s restored from node, iteration = 4
then   version 8 was being exchanged
then   s restored the committed version, not the one being exchanged
then   n1 was declared lost
then   complete checkpoints are intact, the newest >= 9
then   the reason contains: the parts of ranks 2, 3 are gone
then   replicas were compared, little was sent
then   rank 2 differed in iteration 3
then   s restored a certified version
then   copies went out in bubbles
then   no rank started from scratch
then   the final state is golden
"""


def test_every_kind_of_line_is_understood() -> None:
    story = parse(STORY + END, "written.story")
    assert (story.name, story.title) == ("written", "A node is lost while its checkpoint is written")
    assert story.job == JobShape(("megatron", "deepspeed"), 2, 2, 4, 4, True, 20, 12) and story.job.ranks == 16
    assert story.flags == ("--reft-redundancy", "raim6", "--reft-exchange-mbps", "80")
    assert story.store == 3 and story.all_configurations
    assert story.faults == {
        "n2": "persist.file@rank=5,iteration=6:stop;attach.before:kill",
        "s": "parity_store.xored@hit=2:stop",
    }
    assert story.lines == (
        VersionCommitted(2), SmpStopped("n2"), IterationCaptured("n0", 5), CheckpointNotStored(6),
        LoseNode("n2", LossKind.KILL), LoseNode("n1", LossKind.CUT), LoseNode("n3", LossKind.FREEZE),
        StartNode("s", True), StartNode("t", False), CheckpointStored(3),
        JobEnds(JobEnd.ENDED), RestoredFrom(EVERY, "storage", 3), RestoredFrom("s", "node", 2),
        RestoredFrom("s", "node", 4, exactly=True), BeingExchanged(8), RestoredCommitted("s"), DeclaredLost("n1"),
        CheckpointsIntact(9), ReasonContains("the parts of ranks 2, 3 are gone"), ReplicasCompared(),
        ReplicaMismatched(2, 3), RestoredCertified("s"), SentInBubbles(), NoFreshStart(), MatchesGolden(),
    )  # fmt: skip


def test_what_is_not_said_is_small_and_plain() -> None:
    story = parse(
        "A story\njob megatron, tp1 pp1 dp1, 1 node\nwhen the job has ended\nthen no rank started from scratch\n"
    )
    assert story.job == JobShape(("megatron",), 1, 1, 1, 1, distributed=False, iterations=10, global_batch=None)
    assert (story.flags, story.store, story.faults, story.all_configurations) == ((), 0, {}, False)


JOB = "job megatron, tp2 pp2 dp2, 4 nodes"
ENDED = "when the job has ended"


@pytest.mark.parametrize(
    ("lines", "number", "says"),
    [
        (["job megatron, tp2 pp2 dp2"], 2, "expected '<framework>, tp2 pp2 dp2, 4 nodes'"),
        (["job megatron, tp2 dp2, 4 nodes"], 2, "expected 'tp2 pp2 dp2', found 'tp2 dp2'"),
        (["job megatron, tp2 pp2 dp2, four nodes"], 2, "found 'four nodes'"),
        (["job megatron, tp2 pp2 dp2, 3 nodes"], 2, "8 ranks cannot be spread evenly over 3 nodes"),
        (["job megatron, tp2 pp2 dp0, 3 nodes"], 2, "0 ranks"),
        (["job megatron, tp2 pp2 dp2, 4 nodes, fp8"], 2, "found 'fp8'"),
        ([JOB, JOB], 3, "one job"),
        (["when version 2 is committed on every node"], 2, "the 'job' line must come before the first 'when'"),
        ([JOB, "perhaps kill n2"], 3, "found 'perhaps'"),
        ([JOB, "do hurt n2"], 3, "'do' has no phrase 'hurt n2'"),
        ([JOB, "do start s"], 3, "'do' has no phrase 'start s'"),
        ([JOB, "when version two is committed on every node"], 3, "'when' has no phrase"),
        ([JOB, "then kill n2"], 3, "'then' has no phrase 'kill n2'"),
        ([JOB, "do kill n4"], 3, "(n0, n1, n2, n3), found 'n4'"),
        ([JOB, "do kill n2", "", "do freeze n2"], 5, "(n0, n1, n3), found 'n2'"),
        ([JOB, "do kill n2", "do start n2 first"], 4, "node n2 already exists"),
        ([JOB, "do start s first", "do start s last"], 4, "node s already exists"),
        ([JOB, "do kill n2", "when the smp of n2 has stopped"], 4, "found 'n2'"),
        ([JOB, "do kill n2", "when iteration 5 is captured on n2"], 4, "found 'n2'"),
        ([JOB, "when checkpoint 3 is complete"], 3, "'store'"),
        ([JOB, ENDED, "then every node restored from storage, iteration >= 2"], 4, "'store'"),
        ([JOB, "store every iteration"], 3, "'every 3 iterations'"),
        ([JOB, "runs slowly"], 3, "'with all configurations'"),
        ([JOB, "do kill n2", "flags --reft-redundancy raim6"], 4, "before the first"),
        ([JOB, "fault n2 persist.file"], 3, "cannot be read"),
        ([JOB, "fault n2 a:kill", "fault n2 b:kill"], 4, "join its faults with ';'"),
        ([JOB, "then the final state is golden"], 3, "can only be checked after"),
        ([JOB, "then n1 restored from node, iteration >= 2", ENDED], 3, "can only be checked after"),
        ([JOB, "when the job is refused", "then the final state is golden"], 4, "can only be checked after"),
        ([JOB, ENDED, "do kill n2"], 4, "the job has ended"),
        ([JOB, ENDED, "then s restored the committed version, not the one being exchanged"], 4, "found 's'"),
        ([JOB, "then version 8 was being exchanged", ENDED], 3, "can only be checked after"),
        ([JOB, ENDED, "then n2 was declared lost"], 4, "n2 was not lost; lost nodes: none"),
        ([JOB, "do kill n2", ENDED, "then n2 restored from node, iteration >= 2"], 5, "found 'n2'"),
        ([JOB, ENDED, "then n2 restored from disk, iteration >= 2"], 4, "'then' has no phrase"),
        (["job torchtitan, tp2 pp2 dp2, 4 nodes"], 2, "expected a framework (megatron, deepspeed), found 'torchtitan'"),
        (["job megatron, tp2 pp2 dp2, 8 nodes"], 2, "expected at most 6 nodes, found 8"),
        (["job megatron, tp2 pp2 dp2, 4 nodes, 0 iterations"], 2, "at least 1 iteration"),
        ([JOB, "flags --name 'unclosed"], 3, "flags: No closing quotation"),
        ([JOB, "do start s first", "do cut s"], 4, "node s was started later; only nodes of the 'job' line can be cut"),
        ([JOB, "do start s first", "do start t first"], 4, "node s was already started first; start t last"),
        ([JOB, ENDED, "then rank 99 differed in iteration 3"], 4, "a rank of the job, 0 to 7, found 99"),
        ([JOB, "store every 0 iterations"], 3, "expected at least 1 iteration between checkpoints, found 0"),
        ([JOB, "store every 3 iterations", "store every 4 iterations"], 4, "a story has one 'store' line"),
        ([JOB, "fault n2"], 3, "expected a node and its fault ('n2 point@fact=value:action'), found 'n2'"),
        ([JOB, "then no rank started from scratch", ENDED], 3, "after 'when the job has ended' or 'is refused'"),
    ],
)
def test_a_line_that_cannot_be_understood_or_cannot_happen_is_named(lines: list[str], number: int, says: str) -> None:
    with pytest.raises(StoryError) as raised:
        parse("\n".join(["A story", *lines, ENDED, "then no rank started from scratch"]), "wrong.story")
    assert str(raised.value).startswith(f"wrong.story:{number}: ") and says in str(raised.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected a title in the first line, found nothing"),
        (f"{JOB}\n{ENDED}", "wrong.story:1: expected a title before the first 'job'"),
        ("A story\n", "expected a 'job' line"),
        (f"A story\n{JOB}\ndo kill n2\n", "expected 'when the job has ended'"),
        (f"A story\n{JOB}\n{ENDED}\n", "then at least one claim"),
        (
            f"A story\n{JOB}\nfault x a:kill\n{ENDED}\nthen no rank started from scratch\n",
            "a 'fault' line names x, which is not a node of this story",
        ),
    ],
)
def test_a_story_that_lacks_something_is_refused(text: str, says: str) -> None:
    with pytest.raises(StoryError, match="wrong.story") as raised:
        parse(text, "wrong.story")
    assert says in str(raised.value)


def test_a_file_is_named_in_its_story_and_in_what_is_wrong_with_it(tmp_path: Path) -> None:
    path = tmp_path / "a_node_is_lost.story"
    path.write_text(STORY + END)
    assert read(path).name == "a_node_is_lost"
    path.write_text("A story\njob none\n")
    with pytest.raises(StoryError, match="a_node_is_lost.story:2: "):
        read(path)
