"""What a node tier commits where replicas are compared, and what it says has begun: real tiers, segments and sockets.

What it keeps when SMPs die and incarnations follow each other: `tests/world`.
"""

from dataclasses import replace

import pytest

from ft_plugins.smp.tree.pinned import PinnedVersions
from ft_plugins.snapshot.segment.paths import path_of, remove
from ft_plugins.snapshot.segment.segment import Segment, create
from ft_plugins.snapshot.segment.slots import SHARED, Mark, Version

from .node_clusters import clusters, wait

HELD_BACK = 0.001  # megabits a second: the first frame takes minutes


@pytest.fixture
def make(tmp_path, job):
    with clusters(tmp_path, job) as make:
        yield lambda count, **more: make(count, per_node=1, sizes=lambda rank: 100_000, detect=30.0, **more)


def test_where_replicas_are_compared_a_version_counts_when_they_were_found_to_agree(make):
    """Else a node that is lost would have the job go back to what nobody has compared, and the rest would be void."""
    job = make(2)
    job.protect(audited=True)
    job.begin(1)
    wait(lambda: all(node.driver._exchange is not None and node.driver._exchange.done for node in job.nodes))
    assert all(node.encoded() is None for node in job.nodes)
    assert job.nodes[0].segment.mark(Version(1, 1), Mark.CERTIFIED)
    assert job.nodes[0].encoded() == Version(1, 1)
    assert not any(node.status("committed") for node in job.nodes), "the ranks of one node have not heard of it"
    job.nodes[1].segment.mark(Version(1, 1), Mark.CERTIFIED)
    job.until_committed(1)
    job.begin(2)
    for node in job.nodes:
        node.segment.mark(Version(1, 2), Mark.MISMATCHED)
    job.until_exchanged(3)
    assert all(node.status("committed") == [1, 1] for node in job.nodes)


def test_a_version_found_to_hold_a_wrong_replica_is_given_up_however_long_it_would_take_to_send(make):
    """It can never be committed: until it had been sent, no other version would be."""
    job = make(2)
    job.protect(mbps=HELD_BACK, audited=True)
    job.begin(1)
    wait(lambda: all(node.driver._exchange is not None for node in job.nodes))
    assert not any(node.driver._observe().complete for node in job.nodes)
    assert job.nodes[1].segment.mark(Version(1, 1), Mark.MISMATCHED)  # on the other node it was not pinned, so is gone
    job.until_exchanged(2)
    assert not any(node.segment.slots()[0].pins for node in job.nodes)


@pytest.mark.parametrize("free", [0, 1, 2, 3])
def test_what_ranks_with_few_slots_have_left_out_counts_as_begun(make, tmp_path, job, free):
    """All of their slots are pinned: else the version that is announced next would long be past."""
    path = path_of(job, "few", 0)
    shape = make(1).shapes[0]
    create(path, replace(shape, slots=2 + free, free=free), 0, {})
    segment = Segment(path)
    segment.open_lineage(1, None, ())
    segment.header.completed = 7
    pinned = PinnedVersions(tmp_path, {0: segment})
    pinned._ranks = (0,)
    assert pinned.begun(1) == (7 if free < SHARED else 0) and pinned.begun(2) == 0
    segment.close()
    remove(job, "few")
