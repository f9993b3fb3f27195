"""The restart policy: stories of failures, in `restarts.txt`, and what holds for any."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.launcher.agent import restarts
from ft_plugins.launcher.agent.restarts import (
    RESTORES_OF_ONE_VERSION,
    HeldVersion,
    Life,
    LostPeers,
    Verdict,
    WorkerFailure,
    judge,
    restores_so_far,
)
from tests import transcripts


def failure(words="RuntimeError: boom", rank=0, status=1, time=10.0):
    message = words.replace("\\n", "\n")
    return WorkerFailure(rank=rank, local_rank=rank, pid=100 + rank, exitcode=status, message=message, time=time)


class Job:
    """The incarnations of a job, how each has ended, and what the policy says."""

    def __init__(self):
        self.ended, self.left = [], []
        self.incarnations = restarts.Incarnations()
        self.watcher = SimpleNamespace(held=lambda: self.left)

    def held(self, *versions):
        """What there is to go back to: `iteration/tier`, and `/certified`."""
        for iteration, tier, *certified in (version.split("/") for version in versions):
            self.left.append(HeldVersion(int(iteration), tier, *[True] * len(certified)))

    def lives(self, *spans, words="RuntimeError: loss is NaN at iteration {}", ranks=(0, 0, 0, 0), status=1):
        """Incarnations that resumed at an iteration and had completed another one in the end: `4-6`; `-` before any."""
        for span, rank in zip(spans, ranks, strict=False):
            resumed, completed = map(int, span.split("-")) if span else (None, 0)
            end = failure(words.format(completed + 1), rank, status)
            self.ended.append(Life(LostPeers((words[5:],)) if words.startswith("lost ") else end, resumed, completed))

    def recurs(self):
        return [life.resumed for life in restarts.recurring(self.ended)]

    def advice(self):
        return restarts.advice(self.ended, self.left)

    def fails(self, *versions, first=False, left=None, span=None, lost="", **how):
        """Again and again, each time with this version as the newest that can be restored."""
        said = []
        self.watcher.begun, self.watcher.progress = (
            lambda: not first,
            lambda token: span and [*map(int, span.split("-"))],
        )
        for version in versions:
            self.watcher.newest = lambda version=version: version
            end = LostPeers((lost,)) if lost else failure(**how)
            verdict = self.incarnations.end(end, left, self.watcher, 1, lambda: False)
            said.append("restart" if verdict.restart else f"{verdict.status}: {verdict.reason}")
        same = [(word, said.count(word)) for word in dict.fromkeys(said)]
        return "\n".join(f"{count} x {word}" if count > 1 else word for word, count in same)

    def without_an_smp(self, count):
        """Failures of a job that nothing protects."""
        ends = [self.incarnations.end(failure(), None, None, 1, lambda: True) for _ in range(count)]
        return [end.status if not end.restart else "restart" for end in ends]

    def newest(self):
        return transcripts.shown(self.incarnations.newest)

    def cause(self, *workers):
        """Of these, `rank/status/seconds`."""
        ends = [(int(rank), int(status), float(at)) for rank, status, at in (each.split("/") for each in workers)]
        return restarts.root_cause([failure("", *end) for end in ends]).rank

    def name(self, words, **how):
        """In a list of the ranks that ended with another one."""
        return failure(words, **how).name

    def line(self, words, node="", **how):
        return failure(words, **how).line(node)

    def length(self, characters):
        """Of the line of so long an error."""
        return len(failure(characters * "x").line("b"))

    def next(self, restart, held=None, left=None):
        return Verdict(restart, "failed", "").what_comes(held, left)


test_restarts = transcripts.of(__file__, Job)


@given(st.lists(st.one_of(st.none(), st.integers(1, 5)), min_size=1, max_size=60))
def test_no_version_is_restored_more_than_three_times_since_the_newest_was_seen(versions):
    for n in range(len(versions)):
        if not judge([Life(failure())], versions[: n + 1], None).restart:
            assert restores_so_far(versions[: n + 1]) == RESTORES_OF_ONE_VERSION
            return
    newest = [version or 0 for version in versions]
    assert max(newest[newest.index(max(newest)) :].count(version) for version in newest) <= RESTORES_OF_ONE_VERSION
