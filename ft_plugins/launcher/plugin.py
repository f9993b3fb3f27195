"""The entry point for `torchrun --rdzv-backend=ft_plugins`, in the group `torchrun.handlers`.

Invariant: torch imports this module in the middle of importing its own elastic package, so it imports nothing of torch
and nothing of the rendezvous before torch asks for a handler.

In: torch's `RendezvousParameters`; `rendezvous_settings` lists the keys. Out: a handler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def torchrun_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """The function that makes a handler, for torch."""
    return create


def create(parameters: RendezvousParameters) -> RendezvousHandler:
    """A handler that listens on this node's port. Raises ConfigError."""
    from .rendezvous.rendezvous import Rendezvous
    from .rendezvous.rendezvous_settings import RendezvousSettings

    return Rendezvous(RendezvousSettings.read(parameters))
