"""The folder for checkpoints that all nodes of the world share: real files, written and read when the world says.

Of the product: manifests, records, listings, leases, notices, the thread that writes. Of the world: the bytes of a
rank, which are its content as text, and how long each step takes, in which other processes have their turns.
"""

import errno
import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

from ft_plugins.base.files import make_private, write_digested
from ft_plugins.errors import CorruptSlotError, FencedError, StorageError
from ft_plugins.snapshot.checkpoint import checkpoint
from ft_plugins.snapshot.checkpoint.checkpoint import RankRecord, data_file, read_manifest, read_record, record_file
from ft_plugins.snapshot.segment.claims import slot_to_rebuild
from ft_plugins.snapshot.segment.slots import SlotState

from . import hub as hubs

_SECONDS = (0.0, 0.03)  # for one step
_ROOT = Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir())


class Disk:
    """The folder of one world."""

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="world-", dir=_ROOT))
        self.full = False

    def close(self):
        shutil.rmtree(self.folder, ignore_errors=True)


def step():
    """Others have their turns."""
    hub = hubs.ACTIVE
    if hub.current is not None:
        hub.current.sleep(hub.random.uniform(*_SECONDS) * (10 if hub.current.process.machine.slow else 1))


def _require_room():
    if hubs.ACTIVE.world.disk.full:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write_rank(folder, segment, version, origin, stopped, *, staged_index=None, adopted=0):
    """As `persist.write_rank`."""
    step()
    content = segment.content(version)
    words = repr(content).encode()
    record = RankRecord(
        segment.rank, version.lineage, version.iteration, origin.world_size, origin.fingerprint_digest, len(words),
        segment.shape.data_nbytes, segment.shape.buckets, segment.shape.layout, "seal", origin.run,
    )  # fmt: skip
    make_private(folder)
    checkpoint.require_own(folder, segment.rank, origin.run)
    _require_room()
    stopped(0)
    (folder / data_file(segment.rank)).write_bytes(words)
    step()
    _require_room()
    if segment.content(version) != content:
        raise CorruptSlotError(f"rank {segment.rank}: overwritten while it was written")
    write_digested(folder / record_file(segment.rank), asdict(record), durable=False)
    return record


def read_rank(folder, segment, version, token):
    """As `persist.read_rank`. Returns the slot."""
    step()
    try:
        record = read_record(folder, segment.rank, read_manifest(folder))
        content = (folder / data_file(segment.rank)).read_bytes()
    except OSError as error:
        raise StorageError(f"{folder}: cannot be read ({error})") from error
    if record.version != version or len(content) != record.nbytes:
        raise StorageError(f"{folder}: rank {segment.rank} is of another version")
    if segment.header.token != token:
        raise FencedError(f"rank {segment.rank}: superseded")
    for slot in segment.slots():
        if slot.version == version and slot.state is SlotState.CLEAN:
            return slot.index
    index = slot_to_rebuild(segment)
    segment.dirty(index, version, token)
    segment.seal(index, version, token, eval(content), None)  # noqa: S307  # an integer, written above
    return index


def slowed(real):
    """A step before, and one after."""

    def call(*given, **named):
        step()
        result = real(*given, **named)
        step()
        return result

    return call


def incomplete(base, size):
    """Complete checkpoints that lack a rank's files: by name, the ranks. What must never be."""
    found = {}
    for each in checkpoint.listing(base):
        if each.complete and not each.problem:
            names = set(os.listdir(base / each.name))
            lacking = [rank for rank in range(size) if not {data_file(rank), record_file(rank)} <= names]
            if lacking:
                found[each.name] = lacking
    return found
