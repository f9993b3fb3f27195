"""A profile of a real job says what its schedule does: order of compute, bubbles, and not one other number.

Compute is emulated by sleeping (a backward takes twice a forward), so that ranks that share cores are as parallel as
on machines of their own; schedules, communication and updates are the frameworks' own. What is expected comes from
the definition of the schedule, played through below, not from the code that measures.
"""

import json
from dataclasses import dataclass
from importlib.util import find_spec

import pytest

from ft_plugins.model.timeline import Kind
from harness.deepspeed_runs import DeepSpeedConfiguration
from harness.golden import assert_identical
from harness.job_control import run_to_end
from harness.profiled import ProfiledRun

FORWARD = 0.06  # seconds, twice as much where more ranks compute at once; a backward takes two of it
NOISE = 0.7  # of a forward, a schedule's shortest bubble: what is shorter, in the median, is the machine's

MEGATRON = ("--hidden", "32", "--sequence", "16", "--micro-batch", "1", "--eval-at", "3")
DEEPSPEED = ("--layers", "2", "--hidden", "32", "--sequence", "16", "--eval-at", "3")

Operation = tuple[Kind, int, int]  # with microbatch and chunk


@dataclass(frozen=True)
class Pipeline:
    """A pipeline and its microbatches; with more than one chunk per stage the schedule is interleaved."""

    stages: int
    microbatches: int
    chunks: int = 1

    @property
    def merges(self):
        """Whether some bubbles become one: where stages drain, Megatron waits for a send until its receiver is there,
        which in a ring of more than two stages may be one that has still to compute."""
        return self.chunks > 1 and self.stages > 2

    def order(self, stage):
        """What a stage computes: forwards to warm up, then one forward and one backward in turn, then what is left."""
        warm_up = self.stages - stage - 1
        if self.chunks > 1:
            warm_up = 2 * warm_up + (self.chunks - 1) * self.stages
        starts = range(0, self.microbatches, self.stages)
        groups = [range(start, min(start + self.stages, self.microbatches)) for start in starts]
        forwards, backwards = (
            [(kind, one, chunk) for group in groups for chunk in chunks for one in group]
            for kind, chunks in (
                (Kind.FORWARD, range(self.chunks)),
                (Kind.BACKWARD, range(self.chunks - 1, -1, -1)),
            )
        )
        warm_up = min(warm_up, len(forwards))
        found, rest = forwards[:warm_up], forwards[warm_up:]
        for forward, backward in zip(rest, backwards, strict=False):
            found += [forward, backward]
        return found + backwards[len(rest) :]

    def before(self, stage, operation):
        """What has to be over before, and where; None for what begins a microbatch."""
        kind, microbatch, chunk = operation
        step, ends = (-1, 0) if kind is Kind.FORWARD else (1, self.stages - 1)
        if stage != ends:
            return stage + step, operation
        if 0 <= chunk + step < self.chunks:
            return self.stages - 1 - ends, (kind, microbatch, chunk + step)
        return None if kind is Kind.FORWARD else (stage, (Kind.FORWARD, microbatch, chunk))

    def idle_after(self):
        """By stage: after which operations it is idle, and how many forwards long; None: before its first one. The
        stages end together."""
        over = {}  # when, in forwards
        at = [0] * self.stages
        found = [{} for _ in range(self.stages)]
        left = [self.order(stage) for stage in range(self.stages)]
        last = [None] * self.stages
        while any(left):
            for stage, operations in enumerate(left):
                needed = operations and self.before(stage, operations[0])
                while operations and (needed is None or needed in over):
                    ready = 0 if needed is None else over[needed]
                    if ready > at[stage]:
                        found[stage][last[stage]] = ready - at[stage]
                    operation = last[stage] = operations.pop(0)
                    at[stage] = max(at[stage], ready) + (1 if operation[0] is Kind.FORWARD else 2)
                    over[stage, operation] = at[stage]
                    needed = operations and self.before(stage, operations[0])
        for stage in range(self.stages):
            if at[stage] < max(at):
                found[stage][last[stage]] = max(at) - at[stage]
        return found


def compute(timeline):
    return [found for found in timeline.shape if found[0] in (Kind.FORWARD, Kind.BACKWARD)]


def finish(server, run):
    run.folder.mkdir()
    if run.entry == "deepspeed":
        stages = int(run.argv[run.argv.index("--pp") + 1])
        settings = {**DeepSpeedConfiguration(4, 1, pp=stages).json(), "train_batch_size": 16}
        settings["train_micro_batch_size_per_gpu"] = 2 if stages == 2 else 4
        (run.folder / "ds.json").write_text(json.dumps(settings))
    job = run_to_end(server, run.spec())
    assert ("time goes" in job.log.read_text()) == run.recorded
    assert "left out" not in job.log.read_text(), "iterations with an evaluation are like the others"
    return run


def check(server, entry, folder, pipeline, argv):
    """Run it recorded and slow, and as the plain example; what was recorded is what the schedule says."""
    runs = []
    forward = FORWARD * pipeline.stages / 2
    for recorded in (True, False):
        at = folder / ("recorded" if recorded else "plain")
        words = (*argv, "--deepspeed_config", str(at / "ds.json")) if entry == "deepspeed" else argv
        runs.append(finish(server, ProfiledRun(at.name, at, entry, words, 4, forward, 2 * forward, recorded)))
    assert_identical(runs[0], runs[1], 4)
    profile = runs[0].profile
    assert [timeline.rank for timeline in profile.timelines] == [0, 1, 2, 3]
    for rank, timeline in enumerate(profile.timelines):
        stage = rank // (4 // pipeline.stages)
        assert compute(timeline) == pipeline.order(stage), f"rank {rank}"
        edges = [edge for span in timeline.spans for edge in (span.begin, span.end)]
        assert edges[0] >= 0 and edges == sorted(edges) and edges[-1] <= timeline.seconds, "one after another"
        kinds = [span.kind for span in timeline.spans]
        assert kinds[-1] is Kind.UPDATE and kinds[-2] is Kind.REDUCE and kinds.count(Kind.UPDATE) == 1
        bubbles = [bubble for bubble in profile.bubbles(rank, NOISE * forward) if bubble.after != len(kinds) - 1]
        after = [None if bubble.after < 0 else timeline.shape[bubble.after] for bubble in bubbles]
        expected = pipeline.idle_after()[stage]
        wrong = f"rank {rank}: {after}, expected {expected}\n{profile.table(NOISE * forward)}"
        if pipeline.merges:
            assert set(after) <= expected.keys(), wrong
        else:
            assert after == [*expected], wrong
        idle = sum(bubble.seconds for bubble in bubbles)
        assert idle >= (sum(expected.values()) - NOISE) * forward, wrong
        for span in timeline.spans:
            slept = {Kind.FORWARD: forward, Kind.BACKWARD: 2 * forward}.get(span.kind, 0.0)
            assert span.end - span.begin >= slept - 1e-9, "added up from lengths"


def test_the_schedule_as_it_is_played_through_here_is_the_textbooks():
    forward, backward = Kind.FORWARD, Kind.BACKWARD
    pipeline = Pipeline(2, 3)
    assert [kind.value[0] + str(one) for kind, one, _ in pipeline.order(0)] == ["f0", "f1", "b0", "f2", "b1", "b2"]
    assert [kind.value[0] + str(one) for kind, one, _ in pipeline.order(1)] == ["f0", "b0", "f1", "b1", "f2", "b2"]
    first, last = pipeline.idle_after()
    assert first == {(forward, 1, 0): 2, (backward, 1, 0): 1}, "drained at the pace of the last stage"
    assert last == {None: 1, (backward, 2, 0): 2}, "warm-up, flush"


@pytest.mark.parametrize(
    ("pipeline", "argv"),
    [
        pytest.param(Pipeline(2, 4), ("--layers", "2", "--global-batch", "8"), id="1f1b"),
        pytest.param(
            Pipeline(2, 4, 2), ("--layers", "4", "--global-batch", "8", "--virtual-stages", "2"), id="interleaved"
        ),
        pytest.param(
            Pipeline(4, 4),
            ("--layers", "4", "--global-batch", "4", "--bf16", "--distributed-optimizer", "--overlap-param-gather"),
            id="1f1b-of-four-stages-overlap",
            marks=pytest.mark.all_configurations,
        ),
        pytest.param(
            Pipeline(4, 8, 2),
            ("--layers", "8", "--global-batch", "8", "--virtual-stages", "2", "--distributed-optimizer"),
            id="interleaved-of-four-stages",
            marks=pytest.mark.all_configurations,
        ),
    ],
)
def test_what_was_recorded_of_megatron_is_its_schedule_and_nothing_else_changes(
    megatron_server, tmp_path, pipeline, argv
):
    check(megatron_server, "megatron", tmp_path, pipeline, (*MEGATRON, "--pp", str(pipeline.stages), *argv))


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra [deepspeed]")
@pytest.mark.parametrize(
    "pipeline",
    [Pipeline(2, 4), pytest.param(Pipeline(4, 4), marks=pytest.mark.all_configurations)],
    ids=["two-stages", "four-stages"],
)
def test_what_was_recorded_of_deepspeed_is_its_schedule_and_nothing_else_changes(deepspeed_server, tmp_path, pipeline):
    check(deepspeed_server, "deepspeed", tmp_path, pipeline, (*DEEPSPEED, "--pp", str(pipeline.stages)))
