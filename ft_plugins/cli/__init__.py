"""The command `ft-plugins`."""

from __future__ import annotations

import os
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
    except KeyboardInterrupt:  # Typer ends the other commands in these two ways
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python fails to flush it
        sys.exit(1)
