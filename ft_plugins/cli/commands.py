"""`ft-plugins`: show, end, clean up and export what protects this node's jobs; explain the configuration; plan.

Invariant: no command but `drain` disturbs a running job; `end` drops snapshots, and refuses if the job runs under
ft-run. A failure is one line on stderr and exit status 1.

In: a command line. Out: tables for people, JSON for programs.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..config import Config, keys, run_root
from ..config.keys import LARGEST
from ..errors import ConfigError, FtError
from ..report.goodput import goodput
from ..report.html_page import html_page
from ..report.recovery_phases import phase_lines, recovery_phases
from ..smp.serve import client as smp
from ..smp.serve import leftovers
from ..smp.watch import liveness
from . import status_command
from .check_command import check
from .doctor_command import doctor
from .drain_command import drain
from .events_command import events
from .job_events import EventsOption, JobArgument, job_events
from .plan_command import plan_app
from .status_command import known_jobs
from .status_facts import ASK_SECONDS, run_directories
from .trace_command import trace, write_text
from .why_command import why

_ANY_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Show, end and clean up what protects jobs on this node; report on restarts; export checkpoints; explain the "
    "configuration; plan.",
)

checkpoint_app = typer.Typer(no_args_is_help=True, help="Checkpoints in storage.")
app.add_typer(checkpoint_app, name="checkpoint")


JobOption = Annotated[str | None, typer.Option("--job", help="only this job")]
NodeOption = Annotated[str | None, typer.Option("--node", help="only this node name")]
_PAGE = f"""# Configuration

Give a key as a command line flag, before or after the script, or in one `ft_plugins` block of JSON (DeepSpeed's
configuration). A key that is unknown, misspelt or without effect is an error, and so is a number larger than
{LARGEST:,}. `ft-plugins config -- FLAGS` prints the configuration that the flags yield, with
`--format json|env|flags` in another format.

This page is the output of `ft-plugins config --format markdown`; a test compares them."""


class Format(str, Enum):
    """How `config` prints the keys."""

    table = "table"
    markdown = "markdown"
    json = "json"
    env = "env"
    flags = "flags"
    schema = "schema"


@app.command(context_settings=_ANY_FLAGS, add_help_option=False)
def status(context: typer.Context) -> None:
    """Show the jobs of this node: how far they are, what can be resumed from, and what went wrong."""
    status_command.main(context.args)


@app.command()
def end(
    job: Annotated[str, typer.Argument(help="name of the job, from `status`")],
    node: NodeOption = None,
) -> None:
    """End a job's SMP and drop its snapshots. The training processes must have ended before."""
    directories = run_directories(job, node)
    if not directories:
        raise ConfigError(f"no job '{job}' is known here; expected one of: {known_jobs()}")
    for run_dir in directories:
        where = f"job {job} on node {run_dir.name}"
        if liveness.held(run_dir / "lock"):
            raise FtError(f"{where} is running under ft-run; stop that first: `end` would drop its snapshots")
        if liveness.held(run_dir / "smp.lock"):
            with smp.Client(run_dir, ASK_SECONDS) as client:
                client.end()
            print(f"{where}: ended")
        else:
            print(f"{where}: no SMP is running; `{_sweep_command(job)}` removes segments that it may have left")


@checkpoint_app.command()
def now(
    job: JobOption = None,
    node: NodeOption = None,
    seconds: Annotated[float, typer.Option(min=0, help="how long to wait for the checkpoint")] = 600.0,
    keep: Annotated[
        bool, typer.Option("--keep", help="exempt from --reft-checkpoint-keep: it stays until its folder is removed")
    ] = False,
) -> None:
    """Write the newest snapshot of a running job to its --reft-checkpoint-dir, and print its path."""
    served = [path for path in run_directories(job, node) if liveness.held(path / "smp.lock")]
    names = sorted({path.parent.name for path in served})
    if not names:
        raise ConfigError(f"no job{f' {job!r}' if job else ''} has an SMP here; known jobs: {known_jobs()}")
    if len(names) > 1:
        raise ConfigError(f"--job: several jobs have an SMP here, name one of: {', '.join(names)}")
    with ThreadPoolExecutor(len(served)) as pool:  # SMPs of nodes on one machine write one checkpoint together
        folders = list(pool.map(lambda run_dir: _checkpoint(run_dir, seconds, keep), served))
    for path in sorted(set(folders)):
        print(path)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="folder of a checkpoint, as `checkpoint now` prints it")],
    to: Annotated[Path, typer.Option("--to", help="new or empty folder, for the framework's own --load")],
) -> None:
    """Convert a checkpoint to the framework's own format, which loads without ft_plugins. Needs no GPU and no job."""
    from ..adapters.export_command import export as write  # slow: imports torch and the framework

    summary = write(checkpoint, to)
    print(f"{to}: {summary['framework']}, iteration {summary['iteration']}, {summary['tensors']} tensors")
    if summary["left_out"]:
        print(f"left out the arguments {', '.join(summary['left_out'])}: their types cannot be saved")
    if summary["note"]:
        print(summary["note"])


@app.command()
def sweep(
    older_than: Annotated[
        float,
        typer.Option(min=0, help="seconds since the job was last active; it can still resume from younger segments"),
    ] = Config().orphan_seconds,
    job: JobOption = None,
) -> None:
    """Remove segments of jobs whose SMP and ft-run are both gone, even if their run directory is gone too."""
    try:
        removed = leftovers.sweep(run_root(), older_than, job=job)
    except OSError as error:
        raise FtError(f"some segments could not be removed: {error.filename}: {error.strerror}") from error
    for path in removed:
        print(f"removed {path}")
    print(f"{len(removed)} segments removed")


@app.command(context_settings=_ANY_FLAGS)
def config(
    context: typer.Context,
    form: Annotated[Format, typer.Option("--format", help="how to print")] = Format.table,
) -> None:
    """Explain every key, or print the configuration that the flags after `--` yield, in any format."""
    chosen, rest = Config.from_flags(context.args)
    if rest:
        raise ConfigError(f"{rest[0]}: unknown; expected flags such as --reft, after `--`")
    shown = chosen if context.args else all_defaults()
    match form:
        case Format.table if context.args:
            print(chosen.table())
        case Format.table:
            _console().print(explained())
        case Format.markdown:
            print(markdown())
        case Format.json:
            print(json.dumps({"ft_plugins": shown.block()}, indent=2))
        case Format.env:
            print(f"FTP_CONFIG={shlex.quote(json.dumps(shown.block()))}")
        case Format.flags:
            print(shlex.join(shown.flags()))
        case Format.schema:
            print(json.dumps(Config.model_json_schema(), indent=2))


app.add_typer(plan_app, name="plan")
app.command(context_settings=_ANY_FLAGS)(check)
app.command(context_settings=_ANY_FLAGS)(doctor)
app.command()(drain)
app.command()(why)
app.command()(events)
app.command()(trace)


def _console() -> Console:
    """A console of 200 columns unless stdout is a terminal, so that lines of a pipe or file are not cut."""
    return Console(width=None if sys.stdout.isatty() else 200)


def _sweep_command(job: str) -> str:
    """The command that removes the segments of this job alone."""
    return f"ft-plugins sweep --job {shlex.quote(job)} --older-than 0"


def _checkpoint(run_dir: Path, seconds: float, keep: bool) -> str:
    """Have the SMP of a run directory write the newest version; returns the checkpoint's folder. Raises FtError."""
    where = f"job {run_dir.parent.name} on node {run_dir.name}"
    with smp.Client(run_dir, ASK_SECONDS) as client:
        outcome = client.checkpoint(smp.REQUEST, seconds, keep=keep)
    match outcome["state"]:
        case "done":
            return str(outcome["path"])
        case "off":
            raise FtError(f"{where}: it has no folder for checkpoints; start the job with --reft-checkpoint-dir")
        case "nothing":
            raise FtError(f"{where}: no version is in memory yet on all ranks")
        case "writing":
            raise FtError(f"{where}: the checkpoint is not complete after {seconds:.0f} s; see `ft-plugins status`")
    raise FtError(f"{where}: {outcome['reason']}")


# ---- the keys of the configuration ----


def all_defaults() -> Config:
    """A configuration with every key at its default; unset keys without a default stay unset. Without local SGD, which
    cannot be on together with PAFT."""
    block: dict[str, Any] = {}
    for key in keys():
        if key.path[0] == "sync":
            continue
        if key.system:
            block[key.path[0]] = {}
        elif key.default is not None:
            (block if len(key.path) == 1 else block[key.path[0]])[key.path[-1]] = key.default
    return Config.from_json(block)


def _rows() -> Iterator[tuple[str, str, str, str, str]]:
    for key in keys():
        meaning = key.meaning if key.switch else f"{key.meaning} ({key.expected})"
        yield key.flag, key.name, key.shown(key.default), key.unit, meaning


def explained() -> Table:
    """The keys as a table for the terminal."""
    table = Table("flag", "in JSON", "default", "unit", "meaning")
    for flag, name, default, unit, meaning in _rows():
        table.add_row(flag, name, default, unit, meaning)
    return table


def markdown() -> str:
    """The page `docs/configuration.md`: general keys, then the keys of each system."""
    head = ["", "| flag | in JSON | default | unit | meaning |", "|---|---|---|---|---|"]
    lines = [_PAGE, "", "## General", *head]
    for key, (flag, name, *rest) in zip(keys(), _rows(), strict=True):
        if key.system:
            lines += ["", f"## {name.upper()}", *head]
        lines.append(f"| `{flag}` | `{name}` | " + " | ".join(rest) + " |")
    return "\n".join(lines)


# ---- report ----


@app.command()
def report(
    job: JobArgument = None,
    files: EventsOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="an object for each restart, then one of goodput")] = False,
    page: Annotated[Path | None, typer.Option("--html", help="write one page with pictures to this file")] = None,
) -> None:
    """Show where the time of each restart went, and all other time of the job."""
    known = job_events(job, files)
    if page:
        write_text(page, html_page(job or "ft_plugins: a job", known))
        print(page)
        return
    found, time = recovery_phases(known), goodput(known)
    if as_json:
        for one in found:
            print(json.dumps(one.block()))
        if time:
            print(json.dumps({"goodput": time.block()}))
        return
    print("\n".join(phase_lines(found)) if found else "no restart has completed an iteration yet")
    if time:
        print("\n".join(["", *time.lines()]))


# ---- rehearse ----


@app.command(context_settings=_ANY_FLAGS)
def rehearse(
    context: typer.Context,
    iterations: Annotated[int, typer.Option(min=3, help="iterations of each run")] = 12,
    kill: Annotated[str, typer.Option(help="iterations to kill in, such as 5,6; by default in the middle")] = "",
    nodes: Annotated[
        int, typer.Option(min=1, max=2, help="2: on two emulated nodes, of which one is lost with its memory")
    ] = 1,
    out: Annotated[Path, typer.Option(help="folder for logs and transcripts")] = Path("rehearsal-out"),
    patience: Annotated[float, typer.Option(min=1, help="abort a run after this many seconds without progress")] = 600,
    as_json: Annotated[bool, typer.Option("--json", help="print the outcome as JSON")] = False,
) -> None:
    """Run a job's own command twice, unfailed and killed, and compare every iteration: -- ft-run ... script.py ..."""
    from ..rehearse.display import LineDisplay, display_on  # slow: imports torch
    from ..rehearse.driver import raising_signals
    from ..rehearse.rehearsal import plan_rehearsal, report
    from ..rehearse.rehearsal import rehearse as run

    try:
        kills = [int(part) for part in kill.split(",") if part]
    except ValueError as error:
        raise ConfigError(f"--kill {kill}: expected iterations such as 5,6") from error
    plan = plan_rehearsal(context.args, out.resolve(), iterations, kills, nodes, patience)
    console = Console(stderr=as_json)
    display = LineDisplay(console, 0) if as_json else display_on(console, 0)
    try:
        with raising_signals():  # so that a rehearsal that is stopped leaves no job behind
            outcome = run(plan, display)
    finally:
        display.close()
    print(outcome.json() if as_json else report(outcome))
    if not outcome.exact:
        raise typer.Exit(1)
