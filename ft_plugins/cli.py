"""`ft-plugins`: look at what protects the jobs of this node, end it, clean up, export, read the configuration, plan.

Invariant: nothing here changes a job that is running, except `end`, which names it. What is asked for and cannot be
done is one line on stderr and exit status 1.

In: a command line. Out: tables for people, JSON for programs.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .config import Config, keys, run_root
from .config.keys import LARGEST
from .errors import ConfigError, FtError
from .events import standing_alarm
from .planner.intervals import Costs, plan_intervals
from .planner.outlook import PipelineOutlook, PlannedPipeline, plan_pipeline
from .planner.pipeline import PipelineSchedule
from .planner.survival import Cluster, plan_survival
from .smp import client as smp
from .smp import leftovers, liveness
from .smp.pace import in_words
from .smp.status import Signal, marks_in, newest_common
from .snapshot.slots import Mark, Version

ASK_SECONDS = 5.0  # an SMP that is alive answers in milliseconds
_PAGE = f"""# Configuration

Give a key as a command line flag, before or after the script, or in one `ft_plugins` block of JSON (DeepSpeed's
configuration). A key that is unknown, misspelt or without effect is an error, and so is a number larger than
{LARGEST:,}. `ft-plugins config -- FLAGS` prints the configuration that flags amount to, `--format json|env|flags`
in another spelling.

This page is the output of `ft-plugins config --format markdown`; a test compares them."""
_EXTRA_WORDS = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Look at, end and clean up what protects jobs here; export checkpoints; explain the configuration; plan.",
)

checkpoint_app = typer.Typer(no_args_is_help=True, help="Checkpoints in storage.")
app.add_typer(checkpoint_app, name="checkpoint")

JobOption = Annotated[str | None, typer.Option("--job", help="only this job")]
NodeOption = Annotated[str | None, typer.Option("--node", help="only this node name")]


class Format(str, Enum):
    """How `config` prints the keys."""

    table = "table"
    markdown = "markdown"
    json = "json"
    env = "env"
    flags = "flags"
    schema = "schema"


@app.command()
def status(
    job: JobOption = None,
    node: NodeOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a line, for programs")] = False,
) -> None:
    """Show the snapshot management processes of this node and the versions that they hold."""
    found = list(_reports(job, node))
    if job is not None and not found:
        raise ConfigError(f"no job '{job}' is known here; expected one of: {_known()}")
    if as_json:
        for report in found:
            print(json.dumps(report))
        return
    table = Table(
        *("job", "node", "SMP", "ft-run", "state", "token", "ranks", "host memory", "newest version", "completed"),
        *("survives a lost node", "storage"),
    )
    for report in found:
        table.add_row(*_row(report))
    _console().print(table if found else "no job is known here")
    for report in found:
        if alarm := report["alarm"]:
            print(f"last alarm of job {report['job']}, {alarm['time']}: {alarm['text']}")


@app.command()
def end(
    job: Annotated[str, typer.Argument(help="name of the job, as `status` shows it")],
    node: NodeOption = None,
) -> None:
    """End a job's SMP in order: its snapshots are dropped. The training processes must have ended before."""
    found = _run_directories(job, node)
    if not found:
        raise ConfigError(f"no job '{job}' is known here; expected one of: {_known()}")
    for run_dir in found:
        where = f"job {job} on node {run_dir.name}"
        if liveness.held(run_dir / "lock"):
            raise FtError(f"{where} is running under ft-run; stop that first: `end` would drop what protects it")
        if liveness.held(run_dir / "smp.lock"):
            with smp.Client(run_dir, ASK_SECONDS) as client:
                client.end()
            print(f"{where}: ended")
        else:
            print(f"{where}: no SMP is running; `{_sweep_of(job)}` removes what it may have left")


@checkpoint_app.command()
def now(
    job: JobOption = None,
    node: NodeOption = None,
    seconds: Annotated[float, typer.Option(min=0, help="how long to wait for it")] = 600.0,
    keep: Annotated[
        bool, typer.Option("--keep", help="it stays, whatever --reft-checkpoint-keep says, until its folder is removed")
    ] = False,
) -> None:
    """Write the newest snapshot of a running job to its --reft-checkpoint-dir, and print where it is."""
    found = [path for path in _run_directories(job, node) if liveness.held(path / "smp.lock")]
    names = sorted({path.parent.name for path in found})
    if not names:
        raise ConfigError(f"no job{f' {job!r}' if job else ''} has an SMP here; known are: {_known()}")
    if len(names) > 1:
        raise ConfigError(f"--job: several jobs have an SMP here, name one of: {', '.join(names)}")
    with ThreadPoolExecutor(len(found)) as pool:  # SMPs of nodes that share this machine write one checkpoint together
        outcomes = list(pool.map(lambda run_dir: _checkpoint(run_dir, seconds, keep), found))
    for path in sorted(set(outcomes)):
        print(path)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="a checkpoint's folder, as `checkpoint now` prints it")],
    to: Annotated[Path, typer.Option("--to", help="a new or empty folder, for the framework's own --load")],
) -> None:
    """Write a checkpoint as the framework's own: it loads without ft_plugins then. Needs no GPU and no job."""
    from .adapters.export_command import export as write  # torch and the framework take their time

    found = write(checkpoint, to)
    print(f"{to}: {found['framework']}, iteration {found['iteration']}, {found['tensors']} tensors")
    if found["left_out"]:
        print(f"without the arguments {', '.join(found['left_out'])}, whose types cannot be saved")


@app.command()
def sweep(
    older_than: Annotated[
        float,
        typer.Option(min=0, help="seconds since the job was last active; younger segments can still be resumed from"),
    ] = Config().orphan_seconds,
    job: JobOption = None,
) -> None:
    """Remove the shared memory of jobs whose SMP and ft-run are both gone, also where their run directory is."""
    try:
        removed = leftovers.sweep(run_root(), older_than, job=job)
    except OSError as error:
        raise FtError(f"not everything could be removed: {error.filename}: {error.strerror}") from error
    for path in removed:
        print(f"removed {path}")
    print(f"{len(removed)} segments removed")


@app.command(context_settings=_EXTRA_WORDS)
def config(
    context: typer.Context,
    form: Annotated[Format, typer.Option("--format", help="how to print")] = Format.table,
) -> None:
    """Explain every key, or print the configuration that the flags given after `--` amount to, in any spelling."""
    chosen, rest = Config.from_flags(context.args)
    if rest:
        raise ConfigError(f"{rest[0]}: unknown; expected flags such as --reft, after `--`")
    shown = chosen if context.args else _everything()
    match form:
        case Format.table if context.args:
            print(chosen.table())
        case Format.table:
            _console().print(_explained())
        case Format.markdown:
            print(_markdown())
        case Format.json:
            print(json.dumps({"ft_plugins": shown.block()}, indent=2))
        case Format.env:
            print(f"FTP_CONFIG={shlex.quote(json.dumps(shown.block()))}")
        case Format.flags:
            print(shlex.join(shown.flags()))
        case Format.schema:
            print(json.dumps(Config.model_json_schema(), indent=2))


@app.command()
def plan(
    nodes: Annotated[int, typer.Option(help="nodes of the job")],
    group_nodes: Annotated[int, typer.Option(help="nodes of a sharding group: data-parallel replicas of a stage")],
    hw_rate: Annotated[float, typer.Option(help="hardware failures per node and day (per day^shape)")],
    sw_rate: Annotated[float, typer.Option(help="software failures per node and day (per day^shape)")],
    shape: Annotated[float, typer.Option(help="Weibull shape; above 1 nodes wear out")] = 1.0,
    threshold: Annotated[float, typer.Option(help="the survival that is enough")] = 0.9,
    state_gib: Annotated[float | None, typer.Option(help="for intervals: state captured by a node")] = None,
    iteration_seconds: Annotated[float | None, typer.Option(help="for intervals: of one iteration")] = None,
    snapshot_seconds: Annotated[float | None, typer.Option(help="for intervals: wait at the fence")] = None,
    link_gib_per_second: Annotated[float | None, typer.Option(help="for intervals: exchange, of one node")] = None,
    storage_gib_per_second: Annotated[float | None, typer.Option(help="for intervals: storage, of the job")] = None,
    max_overhead: Annotated[float | None, typer.Option(help="share of time for snapshots; unset: 0.01")] = None,
    replace_seconds: Annotated[float | None, typer.Option(help="to replace a lost node; unset: 600")] = None,
    checkpoint_seconds: Annotated[
        float | None, typer.Option(help="wait for a checkpoint without REFT; unset: until it is written")
    ] = None,
    stages: Annotated[int | None, typer.Option(help="for bubbles: pipeline stages, each on nodes of its own")] = None,
    microbatches: Annotated[int | None, typer.Option(help="for bubbles: of an iteration, in one pipeline")] = None,
    schedule: Annotated[PipelineSchedule | None, typer.Option(help="for bubbles: of the passes; unset: 1f1b")] = None,
    chunks: Annotated[int | None, typer.Option(help="for bubbles: of a rank, if interleaved; unset: 2")] = None,
    message_share: Annotated[
        float | None, typer.Option(help="for bubbles: length of a message, in forward passes of a stage; unset: 0")
    ] = None,
    restart_seconds: Annotated[
        float | None, typer.Option(help="for goodput: from a failure until state is loaded; unset: 600")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="draw survival over days into this file (.png, .svg, .pdf)")] = None,
    plot_bubbles: Annotated[Path | None, typer.Option(help="draw the pipeline and goodput into this file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object, for programs")] = False,
) -> None:
    """How long state in memory survives, and how often to save it: tables from failure rates and what saving takes.
    With a pipeline: its bubbles, how often a checkpoint fits into them, and goodput under every protection."""
    cluster = Cluster(nodes, group_nodes, hw_rate, sw_rate, shape)
    costs = Costs.given(
        {
            "state_gib": state_gib,
            "iteration_seconds": iteration_seconds,
            "snapshot_seconds": snapshot_seconds,
            "link_gib_per_second": link_gib_per_second,
            "storage_gib_per_second": storage_gib_per_second,
            "max_overhead": max_overhead,
            "replace_seconds": replace_seconds,
            "checkpoint_seconds": checkpoint_seconds,
        }
    )
    wanted = PlannedPipeline.given(
        {
            "stages": stages,
            "microbatches": microbatches,
            "schedule": schedule and schedule.value,
            "chunks": chunks,
            "message_share": message_share,
            "restart_seconds": restart_seconds,
        }
    )
    outlook = plan_survival(cluster, threshold)
    intervals = plan_intervals(cluster, costs) if costs is not None else None
    pipeline = plan_pipeline(wanted, cluster, costs) if wanted is not None else None
    if plot is not None:
        _draw(cluster, threshold, plot)
    if plot_bubbles is not None:
        _draw_bubbles(pipeline, plot_bubbles)
    if as_json:
        parts = {"survival": outlook, "intervals": intervals, "pipeline": pipeline}
        print(json.dumps({name: part and part.block() for name, part in parts.items()}))
    else:
        print("\n\n".join(part.table() for part in (outlook, intervals, pipeline) if part))


def main() -> None:
    """Entry of the console script."""
    try:
        app(prog_name="ft-plugins")
    except FtError as error:
        print(f"ft-plugins: {error}", file=sys.stderr)
        sys.exit(1)


def _console() -> Console:
    """Wide where nobody looks at a terminal: lines of a pipe or a file are not cut."""
    return Console(width=None if sys.stdout.isatty() else 200)


def _run_directories(job: str | None, node: str | None) -> list[Path]:
    found = sorted(path for path in run_root().glob("*/*") if path.is_dir())
    return [path for path in found if job in (None, path.parent.name) and node in (None, path.name)]


def _sweep_of(job: str) -> str:
    """The command that removes what this job alone has left."""
    return f"ft-plugins sweep --job {shlex.quote(job)} --older-than 0"


def _known() -> str:
    return ", ".join(sorted({path.parent.name for path in _run_directories(None, None)})) or "none"


def _reports(job: str | None, node: str | None) -> Iterator[dict[str, Any]]:
    """What each SMP says of itself; for a run directory without one, that it is not alive."""
    for run_dir in _run_directories(job, node):
        report: dict[str, Any] = {"job": run_dir.parent.name, "node": run_dir.name, "alive": False}
        if liveness.held(run_dir / "smp.lock"):
            with smp.Client(run_dir, ASK_SECONDS) as client:
                report |= {**client.status(), "alive": True}
        yield report | {
            "run_dir": str(run_dir), "ft_run_alive": liveness.held(run_dir / "lock"), "alarm": _alarm(run_dir),
        }  # fmt: skip


def _alarm(run_dir: Path) -> dict[str, str] | None:
    """The newest alarm of a run directory that nothing has ended: when, its name and text."""
    event = standing_alarm(run_dir / "events.jsonl")
    if event is None:
        return None
    when = datetime.fromtimestamp(event.time).astimezone().isoformat(" ", "seconds")
    return {"time": when, "name": event.name, "text": event.sentence()}


def _row(report: Mapping[str, Any]) -> list[str]:
    ft_run = "running" if report["ft_run_alive"] else "gone"
    if not report["alive"]:
        return [report["job"], report["node"], "gone", ft_run, Signal.OFFLINE.value, *[""] * 7]
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
    """With what is known of its replicas."""
    return f"iteration {version.iteration}, lineage {version.lineage}" + (f", {mark.word}" if mark else "")


def _on_nodes(tier: Mapping[str, Any]) -> str:
    """Which version could be rebuilt if another node were lost now."""
    if not tier or not tier["nodes"]:
        return "no"
    every = in_words(tier)
    if not tier["counts"]:
        return every or "not yet"
    return f"iteration {tier['counts'][1]}, lineage {tier['counts'][0]}" + (f"; {every}" if every else "")


def _in_storage(storage: Mapping[str, Any]) -> str:
    if not storage:
        return "off"
    kept = ", ".join(f"iteration {iteration}" for _, iteration in storage.get("kept", ()))
    more = f"; kept: {kept}" if kept else ""
    if storage["failed"]:
        return f"failed: {storage['failed']}{more}"
    newest = storage["newest"]
    return (f"iteration {newest[1]}, lineage {newest[0]}" if newest else "none yet") + more


def _draw(cluster: Cluster, threshold: float, path: Path) -> None:
    with _drawing("--plot", path):
        from .report.plan_pictures import draw_survival

        draw_survival(cluster, threshold, path)


def _draw_bubbles(outlook: PipelineOutlook | None, path: Path) -> None:
    if outlook is None or not outlook.plans:
        raise ConfigError(
            "--plot-bubbles: without effect; there is a picture when stages, microbatches and what saving takes "
            "(--state-gib and the others for intervals) are given too"
        )
    with _drawing("--plot-bubbles", path):
        from .report.plan_pictures import draw_plan

        draw_plan(outlook.timelines, outlook.plans, path)


@contextmanager
def _drawing(option: str, path: Path) -> Iterator[None]:
    """What goes wrong with a picture, in one line."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("matplotlib"):
            raise
        raise FtError(f"{option} needs matplotlib, which is not installed; pip install 'ft_plugins[report]'") from error
    except OSError as error:
        raise FtError(f"{option} {path}: cannot be written ({error.strerror})") from error


def _checkpoint(run_dir: Path, seconds: float, keep: bool) -> str:
    """Have the SMP of a run directory write the newest version; the checkpoint's folder. Raises FtError."""
    where = f"job {run_dir.parent.name} on node {run_dir.name}"
    with smp.Client(run_dir, ASK_SECONDS) as client:
        found = client.checkpoint(smp.REQUEST, seconds, keep=keep)
    match found["state"]:
        case "done":
            return str(found["path"])
        case "off":
            raise FtError(f"{where}: it has no folder for checkpoints; start it with --reft-checkpoint-dir")
        case "nothing":
            raise FtError(f"{where}: no version is in memory yet that all ranks hold")
        case "writing":
            raise FtError(f"{where}: not complete after {seconds:.0f} s; `ft-plugins status` shows when it is")
    raise FtError(f"{where}: {found['reason']}")


def _everything() -> Config:
    """Every key at its default, written out; names that are unset stay unset."""
    block: dict[str, Any] = {}
    for key in keys():
        if key.system:
            block[key.path[0]] = {}
        elif key.default is not None:
            (block if len(key.path) == 1 else block[key.path[0]])[key.path[-1]] = key.default
    return Config.from_json(block)


def _rows() -> Iterator[tuple[str, str, str, str, str]]:
    for key in keys():
        meaning = key.meaning if key.switch else f"{key.meaning} ({key.expected})"
        yield key.flag, key.name, key.shown(key.default), key.unit, meaning


def _explained() -> Table:
    table = Table("flag", "in JSON", "default", "unit", "meaning")
    for flag, name, default, unit, meaning in _rows():
        table.add_row(flag, name, default, unit, meaning)
    return table


def _markdown() -> str:
    """The page docs/configuration.md: general keys, then the keys of each system."""
    head = ["", "| flag | in JSON | default | unit | meaning |", "|---|---|---|---|---|"]
    lines = [_PAGE, "", "## General", *head]
    for key, (flag, name, *rest) in zip(keys(), _rows(), strict=True):
        if key.system:
            lines += ["", f"## {name.upper()}", *head]
        lines.append(f"| `{flag}` | `{name}` | " + " | ".join(rest) + " |")
    return "\n".join(lines)
