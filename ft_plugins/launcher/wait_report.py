"""Says in the job's log which node a round waits for and what to do, instead of minutes of silence.

Invariant: nothing is said while a round is put together as usual. Then the node that leads says it, and again now and
then; the others, whose output may be another one, once.

In: what the lead answers, the time. Out: lines, through `events.say`.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ..events import say
from .rounds import Rules

AGAIN_SECONDS = 30.0
_OWN = ("--ftp-node-name", "--node-rank", "--node_rank", "--local-addr", "--local_addr")  # of this node alone


def command(argv: Sequence[str] | None = None) -> str:
    """This process's command as it is to be given on another node."""
    program, *words = sys.argv if argv is None else argv
    name = Path(program).name
    left = ["ft-run"] if name == "command.py" else ["python", program] if name.endswith(".py") else [name]
    skip = False
    for word in words:
        if not skip and word.partition("=")[0] not in _OWN:
            left.append(word)
        skip = not skip and word in _OWN
    return shlex.join(left)


def awaited(rules: Rules, waiting: int, missing: Sequence[str]) -> str:
    """Whom a round waits for, of which so many nodes `waiting` are here and those of the last round `missing`; '' for
    nobody in particular."""
    going_on = f"; without, it goes on with {rules.fit(waiting)}" if rules.fit(waiting) else ""
    if missing:
        names = ", ".join(name if name.isprintable() else ascii(name) for name in missing)
        return f"waiting for {'a node' if len(missing) == 1 else 'nodes'} in the place of {names}{going_on}"
    least = min(rules.sizes, default=rules.min_nodes)
    if waiting < least:
        return f"waiting for {least - waiting} more of {least} nodes"
    return ""


class WaitReport:
    """One wait of one node for a round."""

    def __init__(self, rules: Rules, patience: float, text: str) -> None:
        """`patience`: seconds before anything is said; `text` is the command."""
        self._rules = rules
        self._next = time.monotonic() + patience
        self._text = text

    def look(self, waiting: int, missing: Sequence[str], leads: bool, limit: float) -> None:
        """The round is not complete; `limit` is when this node gives up (monotonic)."""
        now = time.monotonic()
        if now < self._next:
            return
        if words := awaited(self._rules, waiting, missing):
            self._next = now + AGAIN_SECONDS if leads else float("inf")
            seconds = max(0.0, limit - now)
            where = f"give there, in {os.getcwd()}: {self._text}"
            say(f"{words} (for {seconds:.0f} s more at most); {where}", alarm=True, who="ft-run: ")
