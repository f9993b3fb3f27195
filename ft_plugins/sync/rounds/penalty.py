"""Exclude anomalous pseudo-gradients and weight the others by their norms: EDiT's penalty (Algorithm 2). Pure.

The pseudo-gradient of a module (embedding, a layer, head) is its change since the last synchronisation, Delta_i =
theta_i - anchor for member i of a sync group. G_i is its norm over the whole module, all shards included.

    anomalous    z_i = (G_i - mean_i) / deviation_i > threshold, against the member's own statistics, once these have
                 `warmup` norms; a norm that is NaN or infinite always
    weights      w_i = exp(-G_i) / sum_j exp(-G_j) over the other members; 0 for anomalous ones      (Eq. 2)
    rollback     every member present is anomalous: the module returns to the anchor
    clip         the averaged pseudo-gradient is multiplied by min(phi / (norm + epsilon), 1)         (Eq. 4)

Invariant: from the same gathered norms every rank derives the same bits, and reordering the members reorders the result
and changes nothing else, because sums are exact before they are rounded. The smallest norm is subtracted before the
exponential, so large norms cannot underflow to a rollback. Weights sum to 1, up to rounding, unless it is a rollback.
Only weights depend on the C library (exp).

Where the paper is silent:
- The first norm is the mean, with deviation 0; the warm-up counts norms, so a member that joins later has its own.
- A deviation of 0, or below the resolution of fp32, means that no spread is known: no norm is anomalous, and the
  statistics learn the spread from the next norm that differs.
- Statistics skip the norm of an anomalous member, as in the paper, but in a rollback they take finite norms. Otherwise
  a lasting change of scale (learning rate, unfrozen module) would be rolled back at every synchronisation from then on.
- An absent member has weight 0, keeps its statistics and does not prevent a rollback; if all are absent, it is one.

In: norms by member, `NormStatistics` by member. Out: `Judgement`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...errors import ConfigError

RESOLUTION = 2.0**-23  # of fp32, relative: a smaller deviation is rounding
EPSILON = 1e-6  # Eq. 4, as in torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True)
class PenaltyRules:
    """How pseudo-gradients are judged. An infinite `threshold` finds no finite norm anomalous; without `weighting` all
    have the same weight; an infinite `clip` clips nothing. Raises ConfigError for a value out of range.

    `alpha`: share of the newest norm in the statistics; `warmup`: norms of a member, one per synchronisation, before it
    is judged. Defaults are those of `SyncConfig` alone.
    """

    alpha: float
    threshold: float
    warmup: int
    clip: float
    weighting: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 1:
            raise ConfigError(f"alpha of the penalty is {self.alpha}: expected a number between 0 and 1")
        if not self.threshold > 0:
            raise ConfigError(f"the threshold of the penalty is {self.threshold}: expected more than 0 (inf: no test)")
        if self.warmup < 0:
            raise ConfigError(f"the penalty has a warm-up of {self.warmup} synchronisations: expected at least 0")
        if not self.clip > 0:
            raise ConfigError(f"pseudo-gradients are clipped to {self.clip}: expected more than 0 (inf: no clip)")


NO_PENALTY = PenaltyRules(  # the mean of finite pseudo-gradients
    alpha=0.5, threshold=math.inf, warmup=0, clip=math.inf, weighting=False
)


@dataclass(frozen=True)
class NormStatistics:
    """Moving average of one member's norms of one module, with the deviation of Eq. 1. `count`: norms so far."""

    mean: float = 0.0
    deviation: float = 0.0
    count: int = 0

    def score(self, norm: float) -> float:
        """z of a norm; 0 as long as no spread is known."""
        if self.deviation <= RESOLUTION * self.mean:
            return 0.0
        return (norm - self.mean) / self.deviation

    def after(self, norm: float, alpha: float) -> NormStatistics:
        """The statistics with one more finite norm."""
        if self.count == 0:
            return NormStatistics(norm, 0.0, 1)
        mean = self.mean + alpha * (norm - self.mean)  # alpha G + (1 - alpha) mean, but exact for G = mean
        # sqrt((1 - alpha) deviation^2 + alpha (G - mean)^2), but squares no large norm
        deviation = math.hypot(math.sqrt(1 - alpha) * self.deviation, math.sqrt(alpha) * (norm - mean))
        return NormStatistics(mean, deviation, self.count + 1)

    def values(self) -> list[float]:
        return [self.mean, self.deviation, float(self.count)]

    @classmethod
    def from_values(cls, values: Sequence[float]) -> NormStatistics:
        mean, deviation, count = values
        return cls(float(mean), float(deviation), int(count))


@dataclass(frozen=True)
class Judgement:
    """What becomes of one module at one synchronisation; tuples are by member. `nonfinite` ones are anomalous too.

    In a `rollback` all weights are 0: the module returns to the anchor, and the outer optimizer does not step.
    """

    anomalous: tuple[bool, ...]
    weights: tuple[float, ...]
    rollback: bool
    statistics: tuple[NormStatistics, ...]
    nonfinite: tuple[bool, ...]

    @property
    def weights_are_equal(self) -> bool:
        """Whether all members with a weight have the same: then sum / count is the weighted mean, and exact to the last
        bit where multiplying by 1 / count would round."""
        return len({weight for weight in self.weights if weight > 0}) == 1


def judge(
    norms: Sequence[float | None], statistics: Sequence[NormStatistics], rules: PenaltyRules,
    weights_by: Sequence[float] | None = None,
) -> Judgement:  # fmt: skip
    """Judge one module. `norms`: G_i by member, None for one that is absent; `weights_by`: a further factor of each
    weight, such as the member's tokens. If it is 0 for all members that are not anomalous, it is ignored.

    Raises ValueError for lists of different lengths, and for a factor that is negative or not finite.
    """
    if len(statistics) != len(norms) or (weights_by is not None and len(weights_by) != len(norms)):
        factors = "no" if weights_by is None else str(len(weights_by))
        found = f"{len(norms)} norms, {len(statistics)} statistics and {factors} factors"
        raise ValueError(f"{found}: expected one of each for every member")
    present = {member: float(norm) for member, norm in enumerate(norms) if norm is not None}
    finite = {member: norm for member, norm in present.items() if 0 <= norm < math.inf}
    sound = {
        member: norm
        for member, norm in finite.items()
        if not (statistics[member].count >= rules.warmup and statistics[member].score(norm) > rules.threshold)
    }
    absorbed = sound or finite
    return Judgement(
        anomalous=tuple(member in present and member not in sound for member in range(len(norms))),
        weights=_weights(sound, len(norms), rules.weighting, weights_by),
        rollback=not sound,
        statistics=tuple(
            before.after(absorbed[member], rules.alpha) if member in absorbed else before
            for member, before in enumerate(statistics)
        ),
        nonfinite=tuple(member in present and member not in finite for member in range(len(norms))),
    )


def clip_factor(norm: float, clip: float) -> float:
    """The factor that limits an averaged pseudo-gradient of this norm to `clip` (Eq. 4); exactly 1 for an infinite
    `clip`, 0 for a norm that is not finite: then the caller rolls back, as 0 * inf is NaN."""
    if math.isinf(clip):
        return 1.0
    return min(1.0, clip / (norm + EPSILON)) if math.isfinite(norm) else 0.0


def _weights(
    sound: Mapping[int, float], members: int, weighting: bool, weights_by: Sequence[float] | None
) -> tuple[float, ...]:
    """Weights by member, from the norms of those that are not anomalous."""
    factors = {member: 1.0 if weights_by is None else float(weights_by[member]) for member in sound}
    for member, factor in factors.items():
        if not 0 <= factor < math.inf:
            raise ValueError(f"member {member} has the factor {factor}: expected a finite number of at least 0")
    factors = {member: factor for member, factor in factors.items() if factor > 0} or dict.fromkeys(sound, 1.0)
    least = min((sound[member] for member in factors), default=0.0)
    shares = {
        member: factor * (math.exp(least - sound[member]) if weighting else 1.0) for member, factor in factors.items()
    }
    total = math.fsum(shares.values())
    return tuple(shares[member] / total if member in shares else 0.0 for member in range(members))
