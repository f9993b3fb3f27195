"""Recommend one configuration, from what the planner computed, with the reasons in sentences. Pure.

    redundancy    the scheme that costs least a day, but RAIM6, which keeps and sends twice as much parity, only if it
                  saves more than `_WORTH` of a day; without costs RAIM5, unless memory then survives less than a day
                  above the threshold
    groups        those of the plan
    interval      `intervals.cheapest_snapshots`
    checkpoints   the storage tier's interval

In: `Outlook`, `GroupSizes`, `IntervalPlan` or none. Out: `Recommendation`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .group_sizes import GroupSizes
from .intervals import DAY, IntervalPlan, SchemePlan, exchange_seconds, snapshot_interval, span
from .survival import Outlook, Scheme

_WORTH = 1e-3  # of a day
_ENOUGH_DAYS = 1.0  # for which memory survives above the threshold

TERMS = (
    ("interval", "iterations from one snapshot, or checkpoint, to the next"),
    ("saving, lost work", "of a day, the time that training waits for saves, and repeats after failures"),
    ("survival", "the probability that no failure so far has taken the newest snapshot from memory"),
    ("losses per group", "lost nodes of a redundancy group that its parity makes up for"),
    ("tiers", "process: failures that leave nodes' memory; node: lost nodes; storage: more than parity makes up for"),
    ("goodput", "the share of time in which the job makes progress"),
)  # fmt: skip


@dataclass(frozen=True)
class Recommendation:
    """`flags` for ft-run, and why. Intervals are in iterations, None without costs; `checkpoint_interval` also if no
    failure needs storage."""

    scheme: Scheme
    group_nodes: int
    interval: int | None
    checkpoint_interval: int | None
    flags: tuple[str, ...]
    reasons: tuple[str, ...]

    def table(self) -> str:
        """The recommendation for people."""
        return "\n".join([f"recommended: {' '.join(self.flags)}", *(f"  - {reason}" for reason in self.reasons)])

    def block(self) -> dict[str, Any]:
        """The recommendation as JSON."""
        return {
            "redundancy": self.scheme.value, "group_nodes": self.group_nodes, "interval": self.interval,
            "checkpoint_interval": self.checkpoint_interval, "flags": list(self.flags), "reasons": list(self.reasons),
        }  # fmt: skip


def terms() -> str:
    """The words of the tables."""
    width = max(len(word) for word, _ in TERMS)
    lines = [f"  {word:<{width}}  {meaning}" for word, meaning in TERMS]
    return "\n".join(["terms (more: docs/glossary.md)", *lines])


def recommend(outlook: Outlook, sizes: GroupSizes, intervals: IntervalPlan | None) -> Recommendation:
    """The recommended configuration."""
    plans = {plan.scheme: plan for plan in intervals.schemes} if intervals is not None else {}
    scheme = _by_cost(plans) if plans else _by_survival(outlook)
    plan = plans.get(scheme)
    interval, checkpoints = (plan.tiers[0].every, plan.tiers[-1].every) if plan is not None else (None, None)
    flags = ["--reft", f"--reft-redundancy {scheme.value}", f"--reft-group-nodes {max(2, sizes.chosen)}"]
    if interval is not None:
        flags.append(f"--reft-interval {interval}")
    flags.append("--reft-checkpoint-dir FOLDER")
    if checkpoints is not None:
        flags.append(f"--reft-checkpoint-interval {checkpoints}")
    reasons = [*_on_intervals(intervals, plan), _on_survival(outlook, scheme), _on_schemes(plans, outlook, scheme)]
    reasons += [*_on_groups(sizes, scheme), *_on_storage(intervals, plan)]
    return Recommendation(
        scheme, sizes.chosen, interval, checkpoints, tuple(flags), tuple(reason for reason in reasons if reason)
    )


def _by_cost(plans: dict[Scheme, SchemePlan]) -> Scheme:
    raim5, raim6 = plans[Scheme.RAIM5], plans.get(Scheme.RAIM6)
    return Scheme.RAIM6 if raim6 is not None and raim5.cost - raim6.cost > _WORTH * DAY else Scheme.RAIM5


def _by_survival(outlook: Outlook) -> Scheme:
    days = {one.scheme: one.days for one in outlook.schemes}
    return Scheme.RAIM6 if Scheme.RAIM6 in days and days[Scheme.RAIM5] < _ENOUGH_DAYS else Scheme.RAIM5


def _on_intervals(intervals: IntervalPlan | None, plan: SchemePlan | None) -> Iterator[str]:
    if intervals is None or plan is None:
        yield (
            "how often: give --state-gib, --iteration-seconds, --snapshot-seconds, --link-gib-per-second and "
            "--storage-gib-per-second, and they are chosen too"
        )
        return
    costs, process = intervals.costs, plan.tiers[0]
    every, shortest = process.every or 1, snapshot_interval(costs, plan.scheme.losses)
    seconds = every * costs.iteration_seconds
    waits = f"training waits {costs.snapshot_seconds / seconds:.2%} of the time for them"
    loses = f"a failure costs {span(seconds / 2)} of work on average"
    if every > shortest:
        yield (
            f"a snapshot every {_iterations(every)} ({span(seconds)}) costs least: {waits}, and {loses}; "
            f"every {_iterations(shortest)} would be possible"
        )
    else:
        send = exchange_seconds(costs, plan.scheme.losses)
        limit = "sending a version takes" if send >= costs.snapshot_seconds / costs.max_overhead else "waiting allows"
        what = span(send) if limit.startswith("send") else f"at most {costs.max_overhead:.2%} of the time"
        often = f"a snapshot every {_iterations(every)} ({span(seconds)}) is as often as {limit} ({what})"
        yield f"{often}: {waits}, and {loses}"


def _on_survival(outlook: Outlook, scheme: Scheme) -> str:
    days = {one.scheme: one.days for one in outlook.schemes}
    return (
        f"{scheme.name}: of each redundancy group {_nodes(scheme.losses)} may be lost at once; memory survives "
        f"{_for_days(days[scheme])} with a probability of {outlook.threshold:g}, checkpoints alone "
        f"{_for_days(days[Scheme.CHECKPOINT])}"
    )


def _on_schemes(plans: dict[Scheme, SchemePlan], outlook: Outlook, scheme: Scheme) -> str:
    """Why this scheme and not the other one."""
    other = Scheme.RAIM6 if scheme is Scheme.RAIM5 else Scheme.RAIM5
    if other not in outlook.cluster.schemes:
        return f"RAIM6 would need groups of at least {Scheme.RAIM6.least} nodes"
    if plans:
        cheaper = plans[other].cost - plans[scheme].cost
        if scheme is Scheme.RAIM6:
            return f"RAIM6 saves {span(cheaper)} a day, for twice the parity"
        saves = f"saves {span(-cheaper)} a day" if cheaper < 0 else "saves no time"
        return f"RAIM6 {saves}, and would keep and send twice the parity"
    if scheme is Scheme.RAIM6:
        return f"with RAIM5 memory would not survive {_ENOUGH_DAYS:g} day with that probability"
    return "RAIM6 would keep and send twice the parity"


def _on_groups(sizes: GroupSizes, scheme: Scheme) -> Iterator[str]:
    one = next((each for each in sizes.of(scheme) if each.nodes == sizes.chosen), None)
    if one is not None:
        auto = "" if sizes.auto == sizes.chosen else f"; --reft-group-nodes auto would choose {sizes.auto}"
        yield (
            f"redundancy groups of at most {_nodes(sizes.chosen)}: for each of two versions a node keeps parity of "
            f"{one.parity:.1%} of what it captures{auto}"
        )


def _on_storage(intervals: IntervalPlan | None, plan: SchemePlan | None) -> Iterator[str]:
    if intervals is None or plan is None:
        return
    storage = plan.tiers[-1]
    if storage.every is None:
        yield "checkpoints: no failure of this model needs them; keep some for what it does not include"
    else:
        rate = 1 / storage.failures if storage.failures else math.inf
        seconds = storage.every * intervals.costs.iteration_seconds
        yield (
            f"a checkpoint every {_iterations(storage.every)} ({span(seconds)}), "
            f"for what memory does not survive: once in {_for_days(rate)}"
        )
    alone = next(one for one in intervals.schemes if one.scheme is Scheme.CHECKPOINT)
    yield f"in all this costs {_share(plan)} of each day; checkpoints alone {_share(alone)}"


def _share(plan: SchemePlan) -> str:
    return f"{plan.cost / DAY:.2%}" if plan.cost < DAY else "all"


def _for_days(days: float) -> str:
    if math.isinf(days):
        return "any time"
    return span(days * DAY) if days < 1000 else f"{days / 365.25:.3g} years"


def _iterations(count: int) -> str:
    return "iteration" if count == 1 else f"{count} iterations"


def _nodes(count: int) -> str:
    return "one node" if count == 1 else f"{count} nodes"
