"""Parse failure stories: a job, what happens to its nodes, and the claims to check. Pure.

Invariant: a story that parses can run: every line is known, every node exists at the line that names it, and no claim
comes before it can be checked. A 'fault' line may also name a node that the story starts later. An error names the
file, what was expected and what was found; also the line, unless it takes the whole story to see the error.

The first line is the title; a line that begins with '#' is a comment, and '#' elsewhere is text. Every other line is a
keyword and a phrase:

    job    megatron, tp2 pp2 dp2, 4 nodes, distributed optimizer    also: 'megatron or deepspeed', 'global batch 12',
                                                                    '20 iterations'; default: replicated optimizer,
                                                                    10 iterations
    flags  --reft-redundancy raim6                                  flags of ft_plugins
    store  every 3 iterations                                       checkpoints, in a folder shared by all nodes
    fault  n2 persist.file@rank=5,iteration=6:stop                  a fault point (`ft_plugins.base.faults`) of one node
    runs   with all configurations                                  run only with all test configurations (marker
                                                                    all_configurations)

    when   version 2 is committed on every node                     or a later one: the story waits for it
    when   iteration 11 is captured on n0                           or a later one
    when   checkpoint 3 is complete                                 or a newer one
    when   the smp of n2 has stopped                                at its fault point
    when   the job has ended  |  the job is refused                 on every node

    do     kill n2  |  cut n2  |  freeze n2                         lose a node: with its memory | by its link | all
                                                                    processes stopped, connections open
    do     start s first  |  last                                   start node s, whose address sorts before or after
                                                                    all others

    then   s restored from node, iteration >= 2                     or 'every node', '= 2'; 'from storage' also requires
                                                                    the newest complete checkpoint
    then   s restored the committed version, not the one being exchanged    a newer version was being exchanged
    then   version 8 was being exchanged                            when the job was restored for the first time
    then   n1 was declared lost                                     by at least one remaining node; no other node was
                                                                    declared lost
    then   checkpoint 6 is not complete
    then   complete checkpoints are intact, the newest >= 9         every file matches its digests
    then   the reason contains: the parts of ranks 2, 3 are gone    of every refusal, or of every restore
    then   replicas were compared, little was sent                  replicas were equal; digests were sent, not state
    then   rank 2 differed in iteration 3                           the only mismatch, with --paft
    then   s restored a certified version                           its replicas had agreed
    then   copies went out in bubbles                               some of them, with --baft
    then   no rank started from scratch                             after a completed iteration
    then   the final state is golden                                bit-identical to that of the unfailed run

The nodes of the job are n0, n1 and so on.

In: text. Out: `Story`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from ft_plugins.base import faults
from ft_plugins.errors import ConfigError, FtError

from .story import (
    EVERY,
    FRAMEWORK_NAMES,
    MOST_NODES,
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
    Story,
    StoryLine,
    VersionCommitted,
)


class StoryError(FtError):
    """A line of a story is unknown or cannot happen there."""


_BEFORE_END = (VersionCommitted, IterationCaptured, CheckpointStored, SmpStopped, JobEnds, LoseNode, StartNode)
_FINAL_CLAIMS = (
    RestoredFrom, BeingExchanged, RestoredCommitted, DeclaredLost, CheckpointsIntact, ReasonContains, ReplicasCompared,
    ReplicaMismatched, RestoredCertified, SentInBubbles, NoFreshStart, MatchesGolden,
)  # fmt: skip
_NAME = r"[a-z]\w*"
_NODE = rf"({_NAME})"
_Build = Callable[..., StoryLine]
_PHRASES: dict[str, list[tuple[str, _Build]]] = {
    "when": [
        (r"version (\d+) is committed on every node", lambda at: VersionCommitted(int(at))),
        (rf"iteration (\d+) is captured on {_NODE}", lambda at, node: IterationCaptured(node, int(at))),
        (r"checkpoint (\d+) is complete", lambda at: CheckpointStored(int(at))),
        (rf"the smp of {_NODE} has stopped", SmpStopped),
        (r"the job (has ended|is refused)", lambda end: JobEnds(JobEnd(end))),
    ],
    "do": [
        (rf"(kill|cut|freeze) {_NODE}", lambda kind, node: LoseNode(node, LossKind(kind))),
        (rf"start {_NODE} (first|last)", lambda node, order: StartNode(node, order == "first")),
    ],
    "then": [
        (
            rf"({EVERY}|{_NAME}) restored from (process|node|storage), iteration (>=|=) (\d+)",
            lambda node, tier, relation, at: RestoredFrom(node, tier, int(at), relation == "="),
        ),
        (r"version (\d+) was being exchanged", lambda at: BeingExchanged(int(at))),
        (rf"{_NODE} restored the committed version, not the one being exchanged", RestoredCommitted),
        (rf"{_NODE} was declared lost", DeclaredLost),
        (r"checkpoint (\d+) is not complete", lambda at: CheckpointNotStored(int(at))),
        (r"complete checkpoints are intact, the newest >= (\d+)", lambda at: CheckpointsIntact(int(at))),
        (r"the reason contains: (.+)", ReasonContains),
        (r"replicas were compared, little was sent", ReplicasCompared),
        (r"rank (\d+) differed in iteration (\d+)", lambda rank, at: ReplicaMismatched(int(rank), int(at))),
        (rf"{_NODE} restored a certified version", RestoredCertified),
        (r"copies went out in bubbles", SentInBubbles),
        (r"no rank started from scratch", NoFreshStart),
        (r"the final state is golden", MatchesGolden),
    ],
}
_HEAD = ("job", "flags", "store", "fault", "runs")


def read(path: Path) -> Story:
    """The story in a file. Raises StoryError."""
    return parse(path.read_text(), path.name)


def parse(text: str, name: str = "story") -> Story:
    """The story in `text`. Raises StoryError."""
    lines = list(_lines(text))
    if not lines:
        raise StoryError(f"{name}: expected a title in the first line, found nothing")
    (first, title), *rest = lines
    if title.split()[0] in (*_HEAD, *_PHRASES):
        raise StoryError(f"{name}:{first}: expected a title before the first '{title.split()[0]}', found '{title}'")
    reader = _Reader(name, title)
    for number, line in rest:
        try:
            reader.take(line)
        except (StoryError, ConfigError) as error:
            raise StoryError(f"{name}:{number}: {error}") from error
    return reader.end()


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines without empty ones and comments."""
    for number, line in enumerate(text.splitlines(), 1):
        words = line.strip()
        if words and not words.startswith("#"):
            yield number, words


class _Reader:
    """Collects a story line by line and rejects lines that cannot happen there."""

    def __init__(self, name: str, title: str) -> None:
        self._name = name
        self._title = title
        self._job: JobShape | None = None
        self._flags: tuple[str, ...] = ()
        self._store = 0
        self._faults: dict[str, str] = {}
        self._all = False
        self._lines: list[StoryLine] = []
        self._alive: set[str] = set()
        self._lost: set[str] = set()
        self._started: dict[bool, str] = {}  # by whether it sorts first; there is one address of each kind
        self._end: JobEnd | None = None

    def take(self, line: str) -> None:
        """Parse one more line. Raises StoryError, ConfigError."""
        word, _, phrase = line.partition(" ")
        phrase = phrase.strip()
        if word in _HEAD and self._lines:
            raise StoryError(f"'{word}' belongs before the first 'when', 'do' or 'then'")
        match word:
            case "job":
                if self._job is not None:
                    raise StoryError("a story has one job")
                self._job = _job(phrase)
                self._alive = {f"n{index}" for index in range(self._job.nodes)}
            case "flags":
                self._flags += _flags(phrase)
            case "store":
                if self._store:
                    raise StoryError("a story has one 'store' line")
                self._store = int(_matched(r"every (\d+) iterations", phrase, "'every 3 iterations'")[1])
                if not self._store:
                    raise StoryError("expected at least 1 iteration between checkpoints, found 0")
            case "fault":
                node, _, specification = phrase.partition(" ")
                if not faults.parse(specification):
                    raise StoryError(f"expected a node and its fault ('n2 point@fact=value:action'), found '{phrase}'")
                if node in self._faults:
                    raise StoryError(f"node {node} already has a 'fault' line; join its faults with ';'")
                self._faults[node] = specification.strip()
            case "runs":
                _matched("with all configurations", phrase, "'with all configurations'")
                self._all = True
            case "when" | "do" | "then":
                self._add(_story_line(word, phrase))
            case _:
                raise StoryError(f"expected one of {', '.join((*_HEAD, *_PHRASES))} first, found '{word}'")

    def _add(self, line: StoryLine) -> None:
        if self._job is None:
            raise StoryError("the 'job' line must come before the first 'when', 'do' or 'then'")
        if isinstance(line, MatchesGolden) and self._end is not JobEnd.ENDED:
            raise StoryError("this claim can only be checked after 'when the job has ended'")
        if isinstance(line, _FINAL_CLAIMS) and self._end is None:
            raise StoryError("this claim can only be checked after 'when the job has ended' or 'is refused'")
        if self._end and isinstance(line, _BEFORE_END):
            raise StoryError("nothing can happen after the job has ended")
        if _needs_store(line) and not self._store:
            raise StoryError("checkpoints need a 'store' line")
        match line:
            case StartNode(node, first):
                if node in self._alive | self._lost:
                    raise StoryError(f"node {node} already exists; give the substitute another name")
                if first in self._started:
                    order, other = ("first", "last") if first else ("last", "first")
                    raise StoryError(f"node {self._started[first]} was already started {order}; start {node} {other}")
                self._started[first] = node
                self._alive.add(node)
            case LoseNode(node, kind):
                self._require_alive(node)
                if kind is LossKind.CUT and node in self._started.values():
                    raise StoryError(f"node {node} was started later; only nodes of the 'job' line can be cut")
                self._alive.remove(node)
                self._lost.add(node)
            case SmpStopped(node) | IterationCaptured(node):
                self._require_alive(node)
            case DeclaredLost(node) if node not in self._lost:
                raise StoryError(f"node {node} was not lost; lost nodes: {_names(self._lost)}")
            case ReplicaMismatched(rank) if rank >= self._job.ranks:
                raise StoryError(f"expected a rank of the job, 0 to {self._job.ranks - 1}, found {rank}")
            case RestoredCommitted(node) | RestoredCertified(node):
                self._require_alive(node)
            case RestoredFrom(node) if node != EVERY:
                self._require_alive(node)
            case JobEnds(end):
                self._end = end
        self._lines.append(line)

    def _require_alive(self, node: str) -> None:
        if node not in self._alive:
            raise StoryError(f"expected a live node ({_names(self._alive)}), found '{node}'")

    def end(self) -> Story:
        """The complete story. Raises StoryError if something is missing."""
        if self._job is None:
            raise StoryError(f"{self._name}: expected a 'job' line, found none")
        if self._end is None or isinstance(self._lines[-1], JobEnds):
            raise StoryError(
                f"{self._name}: expected 'when the job has ended' (or 'is refused') and then at least one claim"
            )
        unknown = self._faults.keys() - self._alive - self._lost
        if unknown:
            raise StoryError(f"{self._name}: a 'fault' line names {_names(unknown)}, which is not a node of this story")
        return Story(
            Path(self._name).stem, self._title, self._job, tuple(self._lines), self._flags, self._store,
            self._faults, self._all,
        )  # fmt: skip


def _needs_store(line: StoryLine) -> bool:
    if isinstance(line, RestoredFrom):
        return line.tier == "storage"
    return isinstance(line, (CheckpointStored, CheckpointNotStored, CheckpointsIntact))


def _flags(phrase: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(phrase))
    except ValueError as error:
        raise StoryError(f"flags: {error}") from error


def _names(nodes: set[str]) -> str:
    return ", ".join(sorted(nodes)) or "none"


def _matched(pattern: str, phrase: str, expected: str) -> re.Match[str]:
    match = re.fullmatch(pattern, re.sub(r"\s+", " ", phrase))
    if match is None:
        raise StoryError(f"expected {expected}, found '{phrase}'")
    return match


def _story_line(word: str, phrase: str) -> StoryLine:
    for pattern, build in _PHRASES[word]:
        match = re.fullmatch(pattern, re.sub(r"\s+", " ", phrase))
        if match is not None:
            return build(*match.groups())
    raise StoryError(f"'{word}' has no phrase '{phrase}'; ft_plugins/testing/story_parser.py lists them")


def _job(phrase: str) -> JobShape:
    """`<framework> [or <framework>], tp2 pp2 dp2, 4 nodes[, more]`"""
    parts = [part.strip() for part in phrase.split(",")]
    if len(parts) < 3:
        raise StoryError(f"expected '<framework>, tp2 pp2 dp2, 4 nodes', found '{phrase}'")
    frameworks = tuple(parts[0].split(" or "))
    unknown = next((each for each in frameworks if each not in FRAMEWORK_NAMES), None)
    if unknown is not None:
        raise StoryError(f"expected a framework ({', '.join(FRAMEWORK_NAMES)}), found '{unknown}'")
    sizes = _matched(r"tp(\d+) pp(\d+) dp(\d+)", parts[1], "'tp2 pp2 dp2'")
    tp, pp, dp = map(int, sizes.groups())
    nodes = int(_matched(r"(\d+) nodes?", parts[2], "'4 nodes'")[1])
    more: dict[str, int | bool] = {}
    for part in parts[3:]:
        if part in ("distributed optimizer", "replicated optimizer"):
            more["distributed"] = part.startswith("distributed")
        elif match := re.fullmatch(r"global batch (\d+)", part):
            more["global_batch"] = int(match[1])
        elif match := re.fullmatch(r"(\d+) iterations", part):
            more["iterations"] = int(match[1])
        else:
            raise StoryError(
                "expected 'distributed optimizer', 'replicated optimizer', 'global batch 12' or '20 iterations', "
                f"found '{part}'"
            )
    if nodes > MOST_NODES:
        raise StoryError(f"expected at most {MOST_NODES} nodes, found {nodes}: tests emulate no more hosts")
    if 0 in (more.get("iterations"), more.get("global_batch")):
        raise StoryError(f"expected at least 1 iteration and a global batch of at least 1, found '{phrase}'")
    shape = JobShape(frameworks, tp, pp, dp, nodes, **more)  # type: ignore[arg-type]
    if not nodes or not shape.ranks or shape.ranks % nodes:
        raise StoryError(f"{shape.ranks} ranks cannot be spread evenly over {nodes} nodes")
    return shape
