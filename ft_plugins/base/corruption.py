"""Inject silent corruption: alter tensors at fault points (`faults`). Off unless armed.

    reduce.gradients    a rank's own gradients, before their reduction
    update.gradients    gradients after their reduction, each rank's own copy
    update.parameters   parameters and optimizer state after the update
    update.copies       after the update, the working copies: parameters cast or gathered from masters

Actions of a fault, each optionally followed by `~SEED`:

    gauss=S    add noise of standard deviation S to every coordinate (papers often quote the variance, S squared)
    flip       flip one bit of one coordinate; flip=30 names the bit, from 0, the lowest
    nan        set one coordinate to NaN
    stuck      record the values at the first strike, which changes nothing, and write them back at every later one

The actions of `faults` itself (kill, stop, exit, raise) are refused at these points: use another point for them.

`update.gradients@iteration%500=0:gauss=1;update.gradients:gauss=0.01` is noise with a burst every 500 iterations: of
several faults at a point the first that applies acts.

Invariant: a repeated run repeats the corruption, and no two ranks get the same noise. Noise is determined by seed,
rank, iteration and name and shape of the tensor, but not by the point: two points get the same noise in the same
iteration, unless their seeds differ. A single coordinate is determined by seed, rank, iteration and point, and by the
names and sizes of all tensors. `stuck` depends on its first strike.

In: tensors by name. Out: the same tensors, altered in place, and a `Strike` that describes the change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import xxhash

from ..errors import ConfigError
from . import faults

POINTS = ("reduce.gradients", "update.gradients", "update.parameters", "update.copies")
_ACTION = re.compile(r"(?:gauss=(?P<sigma>[^~]+)|flip(?:=(?P<bit>\d+))?|nan|stuck)(?:~(?P<seed>\d+))?")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a coordinate


@dataclass(frozen=True)
class Action:
    """A parsed action."""

    kind: str
    sigma: float = 0.0
    bit: int | None = None
    seed: int = 0

    @classmethod
    def read(cls, text: str) -> Action:
        """Parse an action. Raises ConfigError for one that is not listed above."""
        match = _ACTION.fullmatch(text)
        try:
            if match is None:
                raise ValueError
            sigma = float(match["sigma"] or 0.0)
        except ValueError:
            expected = "gauss=SIGMA, flip, flip=BIT, nan or stuck, with or without ~SEED after it"
            raise ConfigError(f"fault '{text}': expected {expected}") from None
        bit = match["bit"]
        kind = re.split("[=~]", text)[0]
        return cls(kind, sigma, None if bit is None else int(bit), int(match["seed"] or 0))


@dataclass(frozen=True)
class Strike:
    """What was altered. After `flip` and `nan`, `item` is the name of the altered tensor and `index` that of the
    coordinate in it, in memory order; after `flip`, `bit` is the altered bit. Where a field does not apply, it has its
    default."""

    point: str
    action: str
    item: str = ""
    index: int = -1
    bit: int = -1


class Corruption:
    """The corruption of one rank. Keeps the values of the first strike of `stuck`."""

    def __init__(self, rank: int) -> None:
        """Raises ConfigError if an armed fault at one of `POINTS` has an unknown action."""
        self._rank = rank
        self._stuck: dict[str, dict[str, torch.Tensor]] = {}
        for point in POINTS:
            for fault in faults.armed(point):
                Action.read(fault.action)

    def armed(self, point: str) -> bool:
        """Whether a fault is armed at `point`; one look-up."""
        return bool(faults.armed(point))

    def strike(self, point: str, iteration: int, tensors: Mapping[str, torch.Tensor]) -> Strike | None:
        """Alter the floating-point ones of `tensors` if a fault at `point` applies. Returns a description of the
        strike, also for the first one of `stuck`, which alters nothing; None if no fault applies or no floating-point
        tensor has elements. Raises ConfigError for a bit that the dtype does not have."""
        text = faults.reach(point, iteration=iteration, rank=self._rank)
        if text is None:
            return None
        action = Action.read(text)
        floats = {name: tensors[name] for name in sorted(tensors) if tensors[name].is_floating_point()}
        floats = {name: tensor.detach() for name, tensor in floats.items() if tensor.numel()}
        if not floats:
            return None
        match action.kind:
            case "gauss":
                for name, tensor in floats.items():
                    noise = torch.randn(tensor.shape, generator=self._random(action.seed, iteration, name))
                    tensor.add_(noise.to(tensor.device, tensor.dtype), alpha=action.sigma)
                return Strike(point, text)
            case "stuck":
                first = self._stuck.setdefault(point, {})
                for name, tensor in floats.items():
                    if name in first:
                        tensor.copy_(first[name])
                    else:  # also at a later strike: DeepSpeed leaves out gradients that are None, so names can be new
                        first[name] = tensor.clone()
                return Strike(point, text)
        random = self._random(action.seed, iteration, point)
        sizes = torch.tensor([tensor.numel() for tensor in floats.values()])
        at = int(torch.randint(int(sizes.sum()), (1,), generator=random))
        chosen = int((sizes.cumsum(0) <= at).sum())
        name = list(floats)[chosen]
        index = at - int(sizes[:chosen].sum())
        if action.kind == "nan":
            _memory(floats[name])[index] = torch.nan
            return Strike(point, text, name, index)
        width = floats[name].element_size()
        bit = int(torch.randint(8 * width, (1,), generator=random)) if action.bit is None else action.bit
        if bit >= 8 * width:
            raise ConfigError(f"fault '{text}': item '{name}' has {8 * width} bits per coordinate, from 0")
        integers = _memory(floats[name]).view(_INTEGERS[width])
        mask = (1 << bit) - (1 << 8 * width if width > 1 and bit == 8 * width - 1 else 0)  # as a signed number
        integers[index] = integers[index] ^ mask
        return Strike(point, text, name, index, bit)

    def _random(self, seed: int, iteration: int, name: str) -> torch.Generator:
        generator = torch.Generator()
        generator.manual_seed(xxhash.xxh3_64_intdigest(repr((seed, self._rank, iteration, name)).encode()) >> 1)
        return generator


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """The coordinates of a dense tensor in memory order."""
    return torch.as_strided(tensor, (tensor.numel(),), (1,))
