"""typing.override for Python 3.10 and 3.11.

Upstream file: megatron-core 0.19 and later import it from typing, where Python 3.12 has it.
"""

from __future__ import annotations

import typing_extensions

from .declared import Patch
from .versions import PYTHON


def patches() -> tuple[Patch, ...]:
    """The symbol is added only where it does not exist."""
    return (
        Patch(
            *("python", "typing", "override", PYTHON),
            reason="megatron-core 0.19 and later take it from typing",
            replace=lambda _: typing_extensions.override,
            absent=True,
        ),
    )
