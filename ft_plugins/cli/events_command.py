"""`ft-plugins events`: what happened in a job, over its incarnations and its nodes on this machine.

Invariant: of the past at most `--limit` events are shown, the newest. Lines fit a terminal of 80 columns. Ctrl-C ends
`--follow` with status 0.

In: a job's name, or files of events. Out: lines by time, for people or as JSON. Raises ConfigError.
"""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError, printable
from ..events import Damage, Event, Severity, recent_of
from ..events.tail import Tail
from .job_events import EventsOption, JobArgument, histories

_LOOK_SECONDS = 0.5
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def events(
    job: JobArgument = None,
    files: EventsOption = None,
    since: Annotated[str | None, typer.Option(help="only what is younger, such as 30s, 10m, 2h or 1d")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="show new events until Ctrl-C")] = False,
    routine: Annotated[bool, typer.Option("--routine", help="also what happens in every iteration")] = False,
    limit: Annotated[int, typer.Option(min=1, help="how many events of the past are shown")] = 200,
    as_json: Annotated[bool, typer.Option("--json", help="one object in each line, for programs")] = False,
) -> None:
    """Show what happened in a job, by time; with --follow also what happens now."""
    oldest = time.time() - seconds_of(since) if since else 0.0
    tails: dict[Path, Tail] = {}
    try:
        past = [event for event in _new(job, files, routine, tails) if event.time >= oldest]
        said = _say_damage(tails, 0)
        if len(past) > limit and not as_json:
            print(f"{len(past) - limit} older events are left out; see --limit")
        for event in past[-limit:]:
            _show(event, as_json)
        while follow:
            time.sleep(_LOOK_SECONDS)
            for event in _new(job, files, routine, tails):
                _show(event, as_json)
            said = _say_damage(tails, said)
    except KeyboardInterrupt:
        return
    finally:
        for tail in tails.values():
            tail.close()


def seconds_of(text: str) -> float:
    """A duration such as 10m; a number alone is in seconds. Raises ConfigError."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhd]?)", text)
    if match is None:
        raise ConfigError(f"--since {text}: expected a duration such as 30s, 10m, 2h or 1d")
    return float(match[1]) * _UNITS[match[2] or "s"]


def _new(job: str | None, files: list[Path] | None, routine: bool, tails: dict[Path, Tail]) -> list[Event]:
    """What is new in the job's files, also in those that are new, by time."""
    known: list[Path] = []
    with suppress(ConfigError) if tails else nullcontext():  # that of a job that is followed may be removed
        known = histories(next(iter(tails)).parent.parent.name if tails else job, files)
    for path in known:
        for file in (path, recent_of(path)) if routine else (path,):
            tails.setdefault(file, Tail(file.resolve()))  # a link that was given is followed
    found = [event for tail in tails.values() for event in tail.look()]
    return sorted((event for event in found if routine or not _is_routine(event)), key=lambda event: event.time)


def _say_damage(tails: Mapping[Path, Tail], said: int) -> int:
    """Say how many damaged lines were left out since it was `said`; how many there are in all."""
    damage = Damage(sum(tail.damage.lines for tail in tails.values()))
    if damage.lines > said:
        print(Damage(damage.lines - said), file=sys.stderr, flush=True)
    return damage.lines


def _is_routine(event: Event) -> bool:
    """Whether it is, or sums up, what happens in every iteration."""
    return event.name == "routine.summed" or event.type is not None and event.type.severity is Severity.ROUTINE


def _show(event: Event, as_json: bool) -> None:
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for line in [event.line()] if as_json else lines_of(event, width):
        print(line, flush=True)


def lines_of(event: Event, width: int) -> Iterator[str]:
    """An event for people, in lines of at most `width` columns; 0: in one."""
    when = time.strftime("%m-%d %H:%M:%S", time.localtime(event.time))
    where = event.node if event.rank is None else f"{event.node} rank {event.rank}"
    mark = "!" if event.type is not None and event.type.severity is Severity.ALARM else " "
    words = printable(f"{when} {mark} {where}: {event.name}{_facts(event)}").replace("\n", " ")
    yield from textwrap.wrap(
        words, max(width, 60) if width else 1 << 20, subsequent_indent=" " * 17, break_on_hyphens=False
    )


def _facts(event: Event) -> str:
    """The reason in words, then the other facts."""
    fields = {key: value for key, value in event.fields.items() if value not in ("", None)}
    reason = fields.pop("reason", "")
    facts = ", ".join(f"{key} {f'{value:.6g}' if isinstance(value, float) else value}" for key, value in fields.items())
    return (f": {reason}" if reason else "") + (f" ({facts})" if facts else "")
