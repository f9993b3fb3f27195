"""Compute the survival of one redundancy group, and choose how many nodes it has.

Nodes fail independently; a failure domain (a rack, a switch) takes all of its nodes with it. Of a group with c nodes of
a domain

    P(j of the c are lost) = f [j = c] + (1 - f) C(c, j) q^j (1 - q)^(c - j)       f: the domain fails, q: a node fails

and domains fail independently of each other. Groups that share domains are more likely to survive together than the
product of their probabilities says, so the product is a lower bound.

Invariant: probabilities near 0 are sums of positive terms, so they keep their precision.

In: hazards. Out: the logarithm of a probability; a number of nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

AUTO_LEAST, AUTO_MOST = 4, 16  # nodes: parity takes a third of a share; beyond 16, less than 2% would be saved
AUTO_DAYS = 180.0  # memory is to be lost less often than once in so many days
AUTO_FAILURES = 0.004  # hardware failures of a node per day: one in 250 days
AUTO_REPLACE_SECONDS = 900.0  # until a lost node is replaced, as --nnodes waits by default
AUTO_NODE_SECONDS = 30.0  # to rebuild from one more node of the group

_DAY = 86400.0  # seconds


def log_group_survival(nodes: int, losses: int, hazard: float) -> float:
    """log of sum over j <= `losses` of C(nodes, j) (1-p)^j p^(nodes-j), p = exp(-`hazard`): at most `losses` fail.

    The sum itself if it is small; near 1, log1p of minus the sum of the other terms, which are positive too. Neither
    subtracts numbers of similar size.
    """
    if hazard == 0 or losses >= nodes:
        return 0.0
    if math.isinf(hazard):
        return -math.inf
    failed = -math.expm1(-hazard)
    logs = [math.log(math.comb(nodes, j)) + j * math.log(failed) - (nodes - j) * hazard for j in range(losses + 1)]
    most = max(logs)
    few = most + math.log(math.fsum(math.exp(log - most) for log in logs))
    if few < -math.log(2):
        return few
    # P(more than `losses`) <= 1/2: the terms fall from the first one on
    j = losses + 1
    term = more = math.comb(nodes, j) * failed**j * math.exp(-(nodes - j) * hazard)
    while j < nodes and term > more * 2**-60:
        term *= (nodes - j) / (j + 1) * math.expm1(hazard)
        more, j = more + term, j + 1
    return math.log1p(-more)


def log_shared_survival(members: Sequence[int], losses: int, hazard: float, domain_hazard: float) -> float:
    """The same for a group with `members[i]` nodes of its i-th failure domain, each of which fails as a whole with
    `domain_hazard`. -inf if it is too small for a number."""
    if domain_hazard == 0:
        return log_group_survival(sum(members), losses, hazard)
    q, f = -math.expm1(-hazard), -math.expm1(-domain_hazard)
    stays, holds = math.exp(-hazard), math.exp(-domain_hazard)
    few, more = [1.0] + [0.0] * losses, 0.0  # few[j]: j are lost; more: more than `losses` are
    for count in members:
        lost = [holds * math.comb(count, j) * q**j * stays ** (count - j) for j in range(count + 1)]
        lost[count] += f
        beyond = [math.fsum(lost[losses - j + 1 :]) for j in range(losses + 1)]
        more += math.fsum(chance * after for chance, after in zip(few, beyond, strict=True))
        few = [math.fsum(few[i] * lost[j - i] for i in range(j + 1) if j - i <= count) for j in range(losses + 1)]
    if more < 0.5:
        return math.log1p(-more)
    total = math.fsum(few)
    return math.log(total) if total > 0 else -math.inf


def choose_group_nodes(nodes: int, losses: int) -> int:
    """How many nodes a redundancy group has in a job of `nodes`: the most, because that takes the least memory, for
    which the job is expected to lose state in memory less often than once in AUTO_DAYS, by the AUTO_ constants; or
    AUTO_LEAST, if no larger group will do.

    More than `losses` nodes of a group are lost if that many others fail before the first one is rebuilt
    (`intervals.storage_rate`).
    """
    for size in range(AUTO_MOST, AUTO_LEAST, -1):
        hazard = AUTO_FAILURES * (AUTO_REPLACE_SECONDS + size * AUTO_NODE_SECONDS) / _DAY
        too_many = -math.expm1(log_group_survival(size - 1, losses - 1, hazard))
        if nodes * AUTO_FAILURES * too_many < 1 / AUTO_DAYS:
            return size
    return AUTO_LEAST
