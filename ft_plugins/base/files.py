"""Write files atomically: under a temporary name, for their owner alone (0600), then renamed. Folders are 0700.

A reader of `path` sees the old file or the complete new one. A durable write guarantees that after a crash too: content
is synced before the rename, and the folder's entry after it. A left-over `<path>.new` is replaced.

Digested files are JSON with a digest of their content: `read_digested` raises StorageError if it does not match.

In: paths and content. Out: files. Raises OSError.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from ..errors import StorageError
from .outside_values import FILE_LIMIT, Unfit, json_value, read_bytes, shown


@contextmanager
def replacing(
    path: Path, *, durable: bool = False, before_rename: Callable[[int], None] | None = None, shared: bool = False
) -> Iterator[int]:
    """A descriptor of a new, empty file that becomes `path` when the block ends, and is removed if the block raises.

    `before_rename` is called with the descriptor once the content is synced. `shared`: several threads, processes
    or hosts may write it at once, so each has a temporary name of its own.
    """
    building = path.with_name(f"{path.name}.{os.urandom(8).hex()}.new" if shared else path.name + ".new")
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


def words_in(path: Path, most: int = 4096) -> str:
    """The first characters of a text file; '' if it cannot be read."""
    try:
        with open(path, errors="replace") as file:
            return file.read(most)
    except OSError:
        return ""


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` as JSON; not durable."""
    write(path, json.dumps(value))


def private(path: str, flags: int) -> int:
    """An opener for `open`: a file that is created is its owner's alone, whatever the umask. No link is followed, and
    no pipe waited for."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def make_private(folder: Path) -> None:
    """Create a folder if it does not exist, and those above it, for their owner alone. Raises OSError."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- JSON with a digest of its content ----


def write_digested(path: Path, content: dict[str, Any], *, durable: bool = True, shared: bool = False) -> None:
    """Write a small file, with a digest of its content."""
    write(path, json.dumps({**content, "digest": digest_of(content)}), durable=durable, shared=shared)


def digest_of(content: Mapping[str, Any]) -> str:
    """The digest of its content."""
    return str(xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode()))


def read_digested(path: Path, limit: int = FILE_LIMIT) -> dict[str, Any]:
    """The content of a small file. Raises FileNotFoundError, StorageError."""
    try:
        return checked(read_bytes(path, limit), path)
    except FileNotFoundError:
        raise
    except (OSError, Unfit) as error:
        raise StorageError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error


def checked(encoded: bytes, where: object) -> dict[str, Any]:
    """The object in the bytes of such a file. Raises StorageError."""
    try:
        content = json_value(encoded)
        if not (isinstance(content, dict) and "digest" in content):
            raise Unfit(f"expected an object with a digest, found {shown(content)}")
    except ValueError as error:
        raise StorageError(f"{where}: cannot be read ({error})") from error
    digest = content.pop("digest")
    if digest != digest_of(content):
        raise StorageError(f"{where}: does not match its digest")
    return content
