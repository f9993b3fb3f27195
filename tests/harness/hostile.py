"""Damaged and hostile bytes and plain values, shared by the tests of every boundary.

In: content and a source of randomness. Out: the same content, damaged.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from random import Random
from typing import Any


def nested(depth: int) -> list[Any]:
    """An empty list inside `depth` lists."""
    lists: list[Any] = []
    for _ in range(depth):
        lists = [lists]
    return lists


VALUES: list[Any] = [
    None, True, 0, -1, 1.5, float("nan"), float("inf"), 2**63, 2**64, -(2**70), "", "x", "\ud800", "\x1b[2J", "²", [],
    {}, [[]], [1, 2], [1, 2, 3], {"a": 1}, [{}], nested(40), nested(600),
]  # fmt: skip
TEXTS = [
    b"", b"[]", b"{}", b"null", b"1", b'"x"', b"[1]", b"NaN", b"\xff\xfe", b"[" * 3000, b"9" * 6000, bytes(100),
    b'{"a":' * 2000, b'"\\ud800"', "²".encode(), b"1e999", b"-1", b"\x1b[2J",
]  # fmt: skip


def damaged(content: bytes, random: Random) -> bytes:
    """`content` cut short, with bits flipped, with a part replaced, or something else instead."""
    at = random.randrange(len(content) + 1)
    match random.randrange(4):
        case 0:
            return content[:at]
        case 1:
            return random.choice(TEXTS)
        case 2:
            return content[:at] + random.choice(TEXTS) + content[at + random.randrange(20) :]
    flipped = bytearray(content)
    for _ in range(random.randrange(1, 5) if flipped else 0):
        flipped[random.randrange(len(flipped))] ^= 1 << random.randrange(8)
    return bytes(flipped)


def altered(value: Any, random: Random) -> Any:
    """A copy of plain values with one entry removed, replaced or added."""
    result = copy.deepcopy(value)
    places = list(_places(result))
    if not places:
        return random.choice(VALUES)
    container, key = random.choice(places)
    match random.randrange(4):
        case 0:
            del container[key]
        case 1 if isinstance(container, dict):
            container["unknown"] = random.choice(VALUES)
        case _:
            container[key] = copy.deepcopy(random.choice(VALUES))
    return result


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key or index) in `value`."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in list(parts):
        yield value, key
        yield from _places(part)
