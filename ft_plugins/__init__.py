"""Fault tolerance for large-model pretraining, switched on by flags: in-memory snapshots that outlive training.

`attach(host, config)` protects a training loop; with Megatron-LM nobody has to call it (`ft-run` installs the hooks).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .session import Session, attach

__version__ = "0.1.0"
__all__ = ["Session", "attach"]


def __getattr__(name: str) -> Any:
    """Import torch only when it is needed: the SMP and the command line do without."""
    if name in __all__:
        from . import session

        return getattr(session, name)
    raise AttributeError(f"module 'ft_plugins' has no attribute '{name}'")
