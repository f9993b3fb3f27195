"""The command `ft-plugins`. `status`, which is called often, imports neither the other commands nor their parser."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .commands import app

__all__ = ["app", "main"]


def __getattr__(name: str) -> Any:
    if name == "app":
        from .commands import app

        return app
    raise AttributeError(f"module 'ft_plugins.cli' has no attribute '{name}'")


def main() -> None:
    """The console script."""
    from ..errors import FtError

    try:
        if sys.argv[1:2] == ["status"]:
            from . import status_command

            status_command.main(sys.argv[2:])
        else:
            from .commands import app

            app(prog_name="ft-plugins")
    except FtError as error:
        print(f"ft-plugins: {error}", file=sys.stderr)
        sys.exit(1)
