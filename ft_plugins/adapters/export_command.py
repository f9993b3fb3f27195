"""Convert a checkpoint to one that its framework loads: the command `ft-plugins export`.

Invariant: the target is renamed into place once it is complete and durable; on an error it stays absent or empty. Needs
no job and no device, but for some formats the framework's package.

Under local SGD the first replica is exported, as the framework's own checkpoint would contain it: parameters are those
of all replicas if the checkpoint was taken where replicas are identical, else the summary says that they are not.

In: a checkpoint's folder, a target. Out: the target; a summary for the user.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..base.files import sync_folder
from ..errors import ConfigError, StorageError, UnsupportedError
from ..snapshot.checkpoint.checkpoint_reader import CheckpointReader
from ..sync.rounds.inheritance import ReplicaPlace
from ..systems.local_sgd.local_sgd import LocalSgd
from ..systems.reft.carried import carried_by

_FORMATS = {  # by `framework` of the host's names
    "deepspeed": "ft_plugins.adapters.deepspeed.export",
    "megatron": "ft_plugins.adapters.megatron.export",
}


def export(checkpoint: Path, target: Path) -> dict[str, Any]:
    """Write `checkpoint` into `target`, as its framework loads it; returns a summary.

    Raises ConfigError if the target is in use, UnsupportedError if the checkpoint cannot be exported, StorageError if
    it is damaged or unreadable, or the target cannot be written.
    """
    _require_free(target)
    shares = CheckpointReader(checkpoint)
    write, note = _writer(shares), _choose_replica(shares)
    building = target.absolute().with_name(f"{target.absolute().name}.exporting-{os.getpid()}")
    try:
        building.parent.mkdir(parents=True, exist_ok=True)
        summary = {**write(shares, building), "note": note}
        for folder in [building, *(path for path in building.rglob("*") if path.is_dir())]:
            _sync(folder)
        os.rename(building, target)  # absent, or an empty folder
        sync_folder(target.absolute().parent)
    except OSError as error:
        raise StorageError(f"{error.filename or target}: cannot be read or written ({error.strerror})") from error
    finally:
        with suppress(OSError):
            shutil.rmtree(building)
    return summary


def _require_free(target: Path) -> None:
    if target.is_dir() and not target.is_symlink():
        if not any(target.iterdir()):
            return
        raise ConfigError(f"--to {target}: the folder is not empty; give an empty or a new one")
    if target.exists() or target.is_symlink():
        raise ConfigError(f"--to {target}: exists and is not a folder; give a new name")


def _writer(shares: CheckpointReader) -> Callable[[CheckpointReader, Path], dict[str, Any]]:
    kind = (shares.index(0).names or {}).get("framework")
    if kind not in _FORMATS:
        raise UnsupportedError(
            f"{shares.folder}: not a checkpoint of a Megatron or DeepSpeed job, so that it cannot be exported; its "
            "files are safetensors that hold the tensors by name"
        )
    write: Callable[[CheckpointReader, Path], dict[str, Any]] = importlib.import_module(_FORMATS[kind]).export
    return write


@contextmanager
def installed(package: str, framework: str, extra: str) -> Iterator[None]:
    """Imports of `package` raise UnsupportedError within this context, if it is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if str(error.name).split(".")[0] != extra:
            raise
        raise UnsupportedError(
            f"this is a checkpoint of a {framework} job, but {package} is not installed here: "
            f"pip install 'ft_plugins[{extra}]'"
        ) from error


def _choose_replica(shares: CheckpointReader) -> str:
    """Have the first replica read where replicas of local SGD differ. Returns what a user has to know of that. Raises
    StorageError."""
    first = carried_by(shares.small(0), LocalSgd.name)
    if first is None:
        return ""
    try:
        places = {
            rank: ReplicaPlace.of(carried_by(shares.small(rank), LocalSgd.name) or {})
            for rank in range(shares.manifest.world_size)
        }
        identical = bool(first["identical"])
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(
            f"{shares.folder}: the state of local SGD does not say which replica a rank belongs to "
            f"({type(error).__name__}: {error})"
        ) from error
    shares.chosen = tuple(rank for rank, place in places.items() if place.position == 0)
    if identical:
        return ""
    return (
        f"this is replica 0 of {places[0].count}: at iteration {shares.manifest.iteration} replicas had different "
        "parameters (a snapshot between two synchronisations, or with one under way)"
    )


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)
