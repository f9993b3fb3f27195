"""Run one function on gloo ranks forked from a process that has already imported everything.

Invariant: no rank outlives the call or its caller (PR_SET_PDEATHSIG). The first rank that fails ends the others, which
would wait for it. The caller must not have run anything parallel in torch before: threads do not survive a fork.

In: a function of rank and world size, its arguments, and the host of each rank. Out: the results by rank, or an error
with a rank's traceback and the end of the ranks' output, which is not shown otherwise. A rank finds in its environment
what a launcher sets, for `launch_context`: its place, and rank 0's address.
"""

from __future__ import annotations

import gc
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

from ft_plugins.launcher.preload.new_process import bind_to_agent

from .emulated_nodes import EmulatedHost
from .forkserver import enter

SECONDS = 300.0
COLLECTIVE_SECONDS = 60.0
END_SECONDS = 10.0
TAIL = 20  # lines
LOCALHOST = EmulatedHost("", "127.0.0.1", "lo")


class RankError(RuntimeError):
    """A rank of a gang failed."""


def gang(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    hosts: Sequence[EmulatedHost] | None = None,
    seconds: float = SECONDS,
    plain: bool = False,
) -> list[Any]:
    """Run `function(rank, world, *args)` on `world` gloo ranks and return the results by rank.

    `hosts`: one per rank; None: all on the loopback device. `plain`: ranks print where the caller does, and find
    nothing of a launcher. Raises RankError if a rank fails or ends without a result, TimeoutError if a result is
    missing after `seconds`.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="ftg-", dir="/tmp") as folder:
        store, log = Path(folder) / "store", Path(folder) / "log"
        log.touch()
        pipes: list[Connection] = []
        processes = []
        places = hosts or [LOCALHOST] * world
        for rank, host in enumerate(places):
            ours, theirs = context.Pipe(duplex=False)
            variables = {} if plain else _variables(rank, places)
            shown = "" if plain else str(log)
            arguments = (function, rank, world, host, variables, str(store), shown, os.getpid(), theirs, args)
            process = context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        results: dict[int, Any] = {}
        try:
            _collect(pipes, results, seconds, log)
        finally:
            for process in processes:
                process.join(END_SECONDS if len(results) == world else 0)
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()
        return [results[rank] for rank in range(world)]


_PEER = "Connection closed by peer"  # what gloo says of another rank's end


def _collect(pipes: Sequence[Connection], results: dict[int, Any], seconds: float, log: Path) -> None:
    """Receive all results into `results`."""
    deadline = time.monotonic() + seconds
    while len(results) < len(pipes):
        missing = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(missing), max(0.0, deadline - time.monotonic()))
        if not ready:
            ranks = ", ".join(map(str, missing.values()))
            raise TimeoutError(f"ranks {ranks} had not answered after {seconds:.0f} s:\n{_tail(log)}")
        failures = []
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = missing[pipe]
            try:
                status, answer = pipe.recv()
            except EOFError:
                status, answer = "ended", ""
            if status == "done":
                results[rank] = answer
            else:
                words = f"rank {rank} ended without an answer" if status == "ended" else f"rank {rank}:\n{answer}"
                failures.append((_PEER in answer, f"{words}\n{_tail(log)}"))
        if failures:  # a rank answers before its peers see it end, so the first cause is among them
            raise RankError(min(failures)[1])


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-TAIL:])


def _variables(rank: int, hosts: Sequence[EmulatedHost]) -> dict[str, str]:
    """What a launcher sets for a rank whose node is `hosts[rank]`."""
    place = {
        "RANK": rank,
        "LOCAL_RANK": hosts[:rank].count(hosts[rank]),
        "WORLD_SIZE": len(hosts),
        "LOCAL_WORLD_SIZE": hosts.count(hosts[rank]),
    }
    return {**{name: str(value) for name, value in place.items()}, "MASTER_ADDR": hosts[0].address}


def _rank(
    function: Callable[..., Any], rank: int, world: int, host: EmulatedHost, variables: dict[str, str], store: str,
    log: str, parent: int, reply: Connection, args: Any,
) -> None:  # fmt: skip
    """Run one rank, then exit."""
    try:
        gc.freeze()  # what the caller has left is not this rank's
        bind_to_agent(parent)
        if log:
            descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
            for target in (1, 2):
                os.dup2(descriptor, target)
            sys.stdout = sys.stderr = os.fdopen(descriptor, "w", buffering=1)  # line by line: the last line matters
        if host.namespace:
            enter(host.namespace)
        os.environ |= {**variables, "GLOO_SOCKET_IFNAME": host.device}
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
    os._exit(0)  # skips the caller's exit handlers
