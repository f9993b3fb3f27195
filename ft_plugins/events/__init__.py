"""What happened, when and to whom: one append-only stream per node."""

from .stream import SUMMED, Event, Events, Sink, file_sink, read, recent_of, say

__all__ = ["SUMMED", "Event", "Events", "Sink", "file_sink", "read", "recent_of", "say"]
