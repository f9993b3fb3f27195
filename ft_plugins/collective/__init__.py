"""Collective operations over all ranks of the job, outside the step path."""

from .ranks import Collective, PendingGather

__all__ = ["Collective", "PendingGather"]
