"""Megatron without a CUDA device: no kernels, one random generator, outputs that outlive their send, dataset helpers.

megatron/core/jit.py: `jit_fuser` is torch.compile, which on the CPU calls a C++ compiler in every rank at start and may
round differently from one compilation to the next.
megatron/legacy/fused_kernels/__init__.py, up to 0.16, builds CUDA kernels.

megatron/core/tensor_parallel/random.py: the tracker forks the CPU's default generator, from which dropout draws here.

megatron/core/pipeline_parallel/schedules.py: the interleaved schedule frees an output's storage while its isend may
still be reading it. CUDA's stream order makes that harmless; gloo's sender thread reads freed memory (observed as NaN
losses).

megatron/core/datasets/utils.py, with the Makefile next to it, which uses the first `python3` and `python3-config` on
PATH. With pyenv a `.python-version` file in the checkout selects these, and the library is then built for another
interpreter: the only symptom is "No module named ...helpers_cpp".
"""

from __future__ import annotations

import logging
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..errors import UnsupportedError
from .declared import Patch, around
from .versions import MEGATRON

RANDOM = "megatron.core.tensor_parallel.random"
WARNING = "CPU RNG state changed within GPU RNG context"


def get_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    """_get_cuda_rng_state: a copy of the generator's state."""
    _require_no_graphs(graph_safe)
    return torch.default_generator.get_state()


def set_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
    """_set_cuda_rng_state: copies the state into the generator."""
    _require_no_graphs(graph_safe)
    torch.default_generator.set_state(new_state)


def _require_no_graphs(graph_safe: bool) -> None:
    if graph_safe:
        raise UnsupportedError("an RNG tracker for CUDA graphs needs a CUDA device; run without CUDA graphs")


def quiet_logging(original: Any) -> Any:
    """The module's `logging`, with a filter for a warning that every fork would cause here."""
    original.getLogger(RANDOM).addFilter(_is_not_the_warning)
    return original


def _is_not_the_warning(record: logging.LogRecord) -> bool:
    return record.getMessage() != WARNING


def keeping_storage(original: Callable[..., None], out: Any, deallocate_pipeline_outputs: bool = False) -> None:
    """deallocate_output_tensor that attaches the old storage to the tensor.

    An isend's work object holds the tensor until it is waited for, and the schedule holds it until its backward, which
    needs a gradient that the receiver can send only after it has received: so the storage outlives the send.
    """
    storage = out.untyped_storage() if isinstance(out, torch.Tensor) and deallocate_pipeline_outputs else None
    original(out, deallocate_pipeline_outputs)
    if storage is not None:
        out.storage_being_sent = storage


def for_this_interpreter(original: Callable[[], None], library: str = "helpers_cpp") -> None:
    """compile_helpers that passes suffix and include paths of the running interpreter to make. It builds `library`."""
    folder = Path(original.__code__.co_filename).resolve().parent
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    command = ["make", "-C", str(folder), f"LIBEXT={suffix}", f"CPPFLAGS={_includes()}"]
    if not (folder / f"{library}{suffix}").exists() and subprocess.run(command).returncode != 0:
        raise UnsupportedError(f"'{' '.join(command)}' failed: Megatron's datasets need make and a C++ compiler")


def _includes() -> str:
    try:
        import pybind11
    except ModuleNotFoundError as error:
        raise UnsupportedError("compiling Megatron's datasets needs pybind11: pip install pybind11") from error
    return f"-I{sysconfig.get_path('include')} -I{pybind11.get_include()}"


_GENERATOR = "the tracker must fork the generator that dropout draws from: on the CPU the default one"
PATCHES = (
    Patch(
        *("megatron-core", "megatron.core.jit", "jit_fuser", MEGATRON),
        reason="torch.compile calls a C++ compiler in every rank; fusion gains nothing here",
        replace=lambda _: lambda function: function,  # before any module imports it
    ),
    Patch(
        *("megatron-core", "megatron.legacy.fused_kernels", "load", ("0.14.0", "0.15.3", "0.16.1")),
        reason="there is no nvcc; Megatron uses its unfused paths",
        replace=lambda _: lambda args: None,
        parameters=("args",),
    ),
    Patch(
        *("megatron-core", RANDOM, "_get_cuda_rng_state", MEGATRON, _GENERATOR, lambda _: get_state),
        parameters=("device", "clone", "graph_safe"),
    ),
    Patch(
        *("megatron-core", RANDOM, "_set_cuda_rng_state", MEGATRON, _GENERATOR, lambda _: set_state),
        parameters=("new_state", "device", "graph_safe"),
    ),
    Patch(
        *("megatron-core", RANDOM, "logging", MEGATRON),
        reason=f"fork() warns '{WARNING}' at every fork, as there is one generator",
        replace=quiet_logging,
    ),
    Patch(
        *("megatron-core", "megatron.core.pipeline_parallel.schedules", "deallocate_output_tensor", MEGATRON),
        reason="gloo may read an output that is freed before its isend has been waited for",
        replace=around(keeping_storage),
        parameters=("out", "deallocate_pipeline_outputs"),
        contains=("out.data = torch.empty((1,)",),
    ),
    Patch(
        *("megatron-core", "megatron.core.parallel_state", "get_nccl_options", MEGATRON),
        reason="FSDP asks for NCCL streams of high priority; gloo has no such options",
        replace=lambda _: lambda pg_name, nccl_comm_cfgs: None,
        parameters=("pg_name", "nccl_comm_cfgs"),
    ),
    Patch(
        *("megatron-core", "megatron.core.datasets.utils", "compile_helpers", MEGATRON),
        reason="the Makefile builds for the interpreter of python3-config, which may not be the running one",
        replace=around(for_this_interpreter),
        parameters=(),
        contains=('"make", "-C"',),
    ),
)
