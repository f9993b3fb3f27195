"""How long each layer of a model computes and communicates: what schedules of layers are planned from. Pure, but for
reading the file.

A profile is of one rank: under pipeline parallelism, of the layers of its stage. Layers are in the order of the
forward; the backward runs through them in reverse. `communication` is the time in which one layer is averaged over all
replicas, next to a backward as in the job, while no other layer is being averaged. Plain reduction of gradients is
assumed to take the same time, because it moves the same bytes.

As a file, for `ft-plugins plan sync FILE`:

    {"version": 1, "replicas": 8, "layers": [{
        "name": "h.0", "forward_seconds": 0.01, "backward_seconds": 0.02, "communication_seconds": 0.03, "bytes": 4096
    }, ...]}

`replicas`: ranks in the group that averages a layer. `bytes`: what one rank holds of a layer's parameters, in the dtype
in which they are averaged. Unknown keys are refused.

Times are measured in seconds and planned with in whole nanoseconds: sums are exact, so all ranks derive the same
schedule from the same profile, and equal costs are equal.

Invariant: a profile has at least one layer; all its numbers are finite, not negative and bounded (sums of all layers
fit into 64 bits); names are unique.

In: measured times, or a file. Out: `LayerProfile`. Raises ConfigError."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from ...base import files
from ...base.intake import Count, Text, read_json, shown
from ...errors import ConfigError

VERSION = 1
MOST_LAYERS = 4096
MOST_SECONDS = 1e4  # of one layer
NANO = 1e9  # nanoseconds of a second


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one layer, and the bytes that are averaged."""

    name: str
    forward: float
    backward: float
    communication: float
    nbytes: int = 0


@dataclass(frozen=True)
class LayerProfile:
    """The layers of one rank in the order of the forward, averaged over `replicas` ranks. Raises ConfigError."""

    layers: tuple[LayerTimes, ...]
    replicas: int

    def __post_init__(self) -> None:
        if not 1 <= len(self.layers) <= MOST_LAYERS:
            raise ConfigError(
                f"profile of layers: expected 1 to {MOST_LAYERS} layers, found {len(self.layers)}; profile a model "
                "whose layers can be found"
            )
        if self.replicas < 2:
            raise ConfigError(
                f"profile of layers: expected at least 2 replicas, found {self.replicas}: there is nothing to average"
            )
        names: set[str] = set()
        for number, layer in enumerate(self.layers):
            where = f"profile of layers: layer {number} ({shown(layer.name)})"
            if layer.name in names:
                raise ConfigError(f"{where}: the name of an earlier layer; give each layer its own name")
            names.add(layer.name)
            for key in ("forward", "backward", "communication"):
                value = getattr(layer, key)
                if not (math.isfinite(value) and 0 <= value <= MOST_SECONDS):
                    raise ConfigError(
                        f"{where}: {key}: expected 0 to {MOST_SECONDS:g} seconds, found {shown(value)}; profile again"
                    )
            if layer.nbytes < 0:
                raise ConfigError(f"{where}: expected bytes of at least 0, found {layer.nbytes}; profile again")

    def __len__(self) -> int:
        return len(self.layers)

    @cached_property
    def forwards_ns(self) -> tuple[int, ...]:
        """By layer, nanoseconds of its forward."""
        return tuple(_ns(layer.forward) for layer in self.layers)

    @cached_property
    def forward_ns(self) -> int:
        return sum(self.forwards_ns)

    @cached_property
    def backward_ends_ns(self) -> tuple[int, ...]:
        """By layer, nanoseconds from the begin of an iteration until its backward ends."""
        ends = accumulate((_ns(layer.backward) for layer in reversed(self.layers)), initial=self.forward_ns)
        return tuple(ends)[:0:-1]

    @cached_property
    def communication_ns(self) -> tuple[int, ...]:
        """By layer, nanoseconds of its averaging."""
        return tuple(_ns(layer.communication) for layer in self.layers)

    @property
    def compute_ns(self) -> int:
        return self.backward_ends_ns[0]

    def at_link(self, bytes_per_second: float) -> LayerProfile:
        """The same layers on another link, on which a ring of all replicas averages b bytes in
        2 (replicas - 1) / replicas b / bytes_per_second. Latency is left out. Raises ConfigError."""
        if not (math.isfinite(bytes_per_second) and bytes_per_second > 0):
            raise ConfigError(f"expected a link of more than 0 bytes per second, found {shown(bytes_per_second)}")
        if not any(layer.nbytes for layer in self.layers):
            raise ConfigError("profile of layers: no layer has bytes, so their time on another link is unknown")
        rounds = 2 * (self.replicas - 1) / self.replicas
        longest = rounds * max(layer.nbytes for layer in self.layers) / bytes_per_second
        if longest > MOST_SECONDS:
            raise ConfigError(
                f"a link of {bytes_per_second:g} bytes per second: the largest layer would take {longest:.3g} s, more "
                f"than {MOST_SECONDS:g}; name a faster link"
            )
        layers = [replace(layer, communication=rounds * layer.nbytes / bytes_per_second) for layer in self.layers]
        return LayerProfile(tuple(layers), self.replicas)

    def require_names(self, names: Sequence[str]) -> None:
        """Raises ConfigError unless this is a profile of the model whose layers have these names."""
        own = [layer.name for layer in self.layers]
        if own != list(names):
            at = next((i for i, pair in enumerate(zip(own, names, strict=False)) if pair[0] != pair[1]), None)
            found = f"{len(own)} layers" if at is None else f"{shown(own[at])} as layer {at}"
            expected = f"{len(names)} layers" if at is None else shown(names[at])
            raise ConfigError(f"profile of another model: expected {expected}, found {found}; profile this model")

    def block(self) -> dict[str, Any]:
        layers = [
            {
                "name": layer.name,
                "forward_seconds": layer.forward,
                "backward_seconds": layer.backward,
                "communication_seconds": layer.communication,
                "bytes": layer.nbytes,
            }
            for layer in self.layers
        ]
        return {"version": VERSION, "replicas": self.replicas, "layers": layers}


_LayerSeconds = Annotated[float, Field(strict=True, ge=0, le=MOST_SECONDS, allow_inf_nan=False)]


@dataclass(frozen=True)
class _LayerEntry:
    """A layer of the file."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: Text
    forward_seconds: _LayerSeconds
    backward_seconds: _LayerSeconds
    communication_seconds: _LayerSeconds
    bytes: Count


@dataclass(frozen=True)
class _ProfileFile:
    """The file."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    version: Literal[1]
    replicas: Annotated[int, Field(strict=True, ge=2, lt=1 << 31)]
    layers: Annotated[list[_LayerEntry], Field(min_length=1, max_length=MOST_LAYERS)]


_FILE = TypeAdapter(_ProfileFile)


def read_profile(path: Path) -> LayerProfile:
    """The profile in a file. Raises ConfigError, which names the file."""
    try:
        found = read_json(path, _FILE)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name a profile of layers") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not a profile of layers of version {VERSION} ({error}); profile again") from error
    layers = [
        LayerTimes(one.name, one.forward_seconds, one.backward_seconds, one.communication_seconds, one.bytes)
        for one in found.layers
    ]
    try:
        return LayerProfile(tuple(layers), found.replicas)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def write_profile(profile: LayerProfile, path: Path) -> None:
    """Write a profile for `read_profile`, in place of a file of that name. Raises OSError."""
    files.write(path, json.dumps(profile.block(), indent=1) + "\n")


def _ns(seconds: float) -> int:
    return round(seconds * NANO)
