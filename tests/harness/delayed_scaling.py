"""Delayed scaling on a CPU: Transformer Engine's own state of it and its own updates (`TransformerEngineBaseModule`,
`FP8GlobalStateManager`, of a checkout), in a module that casts what a local linear layer reads, and its gradient.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

_BUILT = ("onnx_extensions", "distributed", "triton.pad")  # what the checkout imports and a CPU cannot
_LENGTH = 3  # of a history
_LARGEST = {True: (448.0, torch.float8_e4m3fn), False: (57344.0, torch.float8_e5m2)}  # forward, backward


class _OnCpu:
    """torch, as a module sees it that makes tensors on the present GPU."""

    cuda = SimpleNamespace(
        is_available=lambda: True, synchronize=lambda: None, is_current_stream_capturing=lambda: False
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(name: str) -> torch.device:
        return torch.device("cpu")


def install(job: Any) -> None:
    """Give the linear layers of `job`'s decoder an engine that casts; Megatron's blocks enter its context."""
    for name in (*(f"pytorch.{one}" for one in _BUILT), "debug.pytorch.debug_state", "debug.pytorch.utils"):
        sys.modules[f"transformer_engine.{name}"] = MagicMock()
    os.environ["NVTE_UNFUSED_FP8_UPDATE"] = "1"  # the arithmetic of the fused one, in torch
    quantization: Any = import_module("transformer_engine.pytorch.quantization")
    base: Any = import_module("transformer_engine.pytorch.module.base")
    vars(quantization)["torch"] = vars(base)["torch"] = _OnCpu()
    manager = quantization.FP8GlobalStateManager
    manager.is_fp8_available = lambda: (True, "")
    recipes: Any = import_module("transformer_engine.common.recipe")
    recipe = recipes.DelayedScaling(amax_history_len=_LENGTH, amax_compute_algo="max")
    parallel: Any = import_module("megatron.core.parallel_state")

    @contextmanager
    def scaled(config: Any, *layer: Any, is_init: bool = False) -> Iterator[None]:
        kept, group = manager.get_autocast_state(), parallel.get_amax_reduction_group(with_context_parallel=True)
        manager.autocast_enter(enabled=True, fp8_recipe=recipe, fp8_group=group)
        try:
            yield
        finally:
            manager.set_autocast_state(kept)
            manager.autocast_exit(enabled=True, _graph=False)

    for module in ("megatron.core.fp8_utils", "megatron.core.transformer.transformer_block"):
        context = lambda config, *layer, **more: nullcontext() if layer or more else scaled(config)  # noqa: E731
        vars(import_module(module))["get_fp8_context"] = context
    engine, of_config, of_model = _engine_class(base, manager, recipe), job.TransformerConfig, job.GPTModel

    def configured(**given: Any) -> Any:
        made = of_config(**given)
        made.fp8, made.fp8_recipe = "hybrid", "delayed"
        return made

    def model(*given: Any, **more: Any) -> Any:
        made = of_model(*given, **more)
        for name, part in [*made.named_modules()]:
            weight = getattr(part, "weight", None)
            if ".layers." in name and isinstance(weight, torch.nn.Parameter) and weight.dim() == 2:
                part.engine = engine()
                part.register_forward_pre_hook(lambda part, given: (part.engine(given[0]), *given[1:]))
        return made

    vars(job)["TransformerConfig"], vars(job)["GPTModel"] = configured, model


def _engine_class(base: Any, manager: Any, recipe: Any) -> type[torch.nn.Module]:
    class Linear(base.TransformerEngineBaseModule):  # type: ignore[misc]
        """Casts what is read (place 0 of the forward) and its gradient (place 0 of the backward); place 1 of the
        forward belongs to the weight."""

        def forward(self, read: torch.Tensor) -> torch.Tensor:
            self.init_fp8_metadata()
            manager.add_fp8_tensors_to_global_buffer(self.fp8_meta)
            return _Cast.apply(read, self, manager if manager.is_first_fp8_module() else None)  # type: ignore[no-any-return]

        def for_weight(self) -> Any:
            """The quantizer of a weight in fp8, as a model has it that is built with fp8 parameters."""
            self.fp8_meta["num_gemms"] = 1
            self.init_fp8_meta_tensors(recipe)
            return self.quantizers["scaling_fwd"][1]

        def _get_weight_tensors(self) -> list[torch.Tensor]:
            return []

        def _get_weight_quantizers(self) -> list[Any]:
            return []

    return Linear


class _Cast(torch.autograd.Function):
    """To fp8 and back, each way with a scale made of earlier maxima. The backward of the first one ends the update of
    gradients' scales, as that of Transformer Engine's first module does."""

    @staticmethod
    def forward(context: Any, read: torch.Tensor, engine: Any, manager: Any) -> torch.Tensor:
        context.engine, context.manager = engine, manager
        return _there_and_back(read, engine, True)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        cast = _there_and_back(gradient, context.engine, False)
        if context.manager is not None:
            context.manager.reduce_and_update_fp8_tensors(forward=False)
        return cast, None, None


def _there_and_back(tensor: torch.Tensor, engine: Any, forward: bool) -> torch.Tensor:
    quantizer = engine.quantizers["scaling_fwd" if forward else "scaling_bwd"][0]
    largest, dtype = _LARGEST[forward]
    quantizer.amax.copy_(torch.maximum(quantizer.amax, tensor.abs().max().float()))
    scaled = (tensor.float() * quantizer.scale).clamp(-largest, largest).to(dtype)
    return (scaled.float() / quantizer.scale).to(tensor.dtype)
