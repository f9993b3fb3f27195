"""What a rank has imported once its training runs, for preloaders, which import it before the next rank starts.

Invariant: written once per incarnation, atomically, after the first iterations; its size is bounded, and all of it is
checked on reading.

In: this process. Out: `imported-<local rank>.json` in the run directory, and a record of all ranks of a script for
later jobs; `Imported` for readers. Raises OSError.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from ..base import files
from ..base.intake import Count, Text, read_json

AFTER_ITERATIONS = 3  # of an incarnation: by then a rank has imported what an iteration and a capture need
_NAMES, _CHARACTERS, _BYTES = 50_000, 256, 16 << 20
_MAIN = ("__main__", "__mp_main__")  # the script, under the name that multiprocessing has for it, too
_IMPORTABLE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")

ModuleName = Annotated[str, Field(strict=True, max_length=_CHARACTERS, pattern=f"^{_IMPORTABLE.pattern}$")]


@dataclass(frozen=True)
class Imported:
    """The modules of a rank in the order in which their imports began. `variables`: of the environment, which a
    preloaded module had read before the script set them."""

    token: Count = 0  # of the incarnation; 0: of a record
    names: Annotated[tuple[ModuleName, ...], Field(max_length=_NAMES)] = ()
    variables: Annotated[tuple[Text, ...], Field(max_length=_NAMES)] = ()


_IMPORTED = TypeAdapter(Imported)
_found: dict[str, str | None] = {}


def found_by_modules(variables: Mapping[str, str | None]) -> None:
    """Note what preloaded modules have found in the environment, or left there."""
    _found.update(variables)


def outdated(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The variables that preloaded modules have found with other values than they have now."""
    return tuple(sorted(name for name, value in _found.items() if environ.get(name) != value))


def path_of(run_dir: Path, local_rank: int) -> Path:
    """The file of a rank of this node."""
    return run_dir / f"imported-{local_rank}.json"


def write(run_dir: Path, local_rank: int, token: int, variables: tuple[str, ...] = ()) -> None:
    """Write what this process has imported. Raises OSError."""
    write_to(path_of(run_dir, local_rank), Imported(token, module_names(), variables))


def write_to(path: Path, content: Imported) -> None:
    """Several jobs may write the same record at once. Raises OSError."""
    files.write(path, json.dumps(asdict(content)), shared=True)


def read(run_dir: Path, local_rank: int) -> Imported:
    """What that rank wrote last. Raises OSError, ValueError."""
    return read_json(path_of(run_dir, local_rank), _IMPORTED, _BYTES)


def read_record(path: Path) -> Imported:
    """A record; an empty one if there is none, or none that can be read."""
    try:
        return read_json(path, _IMPORTED, _BYTES)
    except (OSError, ValueError):
        return Imported()


def module_names() -> tuple[str, ...]:
    """The modules of this process that an import statement could name, in the order in which their imports began."""
    names = [name for name in list(sys.modules) if len(name) <= _CHARACTERS and _IMPORTABLE.fullmatch(name)]
    found = (name for name in names[:_NAMES] if getattr(sys.modules.get(name), "__spec__", None) is not None)
    return tuple(name for name in found if name not in _MAIN)
