"""Whether the `state_dict` of somebody else's object can be believed: it moves when the object does, and comes back.

Invariant: the live object is only read. What its `load_state_dict` does is seen in a twin, which has the values of an
earlier version point and is handed the present state; that is done for objects whose attributes are plain values,
functions and optimizers (stubs of them), of which nothing else could be changed.

In: an object, at version points. Out: what is wrong with it, once. Whether training depends on that, a proof shows.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from ..snapshot.capture import codec
from .data.loaders import generator_states, set_generator_states

Values = dict[str, bytes]  # plain ones, encoded, by name

_LOOKS = 8  # version points: what has not moved by then may move once an epoch
_MOST = 1024  # parts of a container
_PLAIN = (bool, int, float, str, bytes, type(None))
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type)


class BelievedState:
    """Looks at one object from its first version point on."""

    def __init__(self, source: Any, name: str, say: Callable[[str], object]) -> None:
        """`name` and `say` are for what is wrong."""
        self.source, self._name, self._say = source, name, say
        self._before: tuple[bytes, Values, int] | None = None  # state, values and reads
        self._at = self._looks = 0  # the iteration of these; version points

    @property
    def over(self) -> bool:
        """Whether nothing more is looked at."""
        return self._looks >= _LOOKS

    def look(self, iteration: int, state: Any, read: int = 0) -> None:
        """At the version point of an iteration, with the object's `state_dict()`; `read`: batches it has given."""
        if self.over or iteration == self._at:
            return
        with suppress(Exception):  # of any class
            self._look(iteration, state, read)

    def _look(self, iteration: int, state: Any, read: int) -> None:
        now, before = (codec.encode({"": state}), _plain_values(self.source), read), self._before
        self._before, self._at, self._looks = now, iteration, self._looks + 1
        if before is None or now[1:] == before[1:]:
            return
        self._looks, self._before = _LOOKS, None
        if problem := "stands still while it moves" if now[0] == before[0] else self._comes_back(before[1], now, state):
            self._say(
                f"iteration {iteration}: the state_dict of the {self._name} ({type(self.source).__name__}) {problem}, "
                "so that a restart may not continue it: keep the rest in get_state and set_state"
            )

    def _comes_back(self, before: Values, now: tuple[bytes, Values, int], state: Any) -> str:
        """What a twin that was `before`, and is handed the present state, lacks; '' for nothing, or if none is made."""
        others = {name: one for name, one in vars(self.source).items() if name not in now[1]}
        stubs = {
            name: _Stub(one.param_groups) for name, one in others.items() if isinstance(one, torch.optim.Optimizer)
        }
        if not all(name in stubs or isinstance(one, _FUNCTIONS) for name, one in others.items()):
            return ""
        twin, generators = object.__new__(type(self.source)), generator_states()
        twin.__dict__.update({**others, **stubs, **{name: codec.decode(one)[""] for name, one in before.items()}})
        try:
            twin.load_state_dict(copy.deepcopy(state))
            again, has = codec.encode({"": twin.state_dict()}), _plain_values(twin)
        finally:
            set_generator_states(generators)
        if again != now[0]:
            return "is not what it was after its load_state_dict"
        lost = sorted(name for name, one in now[1].items() if before.get(name) != one and has.get(name) != one)
        return f"lacks {', '.join(map(repr, lost))}, which changes" if lost else ""


class _Stub:
    """In place of an optimizer whose groups a twin may set."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        own = ({key: value for key, value in group.items() if key != "params"} for group in groups)
        self.param_groups = [{**copy.deepcopy(group), "params": []} for group in own]


def _plain_values(source: Any) -> Values:
    values = getattr(source, "__dict__", {})
    return {name: codec.encode({"": value}) for name, value in values.items() if _is_plain(value)}


def _is_plain(value: Any, depth: int = 3) -> bool:
    if type(value) in (list, tuple, dict) and depth:
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        return len(parts) <= _MOST and all(_is_plain(part, depth - 1) for part in parts)
    return type(value) in _PLAIN
