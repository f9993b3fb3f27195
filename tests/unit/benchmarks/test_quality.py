"""What local SGD does to the loss: which runs are done, and how figures follow from them."""

import math

import pytest

import local_sgd_quality
from ft_plugins.config import Config, SyncConfig
from local_sgd_quality import QUICK_RUNS, learner_figures, measure_runs, part_figures
from workloads import learners
from workloads.quality_runs import (
    EDIT,
    FULL,
    GARBAGE_RANK,
    LOW_RATE,
    PLAIN,
    POLICIES,
    REPLICAS,
    SMOKE,
    STRUCK,
    QualityOutcome,
    SynchronisationRecord,
    by_policy,
    elastic,
    longer,
    ratios,
    run_of,
    runs,
    swept,
    worst,
)
from workloads.quality_training import from_line, to_line, train_quality

SCALE = FULL["noisy_digits"]


@pytest.mark.parametrize("policy", [name for name in POLICIES if POLICIES[name]])
def test_a_job_takes_the_settings_of_each_policy(policy):
    """Those that switch a part off are so large that it never acts."""
    assert Config.from_json({"sync": dict(run_of("text", 1, policy, SCALE).sync)}).sync is not None


def test_runs_that_are_in_the_folder_are_not_done_again(tmp_path, monkeypatch):
    done = []

    def train(run, folder):
        done.append(run)
        return QualityOutcome(run, ((60, 1.0 + run.seed),), 2)

    monkeypatch.setattr(local_sgd_quality, "train_quality", train)
    todo, saved = [run_of("text", seed, EDIT, SCALE, garbage=True) for seed in (1, 2, 3)], tmp_path / "quality.jsonl"
    first = [*measure_runs(todo[:2], saved)]
    assert [*measure_runs(todo, saved)][:2] == first and done == todo
    assert [*measure_runs(todo[2:], None)][0].loss == 4.0 and len(saved.read_text().splitlines()) == 3


@pytest.mark.parametrize("scale", FULL.values())
def test_losses_are_taken_right_after_synchronisations_and_garbage_comes_when_replicas_are_judged(scale):
    every = scale.iterations // scale.evaluations
    assert every % scale.tau == 0 and every * scale.evaluations == scale.iterations
    first, last = scale.garbage
    assert (first - 1) % scale.tau == 0 == last % scale.tau and last < scale.iterations
    assert (first - scale.warmup) // scale.tau > SyncConfig().penalty_warmup


def test_the_runs_of_a_seed_differ_in_nothing_but_policy_and_garbage():
    made = runs("text", 3, SCALE)
    assert len({(one.learner, one.seed, one.scale) for one in made}) == 1
    assert [(one.policy, bool(one.garbage)) for one in made] == [
        *((policy, False) for policy in POLICIES), *((policy, True) for policy in STRUCK)
    ]  # fmt: skip
    assert {one.sync["tau"] for one in made if one.sync} == {SCALE.tau}
    assert {one.sync["warmup"] for one in made if one.sync} == {SCALE.warmup}
    assert [one.policy for one in made if one.rate != 1] == ["edit_low_rate"]
    bad, (first, last) = made[-1], SCALE.garbage
    assert [rank for rank in range(4) if bad.is_garbage(first, rank)] == [GARBAGE_RANK]
    assert not bad.is_garbage(first - 1, GARBAGE_RANK) and not bad.is_garbage(last + 1, GARBAGE_RANK)
    assert not any(one.is_garbage(SCALE.garbage[0], GARBAGE_RANK) for one in made if one.garbage is None)


def outcome(policy, seed, losses, garbage=False, left_out=None):
    run = run_of("digits", seed, policy, SCALE, garbage)
    points = tuple((32 * number, loss) for number, loss in enumerate(losses, 1))
    records = (
        SynchronisationRecord(SCALE.garbage[0] + SCALE.tau - 1, left_out or {}, [], {"0": 0.5}),
        SynchronisationRecord(SCALE.iterations, {}, ["1"], {}),
    )
    return QualityOutcome(run, points, 2, records if policy == EDIT else ())


def test_ratios_are_of_the_same_seed_and_of_the_mean_of_the_last_losses():
    found = by_policy(
        [
            outcome(EDIT, 2, (9.0, 4.0, 4.0, 4.0)),
            outcome(EDIT, 1, (9.0, 1.0, 2.0, 3.0)),
            outcome(PLAIN, 1, (9.0, 2.0, 2.0, 2.0)),
            outcome(PLAIN, 2, (9.0, 8.0, 8.0, 8.0)),
        ],
        "digits",
    )
    assert ratios(found, (EDIT, False), (PLAIN, False)) == [1.0, 0.5]


def test_the_peak_is_that_since_the_garbage_began():
    count = SCALE.evaluations
    before, after = SCALE.garbage[0] // 32, count - SCALE.garbage[0] // 32
    clean = outcome(EDIT, 1, (1.0,) * count)
    struck = outcome(EDIT, 1, (7.0,) * before + (3.0,) + (1.0,) * (after - 1), garbage=True)
    assert worst(by_policy([clean, struck], "digits"), EDIT) == [3.0]


def test_the_best_rate_is_that_of_the_least_loss_with_as_many_replicas():
    """Plain's grows with the replicas, EDiT's does not."""
    best = {PLAIN: {2: 0.25, 4: 0.5, 8: 1.0}, EDIT: dict.fromkeys(REPLICAS, 0.5)}
    made = [
        QualityOutcome(run, ((1, 1.0 if run.rate == best[run.policy.split()[0]][run.worlds[0]] else 2.0),), 2)
        for run in swept("digits", 1, SCALE)
    ]
    values = part_figures(by_policy(made, "digits"))
    assert (
        values["plain_best_rate_x"] == 4.0 and values["edit_best_rate_x"] == 1.0 and values["plain_best_rate_4"] == 0.5
    )


def test_losses_of_the_other_parts_are_over_those_of_plain():
    made = [
        QualityOutcome(run, ((1, 1.8 if run.policy.startswith(EDIT) else 2.0),), 2)
        for run in (*elastic("text", 1, SCALE), *longer("text", 1, SCALE))
    ]
    values = part_figures(by_policy(made, "text"))
    assert values == dict.fromkeys(("growing_x", "shrinking_x", "longer_edit_low_rate_loss_x"), pytest.approx(0.9))
    assert {one.run.rate for one in made if len(one.run.worlds) > 1} == {LOW_RATE}


@pytest.mark.parametrize("scale", FULL.values())
def test_replicas_are_equal_when_their_number_changes(scale):
    for run in elastic("text", 1, scale):
        assert len(run.bounds) == 4 and (run.bounds[0], run.bounds[-1]) == (0, scale.iterations)
        assert all(bound % scale.tau == 0 for bound in run.bounds)


def test_replicas_go_on_from_the_model_of_fewer_or_more(tmp_path):
    """So its last third begins where its second ended, not where a new model would."""
    learners.prepare(("text",))
    grown = next(run for run in elastic("text", 1, SMOKE) if run.policy == f"{EDIT} growing")
    found = train_quality(grown, tmp_path / "run", seconds=500)
    assert [one.name for one in sorted((tmp_path / "run").iterdir()) if one.is_dir()] == ["20", "40", "60"]
    losses = [loss for _, loss in found.losses]
    assert [at for at, _ in found.losses] == [12, 24, 36, 48, 60] and losses[-1] < losses[0] - 0.05
    assert [one.iteration for one in found.synchronisations][-1] == 60 and from_line(to_line(found)) == found


def test_what_was_left_out_is_a_share_of_modules_of_replicas():
    one = outcome(EDIT, 1, (1.0,), garbage=True, left_out={"0": [GARBAGE_RANK], "1": [GARBAGE_RANK, 3]})
    assert one.left_out_of_garbage == 1.0
    assert one.left_out(range(4)) == 3 / (2 * 2 * 4)
    assert outcome(PLAIN, 1, (1.0,)).left_out(range(4)) == 0.0
    assert from_line(to_line(one)) == one


@pytest.mark.parametrize(
    ("edit", "edit_garbage", "diloco_garbage", "holds"),
    [
        (1.009, 1.019, 1.021, (True, True)),
        (1.011, 1.019, 1.021, (False, True)),
        (1.0, 1.021, 1.5, (True, False)),
        (1.0, 1.0, 1.019, (True, False)),
        (0.9, 0.95, math.inf, (True, True)),
    ],
)
def test_the_claims_follow_from_medians(edit, edit_garbage, diloco_garbage, holds):
    made = []
    for seed, other in ((1, 1.0), (2, 0.01), (3, 100.0)):  # whose median is that of seed 1
        final = {PLAIN: 2.0, EDIT: 2.0 * edit * other}
        for policy in POLICIES:
            made.append(outcome(policy, seed, (final.get(policy, 2.0),) * SCALE.evaluations))
        for policy, ratio in (("post_local_sgd", 1.0), ("diloco", diloco_garbage), (EDIT, edit_garbage)):
            loss = final.get(policy, 2.0) * (ratio if seed == 1 else other * ratio)
            made.append(outcome(policy, seed, (loss,) * SCALE.evaluations, garbage=True))
    values = learner_figures(by_policy(made, "digits"))
    assert values["edit_loss_x"] == pytest.approx(edit)
    assert (values["edit_holds"], values["garbage_holds"]) == holds
    quick = {key: by_seed for key, by_seed in by_policy(made, "digits").items() if key in QUICK_RUNS}
    assert learner_figures(quick)["edit_garbage_x"] == values["edit_garbage_x"], "of fewer runs the same"
