"""Times that modules note in global variables when they are imported, such as the start of the program.

Invariant: a rank that was a standby worker finds the times that it would have noted as a new process. Else a limit on
the duration of training, which frameworks count from such a variable, would count the hours in which it only waited.

In: modules, and when their imports began and ended. Out: the variables that hold such a time; moved by how long the
process waited.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

_CLOCKS: tuple[Callable[[], float], ...] = (time.time, time.monotonic, time.perf_counter)
_COUNTED: tuple[tuple[Callable[[], float], int], ...] = ((time.time, 1), (time.time_ns, 10**9))  # units a second
_YOUNG = 1000.0  # seconds: a clock that shows less may be mistaken for a constant, as 45.5


@dataclass(frozen=True)
class NotedTime:
    """A variable in `names` that holds `value`, of a clock with so many units a second."""

    names: dict[str, Any]
    name: str
    value: float
    units: float

    def move(self, seconds: float) -> None:
        """Nothing is changed if it holds another value by now."""
        if self.names.get(self.name) is self.value:
            self.names[self.name] = self.value + type(self.value)(seconds * self.units)


class ImportTimes:
    """From its construction until `found` is called, modules are imported."""

    def __init__(self) -> None:
        self._began = [clock() for clock in _CLOCKS], [clock() for clock, _ in _COUNTED]
        self._ended = 0.0

    def found(self, modules: Iterable[Any]) -> list[NotedTime]:
        """What they have noted. A number without a fraction may be a constant, so it counts only as the time of day."""
        self._ended = time.monotonic()
        floats = list(zip(self._began[0], [clock() for clock in _CLOCKS], strict=True))
        counted = [
            (int(before), int(clock()), units)
            for before, (clock, units) in zip(self._began[1], _COUNTED, strict=True)
        ]  # fmt: skip
        noted = []
        for module in modules:
            if not isinstance(module, ModuleType):
                continue
            for name, value in list(vars(module).items()):
                if type(value) is float and not value.is_integer():
                    if any(_YOUNG < before <= value <= after for before, after in floats):
                        noted.append(NotedTime(vars(module), name, value, 1.0))
                elif type(value) is int:
                    noted += [
                        NotedTime(vars(module), name, value, units)
                        for before, after, units in counted
                        if before <= value <= after
                    ]
        return noted

    def waited(self) -> float:
        """Seconds since `found` was called."""
        return time.monotonic() - self._ended
