"""JSON files with a digest of their content: the small files of checkpoints and notices.

In: a JSON object. Out: a durable file; the object again, or StorageError if it does not match its digest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from ...base import files
from ...base.intake import FILE_LIMIT, Unfit, json_value, read_bytes, shown
from ...errors import StorageError


def write_digested(path: Path, content: dict[str, Any]) -> None:
    """Write a small file durably, with a digest of its content."""
    files.write(path, json.dumps({**content, "digest": _digest_of(content)}), durable=True)


def _digest_of(content: Mapping[str, Any]) -> str:
    return str(xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode()))


def read_digested(path: Path, limit: int = FILE_LIMIT) -> dict[str, Any]:
    """Read a small file. Raises FileNotFoundError, StorageError."""
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
    if digest != _digest_of(content):
        raise StorageError(f"{where}: does not match its digest")
    return content
