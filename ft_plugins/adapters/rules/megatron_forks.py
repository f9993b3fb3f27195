"""Rules over the arguments of Megatron-DeepSpeed and of gpt-neox, beyond what DeepSpeed's rules say. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .megatron import UNSHARDED
from .rule import Rule, at, equals, every, on

NEOX, OTHERWISE = "gpt-neox", "drop the protection"


def _named(key: str, name: str, reason: str, option: str = "") -> Rule:
    """A rule about an argument that is on."""
    return Rule(name, (key,), on(key), reason, option or f"--{key.replace('_', '-')}")


def _learns(settings: Any) -> bool:
    found = at(settings, "curriculum_learning")
    return bool(found.get("enabled") if isinstance(found, Mapping) else found)


MEGATRON_DEEPSPEED = (
    *(_named(key, "a teacher", "it is a second engine") for key in ("kd", "mos")),
    _named("compression_training", "compression", "it keeps its own counters", "compression_training"),
    _named("random_ltd", "random-LTD", "it keeps its own counters"),
    _named(
        "data_efficiency_curriculum_learning", "a curriculum of data efficiency", "its sampler is its own",
        "data_efficiency",
    ),
    _named("enable_zbh1_pipeline", "the zero-bubble schedule", "it replaces DeepSpeed's"),
    _named("vision_pretraining", "vision pretraining", "it keeps a teacher of its own"),
    _named("reset_iteration", "a new count", "it counts a loaded checkpoint's iterations from 0 at each restart"),
    _named("repeated_dataloader", "repeated data", "it repeats them from where a restart began"),
    UNSHARDED,
)  # fmt: skip

GPT_NEOX = (
    _named(
        "log_gradient_noise_scale", "the gradient noise scale", "it is a mean of its own", "log_gradient_noise_scale",
    ),
    Rule(
        "its curriculum", ("curriculum_learning",), _learns, "it is out of reach", "curriculum_learning",
    ),
    Rule(
        "a load without the optimizer", ("no_load_optim",), every(on("no_load_optim"), on("load")),
        "its loop takes the iteration of a checkpoint that the engine does not load", "no_load_optim",
    ),
    Rule(
        "data from a server", ("dataset_impl",), equals("dataset_impl", "online"), "batches cannot be read again",
        "dataset_impl", "online",
    ),
)  # fmt: skip
