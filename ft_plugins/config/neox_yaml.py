"""What the yml files of a gpt-neox job say, as far as ft-run needs it before the job starts.

gpt-neox joins the files named in its arguments, in a folder given by -d or --conf_dir, to one configuration, in which
`-` and `_` are the same. The key `ft_plugins` is our block.

Invariant: a file that is not gpt-neox's is left to its script: only the keys asked for have a meaning here.

In: a script's arguments, and the folder that it runs in. Out: plain values."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..base.intake import Unfit, read_bytes, require_shallow

_LIMIT = 1 << 20  # bytes; a hundred times a configuration
_FOLDER = ("-d", "--conf_dir")
_ENDINGS = (".yml", ".yaml")


def settings_in_arguments(arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    """The joined settings of the files named in `arguments`; {} without such files, or without PyYAML, which gpt-neox
    needs itself."""
    inside, joined, previous = "", {}, ""
    for word in arguments:
        if previous in _FOLDER:
            inside = word
        else:
            name = word if word.endswith(_ENDINGS) else f"{word}{_ENDINGS[0]}"  # gpt-neox adds a missing ending
            found = _mapping(folder / inside / name)
            joined.update({str(key).replace("-", "_"): value for key, value in found.items()})
        previous = word
    return joined


def _mapping(path: Path) -> Mapping[str, Any]:
    try:
        yaml = importlib.import_module("yaml")
        value = yaml.safe_load(read_bytes(path, _LIMIT).decode())
        require_shallow(value)
    except (ImportError, OSError, Unfit, ValueError, RecursionError):
        return {}
    except Exception as error:  # what PyYAML raises for text that is not YAML: the script says so itself
        if type(error).__module__.partition(".")[0] != "yaml":
            raise
        return {}
    return value if isinstance(value, dict) else {}
