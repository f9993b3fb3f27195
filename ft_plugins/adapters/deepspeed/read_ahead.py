"""Compare the batches that each iteration reads with the micro-steps that it computes. Pure; no I/O.

Invariant: a version is restored only if its data position is that of training: no batch was read in an iteration
before the one that trains on it. What a script does with a batch is not visible, but a loop that holds batches back
reads more in its first iteration, or none in its last. So every iteration must read as many batches for each micro-step
as the first one. How many is the script's choice: a batch may be split, or several joined. Whether the first iteration
held one back shows only in the second; until then a version is restored only if it read one batch for each micro-step.

A batch whose pass is left without a micro-step on it (`if i == n: break` at the begin of a loop's body, a look at the
first one) is not counted; what a restart makes of it `data.left_passes` says.

In: reads and micro-steps, as they happen. Out: what is wrong, or None; a `ReadPace` for the version."""

from __future__ import annotations

from dataclasses import dataclass, replace

ADVICE = (
    "Read each batch after engine.step() of the one before, in the main thread, and train on all of them: a loader of "
    "accelerate, a prefetching iterator, or next() before engine.step() reads ahead. Drop samples in the data set, and "
    "read others between engine.eval() and engine.train()"
)
READ_EARLY = "an iterator that trains was read before deepspeed.initialize already: begin it after"
NOTHING_READ = (
    "the engine computes in training mode, but no batch was read since the last update (itertools.cycle reads a loader "
    "once and repeats what it kept: write `while True: yield from loader` in its place)"
)
DRAWN = (
    "random numbers were drawn after the last update, but no batch was read from a tracked loader, and a restore sets "
    "random numbers only at the forward. Draw them in the data set or the collate function of a torch DataLoader, or "
    "from a generator that is seeded with engine.global_steps"
)
OTHER_THREAD = "a thread other than the one that trains has read a batch"


@dataclass(frozen=True)
class ReadPace:
    """Batches read and micro-steps computed in one iteration. `proven`: no batch is held back at its end."""

    read: int = 0
    computed: int = 0
    proven: bool = False


class IterationReads:
    """Counts reads and micro-steps of the iteration under way. `usual`: the pace of an earlier iteration."""

    def __init__(self, usual: ReadPace | None = None) -> None:
        self.usual = usual
        self._now = ReadPace()
        self._left = 0  # batches whose pass was left without a micro-step in between
        self._computed = True  # a micro-step on the newest batch

    def reading(self, batches: int = 1, left: bool = False) -> None:
        """`batches` more are read; `left`: the pass of the one before was left, and did not find its end."""
        self._left += left and not self._computed
        self._now = replace(self._now, read=self._now.read + batches)
        self._computed = False

    def computing(self) -> None:
        """A micro-step ends."""
        self._now = replace(self._now, computed=self._now.computed + 1)
        self._computed = True

    def problem(self) -> str | None:
        """Before the update: why the iteration cannot be followed."""
        now, usual = self._trained(), self.usual
        if usual is None or _are_equal(now, usual):
            return None
        return (
            f"it read {now.read} batches for {now.computed} micro-steps, but an earlier one {usual.read} for "
            f"{usual.computed}, so some are read ahead, or not trained on, and a restore would lose or repeat batches"
        )

    def updated(self, silent: bool) -> ReadPace | None:
        """The iteration has had its update. Returns its pace; None if it is `silent`: its reads were not counted."""
        now = self._trained()
        self._now, self._left = ReadPace(), 0
        if silent:
            return None
        self.usual = replace(now, proven=self.usual is not None or now.read in (0, now.computed))
        return self.usual

    def _trained(self) -> ReadPace:
        """The pace of the iteration, without batches that were left: those of a pass that ended by itself count."""
        now, usual = self._now, self.usual
        without = replace(now, read=now.read - self._left)
        left = self._left > 0 and (usual is None or (not _are_equal(now, usual) and _are_equal(without, usual)))
        return without if left else now


def _are_equal(one: ReadPace, other: ReadPace) -> bool:
    return one.read * other.computed == other.read * one.computed


def unproven(pace: ReadPace) -> str | None:
    """Why a version of this pace cannot be restored; None if it can."""
    if pace.proven:
        return None
    return (
        f"it read {pace.read} batches for {pace.computed} micro-steps, and no later iteration shows whether it trained "
        "on all of them; start with --ftp-resume fresh"
    )
