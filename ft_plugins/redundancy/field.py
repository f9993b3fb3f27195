"""Arithmetic of GF(256), in which parity is computed: polynomials over bits modulo x^8 + x^4 + x^3 + x^2 + 1. Pure.

Invariant: addition is XOR; 2 generates all 255 numbers except 0. In and out: ints 0..255.
"""

from __future__ import annotations

from collections.abc import Sequence

POLYNOMIAL = 0x11D
ORDER = 255  # 2**255 = 1, so at most 255 pieces of a stripe have distinct factors


def _powers() -> tuple[int, ...]:
    powers, number = [], 1
    for _ in range(ORDER):
        powers.append(number)
        number <<= 1
        number ^= POLYNOMIAL if number > ORDER else 0
    return tuple(powers)


_POWERS = _powers()
_LOGARITHMS = {number: exponent for exponent, number in enumerate(_POWERS)}


def power(exponent: int) -> int:
    """2**exponent, for any integer."""
    return _POWERS[exponent % ORDER]


def times(a: int, b: int) -> int:
    """a * b."""
    return _POWERS[(_LOGARITHMS[a] + _LOGARITHMS[b]) % ORDER] if a and b else 0


def inverse(a: int) -> int:
    """1 / a. Raises ZeroDivisionError for 0."""
    if a == 0:
        raise ZeroDivisionError("0 has no inverse in GF(256)")
    return _POWERS[-_LOGARITHMS[a] % ORDER]


def solve(equations: Sequence[Sequence[int]], right: Sequence[int]) -> tuple[int, ...]:
    """x with sum_j equations[i][j] x[j] = right[i]. Raises ZeroDivisionError unless there is exactly one."""
    rows = [[*left, value] for left, value in zip(equations, right, strict=True)]
    for column in range(len(rows)):
        pivot = next((at for at in range(column, len(rows)) if rows[at][column]), column)
        rows[column], rows[pivot] = rows[pivot], rows[column]
        scale = inverse(rows[column][column])
        rows[column] = [times(scale, value) for value in rows[column]]
        for at, row in enumerate(rows):
            if at != column and row[column]:
                rows[at] = [value ^ times(row[column], own) for value, own in zip(row, rows[column], strict=True)]
    return tuple(row[-1] for row in rows)
