"""Whether the order of a loader's data can be drawn again, and whether passes go on where the captured ones ended.

Invariant: a resumed pass draws the order of its samples again from the states with which it began. A custom sampler
that draws from the process's generators later in a pass is refused by name: other draws come in between, so its order
would be another one.

A loop that counts its epochs from 0 again would repeat them. In the first pass that begins after a resume an epoch must
therefore rise as it did before, and other numbers that rose or fell by the same amount must not turn back.

In: samplers; numbers at the begin of each pass. Out: errors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

from ...errors import ConfigError, ResumeError
from ..rng import numbers_drawn
from .data_parts import parts
from .loaders import is_sampled, is_stateful

_COUNT = "count from the restored number (`epoch = sampler.epoch` in the first iteration, then `epoch += 1`)"


# ---- drawing ----


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


# ---- passes ----


@dataclass
class PassNumbers:
    """Numbers of samplers at the begin of the last pass, and by how much each rises from pass to pass.

    `steps` has with each number how often it rose so; of other numbers than epochs once may be chance. `resumed`: no
    pass has begun since the restore but the restored one.
    """

    last: dict[str, int] | None = None
    steps: dict[str, tuple[int, int]] = field(default_factory=dict)
    irregular: list[str] = field(default_factory=list)
    resumed: bool = False

    def begin(self, now: Mapping[str, int]) -> None:
        """A pass begins with the numbers `now`. Raises ResumeError."""
        if self.last is not None:
            for path, last in self.last.items():
                if path in now:
                    self._compare(path, last, now[path])
        self.last, self.resumed = dict(now), False

    def _compare(self, path: str, last: int, now: int) -> None:
        step, times = self.steps.get(path, (0, 0))
        epoch = path.rpartition(".")[2] == "epoch"
        if epoch:
            wrong = now - last != step if step else now < last
        else:
            wrong = times > 1 and (now - last) * step < 0  # it may stay, or rise by less: a window that is full
        if self.resumed and wrong:
            raise ResumeError(
                f"the sampler's {path.rpartition('.')[2]} was set to {now} for the pass after that in which the job "
                f"resumed, which had {last}: data would be trained on again; expected "
                f"{last + (step or 1)}: {_COUNT}"
            )
        if now - last == step or not times:
            if path not in self.irregular:
                self.steps[path] = now - last, times + 1
        else:
            del self.steps[path]
            self.irregular.append(path)

    def require_restored(self, now: Mapping[str, int], restored: Mapping[str, int]) -> None:
        """The restored pass is begun by the script. Raises ResumeError if the script has set a number back."""
        for path, number in now.items():
            known = [numbers[path] for numbers in (restored, self.last or {}) if path in numbers]
            if known and number < min(known):
                raise ResumeError(
                    f"the sampler's {path.rpartition('.')[2]} was set to {number}, but {restored.get(path)} was "
                    f"captured: {_COUNT}"
                )

    def plain(self) -> dict[str, Any]:
        return {"last": self.last, "steps": self.steps, "irregular": self.irregular}

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> PassNumbers:
        """The captured numbers, after a resume."""
        last = saved["last"]
        return cls(None if last is None else dict(last), dict(saved["steps"]), list(saved["irregular"]), resumed=True)
