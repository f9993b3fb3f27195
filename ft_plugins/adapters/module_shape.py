"""Compare what modules are: their classes, hooks, functions and objects, which no snapshot can put back.

A script may swap an activation, or add a hook, in iteration 10. A restart builds the model as the script does, without
that, and nothing fails: only the numbers are others. So it is named where it happens, and again where a restored model
is not what it was. The restored model is compared when its first forward in training begins: what the script decides by
the iteration (`if step >= 10`) is done by then. Attributes that it lacks are looked for once more at the next version
point, and those that the first iteration makes are not named: a module may make them in its forward. Whole numbers of
objects are compared at that version point alone.

In: `ModulePart`s at version points. Out: plain values for a version; lines in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from ..events import say
from ..model.digest import WALL_TIMES as NOT_COMPARED
from .forward_edges import Hook, with_hooks
from .held_tensors import HeldTensors, joined
from .module_modes import ModuleNumbers
from .module_parts import ModulePart, Shape, encoded_bytes
from .object_counts import ObjectCounts

_ROOM, _MOST = 8 << 10, 32  # bytes of a version, and how many parts
_NOTHING = "nothing"
_COUNTS_ADVICE = (
    "if training depends on it, results differ: keep it in an attribute of the module itself, which is restored, or "
    "compute it from the iteration"
)
_ADVICE = (
    "no snapshot can put that back, so a restart has it as the script builds it, and results differ: decide it in each "
    "iteration before the forward (`if step >= 10`, not `if step == 10`)"
)


class ModuleShape:
    """The shape of one model. `speaks`: whether this rank prints. `items()`: the names of the tensors that versions
    have; None: all parameters and buffers are among them."""

    def __init__(
        self, numbers: ModuleNumbers, speaks: bool, items: Callable[[], Collection[str]] | None = None
    ) -> None:  # fmt: skip
        self._numbers, self._speaks, self._items = numbers, speaks, items
        self._begun: Mapping[str, ModulePart] | None = None  # at the first forward of this incarnation
        self._last: Mapping[str, ModulePart] = {}
        self._changed: Mapping[str, Shape] = {}  # at the last version point
        self._expected: Mapping[str, Any] | None = None
        self._unmade: Mapping[str, Any] | None = None  # what a restored version has, until the next version point
        self._counts, self._tensors = ObjectCounts(), HeldTensors()
        self._first = True  # no version point since training began
        self._said: set[str] = set()

    def install(self, called: Iterable[torch.nn.Module]) -> None:
        """`called` by the loop."""
        for one in with_hooks(called):
            one.register_forward_pre_hook(Hook(self._entering), prepend=True)

    def _entering(self, module: torch.nn.Module, *call: Any) -> None:
        if self._begun is None and module.training and torch.is_grad_enabled():
            self._begin(self._numbers.read())

    def _begin(self, now: Mapping[str, ModulePart]) -> None:
        self._begun = self._last = now
        self._changed = {}
        self._unmade, self._expected, self._first = self._expected, None, True
        if self._unmade is not None:
            self._say_lost(words for words, made in _lost(self._unmade, now) if not made)

    def _say_lost(self, found: Iterable[str]) -> None:
        if (words := [*found]) and self._speaks:
            say(f"after the restore {joined(words)} when that version was captured: {_ADVICE}", alarm=True)

    def captured(self, iteration: int) -> dict[str, Any]:
        """After `numbers.captured`: what a version has. What has changed since the last one is said once."""
        now = self._numbers.present
        if not iteration:
            reserve = {"": {"": (_ROOM + encoded_bytes(now)) * "-"}}
            return {"digests": _digests(now), NOT_COMPARED: {"shapes": reserve, "counts": self._counts.reserved()}}
        if self._begun is None:
            self._begin(now)
        assert self._begun is not None
        unmade, self._unmade = self._unmade, None
        if unmade is not None:
            self._say_lost(words for words, made in _lost(unmade, now) if made)
        first, self._first = self._first, False
        last, self._last = self._last, now
        if last is not now:
            if (found := [*_differences(last, now, self._said, first)]) and self._speaks:
                say(f"iteration {iteration}: {joined(found)} before: {_ADVICE}", alarm=True)
            self._changed = _that_fit(self._begun, now)
        counts, words = self._counts.captured(self._numbers.parts.counts, self._numbers.parts.moved)
        if words and self._speaks:
            say(f"{words}: {_COUNTS_ADVICE}", alarm=True)
        if self._speaks:
            parts = self._numbers.parts
            self._tensors.report(iteration, parts.modules, parts.optimizers, self._items)
        return {"digests": _digests(now), NOT_COMPARED: {"shapes": self._changed, "counts": counts}}

    def restored(self, saved: Mapping[str, Any] | None) -> None:
        """Compare with what a version has when the first forward begins; None: it has nothing."""
        self._expected = saved if saved and "counts" in saved[NOT_COMPARED] else None  # else of an earlier version
        self._begun = None
        if self._expected is not None:
            self._counts.restored(self._expected[NOT_COMPARED]["counts"])


def _digests(parts: Mapping[str, ModulePart]) -> bytes:
    return b"".join(one.digest for one in parts.values())


def _that_fit(begun: Mapping[str, ModulePart], now: Mapping[str, ModulePart]) -> dict[str, Shape]:
    """The shapes that are no longer what they were when training began, no more than a version has room for."""
    changed: dict[str, Shape] = {}
    left = _ROOM
    for name, one in now.items():
        if one.digest != (begun[name].digest if name in begun else b"") and len(changed) < _MOST:
            left -= len(repr((name, one.shape)).encode())
            if left >= 0:
                changed[name] = dict(one.shape)
    return changed


def _differences(
    was: Mapping[str, ModulePart], now: Mapping[str, ModulePart], said: set[str], first: bool
) -> Iterator[str]:
    """What differs and was not `said`, in words; not what the `first` iteration makes."""
    nothing = ModulePart.of({}, {})
    for name in dict.fromkeys((*now, *was)):
        before, after = was.get(name, nothing), now.get(name, nothing)
        if before is not after and before.digest != after.digest:
            for words, place, made in _between(name, before.shape, after.shape):
                if place not in said and not (made and first):
                    said.add(place)
                    yield words


def _lost(saved: Mapping[str, Any], now: Mapping[str, ModulePart]) -> Iterator[tuple[str, bool]]:
    """What of a restored model is not what it was, in words, and whether it may be an attribute that one lacks."""
    digests = saved["digests"]
    for number, (name, one) in enumerate(now.items()):
        size = len(one.digest)
        if digests[number * size : (number + 1) * size] != one.digest:
            known = saved[NOT_COMPARED]["shapes"].get(name)
            if known is None:
                yield f"{_of('what the script builds', name)} is not what it was", True  # or does not fit
            else:
                yield from ((words, made) for words, _, made in _between(name, known, one.shape))


def _between(name: str, was: Shape, now: Shape) -> Iterator[tuple[str, str, bool]]:
    """Each difference in words, its place, and whether it is an attribute that one of them lacks."""
    for key in dict.fromkeys((*was, *now)):
        before, after = was.get(key, _NOTHING), now.get(key, _NOTHING)
        if before != after:
            place = _of(key.removeprefix("_").replace("_", " ") if key.startswith("_") else key, name)
            made = _NOTHING in (before, after) and key != "forward" and "_hooks" not in key
            yield f"{place} is {after}, and was {before}", place, made


def _of(what: str, name: str) -> str:
    return f"{what} of " + (f"'{name}'" if name else "the model")
