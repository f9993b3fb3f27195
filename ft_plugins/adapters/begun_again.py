"""Name what has begun again after a restore: what moved in training, and is at its first value, not at the captured.

    begin       the first walk, before the first iteration of a process
    captured    version points: at the 1st, 2nd, 4th, ... 256th, and then each 256th, a walk shows what moves; a version
                has that, at first and now
    restored    right before the first iteration after a restore: what is there is compared. Without a proof it is named
                at once, but for whole numbers: one that follows the iteration, as the variable of a loop does, is by as
                much more at the next version point
    recomputed  the restored iteration was computed again: what came into being in it is compared with the version, and
                what had begun again, but is what it was by now (a variable that each iteration sets), is not named

What is at its first value again and not at the captured one has begun again, and so has a whole number that has turned
back towards its first value. It is a fact about the script, not a verdict: a sum that is only printed begins again too.
Whether training depends on it the proof shows (`recovery.proof_plan`).

Invariant: a version's part is bounded, the nearest values first; later version points walk to what moves alone, and
wait for no device.

In: what a host captures. Out: plain values for a version; words.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from itertools import accumulate
from typing import Any

import torch

from ..events import say
from .observed import MOST_OF_MODULES, Root, is_examined, names_in, prefixes, script_roots, walk
from .script.script_state import address_of, nested
from .value_text import ON_DEVICE, Text

ROOM = 16 << 10  # bytes of a version
_MORE = 16  # of a value, but for its path and texts
_SHOWN = 12  # in a line
Texts = Mapping[str, Text]


class BegunAgain:
    """Of one host. `modules` gives the roots that are its own, `tensors` those that it captures; `ignored` what the
    script has named: variables and objects."""

    def __init__(
        self,
        modules: Callable[[], Iterable[Root]],
        tensors: Callable[[], Iterable[torch.Tensor]],
        ignored: Callable[[], Collection[Any]] = tuple,
    ) -> None:
        self._modules, self._tensors, self._ignored = modules, tensors, ignored
        self._points = 0
        self._first: dict[str, Text] = {}
        self._moving: dict[str, None] = {}  # paths, the nearest first
        self._within: set[str] = set()  # what is walked to for them
        self._expected: dict[str, Text] = {}  # of the version that is computed again, and not compared so far
        self._known: tuple[int, dict[str, Any]] = (0, {})  # the iteration of the last version point, its values
        self._begun: dict[str, str] = {}  # what has begun again, in words, by path; until it is seen to matter
        self._counts: dict[str, int] = {}  # whole numbers in it, not named yet: captured values less the iteration
        self._again: list[str] = []  # not said yet
        self._named: set[str] = set()
        self._left_out = False
        self.differing: tuple[str, ...] = ()  # what else was not what it was, where the iteration was computed again

    def begin(self) -> None:
        """Before the first iteration of this process, and before anything is set in it."""
        self._first = self._walk(None)

    def captured(self, iteration: int, state: Mapping[str, Any]) -> dict[str, Any]:
        """At the version point after `iteration`, asked once or several times: 'first' and 'last', the texts of what
        training changes by path, at the job's first look and now, within `ROOM` bytes; 0: something as large. What
        `state` holds, the version's small state, is captured."""
        if not iteration:
            return {"at": 0, "first": {}, "last": {}, "reserve": bytes(ROOM)}
        if iteration == self._known[0]:
            return self._known[1]
        self._points += 1
        learning = is_examined(self._points)
        now = self._walk(None if learning else self._within, devices=learning, state=state)
        if learning:
            self._learn([path for path, text in now.items() if self._first.setdefault(path, text) != text])
        if self._counts or self._expected:
            for path, less in self._counts.items():
                if now.get(path) == iteration + less:
                    del self._begun[path]
            self._compare(self._expected, now)
            self._counts, self._expected = {}, {}
            self._name()
        fitting = self._fitting({path: now[path] for path in self._moving if path in now})
        self._known = (
            iteration,
            {"at": iteration, "first": {path: self._first[path] for path in fitting}, "last": fitting},
        )
        return self._known[1]

    def restored(self, saved: Mapping[str, Any] | None, proves: bool = False) -> None:
        """Right before the first iteration, when all else is restored. `saved`: None if the version has nothing;
        `proves`: `recomputed` will be called."""
        if saved is not None:
            last = saved["last"]
            self._learn(last)
            now = self._walk(self._within)
            self._first |= saved["first"]
            self._compare(last, now)
            if not proves:
                self._counts = {
                    path: last[path] - saved.get("at", 0) for path in self._begun if type(last[path]) is int
                }
                self._name()

    def recomputed(self, saved: Mapping[str, Any]) -> None:
        """The version point of the restored iteration, whose version has `saved`, right after it was computed again."""
        last = saved["last"]
        self._expected = dict(last)  # also what the script has set since
        self._learn(last)
        self._first = {**saved["first"], **self._first}
        now = self._walk(self._within)
        unread = {path for path, was in last.items() if was == ON_DEVICE}  # whether it is the same is not known
        self._begun = {
            path: words
            for path, words in self._begun.items()
            if (words.endswith("(tensor)") if path in unread else now.get(path) != last.get(path))
        }
        self._name()
        self.differing = tuple(
            path for path, was in last.items()
            if path in now and now[path] != was and ON_DEVICE not in (was, now[path]) and not self._is_ignored(path)
        )  # fmt: skip

    def said(self) -> str:
        """What has begun again since this was asked last, in words; '' for nothing."""
        words, self._again = self._again, []
        return "; ".join([*words[:_SHOWN], *[f"and {len(words) - _SHOWN} more"] * (len(words) > _SHOWN)])

    def _learn(self, moving: Iterable[str]) -> None:
        """These paths move."""
        if new := [path for path in moving if path not in self._moving]:
            nearest = sorted((*self._moving, *new), key=lambda path: path.count(".") + path.count("["))
            self._moving, self._within = dict.fromkeys(nearest), prefixes(nearest)

    def _name(self) -> None:
        """Name each value once."""
        new = [path for path in self._begun if path not in self._named and path not in self._counts]
        self._again += [self._begun[path] for path in new]
        self._named.update(new)

    def _walk(self, within: Collection[str] | None, devices: bool = True, state: Any = None) -> dict[str, Text]:
        objects = {id(one) for one in self._ignored() if not isinstance(one, str)}
        storages = set() if within is not None else {address_of(one) for one in nested([*self._tensors(), state])} - {0}

        def left_out(value: Any) -> bool:
            return id(value) in objects or bool(storages) and address_of(value) in storages

        with suppress(Exception):  # objects of the script may do as they like
            roots = list(self._modules())
            of_modules = walk(roots, left_out, within, devices, MOST_OF_MODULES)
            objects |= {id(one) for _, one in roots}
            return {**of_modules, **walk(script_roots(within), left_out, within, devices)}
        return {}

    def _compare(self, version: Texts, now: Texts) -> None:
        for path, was in version.items():
            if path in now and has_begun_again(self._first.get(path), was, now[path]) and not self._is_ignored(path):
                values = f"{now[path]}, was {was}"
                self._begun[path] = f"{path} {'(tensor)' if values.startswith('a tensor') else values}"

    def _is_ignored(self, path: str) -> bool:
        return not names_in(path).isdisjoint(one for one in self._ignored() if isinstance(one, str))

    def _fitting(self, values: Texts) -> dict[str, Text]:
        """As many as a version has room for, in their order."""
        used = accumulate(
            len(path.encode()) * 2 + len(str(self._first[path]).encode()) + len(str(text).encode()) + _MORE
            for path, text in values.items()
        )
        fitting = {path: values[path] for path, bytes_used in zip(values, used, strict=True) if bytes_used <= ROOM}
        if len(fitting) < len(values) and not self._left_out:
            self._left_out = True
            say(
                f"{len(values)} values that are not captured change, and a version has room for {len(fitting)}: "
                "whether the others begin again after a restore is not said"
            )
        return fitting


def has_begun_again(first: Text | None, was: Text, now: Text) -> bool:
    """Whether a value that was `first` at the job's begin, and `was` something else when a version was captured, is
    `now` at its first value again or, as a whole number, has turned back towards it. Pure. `first`: None if it is not
    known, and nothing is said then. A tensor on a device that was not read is never said to have begun again."""
    if first is None or was in (first, now) or now == ON_DEVICE:
        return False
    turned = type(first) is type(was) is type(now) is int and (now - was) * (was - first) < 0  # type: ignore[operator]
    return now == first or turned
