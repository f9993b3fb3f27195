"""What is known of a job on a node, for people: one map of plain values for each run directory.

Invariant: the keys of `Facts` are stable and documented (docs/operating.md); `details`, the reply of the SMP, is not.
Imports nothing that is slow: neither numpy nor pydantic.

In: a run directory, the reply of its SMP. Out: `Facts`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from ...base.files import words_in
from ...events import newest_proof, standing_alarm
from ...snapshot.segment import paths
from ...snapshot.segment.slots import Mark
from ..exchange.pace import pace_text
from ..watch import liveness
from ..watch.job_history import History, had_others, read_history, read_note, takes_no_part
from ..watch.job_state import JobFacts, job_state
from .status import Signal, holds_nothing, marks_in, newest_common, progress_of

Facts = Mapping[str, Any]


def left_in_memory(run_dir: Path) -> bool:
    """Whether there are segments of the job on this node."""
    names = run_dir.parent.name, run_dir.name
    return bool(paths.segments_of(*names) or paths.previous_segments_of(*names))


def facts_of(
    run_dir: Path, reply: Mapping[str, Any], error: str | None = None, others: Sequence[Mapping[str, Any]] = ()
) -> Facts:
    """The facts of a run directory. `reply`: to `status`, of its SMP; {} if that does not run, or does not answer,
    because of `error`. `others`: what the job's other nodes report."""
    now, ft_run_alive = time.time(), liveness.held(run_dir / "lock")
    history = reply.get("history") or (read_history(run_dir) or History()).report(now)
    segments, tier = reply.get("segments", []), reply.get("node_tier") or {}
    nodes = len(tier.get("nodes", ()))
    newest = _newest(reply, history["tiers"]) if reply else history["tiers"]
    own = newest["process"]
    ahead = [each for each in others if own and (each["lineage"] or 0) > own["lineage"]]
    launched = ft_run_alive or reply.get("watched_lives", False)
    progress, alarm = reply.get("progress", {}), _alarm(run_dir)
    note = None if launched and not ft_run_alive else read_note(run_dir)  # it is of an earlier launch
    if ahead or takes_no_part(note):  # the job has gone on: what this node did is past, and it is not down
        history = {
            **history, **dict.fromkeys(("iteration", "iteration_age_seconds", "down_for_seconds")),
            "downtime_seconds": history["downtime_seconds"] - (history["down_for_seconds"] or 0.0),
        }  # fmt: skip
    state = job_state(
        JobFacts(
            job=run_dir.parent.name,
            node=run_dir.name,
            now=now,
            launched=launched,
            note=note,
            smp_answers=bool(reply),
            smp_hangs=error is not None,
            holds=not holds_nothing({**reply, "node_tier": {}}) if reply else left_in_memory(run_dir),
            newest=own["iteration"] if own else None,
            kept_seconds=reply.get("kept_seconds"),
            trains=bool(reply) and progress_of(reply, reply["token"]) is not None,
            failed=reply.get("signal") == Signal.UNHEALTHY.value,
            stopped=tuple(reply.get("stopped", ())),
            restarts=history["restarts"],
            idle_seconds=progress.get("no_progress_seconds", 0.0),
            hang_seconds=progress.get("hang_seconds", 0.0),
            alarm=alarm is not None,
            waits_for=progress.get("waits_for", ""),
            went_on=f"iteration {ahead[0]['held']} on node {ahead[0]['node']}" if ahead else "",
            had_others=had_others(run_dir),
        )
    )
    return {
        "job": run_dir.parent.name,
        "node": run_dir.name,
        "run_dir": str(run_dir),
        "state": state.state.value,
        "headline": state.headline,
        "remedy": state.remedy,
        "signal": reply.get("signal", Signal.OFFLINE.value),
        "smp_answers": bool(reply),
        "smp_pid": reply.get("pid"),
        "smp_error": error,
        "ft_run_alive": ft_run_alive,
        "token": reply.get("token"),
        "ranks": len(segments),
        "world_size": reply.get("world_size") or len(segments),
        "nodes": nodes or None,
        "memory_bytes": sum(segment["bytes"] for segment in segments) + tier.get("parity_bytes", 0),
        "iteration": history["iteration"],
        "iteration_age_seconds": history["iteration_age_seconds"],
        "restarts": history["restarts"],
        "downtime_seconds": history["downtime_seconds"],
        "down_for_seconds": history["down_for_seconds"],
        "slow": reply.get("progress", {}).get("slow", []),
        "newest": newest,
        "protection": _protection(tier) if nodes else None,
        "storage": {key: reply["storage"][key] for key in ("path", "failed", "kept")} if reply.get("storage") else None,
        "alarm": alarm,
        "proof": proof.fields.get("reason") if (proof := newest_proof(run_dir / "events.jsonl")) else None,
        "rehearsed": words_in(run_dir / paths.REHEARSED_FILE) or None,
        "metrics_error": reply.get("metrics_error") or None,
        "details": reply or None,
    }


def _newest(reply: Mapping[str, Any], tiers: Mapping[str, Any]) -> dict[str, Any]:
    """The newest version by tier, with the mark of its replicas."""
    newest = dict(tiers)
    common = newest_common(reply)
    if newest["process"] and common:
        newest["process"] = newest["process"] | {"mark": marks_in(reply).get(common, Mark.NONE).word}
    return newest


def _protection(tier: Mapping[str, Any]) -> dict[str, Any]:
    """How nodes protect each other, and the pace at which versions are committed."""
    return {"redundancy": tier.get("redundancy", ""), "losses": tier.get("losses", 0), "pace": pace_text(tier)}


def _alarm(run_dir: Path) -> dict[str, str] | None:
    """The newest unresolved alarm of a run directory: time, name and text."""
    event = standing_alarm(run_dir / "events.jsonl")
    if event is None:
        return None
    when = datetime.fromtimestamp(event.time).astimezone().isoformat(" ", "seconds")
    return {"time": when, "name": event.name, "text": event.sentence()}
