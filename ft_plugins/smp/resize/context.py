"""What a resize reads and changes of its node's SMP, as one object."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from ...snapshot.segment.segment import Segment
from ..serve.node_context import NodeContext
from ..storage.persister import Persister
from ..tree.node import NodeTier
from .previous_storage import PreviousStorage


class TokenHolder(Protocol):
    """Knows the fencing token of the incarnation that runs now; it changes when another one begins."""

    token: int


@dataclass(frozen=True)
class ResizeContext(NodeContext):
    """The SMP's parts that a resize needs. Hold `lock` to change `segments` or `previous`.

    Call `persister.release` for segments that leave, and `previous_storage.stop` before those in `previous` change: a
    thread that writes a checkpoint has mappings of its own.
    """

    incarnation: TokenHolder
    previous_storage: PreviousStorage
    persister: Persister
    tier: NodeTier
    lock: AbstractContextManager[Any]

    @property
    def token(self) -> int:
        """The fencing token now. Read it again after waiting: another incarnation may have begun."""
        return self.incarnation.token

    def segments_of_other_sizes(self, world_size: int) -> list[Segment]:
        """Segments that still have their own names, of a job that had not `world_size` ranks."""
        return [segment for segment in self.segments.values() if segment.world_size not in (0, world_size)]
