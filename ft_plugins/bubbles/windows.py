"""Find the windows in which a copy may be sent: times when sender and receiver are both idle. Pure.

    sender     ....|bubble 3          |.........
    receiver   .......|bubble 5   |....|bubble 6
                      r           r              reserved at both ends of each, for regular communication
    windows            |=========|

Invariant: no window extends beyond a bubble of either, or into the time reserved at its ends (BAFT, figure 6), and none
is so short that it would be over before a frame is on its way. If the receiver computes during a bubble of the sender,
the bubble has several windows, at most `WINDOWS`: as many as the gate has room for.

In: bubbles of two ranks, in seconds of a common clock; `Reserve`. Out: `Windows`, by begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..model.timeline import Bubble

WINDOWS = 8  # after one compute span; of more, the longest are used
SHORTEST_SECONDS = 0.002  # of a window: half of a shorter one is over before the other process notices it

Seconds = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Reserve:
    """Seconds reserved at the begin and end of each bubble for regular communication: messages between stages (BAFT,
    4.2.2), and jitter. The rest is a window only if it is at least `shortest`."""

    begin: float
    end: float
    shortest: float = 0.0

    def __post_init__(self) -> None:
        if not min(self.begin, self.end, self.shortest) >= 0:
            times = ", ".join(f"{seconds} s" for seconds in (self.begin, self.end, self.shortest))
            raise ConfigError(f"reserved times of a bubble: expected 0 or more, found {times}")


@dataclass(frozen=True, eq=False)
class Windows:
    """Disjoint times, ascending. `bubble[i]` is the index of window i's bubble among those of the sender."""

    bubble: Numbers
    begin: Seconds
    end: Seconds

    @property
    def seconds(self) -> float:
        return float((self.end - self.begin).sum())

    @property
    def key(self) -> bytes:
        """Equal for windows at equal times, whatever their bubbles."""
        return self.begin.tobytes() + self.end.tobytes()


def shared(sender: Sequence[Bubble], receiver: Sequence[Bubble], reserve: Reserve) -> Windows:
    """The windows of a sender and a receiver. Raises ConfigError for bubbles that are not ascending and disjoint."""
    places, begins, ends = _usable(sender, reserve)
    _, others, other_ends = _usable(receiver, reserve)
    first = np.searchsorted(other_ends, begins, side="right")  # the receiver's first that ends after it begins
    stop = np.searchsorted(others, ends, side="left")  # the first that begins after it ends
    counts = np.maximum(stop - first, 0)
    own = np.repeat(np.arange(len(begins)), counts)
    offsets = np.arange(len(own)) - np.repeat(np.cumsum(counts) - counts, counts)
    other = np.repeat(first, counts) + offsets
    begin, end = np.maximum(begins[own], others[other]), np.minimum(ends[own], other_ends[other])
    usable = (end > begin) & (end - begin >= reserve.shortest)
    after = np.array([bubble.after for bubble in sender], dtype=np.int64)
    return _longest(Windows(places[own][usable], begin[usable], end[usable]), after)


def _usable(bubbles: Sequence[Bubble], reserve: Reserve) -> tuple[Numbers, Seconds, Seconds]:
    """Index, begin and end of each bubble less the reserve, without those that it fills."""
    begin = np.array([bubble.begin for bubble in bubbles], dtype=np.float64)
    end = np.array([bubble.end for bubble in bubbles], dtype=np.float64)
    if np.any(end < begin) or np.any(begin[1:] < end[:-1]):
        raise ConfigError("bubbles of a rank overlap or are not in order of time: expected those of one iteration")
    begin, end = begin + reserve.begin, end - reserve.end
    (places,) = np.nonzero(end > begin)
    return places, begin[places], end[places]


def _longest(windows: Windows, after: Numbers) -> Windows:
    """`windows` without the shortest ones after spans that have too many; `after` is the span before each bubble."""
    if len(windows.bubble) <= WINDOWS:
        return windows
    chosen = np.ones(len(windows.bubble), dtype=bool)
    _, starts, counts = np.unique(after[windows.bubble], return_index=True, return_counts=True)
    for start, count in zip(starts[counts > WINDOWS], counts[counts > WINDOWS], strict=True):
        lengths = (windows.end - windows.begin)[start : start + count]
        chosen[start + np.argsort(-lengths, kind="stable")[WINDOWS:]] = False
    return Windows(windows.bubble[chosen], windows.begin[chosen], windows.end[chosen])
