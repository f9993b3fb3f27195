"""Define the runs that show what DreamDDP does to the loss, next to local SGD with full synchronisation. Pure.

    H             5 iterations with both policies: DreamDDP's default. Learners have a module for each of them at least.
                  `dreamddp_h2`, `dreamddp_h3`: shorter ones (the paper's are 5 and more, for models of 18 and more)
    iterations    1200 or 600, of which the first 10% are a warm-up in which gradients are reduced over all replicas
    schedule      from a profile in which times follow from the sizes of modules (`quality_training.profile_by_size`)
    anchors       none: all modules are synchronised at once only at the end
    the rest      as in `quality_runs`; losses of both policies are those of the mean of the replicas

Invariant: runs of one learner and seed start from the same model and read the same data in the same order.

In: learner, seed. Out: `QualityRun`s; ratios, paired by seed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workloads.quality_runs import PLAIN, QualityOutcome, QualityRun, QualityScale

H = 5
FULL_SYNC, DREAMDDP = "full", "dreamddp"
COMPARED = (PLAIN, FULL_SYNC, DREAMDDP)
LONG = {"deep_noisy_digits": QualityScale(1200, H, 40), "deep_text": QualityScale(600, H, 20)}
SMOKE = QualityScale(50, H, 5)
WITHIN = 0.01  # of a loss: as good
PERIODS = {f"{DREAMDDP}_h{h}": h for h in (2, 3)}  # policies with another H

OutcomesBySeed = Mapping[str, Mapping[int, QualityOutcome]]  # by policy


def compared_run(learner: str, seed: int, policy: str, scale: QualityScale) -> QualityRun:
    """One run of a policy."""
    sync: dict[str, Any] = {"policy": "dreamddp", "h": PERIODS.get(policy, H), "tau": scale.iterations}
    if policy == FULL_SYNC:
        sync = {"policy": "post_local_sgd", "tau": H}
    sync = sync | {"warmup": scale.warmup} if policy != PLAIN else {}
    return QualityRun(learner, seed, policy, scale, sync, averaged=policy != PLAIN)


def by_seed(outcomes: Sequence[QualityOutcome], learner: str) -> dict[str, dict[int, QualityOutcome]]:
    """The outcomes of a learner by policy and seed."""
    found: dict[str, dict[int, QualityOutcome]] = {}
    for one in outcomes:
        if one.run.learner == learner:
            found.setdefault(one.run.policy, {})[one.run.seed] = one
    return found


def loss_ratios(outcomes: OutcomesBySeed, policy: str, reference: str) -> list[float]:
    """Final loss over that of the reference with the same seed, by seed."""
    return [one.loss / outcomes[reference][seed].loss for seed, one in sorted(outcomes[policy].items())]


def iterations_to(outcome: QualityOutcome, loss: float) -> float:
    """The iteration at which a run reaches `loss`, between two evaluations by interpolation; infinite if never."""
    before: tuple[int, float] | None = None
    for at, value in outcome.losses:
        if value <= loss:
            if before is None:
                return float(at)
            start, higher = before
            return start + (at - start) * (higher - loss) / (higher - value)
        before = (at, value)
    return float("inf")


def divergence_ratios(outcomes: OutcomesBySeed, of: Callable[[QualityOutcome], float]) -> list[float]:
    """Divergence of DreamDDP over that of full synchronisation, by seed; as far as it was measured."""
    pairs = ((one, outcomes[FULL_SYNC][seed]) for seed, one in sorted(outcomes[DREAMDDP].items()))
    return [of(ours) / of(full) for ours, full in pairs if ours.divergences and full.divergences]


def mean_divergence(outcome: QualityOutcome) -> float:
    """Over all iterations."""
    return statistics.fmean(value for _, value in outcome.divergences)


def peak_divergence(outcome: QualityOutcome) -> float:
    """The mean of the iteration of a period in which it is largest."""
    by_place: dict[int, list[float]] = {}
    for iteration, value in outcome.divergences:
        by_place.setdefault(iteration % outcome.run.scale.tau, []).append(value)
    return max(map(statistics.fmean, by_place.values()))


def quality_ratios(outcomes: OutcomesBySeed) -> list[float]:
    """By seed: iterations in which DreamDDP reaches the final loss of full synchronisation, plus 1%, over those in
    which the latter does."""
    found = []
    for seed, one in sorted(outcomes[DREAMDDP].items()):
        full = outcomes[FULL_SYNC][seed]
        target = (1 + WITHIN) * full.loss
        found.append(iterations_to(one, target) / iterations_to(full, target))
    return found
