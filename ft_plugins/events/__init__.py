"""Events: a catalogue of event types, and one append-only stream of events per node."""

from . import catalogue
from .declaration import EventType, Severity
from .stream import (
    SUMMED,
    Damage,
    Event,
    Events,
    Sink,
    file_sink,
    log_sink,
    newest_proof,
    read,
    recent_of,
    say,
    standing_alarm,
)

__all__ = [
    "SUMMED",
    "Damage",
    "Event",
    "EventType",
    "Events",
    "Severity",
    "Sink",
    "catalogue",
    "file_sink",
    "log_sink",
    "newest_proof",
    "read",
    "recent_of",
    "say",
    "standing_alarm",
]
