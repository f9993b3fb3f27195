"""Average each layer once in a period in sets that need not be contiguous: beyond DreamDDP. Pure.

The paper cuts the order of the backward into contiguous sets. Then one iteration has only the first layers, whose
backward ends last, so there is hardly any backward left to hide them behind, while its link idles until then. Nothing
but the search needs contiguous sets: the convergence theorem asks that each layer is averaged at least once in H
iterations. Where layers launched early and late share an iteration, both hide.

Minimising exposed time over all sets is bin packing. So sets are filled greedily: from the first layer to the last,
each goes to the iteration in which it adds the least exposed time. The time that a layer adds is final, because layers
after it are launched earlier and change nothing for it (see the formula of `layers_schedule`). Of equal ones the
fullest iteration is taken, and in a second attempt the emptiest; the best of both and of the contiguous schedule is
kept. A schedule that exposes no more than `least_exposed_ns` is optimal.

Invariant: never worse than `plan_layers`; all ranks derive the same schedule from the same profile. Of schedules of
equal cost the contiguous one is kept, then the first attempt.

In: `LayerProfile`, H. Out: `LayerSchedule`. Raises ConfigError for an H outside 1 to L."""

from __future__ import annotations

import numpy as np

from .layer_profile import LayerProfile
from .layers_schedule import LayerSchedule, exposed_ns, plan_layers


def spread_layers(profile: LayerProfile, period: int) -> LayerSchedule:
    """The best schedule found whose sets need not be contiguous. Raises ConfigError."""
    contiguous = plan_layers(profile, period)
    found = (contiguous, *(_filled_greedily(profile, period, fullest) for fullest in (True, False)))
    return min(found, key=lambda schedule: exposed_ns(profile, schedule))


def _filled_greedily(profile: LayerProfile, period: int, fullest: bool) -> LayerSchedule:
    used, exposed = np.zeros(period, dtype=np.int64), np.zeros(period, dtype=np.int64)
    chosen: list[list[int]] = [[] for _ in range(period)]
    for layer, (seconds, launched) in enumerate(zip(profile.communication_ns, profile.backward_ends_ns, strict=True)):
        added = np.maximum(used + (seconds + launched - profile.compute_ns) - exposed, 0)
        least = np.flatnonzero(added == added.min())
        number = int(least[(used[least].argmax() if fullest else used[least].argmin())])
        used[number] += seconds
        exposed[number] += added[number]
        chosen[number].append(layer)
    return LayerSchedule(len(profile), tuple(tuple(reversed(own)) for own in chosen))
