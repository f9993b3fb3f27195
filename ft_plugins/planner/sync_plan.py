"""`ft-plugins plan sync`: the time of an iteration under each policy on each link, and which policy pays
where. Pure.

    plain       data parallelism: in every iteration each layer's gradients are reduced once its backward ends (WFBP)
    DreamDDP    each layer averaged once in H iterations, in the one chosen by `layers_schedule`, after its backward
    spread      as DreamDDP, but sets of layers need not be contiguous (`spread_layers`)
    EDiT        all layers every H iterations, each before its next forward, while the one before runs (`forward`)
    full        local SGD: all layers every H iterations, while training waits (Eq. 4)
    ENP         as DreamDDP, but equal numbers of layers
    bound       no policy that averages every layer once in H iterations takes less: compute alone, or the link alone

All policies move the same bytes for a layer, over one link, one layer after another; H is the same for all, so they are
compared at equal intervals. What they do to convergence, and time beyond averaging (EDiT's norms), is left out.

A policy pays if its iteration takes at most PAYS more than the fastest one; of several the first in the order above:
plain changes nothing in what is computed, ENP is never better than DreamDDP.

Invariant: pure arithmetic on exact nanoseconds.

In: `LayerProfile`, links in megabits per second, H. Out: `SyncOutlook`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby, pairwise
from typing import Any

from ..errors import ConfigError
from ..sync.layers.layer_profile import NANO, LayerProfile
from ..sync.layers.layers_filling import fill, interval_in_effect
from ..sync.layers.layers_schedule import (
    TOLERANCE,
    LayerSchedule,
    choose_period,
    equal_number,
    exposed_ns,
    iteration_ns,
    period_ns,
    plan_layers,
    spread_layers,
    unavoidable_ns,
    unhidden_period_ns,
)
from .survival import columns

PAYS = 0.02
MEGABIT = 1e6 / 8  # bytes
MOST_LINKS = 64
DECADES = range(0, 8)  # of megabits per second, among which links are chosen if none is given
RATIOS = (0.1, 100)  # communication to compute, on links that are chosen
POINTS = 10  # links of a decade in a picture


class ComparedPolicy(Enum):
    """In order of preference where several are as fast."""

    PLAIN = "plain"
    DREAMDDP = "dreamddp"
    SPREAD = "spread"
    EDIT = "edit"
    FULL = "full"
    ENP = "enp"

    @property
    def title(self) -> str:
        """Its name in tables and pictures."""
        return {"dreamddp": "DreamDDP", "edit": "EDiT", "enp": "ENP"}.get(self.value, self.value)


@dataclass(frozen=True)
class SyncOnLink:
    """Seconds of an iteration on one link (`mbps` None: as profiled).

    `schedule`: DreamDDP's, without filling; `spread`: the same of sets that need not be contiguous. `in_effect`: mean
    interval between averagings under DreamDDP once idle link time is filled; None: not computed. `hides`: whether it
    exposes no more than each layer would alone, up to the tolerance of an automatic period."""

    mbps: float | None
    schedule: LayerSchedule
    spread: LayerSchedule
    seconds: dict[ComparedPolicy, float]
    bound: float
    in_effect: float | None
    hides: bool

    @property
    def fastest(self) -> float:
        """Seconds of an iteration under the fastest policy."""
        return min(self.seconds.values())

    @property
    def pays(self) -> ComparedPolicy:
        """The first policy that is as fast as the fastest."""
        return next(one for one in ComparedPolicy if self.seconds[one] <= self.fastest * (1 + PAYS))

    def row(self) -> tuple[str, ...]:
        """Its row of the table."""
        name = "as profiled" if self.mbps is None else rate(self.mbps)
        times = (f"{self.seconds[one]:.4g}" for one in ComparedPolicy)
        period = f"{self.schedule.period}{'' if self.hides else '+'}"
        in_effect = "" if self.in_effect is None else f"{self.in_effect:.3g}"
        return (name, period, *times, f"{self.bound:.4g}", in_effect, self.pays.title)

    def block(self) -> dict[str, Any]:
        """It as JSON."""
        return {
            "mbps": self.mbps,
            "h": self.schedule.period,
            "hides": self.hides,
            "seconds": {one.value: seconds for one, seconds in self.seconds.items()},
            "bound_seconds": self.bound,
            "interval_in_effect": self.in_effect,
            "pays": self.pays.value,
            "schedule": [list(own) for own in self.schedule.iterations],
            "spread": [list(own) for own in self.spread.iterations],
        }


@dataclass(frozen=True)
class SyncOutlook:
    """`links`: as profiled, then those that were asked for. `curve`: links close to each other, ascending; empty if the
    profile does not say how many bytes its layers have."""

    profile: LayerProfile
    links: tuple[SyncOnLink, ...]
    curve: tuple[SyncOnLink, ...]

    def ranges(self) -> list[tuple[ComparedPolicy, float, float]]:
        """Which policy pays from which to which bandwidth of the curve, ascending. A change is between two links."""
        runs = [(policy, list(run)) for policy, run in groupby(self.curve, key=lambda one: one.pays)]
        firsts = [float(run[0].mbps or 0) for _, run in runs]
        lasts = [float(run[-1].mbps or 0) for _, run in runs]
        changes = [math.sqrt(last * first) for last, first in zip(lasts, firsts[1:], strict=False)]
        edges = [*firsts[:1], *changes, *lasts[-1:]]
        return [(policy, low, high) for (policy, _), (low, high) in zip(runs, pairwise(edges), strict=True)]

    def table(self) -> str:
        """The outlook as a table."""
        profile = self.profile
        head = (
            f"synchronisation: {len(profile)} layer{'s' * (len(profile) != 1)}, "
            f"{sum(layer.nbytes for layer in profile.layers) / 1e6:.4g} MB averaged over {profile.replicas} replicas, "
            f"{profile.compute_ns / NANO:.4g} s of compute per iteration"
        )
        titles = [one.title for one in ComparedPolicy]
        rows = [("seconds per iteration", "H", *titles, "bound", "in effect", "pays")]
        lines = [
            head,
            *columns(rows + [link.row() for link in self.links]),
            "  in effect: mean iterations between two averagings of a parameter, DreamDDP with idle time filled",
            f"  pays: the first policy within {PAYS:.0%} of the fastest, in the order of the columns",
        ]
        if not all(link.hides for link in self.links):
            lines.append("  +: a longer period would hide more")
        ranges = [f"{policy.title} from {rate(low)} to {rate(high)}" for policy, low, high in self.ranges()]
        if ranges:
            lines.append(f"  pays by bandwidth: {', '.join(ranges)}")
        return "\n".join(lines)

    def block(self) -> dict[str, Any]:
        """The outlook as JSON."""
        return {
            "layers": [layer.name for layer in self.profile.layers],
            "replicas": self.profile.replicas,
            "compute_seconds": self.profile.compute_ns / NANO,
            "links": [link.block() for link in self.links],
            "pays": [{"policy": one.value, "from_mbps": low, "to_mbps": high} for one, low, high in self.ranges()],
        }


def rate(mbps: float) -> str:
    """A bandwidth as text, to three digits."""
    return f"{float(f'{mbps:.3g}'):.12g} Mbit/s"


def edit_ns(profile: LayerProfile) -> int:
    """Nanoseconds of an iteration of EDiT after which, or in which, each layer is averaged just before its forward. The
    first one is averaged while training waits; each following one is launched when the forward before it begins."""
    clock = 0
    free = profile.communication_ns[0]  # when the link has averaged the layer
    for layer, seconds in enumerate(profile.forwards_ns):
        clock = max(clock, free)
        if layer + 1 < len(profile):
            free = clock + profile.communication_ns[layer + 1]
        clock += seconds
    return clock + profile.compute_ns - profile.forward_ns


def plan_link(profile: LayerProfile, period: int | None, mbps: float | None = None, filled: bool = True) -> SyncOnLink:
    """Every policy on one link; a `period` of None is chosen for DreamDDP. `filled`: compute `in_effect`, which takes
    most of the time. Raises ConfigError."""
    if mbps is not None:
        profile = profile.at_link(mbps * MEGABIT)
    count, compute = len(profile), profile.compute_ns
    schedule = choose_period(profile) if period is None else plan_layers(profile, period)
    h = schedule.period
    spread = spread_layers(profile, h)
    by_period = {
        ComparedPolicy.PLAIN: h * iteration_ns(profile, range(count)),
        ComparedPolicy.DREAMDDP: period_ns(profile, schedule),
        ComparedPolicy.SPREAD: period_ns(profile, spread),
        ComparedPolicy.EDIT: (h - 1) * compute + edit_ns(profile),
        ComparedPolicy.FULL: unhidden_period_ns(profile, h),
        ComparedPolicy.ENP: period_ns(profile, equal_number(count, h)),
    }
    return SyncOnLink(
        mbps=mbps,
        schedule=schedule,
        spread=spread,
        seconds={one: by_period[one] / h / NANO for one in ComparedPolicy},
        bound=max(compute, sum(profile.communication_ns) / h) / NANO,
        in_effect=interval_in_effect(profile, fill(profile, schedule)) if filled else None,
        hides=exposed_ns(profile, schedule) - unavoidable_ns(profile) <= TOLERANCE * h * compute,
    )


def plan_sync(profile: LayerProfile, mbps: Sequence[float] = (), period: int | None = None) -> SyncOutlook:
    """The outlook for links of `mbps` (none: decades around those on which communication takes as long as compute) and
    a `period` of all policies (None: for each link the shortest that hides everything). Raises ConfigError."""
    if len(mbps) > MOST_LINKS:
        raise ConfigError(f"--link-mbps: expected at most {MOST_LINKS} links, found {len(mbps)}")
    chosen = tuple(mbps) or tuple(10.0**decade for decade in DECADES if _of_interest(profile, 10.0**decade))
    links = (plan_link(profile, period), *(plan_link(profile, period, link) for link in chosen))
    curve: tuple[SyncOnLink, ...] = ()
    if len(set(chosen)) > 1:
        low, high = math.log10(min(chosen)), math.log10(max(chosen))
        steps = max(2, round((high - low) * POINTS))
        points = [10 ** (low + (high - low) * step / steps) for step in range(steps + 1)]
        curve = tuple(plan_link(profile, period, point, filled=False) for point in points)
    return SyncOutlook(profile, links, curve)


def _of_interest(profile: LayerProfile, mbps: float) -> bool:
    """Whether communication on a link is neither negligible nor hopeless next to compute."""
    rounds = 2 * (profile.replicas - 1) / profile.replicas
    seconds = rounds * sum(layer.nbytes for layer in profile.layers) / (mbps * MEGABIT)
    return RATIOS[0] <= seconds / max(profile.compute_ns / NANO, 1 / NANO) <= RATIOS[1]
