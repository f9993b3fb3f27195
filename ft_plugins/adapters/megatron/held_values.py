"""Name what modules keep besides tensors, and training changes, where versions have none of it.

    attributes   plain values, small objects, random number generators, functions and classes; of the script's modules
    hooks        of modules, of parameters' gradients and of optimizers; none of a library
    modes        which parameters require gradients, which modules are in training mode

Version points 1, 2, 4 and so on to 64 are examined, then each 64th: a later change is found later. Left out: what
objects of known packages keep, such as Megatron's configuration with its timers, and whole numbers in other objects.

Invariant: nothing is kept of what was read but text, and no error of reading gets out: this is advice.

In: the chunks of a model at version points. Out: paths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from ...events import say
from ..held_tensors import is_known, joined
from ..module_parts import ModuleParts
from .state import unwrapped

_EVERY = 64  # version points


class HeldValues:
    """Of one model, in `chunks`, with its `optimizers`."""

    def __init__(self, chunks: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._chunks, self._optimizers = tuple(chunks), tuple(optimizers)
        self._points = 0
        self._first: Mapping[str, str] = {}  # at the first version point
        self._said: set[str] = set()
        self._unread = False

    def report(self, iteration: int) -> None:
        """Say once what is not what it was at the first version point."""
        self._points += 1
        if self._points % _EVERY and self._points & (self._points - 1):
            return
        try:
            now = dict(self._read())
        except Exception as error:  # classes of the script may do as they like
            if not self._unread:
                say(f"what modules keep besides tensors is not compared: {type(error).__name__}: {error}")
            self._unread = True
            return
        first = self._first = self._first or now
        found = [path for path in {**first, **now} if first.get(path) != now.get(path) and path not in self._said]
        self._said.update(found)
        if found:
            say(
                f"iteration {iteration}: training changes what modules keep besides tensors: "
                f"{joined(map(repr, found))}: no version has it; if training depends on it, set it by the iteration, "
                "in each iteration"
            )

    def _read(self) -> Iterator[tuple[str, str]]:
        for at, chunk in enumerate(self._chunks):
            parts = ModuleParts(chunk, () if at else self._optimizers)
            found = parts.read()
            for name, module in parts.modules:
                path = f"chunk{at}.{unwrapped(f'{name}.' if name else '')}"
                yield f"{path}training", str(module.training)
                for key, one in module._parameters.items():
                    if one is not None:
                        yield f"{path}{key}.requires_grad", str(one.requires_grad)
                own, known = vars(module), is_known(type(module))
                for key, value in {**found[name].values, **found[name].shape}.items():
                    attribute = own.get(key.partition(".")[0].partition("[")[0])
                    if "_hooks" in key or not (known or is_known(type(attribute))):
                        yield f"{path}{key}", repr(value)
