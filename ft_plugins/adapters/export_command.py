"""Checkpoints of this project turned into those of the framework that trained: what `ft-plugins export` does.

Invariant: the target gets its name when all of it is there and durable; whatever goes wrong leaves it as it was, absent
or empty. Needs neither the job nor a device; the framework's package where its format is written with it.

In: a checkpoint's folder, a target. Out: the target; what is told to people.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import ConfigError, StorageError, UnsupportedError
from ..files import sync_folder
from ..snapshot.checkpoint_reader import CheckpointReader

_FORMATS = {  # by what the host's names say
    "deepspeed": "ft_plugins.adapters.deepspeed.export",
    "megatron": "ft_plugins.adapters.megatron.export",
}


def export(checkpoint: Path, target: Path) -> dict[str, Any]:
    """Write `checkpoint` as its framework loads it, into `target`.

    Raises ConfigError for a target that is in use, UnsupportedError for a checkpoint that cannot be exported,
    StorageError when it is damaged or cannot be read, or the target not be written.
    """
    _require_free(target)
    shares = CheckpointReader(checkpoint)
    write = _writer(shares)
    building = target.absolute().with_name(f"{target.absolute().name}.exporting-{os.getpid()}")
    try:
        building.parent.mkdir(parents=True, exist_ok=True)
        found = write(shares, building)
        for folder in [building, *(path for path in building.rglob("*") if path.is_dir())]:
            _sync(folder)
        os.rename(building, target)  # onto nothing, or an empty folder
        sync_folder(target.absolute().parent)
    except OSError as error:
        raise StorageError(f"{error.filename or target}: cannot be written or read ({error.strerror})") from error
    finally:
        with suppress(OSError):
            shutil.rmtree(building)
    return found


def _require_free(target: Path) -> None:
    if target.is_dir() and not target.is_symlink():
        if not any(target.iterdir()):
            return
        raise ConfigError(f"--to {target}: the folder is not empty; give one that is, or a new one")
    if target.exists() or target.is_symlink():
        raise ConfigError(f"--to {target}: it is there and no folder; give a new name")


def _writer(shares: CheckpointReader) -> Callable[[CheckpointReader, Path], dict[str, Any]]:
    kind = (shares.index(0).names or {}).get("framework")
    if kind not in _FORMATS:
        raise UnsupportedError(
            f"{shares.folder}: only checkpoints of Megatron and DeepSpeed jobs can be exported, and this is "
            "none; its files are safetensors, and rank-*.index.json says what lies where in them"
        )
    found: Callable[[CheckpointReader, Path], dict[str, Any]] = importlib.import_module(_FORMATS[kind]).export
    return found


def _sync(folder: Path) -> None:
    """Files and names durable."""
    for path in folder.iterdir():
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)
