"""Follow a *client*: a program whose own loop trains a DeepSpeed engine, and knows by itself where it is.

A client continues from state of its own (an iteration, consumed samples, a trainer's state), not from the engine's
counters. So this state is captured with the engine's, and set when the client has built its engine.

Invariant: a client's loop is never at another iteration than the engine. What it has loaded from a checkpoint of its
own before an engine was restored is replaced; what it has loaded instead of a restore is left alone.

    setting_up(client)       around the client's function that builds the engine: deepspeed.initialize in it builds the
                             engine of `client`. At its end the client is restored, if the engine was
    client.state             at each version point
    client.iteration         before each iteration: that of the engine, else the job is refused

In: the modules of clients, right after their import. Out: the client whose engine is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol


class EngineClient(Protocol):
    """What DeepSpeed's loop needs to know of a program that has its own. Its methods are called on every rank. Defaults
    suit one that does not count, and keeps nothing."""

    name: str  # as its users call it
    places_data: bool  # whether its restored state alone makes its loop read the right batches
    # `last`: the iteration at which its training ends; a client that does not know it has no such attribute

    def follow(self, engine: Any, begin: Callable[[], None]) -> None:
        """The engine is built and protected, not restored yet. `begin` may be called right before each iteration,
        before anything of it is read or computed; without it, its first read or forward shows that it begins. Raises
        UnsupportedError for what cannot be followed exactly."""

    def iteration(self) -> int | None:
        """How many iterations its loop has completed, as it counts itself; None if it does not: then only reads of the
        engine's counters show that it continues."""
        return None

    def state(self) -> dict[str, Any]:
        """Its own state at a version point, and as soon as it is followed: plain values, tensors and arrays. Twice the
        room that its first state takes is claimed."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from there. The engine is restored already; generators and the data position come later, right
        before the first iteration. Raises ResumeError."""
        return


class EngineClients:
    """The client that is building its engine, if any. `finished` is called when it has; `trained` when its loop has
    ended, if the client knows: what it does with the engine from there on belongs to no iteration."""

    def __init__(
        self,
        finished: Callable[[EngineClient], None] = lambda client: None,
        trained: Callable[[EngineClient], None] = lambda client: None,
    ) -> None:
        self.current: EngineClient | None = None
        self._finished = finished
        self.trained = trained

    @contextmanager
    def setting_up(self, client: EngineClient) -> Iterator[None]:
        """Within this context an engine that is built is that of `client`. Of nested ones the outermost counts."""
        if self.current is not None:
            yield
            return
        self.current = client
        try:
            yield
        finally:
            self.current = None
        self._finished(client)
