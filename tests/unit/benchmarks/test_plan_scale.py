"""The job whose plans are measured is one that the project's own functions accept, and every plan has a figure."""

import pytest

from ft_plugins.snapshot.capture.double import replica_shares
from ft_plugins.snapshot.capture.manifest import manifest_of
from workloads.plan_scale import PlanFigure, plan_figures
from workloads.scaled_job import SHAPES, ScaledJob, topology_of

LARGE_JOBS_TOO = {
    "RAIM5, half computed locally", "copies and parity", "bubble plan, 64 microbatches", "recovery, 1 node lost",
    "recovery, 8 nodes lost", "frames of a lost rank", "admissible sizes, RAIM5", "facts of all ranks, unpacked",
    "re-partition of a resize", "protect", "rebuild", "survival", "goodput", "layout and double capture",
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_facts_that_are_derived_are_those_that_ranks_compute(shape):
    job = ScaledJob(topology_of(64, shape))
    for rank in (0, 9, 63):
        layout = job.layout(rank)
        derived, computed = job.manifest(rank), manifest_of(layout, 64, job.manifest(rank).coordinates)
        assert {(one.name, one.kind, one.whole, one.start, one.stop) for one in derived.tensors} == {
            (one.name, one.kind, one.whole, one.start, one.stop) for one in computed.tensors
        }
        wanted = [(digest, start, nbytes) for digest, start, _, nbytes in replica_shares(layout)]
        assert [(digest, start, nbytes) for digest, start, _, nbytes in job.replica_shares[rank]] == wanted
        assert 0 <= job.shapes[rank].nbytes - layout.nbytes <= 8192


def test_a_shape_that_is_too_large_has_fewer_stages():
    assert (topology_of(64, "tp8 pp16").pp, topology_of(512, "tp8 pp16").pp) == (4, 16)
    assert all(topology_of(ranks, shape).world_size == ranks for ranks in (64, 512) for shape in SHAPES)


def test_every_plan_has_a_figure_and_messages_to_the_smp_stay_short():
    figures = {figure.plan: figure for figure in plan_figures(512, "tp4 pp4")}
    assert set(figures) >= LARGE_JOBS_TOO
    assert all(isinstance(one, PlanFigure) and one.seconds >= 0 and one.peak_bytes > 0 for one in figures.values())
    assert 0 < figures["protect"].message_bytes < 1024 and 0 < figures["rebuild"].message_bytes < 2048
