"""Bugs that were in the product once, to be put back one at a time: each must be found within a minute.

In: the name of a bug. Out: the product with it, for the rest of this process.
"""

from __future__ import annotations

from dataclasses import replace

from ft_plugins.launcher.rounds import round_machine
from ft_plugins.launcher.rounds.node_messages import Vote
from ft_plugins.launcher.rounds.node_service import NodeService
from ft_plugins.recovery import restore
from ft_plugins.smp.tree import agreement
from ft_plugins.snapshot.segment import segment

from . import launcher


def displaced_survivor():
    """A spare takes the place of a node that is alive and only slow to return."""
    round_machine.RoundMachine._expects_any = lambda self, last, now: False


def endless_restores():
    """What a version leads to is restored again and again."""
    judge = launcher.judge

    def always(*given):
        verdict = judge(*given)
        return verdict if verdict.status == "refused" else replace(verdict, restart=True, status="failed", reason="")

    launcher.judge = always


def frozen_commit():
    """One summary with numbers that cannot be true is believed."""
    agreement.Bounds.summary = lambda self, position, summary: (summary, "")


def banned_version():
    """One failed rebuild bans a version."""

    class Tried(set):
        def __contains__(self, one):
            return True

    class Builtins:
        pass

    source = restore.agree_on_version.__code__
    import inspect
    import textwrap

    text = textwrap.dedent(inspect.getsource(restore.agree_on_version))
    assert "not in tried" in text, source
    namespace = vars(restore)
    exec(text.replace("(rank, version) not in tried", "False"), namespace)
    from . import rank

    rank.agree_on_version = namespace["agree_on_version"]


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

    assert Vote(True, 1)
    NodeService._elect = elect


def number_twice():
    """A new lineage is above what ranks have opened, not above all that nodes know."""
    from ft_plugins.recovery import recovery_plan

    recovery_plan.newest_lineage = lambda facts, nodes: min(rank.lineage for rank in facts)


BUGS = {
    one.__name__: one
    for one in (
        displaced_survivor, endless_restores, frozen_commit, banned_version, undone_pins, second_leader, number_twice
    )
}  # fmt: skip
