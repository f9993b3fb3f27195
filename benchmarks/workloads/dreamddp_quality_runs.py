"""Define the runs that show what DreamDDP does to the loss, next to local SGD with full synchronisation. Pure.

    H             5 iterations with both policies: DreamDDP's default. Learners have a module for each of them at least
    iterations    1200 or 600, of which the first 10% are a warm-up in which gradients are reduced over all replicas
    schedule      from a profile in which times follow from the sizes of modules (`quality_training.profile_by_size`)
    anchors       none: all modules are synchronised at once only at the end
    the rest      as in `quality_runs`; losses of both policies are those of the mean of the replicas

Invariant: runs of one learner and seed start from the same model and read the same data in the same order.

In: learner, seed. Out: `QualityRun`s; ratios, paired by seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workloads.quality_runs import PLAIN, QualityOutcome, QualityRun, QualityScale

H = 5
FULL_SYNC, DREAMDDP = "full", "dreamddp"
COMPARED = (PLAIN, FULL_SYNC, DREAMDDP)
LONG = {"deep_noisy_digits": QualityScale(1200, H, 40), "deep_text": QualityScale(600, H, 20)}
SMOKE = QualityScale(50, H, 5)
WITHIN = 0.01  # of a loss: as good

OutcomesBySeed = Mapping[str, Mapping[int, QualityOutcome]]  # by policy


def compared_run(learner: str, seed: int, policy: str, scale: QualityScale) -> QualityRun:
    """One run of a policy."""
    sync: dict[str, Any] = {
        PLAIN: {},
        FULL_SYNC: {"policy": "post_local_sgd", "tau": H, "warmup": scale.warmup},
        DREAMDDP: {"policy": "dreamddp", "h": H, "tau": scale.iterations, "warmup": scale.warmup},
    }[policy]
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


def quality_ratios(outcomes: OutcomesBySeed) -> list[float]:
    """By seed: iterations in which DreamDDP reaches the final loss of full synchronisation, plus 1%, over those in
    which the latter does."""
    found = []
    for seed, one in sorted(outcomes[DREAMDDP].items()):
        full = outcomes[FULL_SYNC][seed]
        target = (1 + WITHIN) * full.loss
        found.append(iterations_to(one, target) / iterations_to(full, target))
    return found
