"""Megatron-DeepSpeed and gpt-neox without a CUDA device: what is gone from DeepSpeed, tensor types, data set helpers.

Both train a DeepSpeed engine, so they run on DeepSpeed's accelerator for CPUs.

megatron/training.py of Megatron-DeepSpeed imports `deepspeed.compression.compress`, which DeepSpeed 0.19 has removed,
whether or not a model is compressed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import partial
from types import ModuleType
from typing import Any, NoReturn

import packaging.version
import torch

from ..errors import UnsupportedError
from .declared import Patch, around
from .megatron_core import for_this_interpreter
from .versions import TORCH

_COMPRESS = "deepspeed.compression.compress"
_RESOURCES = "pkg_resources"
_CHECKED = ("heads of 2025-07 and 2026-05",)


def prepare(device_count: int) -> None:
    """Settings of DeepSpeed that are read when it is imported: its accelerator, and how many devices this node has; and
    the module of old versions of setuptools from which gpt-neox takes another package."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_SIZE", str(device_count))
    if importlib.util.find_spec(_RESOURCES) is None:
        module = ModuleType(_RESOURCES)
        vars(module)["packaging"] = packaging
        sys.modules[_RESOURCES] = module


def with_compression(package: ModuleType) -> None:
    """Give DeepSpeed the module that Megatron-DeepSpeed imports, if it lacks it; its functions raise."""
    if importlib.util.find_spec(_COMPRESS) is None:
        module = ModuleType(_COMPRESS)
        vars(module).update(init_compression=_removed, redundancy_clean=_removed)
        sys.modules[_COMPRESS] = module


def _removed(*_: Any, **__: Any) -> NoReturn:
    raise UnsupportedError("this version of DeepSpeed has no compression: drop compression_training")


def _eager(function: Any, *_: Any, **__: Any) -> Any:
    return function


def _typed(name: str) -> Patch:
    return Patch(
        *("torch", "torch.cuda", name, TORCH),
        reason="gpt-neox makes tensors of this type, which a CPU build of torch cannot",
        replace=lambda _: getattr(torch, name),
    )


def _helpers(distribution: str, module: str) -> Patch:
    return Patch(
        *(distribution, module, "compile_helper", _CHECKED),
        reason="the Makefile builds for the interpreter of python3-config, which may not be the running one",
        replace=around(partial(for_this_interpreter, library="helpers")),
        parameters=(),
    )


MEGATRON_DEEPSPEED = (_helpers("megatron-deepspeed", "megatron.data.dataset_utils"),)
GPT_NEOX = (
    _helpers("gpt-neox", "megatron.data.data_utils"),
    *map(_typed, ("ByteTensor", "FloatTensor", "IntTensor", "LongTensor")),
    Patch(
        *("torch", "torch.jit", "script", TORCH),
        reason="its fused functions call tensor factories, which cannot be compiled when they are patched",
        replace=lambda _: _eager,
    ),
)
