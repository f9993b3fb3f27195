"""Divide the link between two nodes among its senders: the rate of each at any time. Pure.

Time is cut where any window begins or ends. Pieces in which the same senders may send form a class, with the capacity
link x time. The bytes that each sender takes from each class are a flow from senders to classes. All senders progress
equally at the largest L for which each can send the share L of its bytes in one iteration; no set S of senders can do
better than its windows allow:

    L = min over S of  link x (time in which any of S may send) / (bytes of S)           (max-flow min-cut)

Invariant: the rates never add up to more than the link. No sender needs more iterations than ceil(1 / L), and no plan
takes fewer. Capacity left over by the flow is divided too, so the link is never idle in a window.

In: windows and bytes of each sender, bytes per second. Out: `Rates` of each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from .windows import Numbers, Seconds, Windows

Flow = list[list[int]]  # by sender and class, bytes
NO_RATE = 1e-3  # of a sender's highest rate; less is due to single bytes of a flow, or rounding


@dataclass(frozen=True, eq=False)
class Rates:
    """The rates of a sender: `rate[i]` bytes per second from `begin[i]` to `end[i]`, in `window[i]`. Ascending."""

    window: Numbers
    begin: Seconds
    end: Seconds
    rate: npt.NDArray[np.float64]

    def carried(self, windows: int, since: float = 0.0) -> Numbers:
        """Whole bytes in each of `windows` windows, from time `since` on."""
        seconds = np.maximum(self.end - np.maximum(self.begin, since), 0.0)
        carried = np.bincount(self.window, weights=self.rate * seconds, minlength=windows)
        return np.floor(carried * (1 + 1e-12)).astype(np.int64)  # 3 bytes/s x 0.1 s x 10 are 3 bytes, not 2.9999

    def used(self, windows: Windows) -> Windows:
        """Each window cut to the time between its first and last rate; before and after, the link is another sender's.
        A window without a rate is unchanged."""
        sends = self.rate > NO_RATE * np.max(self.rate, initial=0.0)
        begin, end = np.full(len(windows.begin), np.inf), np.full(len(windows.end), -np.inf)
        np.minimum.at(begin, self.window[sends], self.begin[sends])
        np.maximum.at(end, self.window[sends], self.end[sends])
        some = end > begin
        return Windows(windows.bubble, np.where(some, begin, windows.begin), np.where(some, end, windows.end))


def share(windows: Sequence[Windows], nbytes: Sequence[int], bytes_per_second: float) -> list[Rates]:
    """The rates of senders that share a link; 0 for those with nothing to send."""
    groups: dict[bytes, list[int]] = {}
    for place, times in enumerate(windows):
        groups.setdefault(times.key, []).append(place)
    needs = [sum(nbytes[place] for place in members) for members in groups.values()]
    distinct = [windows[members[0]] for members in groups.values()]
    by_sender: list[Rates | None] = [None] * len(windows)
    rates = _alone(distinct[0], bytes_per_second) if len(distinct) == 1 else _among(distinct, needs, bytes_per_second)
    for one, need, members in zip(rates, needs, groups.values(), strict=True):
        for place in members:
            part = nbytes[place] / need if need else 0.0
            by_sender[place] = Rates(one.window, one.begin, one.end, one.rate * part)
    return [one for one in by_sender if one is not None]


def _alone(windows: Windows, bytes_per_second: float) -> list[Rates]:
    count = len(windows.begin)
    return [Rates(np.arange(count), windows.begin, windows.end, np.full(count, bytes_per_second))]


def _among(windows: Sequence[Windows], needs: Sequence[int], bytes_per_second: float) -> list[Rates]:
    """The rates of senders with different windows."""
    edges = np.unique(np.concatenate([side for one in windows for side in (one.begin, one.end)]))
    middle = (edges[1:] + edges[:-1]) / 2
    at = [np.searchsorted(one.begin, middle, side="right") - 1 for one in windows]  # the window it may be in
    may = np.array([
        (place >= 0) & (middle < one.end[place]) if len(one.end) else np.zeros(len(middle), dtype=bool)
        for place, one in zip(at, windows, strict=True)
    ])  # fmt: skip
    kinds, kind = np.unique(may, axis=1, return_inverse=True)
    kind = kind.reshape(-1)
    seconds = np.bincount(kind, weights=np.diff(edges), minlength=kinds.shape[1])
    room = [int(bytes_per_second * one) for one in seconds]
    flow = _fairest([[bool(x) for x in row] for row in kinds], needs, room)
    parts = np.array(flow, dtype=np.float64) / np.maximum(room, 1)
    parts += _left_over(kinds, needs, parts)
    rates = []
    for place, one in enumerate(may):
        (pieces,) = np.nonzero(one)
        rate = parts[place, kind[pieces]] * bytes_per_second
        rates.append(Rates(at[place][pieces], edges[pieces], edges[pieces + 1], rate))
    return rates


def _left_over(
    kinds: npt.NDArray[np.bool_], needs: Sequence[int], parts: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """The unused part of each class, divided among its senders in proportion to their bytes."""
    weights = kinds * np.array(needs, dtype=np.float64)[:, None]
    total = weights.sum(axis=0)
    left = np.maximum(1.0 - parts.sum(axis=0), 0.0)
    return np.asarray(np.divide(weights, total, out=np.zeros_like(weights), where=total > 0) * left)


def _fairest(may: Sequence[Sequence[bool]], needs: Sequence[int], room: Sequence[int]) -> Flow:
    """The flow in which every sender gets the same, largest possible share of its need (Newton's method).

    Senders without windows get nothing and do not hold back the others.
    """
    able = [any(here and space for here, space in zip(row, room, strict=True)) for row in may]
    needs = [need if can else 0 for need, can in zip(needs, able, strict=True)]
    progress = Fraction(sum(room), max(1, sum(needs)))
    while True:
        wanted = [need * progress.numerator // progress.denominator for need in needs]
        flow, short = largest_flow(may, wanted, room)
        if not short:
            return flow
        reached = [any(may[sender][kind] for sender in short) for kind in range(len(room))]
        space = sum(space for space, there in zip(room, reached, strict=True) if there)
        progress = Fraction(space, sum(needs[sender] for sender in short))


def largest_flow(may: Sequence[Sequence[bool]], wanted: Sequence[int], room: Sequence[int]) -> tuple[Flow, set[int]]:
    """A largest flow, and the senders on the source's side of the smallest cut; none if all needs are met."""
    flow = [[0] * len(room) for _ in wanted]
    left, space = list(wanted), list(room)
    while True:
        path: dict[int, tuple[int, int]] = {}  # sender -> (previous sender, the class in which it makes room)
        waiting = deque(sender for sender, rest in enumerate(left) if rest)
        seen = set(waiting)
        sink: tuple[int, int] | None = None  # (sender, class with room)
        while waiting and sink is None:
            sender = waiting.popleft()
            for kind in (kind for kind, here in enumerate(may[sender]) if here):
                if space[kind]:
                    sink = sender, kind
                    break
                for other in range(len(wanted)):
                    if other not in seen and flow[other][kind]:
                        seen.add(other)
                        path[other] = sender, kind
                        waiting.append(other)
        if sink is None:
            return flow, seen
        _push(flow, left, space, path, *sink)


def _push(
    flow: Flow, left: list[int], space: list[int], path: dict[int, tuple[int, int]], sender: int, kind: int
) -> None:
    """Augment along a path: `sender` takes from class `kind` and gives up the same elsewhere to the previous sender."""
    changes, amount = [(sender, kind, 1)], space[kind]
    while sender in path:
        before, given_up = path[sender]
        changes += [(sender, given_up, -1), (before, given_up, 1)]
        amount = min(amount, flow[sender][given_up])
        sender = before
    amount = min(amount, left[sender])
    left[sender] -= amount
    space[kind] -= amount
    for member, which, sign in changes:
        flow[member][which] += sign * amount
