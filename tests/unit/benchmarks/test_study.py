"""The paper's configurations and the family: sizes that add up, figures of the right kind; a pipeline as given."""

from dataclasses import replace

import pytest

from ft_plugins.errors import ConfigError
from ft_plugins.planner.survival import Cluster
from workloads.jobs import BERT, FAMILY, PAPER, RANK_FAILURES, WEIGHTS_ONLY
from workloads.pipelines.goodput import ProtectionKind
from workloads.pipelines.outlook import PlannedPipeline, plan_pipeline
from workloads.pipelines.pipeline import Pipeline, PipelineSchedule
from workloads.study import scales_table, shapes_table, study_scale, study_shape

EVERY_SHAPE = [job for batch in PAPER.values() for job in batch]


def test_the_papers_configurations_are_of_16_ranks_on_4_nodes():
    assert [job.name for job in PAPER[128]] == ["d2m2p4", "d4m1p4", "d1m4p4", "d2m1p8", "d1m2p8"]
    assert all(job.ranks == 16 and job.nodes == 4 for job in EVERY_SHAPE)
    assert [job.pipeline().microbatches for job in PAPER[128]] == [8, 4, 16, 8, 16]
    assert [job.stages_per_node for job in PAPER[64]] == [1, 1, 1, 2, 2]
    links = PAPER[64][4].times(PAPER[64][4].pipeline()).links
    assert [link.bandwidth for link in links[:2]] == [31.5e9, 10e9 / 8 / 4]  # within a node, then to the next one


def test_the_family_goes_from_16_ranks_to_those_of_llama_3():
    assert [job.ranks for job in FAMILY] == [int(job.name) for job in FAMILY] == [16, 64, 256, 1024, 4096, 16384]
    largest = FAMILY[-1].cluster()
    assert largest.nodes * (largest.hw_rate + largest.sw_rate) * 54 == pytest.approx(419)
    assert largest.nodes * largest.sw_rate * 54 == pytest.approx(63)
    assert f"{RANK_FAILURES:.4g}" == "0.0004736"  # a rank and day
    work = 6 * 405e9 * 2048 * 8192 / (16384 * 500e12)  # 6 flop a parameter and token
    times = FAMILY[-1].times(FAMILY[-1].pipeline())
    passes = sum(times.forward) + sum(times.backward)
    assert passes * 16 / 16 == pytest.approx(work)  # microbatches, over the stages that share them


@pytest.mark.parametrize("job", EVERY_SHAPE, ids=lambda job: f"{job.name}-{job.batch}")
def test_bubbles_of_the_papers_configurations_are_a_fifth_and_more(job):
    found = study_shape(job)
    assert min(found.bubble_shares) > 0.2  # 'at least as much as 20%' (section 3.2)
    assert found.bubble_shares[-1] == min(found.bubble_shares)  # the head
    assert found.pairs is not None and (found.ring is None or found.ring >= found.pairs)
    assert found.in_bubbles < 0.01 < found.at_once < found.while_sending
    light = study_shape(replace(job, state_bytes=WEIGHTS_ONLY))
    assert light.pairs is not None and light.pairs <= -(-found.pairs // 2)


@pytest.mark.parametrize("job", [*BERT["bert_large"], *BERT["bert_exlarge"]], ids=lambda job: job.name)
def test_bubbles_are_a_fifth_and_more_with_its_other_models_too(job):
    light = replace(job, state_bytes=WEIGHTS_ONLY)
    found, reserved = study_shape(light, reserves=False), study_shape(light)
    assert min(found.bubble_shares) > 0.2 and job.ranks == 16
    assert found.pairs is not None and found.pairs <= 5 and (reserved.pairs is None or found.pairs < reserved.pairs)


def test_the_tables_name_every_job():
    shapes = [study_shape(job) for job in PAPER[64]]
    assert all(job.name in shapes_table(shapes) for job in PAPER[64])
    scales = [study_scale(job) for job in FAMILY[-2:]]
    shown = scales_table(scales)
    assert "16384" in shown and "zero-bubble" in shown
    for one in scales:
        assert (
            one.shares[PipelineSchedule.ZERO_BUBBLE]
            < one.shares[PipelineSchedule.ONE_F_ONE_B]
            < one.shares[PipelineSchedule.GPIPE] + 1e-9
        )
        assert one.plan.iterations_per_version == one.pairs
        disk, baft = (one.plan.of(protection).goodput for protection in (ProtectionKind.DISK, ProtectionKind.BAFT))
        assert disk < baft < 1


def test_a_pipeline_as_given():
    assert PlannedPipeline.from_options({"stages": None, "microbatches": None}) is None
    found = PlannedPipeline.from_options({"stages": 4, "microbatches": 8, "schedule": "interleaved"})
    assert found and found.pipeline == Pipeline(PipelineSchedule.INTERLEAVED, 4, 8, 2, overlap=True)
    with pytest.raises(ConfigError, match="^stages: no effect without microbatches; give it too$"):
        PlannedPipeline.from_options({"stages": 4})


def test_a_schedule_that_cannot_be_run_is_left_out():
    planned = PlannedPipeline(Pipeline(PipelineSchedule.ONE_F_ONE_B, 4, 3))  # fewer microbatches than ranks
    outlook = plan_pipeline(planned, Cluster(8, 2, 0.1, 0.1), None)
    assert set(outlook.shares) == set(PipelineSchedule) - {PipelineSchedule.INTERLEAVED}
    assert outlook.shares[PipelineSchedule.ONE_F_ONE_B] == pytest.approx(3 / 6)
    assert outlook.iterations == {} and outlook.plans == ()
