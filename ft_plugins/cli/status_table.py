"""The facts of `ft-plugins status` as text: a paragraph for each job on this node.

Invariant: lines are not longer than the terminal is wide, down to 60 columns, unless a single word is. A line is a
label and its words, so more lines can be added (`_lines`).

In: `Facts`. Out: text.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .job_state import span_text
from .status_facts import Facts

_LABEL = 15  # columns of a label, with the indentation
_NARROWEST = 60  # columns


def text_of(facts: Sequence[Facts], width: int) -> str:
    """Paragraphs of lines of at most `width` columns; 0: of any length."""
    return "\n\n".join("\n".join(_paragraph(each, width)) for each in facts)


def _paragraph(facts: Facts, width: int) -> Iterator[str]:
    width = max(width, _NARROWEST) if width else 1 << 20
    yield from textwrap.wrap(_head(facts), width, subsequent_indent="  ")
    for label, words in _lines(facts):
        yield from textwrap.wrap(
            words, width, initial_indent=f"  {label:<{_LABEL - 2}}", subsequent_indent=" " * _LABEL,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip


def _head(facts: Facts) -> str:
    ranks, size, nodes = facts["ranks"], facts["world_size"], facts["nodes"]
    counts = [f"{ranks} of {size} ranks" if size > ranks else _count(ranks, "rank")] if facts["smp_answers"] else []
    counts += [_count(nodes, "node")] if nodes else []
    return f"{facts['job']} on node {facts['node']}: " + ", ".join([facts["state"], *counts])


def _lines(facts: Facts) -> Iterator[tuple[str, str]]:
    """Label and words of each line."""
    if alarm := facts["alarm"]:
        yield "last alarm", f"{alarm['time']}: {alarm['text']}"
    yield "now", facts["headline"]
    yield "to do", facts["remedy"]
    if facts["iteration"] or facts["smp_answers"]:
        yield "training", "; ".join(_training(facts))
    if facts["slow"]:
        factors = ", ".join(f"rank {rank} {factor:g} times" for rank, factor in facts["slow"])
        yield "slow", f"{factors} as long as the others"
    if facts["smp_answers"]:
        newest = facts["newest"]
        yield "in memory", f"{_version(newest['process'], 'none yet')}; {_bytes(facts['memory_bytes'])} claimed"
        if facts["protection"] or facts["ranks"]:  # a spare has nothing to lose
            yield "other nodes", _on_nodes(newest["node"], facts["protection"])
        yield "storage", _in_storage(newest["storage"], facts["storage"])
    yield "processes", _processes(facts)
    if facts["smp_error"]:
        yield "error", facts["smp_error"]


def _training(facts: Facts) -> Iterator[str]:
    iteration, seconds = facts["iteration"], facts["iteration_age_seconds"]
    if iteration:
        yield f"iteration {iteration}" + (f", {ago(seconds)}" if seconds is not None else "")
    else:
        yield "no iteration is completed yet"
    yield _count(facts["restarts"], "restart")
    before = facts["downtime_seconds"] - (facts["down_for_seconds"] or 0.0)
    if facts["down_for_seconds"] is not None and facts["ft_run_alive"]:
        total = f", in total {span_text(facts['downtime_seconds'])}" if before >= 1.0 else ""
        yield f"down for {span_text(facts['down_for_seconds'])}{total}"
    elif before >= 0.05:  # what is rounded; the time since the end of a job is no downtime
        yield f"was down for {span_text(before)} in total"


def _version(newest: Mapping[str, Any] | None, absent: str) -> str:
    if newest is None:
        return absent
    mark = f", {newest['mark']}" if newest.get("mark") else ""
    return f"iteration {newest['iteration']}, {ago(newest['age_seconds'])} (lineage {newest['lineage']}{mark})"


def _on_nodes(newest: Mapping[str, Any] | None, protection: Mapping[str, Any] | None) -> str:
    """The committed version, how often one is committed, and which losses that survives."""
    if protection is None:
        return "no: a lost node is not survived from memory"
    losses = protection["losses"]
    how = f"{protection['redundancy']}: any {_count(losses, 'node')} of a group may be lost" if losses else ""
    return "; ".join(filter(None, [_version(newest, "none yet"), protection["pace"], how]))


def _in_storage(newest: Mapping[str, Any] | None, storage: Mapping[str, Any] | None) -> str:
    if storage is None:
        return "off"
    kept = ", ".join(f"iteration {iteration}" for _, iteration in storage["kept"])
    failed = [f"failed: {storage['failed']}"] if storage["failed"] else []
    return "; ".join([*failed, _version(newest, "none yet"), *([f"kept: {kept}"] if kept else [])])


def _processes(facts: Facts) -> str:
    ft_run = f"ft-run {'is running' if facts['ft_run_alive'] else 'is gone'}"
    if facts["smp_answers"]:
        return f"{ft_run}; SMP pid {facts['smp_pid']}; incarnation {facts['token']}"
    return f"{ft_run}; the SMP {'gives no answer' if facts['smp_error'] else 'is gone'}"


def ago(seconds: float) -> str:
    """An age as text."""
    return f"{span_text(seconds)} ago"


def _bytes(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.1f} MiB"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
