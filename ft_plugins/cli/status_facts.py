"""Find the jobs of this machine, and ask their SMPs what is known of them. Imports nothing that is slow.

Invariant: an SMP or a node that does not answer hides no other one.

In: run directories. Out: `Facts`. Raises ConfigError.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any

from ..base.run_directories import run_root
from ..errors import FtError
from ..smp.serve.local_connection import LocalConnection
from ..smp.serve.node_facts import Facts, left_in_memory
from ..smp.serve.node_facts import facts_of as facts_of_node
from ..smp.watch import liveness

ASK_SECONDS = 5.0  # timeout for an SMP's answer; a live one answers within milliseconds
OTHER_SECONDS = 1.0  # for the SMP of another node to answer
OTHERS_SECONDS = 10.0  # for those of all other nodes


def run_directories(job: str | None, node: str | None) -> list[Path]:
    """The run directories of this machine; `job`, `node`: only of these names."""
    every = sorted(path for path in run_root().glob("*/*") if path.is_dir())
    return [path for path in every if job in (None, path.parent.name) and node in (None, path.name)]


def is_over(run_dir: Path) -> bool:
    """Whether the job of a run directory has ended here and left nothing to resume from."""
    if any(liveness.held(run_dir / lock) for lock in ("smp.lock", "lock")):
        return False
    return not left_in_memory(run_dir)


def facts_of(run_dirs: Sequence[Path], others: bool = False) -> list[Facts]:
    """The facts of each run directory, in order; with those of each job's `others`, nodes that have no run directory
    on this machine. All are asked at once."""
    results: dict[Path, Facts] = {}
    threads = [Thread(target=lambda at=at: results.update({at: _facts(at, others)}), daemon=True) for at in run_dirs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[at] for at in run_dirs if at in results]


def _facts(run_dir: Path, others: bool) -> Facts:
    reply: dict[str, Any] = {}
    error, named = None, None
    if liveness.held(run_dir / "smp.lock"):
        try:
            with LocalConnection(run_dir, ASK_SECONDS) as connection:
                reply = connection.status()
                if others:
                    named = connection.other_nodes(OTHER_SECONDS, OTHERS_SECONDS)
        except FtError as problem:
            error = str(problem)
    elsewhere = named and [each for each in named if not (run_dir.parent / each["node"]).is_dir()]
    return {**facts_of_node(run_dir, reply, None if reply else error, named or ()), "others": elsewhere}
