"""Define the runs that show what local SGD does to the loss, and derive the figures from them. Pure.

Settings, few and the same for all policies:

    tau           16 iterations, the smallest interval that EDiT's authors searched (their table 4)
    iterations    1280 or 640: 72 or 36 synchronisations after the warm-up. The paper has 700
    warm-up       10%, in which the learning rate rises too. EDiT's authors give no figure; DiLoCo's begin after 27%,
                  those of Post Local SGD after 50%: less is harder
    inner rate    for all policies the best one of plain training, of 3 or 4 that differ by factors of 2 (`learners`): a
                  rate too low for plain training would flatter policies whose outer optimizer takes longer steps
    the rest      the defaults of `--sync-policy`
    garbage       for 10% of the iterations, from 60% on, one rank trains on random bytes, or on images that are not
                  scaled and have random labels

`edit_low_rate` is EDiT with a quarter of the inner rate. EDiT's authors searched the rate of each method, and trained
with half of the baseline's: the outer optimizer goes lr / (1 - momentum) = 5.3 times as far as replicas agree.

`edit_without_...` leave out a part of the penalty, or all of it, as the paper's ablation does (figure 7a).

`swept` (figures 6a and b): plain and EDiT with 2, 4 and 8 replicas, each with the inner rate and multiples of it.
`elastic` (6c): with 2, then 4, then 8 replicas, and the other way round, a third of the iterations each, at the low
rate, constant. A loop like this cannot be resized: each time the model and replica 0's optimizer are handed on, and
EDiT starts from them as a new job would, as in the paper.
`longer`: plain and `edit_low_rate`, `LONGER` times as many iterations.

The loss of a run is that of all held-out examples, measured right after a synchronisation, when replicas are equal; its
final loss is the mean of the last 3 evaluations, at most the last 10% of the iterations.

Invariant: runs of one learner and seed start from the same model and read the same data in the same order.

In: learner, seed. Out: `QualityRun`s; from `QualityOutcome`s ratios, paired by seed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

RANKS = 4
GARBAGE_RANK = 1
PLAIN, POST, DILOCO, EDIT, EDIT_LOW = "plain", "post_local_sgd", "diloco", "edit", "edit_low_rate"
_NEVER = 1e9  # the largest that the options take
POLICIES: Mapping[str, Mapping[str, Any]] = {
    PLAIN: {},
    POST: {"policy": "post_local_sgd"},
    DILOCO: {"policy": "diloco"},
    EDIT: {"policy": "edit"},
    EDIT_LOW: {"policy": "edit"},
    # without a part of the penalty: no norm is that far from the mean, no change is that large
    "edit_without_elimination": {"policy": "edit", "threshold": _NEVER},
    "edit_without_weighting": {"policy": "edit", "weighting": False},
    "edit_without_clipping": {"policy": "edit", "clip": _NEVER},
    "edit_without_all": {"policy": "edit", "threshold": _NEVER, "weighting": False, "clip": _NEVER},
}
ABLATED = tuple(POLICIES)[-4:]
LOW_RATE = 0.25  # of the inner rate of the others
REPLICAS, RATES = (2, 4, 8), (0.125, 0.25, 0.5, 1.0, 2.0)  # of a sweep
LONGER = 4
STRUCK = (POST, DILOCO, EDIT, *ABLATED)  # policies that also have a run with garbage
WARM_UP, GARBAGE_FROM, GARBAGE_FOR = 0.1, 0.6, 0.1  # shares of the iterations
LAST = 3  # evaluations in the final loss


@dataclass(frozen=True)
class QualityScale:
    """How long a run is. `tau` divides `iterations` and the iterations between two evaluations."""

    iterations: int
    tau: int
    evaluations: int

    @property
    def warmup(self) -> int:
        return round(WARM_UP * self.iterations)

    @property
    def garbage(self) -> tuple[int, int]:
        """First and last iteration of the stretch: whole periods between synchronisations."""
        periods = self.iterations // self.tau
        first = round(GARBAGE_FROM * periods)
        return first * self.tau + 1, (first + max(1, round(GARBAGE_FOR * periods))) * self.tau


FULL = {"noisy_digits": QualityScale(1280, 16, 40), "text": QualityScale(640, 16, 20)}

SMOKE = QualityScale(60, 4, 5)


@dataclass(frozen=True)
class QualityRun:
    """One run. `sync`: the policy's JSON block, empty for plain data parallelism; `rate`: by which the learner's rate
    is multiplied; `garbage`: the first and the last iteration in which one rank trains on garbage; `averaged`: losses
    are those of the mean of the replicas, as these are never equal; the schedule follows from the sizes of layers.
    `worlds`: numbers of replicas, one after another for an equal part of the iterations; if several, at one rate."""

    learner: str
    seed: int
    policy: str
    scale: QualityScale
    sync: Mapping[str, Any]
    rate: float = 1.0
    garbage: tuple[int, int] | None = None
    averaged: bool = False
    worlds: tuple[int, ...] = (RANKS,)

    @property
    def bounds(self) -> list[int]:
        """The iterations after which the number of replicas changes, right after a synchronisation; and 0, and the
        last one."""
        periods, parts = self.scale.iterations // self.scale.tau, len(self.worlds)
        return [periods * number // parts * self.scale.tau for number in range(parts + 1)]

    def is_garbage(self, iteration: int, rank: int) -> bool:
        """Whether this rank's batch is garbage."""
        return self.garbage is not None and rank == GARBAGE_RANK and self.garbage[0] <= iteration <= self.garbage[1]

    def __str__(self) -> str:
        return f"{self.learner} seed {self.seed} {self.policy}{' garbage' if self.garbage else ''}"


def run_of(learner: str, seed: int, policy: str, scale: QualityScale, garbage: bool = False) -> QualityRun:
    """One run of a policy."""
    sync: dict[str, Any] = {**POLICIES[policy], "tau": scale.tau, "warmup": scale.warmup} if POLICIES[policy] else {}
    rate = LOW_RATE if policy == EDIT_LOW else 1.0
    return QualityRun(learner, seed, policy, scale, sync, rate, scale.garbage if garbage else None)


def runs(learner: str, seed: int, scale: QualityScale) -> list[QualityRun]:
    """All runs of a learner and seed."""
    clean = [run_of(learner, seed, policy, scale) for policy in POLICIES]
    return clean + [run_of(learner, seed, policy, scale, garbage=True) for policy in STRUCK]


def swept(
    learner: str, seed: int, scale: QualityScale, replicas: Sequence[int] = REPLICAS, rates: Sequence[float] = RATES
) -> list[QualityRun]:
    """The runs of a sweep of inner rates over numbers of replicas."""
    return [
        replace(
            run_of(learner, seed, policy, scale), policy=f"{policy} of {count} at {rate:g}", rate=rate, worlds=(count,)
        )
        for policy in (PLAIN, EDIT) for count in replicas for rate in rates
    ]  # fmt: skip


def elastic(learner: str, seed: int, scale: QualityScale) -> list[QualityRun]:
    """The runs whose number of replicas grows or shrinks."""
    return [
        replace(run_of(learner, seed, policy, scale), policy=f"{policy} {way}", rate=LOW_RATE, worlds=worlds)
        for policy in (PLAIN, EDIT) for way, worlds in (("growing", REPLICAS), ("shrinking", REPLICAS[::-1]))
    ]  # fmt: skip


def longer(learner: str, seed: int, scale: QualityScale) -> list[QualityRun]:
    """The runs with more synchronisations."""
    more = replace(scale, iterations=LONGER * scale.iterations)
    return [replace(run_of(learner, seed, policy, more), policy=f"{policy} longer") for policy in (PLAIN, EDIT_LOW)]


@dataclass(frozen=True)
class SynchronisationRecord:
    """What an event `replicas.synchronised` says. `left_out`: ranks by module; `modules`: how many there are."""

    iteration: int
    left_out: Mapping[str, Sequence[int]]
    rolled_back: Sequence[str]
    clipped: Mapping[str, float]


@dataclass(frozen=True)
class QualityOutcome:
    """The held-out losses of a run, by iteration, and its synchronisations; `modules`: what is judged apart.
    `divergences`: mean over replicas of the squared distance from their mean, by iteration, of `averaged` runs."""

    run: QualityRun
    losses: tuple[tuple[int, float], ...]
    modules: int
    synchronisations: tuple[SynchronisationRecord, ...] = field(repr=False, default=())
    divergences: tuple[tuple[int, float], ...] = field(repr=False, default=())

    @property
    def loss(self) -> float:
        """The final loss."""
        return statistics.fmean(loss for _, loss in self.losses[-LAST:])

    def left_out(self, ranks: Sequence[int], stretch: tuple[int, int] | None = None) -> float:
        """The share of the modules of `ranks` that the synchronisations of `stretch` left out; None: all of them."""
        first, last = stretch or (0, self.run.scale.iterations)
        chosen = [one for one in self.synchronisations if first <= one.iteration <= last]
        out = sum(rank in ranks for one in chosen for left in one.left_out.values() for rank in left)
        return out / (len(chosen) * self.modules * len(ranks)) if chosen else 0.0

    @property
    def left_out_of_garbage(self) -> float:
        """The share of the modules of the replica with garbage that were left out while it had garbage."""
        return self.left_out([GARBAGE_RANK], self.run.garbage)


Outcomes = Mapping[tuple[str, bool], Mapping[int, QualityOutcome]]  # by policy and garbage, then by seed


def by_policy(outcomes: Sequence[QualityOutcome], learner: str) -> dict[tuple[str, bool], dict[int, QualityOutcome]]:
    """The outcomes of a learner."""
    found: dict[tuple[str, bool], dict[int, QualityOutcome]] = {}
    for one in outcomes:
        if one.run.learner == learner:
            found.setdefault((one.run.policy, one.run.garbage is not None), {})[one.run.seed] = one
    return found


def ratios(outcomes: Outcomes, ours: tuple[str, bool], reference: tuple[str, bool]) -> list[float]:
    """Final loss over that of the reference with the same seed, by seed."""
    return [one.loss / outcomes[reference][seed].loss for seed, one in sorted(outcomes[ours].items())]


def best_rates(outcomes: Outcomes, policy: str) -> dict[int, float]:
    """Of a sweep: the rate with the lowest loss, the median over seeds, by number of replicas."""
    losses: dict[int, dict[float, float]] = {}
    for by_seed in outcomes.values():
        one = next(iter(by_seed.values())).run
        if one.policy.startswith(f"{policy} of "):
            loss = statistics.median(each.loss for each in by_seed.values())
            losses.setdefault(one.worlds[0], {})[one.rate] = loss
    return {count: min(by_rate, key=by_rate.__getitem__) for count, by_rate in losses.items()}


def worst(outcomes: Outcomes, policy: str) -> list[float]:
    """By seed: the largest ratio of the loss with garbage over that without, at any evaluation since its beginning."""
    found = []
    for seed, one in sorted(outcomes[policy, True].items()):
        clean = dict(outcomes[policy, False][seed].losses)
        assert one.run.garbage is not None
        found.append(max(loss / clean[at] for at, loss in one.losses if at >= one.run.garbage[0]))
    return found
