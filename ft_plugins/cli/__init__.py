"""The command `ft-plugins`."""

from __future__ import annotations

import sys

import typer

from ..errors import FtError
from . import status_command
from .commands import app

__all__ = ["app", "main"]


def main() -> None:
    """The console script."""
    try:
        given = status_command.arguments(sys.argv[2:]) if sys.argv[1:2] == ["status"] else None
        if given is None:
            app(prog_name="ft-plugins")
        else:
            status_command.status(**given)
    except typer.Exit as ended:
        sys.exit(ended.exit_code)
    except FtError as error:
        print(f"ft-plugins: {error}", file=sys.stderr)
        sys.exit(1)
