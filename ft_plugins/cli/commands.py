"""The commands of `ft-plugins`, by name. Each is imported when it is used, so that `status` comes at once.

Invariant: no command but `drain` and `stop` disturbs a running job; `end` drops snapshots, and refuses if the job runs
under ft-run. A failure is one line on stderr and exit status 1. Help is plain: it fits 80 columns, a log and a dumb
terminal.

In: a command line. Out: tables for people, JSON for programs.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

_CHECKPOINT = {"now": ("checkpoint_command", "Write the newest snapshot of a running job.")}
_PLAN = {
    "interval": ("plan_command", "How nodes protect each other, and how often to save."),
    "memory": ("memory_plan_command", "The host memory that protection claims on each node."),
    "sync": ("plan_command", "Which policy of synchronisation pays on which link."),
}
_COMMANDS: dict[str, tuple[Any, str]] = {  # the module of a function of that name, or more commands; a line of help
    "status": ("status_command", "Show the jobs of this node, and their other nodes."),
    "events": ("events_command", "Show what happened in a job, by time."),
    "why": ("why_command", "Say why a job failed last, and what to do."),
    "report": ("report_command", "Show where the time of a job went."),
    "trace": ("trace_command", "Write the events of all ranks as a trace."),
    "drain": ("drain_command", "Have a node leave a running job without loss."),
    "stop": ("drain_command", "End a running job on all nodes without loss."),
    "checkpoint": (_CHECKPOINT, "Checkpoints in storage."),
    "export": ("checkpoint_command", "Convert a checkpoint to the framework's own format."),
    "end": ("end_command", "Drop what a stopped job left in memory."),
    "sweep": ("end_command", "Remove what jobs that are gone left in memory."),
    "doctor": ("doctor_command", "Examine this node before a job."),
    "check": ("check_command", "Say what of a job is followed, and what is refused."),
    "rehearse": ("rehearse_command", "Run a job unfailed and killed, and compare."),
    "plan": (_PLAN, "Plan a job before it runs."),
    "config": ("config_command", "Explain the keys, or show a configuration."),
}
_ANY_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True}  # of a command that takes the context
_LOOK: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False, "rich_markup_mode": None}


class _Commands(TyperGroup):
    """Imports a command of `table` when it is called."""

    table: dict[str, tuple[Any, str]] = _COMMANDS

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.commands: Any = dict.fromkeys(self.table)  # the names, for suggestions

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        where, words = self.table.get(cmd_name, (None, ""))
        if isinstance(where, str):
            return typer.main.get_command(_alone(getattr(import_module(f".{where}", __package__), cmd_name)))
        return where and typer.main.get_command(_group(where, words))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, words) for name, (_, words) in self.table.items()])


def _alone(function: Any) -> typer.Typer:
    made = typer.Typer(**_LOOK)
    settings = _ANY_FLAGS if "context" in inspect.signature(function).parameters else {}
    made.command(epilog=getattr(function, "epilog", None), context_settings=settings)(function)
    return made


def _group(table: dict[str, tuple[Any, str]], words: str) -> typer.Typer:
    made = typer.Typer(cls=type("Commands", (_Commands,), {"table": table}), no_args_is_help=True, help=words, **_LOOK)
    made.callback()(lambda: None)
    return made


app = _group(_COMMANDS, "Show, explain, end and plan what protects jobs. Each command has --help.")
