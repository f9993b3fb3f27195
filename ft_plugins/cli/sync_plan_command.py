"""The part of `ft-plugins plan` that starts with --sync: policies of synchronisation on links of different speed.

In: a profile of layers. Out: a table for people, JSON for programs, a picture. Raises FtError.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import typer

from ..errors import ConfigError

OWN = ("sync", "link_mbps", "sync_h", "output")
NEEDED = ("nodes", "group_nodes", "hw_rate", "sw_rate")  # without --sync
AUTO = "auto"


def given(context: typer.Context) -> list[str]:
    """The parameters that the command line sets."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def require_consistent(names: Sequence[str]) -> None:
    """Raises ConfigError for options that have no effect next to --sync or without it, and for those that are missing
    without it."""
    if "sync" in names:
        others = [_flag(name) for name in names if name not in (*OWN, "as_json")]
        if others:
            raise ConfigError(f"--sync plans synchronisation alone: {', '.join(others)}: no effect; leave out either")
        return
    alone = [_flag(name) for name in names if name in OWN]
    if alone:
        raise ConfigError(f"{', '.join(alone)}: no effect without --sync; give it a profile of layers")
    missing = [_flag(name) for name in NEEDED if name not in names]
    if missing:
        raise ConfigError(f"{', '.join(missing)}: missing; give them, or --sync with a profile of layers")


def plan_policies(
    path: Path, link_mbps: Sequence[float], sync_h: str, output: Path | None, as_json: bool,
    drawing: Callable[[str, Path], AbstractContextManager[None]],
) -> None:  # fmt: skip
    """Print, and draw to `output`. `drawing` raises failures to draw as FtError. Raises FtError."""
    from ..planner.sync_plan import plan_sync
    from ..sync.layers.layer_profile import read_profile

    outlook = plan_sync(read_profile(path), link_mbps, _period(sync_h))
    if output is not None:
        with drawing("--output", output):
            from ..report.sync_pictures import draw_sync

            draw_sync(outlook, output)
    print(json.dumps({"sync": outlook.block()}) if as_json else outlook.table())


def _period(text: str) -> int | None:
    """None: to be chosen."""
    if text == AUTO:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ConfigError(f"--sync-h: expected '{AUTO}' or a number of iterations, found {text[:80]!r}")
    return int(text)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
