"""Bugs that were in the product once, to be put back one at a time: each must be found within a minute.

In: the name of a bug. Out: the product with it, for the rest of this process.
"""

import inspect
import itertools
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace

from ft_plugins.launcher.agent import restarts
from ft_plugins.launcher.rounds import round_machine, rounds
from ft_plugins.launcher.rounds.node_service import NodeService
from ft_plugins.recovery import proof_plan, recovery_plan, restore
from ft_plugins.smp.serve import owner
from ft_plugins.smp.tree import agreement, pinned, tree_state
from ft_plugins.snapshot.checkpoint import checkpoint
from ft_plugins.snapshot.segment import claims, segment
from ft_plugins.snapshot.segment.slots import Pin, SlotState

from . import launcher, memory, rank, world
from .scenario import Fault, Scenario, draw


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


# ---- what must hold, broken on purpose ----


def broken_places():
    """Two nodes have the last rank."""
    real = rounds.ranks

    def ranks(candidates, size, *rest):
        return {node: min(size - 2, rank) for node, rank in real(candidates, size, *rest).items()}

    rounds.ranks = ranks


def moved_survivors():
    """The ranks of a round that is not the first are in another order."""
    real = rounds.ranks

    def ranks(candidates, size, *rest):
        assigned = real(candidates, size, *rest)
        again = any(each.seat for each in candidates)
        return {node: size - 1 - rank for node, rank in assigned.items()} if again else assigned

    rounds.ranks = ranks


def torn_slots():
    """What is sealed is not what was computed."""
    real = memory.Words.seal

    def seal(self, version, token, content, digests):
        real(self, version, token, content + 1 if isinstance(content, int) else content, digests)

    memory.Words.seal = seal


def mixed_versions():
    """One rank restores the version before that of the others."""
    real = restore.agree_on_version

    def agree(found, *given):
        plan = real(found, *given)
        clean = [one.version for one in found.slots() if one.state is SlotState.CLEAN]
        older = [one for one in clean if plan.version and one < plan.version and found.rank == 1]
        return replace(plan, version=max(older)) if older else plan

    rank.agree_on_version = agree


def split_state():
    """The iteration is not the same one on all ranks."""
    real, calls = rank.following, itertools.count()
    rank.following = lambda state, iteration, salt: real(state, iteration, next(calls))


def hasty_commits():
    """A version is committed as soon as it is complete on one node."""
    agreement._least = agreement._newest


def early_ends():
    """Ranks end in the middle of training."""
    rank.Rank.last = property(lambda self: self.world.last // 2)


def hasty_verdicts():
    """No failure is worth a restart."""
    restarts.judge = lambda *given: restarts.Verdict(False, "failed", "it failed")


def forgotten_run():
    """A job that goes on has a new identity."""
    rank.agree_on_version = lambda *given: replace(restore.agree_on_version(*given), run="")


def idle_leader():
    """Rounds after the first do not come."""
    real = round_machine.RoundMachine._choose
    round_machine.RoundMachine._choose = lambda self, now: self.roster.round or real(self, now)


def dropped_pins():
    """A capture overwrites the committed version."""
    real = segment.Segment.slot_to_capture

    def chosen(self, version):
        pinned = [one.index for one in self.slots() if one.pins & Pin.NODE]
        return pinned[0] if pinned else real(self, version)

    segment.Segment.slot_to_capture = chosen


def newest_parity_gives_way():
    """What a node stores of the newest version gives way to the next one."""
    memory.choose = lambda slots: max(slots, key=lambda one: (one.version is not None, one.version)).index


def few_slots():
    """One slot less is free than is needed."""
    real = segment.Segment.slot_to_capture
    segment.Segment.slot_to_capture = lambda self, version: real(self, version) if version.iteration % 9 else None
    claims.SlotClaims._claim = lambda self: False


def unasked_memory():
    """A slot is claimed whether there is room or not."""
    rank.check_room = lambda *given: None


def early_commits():
    """What is announced is committed."""
    real = agreement.decide

    def decide(epoch, before, summary):
        decision = real(epoch, before, summary)
        return replace(decision, committed=decision.exchange or decision.committed)

    def commit(self, version):
        self.committed = version
        return True

    tree_state.decide, pinned.PinnedVersions.commit = decide, commit


def older_before():
    """A restore is proven from another version than the one before."""
    proof_plan._before = lambda rank, version: min(rank.restorable())


def survivors_of_a_round():
    """What trained before a restart goes on beside it."""
    launcher.Agent._kill = lambda self: None
    owner.liveness.kill_and_wait = lambda owners, seconds: []
    rank.Rank._check_token = lambda self: None


def iterations_twice():
    """An iteration counts twice."""
    real = world.World.completed
    world.World.completed = lambda self, *given: (real(self, *given), real(self, *given))


@dataclass(frozen=True)
class Bug:
    """`finds`: what it violates, '' for anything. `job`: the seed, or the scenario, of a job in which it does."""

    put_back: Callable[[], None]
    job: int | Scenario
    finds: str = ""


def _plain(seed):
    """The job of a seed, in which nodes exchange each iteration and ranks have slots enough."""
    return replace(draw(seed), interval=1, free=3, parity=False)


def _job(seed, iterations, stored, *faults):
    """Three nodes."""
    return Scenario(seed, 3, 0, 1, 1, iterations, 1.0, (0.1, 0.12), (0.0, 0.05), 0.0, stored, 1, 3, False, faults)


BUGS = {
    "displaced survivor": Bug(displaced_survivor, 6, "displaced"),
    "endless restores": Bug(endless_restores, 24, "restored again and again"),
    "frozen commit": Bug(
        frozen_commit, _job(1, 60, 0, Fault(("iteration", 9), 0.0, "lie", (1, 2), 0.5)), "unprotected"
    ),
    "banned version": Bug(
        banned_version,
        _job(
            1, 24, 0, Fault(("iteration", 9), 0.0, "lose node", (0, 1)), Fault(("rebuild", 1), 0.0, "cut", (1, 2), 0.5)
        ),
        "ended without a cause",
    ),
    "undone pins": Bug(undone_pins, 213, "not pinned"),
    "second leader": Bug(second_leader, _plain(9)),
    "checkpoint without files": Bug(
        checkpoint_without_files,
        _job(7, 60, 7, Fault(("iteration", 6), 0.0, "slow storage", (0, 1), 8.0)),
        "a checkpoint complete without its files",
    ),
    "number twice": Bug(number_twice, 9, "a lineage twice"),
    "broken places": Bug(broken_places, 1, "two nodes of one rank"),
    "moved survivors": Bug(moved_survivors, 1, "a survivor lost its place"),
    "torn slots": Bug(torn_slots, 1, "torn"),
    "mixed versions": Bug(mixed_versions, 1, "mixed"),
    "split state": Bug(split_state, 1, "split"),
    "hasty commits": Bug(hasty_commits, 23, "committed what was not sealed"),
    "early ends": Bug(early_ends, 1, "ended early"),
    "hasty verdicts": Bug(hasty_verdicts, 1, "ended without a cause"),
    "forgotten run": Bug(forgotten_run, 1, "another job's"),
    "idle leader": Bug(idle_leader, 1, "liveness"),
    "dropped pins": Bug(dropped_pins, 1, "dropped"),
    "newest parity gives way": Bug(newest_parity_gives_way, 1, "not whole"),
    "few slots": Bug(few_slots, 1, "left out"),
    "unasked memory": Bug(unasked_memory, 76, "beyond the budget"),
    "early commits": Bug(early_commits, 1, "committed what no rank completed"),
    "survivors of a round": Bug(survivors_of_a_round, 6, "two rounds at once"),
    "iterations twice": Bug(iterations_twice, 1, "a version twice"),
    "older before": Bug(older_before, 1, "unproven"),
}
