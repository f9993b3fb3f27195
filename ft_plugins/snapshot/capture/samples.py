"""Detect that a tensor was changed while it was copied in the background: samples of its bytes, before and after.

Invariant: if a sampled byte of a copy is not the byte of the version point, the copy is refused. The version counter of
a tensor does not count changes through `.data`, nor those by code outside of torch; nor does it see a change that is
undone before the fence, as when averaged weights are swapped in for an evaluation. A sample is up to four runs of
bytes, spread evenly, so a change of a few elements may be missed.

Only host memory is sampled: reading from a device would make the training thread wait for it. The exception are items
that no span is known to change: see `FrozenItems`.

In: views of live tensors, and of their copies. Out: nothing, or StateChangedError; the names of items.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from ...errors import StateChangedError
from ...model.inventory import Item
from .copiers import as_words
from .layout import CaptureBucket, SlotPiece

Bytes = npt.NDArray[np.uint8]

_RUNS, _RUN = 4, 256  # of a sample; bytes of each: fewer and longer runs touch fewer pages
_WORDS = 256  # of a frozen item, spread evenly


def sample_of(data: Bytes) -> Bytes:
    """A view of up to 1 KiB of contiguous bytes, from the first to the last but two."""
    if data.nbytes <= _RUNS * _RUN:
        return data
    step = (data.nbytes - _RUN) // (_RUNS - 1)
    return np.ndarray((_RUNS, _RUN), np.uint8, buffer=data.data, strides=(step, 1))


def digest_of(sample: Bytes) -> int:
    """The digest of a sample's present bytes."""
    return xxhash.xxh3_64_intdigest(sample.tobytes())


class CopySamples:
    """Samples of the pieces of buckets that are copied in the background."""

    def __init__(
        self, buckets: Sequence[CaptureBucket], bytes_of: Mapping[str, torch.Tensor], frozen: Collection[str]
    ) -> None:
        """`bytes_of` are the bytes of the live tensors, by item. Items that are `frozen` are not sampled: what changed
        them is no error, and none of their copies can be torn (`FrozenItems`)."""
        self._samples = [
            [
                (piece, sample_of(_part(piece, bytes_of)))
                for piece in bucket.pieces
                if bytes_of[piece.item].device.type == "cpu" and piece.item not in frozen
            ]
            for bucket in buckets
        ]
        self._digests: list[list[int]] = []

    def take(self) -> None:
        """Digest all samples, at the version point, in the training thread."""
        self._digests = [[digest_of(sample) for _, sample in samples] for samples in self._samples]

    def require_unchanged(self, bucket: int, slot: Bytes | None, rank: int, iteration: int) -> None:
        """Compare a bucket as copied to `slot` (None: as the live tensors are now) with `take`. `rank` and
        `iteration` are for the message. Raises StateChangedError, naming the item that differs."""
        for (piece, sample), digest in zip(self._samples[bucket], self._digests[bucket], strict=True):
            copied = sample if slot is None else sample_of(slot[piece.offset : piece.offset + piece.nbytes])
            if digest_of(copied) != digest:
                raise StateChangedError(
                    f"rank {rank}: '{piece.item}' was changed after the end of iteration {iteration} and before the "
                    "next update, while its snapshot was being copied; that snapshot is dropped, the one before it "
                    "stays: swap averaged weights in and back within one iteration, after its update, or evaluate a "
                    "copy of the model"
                )

    def close(self) -> None:
        self._samples.clear()


class SampledWords:
    """Up to `_WORDS` words of each tensor, spread evenly, read at once from each device."""

    def __init__(self, bytes_of: Mapping[str, torch.Tensor]) -> None:
        words_of: dict[tuple[torch.device, torch.dtype], dict[str, torch.Tensor]] = {}
        for name, flat in bytes_of.items():
            words, _ = as_words(flat, flat)
            words_of.setdefault((words.device, words.dtype), {})[name] = words[:: max(1, -(-words.numel() // _WORDS))]
        self._views = list(words_of.values())

    def read(self) -> list[torch.Tensor]:
        """The words as they are."""
        return [torch.cat([*one.values()]).cpu() for one in self._views]

    def by_name(self, words: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Of what `read` returned, those of each tensor."""
        read = [
            (one, of_one.split([view.numel() for view in one.values()]))
            for one, of_one in zip(self._views, words, strict=True)
        ]
        return {name: part for one, parts in read for name, part in zip(one, parts, strict=True)}


class FrozenItems:
    """The items that no span of an iteration is known to change, and which of them have changed all the same.

    A script may change a frozen parameter at any time, as that of a momentum encoder. Each change in place moves the
    version counter of its tensor but one through `.data`, which a sample of its words sees, unless it leaves them as
    they were (`Capture` compares the rest in turn). Both are read at version points, when the script computes nothing.
    """

    def __init__(self, items: Iterable[Item], bytes_of: Mapping[str, torch.Tensor]) -> None:
        """`items`: of a layout; `bytes_of`: as for `CopySamples`."""
        self.names = frozenset(item.name for item in items if not item.changed_by) & bytes_of.keys()
        self._flat = {name: bytes_of[name] for name in sorted(self.names)}
        self._sampled = SampledWords(self._flat)
        self._present: tuple[list[int], list[torch.Tensor]] = [], []
        self._sealed: tuple[list[int], list[torch.Tensor]] | None = None

    def take(self) -> set[str]:
        """At a version point: those that have changed since that of the last sealed version; all if there is none."""
        self._present = self._counters(), self._sampled.read()
        return set(self.names) if self._sealed is None else self._moved(self._present, self._sealed)

    def changed(self) -> set[str]:
        """Those whose counters have moved since `take`. An operation that is under way moves it when it ends."""
        return self._moved((self._counters(), []), (self._present[0], []))

    def changed_words(self) -> set[str]:
        """Those that `take` would find changed since the last `take`. For the training thread."""
        return self._moved((self._counters(), self._sampled.read()), self._present)

    def _moved(
        self, now: tuple[list[int], list[torch.Tensor]], before: tuple[list[int], list[torch.Tensor]]
    ) -> set[str]:
        moved = {name for name, *both in zip(self._flat, now[0], before[0], strict=True) if both[0] != both[1]}
        if not all(map(torch.equal, now[1], before[1])):  # both empty, if it is about counters alone
            words, were = self._sampled.by_name(now[1]), self._sampled.by_name(before[1])
            moved |= {name for name in words if not torch.equal(words[name], were[name])}
        return moved

    def sealed(self) -> None:
        """The version of the last `take` is sealed."""
        self._sealed = self._present

    def close(self) -> None:
        self._flat.clear()
        self._sampled = SampledWords({})

    def _counters(self) -> list[int]:
        return [0 if one.is_inference() else one._version for one in self._flat.values()]


def changed_meanwhile(rank: int, name: str, iteration: int) -> StateChangedError:
    """The error for an item that no version could hold."""
    return StateChangedError(
        f"rank {rank}: '{name}', which requires no gradient, was changed after the end of iteration {iteration} and "
        "before the next update, while its snapshot was being copied; that snapshot is dropped, the one before it "
        "stays: change it right after the update, before the next batch is read"
    )


def _part(piece: SlotPiece, bytes_of: Mapping[str, torch.Tensor]) -> Bytes:
    part: Bytes = bytes_of[piece.item][piece.item_offset : piece.item_offset + piece.nbytes].numpy()
    return part
