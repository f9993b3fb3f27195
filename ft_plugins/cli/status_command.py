"""`ft-plugins status`: once, again and again, as JSON, as metrics or as a probe. Imports nothing that is slow.

Invariant: it disturbs no job. Ctrl-C ends `--watch` with status 0.

Lines are not longer than the terminal is wide, down to 60 columns, unless a single word is. A line is a label and its
words, so more lines can be added (`_lines`).

In: a command line. Out: text, or one line of JSON. Raises ConfigError.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ConfigError
from ..events import catalogue
from ..smp.serve.node_facts import Facts
from ..smp.watch import liveness
from ..smp.watch.job_state import NOTHING, State, needs_restart, span_text
from . import status_facts

FORMAT = 2  # of the JSON; grows when a documented key changes its meaning or goes
_WATCH_SECONDS = 2.0
_SHORTEST, _LONGEST = 0.1, 86400.0  # seconds

EPILOG = """\b
states:
  ENDED        ft-run has ended and left how; or it is not known how
  DRAINED      this node was drained: the job goes on without it
  REFUSED      ft-run has ended because a restart cannot help
  STARTING     the ranks start, or start again after a failure
  TRAINING     all ranks of this node train
  WAITING      ft-run waits: for nodes, for a place, or for ranks to end; or
               the ranks, for one that may be at work
  HUNG         no rank gets on, or one is stopped by a signal
  ORPHANED     ft-run is gone without a word; its memory is kept for a while
  UNPROTECTED  ft-run is running; the SMP, which owns the snapshots, is not

\b
lines:
  now         what is known
  to do       what you can do about it
  training    the last iteration that all ranks of this node have completed;
              restarts; time without training, from the failure of a process
              of this node until all of its ranks have completed an iteration
  last restore  whether an iteration that was computed again after the last
              restore came out the same, or why that is not known
  slow        ranks that compute for much longer than the others, if there are
  in memory   the newest version that all ranks of this node hold
  other nodes the newest version from which a lost node would be rebuilt
  storage     the newest complete checkpoint
  nodes       the other nodes of the job, as their SMPs answer; only where
              nodes protect each other
  rehearsal   whether this command was rehearsed, or how it is
  metrics     why --ftp-metrics are not served, and what to do"""
_LABEL = 15  # columns of a label, with the indentation
_NARROWEST = 60  # columns
_EACH = 8  # other nodes that are named


JobOption = Annotated[str | None, typer.Option("--job", help="only this job")]
NodeOption = Annotated[str | None, typer.Option("--node", help="only this node name")]


def status(
    name: Annotated[str | None, typer.Argument(metavar="JOB", help="only this job, as --job")] = None,
    job: JobOption = None,
    node: NodeOption = None,
    every: Annotated[
        bool, typer.Option("--all", help="also jobs that have ended here and left nothing to resume from")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="show it again every SECONDS, until Ctrl-C")] = False,
    seconds: Annotated[float | None, typer.Argument(metavar="SECONDS", help="of --watch; unset: 2")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one object in one line, for programs")] = False,
    prometheus: Annotated[bool, typer.Option("--prometheus", help="metrics, in Prometheus' text format")] = False,
    probe: Annotated[
        bool, typer.Option("--probe", help="one line for each job; exit status 1 if one is not ready, or without a job")
    ] = False,
) -> None:
    """Show the jobs of this node, and of each its other nodes: how far they are, what can be resumed from, and what
    went wrong. A job that has ended here and left nothing in memory is not shown."""
    forms = [form for form, on in (("json", as_json), ("prometheus", prometheus), ("probe", probe)) if on]
    if len(forms) > 1:
        raise typer.BadParameter(f"--{forms[0]} is not allowed with --{forms[1]}")
    if watch and name and seconds is None and name.replace(".", "", 1).isdecimal():
        seconds, name = float(name), None
    wrong = f"--job {job} is not allowed with the job {name!r}" if name and job else ""
    if seconds is not None and not (watch and _SHORTEST <= seconds <= _LONGEST):
        wrong = f"{seconds:g} is for --watch, and from {_SHORTEST:g} to {_LONGEST:g} s"
    if wrong:
        raise typer.BadParameter(wrong)
    if probe and watch:
        raise ConfigError("--probe looks once; drop --watch")
    asked = Asked(name or job, node, every, forms[0] if forms else "")
    if probe:
        raise typer.Exit(_probe(asked))
    if not watch:
        print(_text(asked))
    else:
        _watch(lambda: _text(asked), seconds or _WATCH_SECONDS, redraw=sys.stdout.isatty() and not forms)


status.epilog = EPILOG  # type: ignore[attr-defined]
_FORMS = {"--json": "as_json", "--prometheus": "prometheus", "--probe": "probe"}
_SWITCHES = {**_FORMS, "--all": "every", "--watch": "watch"}


def arguments(words: Sequence[str]) -> dict[str, Any] | None:
    """The arguments of `status`, if these words are what Typer reads without help or error; its imports take as long as
    the whole command may."""
    given: dict[str, Any] = {"name": words[0]} if words and not words[0].startswith("-") else {}
    left = iter(words[len(given) :])
    for word in left:
        value = next(left, "-") if word in ("--job", "--node") else ""
        if value.startswith("-") or not value and word not in _SWITCHES:
            return None
        given[_SWITCHES.get(word, word[2:])] = value or True
    unclear = len(given.keys() & _FORMS.values()) > 1 or {"name"} < given.keys() & {"name", "job", "watch"}
    return None if unclear else given


@dataclass(frozen=True)
class Asked:
    """What a user asks: `every` job or those with something to say; `form`: json, prometheus, probe, or '' for text."""

    job: str | None
    node: str | None
    every: bool
    form: str


def _facts(asked: Asked, others: bool = False) -> tuple[list[Facts], list[Path]]:
    """The facts of the jobs that are asked for, with `others` of their other nodes too; and all run directories of
    them."""
    run_dirs = status_facts.run_directories(asked.job, asked.node)
    if asked.job is not None and not run_dirs:
        raise ConfigError(f"no job '{asked.job}' is known here; expected one of: {known_jobs()}")
    every = asked.every or asked.job is not None
    shown = [path for path in run_dirs if every or not status_facts.is_over(path)]
    return status_facts.facts_of(shown, others), run_dirs


def _probe(asked: Asked) -> int:
    """Print a line for each job; the exit status."""
    facts, _ = _facts(asked)
    failed = [needs_restart(State(each["state"]), each["ft_run_alive"]) for each in facts]
    for each, bad in zip(facts, failed, strict=True):
        print(f"{each['job']} on node {each['node']}: {'failed' if bad else 'ok'}: {each['state']}: {each['headline']}")
    if not facts:
        print("failed: no job is running here")
    return int(not facts or any(failed))


def _metrics(facts: Sequence[Facts]) -> str:
    """The metrics of these jobs, by the same table as those that an SMP serves."""
    from ..metrics import exposition

    nodes = []
    for each in facts:
        with closing(exposition.counts_of(Path(each["run_dir"]))) as counts:
            nodes.append(exposition.node_of(Path(each["run_dir"]), each["details"], counts, None))
    return exposition.text_of(nodes).rstrip("\n")


def _text(asked: Asked) -> str:
    """What is asked for, as it is now."""
    facts, run_dirs = _facts(asked, others=asked.form != "prometheus")
    if asked.form == "prometheus":
        return _metrics(facts)
    if asked.form == "json":
        return json.dumps({"format": FORMAT, "time": time.time(), "jobs": facts})
    if facts:
        # columns of the terminal; lines of a pipe or file are not broken
        return text_of(facts, shutil.get_terminal_size().columns if sys.stdout.isatty() else 0)
    return _nothing(len({path.parent.name for path in run_dirs}))


def known_jobs() -> str:
    """The names of the jobs that have a run directory here, for messages."""
    return ", ".join(sorted({path.parent.name for path in status_facts.run_directories(None, None)})) or "none"


def of_one_job(job: str | None, node: str | None, lock: str, what: str) -> list[Path]:
    """The run directories of one job, of that name if it is given, in which `lock` is held, which means that the job
    does `what`. Raises ConfigError."""
    held = [path for path in status_facts.run_directories(job, node) if liveness.held(path / lock)]
    names = sorted({path.parent.name for path in held})
    if len(names) > 1:
        raise ConfigError(f"--job: more than one job {what} here, name one of: {', '.join(names)}")
    if not names:
        known = [
            f"node {each['node']}: {each['state']}, {each['headline']}"
            for each in status_facts.facts_of(status_facts.run_directories(job, node) if job else [])
        ] or [f"known jobs: {known_jobs()}"]
        raise ConfigError(f"no job{f' {job!r}' if job else ''} {what} here; {'; '.join(known)}")
    return held


def _nothing(ended: int) -> str:
    if not ended:
        return "no job is known here"
    return f"no job is running here, and there is nothing to resume from; ended: {ended} (`ft-plugins status --all`)"


def _watch(text: Callable[[], str], seconds: float, redraw: bool) -> None:
    """Show `text()` until Ctrl-C; on a terminal in place of what it showed before."""
    try:
        if not redraw:
            while True:
                print(text(), flush=True)
                time.sleep(seconds)
        from rich.live import Live
        from rich.text import Text

        with Live(Text(text()), auto_refresh=False, screen=True) as live:
            while True:
                live.update(Text(f"{time.strftime('%X')}, every {seconds:g} s; Ctrl-C ends\n\n{text()}"), refresh=True)
                time.sleep(seconds)
    except KeyboardInterrupt:
        return


# ---- a paragraph for each job ----


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
    if facts["proof"]:
        yield "last restore", facts["proof"]
    if facts["slow"]:
        factors = ", ".join(f"rank {rank} {factor:g} times" for rank, factor in facts["slow"])
        yield "slow", f"{factors} as long as the others"
    if facts["smp_answers"]:
        newest = facts["newest"]
        yield "in memory", f"{_version(newest['process'], 'none yet')}; {_bytes(facts['memory_bytes'])} claimed"
        if facts["protection"] or facts["ranks"]:  # a spare has nothing to lose or to write
            yield "other nodes", _on_nodes(newest["node"], facts["protection"])
            yield "storage", _in_storage(newest["storage"], facts["storage"])
    for number, words in enumerate(_elsewhere(facts.get("others") or ())):
        yield "" if number else "nodes", words
    yield "processes", _processes(facts)
    if facts["rehearsed"]:
        yield "rehearsal", facts["rehearsed"]
    for label, error, action in (
        ("metrics", facts["metrics_error"], catalogue.METRICS_FAILED.action), ("error", facts["smp_error"], ""),
    ):  # fmt: skip
        if error:
            yield label, f"{error}. {action}" if action else error


def _training(facts: Facts) -> Iterator[str]:
    iteration, seconds = facts["iteration"], facts["iteration_age_seconds"]
    if iteration:
        yield (
            f"{'' if facts['smp_answers'] else 'at least '}iteration {iteration}"  # at least what was written down
            + (f", {ago(seconds)}" if seconds is not None else "")
        )
    else:
        yield "no iteration is completed here yet"
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


def _elsewhere(others: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """How the job's other nodes are: in one sentence those that train without an alarm, then each of the others."""
    well = [each for each in others if each["state"] == State.TRAINING.value and not each["alarm"]]
    if well:
        reached = sorted({each["iteration"] or 0 for each in well})
        yield f"{_names(well)}: TRAINING, iteration {' to '.join(map(str, dict.fromkeys((reached[0], reached[-1]))))}"
    rest = [each for each in others if each not in well]
    for each in rest[:_EACH]:
        if each["error"]:
            yield f"{each['node']}: no answer: {each['error']}"
            continue
        iteration = f", iteration {each['iteration']}" if each["iteration"] else ""
        alarm = f"; last alarm: {each['alarm']}" if each["alarm"] else ""
        remedy = f"; to do: {each['remedy']}" if each["remedy"] != NOTHING else ""
        yield f"{each['node']}: {each['state']}{iteration}: {each['headline']}{remedy}{alarm}"
    if rest[_EACH:]:
        yield f"{_names(rest[_EACH:])}: neither; see --json"


def _names(nodes: Sequence[Mapping[str, Any]]) -> str:
    """The first names, and how many more there are."""
    more = [f"{len(nodes) - _EACH} more"] if len(nodes) > _EACH else []
    return ", ".join([*(each["node"] for each in nodes[:_EACH]), *more])


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
