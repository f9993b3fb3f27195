"""What a rank has imported once its training runs, for standby workers, which import it before it is needed.

Invariant: written once per incarnation, atomically, after the first iterations; its size is bounded, and all of it is
checked on reading. Values of environment variables are only there as digests.

In: this process. Out: `imported-<local rank>.json` in the run directory; `Imported` for its readers. Raises OSError.
"""

from __future__ import annotations

import hashlib
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
    """The modules of a rank in the order in which their imports began, and the environment that they found."""

    token: Count  # of the incarnation
    python: Text
    torch: Text
    names: Annotated[tuple[ModuleName, ...], Field(max_length=_NAMES)]
    environment: Annotated[dict[Text, Text], Field(max_length=_NAMES)]  # digests of the values, by name


_IMPORTED = TypeAdapter(Imported)


def path_of(run_dir: Path, local_rank: int) -> Path:
    """The file of a rank of this node."""
    return run_dir / f"imported-{local_rank}.json"


def write(run_dir: Path, local_rank: int, token: int) -> None:
    """Write what this process has imported. Raises OSError."""
    python, torch = versions()
    found = Imported(token, python, torch, module_names(), digests(os.environ))
    files.write_json(path_of(run_dir, local_rank), asdict(found))


def read(run_dir: Path, local_rank: int) -> Imported:
    """What that rank wrote last. Raises OSError, ValueError."""
    return read_json(path_of(run_dir, local_rank), _IMPORTED, _BYTES)


def module_names() -> tuple[str, ...]:
    """The modules of this process that an import statement could name, in the order in which their imports began."""
    names = [name for name in list(sys.modules) if len(name) <= _CHARACTERS and _IMPORTABLE.fullmatch(name)]
    found = (name for name in names[:_NAMES] if getattr(sys.modules.get(name), "__spec__", None) is not None)
    return tuple(name for name in found if name not in _MAIN)


def versions() -> tuple[str, str]:
    """Of Python and of torch, '' if it is not imported."""
    return sys.version, str(getattr(sys.modules.get("torch"), "__version__", ""))


def digests(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables with digests in place of their values."""
    return {name: digest(value) for name, value in environ.items()}


def digest(value: str) -> str:
    """Of the value of a variable, which may be a secret."""
    return hashlib.blake2b(os.fsencode(value), digest_size=8).hexdigest()
