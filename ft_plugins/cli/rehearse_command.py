"""`ft-plugins rehearse`: a job's own command, unfailed and killed, compared.

In: a command. Out: a table or JSON; exit status 1 unless both runs agree. Raises ConfigError.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..errors import ConfigError


def rehearse(
    context: typer.Context,
    iterations: Annotated[int, typer.Option(min=3, help="iterations of each run")] = 12,
    kill: Annotated[str, typer.Option(help="iterations to kill in, such as 5,6; by default in the middle")] = "",
    nodes: Annotated[
        int, typer.Option(min=1, max=2, help="2: on two emulated nodes, of which one is lost with its memory")
    ] = 1,
    out: Annotated[Path, typer.Option(help="folder for logs and transcripts")] = Path("rehearsal-out"),
    patience: Annotated[float, typer.Option(min=1, help="abort a run after this many seconds without progress")] = 600,
    unprotected: Annotated[
        bool, typer.Option("--unprotected/--no-unprotected", help="compare with iterations without protection, too")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="print the outcome as JSON")] = False,
) -> None:
    """Run a job's own command, unfailed and killed, and compare every iteration: -- ft-run ... script.py ..."""
    from ..rehearse.display import LineDisplay, display_on  # slow: imports torch
    from ..rehearse.driver import raising_signals
    from ..rehearse.rehearsal import plan_rehearsal, report
    from ..rehearse.rehearsal import rehearse as run

    try:
        kills = [int(part) for part in kill.split(",") if part]
    except ValueError as error:
        raise ConfigError(f"--kill {kill}: expected iterations such as 5,6") from error
    plan = plan_rehearsal(context.args, out.resolve(), iterations, kills, nodes, patience, unprotected)
    console = Console(stderr=as_json)
    display = LineDisplay(console, None) if as_json else display_on(console, None)
    try:
        with raising_signals():  # so that a rehearsal that is stopped leaves no job behind
            outcome = run(plan, display)
    finally:
        display.close()
    print(outcome.json() if as_json else report(outcome))
    if not outcome.exact:
        raise typer.Exit(1)
