"""Whether the `state_dict` of somebody else's object can be believed: it moves when the object does, and comes back.

Invariant: the live object is only read. What its `load_state_dict` does is seen in a twin, which has the values of an
earlier version point and is handed the present state; that is done for objects whose attributes are plain values,
functions and optimizers, of which nothing else could be changed.

In: an object, at version points. Out: what is wrong with it, once. Whether training depends on that, a proof shows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from ..errors import InventoryError
from ..snapshot.capture import codec

_LOOKS = 8  # version points: what has not moved by then may move once an epoch
_PLAIN = (bool, int, float, str, bytes, type(None))


class BelievedState:
    """Looks at one object from its first version point on."""

    def __init__(self, source: Any, name: str, say: Callable[[str], object]) -> None:
        """`name` and `say` are for what is wrong."""
        self.source, self._name, self._say = source, name, say
        self._before: tuple[bytes, dict[str, Any], int] | None = None  # state, values and reads
        self._at = self._looks = 0  # the iteration of these; version points

    def look(self, iteration: int, state: Any, read: int = 0) -> None:
        """At the version point of an iteration, with the object's `state_dict()`; `read`: batches it has given."""
        if iteration == self._at or self._looks == _LOOKS or (encoded := _encoded(state)) is None:
            return
        now, before = (encoded, _plain_values(self.source), read), self._before
        self._before, self._at, self._looks = now, iteration, self._looks + 1
        if before is None or now[1:] == before[1:]:
            return
        self._looks = _LOOKS
        if problem := "stands still while it moves" if now[0] == before[0] else self._comes_back(before[1], now, state):
            self._say(
                f"iteration {iteration}: the state_dict of the {self._name} ({type(self.source).__name__}) {problem}, "
                "so that a restart may not continue it: keep the rest in get_state and set_state"
            )

    def _comes_back(self, before: dict[str, Any], now: tuple[bytes, dict[str, Any], int], state: Any) -> str:
        """What a twin that was `before`, and is handed the present state, lacks; '' for nothing, or if none is made."""
        kind, values = type(self.source), getattr(self.source, "__dict__", {})
        others = [one for name, one in values.items() if name not in now[1]]
        if not all(callable(one) or isinstance(one, torch.optim.Optimizer) for one in others):
            return ""
        twin = object.__new__(kind)
        twin.__dict__.update({**values, **copy.deepcopy(before)})
        with suppress(Exception):  # of any class
            twin.load_state_dict(copy.deepcopy(state))
            if _encoded(twin.state_dict()) != now[0]:
                return "is not what it was after its load_state_dict"
            has = _plain_values(twin)
            lost = sorted(name for name, one in now[1].items() if before.get(name) != one and has.get(name) != one)
            return f"lacks {', '.join(map(repr, lost))}, which changes" if lost else ""
        return ""


def _encoded(state: Any) -> bytes | None:
    with suppress(InventoryError):
        return codec.encode({"state": state})
    return None


def _plain_values(source: Any) -> dict[str, Any]:
    values = getattr(source, "__dict__", {})
    return {name: copy.deepcopy(value) for name, value in values.items() if _is_plain(value)}


def _is_plain(value: Any, depth: int = 3) -> bool:
    if isinstance(value, list | tuple | dict) and depth:
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        return len(parts) <= 1024 and all(_is_plain(part, depth - 1) for part in parts)
    return type(value) in _PLAIN
