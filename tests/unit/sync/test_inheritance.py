"""Whose own state a replica of local SGD takes over when the number of replicas changes."""

import pytest

from ft_plugins.errors import ResumeError
from ft_plugins.sync.rounds.inheritance import ReplicaPlace, continued, described, inherited


def carried(position, count, **statistics):
    return {"number": 7, "statistics": statistics, "replica": [position, count], "identical": True}


def previous(replicas, ranks):
    """What the ranks of so many replicas, of so many ranks each, carried."""
    return [carried(rank // ranks, replicas) for rank in range(replicas * ranks)]


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (3, 2, [(0,), (1,)]),  # the remaining ones keep their own
        (2, 3, [(0,), (1,), (0,)]),  # one that joins takes that of the first
        (2, 5, [(0,), (1,), (0,), (1,), (0,)]),
        (2, 1, [(0,)]),
        (1, 2, [(0,), (0,)]),
    ],
)
def test_a_replica_takes_over_that_of_the_same_number_and_one_that_joins_begins_again_at_the_first(
    before, now, expected
):
    found = [inherited(ReplicaPlace(position, now), previous(before, 1)) for position in range(now)]
    assert found == expected


def test_all_ranks_of_a_replica_are_taken_over_also_if_the_replica_has_fewer_now():
    """An instance of the distributed optimizer that has lost a rank: its pieces are on two previous ranks."""
    assert inherited(ReplicaPlace(1, 2), previous(2, 2)) == (2, 3)
    scattered = [carried(position, 2) for position in (0, 1, 0, 1)]
    assert inherited(ReplicaPlace(1, 2), scattered) == (1, 3), "by what they carry, not by the order of the ranks"


def test_statistics_start_again_unless_the_replicas_are_the_same():
    parts = [carried(0, 2, a=[[1.0, 0.5, 3.0]]), carried(0, 2, b=[[2.0, 0.5, 3.0]])]
    fewer = continued(ReplicaPlace(0, 1), parts)
    assert fewer == {"number": 7, "statistics": {}, "replica": [0, 2], "identical": True}
    same = continued(ReplicaPlace(0, 2), parts)
    assert same["statistics"] == {"a": [[1.0, 0.5, 3.0]], "b": [[2.0, 0.5, 3.0]]}, "of the modules of all its ranks"


def test_what_becomes_of_the_replicas_is_said_once_and_a_replica_alone_is_a_warning():
    assert described(ReplicaPlace(0, 2), ReplicaPlace(0, 2), momentum=True) == ""
    fewer = described(ReplicaPlace(0, 2), ReplicaPlace(0, 3), momentum=True)
    assert "3 replicas became 2" in fewer and "outer momentum" in fewer and "start again from nothing" in fewer
    assert "momentum" not in described(ReplicaPlace(0, 2), ReplicaPlace(0, 3), momentum=False)
    alone = described(ReplicaPlace(0, 1), ReplicaPlace(0, 2), momentum=True).splitlines()
    assert len(alone) == 2 and "WARNING" in alone[1]
    assert described(ReplicaPlace(0, 1), ReplicaPlace(0, 1), momentum=True).startswith("WARNING")


def test_state_of_a_job_without_local_sgd_is_refused_by_name():
    with pytest.raises(ResumeError, match=r"without local SGD.*--sync.*--ftp-resume fresh"):
        inherited(ReplicaPlace(0, 2), [None, None, None])
