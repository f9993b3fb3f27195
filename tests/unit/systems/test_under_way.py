"""What follows a synchronisation of some modules is done once, also by a rank that has none of them."""

from types import SimpleNamespace

import pytest
import torch

from ft_plugins.sync.rounds.local_policy import AppliedAt
from ft_plugins.sync.rounds.modules import GroupPlan
from ft_plugins.systems.local_sgd.sync_groups import PeerWait
from ft_plugins.systems.local_sgd.under_way import SynchronisationUnderWay


@pytest.mark.parametrize(
    ("names", "finishes", "times"),
    [(["a", "b"], True, 1), ([], True, 1), ([], False, 0)],
    ids=["modules", "those of other ranks", "nothing on any rank"],
)
def test_parameters_are_gathered_once_by_all_ranks_of_a_replica(names, finishes, times):
    """A rank with shards of other layers takes part in the gather, or its replica would wait for it for ever."""
    applied = []
    finished = []

    def apply(name):
        applied.append(name)
        return SimpleNamespace(anomalous=(), nonfinite=(), rollback=False)

    synchronisation = SimpleNamespace(begin=lambda factors: None, exchange=lambda name: 1.0, apply=apply)
    plan = GroupPlan(0, (0,), {}, ("a", "b"), ("a", "b"), frozenset())
    one = SynchronisationUnderWay(
        synchronisation, plan, PeerWait(0, (0,), (0,), 5.0), AppliedAt.WAIT, True, torch.device("cpu"),
        lambda: finished.append(list(applied)),
    )  # fmt: skip
    try:
        one.start_some(3, names, finishes)
        one.apply_all()
        one.apply_all()
    finally:
        one.close()
    assert finished == [names] * times
