"""Digest what a model's forwards read in training, for the ledger.

A tensor above SAMPLED bytes is digested by a sample: its first elements, and others at equal distances; of a container
the first MANY parts are read. What lies on a device is left out: reading it would wait for the device.

Invariant: hooks change nothing, and raise nothing. A forward within another one is a part of it; forwards without
gradients are evaluations, and are not read. A forward that torch.compile traces is not seen.

In: modules. Out: `Observer.read` for each forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
import xxhash

from ...model.observation import Observer
from ..forward_edges import Hook, with_hooks

SAMPLED = 64 << 10  # bytes
MANY = 256  # parts of a container
_SAMPLES = 2048  # elements
_FIRST = 4096  # bytes
_PARAMETERS, _ELEMENTS = 16, 256  # of a sample of gradients
_DEPTH = 6  # of nested containers


class ObservedForwards:
    """The forwards of some modules of one model, read by `observer`."""

    def __init__(self, modules: Iterable[torch.nn.Module], observer: Observer) -> None:
        self._observer = observer
        self._inside: object | None = None  # the module whose forward runs
        for module in with_hooks(modules):
            module.register_forward_pre_hook(Hook(self.enter), with_kwargs=True)
            module.register_forward_hook(Hook(self.leave))

    def enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        nested = self._inside is not None and self._inside is not module  # of the same one the last forward has raised
        if nested or not torch.is_grad_enabled() or not module.training:
            return
        self._inside = module
        try:
            digest = digest_of_inputs((args, kwargs))
        except Exception:  # inputs that have no bytes: of functorch's transforms, fake or nested tensors
            return
        if digest is not None:
            self._observer.read(digest)

    def leave(self, module: torch.nn.Module, *call: Any) -> None:
        if self._inside is module:
            self._inside = None


def digest_of_inputs(inputs: Any) -> int | None:
    """A digest of all tensors, arrays and numbers in `inputs`; None if there is none on the CPU."""
    running = xxhash.xxh3_64()
    known = _update(running, inputs, _DEPTH)
    return running.intdigest() if known else None


def _update(running: Any, value: Any, depth: int) -> bool:
    match value:
        case torch.Tensor():
            local = getattr(value, "_local_tensor", value).detach()
            if local.device.type != "cpu" or not local.numel() or local.layout is not torch.strided:
                return False
            running.update(f"{local.dtype}{tuple(local.shape)}".encode())
            running.update(_sample(local))
            return True
        case np.ndarray() if value.dtype.kind in "biuf":
            return _update(running, torch.from_numpy(np.ascontiguousarray(value)), depth)
        case bool() | int() | float():
            running.update(repr(value).encode())
            return False  # by themselves they are no batch
        case Mapping() if depth:
            known = [
                _update(running, part, depth - 1)
                for _, part in islice(sorted(value.items(), key=lambda entry: str(entry[0])), MANY)
            ]
            return any(known)
        case list() | tuple() if depth:
            known = [_update(running, part, depth - 1) for part in value[:MANY]]
            return any(known)
    return False


def digest_of_gradients(used: Iterable[torch.nn.Parameter]) -> int | None:
    """A digest of a sample of the gradients that a step uses: elements at equal distances of parameters at equal
    distances. None if none is on the CPU."""
    parameters = [one for one in used if one.grad is not None]
    running, known = xxhash.xxh3_64(), False
    for one in parameters[:: max(1, len(parameters) // _PARAMETERS)]:
        gradient = getattr(one.grad, "_local_tensor", one.grad)
        if gradient is None or gradient.device.type != "cpu" or not gradient.is_contiguous() or not gradient.numel():
            continue
        flat = gradient.detach().view(-1)
        running.update(flat[:: max(1, flat.numel() // _ELEMENTS)].contiguous().view(torch.uint8).numpy().tobytes())
        known = True
    return running.intdigest() if known else None


def plain_number(value: Any) -> float | None:
    """A number that is on the CPU already; None for any other value."""
    match value:
        case torch.Tensor() if value.numel() == 1 and value.device.type == "cpu":
            return float(value.detach())
        case int() | float():
            return float(value)
    return None


def _sample(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor on the CPU, or a sample of them."""
    size = tensor.element_size()
    if tensor.numel() * size > SAMPLED:
        if tensor.is_contiguous():
            flat = tensor.view(-1)
            tensor = torch.cat([flat[: _FIRST // size], flat[:: max(1, flat.numel() // _SAMPLES)]])
        else:  # flattening would copy all of it
            places = torch.linspace(0, tensor.numel() - 1, 2 * _SAMPLES, dtype=torch.float64).long()
            tensor = tensor[torch.unravel_index(places, tensor.shape)]
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
