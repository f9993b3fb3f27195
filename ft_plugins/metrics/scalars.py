"""Metrics as scalars, for the writer of a framework (TensorBoard, W&B and others). Pure.

In: a `Node`. Out: values by tag; a tag is `ft/`, the metric's name without affixes, and its labels but the rank.
"""

from __future__ import annotations

import math

from .table import METRICS, Metric, Node

SCALARS = tuple(
    metric
    for metric in METRICS
    if metric.name
    in {
        "ftp_restarts_total", "ftp_downtime_seconds_total", "ftp_lost_iterations_total", "ftp_version_age_seconds",
        "ftp_exchange_backlog_iterations", "ftp_fence_wait_seconds_total", "ftp_snapshots_skipped_total",
        "ftp_memory_claimed_bytes", "ftp_bubble_fill_ratio", "ftp_averaging_wait_seconds_total",
        "ftp_synchronisation_wait_seconds_total",
    }
)  # fmt: skip


def tag_of(metric: Metric) -> str:
    """The tag of a metric, without its labels."""
    return f"ft/{metric.name.removeprefix('ftp_').removesuffix('_total')}"


def scalars_of(node: Node) -> dict[str, float]:
    """The scalars of a node; of what ranks count, that of the rank with the most. What is unknown is left out."""
    found: dict[str, float] = {}
    for metric in SCALARS:
        for labels, value in metric.read(node):
            tag = "/".join([tag_of(metric), *(each for name, each in labels.items() if name != "rank")])
            if math.isfinite(value):
                found[tag] = max(value, found.get(tag, value))
    return found
