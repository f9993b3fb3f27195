"""Write files atomically: under a temporary name, for their owner alone (0600), then renamed.

A reader of `path` sees the old file or the complete new one. A durable write guarantees that after a crash too: content
is synced before the rename, and the folder's entry after it. A left-over `<path>.new` is replaced.

In: paths and content. Out: files. Raises OSError.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def replacing(
    path: Path, *, durable: bool = False, before_rename: Callable[[int], None] | None = None, shared: bool = False
) -> Iterator[int]:
    """A descriptor of a new, empty file that becomes `path` when the block ends, and is removed if the block raises.

    `before_rename` is called with the descriptor once the content is synced. `shared`: several threads or processes may
    write the same content at once, so each has a temporary name of its own.
    """
    building = path.with_name(f"{path.name}.{threading.get_native_id()}.new" if shared else path.name + ".new")
    building.unlink(missing_ok=True)  # not opened: a pipe would block, a link could lead to another file
    descriptor = os.open(building, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            yield descriptor
            if durable:
                os.fsync(descriptor)
            if before_rename is not None:
                before_rename(descriptor)
        finally:
            os.close(descriptor)
        os.replace(building, path)
    except BaseException:
        with suppress(OSError):
            building.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def write_all(descriptor: int, content: bytes | memoryview) -> None:
    """Write all of `content`, in as many calls as it takes."""
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def write(path: Path, content: bytes | str, *, durable: bool = False, shared: bool = False) -> None:
    """Write `content` to `path`; text as UTF-8."""
    with replacing(path, durable=durable, shared=shared) as descriptor:
        write_all(descriptor, content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` as JSON; not durable."""
    write(path, json.dumps(value))


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
