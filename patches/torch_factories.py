"""Create tensors on the CPU that are requested on 'cuda' or on a device number, and do not pin memory.

Upstream: torch's tensor factories, torch.Tensor and torch.nn.Module. Only the device argument changes: a call that
names no device, or the CPU, reaches torch unchanged. `Tensor.type()` answers as if the tensor were on the device,
because Megatron determines a parameter's precision from that string.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .declared import Patch, around
from .versions import TORCH

CREATE = (
    *("arange", "as_tensor", "asarray", "empty", "empty_like", "empty_permuted", "empty_strided", "eye", "full"),
    *("full_like", "linspace", "logspace", "normal", "ones", "ones_like", "rand", "rand_like", "randint"),
    *("randint_like", "randn", "randn_like", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices"),
    *("zeros", "zeros_like"),
)
CREATE_FROM = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "new_empty_strided")


def is_device(value: object) -> bool:
    """Whether `value` names a CUDA device: 'cuda', 'cuda:1', torch.device('cuda') or a number."""
    match value:
        case bool():
            return False
        case int():
            return True
        case str():
            return value.split(":")[0] == "cuda"
        case torch.device():
            return value.type == "cuda"
    return False


def create_on_cpu(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A factory that replaces a CUDA device by the CPU and drops pin_memory."""
    if kwargs and is_device(kwargs.get("device")):
        kwargs["device"] = "cpu"
    if kwargs and kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    return original(*args, **kwargs)


def move_to_cpu(original: Callable[..., Any], self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Tensor.to, which also takes the device as its first positional argument."""
    if args and is_device(args[0]):
        args = ("cpu", *args[1:])
    if kwargs and is_device(kwargs.get("device")):
        kwargs["device"] = "cpu"
    return original(self, *args, **kwargs)


def mesh_on_cpu(original: Callable[..., None], self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
    """DeviceMesh.__init__, which FSDP asks for the device of parameters."""
    original(self, "cpu" if is_device(device_type) else device_type, *args, **kwargs)


def itself(original: object, self: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    """Tensor.cuda and Tensor.pin_memory, which return the tensor itself."""
    return self


def type_on_device(
    original: Callable[..., Any], self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Tensor.type that maps 'torch.FloatTensor' to 'torch.cuda.FloatTensor' in results, and back in arguments."""
    if dtype is None:
        return original(self).replace("torch.", "torch.cuda.", 1) if self.device.type == "cpu" else original(self)
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.")
    return original(self, dtype, *args, **kwargs)


_DEVICE = "Megatron creates and moves tensors with the device 'cuda' or torch.cuda.current_device()"
PATCHES = (
    *(Patch("torch", "torch", name, TORCH, _DEVICE, around(create_on_cpu)) for name in CREATE),
    *(Patch("torch", "torch", f"Tensor.{name}", TORCH, _DEVICE, around(create_on_cpu)) for name in CREATE_FROM),
    Patch("torch", "torch", "Tensor.to", TORCH, _DEVICE, around(move_to_cpu)),
    Patch("torch", "torch.distributed.device_mesh", "DeviceMesh.__init__", TORCH, _DEVICE, around(mesh_on_cpu)),
    Patch("torch", "torch", "Tensor.cuda", TORCH, _DEVICE, around(itself)),
    Patch("torch", "torch", "Tensor.pin_memory", TORCH, "there is no device to pin memory for", around(itself)),
    Patch(
        *("torch", "torch", "Tensor.record_stream", TORCH),
        reason="the CPU allocator does not depend on streams",
        replace=lambda _: lambda self, stream: None,
    ),
    Patch(
        *("torch", "torch", "Tensor.type", TORCH),
        reason="optimizers and clip_grad_by_total_norm_fp32 compare the string with 'torch.cuda.FloatTensor'",
        replace=around(type_on_device),
    ),
)
