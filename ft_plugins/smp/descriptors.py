"""How many descriptors a process may have open, and how many of them connections may take.

Invariant: connections never take the last RESERVE descriptors: those are for segments, locks, logs and child processes.

In: the limits of the process. Out: limits raised as far as they may be; a number of connections.
"""

from __future__ import annotations

import contextlib
import resource

ENOUGH = 1 << 16  # descriptors; not more where the hard limit is 2**30: some programs walk over every possible number
RESERVE = 256  # descriptors; where the limit is lower than twice that: half of it


def raise_limit() -> int:
    """Raise the soft limit of this process, and of those that it starts, to the hard one or ENOUGH; what it is then.

    Never lowers it. Raises nothing: where the system refuses, the limit stays as it was.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(_number(hard), ENOUGH)
    if _number(soft) < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return _number(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def places(wanted: int, others: int = 0) -> int:
    """How many connections may be open at a time: `wanted`, or as many as leave the reserve and `others`."""
    limit = _number(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return max(1, min(wanted, limit - min(RESERVE, limit // 2) - others))


def _number(limit: int) -> int:
    return ENOUGH if limit == resource.RLIM_INFINITY else limit
