"""`ft-plugins status`: once, again and again, or as JSON. Imports nothing that is slow.

Invariant: it disturbs no job. Ctrl-C ends `--watch` with status 0.

In: a command line. Out: text, or one line of JSON. Raises ConfigError.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence

from ..errors import ConfigError
from . import status_facts, status_table

FORMAT = 2  # of the JSON; grows when a documented key changes its meaning or goes
_WATCH_SECONDS = 2.0
_SHORTEST, _LONGEST = 0.1, 86400.0  # seconds

_HELP = """\
Show the jobs of this node: how far they are, what can be resumed from, and what
went wrong. A job that has ended here and left nothing in memory is not shown."""
_WORDS = """\
states:
  ENDED        ft-run has ended and left how; or it is not known how
  REFUSED      ft-run has ended because a restart cannot help
  STARTING     the ranks start, or start again after a failure
  TRAINING     all ranks of this node train
  WAITING      ft-run waits: for nodes, for a place, or for nodes to end; or
               the ranks, for one that may be at work
  HUNG         no rank gets on, or one is stopped by a signal
  ORPHANED     ft-run is gone without a word; its memory is kept for a while
  UNPROTECTED  ft-run is running, and the SMP, which owns the snapshots, is not

lines:
  now         what is known
  to do       what you can do about it
  training    the last iteration that all ranks of this node have completed;
              restarts; time without training, from the failure of a process of
              this node until all of its ranks have completed an iteration again
  slow        ranks that compute for much longer than the others, if there are
  in memory   the newest version that all ranks of this node hold
  other nodes the newest version from which a lost node would be rebuilt
  storage     the newest complete checkpoint"""


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        "ft-plugins status",
        description=_HELP,
        epilog=_WORDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--job", help="only this job")
    made.add_argument("--node", help="only this node name")
    made.add_argument(
        "--all", action="store_true", help="also jobs that have ended here and left nothing to resume from"
    )
    made.add_argument(
        "--watch", nargs="?", const=_WATCH_SECONDS, type=_seconds, metavar="SECONDS",
        help=f"show it again every so many seconds ({_WATCH_SECONDS:g} if none are given), until Ctrl-C",
    )  # fmt: skip
    made.add_argument("--json", action="store_true", help="one object in one line, for programs")
    return made


def _seconds(text: str) -> float:
    value = float(text)
    if not _SHORTEST <= value <= _LONGEST:
        raise argparse.ArgumentTypeError(f"expected {_SHORTEST:g} to {_LONGEST:g} seconds, found {text}")
    return value


def main(words: Sequence[str]) -> None:
    """Run the command with the words after its name. Raises ConfigError."""
    options = parser().parse_args(words)
    if options.watch is None:
        print(_text(options))
    else:
        _watch(lambda: _text(options), options.watch, redraw=sys.stdout.isatty() and not options.json)


def _text(options: argparse.Namespace) -> str:
    """What the options show now."""
    run_dirs = status_facts.run_directories(options.job, options.node)
    if options.job is not None and not run_dirs:
        raise ConfigError(f"no job '{options.job}' is known here; expected one of: {known_jobs()}")
    every = options.all or options.job is not None
    facts = status_facts.facts_of([path for path in run_dirs if every or not status_facts.is_over(path)])
    if options.json:
        return json.dumps({"format": FORMAT, "time": time.time(), "jobs": facts})
    if facts:
        return status_table.text_of(facts, _width())
    return _nothing(len({path.parent.name for path in run_dirs}))


def known_jobs() -> str:
    """The names of the jobs that have a run directory here, for messages."""
    return ", ".join(sorted({path.parent.name for path in status_facts.run_directories(None, None)})) or "none"


def _nothing(ended: int) -> str:
    if not ended:
        return "no job is known here"
    return f"no job is running here, and there is nothing to resume from; ended: {ended} (`ft-plugins status --all`)"


def _width() -> int:
    """The columns of the terminal; 0 if stdout is none, so that lines of a pipe or file are not broken."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


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
