"""Bugs that were in the product once, to be put back one at a time: each must be found within a minute.

In: the name of a bug. Out: the product with it, for the rest of this process.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace

from ft_plugins.launcher.agent import restarts
from ft_plugins.launcher.rounds import round_machine
from ft_plugins.launcher.rounds.node_service import NodeService
from ft_plugins.recovery import recovery_plan, restore
from ft_plugins.smp.tree import agreement
from ft_plugins.snapshot.checkpoint import checkpoint
from ft_plugins.snapshot.segment import segment

from . import rank


def displaced_survivor():
    """A spare takes the place of a node that is alive and only slow to return."""
    round_machine.RoundMachine._expects_any = lambda self, last, now: False


def endless_restores():
    """What a version leads to is restored again and again."""
    judge = restarts.judge

    def always(*given):
        verdict = judge(*given)
        return verdict if verdict.status == "refused" else replace(verdict, restart=True, status="failed", reason="")

    restarts.judge = always


def frozen_commit():
    """One summary with numbers that cannot be true is believed."""
    agreement.Bounds.summary = lambda self, position, summary: (summary, "")


def banned_version():
    """One failed rebuild bans a version."""
    text = textwrap.dedent(inspect.getsource(restore.agree_on_version))
    assert "(rank, version) not in tried" in text
    exec(text.replace("(rank, version) not in tried", "False"), vars(restore))
    rank.agree_on_version = restore.agree_on_version


def undone_pins():
    """A word of pins is read and stored by two threads of an SMP without a lock."""

    class Nothing:
        def __enter__(self):
            pass

        def __exit__(self, *_):
            pass

    segment._PINNING = Nothing()


def second_leader():
    """A node consents to a candidate although it leads, or has consented in this generation."""

    def elect(self, request):
        self._elected = request.lead
        self.generation = max(self.generation, request.lead.generation)
        return {"granted": True, "generation": request.lead.generation}

    NodeService._elect = elect


def checkpoint_without_files():
    """A checkpoint is complete once its manifest is renamed, whatever another node has withdrawn meanwhile."""
    belongs = checkpoint._belongs
    checkpoint._belongs = lambda folder, rank, origin, version, sealed_by=None: (
        True if sealed_by is not None else belongs(folder, rank, origin, version)
    )


def number_twice():
    """A new lineage is above what ranks have opened, not above all that nodes know."""
    recovery_plan.newest_lineage = lambda facts, nodes: min(rank.lineage for rank in facts)


@dataclass(frozen=True)
class Bug:
    """`seed`: of a job that finds it; None: none is known yet."""

    put_back: Callable[[], None]
    seed: int | None = None


BUGS = {
    "displaced survivor": Bug(displaced_survivor, 36),
    "endless restores": Bug(endless_restores, 30),
    "frozen commit": Bug(frozen_commit),
    "banned version": Bug(banned_version, 9),
    "undone pins": Bug(undone_pins),
    "second leader": Bug(second_leader, 36),
    "checkpoint without files": Bug(checkpoint_without_files),
    "number twice": Bug(number_twice, 8),
}
