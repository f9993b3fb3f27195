"""Python's standard library: typing.override for 3.10 and 3.11, and spawned children that do not rerun the script.

typing: megatron-core 0.19 and later import `override` from it, where Python 3.12 has it.
multiprocessing/spawn.py: the torch_dist writer starts a Manager by spawn; its child would rerun `__main__` without the
launcher, and so without the launcher's patches and hooks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import typing_extensions

from .declared import Patch
from .versions import PYTHON


def without_main(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """get_preparation_data without the path of the main module."""

    @functools.wraps(original)
    def get_preparation_data(name: str) -> dict[str, Any]:
        prepared = original(name)
        prepared.pop("init_main_from_path", None)
        prepared.pop("init_main_from_name", None)
        return prepared

    return get_preparation_data


def patches() -> tuple[Patch, ...]:
    """Both patches; `override` is added only if it does not exist."""
    return (
        Patch(
            *("python", "typing", "override", PYTHON),
            reason="megatron-core 0.19 and later import it from typing",
            replace=lambda _: typing_extensions.override,
            absent=True,
        ),
        Patch(
            *("python", "multiprocessing.spawn", "get_preparation_data", PYTHON),
            reason="spawned children would rerun the training script without the launcher",
            replace=without_main,
            parameters=("name",),
            contains=("init_main_from_path",),
        ),
    )
