"""Entry of the SMP's interpreter: `python -I <this file> <folder,...> <arguments of smp.serve.process>`.

Invariant: nothing in the working directory, PYTHONPATH or the user's site-packages replaces a module that the SMP
imports. Isolated mode excludes them. This package is loaded from the folder of this file, and its dependencies from
where the starting process found them, after everything else on the path.

In: `command()`, to which the arguments are added. Out: `smp.serve.process.main`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

_PACKAGE = "ft_plugins"
_NEEDED = "annotated_types cryptography llvmlite msgpack numpy pydantic pydantic_core typing_extensions xxhash".split()


def command() -> list[str]:
    """The command that starts an SMP which imports the same modules as this process."""
    return [sys.executable, "-I", os.path.realpath(__file__), os.pathsep.join(_folders())]


def _folders() -> list[str]:
    """The folders from which this process imports the SMP's dependencies."""
    folders = {}
    for spec in map(importlib.util.find_spec, _NEEDED):
        if spec is not None and spec.origin is not None:  # None: a plain folder of that name
            depth = 1 if spec.submodule_search_locations else 0
            folders[str(Path(spec.origin).absolute().parents[depth])] = True
    return list(folders)


def _load(folder: Path) -> None:
    """Import this package from `folder`, without putting its parent on the path."""
    spec = importlib.util.spec_from_file_location(
        _PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = sys.modules[_PACKAGE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def main() -> int:
    """Load the package and serve."""
    sys.path += [folder for folder in sys.argv[1].split(os.pathsep) if folder not in sys.path]
    _load(Path(__file__).parents[2])
    process = importlib.import_module(f"{_PACKAGE}.smp.serve.process")
    return int(process.main(sys.argv[2:]))


if __name__ == "__main__":
    raise SystemExit(main())
