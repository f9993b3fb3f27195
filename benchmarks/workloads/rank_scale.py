"""How the ranks of a large job meet and agree, with the project's own tree of ranks: emulated ranks, real sockets.

All ranks of the job are threads of a few processes of this machine: each one meets its neighbours through a real store
of torch, authenticates them, and takes part in barriers and gathers. So times are those of two cores that do the work
of all nodes; counts per rank and node are those of the job.

In: how many ranks, how many on a node. Out: `RankFigures`.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from ft_plugins.collective.meeting import RankMeeting, meet
from ft_plugins.collective.operations import FrameKind, framed, payloads, place_of
from ft_plugins.collective.switch import Switch
from ft_plugins.events import Events

SECRET = b"the secret of an emulated job"
SECONDS = 280.0  # for all ranks to meet
PROCESSES = 8
PAYLOAD = 64  # bytes
REPEATS = 3


@dataclass(frozen=True)
class RankFigures:
    """What `ranks` ranks need. Seconds are of the whole job on this machine; the others of one rank or node."""

    ranks: int
    meet_seconds: float  # until the last rank has met its neighbours
    barrier_seconds: float
    gather_seconds: float  # of 64 bytes from each
    store_operations: float  # of a rank that meets, on average
    store_bytes: float  # that it reads
    sockets: int  # of a node, most
    threads: int  # of a node


class CountingStore:
    """The operations of all ranks of one process."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._lock = threading.Lock()
        self.operations = self.nbytes = 0

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            self.operations += 1
            self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Waits until it is there, as the real one does, without blocking the other ranks of this process."""
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            with self._lock:
                if self._store.check([key]):
                    value = bytes(self._store.get(key))
                    self.operations += 1
                    self.nbytes += len(value)
                    return value
            time.sleep(0.02)
        raise TimeoutError(f"no rank has set {key}")


def measure(ranks: int, on_node: int = 8) -> RankFigures:
    """Have `ranks` ranks meet and agree. Raises RuntimeError if one of them fails."""
    import torch.distributed as dist

    context = multiprocessing.get_context("fork")
    count = min(PROCESSES, -(-ranks // on_node))
    pipes: list[Connection] = []
    processes = []
    for part in range(count):
        ours, theirs = context.Pipe()
        process = context.Process(target=_run, args=(part, count, ranks, on_node, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    # after the forks: its thread looks up the names of those that connect, and a process that is forked meanwhile
    # inherits the resolver's lock, held for ever
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=SECONDS))
    try:
        began = time.monotonic()
        for pipe in pipes:
            pipe.send(server.port)
        counts = [_answer(pipe) for pipe in pipes]
        seconds = {"meet": time.monotonic() - began}
        for kind in ("barrier", "gather"):
            taken = []
            for _ in range(REPEATS):
                began = time.monotonic()
                for pipe in pipes:
                    pipe.send(kind)
                for pipe in pipes:
                    _answer(pipe)
                taken.append(time.monotonic() - began)
            seconds[kind] = sorted(taken)[REPEATS // 2]
    finally:
        for process in processes:
            process.kill()
            process.join()
    operations, nbytes = (sum(each[index] for each in counts) / ranks for index in range(2))
    return RankFigures(
        ranks, seconds["meet"], seconds["barrier"], seconds["gather"], operations, nbytes,
        *connections_of_a_node(ranks, on_node),
    )  # fmt: skip


def connections_of_a_node(ranks: int, on_node: int) -> tuple[int, int]:
    """The most sockets of one node's ranks for the tree, and its threads."""
    places = [place_of(rank, ranks, on_node) for rank in range(ranks)]
    links = [len(place.children) + (place.parent is not None) for place in places]
    return max(sum(links[at : at + on_node]) for at in range(0, ranks, on_node)), min(on_node, ranks)


def _answer(pipe: Connection) -> Any:
    if not pipe.poll(SECONDS + 20):
        raise RuntimeError("the ranks did not answer in time")
    status, value = pipe.recv()
    if status != "done":
        raise RuntimeError(value)
    return value


def _run(part: int, parts: int, ranks: int, on_node: int, pipe: Connection) -> None:
    """One process: the ranks of every `parts`-th node. Receives the store's port first."""
    import torch.distributed as dist

    try:
        real = dist.TCPStore("127.0.0.1", pipe.recv(), is_master=False, timeout=timedelta(seconds=SECONDS))
        store = CountingStore(real)
        own = [rank for rank in range(ranks) if rank // on_node % parts == part]
        switches: dict[int, Switch] = {}
        failures: list[str] = []

        def join(rank: int) -> None:
            try:
                met = meet(RankMeeting(store, "0", rank, ranks, on_node, SECRET, "127.0.0.1", False, SECONDS, Events()))
                switches[rank] = Switch(met.place, met.links, SECONDS)
            except Exception as error:
                failures.append(f"rank {rank}: {type(error).__name__}: {error}")

        threading.stack_size(256 << 10)
        threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in own]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise RuntimeError(failures[0])
        pipe.send(("done", (store.operations, store.nbytes)))
        while True:
            gathers = pipe.recv() == "gather"
            kind, body = (FrameKind.GATHER, framed(bytes(PAYLOAD))) if gathers else (FrameKind.AGREE, b"")
            calls = [(switch, switch.start(kind, body)) for switch in switches.values()]
            results = [switch.result(call) for switch, call in calls]
            if gathers and len(payloads(results[0], ranks)) != ranks:
                raise RuntimeError("a payload is missing")
            pipe.send(("done", None))
    except Exception as error:
        pipe.send(("failed", f"{type(error).__name__}: {error}"))
    os._exit(0)
