"""Python's standard library: typing.override for 3.10 and 3.11, and spawned children that do not rerun the script.

typing: megatron-core 0.19 and later import `override` from it, where Python 3.12 has it.
multiprocessing/spawn.py: the torch_dist writer starts a Manager by spawn; its child would rerun `__main__` without the
launcher, and so without the launcher's patches and hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typing_extensions

from .declared import Patch, around
from .versions import PYTHON


def without_main(original: Callable[..., dict[str, Any]], name: str) -> dict[str, Any]:
    """get_preparation_data without the path of the main module."""
    unwanted = ("init_main_from_path", "init_main_from_name")
    return {key: value for key, value in original(name).items() if key not in unwanted}


PATCHES = (
    Patch(
        *("python", "typing", "override", PYTHON),
        reason="megatron-core 0.19 and later import it from typing",
        replace=lambda _: typing_extensions.override,
        absent=True,
    ),
    Patch(
        *("python", "multiprocessing.spawn", "get_preparation_data", PYTHON),
        reason="spawned children would rerun the training script without the launcher",
        replace=around(without_main),
        parameters=("name",),
        contains=("init_main_from_path",),
    ),
)
