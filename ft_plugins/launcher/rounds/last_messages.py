"""Which processes are silent, from the times of their last messages. Pure.

Invariant: watched processes are in the order of their last messages, so a message costs the same for two processes as
for thousands, and so does a search in which none is silent. While this process was stopped no message could arrive:
that time does not count.

In: messages, by token; the time. Out: the silent ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

_NEVER = float("-inf")


class LastMessages:
    """Last messages of processes. Each call has a `now` that is not before that of the last one."""

    def __init__(self, silence: float) -> None:
        """`silence`: seconds without a message after which a process is silent."""
        self._silence = silence
        self._stopped = 0.0  # seconds for which this process was, in all; times are stored without them
        self._last: dict[str, float] = {}  # of each known process
        self._watched: OrderedDict[str, None] = OrderedDict()  # the one that was heard from longest ago comes first

    def __contains__(self, token: str) -> bool:
        return token in self._last

    def watch(self, token: str, now: float) -> None:
        """Search for this process too, which was heard from just now."""
        self._last[token] = now - self._stopped
        self._watched[token] = None
        self._watched.move_to_end(token)

    def hear(self, token: str, now: float) -> None:
        """Note a message, if the process is known."""
        if token in self._last:
            self._last[token] = now - self._stopped
            if token in self._watched:
                self._watched.move_to_end(token)

    def hang_up(self, token: str) -> None:
        """Take a process for silent until its next message, if it is known."""
        if token in self._last:
            self._last[token] = _NEVER
            if token in self._watched:
                self._watched.move_to_end(token, last=False)

    def rest(self, token: str) -> None:
        """Search for this process no longer, but remember when it was heard from."""
        self._watched.pop(token, None)

    def forget(self, token: str) -> None:
        """As if the process had never been heard from."""
        self._watched.pop(token, None)
        self._last.pop(token, None)

    def keep(self, tokens: Iterable[str]) -> None:
        """Forget all others."""
        kept = set(tokens)
        for token in [each for each in self._last if each not in kept]:
            self.forget(token)

    def is_silent(self, token: str, now: float) -> bool:
        """Whether a process is; not if it is unknown."""
        return token in self._last and now - self._stopped - self._last[token] > self._silence

    def has_hung_up(self, token: str) -> bool:
        """Whether a process did, and has sent no message since."""
        return self._last.get(token) == _NEVER

    def silent(self, now: float) -> list[str]:
        """The watched processes that are silent."""
        silent = []
        for token in self._watched:
            if not self.is_silent(token, now):
                break
            silent.append(token)
        return silent

    def was_stopped(self, seconds: float, now: float) -> None:
        """Note that this process was stopped for `seconds` before now. Messages noted since then count as of now."""
        self._stopped += seconds
        latest = now - self._stopped
        for token in reversed(self._watched):
            if self._last[token] <= latest:
                break
            self._last[token] = latest
        for token in self._last.keys() - self._watched.keys():
            self._last[token] = min(self._last[token], latest)
