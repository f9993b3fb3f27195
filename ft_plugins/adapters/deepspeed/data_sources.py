"""One source of batches: the loader behind it, its epoch, and how to restart it behind batches that were read.

A source is whatever an engine reads: one of DeepSpeed's two loaders, a `LoaderPass` over torch's, or any iterator.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

from ...errors import ResumeError
from ..data.loaders import (
    LoaderEpoch,
    LoaderPass,
    StartedSampler,
    begin_after,
    is_sampled,
    is_stateful,
    sampler_epoch,
    set_generator_states,
)
from ..data.worker_draws import draws_of

_OUTLIVING = "outlive a pass (persistent_workers), so what they load may depend on all passes before: leave it out"
_OWN_STATE = "a state_dict of the loader does not have these: draw from a generator that is seeded by the index"
EPOCH = "__ft_epoch__"  # attribute in which DeepSpeed's loaders keep their epoch


def epoch_of(loader: Any) -> LoaderEpoch:
    """The epoch of one of DeepSpeed's loaders; created if it has none yet."""
    epoch: LoaderEpoch | None = getattr(loader, EPOCH, None)
    if epoch is None:
        epoch = LoaderEpoch.of(loader_of(loader))
        setattr(loader, EPOCH, epoch)
    return epoch


def own_epoch(source: Any) -> LoaderEpoch | None:
    """The epoch that the source itself tracks; None for any other iterator."""
    return source.epoch if isinstance(source, LoaderPass) else getattr(source, EPOCH, None)


def position_holder(source: Any) -> Any:
    """The object with the position: the inner loader, if the source only repeats one of DeepSpeed's own."""
    inside = getattr(source, "loader", None)
    return inside if hasattr(inside, EPOCH) else source


def reference(source: Any) -> Callable[[], Any]:
    """A reference, weak for a pass: once the script drops a pass, it has no position."""
    return weakref.ref(source) if isinstance(source, LoaderPass) else lambda: source


def loader_of(source: Any) -> Any:
    """The loader that is iterated; it has the samplers and the state."""
    return source.loader if isinstance(source, LoaderPass) or hasattr(source, "data_iter") else source


def is_curriculum(source: Any) -> bool:
    """Whether a sampler of data efficiency chooses whole batches: by a curriculum, on one rank for all."""
    return bool(getattr(source, "curriculum_learning_enabled", False))


def restart_method(source: Any) -> str | None:
    """How `restart` handles this source; None if it cannot."""
    if isinstance(source, LoaderPass):
        return "pass" if is_sampled(source.loader) else None
    if hasattr(source, "_create_dataloader"):
        return "deepspeed"
    if is_sampled(getattr(source, "loader", None)):
        return "torch"
    if hasattr(source, "_sampler_iter") and getattr(source, "_num_workers", 1) == 0:
        return "iterator"
    return None


def restart(source: Any, epoch: LoaderEpoch) -> bool:
    """Start the epoch with its random numbers, behind the batches that were read. Returns False if it cannot."""
    loader = loader_of(source)
    set_generator_states(epoch.began, loader)
    match restart_method(source):
        case "pass":
            return bool(source.skip_to(epoch))
        case "deepspeed":
            sampler = source.data_sampler
            started = StartedSampler(sampler, epoch.read * (1 if is_curriculum(source) else source.batch_size))
            source.data_sampler = started
            try:
                iter(source)
            finally:
                source.data_sampler = sampler
        case "torch":
            source.data_iter, started = begin_after(loader, epoch, iter)
        case "iterator":
            started = StartedSampler(source._sampler_iter, epoch.read)
            source._num_yielded += epoch.read
        case _:
            return False
    if epoch.read:
        set_generator_states(epoch.first or epoch.began, loader)
        started.start()
    if hasattr(source, EPOCH):
        setattr(source, EPOCH, epoch)
    return True


def drop(source: Any, batches: int) -> None:
    """Read batches of an epoch that `restart` has started, and drop them."""
    if isinstance(source, LoaderPass):
        source.drop(batches)
        return
    inner = next(one for name in ("data_iter", "data", "data_iterator") if (one := getattr(source, name, None)))
    deque(islice(inner, batches), 0)
    if hasattr(source, EPOCH):
        epoch_of(source).read += batches


def worker_changes(source: Any, loader: Any, reused: bool) -> dict[str, str]:
    """What worker processes do that a restored pass must do again, 'workers'; or cannot, 'lost'. `reused`: those of a
    pass before load the present or the next one."""
    known = draws_of(getattr(source, "dataloader", loader))
    if known is None or not known.changes:
        return {"workers": "", "lost": ""}
    outlives = reused and getattr(loader, "persistent_workers", False)
    problem = _OWN_STATE if is_stateful(loader) else _OUTLIVING if outlives else ""
    lost = f"its worker processes {known.changes}, and {problem}" if known.draw and problem else ""
    return {"workers": known.changes, "lost": lost}


def require_epoch(role: str, loader: Any, captured: int | None) -> None:
    """Raises ResumeError if the script has set another epoch than the captured one."""
    epoch = sampler_epoch(loader)
    if epoch != captured:
        raise ResumeError(
            f"data position of '{role}': the script has set epoch {epoch} on its sampler, but the captured epoch is "
            f"{captured}: begin the loop at the epoch that engine.global_steps is in"
        )
