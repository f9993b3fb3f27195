"""Transformer Engine's optimizer and fp8 tensors on a CPU: those of a checkout (v2.9), which TRANSFORMER_ENGINE_PATH
names and of which nothing is built, over the arithmetic of its kernels (`transformer_engine_torch`) in torch.

`megatron_example` is one rank of the Megatron example with what `--state` names: Megatron's precision-aware optimizer,
its optimizer CPU offload, or fp8 parameters in the linear layers, which local layers read as what they stand for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch

from . import delayed_scaling
from .apex_jobs import Lists, adam

CHECKOUT = os.environ.get("TRANSFORMER_ENGINE_PATH", "")
_LARGEST = 448.0  # of e4m3
_AWARE: dict[str, Any] = {"use_precision_aware_optimizer": True}
_BF16, _FP16 = ({f"exp_avg{part}_dtype": dtype for part in ("", "_sq")} for dtype in (torch.bfloat16, torch.float16))
STATES: dict[str, dict[str, Any]] = {  # settings of Megatron's optimizer
    "remainders": {**_AWARE, **_BF16},
    "scaled": {**_AWARE, **_FP16, "main_params_dtype": torch.float16, "store_param_remainders": False},
    "offload": {
        **_AWARE, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5,
        "overlap_cpu_optimizer_d2h_h2d": True,
    },
    "tensorwise": {"fp8_recipe": "tensorwise"},
    "blockwise": {"fp8_recipe": "blockwise"},
    "mxfp8": {"fp8_recipe": "mxfp8", "reuse_grad_buf_for_mxfp8_param_ag": True},
    "delayed": {"fp8_recipe": "delayed"},  # the same, with delayed scaling of what layers read and of gradients
    "delayed_alone": {"fp8_recipe": "delayed"},  # this scaling with parameters in bf16
}  # fmt: skip


def available() -> bool:
    """Whether a checkout is named."""
    return Path(CHECKOUT, "transformer_engine", "pytorch", "tensor", "float8_tensor.py").is_file()


def install() -> None:
    """Make the checkout's Python importable, without the packages' own imports of what would have to be built."""
    kernels = MagicMock()
    for each in _KERNELS:
        setattr(kernels, each.__name__, torch.no_grad()(each))
    sys.modules["transformer_engine_torch"] = kernels
    debugging = MagicMock(DebugQuantizedTensor=type("DebugQuantizedTensor", (), {}))
    sys.modules["transformer_engine.debug.pytorch.debug_quantization"] = debugging
    for name in ("", ".common", ".pytorch", ".pytorch.optimizers"):
        package: Any = ModuleType(f"transformer_engine{name}")
        package.__path__ = [str(Path(CHECKOUT, "transformer_engine", *name.split(".")[1:]))]
        sys.modules[package.__name__] = package
    engine: Any = sys.modules["transformer_engine"]
    engine.__version__ = "2.9.0"
    sys.modules["transformer_engine.pytorch"].torch_version = lambda: (2, 9, 0)  # type: ignore[attr-defined]
    vars(_of("tensor.quantized_tensor"))["torch"] = _OnCpu()
    optimizers: Any = sys.modules["transformer_engine.pytorch.optimizers"]
    optimizers.FusedAdam = import_module("transformer_engine.pytorch.optimizers.fused_adam").FusedAdam


class _OnCpu:
    """torch, as a module sees it that makes tensors on the present GPU."""

    cuda = SimpleNamespace(current_device=lambda: "cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _of(module: str) -> Any:
    return import_module(f"transformer_engine.pytorch.{module}")


# ---- kernels of the optimizer ----


def multi_tensor_adam(
    chunk: int, overflow: torch.Tensor, lists: Lists, rate: float, beta1: float, beta2: float, eps: float, step: int,
    decoupled: int, corrects: int, decay: float,
) -> None:  # fmt: skip
    """With a fifth list these are the masters."""
    for gradient, parameter, first, second, *master in zip(*lists, strict=True):
        whole = master[0] if master else parameter
        whole.sub_(
            rate * adam(
                gradient.float(), whole, first, second, beta1, beta2, 1 - beta1, eps, step, decoupled, corrects, decay
            )
        )  # fmt: skip
        parameter.copy_(whole)


def multi_tensor_adam_param_remainder(chunk: int, overflow: torch.Tensor, lists: Lists, *settings: Any) -> None:
    """Masters are the bits of parameters in bf16, which are rounded to nearest, and the 16 bits that follow."""
    gradients, parameters, firsts, seconds, remainders = lists
    for *others, upper, lower in zip(gradients, firsts, seconds, parameters, remainders, strict=True):
        high = upper.view(torch.int16).int() - (lower < 0).int()
        master = ((high << 16) | (lower.int() & 0xFFFF)).view(torch.float32)
        gradient, first, second = others
        multi_tensor_adam(chunk, overflow, [[gradient], [master], [first], [second]], *settings)
        bits = master.view(torch.int32)
        lower.copy_((bits & 0xFFFF).to(torch.int16))
        upper.view(torch.int16).copy_(((bits >> 16) + (lower < 0).int()).to(torch.int16))


def multi_tensor_scale(chunk: int, overflow: torch.Tensor, lists: Lists, scale: float) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


# ---- kernels of fp8 ----


def multi_tensor_compute_scale_and_scale_inv(
    chunk: int, overflow: torch.Tensor, lists: Lists, largest: float, power_of_2: bool, epsilon: float
) -> None:
    for most, scale, inverse in zip(*lists, strict=True):
        scale.copy_(torch.where(most > 0, largest / most, 1.0))
        inverse.copy_(1 / scale)


def compute_amax(tensor: torch.Tensor, most: torch.Tensor) -> None:
    most.copy_(tensor.abs().max() if tensor.numel() else torch.zeros(()))


def _most(tensor: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """The maximum of each block of (rows, columns) of a matrix, whose last blocks may be smaller."""
    rows, columns = size
    whole = torch.nn.functional.pad(tensor.abs().float(), (0, -tensor.shape[1] % columns, 0, -tensor.shape[0] % rows))
    return whole.view(whole.shape[0] // rows, rows, whole.shape[1] // columns, columns).amax((1, 3))


def _spread(blocks: torch.Tensor, size: tuple[int, int], shape: Sequence[int]) -> torch.Tensor:
    whole = blocks.repeat_interleave(size[0], 0).repeat_interleave(size[1], 1)
    return whole[: shape[0], : shape[1]]


def _cast(tensor: torch.Tensor, scale: torch.Tensor, raw: torch.Tensor) -> None:
    scaled = (tensor.float() * scale).clamp(-_LARGEST, _LARGEST)
    raw.copy_(scaled.to(torch.float8_e4m3fn).view(torch.uint8))


def quantize(source: torch.Tensor, quantizer: Any, target: Any = None, noop: Any = None) -> Any:
    made = quantizer.make_empty(source.shape, dtype=source.dtype, device=source.device) if target is None else target
    kind = type(quantizer).__name__
    if kind == "Float8Quantizer":  # with a scale that is given
        if quantizer.amax.numel() and source.numel():
            quantizer.amax.copy_(torch.maximum(quantizer.amax, source.abs().max().float()))
        _cast(source, quantizer.scale, made._data)
        made._scale_inv.copy_(1 / quantizer.scale)
    elif kind == "Float8CurrentScalingQuantizer":
        compute_amax(source, quantizer.amax)
        lists = [[quantizer.amax], [quantizer.scale], [made._scale_inv]]
        multi_tensor_compute_scale_and_scale_inv(0, quantizer.amax, lists, _LARGEST, False, 0.0)
        _cast(source, quantizer.scale, made._data)
    else:
        size = (quantizer.block_len, quantizer.block_len) if kind == "Float8BlockQuantizer" else (1, 32)
        most, stored = _most(source, size), made._rowwise_scale_inv[:, : -(-source.shape[1] // size[1])]
        scale = torch.where(most > 0, _LARGEST / most, 1.0)
        if kind == "MXFP8Quantizer":  # a power of two, of which the exponent is stored
            exponent = torch.where(most > 0, torch.ceil(torch.log2(most / _LARGEST)), 0.0)
            scale, stored = torch.exp2(-exponent), stored[: source.shape[0]]
            stored.copy_((exponent + 127).to(torch.uint8))
        else:
            stored.copy_(1 / scale)
        _cast(source, _spread(scale, size, source.shape), made._rowwise_data)
    return made


def dequantize(tensor: Any, kind: Any) -> torch.Tensor:
    dtype = _of("constants").TE_DType_To_Torch[kind]
    if hasattr(tensor, "_data"):
        return (tensor._data.view(torch.float8_e4m3fn).float() * tensor._scale_inv).to(dtype)
    raw = tensor._rowwise_data
    exponents = tensor._rowwise_scale_inv[: raw.shape[0], : raw.shape[1] // 32].float() - 127
    return (raw.view(torch.float8_e4m3fn).float() * _spread(torch.exp2(exponents), (1, 32), raw.shape)).to(dtype)


def fp8_block_scaling_compute_partial_amax(
    tensor: torch.Tensor, most: torch.Tensor, rows: int, columns: int, start: int, length: int
) -> None:
    whole = torch.zeros(rows * columns)
    whole[start : start + tensor.numel()] = tensor.flatten().float()
    found = _most(whole.view(rows, columns), (length, length))
    most.zero_()[: found.shape[0], : found.shape[1]] = found


def fp8_block_scaling_partial_cast(
    tensor: torch.Tensor, raw: torch.Tensor, scale: torch.Tensor, rows: int, columns: int, start: int, length: int,
    kind: Any,
) -> None:  # fmt: skip
    spread = _spread(scale, (length, length), (rows, columns)).flatten()
    _cast(tensor.flatten(), spread[start : start + tensor.numel()], raw)


_KERNELS: tuple[Callable[..., Any], ...] = (
    *(multi_tensor_adam, multi_tensor_adam_param_remainder, multi_tensor_scale, quantize, dequantize, compute_amax),
    *(multi_tensor_compute_scale_and_scale_inv, fp8_block_scaling_compute_partial_amax, fp8_block_scaling_partial_cast),
)


# ---- jobs ----


def megatron_example(argv: Sequence[str]) -> None:
    """One rank of the Megatron example."""
    at = list(argv).index("--state")
    settings, words = STATES[argv[at + 1]], [*argv[:at], *argv[at + 2 :]]
    job: Any = import_module("gpt_job")
    install()
    in_megatron: Any = import_module("megatron.core.optimizer")
    distributed: Any = import_module("megatron.core.optimizer.distrib_optimizer")
    vars(job)["OptimizerConfig"] = partial(job.OptimizerConfig, **settings)
    if (recipe := settings.get("fp8_recipe")) == "delayed":
        delayed_scaling.install(job)
    if recipe and argv[at + 1] != "delayed_alone":
        _with_fp8_parameters(job, recipe, {key: settings[key] for key in settings if key.startswith("reuse")})
    elif not recipe:
        hybrid = distributed.HybridDeviceOptimizer
        hybrid._get_sub_optimizer_param_groups = _as_on_a_device(hybrid._get_sub_optimizer_param_groups)
        fused = sys.modules["transformer_engine.pytorch.optimizers"].FusedAdam  # type: ignore[attr-defined]
        for module in (in_megatron, distributed):
            vars(module)["Adam"] = fused
        vars(in_megatron)["USING_PYTORCH_OPTIMIZER"] = False
    import_module("megatron_gpt").main(words)


def _as_on_a_device(original: Callable[..., Any]) -> Callable[..., Any]:
    """Divides parameters as if all were on a GPU but what `cpu` has copied."""

    def divided(self: Any, fraction: float) -> Any:
        on_host: dict[int, torch.Tensor] = {}
        to_host, to_float = torch.Tensor.cpu, torch.Tensor.float

        def cpu(tensor: torch.Tensor) -> torch.Tensor:
            copied = to_host(tensor)
            return on_host.setdefault(id(copied), copied)

        def in_float(tensor: torch.Tensor) -> torch.Tensor:
            cast = to_float(tensor)
            return on_host.setdefault(id(cast), cast) if id(tensor) in on_host else cast

        with (
            patch.object(torch.Tensor, "cpu", cpu),
            patch.object(torch.Tensor, "float", in_float),
            patch.object(torch.Tensor, "is_cuda", property(lambda tensor: id(tensor) not in on_host)),
        ):
            return original(self, fraction)

    return divided


@contextmanager
def _one_by_one(*group: Any, **settings: Any) -> Iterator[Any]:
    yield SimpleNamespace(wait=lambda: None)


def _at_once(collective: Callable[..., Any]) -> Callable[..., None]:
    def collect(*tensors: Any, **settings: Any) -> None:
        collective(*tensors, **{**settings, "async_op": False})

    return collect


def _staged(zero_grad: Callable[..., None]) -> Callable[..., None]:
    """With mxfp8 and an overlapping gather Megatron-LM's loop copies masters to the buffer of gradients before every
    forward but the first one of a process, whose parameters are those of a checkpoint, or new."""
    begun = set()

    def staged(self: Any, *given: Any) -> None:
        zero_grad(self, *given)
        if not self.ddp_config.overlap_param_gather:
            return
        if id(self) in begun:
            self._copy_main_params_to_param_buffer()
        for group in (group for chunk in self.model_chunks for group in chunk.bucket_groups):
            group.param_gather_dispatched = id(self) not in begun
        begun.add(id(self))

    return staged


def _with_fp8_parameters(job: Any, recipe: str, more: dict[str, Any]) -> None:
    """Let the layers of `job` keep their weights in fp8, as Transformer Engine's layers do."""
    tensor, utils = _of("tensor"), _of("tensor.utils")
    tensor.QuantizedTensor.type = lambda self: "torch.cuda.BFloat16Tensor"  # which it stands for
    fp8: Any = import_module("megatron.core.fp8_utils")
    vars(fp8).update(
        HAVE_TE_FP8_TENSOR_CLASS=True, FP8_TENSOR_CLASS=tensor.QuantizedTensor,
        HAVE_TE_MXFP8TENSOR=True, MXFP8Tensor=tensor.MXFP8Tensor,
        _modify_underlying_storage_impl=utils.replace_raw_data,
        _quantize_param_shard_impl=lambda parameters, *masters: (
            utils.cast_master_weights_to_fp8(parameters, *masters[:3]) if parameters else None
        ),
    )  # fmt: skip
    buckets = vars(import_module("megatron.core.distributed.param_and_grad_buffer"))
    buckets["_coalescing_manager"] = _one_by_one  # gloo joins tensors of several dtypes as if they had one
    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        buckets[name] = _at_once(buckets[name])
    of_model, kept = job.Float16Module, import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    if more:
        kept.zero_grad = _staged(kept.zero_grad)

    def half(config: Any, model: Any) -> Any:
        made = of_model(config, model)
        for name, module in made.named_modules():
            weight = getattr(module, "weight", None)
            if ".decoder." in f".{name}." and isinstance(weight, torch.nn.Parameter) and weight.dim() == 2:
                engine: Any = getattr(module, "engine", None)
                module.weight = _in_fp8(weight, engine.for_weight if engine else _QUANTIZERS[recipe])
        return made

    vars(job)["Float16Module"] = half
    vars(job)["DistributedDataParallelConfig"] = partial(
        job.DistributedDataParallelConfig, fp8_param_gather=True, **more
    )


def _e4m3() -> Any:
    return sys.modules["transformer_engine_torch"].DType.kFloat8E4M3


_QUANTIZERS: dict[str, Callable[[], Any]] = {
    "tensorwise": lambda: _of("tensor").Float8CurrentScalingQuantizer(_e4m3(), device="cpu", columnwise=False),
    "blockwise": lambda: _of("tensor").Float8BlockQuantizer(_e4m3(), rowwise=True, columnwise=False),
    "mxfp8": lambda: _of("tensor").MXFP8Quantizer(_e4m3(), columnwise=False),
}


def _in_fp8(weight: torch.nn.Parameter, quantizer: Callable[[], Any]) -> torch.nn.Parameter:
    """The parameter in fp8, with its first values on the host, as Transformer Engine leaves them."""
    made = torch.nn.Parameter(quantizer()(weight.detach()))
    vars(made).update(vars(weight))
    first: Any = weight.detach().clone()
    made.get_high_precision_init_val = MethodType(lambda self: first, made)  # type: ignore[attr-defined]
    made.clear_high_precision_init_val = MethodType(lambda self: None, made)  # type: ignore[attr-defined]
    return made
