"""What local SGD does to the loss: the quick form of the benchmark on real ranks, and how figures follow from runs."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

import local_sgd_quality
from ft_plugins.config import SyncConfig
from local_sgd_quality import learner_figures
from workloads.quality_runs import (
    EDIT,
    EDIT_LOW,
    FULL,
    GARBAGE_RANK,
    PLAIN,
    POLICIES,
    QUICK,
    STRUCK,
    QualityOutcome,
    QualityScale,
    SynchronisationRecord,
    by_policy,
    ratios,
    run_of,
    runs,
    worst,
)
from workloads.quality_training import from_line, to_line

SCALE = FULL["noisy_digits"]
RATIOS = {f"{policy}_loss_x" for policy in POLICIES if policy != PLAIN}
RATIOS |= {f"{policy}_garbage{peak}_x" for policy in STRUCK for peak in ("", "_peak")}
SHARES = {"garbage_left_out", "sound_left_out"}
CLAIMS = {"edit_holds", "garbage_holds"}


@pytest.mark.all_configurations
def test_the_quick_form_trains_every_policy_and_edit_leaves_the_replica_with_garbage_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["local_sgd_quality.py", "--quick", "--learners", "text", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    local_sgd_quality.main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    names = RATIOS | SHARES | CLAIMS | {"plain_loss", "seed_spread"}
    assert figures.keys() == {f"text_{name}" for name in names} | {"holds"}
    assert all(math.isfinite(value) for value in figures.values())
    assert figures["text_garbage_left_out"] > 0.5 > figures["text_sound_left_out"]
    lines = (tmp_path / "quality.jsonl").read_text()
    assert len(lines.splitlines()) == len(POLICIES) + len(STRUCK)
    done = by_policy([from_line(line) for line in lines.splitlines()], "text")
    clean, struck = done[EDIT, False][1], done[EDIT, True][1]
    first, last = QUICK.garbage
    in_stretch = [one for one in struck.synchronisations if first <= one.iteration <= last]
    assert [one.iteration for one in in_stretch] == [*range(first + QUICK.tau - 1, last + 1, QUICK.tau)]
    assert all(any(GARBAGE_RANK in ranks for ranks in one.left_out.values()) for one in in_stretch)
    before = [one for one in clean.synchronisations if one.iteration < first]
    assert before == [one for one in struck.synchronisations if one.iteration < first], "the same until the garbage"
    losses = {policy: dict(done[policy, False][1].losses) for policy in POLICIES}
    in_warmup = [at for at in losses[PLAIN] if at <= QUICK.warmup]
    same = [policy for policy in POLICIES if policy != EDIT_LOW]  # whose rate is another one
    assert in_warmup and all(losses[policy][at] == losses[PLAIN][at] for policy in same for at in in_warmup)
    assert len({losses[policy][QUICK.iterations] for policy in POLICIES}) == len(POLICIES)

    local_sgd_quality.main()  # everything is in the folder already
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["figures"] == figures
    assert (tmp_path / "quality.jsonl").read_text() == lines
    assert (tmp_path / "quality_text.png").stat().st_size


@pytest.mark.parametrize("scale", [*FULL.values(), QUICK])
def test_losses_are_taken_right_after_synchronisations_and_garbage_comes_when_replicas_are_judged(
    scale: QualityScale,
) -> None:
    every = scale.iterations // scale.evaluations
    assert every % scale.tau == 0 and every * scale.evaluations == scale.iterations
    first, last = scale.garbage
    assert (first - 1) % scale.tau == 0 == last % scale.tau and last < scale.iterations
    assert (first - scale.warmup) // scale.tau > SyncConfig().penalty_warmup


def test_the_runs_of_a_seed_differ_in_nothing_but_policy_and_garbage() -> None:
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


def outcome(
    policy: str,
    seed: int,
    losses: tuple[float, ...],
    garbage: bool = False,
    left_out: dict[str, list[int]] | None = None,
) -> QualityOutcome:
    run = run_of("digits", seed, policy, SCALE, garbage)
    points = tuple((32 * number, loss) for number, loss in enumerate(losses, 1))
    records = (
        SynchronisationRecord(SCALE.garbage[0] + SCALE.tau - 1, left_out or {}, [], {"0": 0.5}),
        SynchronisationRecord(SCALE.iterations, {}, ["1"], {}),
    )
    return QualityOutcome(run, points, 2, records if policy == EDIT else ())


def test_ratios_are_of_the_same_seed_and_of_the_mean_of_the_last_losses() -> None:
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


def test_the_peak_is_that_since_the_garbage_began() -> None:
    count = SCALE.evaluations
    before, after = SCALE.garbage[0] // 32, count - SCALE.garbage[0] // 32
    clean = outcome(EDIT, 1, (1.0,) * count)
    struck = outcome(EDIT, 1, (7.0,) * before + (3.0,) + (1.0,) * (after - 1), garbage=True)
    assert worst(by_policy([clean, struck], "digits"), EDIT) == [3.0]


def test_what_was_left_out_is_a_share_of_modules_of_replicas() -> None:
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
def test_the_claims_follow_from_medians(
    edit: float, edit_garbage: float, diloco_garbage: float, holds: tuple[bool, bool]
) -> None:
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
