"""What the parts of a node's SMP have in common, as one object."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

from ...events import Events
from ...snapshot.segment.segment import Segment
from ..resize.previous_segments import PreviousSegments
from ..watch.alarms import Alarms


@dataclass(frozen=True)
class NodeContext:
    """The SMP of `node` in a job. `segments`: the SMP's own, of the current size, by rank; `previous`: those of
    previous sizes."""

    run_dir: Path
    job: str
    node: str
    events: Events
    alarms: Alarms
    segments: MutableMapping[int, Segment]
    previous: PreviousSegments

    @classmethod
    def of(
        cls, run_dir: Path, job: str, node: str, events: Events, segments: MutableMapping[int, Segment]
    ) -> NodeContext:  # fmt: skip
        """With what is in the run directory and in shared memory."""
        return cls(run_dir, job, node, events, Alarms(run_dir), segments, PreviousSegments(job, node))
