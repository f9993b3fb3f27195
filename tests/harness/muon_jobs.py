"""Megatron's Muon on a CPU: over a checkout of Emerging-Optimizers that EMERGING_OPTIMIZERS_PATH names (v0.1.0 for
megatron-core 0.16), of which nothing is built.

`megatron_example` is one rank of the Megatron example, whose optimizer is the one that `--muon` names: `muon` on all
replicas, `dist_muon` divided over them by parameter.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

CHECKOUT = os.environ.get("EMERGING_OPTIMIZERS_PATH", "")
KINDS = ("muon", "dist_muon")


def available() -> bool:
    """Whether a checkout is named."""
    return bool(CHECKOUT) and Path(CHECKOUT, "emerging_optimizers").is_dir()


def megatron_example(argv: Sequence[str]) -> None:
    """One rank of the Megatron example."""
    at = list(argv).index("--muon")
    kind, words = argv[at + 1], [*argv[:at], *argv[at + 2 :]]
    kernels: Any = ModuleType("emerging_optimizers.triton_kernels")  # for GPUs
    kernels.HAS_TRITON_340 = False
    logs: Any = ModuleType("absl")
    logs.logging = MagicMock()
    sys.modules.update({kernels.__name__: kernels, "absl": logs})
    sys.path.append(CHECKOUT)
    import_module("ft_plugins.adapters.megatron").prepare()
    muon: Any = import_module("megatron.core.optimizer.muon")
    layer_wise = muon.LayerWiseDistributedOptimizer
    layer_wise.allgather_params = layer_wise.broadcast_params  # by tensor: gloo gathers equal sizes only

    def build(config: Any, chunks: Any, use_gloo_process_groups: bool) -> Any:
        return muon.get_megatron_muon_optimizer(
            config, chunks, use_gloo_process_groups=use_gloo_process_groups,
            layer_wise_distributed_optimizer=kind == "dist_muon",
        )  # fmt: skip

    vars(import_module("gpt_job"))["get_megatron_optimizer"] = build
    import_module("megatron_gpt").main(words)
