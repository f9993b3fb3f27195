"""Keep exchange traffic behind training: thread priority, a rate limit, and a measurement of the links' capacity.

A node's cores belong to training: its collectives' threads and data loaders. A thread of the SMP that wakes at the same
moment must not be scheduled first, and loses nothing by running later. Threads that answer and watch keep their
priority, because liveness depends on them and they need little time. So do threads that restore, and those that write
to storage, which may have a time limit.

Links are measured before anything is protected; bubbles are planned by the result. The measurement sends frames the way
copies are sent: one connection for each rank of this node to the node that keeps its copy, all at once and on all nodes
at about the same time, each frame waiting for its answer. So it measures what copies will get, both SMPs included.

Invariant: a priority is only ever lowered, so no privilege is needed; on a system without priorities nothing happens. A
measurement is bounded in time, and its bytes are not stored.

In: a rate; a connection per lane. Out: pauses; bytes per second to each target.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ...model.pacer import Allowance
from ...transport.calls import Peer
from ...transport.frame_codec import PAYLOAD_LIMIT

# a third of the weight of a training thread, so that the SMP does not starve on a fully loaded node
NICE = 5
SESSION_NICE = 5  # if the kernel shares cores among sessions (autogroup), an SMP would weigh as much as all ranks
LEAST = 19  # the lowest priority
_AUTOGROUP = Path("/proc/self/autogroup")

MEASURED_SECONDS = 0.25  # per lane, at least one frame
SHARE = 0.1  # of that time: frames grow until one takes that long, or has the maximum size
_FIRST = 64 << 10  # bytes of the first frame


def step_back() -> None:
    """Lower the priority of this thread permanently. Idempotent. Not that of the process's first thread, from which it
    is measured and which new threads inherit."""
    thread = threading.get_native_id()
    if thread == os.getpid():
        return
    with contextlib.suppress(OSError):  # on Linux, threads have priorities; the first one's is the process's
        wanted = min(os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICE, LEAST)
        if os.getpriority(os.PRIO_PROCESS, thread) < wanted:
            os.setpriority(os.PRIO_PROCESS, thread, wanted)


def step_back_session() -> None:
    """Lower the priority of this process's session, if the kernel shares cores among sessions."""
    with contextlib.suppress(OSError):
        _AUTOGROUP.write_text(str(SESSION_NICE))


class RatePacer:
    """Limits the bytes per second, over all threads; 0: no limit."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def begins(self, nbytes: int) -> None:
        """A rate is the same for every copy."""

    def take(self, nbytes: int, stop: threading.Event) -> Allowance:
        """Wait until all of `nbytes` may be sent; an empty allowance if stopped."""
        if self._rate:
            with self._lock:
                now = time.monotonic()
                self._free_at = max(self._free_at, now) + nbytes / self._rate
                wait = self._free_at - now
            stop.wait(wait)
        return Allowance(0 if stop.is_set() else nbytes)

    def ended(self, allowed: Allowance) -> bool | None:
        """A rate-limited frame has no deadline."""
        return None


def measure(
    targets: Sequence[int], connect: Callable[[int], Peer], seconds: float = MEASURED_SECONDS
) -> list[tuple[int, float]]:
    """The bytes per second to each target, summed over its lanes; `targets[i]` is the target of lane i.

    Raises FtError, OSError if one of them does not answer.
    """
    if not targets:
        return []
    peers = [connect(target) for target in targets]
    frame = np.zeros(PAYLOAD_LIMIT, dtype=np.uint8)

    def lane(peer: Peer) -> float:
        return rate(lambda nbytes: peer.ask("probe", frame[:nbytes]), seconds)

    try:
        with ThreadPoolExecutor(len(peers), "smp-probe") as pool:
            rates = list(pool.map(lane, peers))
    finally:
        for peer in peers:
            peer.close()
    totals = dict.fromkeys(sorted(set(targets)), 0.0)
    for target, one in zip(targets, rates, strict=True):
        totals[target] += one
    return list(totals.items())


def rate(send: Callable[[int], object], seconds: float, clock: Callable[[], float] = time.monotonic) -> float:
    """The bytes per second of `send`, which sends a number of bytes and returns when they have arrived."""
    nbytes = _FIRST
    while True:
        began = clock()
        send(nbytes)
        if nbytes >= PAYLOAD_LIMIT or clock() - began >= SHARE * seconds:
            break
        nbytes = min(2 * nbytes, PAYLOAD_LIMIT)
    began, moved = clock(), 0
    while True:
        send(nbytes)
        moved += nbytes
        took = clock() - began
        if took >= seconds:
            return moved / took
