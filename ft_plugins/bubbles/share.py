"""How the senders of one node share the link to one other node: at which rate each may send when. Pure.

Time is cut where any window begins or ends, and pieces in which the same senders may send are counted as one: a class,
which carries link x time. What each sender takes of each class is a flow from senders to classes. The rate at which all
of them progress alike is the largest L for which each can take L of what it has to send in one iteration; no set S of
senders can do better than its windows allow:

    L = min over S of  link x (time in which any of S may send) / (bytes of S)           (max-flow min-cut)

Invariant: at no time do the rates add up to more than the link. No sender needs more iterations than ceil(1 / L), and
no plan has fewer. What the flow leaves over is shared out as well, so that the link is never idle in a window.

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
NO_RATE = 1e-3  # of a sender's highest: single bytes of a flow, and what is left of sums of floats


@dataclass(frozen=True, eq=False)
class Rates:
    """From `begin[i]` to `end[i]`, in window `window[i]`, a sender may send `rate[i]` bytes per second. Ascending."""

    window: Numbers
    begin: Seconds
    end: Seconds
    rate: npt.NDArray[np.float64]

    def carried(self, windows: int, since: float = 0.0) -> Numbers:
        """Whole bytes in each of so many windows, of the time from `since` on."""
        seconds = np.maximum(self.end - np.maximum(self.begin, since), 0.0)
        carried = np.bincount(self.window, weights=self.rate * seconds, minlength=windows)
        return np.floor(carried * (1 + 1e-12)).astype(np.int64)  # 3 bytes/s x 0.1 s x 10 are 3 bytes, not 2.9999


    def used(self, windows: Windows) -> Windows:
        """Of each of these windows what lies between the first and the last moment at which there is a rate in it:
        before and after that the link is another sender's. One without any rate is as it was."""
        sends = self.rate > NO_RATE * np.max(self.rate, initial=0.0)
        begin, end = np.full(len(windows.begin), np.inf), np.full(len(windows.end), -np.inf)
        np.minimum.at(begin, self.window[sends], self.begin[sends])
        np.maximum.at(end, self.window[sends], self.end[sends])
        some = end > begin
        return Windows(windows.bubble, np.where(some, begin, windows.begin), np.where(some, end, windows.end))


def share(windows: Sequence[Windows], nbytes: Sequence[int], bytes_per_second: float) -> list[Rates]:
    """The rates of senders that share a link; those with nothing to send get none."""
    groups: dict[bytes, list[int]] = {}
    for place, times in enumerate(windows):
        groups.setdefault(times.key, []).append(place)
    needs = [sum(nbytes[place] for place in members) for members in groups.values()]
    distinct = [windows[members[0]] for members in groups.values()]
    found: list[Rates | None] = [None] * len(windows)
    rates = _alone(distinct[0], bytes_per_second) if len(distinct) == 1 else _among(distinct, needs, bytes_per_second)
    for one, need, members in zip(rates, needs, groups.values(), strict=True):
        for place in members:
            part = nbytes[place] / need if need else 0.0
            found[place] = Rates(one.window, one.begin, one.end, one.rate * part)
    return [one for one in found if one is not None]


def _alone(windows: Windows, bytes_per_second: float) -> list[Rates]:
    count = len(windows.begin)
    return [Rates(np.arange(count), windows.begin, windows.end, np.full(count, bytes_per_second))]


def _among(windows: Sequence[Windows], needs: Sequence[int], bytes_per_second: float) -> list[Rates]:
    """The rates of senders of which no two have the same windows."""
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
    """What nobody takes of each class, for its senders by what they have to send."""
    weights = kinds * np.array(needs, dtype=np.float64)[:, None]
    total = weights.sum(axis=0)
    left = np.maximum(1.0 - parts.sum(axis=0), 0.0)
    return np.asarray(np.divide(weights, total, out=np.zeros_like(weights), where=total > 0) * left)


def _fairest(may: Sequence[Sequence[bool]], needs: Sequence[int], room: Sequence[int]) -> Flow:
    """The flow in which every sender takes the same share of what it needs, the largest possible (Newton's method).

    Senders that have no window take nothing, and do not keep the others back.
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
    """A largest flow, and the senders on the source's side of the smallest cut: none when all is taken."""
    flow = [[0] * len(room) for _ in wanted]
    left, space = list(wanted), list(room)
    while True:
        came: dict[int, tuple[int, int]] = {}  # sender -> (sender before it, the class in which it makes room)
        waiting = deque(sender for sender, rest in enumerate(left) if rest)
        seen = set(waiting)
        found: tuple[int, int] | None = None
        while waiting and found is None:
            sender = waiting.popleft()
            for kind in (kind for kind, here in enumerate(may[sender]) if here):
                if space[kind]:
                    found = sender, kind
                    break
                for other in range(len(wanted)):
                    if other not in seen and flow[other][kind]:
                        seen.add(other)
                        came[other] = sender, kind
                        waiting.append(other)
        if found is None:
            return flow, seen
        _push(flow, left, space, came, *found)


def _push(
    flow: Flow, left: list[int], space: list[int], came: dict[int, tuple[int, int]], sender: int, kind: int
) -> None:
    """Send as much as will go along a path: `sender` takes of `kind`, and leaves what it had to the one before it."""
    path, amount = [(sender, kind, 1)], space[kind]
    while sender in came:
        before, given_up = came[sender]
        path += [(sender, given_up, -1), (before, given_up, 1)]
        amount = min(amount, flow[sender][given_up])
        sender = before
    amount = min(amount, left[sender])
    left[sender] -= amount
    space[kind] -= amount
    for who, which, sign in path:
        flow[who][which] += sign * amount
