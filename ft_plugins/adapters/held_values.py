"""Name what modules keep besides tensors, and training changes, where versions have none of it.

    attributes   plain values, small objects, random number generators; functions and classes; hooks
    modes        which parameters require gradients, which modules are in training mode

Attributes of Megatron's and Transformer Engine's own modules are left out: these change them in each iteration. Version
points 1, 2, 4, 8 and so on are examined: a later change is found later.

In: the chunks of a model at version points. Out: paths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..events import say
from .held_tensors import KNOWN, SHOWN
from .module_parts import ModuleParts


class HeldValues:
    """Of one model, in `chunks`. `unwrapped`: the path of a module without its wrappers."""

    def __init__(self, chunks: Sequence[torch.nn.Module], unwrapped: Callable[[str], str]) -> None:
        self._parts, self._unwrapped = [*map(ModuleParts, chunks)], unwrapped
        self._points = 0
        self._first: Mapping[str, Any] = {}  # at the first version point
        self._said: set[str] = set()

    def report(self, iteration: int) -> None:
        """Say once what is not what it was at the first version point."""
        self._points += 1
        if self._points & (self._points - 1):
            return
        now = dict(self._read())
        first = self._first = self._first or now
        found = [path for path in {**first, **now} if first.get(path) != now.get(path) and path not in self._said]
        self._said.update(found)
        if found:
            more = f" (and {len(found) - SHOWN} more)" if len(found) > SHOWN else ""
            say(
                f"iteration {iteration}: training changes what modules keep besides tensors: "
                f"{'; '.join(map(repr, found[:SHOWN]))}{more}: no version has it; if training depends on it, set it by "
                "the iteration, in each iteration"
            )

    def _read(self) -> Iterator[tuple[str, Any]]:
        for at, parts in enumerate(self._parts):
            found = parts.read()
            for name, module in parts.modules:
                path = f"chunk{at}.{self._unwrapped(f'{name}.' if name else '')}"
                yield f"{path}training", module.training
                for key, one in module._parameters.items():
                    if one is not None:
                        yield f"{path}{key}.requires_grad", one.requires_grad
                if not f"{type(module).__module__}.".startswith(KNOWN):
                    for key, value in {**found[name].values, **found[name].shape}.items():
                        yield f"{path}{key}", value
