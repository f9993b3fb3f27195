"""A spawned child does not run the training script again.

Upstream file: multiprocessing/spawn.py. The torch_dist writer starts a Manager by spawn; its child would re-run
`__main__` without the launcher, and so without what the launcher put in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

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
    """The patch of get_preparation_data."""
    return (
        Patch(
            *("python", "multiprocessing.spawn", "get_preparation_data", PYTHON),
            reason="spawned children would re-run the training script outside of the launcher",
            replace=without_main,
            parameters=("name",),
            contains=("init_main_from_path",),
        ),
    )
