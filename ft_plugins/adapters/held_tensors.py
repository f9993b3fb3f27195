"""Find the tensors of modules that no version has, and that training changes.

They are outside of parameters and buffers: a memory of earlier batches, an average, a teacher hidden in a list. Or they
are in buffers that were made after the host was built. A table that is made once is a tensor, too, so only those that
another one has replaced, or that were changed in place, are found. Only version points 1, 2, 4, 8 and so on are
examined: a later change is found later.

Followed: containers and objects, as in `held_objects`, and modules in them. Left out: modules of packages whose state
is known, objects of libraries, views of parameters and buffers, and what the optimizers update. Nothing of the script
is called.

In: modules at version points. Out: paths.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from ..events import say
from ..snapshot.capture.copiers import is_dense
from .held_objects import is_followed, read_parts, text_of
from .host_parts import local_part
from .module_parts import parts_of
from .script.loop_values import is_a

_DEPTH, _MOST, _MOST_IN_ALL = 4, 4096, 1 << 16  # levels below an attribute; values in it; in all of them
_SAMPLE = 64  # elements of a tensor that are read
# packages whose modules' state is known
_KNOWN = ("deepspeed.", "megatron.", "torch.nn.parallel.", "transformer_engine.")
_SHOWN = 8  # in a message
_OWN = frozenset(("_parameters", "_buffers", "_modules"))


class HeldTensors:
    """Of one model."""

    def __init__(self) -> None:
        self._points = 0
        self._seen: dict[str, tuple[weakref.ref[torch.Tensor], str]] = {}  # by path: a tensor, and what it has
        self._said: set[str] = set()

    def report(
        self, iteration: int, modules: Iterable[tuple[str, torch.nn.Module]],
        optimizers: Iterable[torch.optim.Optimizer], items: Callable[[], Collection[str]] | None = None,
    ) -> None:  # fmt: skip
        """Say once what has `changed`."""
        new = [one for one in self.changed(modules, optimizers, items) if one not in self._said]
        self._said.update(new)
        if new:
            say(
                f"iteration {iteration}: training changes tensors that modules keep outside their parameters and "
                f"buffers, or in buffers that were made later: {joined(map(repr, new))}: no version "
                "has them; if training depends on what an iteration leaves there, make it a buffer (register_buffer) "
                "when the model is built"
            )

    def changed(
        self, modules: Iterable[tuple[str, torch.nn.Module]], optimizers: Iterable[torch.optim.Optimizer],
        items: Callable[[], Collection[str]] | None = None,
    ) -> list[str]:  # fmt: skip
        """At a version point: the paths of those that were replaced or changed since the last examined one. `items`:
        gives the paths of buffers that versions have; None: all. Nothing is looked at where none is examined."""
        self._points += 1
        if self._points & (self._points - 1):
            return []
        modules, captured = list(modules), None if items is None else items()
        known = {id(one) for each in optimizers for group in each.param_groups for one in group["params"]}
        late, own = list[tuple[str, torch.Tensor]](), list[torch.Tensor]()
        for name, part in modules:
            for key, one in _own_tensors(part):
                path = f"{name}.{key}".lstrip(".")
                if captured is None or path in captured or key in part._parameters:
                    own.append(one)
                else:
                    late.append((path, one))
        storages = {_storage(one) for one in own} - {0}
        seen, self._seen = self._seen, {}
        changed = []
        for path, tensor in (*late, *_tensors_of(modules)):
            if id(tensor) not in known and _storage(tensor) not in storages:
                known.add(id(tensor))
                now = self._seen[path] = weakref.ref(tensor), _contents(tensor)
                before = seen.get(path, now)
                if before[0]() is not tensor or before[1] != now[1]:
                    changed.append(path)
        return changed


def is_known(kind: type) -> bool:
    """Whether a class, or what FSDP has made one of, is of a package whose modules' state is known."""
    made_of = next(one for one in kind.__mro__ if not one.__module__.startswith("torch.distributed."))
    return f"{made_of.__module__}.".startswith(_KNOWN)


def joined(words: Iterable[str]) -> str:
    """The first of them, for a message."""
    found = list(words)
    more = f" (and {len(found) - _SHOWN} more)" if len(found) > _SHOWN else ""
    return "; ".join(found[:_SHOWN]) + more


def _own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for own in (module._parameters, module._buffers):
        yield from ((name, one) for name, one in own.items() if one is not None)


def _storage(tensor: torch.Tensor) -> int:
    """0 for one without memory."""
    with suppress(Exception):  # a tensor of another layout, or of a class of its own
        return local_part(tensor).untyped_storage().data_ptr()
    return 0


def _contents(tensor: torch.Tensor) -> str:
    """Its version and a sample: changes through `.data` are not counted. Of a DTensor the local part: no collective."""
    with suppress(Exception):
        local = local_part(tensor).detach()
        version = 0 if tensor.is_inference() else tensor._version
        if not local.is_contiguous():  # as it lies in memory, if it fills its place there
            local = local.as_strided((local.numel() if is_dense(local) else 0,), (1,))
        return f"{version} {local.view(-1)[:: -(-local.numel() // _SAMPLE) or 1].tolist()}"
    return ""


def _tensors_of(modules: Sequence[tuple[str, torch.nn.Module]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in attributes of modules, by path; each object is read once."""
    met, left = set[int](), _MOST_IN_ALL
    for name, module in modules:
        own = [] if is_known(type(module)) else [*vars(module).items()]
        for key, attribute in own:
            derived = {f"{key}_g", f"{key}_orig"} & module._parameters.keys()  # by torch, in each forward
            pending = deque([] if key in _OWN or derived else [(f"{name}.{key}".lstrip("."), attribute, _DEPTH)])
            most = min(_MOST, left)
            while pending:
                path, one, depth = pending.popleft()
                if is_a(one, torch.Tensor):
                    yield path, one
                elif id(one) not in met:
                    met.add(id(one))
                    with suppress(Exception):  # classes of the script may do as they like
                        parts = _parts_of(one, depth)[:most]
                        most, left = most - len(parts), left - len(parts)
                        pending += [(path + label, each, depth - 1) for label, each in parts]


def _parts_of(one: Any, depth: int) -> list[tuple[str, Any]]:
    if is_a(one, torch.nn.Module):  # hidden from the model, or a part of it, whose storages are known
        prefixed = ((f".{name}." if name else ".", part) for name, part in parts_of(one))
        return [(prefix + of, each) for prefix, part in prefixed for of, each in _own_tensors(part)]
    if not depth or not is_followed(one):
        return []
    keys, values, own = read_parts(one)
    labels = (
        f".{of}" if at < own else f"[{at if (text := text_of(of)) is None else text}]" for at, of in enumerate(keys)
    )
    return [*zip(labels, values, strict=True)]
