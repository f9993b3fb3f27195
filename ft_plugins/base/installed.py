"""Whether a file belongs to Python, an installed package or this one, or is the script's.

Packages are installed in a virtual environment, in the system (`dist-packages`) or in the user's own folder.
"""

from __future__ import annotations

import os
import site
import sysconfig
from functools import cache


@cache
def is_installed(file: str) -> bool:
    """By its path as it is, or with links followed; code that is frozen into Python has none."""
    places = [
        *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
        os.path.dirname(os.__file__),
        *site.getsitepackages(),
        site.getusersitepackages(),
        os.path.dirname(os.path.dirname(__file__)),
    ]
    inside = tuple(f"{place}/" for place in places)
    return file.startswith(("<frozen", *inside)) or os.path.realpath(file).startswith(inside)
