"""When replicas train on their own, when they are synchronised, and when that is applied."""

import re
from dataclasses import replace

import pytest

from ft_plugins.config import Config, SyncConfig
from ft_plugins.errors import ConfigError
from ft_plugins.model.reduction import ReducedOver
from ft_plugins.sync.rounds.local_policy import AppliedAt, chosen_apply, policy_of, wants_modules


def test_a_warm_up_is_data_parallelism_and_every_multiple_of_tau_after_it_a_synchronisation():
    policy = policy_of(SyncConfig(tau=4, warmup=6), AppliedAt.WAIT)
    over = [policy.reduced_over(step) for step in range(1, 10)]
    assert over == [ReducedOver.ALL] * 6 + [ReducedOver.LOCAL] * 3
    assert [step for step in range(1, 21) if policy.due(step)] == [8, 12, 16, 20]
    assert [step for step in range(21) if policy.anchors(step)] == [6]
    assert [step for step in range(1, 14) if policy.identical(step)] == [*range(1, 7), 8, 12]


def test_a_synchronisation_that_is_applied_at_the_next_update_is_in_flight_in_its_version():
    policy = policy_of(SyncConfig(tau=4), AppliedAt.UPDATE)
    assert [step for step in range(1, 10) if policy.in_flight(step)] == [4, 8]
    assert not any(policy.identical(step) for step in range(1, 10))


@pytest.mark.parametrize(
    ("policy", "masters", "follows", "chosen"),
    [
        ("edit", True, False, AppliedAt.UPDATE),
        ("edit", False, True, AppliedAt.FORWARD),
        ("edit", False, False, AppliedAt.WAIT),
        ("diloco", True, False, AppliedAt.WAIT),
        ("post_local_sgd", False, True, AppliedAt.WAIT),
    ],
)
def test_what_auto_chooses(policy, masters, follows, chosen):
    assert chosen_apply(SyncConfig.model_validate({"policy": policy}), follows, masters) is chosen


@pytest.mark.parametrize(
    ("masters", "said"),
    [(True, "apply update, .*fp32 master parameters"), (False, "apply wait, .*forwards cannot be followed")],
)
def test_prefetch_is_refused_where_auto_does_not_choose_forward(masters, said):
    given = SyncConfig(prefetch=True)
    with pytest.raises(ConfigError, match=f"--sync-prefetch: has no effect with {said}") as refused:
        chosen_apply(given, follows_modules=False, has_masters=masters)
    assert "\n" not in str(refused.value)
    assert chosen_apply(given, follows_modules=True, has_masters=False) is AppliedAt.FORWARD


def test_replicas_wait_for_each_other_where_no_reduction_makes_them():
    """Also in the first local iteration: the version after it may replace one that another rank still needs."""
    wait, update = (policy_of(SyncConfig(tau=4, warmup=2), apply) for apply in (AppliedAt.WAIT, AppliedAt.UPDATE))
    assert [step for step in range(1, 9) if wait.waits_for_all(step, every=True)] == [3, 4, 5, 6, 7, 8]
    assert not any(wait.waits_for_all(step, every=False) for step in range(1, 9))
    assert [step for step in range(1, 9) if update.waits_for_all(step, every=False)] == [4, 8]


def test_forward_is_refused_where_modules_cannot_be_followed():
    for masters in (True, False):
        with pytest.raises(ConfigError, match="--sync-apply forward: it has no modules; choose update or wait"):
            chosen_apply(SyncConfig(apply="forward"), False, has_masters=masters, reason="it has no modules")
    assert chosen_apply(SyncConfig(apply="update"), follows_modules=True, has_masters=False) is AppliedAt.UPDATE


@pytest.mark.parametrize(
    ("policy", "apply", "wanted"),
    [
        *(("edit", apply, wanted) for apply, wanted in (("auto", True), ("forward", True), ("update", False))),
        *(("diloco", apply, wanted) for apply, wanted in (("auto", False), ("forward", True), ("wait", False))),
    ],
)
def test_modules_are_announced_where_their_forward_ends_a_synchronisation(policy, apply, wanted):
    config = SyncConfig.model_validate({"policy": policy, "apply": apply})
    assert wants_modules(config, has_masters=False) is wanted
    assert wants_modules(config, has_masters=True) is (apply == "forward"), "auto chooses update with masters"


def test_each_policy_has_the_outer_optimizer_and_the_penalty_of_its_paper():
    plain, diloco, edit = (
        policy_of(SyncConfig.model_validate({"policy": name}), AppliedAt.WAIT)
        for name in ("post_local_sgd", "diloco", "edit")
    )
    assert plain.outer.takes_target and plain.penalty is None
    assert (diloco.outer.lr, diloco.outer.momentum, diloco.penalty) == (0.7, 0.9, None)
    assert (edit.outer.lr, edit.outer.momentum) == (0.8, 0.85) and edit.penalty is not None
    assert (edit.penalty.alpha, edit.penalty.threshold, edit.penalty.clip) == (0.02, 3.0, 10.0)
    assert edit.penalty.weighting
    unweighted = policy_of(SyncConfig(policy="edit", weighting=False), AppliedAt.WAIT).penalty
    assert unweighted is not None and not unweighted.weighting and unweighted.threshold == 3.0
    assert policy_of(SyncConfig(penalty=False, outer_lr=1.0, outer_momentum=0.0), AppliedAt.WAIT).outer.takes_target


def test_snapshots_are_taken_at_synchronisations_unless_all_are_asked_for():
    def interval(given, **more):
        capture = Config.from_json({"sync": {"tau": 8}, "reft": {"interval": given, **more}}).capture
        assert capture is not None
        return capture.interval

    assert [interval(given) for given in (1, 8, 9, 20)] == [8, 8, 16, 24]
    assert interval(3, versions="every") == 3


def test_a_replica_counts_by_its_tokens_only_where_that_is_asked_for():
    given = ({}, {"weights": "uniform"}, {"weights": "tokens"})
    policies = [{"policy": "a_edit"} | one for one in given]
    weights = [policy_of(SyncConfig.model_validate(one), AppliedAt.WAIT).weights for one in policies]
    assert weights == ["uniform", "uniform", "tokens"]


@pytest.mark.parametrize("tau, warmup", [(0, 0), (1, -1)])
def test_a_period_or_warm_up_that_cannot_be_is_an_error(tau, warmup):
    with pytest.raises(ConfigError, match=f"local SGD with tau {tau} and {warmup} iterations"):
        replace(policy_of(SyncConfig(), AppliedAt.WAIT), tau=tau, warmup=warmup)


@pytest.mark.parametrize("settings", [{"seconds": 2.0}, {"layered": True}])
def test_where_every_iteration_may_synchronise_a_warm_up_alone_can_be_too_long(settings):
    policy = replace(policy_of(SyncConfig(tau=8, warmup=20), AppliedAt.WAIT), **settings)
    policy.require_synchronisation(21)
    with pytest.raises(ConfigError, match="--sync-warmup 20: training ends at iteration 20, before"):
        policy.require_synchronisation(20)


def test_a_run_that_ends_before_its_first_synchronisation_is_refused_in_one_line():
    policy = policy_of(SyncConfig(tau=8, warmup=20), AppliedAt.WAIT)
    policy.require_synchronisation(24)
    for last in (7, 20, 23):
        with pytest.raises(ConfigError, match=f"ends at iteration {last}, before the first synchronisation"):
            policy.require_synchronisation(last)


@pytest.mark.parametrize(
    ("apply", "last", "wanted"),
    [
        (AppliedAt.WAIT, 24, ""),
        (AppliedAt.WAIT, 27, "ends at iteration 27, 3 after .* --sync-tau 8: 24 or 32"),
        (AppliedAt.UPDATE, 27, "24 or 32"),
        (AppliedAt.UPDATE, 24, "--sync-apply update .* iteration, 24, .* before its synchronisation.* choose .*wait"),
        (AppliedAt.FORWARD, 24, "--sync-apply forward"),
    ],
)
def test_a_run_whose_end_is_not_synchronised_is_warned_of_in_one_line(apply, last, wanted):
    warning = policy_of(SyncConfig(tau=8), apply).end_warning(last)
    assert "\n" not in warning and bool(warning) == bool(wanted) and re.search(wanted, warning)


def test_by_the_clock_training_ends_with_a_synchronisation():
    assert policy_of(SyncConfig(policy="a_edit"), AppliedAt.FORWARD).end_warning(27) == ""
