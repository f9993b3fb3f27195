"""Metrics in Prometheus' text format. Pure, but for `node_of`, which reads a run directory.

In: `Node`s. Out: text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .event_counts import READ_BYTES, EventCounts
from .table import METRICS, Node, summed_fields

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def counts_of(run_dir: Path) -> EventCounts:
    """The counts of the events that the table needs."""
    return EventCounts(run_dir / "events.jsonl", summed_fields())


def node_of(
    run_dir: Path, status: Mapping[str, Any] | None, counts: EventCounts, limit: int | None = READ_BYTES
) -> Node:
    """What is known of the job of a run directory; `status`: the reply of its SMP. `limit`: see `EventCounts.read`."""
    return Node(run_dir.parent.name, run_dir.name, status, counts.read(limit))


def text_of(nodes: Sequence[Node]) -> str:
    """All metrics of these nodes."""
    return "".join(f"{line}\n" for line in _lines(nodes))


def _lines(nodes: Sequence[Node]) -> Iterator[str]:
    for metric in METRICS:
        samples = [
            f"{metric.name}{_braced({'ftp_job': node.job, 'node': node.name, **labels})} {_number(float(value))}"
            for node in nodes
            for labels, value in metric.read(node)
        ]
        if samples:
            yield f"# HELP {metric.name} {_escaped(metric.meaning)}"
            yield f"# TYPE {metric.name} {metric.kind}"
            yield from samples


def _braced(labels: Mapping[str, str]) -> str:
    quoted = (f'{name}="{_escaped(value, quotes=True)}"' for name, value in labels.items())
    return "{" + ",".join(quoted) + "}"


def _escaped(text: str, quotes: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(int(value)) if value.is_integer() else repr(value)
