"""What ranks have averaged, from their events: to compare jobs, and to say when a fault in mid-averaging is due.

In: jobs whose policy averages layers in different iterations. Out: layers by rank and iteration; how often a rank has
reached `sync.exchange` or `sync.apply`, each once per layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .forkserver import RunningJob

Averagings = Mapping[tuple[int, int], list[str]]


def averagings(jobs: Iterable[RunningJob]) -> dict[tuple[int, int], list[str]]:
    """By rank and iteration, the layers that were averaged before or after the update, the last time it was made."""
    return {
        (event.rank, event.fields["iteration"]): event.fields["layers"]
        for job in jobs
        for event in job.events("layers.averaged")
        if event.rank is not None
    }


def reached(made: Averagings, tau: int, rank: int, after: int, iteration: int) -> int:
    """The hit of a point that `rank` reaches in the middle of `iteration`, if it has begun after iteration `after`: at
    its second layer there, or at its only one. All layers are averaged in multiples of tau."""
    layers = {layer for (each, _), those in made.items() if each == rank for layer in those}

    def count(step: int) -> int:
        return len(layers) if step % tau == 0 else len(made.get((rank, step), []))

    return sum(count(step) for step in range(after + 1, iteration)) + min(2, count(iteration))
