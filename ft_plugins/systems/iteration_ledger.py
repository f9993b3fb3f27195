"""Keep the ledger of this rank, and compare iterations that are computed again with what it holds of them.

    iteration_begin    a new entry begins
    forwards           the first input is recorded at once
    before_update      inputs, learning rate and random numbers, before the update; the state captured by then
    iteration_end      counters, schedules, generators, loss, before this iteration is captured

Invariant: observations cost microseconds and never fail training; only a loop that did not continue ends it, before
its wrong state is captured. Without protection nothing is recorded.

Equal small state has equal digests, in every process: nothing depends on addresses, hash seeds or the order of keys. Of
a large mapping, such as the numbers that an optimizer keeps for each parameter, MANY entries at equal steps are
digested: this is in the step path; all of them where a restore is proven. The data position has no digest: what it
leads to, the inputs, is compared.

In: observations of the host, small state, digests of sealed versions. Out: the ledger; events; LoopError.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import xxhash

from ..errors import LoopError, UnsupportedError
from ..events import Events, catalogue, say
from ..model.digest import WALL_TIMES
from ..model.host import Host, ReplicaOperations
from ..recovery.recomputed import judge
from ..snapshot.segment.ledger import Ledger, LedgerEntry, LedgerPart, digest_of

_READ = {LedgerPart.FIRST_READ, LedgerPart.INPUT}  # never a consequence of what differed before
_KEPT_BITS = 0xFFFFFFFF  # of a digest
_ADVICE = (
    "make the loop begin at the restored iteration, with its data (each batch read in the iteration that trains on "
    "it), schedules and counters, or start with --ftp-resume fresh; --ftp-on-difference warn trains on"
)
_BESIDE = (
    "nothing newer was captured: 'ft-plugins rehearse' shows where it begins; register it as a buffer of the model, or "
    "hand it to the host, or start with --ftp-on-difference warn, which trains on"
)
_RERUN = "rerun_state_machine"  # among Megatron's counters: the largest losses so far
_PART_OF = {
    **dict.fromkeys(("torch", "cuda", "tracker"), LedgerPart.GENERATORS),
    **dict.fromkeys(("python", "numpy"), LedgerPart.LIBRARY),
    "groups": LedgerPart.GROUPS,
    "counters": LedgerPart.COUNTERS,
    **dict.fromkeys(("scalars", "scalers", "scaler", "scheduler", "own_schedulers", _RERUN), LedgerPart.SCHEDULE),
}
# how the loop reads, what the restore itself sets, and what it has compared
_NOT_COMPARED = {"position", "pace", "silent", "modes", "graded", "members", "observed"}
MANY = 64  # entries
_RNG = "rng"  # the generators, in the small state of Megatron and DeepSpeed
_POSITION = "position"  # of the data: what it leads to is compared
_CALLER = "caller"  # what the script's own functions return, in the small state of loops of plain torch


def learning_rate_of(host: Host) -> Callable[[], float | None]:
    """A function for the learning rate of the next update; it returns None if the host does not know it."""
    if not isinstance(host, ReplicaOperations):
        return lambda: None
    try:
        host.learning_rate()
    except UnsupportedError:
        return lambda: None
    return host.learning_rate


class IterationLedger:
    """The ledger of one rank in one incarnation. A `model.observation.Observer`."""

    def __init__(self, rank: int, mode: str, events: Events, keeps: bool = True) -> None:
        """`mode`: `--ftp-on-difference`. Without `keeps` there is no ledger."""
        self._keeps = keeps
        self._rank, self._mode, self._events = rank, mode, events
        self._ledger: Ledger | None = None
        self._known: dict[int, LedgerEntry] = {}  # at the restore
        self._last = 0  # iteration of which anything is known from before the restore
        self._compared: dict[int, set[LedgerPart]] = {}  # parts by iteration
        self._differed: dict[LedgerPart, int] = {}  # the first iteration that differed in a part
        self._step = 0
        self._first = self._inputs = 0  # digests of the first input of the present iteration, and of all
        self._reads, self._reading = 0, True
        self._drawn: int | None = None
        self._graded: int | None = None
        self._applied: float | None = None  # the learning rate of the present iteration
        self._numbers: dict[LedgerPart, float] = {}
        self._sealed: list[tuple[int, int]] = []  # iteration and digest, not yet compared
        # of iterations that are computed again: until all of them are, what was recorded before stays
        self._again: list[tuple[int, LedgerPart, float]] = []

    def open(
        self, ledger: Ledger, base: int | None, condemned: Collection[int] = (), proven: int | None = None
    ) -> None:
        """Record from now on. `base`: the iteration after which the restored state is; None if what was recorded is not
        computed again. `proven`: the last iteration that is computed again to prove the restore.

        `condemned`: the ranks that ended the last incarnation, because its loop did not continue. What other ranks have
        recorded of it is wrong; those ranks recorded nothing that differed. What was recorded before it stays.
        """
        if base is None or not self._keeps:
            ledger.clear()
        elif condemned and self._rank not in condemned:
            ledger.forget(after=base if proven is None else proven)
        ledger.condemned = False
        self._sealed = []
        self._ledger = ledger if self._keeps else None
        self._known = ledger.entries()
        later = [iteration for iteration in self._known if base is not None and iteration > base]
        self._last = max(later, default=0)
        self._compared, self._differed, self._again = {}, {}, []

    def close(self) -> None:
        self._ledger = None

    # ---- observations ----

    def read(self, digest: int) -> None:
        if not self._reading:
            return
        if not self._reads:
            self._first = digest
            if self._step > self._last:  # else it is compared first, at the fence
                self._record(self._step, LedgerPart.FIRST_READ, digest)
        self._reads += 1
        self._inputs = digest_of(digest.to_bytes(8, "little"), seed=self._inputs)

    def computed(self, loss: float | None = None, norm: float | None = None) -> None:
        for part, number in ((LedgerPart.LOSS, loss), (LedgerPart.NORM, norm)):
            if number is not None:
                self._numbers[part] = float(number)

    def graded(self, digest: int) -> None:
        """A sample of the gradients that the update will use."""
        self._graded = digest

    def sealed(self, iteration: int, digest: int) -> None:
        """A version was captured; called by the capture thread, before the fence opens."""
        if self._ledger is not None:
            self._sealed.append((iteration, digest))

    def seen(self) -> dict[str, Any]:
        """What is known of the present iteration besides state: digests as text, numbers."""
        digests = {"batch": self._inputs if self._reads else None, "drawn": self._drawn}
        numbers = {
            "rate": self._applied,
            "loss": self._numbers.get(LedgerPart.LOSS),
            "norm": self._numbers.get(LedgerPart.NORM),
        }
        return {name: None if digest is None else f"{digest:016x}" for name, digest in digests.items()} | numbers

    # ---- hooks ----

    def begin(self, step: int) -> None:
        if step != self._step:
            self._step, self._inputs, self._reads, self._numbers = step, 0, 0, {}
            self._drawn = self._applied = self._graded = None
            self._reading = True

    def forwards_done(self) -> None:
        """Forwards until the next iteration compute this one again, as a repair of replicas does."""
        self._reading = False

    def fence(self, rate: float | None, judged: Callable[[], None] = lambda: None) -> None:
        """All forwards of the iteration are done, and captures are sealed. `rate`: of the update. `judged` is called
        when those are compared, and before anything of this iteration is recorded. Raises LoopError."""
        if self._ledger is None:
            return judged()
        sealed, self._sealed = self._sealed, []
        for iteration, digest in sealed:
            self._compare_and_record(iteration, {LedgerPart.STATE: digest}, {})
        judged()
        if self._last and self._step > self._last:
            self._settle()
        self._drawn, self._applied = drawn(), rate
        parts = {LedgerPart.DRAWN: self._drawn}
        parts |= {} if self._graded is None else {LedgerPart.GRADIENTS: self._graded}
        parts |= {LedgerPart.FIRST_READ: self._first, LedgerPart.INPUT: self._inputs} if self._reads else {}
        self._compare_and_record(self._step, parts, {} if rate is None else {LedgerPart.RATE: rate})

    def end(self, step: int, small: Mapping[str, Any] | None, was: Mapping[str, Any] | None = None) -> None:
        """The version point, before the capture. `small`: None if there is no version. `was`: if the restore is proven
        here, what the restored version has: all of it is compared, no sample. Raises LoopError."""
        if self._ledger is None:
            return
        numbers = self._numbers if step == self._step else {}  # else the next iteration has begun
        if was is not None:
            known = self._known.get(step, LedgerEntry(step))
            whole = {part: digest & _KEPT_BITS for part, digest in small_digests(was, sys.maxsize).items()}
            self._known[step] = replace(known, digests={**known.digests, **whole})
            self._last = max(self._last, step)
        digests = {} if small is None else small_digests(small, MANY if was is None else sys.maxsize)
        self._compare_and_record(step, digests, numbers)

    def _record(self, iteration: int, part: LedgerPart, value: float) -> None:
        if iteration <= self._last:
            self._again.append((iteration, part, value))
        elif self._ledger is not None:
            self._ledger.record(iteration, part, value)

    def _compare_and_record(
        self, step: int, digests: Mapping[LedgerPart, int], numbers: Mapping[LedgerPart, float]
    ) -> None:
        """Where the job ends the ledger keeps what it had, so that the next incarnation sees the difference too."""
        self._compare(LedgerEntry(step, {part: digest & _KEPT_BITS for part, digest in digests.items()}, numbers))
        for part, value in {**digests, **numbers}.items():
            self._record(step, part, value)

    def _compare(self, now: LedgerEntry) -> None:
        before = self._known.get(now.iteration)
        if before is None or now.iteration > self._last:
            return
        common = (now.digests.keys() & before.digests.keys()) | (now.numbers.keys() & before.numbers.keys())
        self._compared.setdefault(now.iteration, set()).update(common)
        difference = judge(now, before, self._known, self._differed, self._mode)
        if difference is None:
            return
        fresh = [part for part in difference.parts if part not in self._differed]
        self._differed |= dict.fromkeys(fresh, now.iteration)
        if difference.ends or (fresh and (len(fresh) == len(self._differed) or _READ & set(fresh))):
            self._report(now.iteration, difference.parts, difference.sentence, _ADVICE if difference.ends else "")

    def _report(self, iteration: int, parts: Iterable[LedgerPart], sentence: str, advice: str) -> None:
        """`advice`: if the job ends. Raises LoopError then."""
        self._events.emit(
            catalogue.RESUME_DIFFERED, iteration=iteration, parts=[part.words for part in parts], ending=bool(advice),
            reason=sentence,
        )  # fmt: skip
        if advice:
            if self._ledger is not None:
                self._ledger.condemned = True
            raise LoopError(f"rank {self._rank}: {sentence}; {advice}")

    def summarize(self) -> None:
        """At the end of training, say once more that it was not exact."""
        self._settle()
        if self._differed:
            first = min(self._differed.values())
            say(
                f"rank {self._rank}: iteration {first} was not what it had been before the last restore; "
                f"results from there on are not those of a run that never failed: see {catalogue.RESUME_DIFFERED.name}",
                alarm=True,
            )

    def _settle(self) -> None:
        """Everything that was lost is computed again: record what it was this time, for the next restore."""
        self._last, again = 0, self._again
        self._again = []
        for iteration, part, value in again:
            self._record(iteration, part, value)

    def compared(self, iteration: int) -> tuple[set[LedgerPart], set[LedgerPart]]:
        """The parts of an iteration that was computed again which were compared, and those that differ since the
        restore."""
        return self._compared.get(iteration, set()), {part for part, at in self._differed.items() if at <= iteration}

    def differs(self, iteration: int, sentence: str, ends: bool) -> None:
        """The state after an iteration that was computed again is not what it was. Raises LoopError if the job
        `ends`."""
        self._differed.setdefault(LedgerPart.STATE, iteration)
        self._report(iteration, [LedgerPart.STATE], sentence, _BESIDE if ends else "")


# ---- digests of small state ----


def small_digests(small: Mapping[str, Any], most: int = MANY) -> dict[LedgerPart, int]:
    """The digests of a small state, of mappings with more than `most` entries by a sample. Empty parts have none."""
    hashes: dict[LedgerPart, xxhash.xxh3_64] = {}
    for key, value in _entries(small):
        part = _PART_OF.get(key, LedgerPart.OWN)
        for piece in pieces(value, most):
            hashes.setdefault(part, xxhash.xxh3_64()).update(piece)
    return {part: running.intdigest() for part, running in hashes.items()}


def drawn() -> int:
    """A digest of torch's own generator on the CPU."""
    return xxhash.xxh3_64_intdigest(torch.get_rng_state().numpy().tobytes())


def _entries(small: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in sorted(small.items()):
        if key == "counters" and isinstance(value, Mapping) and _RERUN in value:
            yield key, {name: one for name, one in value.items() if name != _RERUN}
            yield _RERUN, value[_RERUN]
        elif key == _RNG and isinstance(value, Mapping):
            yield from _entries(value)
        elif key == _CALLER and isinstance(value, Mapping):
            yield from _entries({inner: part for inner, part in value.items() if inner != _CALLER})
            yield from [("own", value[_CALLER])] if _CALLER in value else []
        elif key not in _NOT_COMPARED and value is not None:
            yield key, value


def pieces(value: Any, most: int = MANY) -> Iterator[bytes]:
    """The bytes of a value, with types and lengths, so that different values have different bytes. `most`: as above."""
    match value:
        case torch.Tensor() if not value.dim():
            yield f"t{value.dtype}{value.item()!r}".encode()
        case torch.Tensor():
            dense = value.detach().cpu().contiguous()
            yield f"t{dense.dtype}{tuple(dense.shape)}".encode()
            yield dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
        case np.ndarray():
            yield f"a{value.dtype}{value.shape}".encode()
            yield value.tobytes()
        case Mapping():
            compared = (entry for entry in value.items() if entry[0] not in (WALL_TIMES, _POSITION))
            entries = sorted(compared, key=lambda entry: str(entry[0]))
            yield b"m%d" % len(entries)
            for key, part in entries[:: -(-len(entries) // most) or 1]:
                yield f"k{key!r}".encode()
                yield from pieces(part, most)
        case list() | tuple():
            yield b"l%d" % len(value)
            if len(value) > MANY and all(type(part) is int for part in value):  # the state of Python's generator
                small = min(value) >= -(1 << 63) and max(value) < 1 << 63
                yield np.array(value, dtype=np.int64).tobytes() if small else repr(value).encode()
            else:
                for part in value:
                    yield from pieces(part, most)
        case float():
            yield f"f{value.hex()}".encode()
        case bytes() | bytearray():
            yield b"b" + bytes(value)
        case _:
            yield f"{type(value).__name__}{value!r}".encode()
