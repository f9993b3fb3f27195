"""Policies of local SGD: when replicas are synchronised, what is averaged, and when the result is applied. Pure.

    post_local_sgd   the mean of the parameters every tau iterations                     (Lin et al., 2019)
    diloco           the same mean, through an outer optimizer                           (Douillard et al., 2023)
    edit             the mean of what passes the penalty, through an outer optimizer     (EDiT, Algorithms 1 and 2)
    a_edit           edit, but after a time instead of tau iterations                    (EDiT, section 3.3; own_pace)
    dreamddp         as post_local_sgd; in the iterations between, the mean of some layers  (DreamDDP; layers_job)

Iterations up to `warmup` are ordinary data parallelism. Later ones are local, and replicas are synchronised after the
update of every multiple of tau: the first local period may be shorter. So synchronisations are at the multiples at
which snapshots are taken.

Invariant: a policy gives the same answers on all ranks, because it uses the iteration alone. It does not say when
replicas are synchronised by the clock.

In: the configuration. Out: answers for an iteration."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from ...config import SyncConfig
from ...errors import ConfigError
from ...model.reduction import ReducedOver
from .outer import OuterRules
from .penalty import PenaltyRules


class AppliedAt(str, Enum):
    """When a synchronisation that began after an update ends."""

    WAIT = "wait"  # at once, while training waits
    FORWARD = "forward"  # just before the next forward of each module
    UPDATE = "update"  # before the next update, whose gradients were computed with unsynchronised parameters


@dataclass(frozen=True)
class LocalSgdPolicy:
    """`penalty` is None if replicas are not judged. `seconds`: time between synchronisations by the clock, else None.
    `weights`: whether a replica counts by what it has trained on (a_edit). `layered`: whether some layers are averaged
    in iterations between synchronisations (dreamddp). Raises ConfigError."""

    name: str
    tau: int
    warmup: int
    apply: AppliedAt
    outer: OuterRules
    penalty: PenaltyRules | None = None
    seconds: float | None = None
    weights: Literal["uniform", "tokens"] = "uniform"
    layered: bool = False

    def __post_init__(self) -> None:
        if self.tau < 1 or self.warmup < 0:
            raise ConfigError(
                f"local SGD with tau {self.tau} and {self.warmup} iterations of warm-up: expected at least 1 and 0"
            )

    def reduced_over(self, step: int) -> ReducedOver:
        """Over which replicas gradients of iteration `step` are averaged."""
        return ReducedOver.ALL if step <= self.warmup else ReducedOver.LOCAL

    def due(self, step: int) -> bool:
        """Whether replicas are synchronised after the update of iteration `step`; never if by the clock."""
        return self.seconds is None and step > self.warmup and step % self.tau == 0

    def require_synchronisation(self, last: int) -> None:
        """Raises ConfigError if training ends at iteration `last` before its first synchronisation."""
        always = self.seconds is not None or self.layered
        if always and last <= self.warmup:
            raise ConfigError(
                f"--sync-warmup {self.warmup}: training ends at iteration {last}, before the first synchronisation; "
                "shorten the warm-up, or drop --sync"
            )
        if not always and not self.due(last - last % self.tau):
            raise ConfigError(
                f"--sync-warmup {self.warmup} with --sync-tau {self.tau}: training ends at iteration {last}, before "
                "the first synchronisation; shorten one of the two, or drop --sync"
            )

    def end_warning(self, last: int) -> str:
        """What a script that saves at its end has to know if training ends at iteration `last`; '' if nothing. By the
        clock training ends with a synchronisation."""
        if self.seconds is not None:
            return ""
        past = last % self.tau
        if past:
            return (
                f"local SGD: training ends at iteration {last}, {past} after its last synchronisation: replicas end "
                "with different parameters, and what the script saves at its end has those of one; to end with equal "
                f"ones, train to a multiple of --sync-tau {self.tau}: {last - past} or {last - past + self.tau}"
            )
        if self.apply is AppliedAt.WAIT:
            return ""
        return (
            f"local SGD: with --sync-apply {self.apply.value} a checkpoint that the script writes right after the last "
            f"iteration, {last}, has the parameters before its synchronisation; if it writes one, choose --sync-apply "
            "wait"
        )

    def anchors(self, step: int) -> bool:
        """Whether the parameters after iteration `step` are the first ones that replicas start from together."""
        return step == self.warmup

    def in_flight(self, step: int) -> bool:
        """Whether the version of iteration `step` is taken before its synchronisation is applied."""
        return self.due(step) and self.apply is AppliedAt.UPDATE

    def identical(self, step: int) -> bool:
        """Whether replicas have equal parameters at the version point of iteration `step`."""
        return step <= self.warmup or (self.due(step) and not self.in_flight(step))

    def waits_for_all(self, step: int, every: bool) -> bool:
        """Whether all replicas wait for each other before the update of iteration `step`. `every`: versions are also
        taken between synchronisations.

        A version may be captured after that update only when every rank has passed the fence before it. A reduction of
        gradients over all replicas ensures that, and so does a synchronisation that ends before the version point.
        """
        return self.reduced_over(step) is ReducedOver.LOCAL and (every or self.in_flight(step))

    @property
    def anchored(self) -> bool:
        """Whether the parameters of the last synchronisation are kept."""
        return not self.layered


_OUTER = {  # learning rate and momentum
    "diloco": (0.7, 0.9), "edit": (0.8, 0.85), "a_edit": (0.8, 0.85), "post_local_sgd": (1.0, 0.0),
    "dreamddp": (1.0, 0.0),
}  # fmt: skip


def policy_of(config: SyncConfig, apply: AppliedAt) -> LocalSgdPolicy:
    """The configured policy. Raises ConfigError."""
    rate, momentum = _OUTER[config.policy]
    outer = OuterRules(
        lr=rate if config.outer_lr is None else config.outer_lr,
        momentum=momentum if config.outer_momentum is None else config.outer_momentum,
    )
    penalty = None
    if config.penalizes:
        penalty = PenaltyRules(config.alpha, config.threshold, config.penalty_warmup, config.clip, config.weighting)
    return LocalSgdPolicy(
        config.policy, config.tau, config.warmup, apply, outer, penalty, config.period, config.weights or "uniform",
        config.is_layered,
    )  # fmt: skip


def wants_modules(config: SyncConfig, has_masters: bool) -> bool:
    """Whether the host has to announce the forward of each module, if it can."""
    return config.apply == "forward" or (config.apply == "auto" and config.is_edit and not has_masters)


def chosen_apply(config: SyncConfig, follows_modules: bool, has_masters: bool, reason: str = "") -> AppliedAt:
    """When synchronisations end. `follows_modules`: whether the host announces the forward of each module, and the
    `reason` if it does not; `has_masters`: whether the optimizer updates copies that forward and backward do not read.

    Raises ConfigError for a choice that is impossible here."""
    if config.apply == "forward" and not follows_modules:
        raise ConfigError(
            f"--sync-apply forward: {reason or 'forwards cannot be followed here'}; choose update or wait"
        )
    if config.apply != "auto":
        return AppliedAt(config.apply)
    chosen = _chosen_by_auto(config, follows_modules, has_masters)
    if chosen is not AppliedAt.FORWARD and "prefetch" in config.model_fields_set:
        reason = "optimizers hold fp32 master parameters" if has_masters else reason
        raise ConfigError(
            f"--sync-prefetch: has no effect with apply {chosen.value}, which auto chooses here "
            f"({reason or 'forwards cannot be followed'}); drop it"
        )
    return chosen


def _chosen_by_auto(config: SyncConfig, follows_modules: bool, has_masters: bool) -> AppliedAt:
    if not config.is_edit:
        return AppliedAt.WAIT
    if has_masters:
        return AppliedAt.UPDATE if config.period is None else AppliedAt.WAIT
    return AppliedAt.FORWARD if follows_modules else AppliedAt.WAIT
