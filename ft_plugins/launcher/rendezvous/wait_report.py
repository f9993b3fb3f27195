"""Report in the job's log which nodes a round waits for, and what to do.

Invariant: nothing is printed while a round completes as usual. After that the leader repeats the report; the other
nodes, which may print elsewhere, report once.

In: the leader's replies, the time. Out: lines, through `events.say`.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from ...events import say
from ..rounds.rounds import Rules
from .endpoint import Endpoint

REPEAT_SECONDS = 30.0
_ENDPOINT = ("--rdzv-endpoint", "--rdzv_endpoint")
_OF_ONE_NODE = ("--ftp-node-name", "--ftp-failure-domain", "--node-rank", "--node_rank", "--local-addr", "--local_addr")


def command(argv: Sequence[str] | None = None) -> str:
    """The command of this process, without the flags of this node alone, for any shell of any node."""
    program, *words = sys.argv if argv is None else argv
    own = ["-m", "ft_plugins.launcher.command"] if Path(program).name == "command.py" else [program]
    shared = [sys.executable, *own] if program.endswith(".py") else own
    skip = False
    for word in words:
        if not skip and word.partition("=")[0] not in _OF_ONE_NODE:
            shared.append(word)
        skip = not skip and word in _OF_ONE_NODE
    return shlex.join(shared)


def reaching(command: str, living: str, node: str = "") -> str:
    """`command` with the endpoint `living` before those that it names, if it does not name that one; for the node of
    that name, if it is one of ft-run, which names the job. Pure."""
    words = shlex.split(command)
    for at, word in enumerate(words[:-1]):
        flag, joined, value = word.partition("=")
        if flag in _ENDPOINT:
            given = value if joined else words[at + 1]
            if living not in (str(Endpoint.read(part)) for part in given.split(",") if part.strip()):
                given = f"{living},{given}"
            words[at : at + 2] = [f"{flag}={given}", words[at + 1]] if joined else [flag, given]
            break
    job = next((at for at, word in enumerate(words) if word.partition("=")[0] == "--ftp-job"), 0)
    return shlex.join([*words[:job], *(("--ftp-node-name", node) if node and job else ()), *words[job:]])


def how_to_start(command: str, living: str, lost: Sequence[str] = (), place: str = "") -> str:
    """What starts a node at `command`; one of those that are `lost` under its own name, so that it is itself again. In
    a job of Slurm it is a step of that job, from any of its nodes or where jobs are submitted."""
    more = f" (and {', '.join(lost[1:])}, each with its own name)" if lost[1:] else ""
    what = f"bring {lost[0]} back{place}{more}" if lost else "start one"
    start, job = reaching(command, living, *lost[:1]), os.environ.get("SLURM_JOB_ID")
    step = f"nohup srun --jobid {job} --overlap -N1 -w {shlex.quote(lost[0] if lost else 'NODE')} {start}"
    return f"to {what}, in {os.getcwd()}: {f'{step} >> slurm-{job}.out 2>&1 &' if job else start}"


def awaited(rules: Rules, waiting: int, missing: Sequence[str], absent: Collection[str]) -> tuple[str, bool]:
    """What an incomplete round waits for, for people; '' if it only waits for time to pass. And whether nodes have to
    be started for it.

    `waiting`: how many nodes wait. `missing`: names of nodes of the last round that do not; `absent`: those of them
    that do not live, as far as known.
    """
    if missing:
        size = rules.fit(waiting)
        otherwise = f"; otherwise it continues with {size}" if size else ""
        shown = {name: name if name.isprintable() else ascii(name) for name in missing}
        alive = ", ".join(shown[name] for name in missing if name not in absent)
        gone = [shown[name] for name in missing if name in absent]
        places = f"{'a node' if len(gone) == 1 else 'nodes'} in the place of {', '.join(gone)}" if gone else ""
        ends = f"{alive}, alive, to end the old ranks" if alive else ""
        return f"waiting for {' and for '.join(filter(None, (places, ends)))}{otherwise}", bool(gone)
    least = min(rules.sizes, default=rules.min_nodes)
    return f"waiting for {least - waiting} more of {least} nodes" if waiting < least else "", True


def incomplete(rules: Rules, number: int, waiting: int, names: Sequence[str]) -> str:
    """What round `number` still needed when its time was over, and what to do."""
    sizes = " or ".join(map(str, rules.sizes)) or f"{rules.min_nodes} to {rules.max_nodes}"
    return (
        f"round {number} expected {sizes} nodes, found {waiting} ({', '.join(names)}); start the missing ones with "
        "the same command, or allow fewer with --nnodes"
    )


class WaitReport:
    """One wait of one node for a round."""

    def __init__(self, patience: float, command: str, trouble: Callable[[], str] = lambda: "") -> None:
        """`patience`: seconds before the first report. `command` starts another node. `trouble`: why others may not
        find this one."""
        self._next = time.monotonic() + patience
        self._command = command
        self._find_trouble = trouble
        self.trouble = ""  # as reported last

    def update(
        self, needed: str, start: bool, leads: bool, deadline: float, living: str, lost: Sequence[str] = ()
    ) -> None:
        """Report if it is time to. `needed`, `start`: see `awaited`. `leads`: this node is the leader. `deadline`: when
        it gives up (monotonic). `living`: the endpoint of the leader, at which another node finds the job. `lost`:
        nodes that are to be started again."""
        now = time.monotonic()
        if now < self._next or not needed:
            return
        self._next = now + REPEAT_SECONDS if leads else float("inf")
        self.trouble = self._find_trouble()
        how = how_to_start(self._command, living, lost) if start else ""
        line = f"{needed} (for another {max(0.0, deadline - now):.0f} s at most)"
        say("; ".join(filter(None, (self.trouble, line, how))), alarm=True, who="ft-run: ")
