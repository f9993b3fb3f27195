"""The data position of loaders that a Megatron-LM script provides itself (`--dataloader-type external`).

Megatron-LM hands such a loader through and calls `next` on it, so its position is what it keeps itself: a training or
evaluation loader needs `state_dict` and `load_state_dict`, of plain values, and the state must count the batches that
it has handed out, not those that it has read ahead: nothing else of it is restored. Any other loader is refused by name
when it is built. Energon's is: its `save_state_rank` returns objects, which only pickle would restore.

Evaluation loaders count where the job evaluates: one that begins again could draw from the generators of training.
Those of the test at the end are read after the last version point.

In: loaders as they are built, of one virtual stage after another; ranks without a loader have none. Out: a small-state
entry, and the training loaders in a shell that observes reads (see `loader_reads`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ...errors import ResumeError
from ..data.loader_reads import LoopReads
from ..data.loaders import is_stateful
from ..rules import MEGATRON, refuse
from ..rules.megatron import OTHERWISE

LACKED = "the position of the script's own data loaders"  # by Megatron's checkpoints
_ROOM = 256 << 10  # bytes of small state claimed for all loaders, whose state is not known when memory is claimed


def unfollowed(loaders: Iterable[tuple[str, Any]]) -> list[str]:
    """Purpose and class of the loaders that do not keep their position themselves. Pure."""
    return [f"{purpose}: {type(one).__name__}" for purpose, one in loaders if not is_stateful(one)]


class ExternalData:
    """The loaders of one process. `iteration()`: the one under way, 0 before the first; `replicas`: their number."""

    def __init__(self, rank: int, replicas: int, iteration: Callable[[], int]) -> None:
        self._rank, self._replicas, self._iteration = rank, replicas, iteration
        self._loaders: dict[str, list[Any]] = {"training": [], "evaluation": []}
        self._shells: list[_Shell] = []  # of the training loaders
        self._batch: Any = None
        self._pending: Mapping[str, Any] | None = None  # restored, for loaders that are still to be built

    def built(self, train: Any, valid: Any, evaluates: bool) -> Any:
        """The loaders of one stage were built. Returns what to train with. Raises UnsupportedError, ResumeError."""
        new = [("training", one) for one in _each(train)]
        shells = [_Shell(one, self._reads()) for _, one in new]
        new += [("evaluation", one) for one in _each(valid if evaluates else None)]
        refuse(MEGATRON, OTHERWISE, {"built": {"loaders": unfollowed(new)}}, who=f"rank {self._rank}: ")
        for purpose, one in new:
            self._loaders[purpose].append(one)
            if self._pending is not None:
                self._load(purpose, len(self._loaders[purpose]) - 1, self._pending)
        self._shells += shells
        return shells if isinstance(train, list) else shells[0] if shells else None

    def require_read(self, batch: Any) -> None:
        """Called before a version point; `batch`: what decides how much an iteration reads. Raises ConfigError."""
        for shell in self._shells:
            if self._batch not in (None, batch):
                shell.reads = self._reads()  # from the next iteration on
            shell.reads.require()
        self._batch = batch

    def _reads(self) -> LoopReads:
        return LoopReads(self._iteration, lambda: True)

    def read(self) -> dict[str, Any]:
        """The position at the version point. The codec names a state that is not of plain values."""
        if self._pending is not None:
            return dict(self._pending)
        states = {purpose: [one.state_dict() for one in loaders] for purpose, loaders in self._loaders.items()}
        room = b"" if self._iteration() else bytes(_ROOM)
        usual = [shell.reads.usual for shell in self._shells]
        return {"loaders": states, "replicas": self._replicas, "usual": usual, "room": room}

    def write(self, saved: Mapping[str, Any]) -> None:
        """Return to a captured position; before the first iteration, when the loaders are built. Raises ResumeError."""
        if saved["replicas"] != self._replicas:
            raise ResumeError(
                f"rank {self._rank}: the script's own data loaders were captured with {saved['replicas']} "
                f"data-parallel ranks, this job has {self._replicas}, and how they divide data is not known: resume "
                f"with {saved['replicas']}, or start with --ftp-resume fresh"
            )
        if not self._iteration():
            self._pending = saved
            return
        for purpose, loaders in self._loaders.items():
            for place in range(max(len(loaders), len(saved["loaders"][purpose]))):
                self._load(purpose, place, saved)
        for shell, usual in zip(self._shells, saved["usual"], strict=True):
            shell.reads.usual = usual

    def _load(self, purpose: str, place: int, saved: Mapping[str, Any]) -> None:
        loaders, states = self._loaders[purpose], saved["loaders"][purpose]
        if place >= min(len(loaders), len(states)):
            raise ResumeError(
                f"rank {self._rank}: this job has {len(loaders)} {purpose} loaders of the script's own, the captured "
                f"one had {len(states)}: resume with those, or start with --ftp-resume fresh"
            )
        loaders[place].load_state_dict(states[place])


def _each(loaders: Any) -> Iterator[Any]:
    for one in loaders if isinstance(loaders, list | tuple) else [loaders]:
        if one is not None:
            yield one


class _Shell:
    """A training loader whose reads are observed."""

    def __init__(self, loader: Any, reads: LoopReads) -> None:
        self._loader, self.reads = loader, reads

    def __iter__(self) -> _Shell:
        return self

    def __next__(self) -> Any:
        self.reads.reading(self)
        self.reads.required = True
        return next(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)
