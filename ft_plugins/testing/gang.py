"""Ranks for one function: forked from a process that has imported everything, joined by gloo, gone when it returns.

Invariant: no rank outlives the call or its caller (PR_SET_PDEATHSIG), whatever ends first; the first rank that fails
ends the others, which would wait for it. The caller has run nothing parallel in torch before: threads are not forked.

In: a function of rank and world size, its arguments, and where ranks stand in the network. Out: what each returned, by
rank; an error with a rank's traceback and the end of what the ranks have printed, which else is not shown.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..launcher.worker import bind_to_agent
from .emulated_nodes import EmulatedHost
from .forkserver import enter

SECONDS = 300.0
COLLECTIVE_SECONDS = 60.0
END_SECONDS = 10.0
TAIL = 20  # lines
HERE = EmulatedHost("", "127.0.0.1", "lo")


class RankError(RuntimeError):
    """A rank of a gang has failed."""


def gang(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    places: Sequence[EmulatedHost] | None = None,
    seconds: float = SECONDS,
) -> list[Any]:
    """Run `function(rank, world, *args)` on `world` gloo ranks; what they returned, by rank.

    `places`: where each rank stands, one for each; None: all on the loopback device. Raises RankError where a rank
    fails or ends without an answer, TimeoutError where not all have answered within `seconds`.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="ftg-", dir="/tmp") as folder:
        store, log = Path(folder) / "store", Path(folder) / "log"
        log.touch()
        pipes: list[Connection] = []
        processes = []
        for rank, place in enumerate(places or [HERE] * world):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (function, rank, world, place, str(store), str(log), os.getpid(), theirs, args)
            process = context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        found: dict[int, Any] = {}
        try:
            _collect(pipes, found, seconds, log)
        finally:
            for process in processes:
                process.join(END_SECONDS if len(found) == world else 0)
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()
        return [found[rank] for rank in range(world)]


def _collect(pipes: Sequence[Connection], found: dict[int, Any], seconds: float, log: Path) -> None:
    """All answers, into `found`."""
    deadline = time.monotonic() + seconds
    while len(found) < len(pipes):
        missing = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in found}
        ready = wait(list(missing), max(0.0, deadline - time.monotonic()))
        if not ready:
            ranks = ", ".join(map(str, missing.values()))
            raise TimeoutError(f"ranks {ranks} had not answered after {seconds:.0f} s:\n{_tail(log)}")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = missing[pipe]
            try:
                verdict, answer = pipe.recv()
            except EOFError:
                raise RankError(f"rank {rank} ended without an answer:\n{_tail(log)}") from None
            if verdict != "done":
                raise RankError(f"rank {rank}:\n{answer}\n{_tail(log)}")
            found[rank] = answer


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-TAIL:])


def _rank(
    function: Callable[..., Any], rank: int, world: int, place: EmulatedHost, store: str, log: str, parent: int,
    reply: Connection, args: Any,
) -> None:  # fmt: skip
    """The life of a rank."""
    try:
        bind_to_agent(parent)
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
        for target in (1, 2):
            os.dup2(descriptor, target)
        sys.stdout = sys.stderr = os.fdopen(descriptor, "w", buffering=1)  # by line: the last one counts
        if place.namespace:
            enter(place.namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = place.device
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world,
            timeout=timedelta(seconds=COLLECTIVE_SECONDS),
        )  # fmt: skip
        answer = function(rank, world, *args)
        dist.barrier()
        reply.send(("done", answer))
    except BaseException:
        reply.send(("failed", traceback.format_exc()))
    os._exit(0)  # nothing of the caller's is cleaned up by a copy of it
