"""What replicas of a real DeepSpeed engine have between two updates: gradients, copies, and gradients once more."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

Ranks = Callable[..., list[Any]]
_spec = importlib.util.spec_from_file_location("deepspeed_engines", Path(__file__).with_name("deepspeed_engines.py"))
assert _spec is not None and _spec.loader is not None
engines = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(engines)

FP32 = {"stage": 0, "bf16": False}
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "fp32": (1, FP32),
    "fp32, two stages": (2, FP32),
    "fp32 zero1": (1, {"stage": 1, "bf16": False}),
    "bf16": (1, {"stage": 0, "bf16": True}),
    "bf16, two stages": (2, {"stage": 0, "bf16": True}),
    "bf16 accumulated in bf16": (1, {"stage": 0, "bf16": True, "accumulate": "bf16"}),
    "bf16 zero1": (1, {"stage": 1, "bf16": True, "accumulate": "fp32"}),
    "bf16 zero1 accumulated in bf16": (1, {"stage": 1, "bf16": True, "accumulate": "bf16"}),
    "bf16 zero1, two stages": (2, {"stage": 1, "bf16": True, "accumulate": "bf16"}),
}
PLAIN: dict[str, dict[str, Any]] = {
    "fp32": FP32,
    "bf16 masters everywhere": {"stage": 0, "bf16": True, "accumulate": "bf16"},
    "bf16 zero1": {"stage": 1, "bf16": True},
    "bf16 zero2": {"stage": 2, "bf16": True},
    "fp32 zero2": {"stage": 2, "bf16": False},
}

# ---- once more ----


@pytest.mark.parametrize("mode", MODES)
def test_gradients_computed_once_more_are_the_same_and_nothing_else_has_moved(ranks: Ranks, mode: str) -> None:
    for clean, again, gradients in ranks(_once_more, 2, *MODES[mode]):
        assert len(gradients) == 2 and gradients[0] == gradients[1], "bit for bit"
        assert any(gradients[0].values()) and gradients[0]
        assert again == clean


def _once_more(rank: int, world: int, pp: int, told: dict[str, Any]) -> Any:
    gradients: list[Any] = []

    def around(host: Any, step: int) -> None:
        if step == 3:
            gradients.append(engines.plain(dict(host.gradients())))
            for gradient in host.gradients().values():
                gradient.fill_(3.0)
            host.recompute(step)
            gradients.append(engines.plain(dict(host.gradients())))

    clean = engines.run(rank, world, pp, told)
    return clean, engines.run(rank, world, pp, told, around), gradients


@pytest.mark.parametrize("mode", MODES)
def test_an_iteration_of_wrong_parameters_that_are_repaired_is_the_clean_one(ranks: Ranks, mode: str) -> None:
    """Losses and running statistics included, which were computed of them; without it they are not."""
    for clean, repaired, only_repaired in ranks(_repaired, 2, *MODES[mode]):
        assert repaired == clean
        assert only_repaired != clean


def _repaired(rank: int, world: int, pp: int, told: dict[str, Any]) -> Any:
    right: list[torch.Tensor] = []

    def wrong(host: Any, step: int) -> None:
        if step == 3 and rank == world - 1:
            parameters = list(host.engine.module.parameters())
            right[:] = [one.detach().clone() for one in parameters]
            for one in parameters:
                one.data.add_(0.5)

    def repair(host: Any, step: int) -> None:
        if right:
            for one, value in zip(host.engine.module.parameters(), right, strict=True):
                one.data.copy_(value)
            right.clear()

    def repair_and_recompute(host: Any, step: int) -> None:
        repair(host, step)
        if step == 3:
            host.recompute(step)

    clean = engines.run(rank, world, pp, told)
    return (
        clean,
        engines.run(rank, world, pp, told, repair_and_recompute, wrong),
        engines.run(rank, world, pp, told, repair, wrong),
    )
