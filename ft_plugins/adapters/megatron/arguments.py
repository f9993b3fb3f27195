"""Megatron-LM's arguments as plain values, and back: they are part of its checkpoints.

Invariant: what comes back has the type that it had (`adapters.values`); a value of a type that Megatron-LM's own load
would not accept is left out, and named.

In: the namespace. Out: JSON values, with a tag where JSON lacks the type.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from .. import values as coded


def plain(arguments: argparse.Namespace) -> dict[str, Any]:
    """`values` by name, and the names `left_out`."""
    values, left_out = {}, []
    for name, value in sorted(vars(arguments).items()):
        try:
            values[name] = coded.plain(value)
        except coded.Unknown:
            left_out.append(name)
    return {"values": values, "left_out": left_out}


def namespace(told: Mapping[str, Any], now: Mapping[str, Any]) -> argparse.Namespace:
    """The arguments, with the values that training has changed as they are `now`. Raises StorageError."""
    values = {name: coded.back(value, ("megatron", "signal"), "Megatron") for name, value in told["values"].items()}
    return argparse.Namespace(**{**values, **now})
