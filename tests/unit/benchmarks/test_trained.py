"""Replicas that are trained under a session: corrupted on one rank and repaired, or on all and averaged."""

import importlib.util
from dataclasses import replace

import pytest

from ft_plugins.errors import ConfigError
from workloads import learners, sdc_checks
from workloads.sdc_runs import AUDIT, BURSTS, CLEAN, UNAUDITED, VARIANCES, case, faults
from workloads.trained import TrainingRun, evaluated_at, train

RANKS = 3
ITERATIONS = 6


def test_one_replica_struck_in_every_iteration_ends_as_the_clean_run_when_audited_and_else_does_not(tmp_path):
    learners.prepare(("text",))
    ended = {}
    for method in (CLEAN, UNAUDITED, AUDIT):
        one = case("text", 1, ITERATIONS, method, "" if method == CLEAN else "1e-2")
        ended[method] = train(one.run, RANKS, tmp_path / method)
    assert len(set(ended[CLEAN].digests)) == 1
    assert set(ended[AUDIT].digests) == set(ended[CLEAN].digests)
    assert len(set(ended[UNAUDITED].digests)) > 1
    assert [event.fields["iteration"] for event in ended[AUDIT].named("audit.failed")] == [*range(1, ITERATIONS + 1)]
    assert {event.rank for event in ended[AUDIT].named("fault.injected")} == {1}


def test_averaged_replicas_end_together_and_are_judged_on_the_way(tmp_path):
    learners.prepare(("text",))
    run = TrainingRun("text", 2, ITERATIONS, {"mode": "sync", "h": 3}, faults("1e-2", 2), evaluations=2)
    done = train(run, RANKS, tmp_path / "run", every=True)
    assert [at for at, _ in done.scores] == [3, 6]
    assert [divergence == 0 for _, divergence in done.ranks[0].divergences] == [False, False, True] * 2
    assert done.score == done.scores[-1][1] and done.score < 6.5


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="the digits are scikit-learn's")
def test_divergence_and_its_estimate_are_those_of_theory(tmp_path):
    learners.prepare(("digits",))
    run, sigma = sdc_checks.theory_run("1e-3", 1e-3)
    run = replace(run, iterations=sdc_checks.THEORY_ITERATIONS)
    errors = sdc_checks.theory_errors(train(run, sdc_checks.RANKS, tmp_path / "run", every=True), sigma)
    assert errors.sigma < 0.05 and errors.divergence < 0.05 and errors.remaining == 0
    wrong = sdc_checks.theory_errors(train(run, sdc_checks.RANKS, tmp_path / "again", every=True), 1.2 * sigma)
    assert wrong.sigma > 0.1 and wrong.divergence > 0.1


def test_a_variance_is_told_as_its_root_and_bursts_come_before_what_is_between_them():
    assert faults("1e-2", 7) == "update.gradients:gauss=0.1~7"
    assert faults("1e-4", 7, rank=1) == "update.gradients@rank=1:gauss=0.01~7"
    assert faults("1", 7) == "update.gradients:gauss=1~7"
    assert faults("burst_1", 7) == "update.gradients@iteration%40=0:gauss=1~7;update.gradients:gauss=0.01~7"
    for noise in [*VARIANCES, *BURSTS]:
        assert faults(noise, 1, 1).count("rank=1") == faults(noise, 1).count("gauss")


def test_the_last_version_is_judged_always():
    assert evaluated_at(150, 10)[-1] == 150 and len(evaluated_at(150, 10)) == 10
    assert evaluated_at(3, 10) == [1, 2, 3]


def test_digits_without_scikit_learn_are_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"not installed: pip install 'ft_plugins\[bench\]'"):
        learners.prepare(("digits",))


def test_the_learning_rate_rises_and_falls():
    one = learners.learner("text", 1)
    rates = [one.rate(iteration, 100) for iteration in range(1, 101)]
    assert max(rates) == one.peak_rate == rates[9] == pytest.approx(10 * rates[0])
    assert rates[:10] == sorted(rates[:10]) and rates[9:] == sorted(rates[9:], reverse=True) and rates[-1] > 0
