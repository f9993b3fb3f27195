"""Collective operations over all ranks of the job, outside the step path."""

from .ranks import Agreement, Collective, PendingGather
from .switch import LostNeighbour
from .transfers import Transfers

__all__ = ["Agreement", "Collective", "LostNeighbour", "PendingGather", "Transfers"]
