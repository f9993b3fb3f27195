"""What a Trainer and its callbacks keep in attributes as plain values: counters, sums, histories, and random number
generators.

Invariant: after `write(read())` every plain attribute that was there has its value again; one that was deleted since
the construction is back. Attributes of other kinds (models, writers, file handles) are left alone, and the largest
values where there are too many: they are observed (`begun_again`).

In: objects and classes by name. Out: encoded values by path, and back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ...snapshot.capture import codec
from ..data.data_parts import is_generator
from ..data.loader_values import assign, encoding
from ..data.loaders import set_state_of, state_of

LIMIT = 1 << 16  # bytes of a value
_TOGETHER = 4 * LIMIT  # of all of them
_GENERATOR = "__ft_generator__"


class PlainAttributes:
    """`owners` gives the present objects by name; `ours`: whether an attribute of such a name is captured elsewhere, or
    belongs to the library itself."""

    def __init__(self, owners: Callable[[], Mapping[str, Any]], ours: Callable[[str, str], bool]) -> None:
        self._owners, self._ours = owners, ours
        self._built: dict[str, bytes] = {}  # before training begins
        self._built = dict(self._changed())

    def read(self) -> dict[str, bytes]:
        """The encoded values that have changed since the construction, by path."""
        values = dict(self._changed())
        while sum(map(len, values.values())) > _TOGETHER:
            del values[max(values, key=lambda path: len(values[path]))]
        return values

    def _changed(self) -> Iterator[tuple[str, bytes]]:
        places = list(self._places())
        known = {id(one) for one in self._owners().values()} | {id(value) for _, value, captured in places if captured}
        for path, value, _ in places:
            elsewhere = id(value) in known and codec.plain_fields(value)  # as a TrainerState
            encoded = encoding(_plain(value), LIMIT) if not (callable(value) or elsewhere) else None
            if encoded is not None and encoded != self._built.get(path):
                yield path, encoded

    def write(self, values: Mapping[str, bytes]) -> None:
        """Set the captured values, and all others as they were at the construction; of an owner that is gone none."""
        owners = self._owners()
        for path, encoded in {**self._built, **values}.items():
            owner, _, name = path.rpartition(".")
            if owner not in owners:
                continue
            one = vars(owners[owner]).get(name)
            present = encoding(_plain(one), LIMIT)
            if present == encoded or (present is None and path not in values):  # an object by now
                continue
            value = codec.decode(encoded)
            if type(value) is tuple and value[:1] == (_GENERATOR,):
                value = _drawing_from(one, value[1])
            assign(owners[owner], name, value)

    def _places(self) -> Iterator[tuple[str, Any, bool]]:
        for owner, one in self._owners().items():
            for name, value in getattr(one, "__dict__", {}).items():
                ours, of_python = self._ours(owner, name), isinstance(one, type) and name.startswith("__")
                if not (of_python or ours and isinstance(value, torch.nn.Module)):
                    yield f"{owner}.{name}", value, ours


def _plain(value: Any) -> Any:
    """What of a value is encoded: of a random number generator its state."""
    if is_generator(value):
        return (_GENERATOR, state_of(value))
    elsewhere = type(value) is torch.Tensor and value.device.type != "cpu" and value.nbytes <= LIMIT
    return value.cpu() if elsewhere else value


def _drawing_from(present: Any, state: Any) -> Any:
    """The present generator, or one of the kind that has such a state, which draws from there."""
    made = present
    if not is_generator(present) or _kind_of(state_of(present)) != _kind_of(state):
        match state:
            case torch.Tensor():
                made = torch.Generator()
                if _kind_of(made.get_state()) != _kind_of(state):
                    made = torch.Generator("cuda")
            case dict():
                made = np.random.Generator(getattr(np.random, state["bit_generator"])())
            case _:
                made = np.random.RandomState() if isinstance(state[0], str) else random.Random()
    set_state_of(made, state)
    return made


def _kind_of(state: Any) -> Any:
    """What the states of one kind of generator have in common."""
    match state:
        case torch.Tensor():
            return state.nbytes  # of a CPU, or of a GPU
        case dict():
            return state["bit_generator"]
    return type(state[0])
