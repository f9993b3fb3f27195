"""What `ft-plugins status` shows: a report for each run directory, as JSON and as a row of a table.

In: run directories, the replies of their SMPs. Out: reports, rows of text. Raises ConfigError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from ..config import run_root
from ..errors import FtError
from ..events import standing_alarm
from ..smp import client as smp
from ..smp import liveness
from ..smp.pace import pace_text
from ..smp.status import Signal, marks_in, newest_common
from ..snapshot.slots import Mark, Version

ASK_SECONDS = 5.0  # timeout for an SMP's answer; a live one answers within milliseconds


def run_directories(job: str | None, node: str | None) -> list[Path]:
    """The run directories of this machine; `job`, `node`: only of these names."""
    every = sorted(path for path in run_root().glob("*/*") if path.is_dir())
    return [path for path in every if job in (None, path.parent.name) and node in (None, path.name)]


def reports(job: str | None, node: str | None) -> Iterator[dict[str, Any]]:
    """The status of each SMP. For a run directory without one, `alive` is false; so it is if the SMP does not answer or
    refuses, with the `error`."""
    for run_dir in run_directories(job, node):
        report: dict[str, Any] = {"job": run_dir.parent.name, "node": run_dir.name, "alive": False}
        if liveness.held(run_dir / "smp.lock"):
            try:
                with smp.Client(run_dir, ASK_SECONDS) as client:
                    report |= {**client.status(), "alive": True}
            except FtError as error:  # one hung SMP must not hide the other jobs
                report["error"] = str(error)
        yield report | {
            "run_dir": str(run_dir), "ft_run_alive": liveness.held(run_dir / "lock"), "alarm": _alarm(run_dir),
        }  # fmt: skip


def _alarm(run_dir: Path) -> dict[str, str] | None:
    """The newest unresolved alarm of a run directory: time, name and text."""
    event = standing_alarm(run_dir / "events.jsonl")
    if event is None:
        return None
    when = datetime.fromtimestamp(event.time).astimezone().isoformat(" ", "seconds")
    return {"time": when, "name": event.name, "text": event.sentence()}


def row(report: Mapping[str, Any]) -> list[str]:
    """One row of the table of `status`."""
    ft_run = "running" if report["ft_run_alive"] else "gone"
    if not report["alive"]:
        answer = "no answer" if "error" in report else "gone"
        return [report["job"], report["node"], answer, ft_run, Signal.OFFLINE.value, *[""] * 7]
    segments, newest = report["segments"], newest_common(report)
    return [
        report["job"],
        report["node"],
        f"pid {report['pid']}",
        ft_run,
        report["signal"],
        str(report["token"]),
        str(len(segments)),
        f"{sum(segment['bytes'] for segment in segments) / 2**20:.1f} MiB",
        _version(newest, marks_in(report).get(newest, Mark.NONE)) if newest else "none yet",
        str(min((segment["completed"] for segment in segments), default="")),
        _on_nodes(report.get("node_tier", {})),
        _in_storage(report.get("storage", {})),
    ]


def _version(version: Version, mark: Mark) -> str:
    """A version, with the mark of its replicas."""
    return f"iteration {version.iteration}, lineage {version.lineage}" + (f", {mark.word}" if mark else "")


def _on_nodes(tier: Mapping[str, Any]) -> str:
    """The committed version, and the pace at which versions are committed; 'no' if nodes do not protect each other."""
    if not tier or not tier["nodes"]:
        return "no"
    pace = pace_text(tier)
    if not tier["committed"]:
        return pace or "not yet"
    return f"iteration {tier['committed'][1]}, lineage {tier['committed'][0]}" + (f"; {pace}" if pace else "")


def _in_storage(storage: Mapping[str, Any]) -> str:
    if not storage:
        return "off"
    kept = ", ".join(f"iteration {iteration}" for _, iteration in storage.get("kept", ()))
    more = f"; kept: {kept}" if kept else ""
    if storage["failed"]:
        return f"failed: {storage['failed']}{more}"
    newest = storage["newest"]
    return (f"iteration {newest[1]}, lineage {newest[0]}" if newest else "none yet") + more
