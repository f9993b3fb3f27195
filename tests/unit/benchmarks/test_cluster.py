"""How the emulated cluster is scaled: transfer over compute as on the testbed."""

import pytest

from workloads import cluster
from workloads.cluster import LINK_MBPS, MESSAGE_BYTES, NODES, RANKS_OF_NODE, SCALE, EmulatedJob
from workloads.emulated_rank import LAYERS, OFF, ON, Sleeper, StageSpec

EACH = [one for batch in (128, 64) for one in cluster.shapes(batch)]


@pytest.mark.parametrize("one", EACH, ids=lambda one: one.name)
def test_what_a_rank_sends_takes_as_long_as_on_the_testbed(one):
    job = one.job
    assert job.ranks == NODES * RANKS_OF_NODE
    parameters = {stage.parameters for stage in one.stages}.pop()
    sent = 12 * parameters / job.dp  # of replicated state each replica sends its part
    here = sent / (LINK_MBPS * 1e6 / 8 / RANKS_OF_NODE)
    assert here == pytest.approx(job.rank_bytes / job.rank_link, rel=1e-5)  # whole parameters
    assert sent == pytest.approx(12 * 345e6 / 16 / SCALE, rel=1e-5)


@pytest.mark.parametrize("one", EACH, ids=lambda one: one.name)
def test_stages_are_as_long_as_their_part_of_the_model(one):
    times = one.job.times(one.pipeline)
    assert [stage.forward for stage in one.stages] == list(times.forward)
    assert [stage.backward for stage in one.stages] == [2 * seconds for seconds in times.forward]
    assert one.stages[-1].forward > one.stages[0].forward, "the last one has the head"


def test_stretched_time_leaves_transfer_over_bubble_as_it_is():
    one, other = cluster.shapes(64)[0], cluster.shapes(64, dilation=2)[0]
    assert one.link_mbps == 2 * other.link_mbps == pytest.approx(33.3, rel=0.01)
    for usual, stretched in zip(one.stages, other.stages, strict=True):
        assert (stretched.forward, stretched.backward) == (2 * usual.forward, 2 * usual.backward)
        assert stretched.parameters == usual.parameters
    assert one.name == other.name


def test_iterations_of_all_shapes_can_be_stretched_to_the_same_length():
    found = {one.job.name: one.stretched_to(3.6).dilation for one in cluster.shapes(64)}
    assert found == {"d2m2p4": 5, "d4m1p4": 4, "d1m4p4": 6, "d2m1p8": 3, "d1m2p8": 4}
    assert cluster.shapes(64)[0].stretched_to(0.1).dilation == 1, "never shortened"


def test_of_an_interleaved_schedule_a_rank_has_all_of_its_chunks():
    whole, cut = cluster.shapes(128)[0], cluster.shapes(128, 2)[0]
    assert cut.pipeline.chunks == 2 and cut.name == "d2m2p4b128v2"
    for one, other in zip(whole.stages[:-1], cut.stages[:-1], strict=True):
        assert other.forward == pytest.approx(one.forward) and other.parameters == one.parameters
    names = [one.job.name for one in cluster.shapes(64, 2)]
    assert names == ["d2m2p4", "d1m4p4", "d1m2p8"], "those whose microbatches fill the stages"


def test_a_disturbed_stage_is_the_second(tmp_path):
    one = EmulatedJob(cluster.shapes(64)[0].job, jitter=0.3, drift=1.5, drift_after=60.0)
    disturbed = [(stage.jitter, stage.drift, stage.drift_after) for stage in one.stages]
    assert disturbed == [(0.0, 1.0, 0.0), (0.3, 1.5, 60.0), (0.0, 1.0, 0.0), (0.0, 1.0, 0.0)]


def test_the_job_s_flags_say_sizes_and_messages(tmp_path):
    spec = cluster.shapes(64)[0].spec(tmp_path, [(ON, 16), (OFF, 5)], tmp_path)
    flags = dict(zip(spec.argv[::2], spec.argv[1::2], strict=True))
    known = ("--tp", "--pp", "--global-batch", "--micro-batch", "--iterations")
    assert [flags[name] for name in known] == ["2", "4", "64", "8", "23"]
    assert 4 * int(flags["--sequence"]) * int(flags["--micro-batch"]) * int(flags["--hidden"]) == MESSAGE_BYTES
    assert (tmp_path / "blocks.json").read_text() == '[["on", 16], ["off", 5]]'
    assert LAYERS > 1


def test_what_a_pass_took_too_long_the_next_one_takes_less():
    now, late = [0.0], iter([0.25, 0.0, 1.5, 0.0, 0.0])

    def sleep(seconds):
        now[0] += seconds + next(late)

    sleeper = Sleeper(StageSpec(0.5, 1.0, 1), 0, sleep, lambda: now[0])
    ends = []
    for _ in range(5):
        sleeper.sleep(0.5)
        ends.append(now[0])
    # the third is late by 1.5 s: no more than one pass of that is made up for, by the fourth
    assert ends == [0.75, 1.0, 3.0, 3.0, 3.5]


def test_jitter_of_one_number_is_the_same_again_and_another_ranks_is_not():
    def drawn(seed, number):
        slept = []
        sleeper = Sleeper(StageSpec(0.5, 1.0, 1, jitter=0.3), seed, slept.append, lambda: sum(slept))
        sleeper.sleep(1.0)  # of another block
        sleeper.draw_from(number)
        for _ in range(3):
            sleeper.sleep(1.0)
        return slept[1:]

    assert drawn(1, 4) == drawn(1, 4) != drawn(2, 4) and drawn(1, 4) != drawn(1, 5)
    assert all(0.7 <= one <= 1.3 for one in drawn(1, 4))


def test_what_a_pass_took_too_long_is_made_up_for_by_a_pause_first():
    now, late = [0.0], iter([0.25, 0.0, 0.25, 0.0])

    def sleep(seconds):
        now[0] += seconds + next(late)

    sleeper = Sleeper(StageSpec(0.5, 1.0, 1), 0, sleep, lambda: now[0])
    ends = []
    for pause in (0.0, 0.125, 0.0, 1.0):
        now[0] += pause
        sleeper.sleep(0.5)
        ends.append(now[0])
    assert ends == [0.75, 1.25, 2.0, 3.5], "half of it in a short pause, all of it in a long one"
