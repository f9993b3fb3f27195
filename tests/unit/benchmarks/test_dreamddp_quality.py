"""The losses of DreamDDP: runs, ratios, and the schedule that follows from sizes."""

import math
from dataclasses import replace

import pytest
import torch

from dreamddp_quality import learner_figures
from harness.gang import gang
from workloads import real_replica
from workloads.dreamddp_quality_runs import (
    COMPARED,
    DREAMDDP,
    FULL_SYNC,
    LONG,
    PERIODS,
    SMOKE,
    H,
    by_seed,
    compared_run,
    divergence_ratios,
    iterations_to,
    mean_divergence,
    peak_divergence,
    quality_ratios,
)
from workloads.local_blocks import PLAIN
from workloads.quality_runs import QualityOutcome
from workloads.quality_training import (
    COMMUNICATION,
    STRIDE,
    divergence,
    from_line,
    mean_of_replicas,
    profile_by_size,
    to_line,
)


def outcome(policy, losses, seed=1):
    return QualityOutcome(compared_run("deep_text", seed, policy, SMOKE), tuple(losses.items()), 5)


@pytest.mark.parametrize("scale", [*LONG.values(), SMOKE])
def test_losses_are_taken_after_whole_periods(scale):
    assert scale.iterations % scale.evaluations == 0 and scale.iterations // scale.evaluations % H == 0
    assert scale.warmup % H == 0


def test_both_policies_have_the_same_interval_and_warm_up():
    full, ours = (compared_run("deep_text", 1, policy, SMOKE) for policy in (FULL_SYNC, DREAMDDP))
    assert full.sync["tau"] == ours.sync["h"] == H and full.sync["warmup"] == ours.sync["warmup"]
    assert ours.sync["tau"] == SMOKE.iterations and full.averaged and ours.averaged
    assert not compared_run("deep_text", 1, PLAIN, SMOKE).averaged
    assert from_line(to_line(outcome(DREAMDDP, {10: 2.0}))) == outcome(DREAMDDP, {10: 2.0})


def test_the_iteration_that_reaches_a_loss_is_interpolated():
    run = outcome(DREAMDDP, {10: 3.0, 20: 2.0, 30: 2.5, 40: 1.0})
    assert iterations_to(run, 2.25) == pytest.approx(17.5) and iterations_to(run, 2.0) == 20
    assert iterations_to(run, 3.5) == 10 and iterations_to(run, 0.5) == math.inf


def test_ratios_are_paired_by_seed():
    rows = []
    for seed in (1, 2, 3):
        rows += [outcome(PLAIN, {10: 4.0, 20: 0.9 * seed}, seed), outcome(FULL_SYNC, {10: 4.0, 20: 1.0 * seed}, seed)]
        rows += [outcome(DREAMDDP, {10: 4.0, 20: (1.005 if seed == 2 else 1.02) * seed}, seed)]
    chosen = by_seed(rows, "deep_text")
    assert set(chosen) == set(COMPARED)
    figures = learner_figures(chosen, gain=1.2)
    ratios = [(4.0 + 1.02) / (4.0 + 1.0), (4.0 + 2.01) / (4.0 + 2.0), (4.0 + 3.06) / (4.0 + 3.0)]  # means of the last
    assert figures["loss_x"] == pytest.approx(sorted(ratios)[1])
    assert figures["time_x"] == pytest.approx(float(figures["iterations_x"]) / 1.2)
    assert figures["holds"] == (float(figures["loss_x"]) <= 1.01)
    assert len(quality_ratios(chosen)) == 3


def test_a_profile_by_size_has_every_module_in_the_order_of_the_forward():
    parameters = {"blocks.0.a": torch.zeros(10), "head": torch.zeros(30), "blocks.1.a": torch.zeros(20)}
    profile = profile_by_size(parameters, 4)
    profile.require_names(["", "blocks.0", "blocks.1"])
    assert [layer.nbytes for layer in profile.layers] == [120, 40, 80] and profile.replicas == 4
    assert sum(profile.communication_ns) == pytest.approx(COMMUNICATION * profile.compute_ns, rel=1e-6)


def test_an_iteration_of_the_real_job_begins_when_its_last_rank_begins_it():
    scale = real_replica.RealScale(settle=2, periods=1, rounds=1)
    begins = real_replica.job_times([[0.0, 1, 2, 3, 4, 5, 6, 7], [0.5, 1, 2.5, 3, 4, 5, 6, 8.5]])
    assert begins[0] == 0.5 and scale.iterations == len(begins)
    assert real_replica.seconds_of(scale, begins) == pytest.approx((8.5 - 2.5) / real_replica.H)


def _evaluated(rank, world):
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.constant_(model.weight, rank + 0.1)
    with mean_of_replicas(model, world):
        inside = model.weight.flatten().tolist()
    return inside, model.weight.flatten().tolist()


def test_the_mean_is_evaluated_and_each_replica_trains_on_with_its_own_parameters():
    torch.set_num_threads(1)  # nothing parallel before the fork
    for rank, (inside, after) in enumerate(gang(_evaluated, 2, seconds=60)):
        assert inside == pytest.approx([0.6, 0.6])
        assert after == torch.full((2,), rank + 0.1).tolist()


def _apart(rank, world):
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.constant_(model.weight, float(rank))
    return divergence(model, world)


def test_divergence_is_the_mean_squared_distance_from_the_mean():
    torch.set_num_threads(1)  # nothing parallel before the fork
    assert gang(_apart, 3, seconds=60) == [pytest.approx(2 * (1 + 0 + 1) / 3)] * 3


def test_divergences_are_compared_by_seed_and_kept_in_the_file_of_results():
    ours, full = (
        replace(outcome(policy, {10: 1.0}), divergences=((11, value), (22, value + 1.0)))
        for policy, value in ((DREAMDDP, 1.0), (FULL_SYNC, 2.0))
    )
    assert from_line(to_line(ours)) == ours
    both = {DREAMDDP: {1: ours}, FULL_SYNC: {1: full}}
    assert divergence_ratios(both, mean_divergence) == [pytest.approx(1.5 / 2.5)]
    assert divergence_ratios(both, peak_divergence) == [pytest.approx(2.0 / 3.0)], "11 and 22 are in other places"
    assert not divergence_ratios({DREAMDDP: {1: outcome(DREAMDDP, {10: 1.0})}, FULL_SYNC: {1: full}}, mean_divergence)


def test_all_parts_of_a_period_are_measured_as_often():
    assert all(math.gcd(STRIDE, h) == 1 for h in (H, *PERIODS.values()))
    assert all(scale.warmup % h == 0 for scale in LONG.values() for h in PERIODS.values())
