"""Copy a rank's share to its segment, bucket by bucket, during the next iteration; fenced before the next update.

Invariant: a slot receives the state at the version point. Items that anything but the update may change are copied
before `start` returns, from copies that the caller kept if that point is past; the others by a thread that `wait` waits
for before the update. If one of these was changed meanwhile, the version is not sealed (`samples`). Items that nothing
is known to change are copied from the slot of the version before, unless they have changed since (`FrozenItems`): then,
and in the first version, before `start` returns. So a script may change them at any time. The fencing token
is checked before every bucket: a superseded incarnation writes at most the bucket it was in. The trainer writes
directly into the SMP's slot; no message is sent.

Parity computed from own replicas (`Encoder`) comes last, from the same tensors, into a slot of its own, and only of the
version that is exchanged next, as the SMP has recorded in the segment. It is sealed before the data: a sealed version
without parity never gets any, and is not exchanged. The exception is the restored version, whose parity `add_parity`
computes while the tensors still hold it.

A slot that has no memory yet is claimed while the update runs, or else just before the capture (`claims`).

Digests are computed from the bytes in the slot. A bucket that a superseded writer may still write to (the cursor of a
slot found DIRTY at start) is digested from its source instead, so a late write is detected. The seal covers digests,
version and small state as this process knows them, not as they are in shared memory.

In: segment, layout, live tensors, token. Out: sealed slots; `Commit` per version.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping

import numpy as np
import torch
import xxhash

from ...base import faults
from ...errors import CorruptSlotError, FencedError, InventoryError, StateChangedError
from ..segment.claims import CaptureOwner, SlotClaims
from ..segment.segment import NOT_COMPUTED, Segment
from ..segment.slots import Commit, SlotState, Version, choose_parity
from .comparison import ItemDifferences
from .copiers import Copier, Encoder, as_words, copier_for, flat_bytes
from .layout import CaptureBucket, Layout
from .samples import CopySamples, FrozenItems, changed_meanwhile

_Pieces = dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]]
_Flat = Mapping[str, torch.Tensor]  # bytes by item
_NO_OWNER = CaptureOwner()
_HOST = torch.device("cpu")


class Capture:
    """Captures one rank's share, one version at a time. Owns a thread and the slot that it writes."""

    def __init__(
        self, segment: Segment, layout: Layout, tensors: Callable[[], Mapping[str, torch.Tensor]], token: int,
        owner: CaptureOwner = _NO_OWNER,
    ) -> None:  # fmt: skip
        """`tensors` returns the live tensors by item name, at every version point: none may have moved.

        Raises InventoryError if tensors and layout do not agree.
        """
        self._segment, self._layout, self._token, self._owner = segment, layout, token, owner
        self._claims = SlotClaims(segment, owner, self._use, self._check_token)
        self._next: Version | None = None  # captured after the update that runs
        self._requested = False
        self._requesting = threading.Lock()  # of the two around it, which change together
        self._called = threading.Event()
        self._called.set()
        self._tensors = tensors
        self._copiers: dict[torch.device, Copier] = {_HOST: copier_for(_HOST)}  # between two slots, too
        self._changed = set[str]()  # frozen items that have, until the version point
        self._missed = set[str]()  # frozen items that have changed and that `take` did not find
        self._before: Version | None = None  # the last sealed one, of this incarnation
        self._held: dict[tuple[int, int, int], _Pieces] = {}  # by slot, bucket and the slot of the version before
        self._bind()
        # A writer that was stopped within a bucket may resume in it: these buckets are digested from their source.
        self._suspect = {
            (slot.index, segment.cursor(slot.index))
            for slot in (*segment.slots(), *segment.parity_slots())
            if slot.state is SlotState.DIRTY
        }
        count = len(layout.buckets) + len(layout.parity) + layout.source_digest_count
        self._digests = np.full(count, NOT_COMPUTED, dtype=np.uint64)  # of the running capture
        self._small = b""
        self._pending: Callable[[], None] | None = None
        self._failure: BaseException | None = None
        self._work = threading.Semaphore(0)
        self._idle = threading.Event()
        self._idle.set()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="ftp-capture", daemon=True)
        self._thread.start()
        # a thread that is inside torch when the interpreter exits aborts the process
        atexit.register(self.close)

    def _bind(self) -> None:
        """Read these tensors from now on. Of one that no update has made yet zeros are captured."""
        segment, layout, live = self._segment, self._layout, self._tensors()
        names = {piece.item for bucket in layout.buckets for piece in bucket.pieces}
        names |= {p.item for bucket in layout.parity for source in bucket.sources for p in source.pieces}
        self._absent = {name for name in names if live[name].is_meta}
        self._flat = {name: flat_bytes(name, live[name]) for name in names}
        for item in (item for stream in layout.streams for item in stream.items if item.name in names):
            if (found := self._flat[item.name].numel()) != item.nbytes:
                raise InventoryError(
                    f"rank {layout.rank}: item '{item.name}' has {found} bytes, expected {item.nbytes}: what updates "
                    "make is not what was planned"
                )
        devices = {flat.device for flat in self._flat.values()}
        if len({device for device in devices if device.type != "cpu"}) > 1:
            raise InventoryError(f"rank {layout.rank}: state lies on several devices ({devices}); expected one")
        for device in devices - self._copiers.keys():
            self._copiers[device] = copier_for(device)
            for index in (*segment.claimed, *segment.shape.parity_indices):
                self._use(index, device)
        slots = range(segment.shape.slots)
        self._pieces = [[self._plan_pieces(index, bucket, self._flat) for bucket in layout.buckets] for index in slots]
        self._frozen = FrozenItems((item for stream in layout.streams for item in stream.items), self._flat)
        self._samples = CopySamples(layout.background, self._flat, self._frozen.names)
        self._frozen_in = [self._frozen.names & {piece.item for piece in one.pieces} for one in layout.background]
        # of the buckets with frozen items, the one that is compared with the live ones, in turn
        self._turns = itertools.cycle([number for number, frozen in enumerate(self._frozen_in) if frozen])
        self._held.clear()
        self._encoder = Encoder(segment, layout, self._flat, self._copiers)

    def _follow(self) -> None:
        """At a version point: bind again if updates have made tensors since. Raises InventoryError if one moved."""
        live = self._tensors()
        for name in self._flat.keys() - self._absent:
            if live[name].data_ptr() != self._flat[name].data_ptr():
                raise InventoryError(
                    f"rank {self._layout.rank}: item '{name}' has moved to other memory since the start; "
                    "expected it in place"
                )
        if any(not live[name].is_meta for name in self._absent):
            self._bind()
            self._changed = self._frozen.take()

    def start(self, version: Version, small: bytes, kept: Mapping[str, torch.Tensor] | None = None) -> None:
        """Begin capturing `version`: synchronous items and small state now, the rest in the background.

        `kept`: copies of synchronous items from the version point, where the live tensors may have changed since.
        The version is left out if no slot is free. Raises the error of the previous capture, FencedError if superseded,
        InventoryError if a tensor moved.
        """
        started = time.perf_counter()
        self._version_point()
        index = self._claims.slot_for(version)
        if index is None:
            self._owner.left_out(version)
            return
        faults.reach("capture.begin", iteration=version.iteration, slot=index)
        self._segment.dirty(index, version, self._token)
        self._segment.write_small(index, small)
        self._segment.digests(index)[:] = self._digests[:] = NOT_COMPUTED
        self._small = small
        sources = {**self._flat, **{name: flat_bytes(name, one) for name, one in kept.items()}} if kept else None
        for number, bucket in enumerate(self._layout.synchronous):
            self._copy(index, number, bucket, version, sources)
        before = None if self._before is None else self._segment.sealed_in(self._before)
        if kept is None:
            self._changed = self._frozen.take()
        self._changed, self._missed = self._changed | self._missed, set()
        early = self._copied_early(index, before)
        for number in early:
            self._copy(index, len(self._layout.synchronous) + number, self._layout.background[number], version)
        if kept is not None:
            copied = frozenset().union(*(self._frozen_in[number] for number in early))
            self._require_none(self._frozen.changed_words() & copied, version)
        self._samples.take()
        self._run_behind(lambda: self._owner.sealed(self._background(index, version, started, before, early)))

    def compare(self, version: Version, kept: Mapping[str, torch.Tensor] | None = None) -> None:
        """Begin to compare the live state with `version`, which is sealed, in place of capturing it: in the same order,
        by the same rules. The owner's `compared` gets what differs; if nothing does, the parity of `version` is
        computed, unless it is here. `kept` as for `start`. Raises what `start` raises; another error only ends the
        comparison."""
        self._version_point()
        sources = self._flat | {name: flat_bytes(name, one) for name, one in (kept or {}).items()}
        if kept is None:
            self._frozen.take()
        self._samples.take()
        try:
            index = self._segment.sealed_in(version)
            if index is None:
                raise CorruptSlotError(f"rank {self._layout.rank}: version {version} is no longer in memory")
            differences = ItemDifferences(self._segment, self._layout, index, self._copiers)
            for bucket in self._layout.synchronous:
                differences.compare(bucket, sources)
            for bucket, frozen in zip(self._layout.background, self._frozen_in, strict=True):
                if frozen:
                    differences.compare(bucket, self._flat)
        except Exception as error:
            self._owner.compared(None, f"{type(error).__name__}: {error}")
            return
        self._run_behind(lambda: self._compare(version, differences))

    def _compare(self, version: Version, differences: ItemDifferences) -> None:
        try:
            for number, (bucket, frozen) in enumerate(zip(self._layout.background, self._frozen_in, strict=True)):
                if not frozen:
                    differences.compare(bucket, self._flat)
                    self._samples.require_unchanged(number, None, self._layout.rank, version.iteration)
        except StateChangedError:
            raise
        except Exception as error:
            self._owner.compared(None, f"{type(error).__name__}: {error}")
            return
        if self._owner.compared(differences.found) and self._layout.parity:
            self._restore_parity(version)

    def _version_point(self) -> None:
        """Wait until the previous capture is over. Raises its error, FencedError if superseded, InventoryError if a
        tensor moved."""
        self.wait()
        self._called.wait()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        self._follow()
        self._check_token()
        for copier in self._copiers.values():
            copier.ready()

    def hold(self) -> None:
        """The version point of a version that `start` captures later, with copies that are kept from here."""
        self._called.wait()
        self._follow()
        self._changed = self._frozen.take()

    def add_parity(self, version: Version) -> None:
        """Begin to compute the parity of the restored version, unless it is here. The live tensors must hold `version`
        until the fence, which waits for this too. Raises what `start` raises."""
        self.wait()
        if self._layout.parity:
            self._frozen.take()
            self._run_behind(lambda: self._restore_parity(version))

    def _run_behind(self, work: Callable[[], None]) -> None:
        """Have the capture thread do `work`, which the fence waits for."""
        self._pending = work
        self._idle.clear()
        self._work.release()

    def wait(self) -> float:
        """The fence: wait until the running capture is sealed. Returns seconds waited; raises the capture's error,
        StateChangedError if what it copied was changed meanwhile."""
        started = time.perf_counter()
        self._idle.wait()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return time.perf_counter() - started

    def run_after_update(self, following: Version | None = None) -> None:
        """Claim what a capture of `following` will need, None if no capture follows this update, and call the owner's
        `updated`: on the capture thread, during the update and after. The next `start` waits for it."""
        if not self._closing:
            with self._requesting:
                self._next = following
                self._called.clear()
                self._requested = True
            self._work.release()

    def close(self) -> None:
        """End the thread after the running capture, and release tensors and pinned memory. Idempotent."""
        atexit.unregister(self.close)
        if self._closing:
            return
        self._closing = True
        self._work.release()
        self._thread.join()
        for copier in self._copiers.values():
            copier.close()
        self._pieces.clear()
        self._samples.close()
        self._frozen.close()
        self._held.clear()
        self._encoder.close()
        self._flat.clear()

    def _run(self) -> None:
        while True:
            self._work.acquire()
            if self._pending is not None:
                try:
                    self._pending()
                except BaseException as failure:  # raised at the fence, on the training thread
                    self._failure = failure
                finally:
                    self._pending = None
                    self._idle.set()
            elif self._requested:
                with self._requesting:
                    self._requested, following = False, self._next
                try:
                    if following is not None:
                        self._check_token()
                        self._claims.make_room(following)
                    self._owner.updated()
                except BaseException as failure:
                    self._failure = failure
                finally:
                    with self._requesting:
                        if not self._requested:  # again meanwhile: the next `start` waits for that one too
                            self._called.set()
            elif self._closing:
                return

    def _copied_early(self, index: int, before: int | None) -> list[int]:
        """The background buckets that are copied at once: the version in slot `before` does not have their frozen items
        as they are now, or a superseded writer may still write to them."""
        first, early = len(self._layout.synchronous), list[int]()
        for number, frozen in enumerate(self._frozen_in):
            suspect = not self._suspect.isdisjoint({(index, first + number), (before, first + number)})
            if frozen and (before is None or suspect or frozen & self._changed):
                early.append(number)
        return early

    def _background(
        self, index: int, version: Version, started: float, before: int | None, early: Collection[int]
    ) -> Commit:  # fmt: skip
        offset = len(self._layout.synchronous)
        self._turn = next(self._turns, None)
        for number, bucket in enumerate(self._layout.background):
            if number in early:
                continue
            self._copy_behind(index, number, bucket, version, before)
            slot = None if (index, offset + number) in self._suspect else self._segment.data(index)
            self._samples.require_unchanged(number, slot, self._layout.rank, version.iteration)
        if self._layout.parity and self._segment.header.is_awaited(version):
            self._encode(version)
        self._check_token()
        faults.reach("capture.seal.before", iteration=version.iteration, slot=index)
        self._segment.set_cursor(index, None)
        self._segment.pin_awaited(index, version)
        self._segment.seal(index, version, self._token, self._small, self._digests)
        self._frozen.sealed()
        self._before = version
        faults.reach("capture.seal.after", iteration=version.iteration, slot=index)
        return Commit(version, index, self._layout.nbytes, time.perf_counter() - started)

    def _copy_behind(
        self, index: int, number: int, bucket: CaptureBucket, version: Version, before: int | None
    ) -> None:  # fmt: skip
        """Copy a background bucket, its frozen items from slot `before`, if that is intact.

        In turn, one bucket a version is copied as it is now, and compared: what has changed through `.data` and in no
        word of the sample is in the next version, so it is missed by no more versions than there are buckets."""
        frozen, place = self._frozen_in[number], len(self._layout.synchronous) + number
        if not frozen or before is None:
            self._copy(index, place, bucket, version)
            return
        area = self._segment.data(before)[bucket.offset : bucket.offset + bucket.nbytes]
        if xxhash.xxh3_64_intdigest(area.data) == int(self._segment.digests(before)[place]):
            if number == self._turn:
                self._copy(index, place, bucket, version)
                changed = self._have_changed(index, before, bucket, frozen)
                self._missed |= changed
                if not changed:
                    return
            self._copy(index, place, bucket, version, before=before)
            return
        self._copy(index, place, bucket, version)
        self._require_unchanged(frozen, version)

    def _have_changed(self, index: int, before: int, bucket: CaptureBucket, frozen: Collection[str]) -> set[str]:
        """The frozen items of a bucket, copied to slot `index` as they are now, that slot `before` has otherwise."""
        now, then = self._segment.data(index), self._segment.data(before)
        places = [(one.item, slice(one.offset, one.offset + one.nbytes)) for one in bucket.pieces if one.item in frozen]
        return {item for item, place in places if not np.array_equal(now[place], then[place])}

    def _require_unchanged(self, frozen: Iterable[str], version: Version) -> None:
        """Raises StateChangedError if a frozen item is no longer what it was at the version point."""
        self._require_none(self._frozen.changed().intersection(frozen), version)

    def _require_none(self, changed: Collection[str], version: Version) -> None:
        if changed:
            raise changed_meanwhile(self._layout.rank, min(changed), version.iteration)

    def _use(self, index: int, *devices: torch.device) -> None:
        """Prepare a slot, or a parity slot, to be copied to from these devices, from all if none is given."""
        area = self._segment.area_of(index)
        for device in devices or self._copiers:
            self._copiers[device].use(area.ctypes.data, area.nbytes)

    def _restore_parity(self, version: Version) -> None:
        index = self._segment.parity_of(version)
        if index is not None:
            with contextlib.suppress(CorruptSlotError):
                self._segment.verify(index)
                return
        for copier in self._copiers.values():
            copier.ready()
        # A script may set a frozen module right after the restore: then the next version is the first with parity.
        with contextlib.suppress(StateChangedError):
            self._encode(version)

    def _encode(self, version: Version) -> None:
        """Compute and seal the parity of `version`, with the digests of each bucket and of its sources. Nothing if both
        parity slots are pinned: the version is missed."""
        index = choose_parity(self._segment.parity_slots(), version)
        if index is None:
            return
        first = len(self._layout.buckets)
        at = first + len(self._layout.parity)  # where the digests of sources begin
        table, digests = self._segment.digests(index), np.full_like(self._digests, NOT_COMPUTED)
        self._check_token()
        self._segment.dirty(index, version, self._token)
        table[:] = digests
        for number in range(len(self._layout.parity)):
            self._segment.set_cursor(index, first + number)
            self._check_token()
            faults.reach("capture.bucket.begin", iteration=version.iteration, bucket=first + number, slot=index)
            suspect = (index, first + number) in self._suspect
            digest, checks = self._encoder.encode(index, number, private=suspect)
            digests[first + number] = table[first + number] = digest
            digests[at : at + len(checks)] = table[at : at + len(checks)] = checks
            at += len(checks)
            faults.reach("capture.bucket.end", iteration=version.iteration, bucket=first + number, slot=index)
        sources = (source for bucket in self._layout.parity for source in bucket.sources)
        self._require_unchanged((piece.item for source in sources for piece in source.pieces), version)
        self._check_token()
        self._segment.set_cursor(index, None)
        self._segment.seal(index, version, self._token, b"", digests)

    def _copy(
        self, index: int, number: int, bucket: CaptureBucket, version: Version, kept: _Flat | None = None,
        before: int | None = None,
    ) -> None:  # fmt: skip
        """Copy and digest one bucket. `kept`: its sources, if they are not the live tensors. `before`: the slot from
        which frozen items are copied."""
        self._segment.set_cursor(index, number)  # first: a writer stopped after the check is in this bucket
        self._check_token()
        faults.reach("capture.bucket.begin", iteration=version.iteration, bucket=number, slot=index)
        pieces = self._pieces[index][number] if kept is None else self._plan_pieces(index, bucket, kept)
        if before is not None:
            key = index, number, before
            if key not in self._held:
                self._held[key] = self._plan_pieces(index, bucket, self._flat, before)
            pieces = self._held[key]
        for device, (destinations, sources) in pieces.items():
            self._copiers[device].copy(destinations, sources)
        if (index, number) in self._suspect:
            digest = self._source_digest(bucket, self._flat if kept is None else kept)
        else:
            area = self._segment.data(index)[bucket.offset : bucket.offset + bucket.nbytes]
            digest = xxhash.xxh3_64_intdigest(area.data)
        self._digests[number] = self._segment.digests(index)[number] = digest
        faults.reach("capture.bucket.end", iteration=version.iteration, bucket=number, slot=index)

    def _plan_pieces(self, index: int, bucket: CaptureBucket, bytes_of: _Flat, before: int | None = None) -> _Pieces:
        """The destinations in slot `index` and the sources of a bucket, as flat views, by device. `before`: the slot
        that has the frozen items."""
        target = torch.from_numpy(self._segment.data(index))
        held = None if before is None else torch.from_numpy(self._segment.data(before))
        pieces: _Pieces = {}
        for piece in bucket.pieces:
            part = bytes_of[piece.item][piece.item_offset : piece.item_offset + piece.nbytes]
            if held is not None and piece.item in self._frozen.names:
                part = held[piece.offset : piece.offset + piece.nbytes]
            destinations, sources = pieces.setdefault(part.device, ([], []))
            destination, source = as_words(target[piece.offset : piece.offset + piece.nbytes], part)
            destinations.append(destination)
            sources.append(source)
        return pieces

    def _source_digest(self, bucket: CaptureBucket, bytes_of: _Flat) -> int:
        """The digest of a bucket's bytes at their source; gaps between pieces are zeros."""
        digest, at = xxhash.xxh3_64(), bucket.offset
        for piece in bucket.pieces:
            digest.update(bytes(piece.offset - at))
            source = bytes_of[piece.item][piece.item_offset : piece.item_offset + piece.nbytes]
            digest.update(source.cpu().numpy().data)
            at = piece.offset + piece.nbytes
        return digest.intdigest()

    def _check_token(self) -> None:
        current = self._segment.header.token
        if current != self._token:
            raise FencedError(
                f"rank {self._layout.rank}: this incarnation (token {self._token}) was superseded (token {current}); "
                "it may not write"
            )
