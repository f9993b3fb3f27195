"""Let Python's cyclic garbage collector run seldom while a rank starts: it would find little, and takes a sixth of the
processor time of a start.

Invariant: it is never off, so a script that never gets further is collected too, and a script's own settings stay.

In: calls. Out: the thresholds of `gc`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

_OBJECTS = 200_000  # new ones before a collection; imports of torch and a framework leave half a million


def collect_seldom() -> Callable[[], None]:
    """From now on, collect seldom. Returns a function that undoes it, unless the thresholds were changed meanwhile."""
    usual = gc.get_threshold()
    if not gc.isenabled() or not 0 < usual[0] < _OBJECTS:
        return lambda: None
    seldom = (_OBJECTS, *usual[1:])
    gc.set_threshold(*seldom)

    def undo() -> None:
        if gc.get_threshold() == seldom:
            gc.set_threshold(*usual)

    return undo
