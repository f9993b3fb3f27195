"""Go on with the passes over a loader after a restore, and draw what the run that was not restored draws.

Megatron's `--dataloader-type cyclic` begins a pass when its first batch is read, in the middle of training. torch then
draws a number from the process's generator for the seeds of workers: in each pass, or where workers persist in the
first one. A pass that had begun before the restore begins again without.

In: the function that repeats a loader, the loader. Out: its batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..rng import process_state, set_process_state

Cycle = Callable[[Any], Iterator[Any]]


def continued(cycle: Cycle, loader: Any, read: bool = False) -> Iterator[Any]:
    """`cycle(loader)` after a restore. `read`: it had been read before, which its sampler may not know."""
    sampler = loader.batch_sampler
    consumed = sampler.consumed_samples
    left_out = getattr(sampler, "last_batch_size", None)  # without one, each pass is a whole one
    inside = left_out is not None and consumed % (sampler.total_samples - left_out) > 0
    has_drawn = read or consumed > 0 if loader.persistent_workers else inside
    return _without_first_draw(cycle, loader) if has_drawn else cycle(loader)


def _without_first_draw(cycle: Cycle, loader: Any) -> Iterator[Any]:
    before = process_state()
    first = iter(loader)
    set_process_state(before)
    yield from first
    yield from cycle(loader)
