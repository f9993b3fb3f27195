"""Whether a script's loop continues where the engine was restored, or begins at its own start.

Invariant: a restored job computes no iteration before its loop was seen to know where it is. There are two signs, both
between `deepspeed.initialize` and the first batch: code outside DeepSpeed read one of the engine's counters, or
`engine.load_checkpoint` returned the client state of the very iteration that was restored. A loop without either would
repeat iterations and train longer than asked, and end without an error.

The counters are observed by a subclass of the engine's class with properties of their names, which is removed when
training begins. Who reads one only to print it shows by its own loop's counters (`script.loop_counters`): they go into
each version, and must be the same when the restored loop begins.

In: an engine, the stack. Out: whether its loop continues; what to say if it does not."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

import torch

from ...errors import ResumeError
from ..script.loop_counters import LoopCounters, decided_otherwise, loop_counters, not_continued

_COUNTERS = ("global_steps", "global_samples", "micro_steps")
_NOT_THE_SCRIPT = ("accelerate", "deepspeed", "ft_plugins", "torch", "transformers")
_NAMES = ", ".join(f"engine.{name}" for name in _COUNTERS)
_LINE = (
    "Write `start = engine.global_steps` after deepspeed.initialize and begin there: `for step in range(start, steps)` "
    "or `for epoch in range(start // steps_per_epoch, epochs)`"
)
_DECIDED = (
    "what the loop decides by it (an evaluation, a log, a checkpoint) comes at other iterations than without a "
    "failure, and if that draws random numbers, results differ: count it from engine.global_steps"
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


class OwnCounters:
    """The counters of the script's own loops, from version to version."""

    def __init__(self) -> None:
        self._first = self._last = LoopCounters()
        self._saved: Mapping[str, Any] | None = None
        self._within = False  # whether it was captured in the middle of an epoch
        self.remark = ""  # after `begin`: what else is not what it was

    def captured(self) -> dict[str, Any]:
        """At the version point, right before the next iteration or after the loop: what a version has of them."""
        now = loop_counters()
        self._last = now or self._last
        return {
            **{"first": vars(self._first), "last": vars(self._last), "ended": not now},
            "ranks": torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
        }

    def restored(self, saved: Mapping[str, Any] | None, position: Mapping[str, Any]) -> None:
        """The counters of the restored version, None if it has none, and its data position."""
        self._saved = saved
        self._within = any(one.get("read") for role, one in position.items() if role.startswith("train"))

    def begin(self, restored: bool, ignored: Collection[str]) -> str | None:
        """Before the first iteration of this incarnation: what shows that the loop did not continue, None for nothing.
        Another number of ranks may have epochs of another length."""
        self._first = self._last = now = loop_counters()
        saved, self._saved = self._saved, None
        if not restored or saved is None:
            return None
        self._first = LoopCounters(**saved["first"])
        version = LoopCounters(**saved["last"])
        if saved["ranks"] != self.captured()["ranks"]:
            return None
        changed = decided_otherwise(self._first, version, now, self._within, ignored)
        self.remark = "" if changed is None else f"after the restore {changed}; {_DECIDED}"
        return not_continued(self._first, version, now, saved["ended"], ignored, self._within)


def elsewhere(rank: int, iteration: int, problem: str) -> str:
    """Why a job restored at `iteration` is refused whose loop has read a counter and begins elsewhere."""
    return (
        f"rank {rank}: iteration {iteration} was restored, but the loop does not begin there: {problem}. To read "
        f"engine.global_steps is not enough. {_LINE}; pass over a counter that need not continue by "
        "`import ft_plugins.deepspeed; ft_plugins.deepspeed.ignore('its name')`; or start with --ftp-resume fresh"
    )


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
