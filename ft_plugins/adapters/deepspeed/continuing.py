"""Whether a script's loop continues where the engine was restored, or begins at its own start.

Invariant: a restored job computes no iteration before its loop was seen to know where it is. There are two signs, both
between `deepspeed.initialize` and the first batch: code outside DeepSpeed read one of the engine's counters, or
`engine.load_checkpoint` returned the client state of the very iteration that was restored. A loop without either would
repeat iterations and train longer than asked, and end without an error.

The counters are observed by a subclass of the engine's class with properties of their names, which is removed when
training begins. Who reads one only to print it shows by what begins again (`begun_again`), and by the proof.

In: an engine. Out: whether its loop continues; what to say if it does not."""

from __future__ import annotations

import sys
from typing import Any

from ...errors import ResumeError

_COUNTERS = ("global_steps", "global_samples", "micro_steps")
_NOT_THE_SCRIPT = ("accelerate", "deepspeed", "ft_plugins", "torch", "transformers")
_NAMES = ", ".join(f"engine.{name}" for name in _COUNTERS)
_LINE = (
    "Write `start = engine.global_steps` after deepspeed.initialize and begin there: `for step in range(start, steps)` "
    "or `for epoch in range(start // steps_per_epoch, epochs)`"
)
NOTICE = (
    f"the loop read none of {_NAMES} between deepspeed.initialize and its first batch, so a restart will be refused: "
    f"the loop would begin at its own start. {_LINE}"
)


class CounterReads:
    """Observes who reads an engine's counters, until `end`."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._kind = engine, type(engine)
        self._values: dict[str, int] = {}  # what the script read last
        observed = {name: self._observed(name) for name in _COUNTERS}
        names = {"__module__": self._kind.__module__, "__doc__": self._kind.__doc__}
        engine.__class__ = type(self._kind.__name__, (self._kind,), {**names, **observed})

    def _observed(self, name: str) -> property:
        def read(engine: Any) -> int:
            value: int = vars(engine)[name]
            reader = str(sys._getframe(1).f_globals.get("__name__"))
            if reader.partition(".")[0] not in _NOT_THE_SCRIPT:
                self._values[name] = value
            return value

        def write(engine: Any, value: int) -> None:
            vars(engine)[name] = value

        return property(read, write)

    def end(self) -> bool:
        """Stop observing. Returns whether the script read a counter's present value."""
        self._engine.__class__ = self._kind
        return any(vars(self._engine)[name] == value for name, value in self._values.items())


def require_equal(rank: int, client: str, counted: int, iteration: int) -> None:
    """Raises ResumeError if a client's loop has `counted` other iterations than the engine."""
    if counted != iteration:
        raise ResumeError(
            f"rank {rank}: the engine has completed iteration {iteration}, but {client}'s loop is at {counted}, so it "
            "would train on other batches, or for another time, than asked for; start with --ftp-resume fresh"
        )


def at_its_own_start(rank: int, iteration: int, loaded: int | None) -> str:
    """Why a job restored at `iteration` is refused; `loaded`: the iteration that `engine.load_checkpoint` returned."""
    own = "" if loaded is None else f" (engine.load_checkpoint returned the client state of iteration {loaded})"
    return (
        f"rank {rank}: iteration {iteration} was restored, but the loop begins at its own start{own}: it read none of "
        f"{_NAMES} between deepspeed.initialize and its first batch, so it would train on the same batches again, "
        f"for too long. {_LINE}; or start with --ftp-resume fresh"
    )
