"""What the links of this node carry, measured before anything is protected: by it bubbles are planned.

Frames go as those of copies do, a connection for each rank of this node to the node that keeps its copy, all at once
and on all nodes about together; the answer to each is waited for. So what is measured is what copies will have, the
way through both SMPs included, and not what the wire could carry otherwise.

Invariant: bounded. A lane grows its frames until one takes SHARE of its time or is as large as frames are, then counts
for SECONDS, one frame at least. Nothing that is received is kept.

In: a connection per lane. Out: bytes per second to each target.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .wire import PAYLOAD_LIMIT, Peer

SECONDS = 0.25
SHARE = 0.1
_FIRST = 64 << 10  # bytes of the first frame


def measure(
    targets: Sequence[int], connect: Callable[[int], Peer], seconds: float = SECONDS
) -> list[tuple[int, float]]:
    """Bytes per second that the lanes of each target have together; `targets[i]` is that of lane i.

    Raises FtError, OSError where one of them does not answer.
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
    found = dict.fromkeys(sorted(set(targets)), 0.0)
    for target, one in zip(targets, rates, strict=True):
        found[target] += one
    return list(found.items())


def rate(
    send: Callable[[int], object], seconds: float, clock: Callable[[], float] = time.monotonic
) -> float:
    """Bytes per second of `send`, which returns when so many bytes are through."""
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
