"""Whether the order of a loader's data can be drawn again.

Invariant: a resumed pass draws the order of its samples again from the states with which it began. A custom sampler
that draws from the process's generators later in a pass is refused by name: other draws come in between, so its order
would be another one.

In: samplers. Out: errors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

from ...errors import ConfigError
from ..rng import numbers_drawn
from .data_parts import parts
from .loaders import is_sampled, is_stateful


def require_repeatable(loader: Any) -> None:
    """Raises ConfigError for what a loader with a state of its own would draw or read again, in another order."""
    kind, data = type(loader).__name__, loader.dataset
    if not is_sampled(loader):
        if inspect.isgeneratorfunction(getattr(type(data), "__iter__", None)) and not is_stateful(data):
            raise ConfigError(
                f"sampler: the {kind} would read its {type(data).__name__} again from the start after a restart; give "
                "the data set state_dict and load_state_dict"
            )
        return
    for path, part in parts(loader):
        known = type(part) in (BatchSampler, SequentialSampler, DistributedSampler)
        if path and not known and not is_stateful(part) and not type(part).__module__.startswith("torchdata."):
            raise ConfigError(
                f"sampler: the {kind} would draw the order of its {type(part).__name__} again after a restart, which "
                "has no state_dict and load_state_dict: use torch's DataLoader, which is followed with this sampler"
            )


def watch_draws(loader: Any) -> None:
    """From now on custom samplers of `loader` raise ConfigError if they draw from the process's generators in the
    middle of a pass."""
    for part in {id(part): part for path, part in parts(loader) if path}.values():
        kind = type(part)
        if not kind.__module__.startswith("torch.") and hasattr(kind, "__iter__") and not is_stateful(part):
            hook_iteration(part, lambda part, original: _watched(type(part).__name__, original(part)))


def hook_iteration(source: Any, begin: Callable[[Any, Callable[[Any], Any]], Any]) -> bool:
    """Make `iter(source)` return `begin(source, original)`. Returns False if Python does not allow it."""
    kind = type(source)
    original = getattr(kind, "__iter__", None)
    if original is None:
        return False

    def reduce(source: Any, protocol: Any) -> Any:  # a copy, for a worker process, is of the original class
        plain: Any = object.__new__(kind)
        vars(plain).update(vars(source))
        return _same_object, (plain,)

    body = {
        "__iter__": lambda source: begin(source, original),
        "__reduce_ex__": reduce,
        "__module__": kind.__module__,
    }
    try:
        source.__class__ = type(kind.__name__, (kind,), body)  # Python looks up __iter__ on the class
    except TypeError:
        return False
    return True


def _same_object(one: Any) -> Any:
    return one


def _watched(name: str, drawn: Any) -> Iterator[Any]:
    drawn = iter(drawn)
    before: tuple[Any, ...] = ()
    while True:
        try:
            one = next(drawn)
        except StopIteration:
            return
        if before and before != numbers_drawn(device=False):
            raise ConfigError(
                f"the sampler {name} draws from the process's generators in the middle of a pass, so that its order "
                "could not be drawn again after a restart: give it a generator of its own "
                "(self.generator = torch.Generator()), or draw the whole order when the pass begins"
            )
        yield one
        before = numbers_drawn(device=False)
