"""Fault tolerance for large-model pretraining, switched on by flags: in-memory snapshots that outlive training.

`attach(host, config)` protects a training loop; `TorchHost` is the host for plain torch, `FsdpHost` for models that
torch's `fully_shard` has sharded. Scripts of Megatron-LM and DeepSpeed need not call it: `ft-run` installs the hooks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapters.script.undeclared_search import ignore
    from .adapters.torch.fsdp import FsdpHost
    from .adapters.torch.torch_loop import TorchHost
    from .session import Session, attach

__version__ = "0.1.0"
__all__ = ["FsdpHost", "Session", "TorchHost", "attach", "ignore"]


def __getattr__(name: str) -> Any:
    """Import torch only when it is needed; the SMP and the command line do not need it."""
    if name == "FsdpHost":
        from .adapters.torch import fsdp

        return fsdp.FsdpHost
    if name == "TorchHost":
        from .adapters.torch import torch_loop

        return torch_loop.TorchHost
    if name == "ignore":
        from .adapters.script import undeclared_search

        return undeclared_search.ignore
    if name in __all__:
        from . import session

        return getattr(session, name)
    raise AttributeError(f"module 'ft_plugins' has no attribute '{name}'")
