"""Values that samplers, data sets and transforms keep in attributes: captured if they change, or refused by name.

Invariant: after `put(changed())` every value that has changed since the start is again what it was. A value that
changed and cannot be captured (an object, a value that is too large) raises StateChangedError if a sampler has it,
because the order of the data would be another one; in a data set it may be a cache or an open file, so it is observed
alone (`begun_again`).

    value       of a type that the codec knows, and not large: compared and captured by its encoding
    any other   watched, if a sampler has it: by identity, length, torch's count of changes, a sample of its contents

Generators are captured by `loaders.generator_states`. What keeps a state of its own is left to it.

In: a loader. Out: encoded values by attribute path, and back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain, islice
from types import ModuleType
from typing import Any

import numpy as np
import torch
import xxhash

from ...errors import InventoryError, ResumeError, StateChangedError
from ...snapshot.capture import codec
from .data_parts import data_parts, is_generator, parts
from .loaders import is_stateful

GROWTH = 16 << 10  # bytes by which the values of a loader may grow
_SAMPLER_LIMIT, _DATA_LIMIT = 1 << 20, 1 << 16  # bytes of a value that is captured
_SAMPLE = 256  # elements of a watched value that are compared
_PLAIN = (int, float, bool, str, bytes, type(None))
_ITEM = 9  # bytes of an encoded number, at most
_REMEDY = (
    "make it where the loader is made, return it in get_state and take it back in set_state as a plain value, or draw "
    "it from a generator"
)


class LoaderValues:
    """The values of one loader's samplers and data. The first call of `changed` compares with the construction."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._encoded: dict[str, bytes] = {}
        self._marks: dict[str, Any] = {}
        self._known = {path for path, _ in self._owners()}  # objects that a restart has, too, when it is restored
        self._stateful = [path for path, part in data_parts(loader) if is_stateful(part)]
        for path, (owner, name) in self._places().items():
            value = vars(owner)[name]
            encoded = encoding(value, _limit(path))
            if encoded is None:
                self._marks[path] = mark_of(value) if _is_sampler(path) else None
            else:
                self._encoded[path] = encoded

    def size(self) -> int:
        """The bytes that the changed values may have."""
        return sum(map(len, self._encoded.values())) + GROWTH

    def changed(self) -> dict[str, bytes]:
        """The values that have changed, encoded. Raises StateChangedError for one of a sampler that cannot be."""
        changed: dict[str, bytes] = {}
        places = self._places()
        for path, (owner, name) in places.items():
            value = vars(owner)[name]
            if path in self._marks and _is_sampler(path) and mark_of(value) != self._marks[path]:
                self._refuse(path, value)
            if path in self._marks:
                continue
            encoded = encoding(value, _limit(path))
            if encoded is None:
                self._refuse(path, value)
            elif encoded != self._encoded.get(path):
                changed[path] = encoded
        settled = (*places, *self._marks, *self._stateful)  # captured or left as a whole, or in a state of its own
        for path in sorted(self._found.keys() - self._known):
            if vars(self._found[path]) and not path.startswith(settled):
                self._refuse(path, self._found[path], "was made later, but in no attribute: no version has it")
        while sum(map(len, changed.values())) > self.size():
            largest = max(changed, key=lambda path: len(changed[path]))
            self._refuse(largest, codec.decode(changed.pop(largest)))
        return changed

    def put(self, values: Mapping[str, bytes]) -> None:
        """Set the changed values; all others return to those of the construction."""
        wanted = {**self._encoded, **values}
        places = self._places()
        for path in wanted.keys() | places.keys():
            if path in self._marks:
                continue
            owner, name = places.get(path) or self._owner(path)
            if is_generator(vars(owner).get(name)):
                continue  # made later
            if path not in wanted:
                if encoding(vars(owner)[name], _limit(path)) is not None:
                    delattr(owner, name)  # set later
            elif path not in places or encoding(vars(owner)[name], _limit(path)) != wanted[path]:
                assign(owner, name, codec.decode(wanted[path]))

    def built(self) -> dict[str, int]:
        """Digests of the numbers with which samplers were constructed (a seed)."""
        return {
            path: xxhash.xxh32_intdigest(encoded)
            for path, encoded in self._encoded.items()
            if _is_sampler(path) and "epoch" not in path and isinstance(codec.decode(encoded), int | float)
        }

    def require_built(self, captured: Mapping[str, int]) -> None:
        """Raises ResumeError if samplers were constructed with other numbers than those of the captured job."""
        for path, digest in self.built().items():
            if captured.get(path, digest) != digest:
                raise ResumeError(
                    f"the loader's {path} is {codec.decode(self._encoded[path])!r}, but the captured job was started "
                    "with another value: build the sampler with the same arguments at every start"
                )

    def _places(self) -> dict[str, tuple[Any, str]]:
        """Owner and name of each attribute, by path; not those of objects that were made later."""
        self._found = dict(self._owners())
        owners = {path: owner for path, owner in self._found.items() if path in self._known}
        known = {id(owner) for owner in owners.values()}
        return {
            f"{path}{name}": (owner, name)
            for path, owner in owners.items()
            for name, value in vars(owner).items()
            if not is_generator(value) and id(value) not in known
        }

    def _owners(self) -> Iterator[tuple[str, Any]]:
        seen = {id(self._loader)}
        for path, part in (*parts(self._loader), *data_parts(self._loader)):
            known = not path or id(part) in seen or is_stateful(part)
            if not known and hasattr(part, "__dict__") and not isinstance(part, type | ModuleType):
                seen.add(id(part))
                yield path, part

    def _owner(self, path: str) -> tuple[Any, str]:
        before, _, name = path.rpartition(".")
        for owner_path, owner in self._owners():
            if owner_path == f"{before}.":
                return owner, name
        raise ResumeError(f"the captured loader has '{path}', this one has not: resume with the captured job's loader")

    def _refuse(
        self, path: str, value: Any, reason: str = "changes, but is not captured, being an object or too large"
    ) -> None:
        if _is_sampler(path):
            raise StateChangedError(
                f"the loader's {path.rstrip('.')} (a {type(value).__name__}) {reason}, so that the order of the data "
                f"would be another one after a restart: {_REMEDY}"
            )
        self._marks[path] = None  # of a data set: it is observed


def _is_sampler(path: str) -> bool:
    return path.startswith(("sampler.", "batch_sampler.", "data_sampler.", "loader."))


def _limit(path: str) -> int:
    return _SAMPLER_LIMIT if _is_sampler(path) else _DATA_LIMIT


def encoding(value: Any, limit: int) -> bytes | None:
    """`value` as the codec writes it; None if it cannot or if there are more than about `limit` bytes."""
    if _room_left(value, limit) < 0:
        return None
    try:
        return codec.encode(value)
    except InventoryError:
        return None


def _room_left(value: Any, room: int, depth: int = 8) -> int:
    """What is left of `room` bytes after `value`, negative if it does not fit or is unknown. Ends early."""
    match value:
        case None | bool() | int() | float():
            return room - _ITEM
        case str() | bytes():
            return room - len(value)
        case torch.Tensor():
            return room - value.nbytes if value.device.type == "cpu" and type(value) is torch.Tensor else -1
        case np.ndarray() | np.generic():
            return room - value.nbytes
        case list() | tuple() | deque() if depth and len(value) <= room:
            items: Iterable[Any] = value
        case dict() if depth and len(value) <= room:
            items = chain(value.keys(), value.values())
        case _ if depth and codec.plain_fields(value):
            items = vars(value).values()
        case _:
            return -1
    for item in items:
        room = room - _ITEM if type(item) is int else _room_left(item, room, depth - 1)
        if room < 0:
            break
    return room


def mark_of(value: Any) -> Any:
    """What changes if a large value or an object does, as far as can be determined cheaply."""
    match value:
        case torch.Tensor():
            return id(value), value._version, tuple(value.shape)
        case np.ndarray():
            return id(value), value.shape, value.flat[:: max(1, value.size // _SAMPLE)].tobytes()
        case list() | tuple() | dict() | deque() | set():
            return id(value), len(value), [_element(one) for one in _sample(value)]
        case torch.nn.Module() | ModuleType():
            return id(value)
    length = len(value) if hasattr(type(value), "__len__") and not isinstance(value, type) else 0
    numbers = getattr(value, "__dict__", {}).items()
    return id(value), length, {name: one for name, one in numbers if type(one) in (int, float, bool, str)}


def _sample(values: Collection[Any]) -> Iterable[Any]:
    if isinstance(values, list | tuple):
        return values[:: max(1, len(values) // _SAMPLE)]
    return islice(values.values() if isinstance(values, dict) else values, _SAMPLE)


def _element(value: Any) -> Any:
    return value if type(value) in (int, float, bool, str) else id(value)


def assign(owner: Any, name: str, value: Any) -> None:
    """Set an attribute, in place where others may refer to the present value."""
    present = vars(owner).get(name)
    match present, value:
        case list(), list():
            present[:] = value
        case dict(), dict():
            present.clear()
            present.update(value)
        case (deque(), deque()) if present.maxlen == value.maxlen:
            present.clear()
            present.extend(value)
        case _ if (
            type(present) is type(value) and codec.plain_fields(present) and not type(value).__dataclass_params__.frozen
        ):
            for each, one in vars(value).items():
                assign(present, each, one)
        case ((np.ndarray(), np.ndarray()) | (torch.Tensor(), torch.Tensor())) if (
            (present.shape, present.dtype) == (value.shape, value.dtype)
        ):
            present[...] = value
        case _:
            setattr(owner, name, value)
