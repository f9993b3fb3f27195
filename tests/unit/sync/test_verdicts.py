"""Audits as one rank awaits them: what it remembers of them, what it says, what it forgets when it begins again."""

from typing import cast

import numpy as np
import pytest
import torch

from ft_plugins.events import Events
from ft_plugins.model.inventory import Role
from ft_plugins.sync.audit.audit import OnCorruption, judge, remedy
from ft_plugins.sync.audit.verdicts import Auditing, AuditOutcome, Verdicts
from ft_plugins.sync.background import Background
from ft_plugins.sync.buckets import ItemPiece, ReplicaBucket

EVERYONE, EXPERTS = (0, 1, 2, 3, 4, 5), (1, 3, 5)  # replica sets: those of the dense part, and of one expert


def audit(iteration, replicas, wrong):
    bucket = ReplicaBucket(0, replicas, 0, Role.PARAMETER, "float32", True, (ItemPiece("w", 0, 9),), 36)
    digests = np.array([[int(rank in set(wrong))] for rank in replicas], dtype=np.uint64)
    return judge(iteration, replicas, [bucket], digests)


class Comparing:
    """Finds at each iteration what it was told to."""

    def __init__(self, *audits):
        self.audits = audits

    def compare(self, iteration):
        found = tuple(one for one in self.audits if one.iteration == iteration)
        remedies = tuple(remedy(one, OnCorruption.REPAIR) for one in found)
        return AuditOutcome(iteration, found, remedies, any(one.changes for one in remedies), False)

    def compared_with(self, rank):
        return {other for one in self.audits for other in one.replicas if rank in one.replicas} - {rank}


@pytest.fixture
def background():
    found = Background(torch.device("cpu"))
    yield found
    found.close(10)


def verdicts(rank, background, *audits):
    written = []
    events = Events("n", rank)
    events.subscribe(written.append)
    return Verdicts(rank, cast(Auditing, Comparing(*audits)), background, events), written


def await_(one, *iterations):
    for iteration in iterations:
        one.start(iteration)
        one.await_()


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_fault_that_several_replica_sets_see_is_one_offence_and_said_once(rank, background):
    """As with experts: rank 3's dense part and its expert's are compared with other ranks each."""
    sets = [EVERYONE] if rank == 0 else [EVERYONE, EXPERTS]
    one, written = verdicts(rank, background, *(audit(step, ranks, [3]) for step in (1, 2) for ranks in sets))
    await_(one, 1)
    assert one.offences.by_rank == {3: 1} and one.offences.repeated() == ()
    await_(one, 2)
    assert one.offences.by_rank == {3: 2}
    told = [event.fields["count"] for event in written if event.name == "rank.suspected"]
    assert told == ([2] if rank == 0 else []), "rank 0 speaks, though rank 1 is the first that knows it of the expert"


def test_only_replicas_that_agree_are_reported_before_the_fence(background):
    agreed = []
    one = Verdicts(0, cast(Auditing, Comparing(audit(2, EVERYONE, [3]))), background, Events("n", 0), agreed.append)
    for iteration, known in ((1, [1]), (2, [1]), (3, [1, 3])):
        one.start(iteration)
        assert one.under_way is not None and one.under_way.wait() and agreed == known
        one.await_()


def test_who_begins_again_knows_nothing_of_audits_before(background):
    """As where a framework's own checkpoint is loaded after a restore from memory."""
    one, _ = verdicts(3, background, audit(4, EVERYONE, [3]))
    await_(one, 4)
    one.start(5)
    one.begin(7, {})
    assert one.under_way is None and one.last is None and one.tainted() is None
    one.close()
    await_(one, 4)
    assert one.tainted() == 7
