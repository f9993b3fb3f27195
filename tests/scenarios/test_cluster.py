"""The emulated cluster: Megatron's own schedule over throttled links, compute that sleeps, copies in its bubbles."""

import pytest

from ft_plugins.errors import FtError
from harness.emulated_nodes import EmulatedHost, network
from harness.forkserver import ForkServer
from workloads import cluster
from workloads.emulated_rank import OFF, ON, ONCE

REST = [(OFF, 3), (ONCE, 3), (ON, 4)]


@pytest.fixture
def places():
    with network(range(1, cluster.NODES + 1)) as found:
        if not found[0].namespace:
            pytest.skip("network namespaces cannot be made here")
        yield found


@pytest.mark.all_configurations
def test_copies_of_all_ranks_go_in_bubbles_and_only_while_protection_is_on(places, tmp_path_factory):
    folder = tmp_path_factory.mktemp("c")
    one = cluster.shapes(64)[0]
    with ForkServer(cluster.PRELOAD) as server:
        for first in (20, 60, 180):  # on a busy machine bytes are late, and a version takes more iterations
            (at := folder / str(first)).mkdir()
            blocks = [(ON, first), *REST]
            outcome = cluster.run(server, one, places, at, blocks, 120.0, "--baft-reserve-ms", "4")
            counted = [[event for event in events if event.name == "version.committed"] for events in outcome.events]
            if all(counted) and sum(event.fields["in_bubbles"] for events in counted for event in events):
                break
    assert [(block.mode, len(block.seconds)) for block in outcome.blocks] == blocks
    completed = [first + 1, first + 1, first + 1, first + 6]
    assert [block.completed for block in outcome.blocks] == completed, "protected iterations alone are counted"
    assert len(outcome.profile.timelines) == 16
    plans = [event for events in outcome.events for event in events if event.name == "bubbles.planned"]
    assert sorted(event.rank for event in plans) == list(range(16)) and not any(e.fields["reason"] for e in plans)
    least = min(len(events) for events in counted)
    # the job ended between what one node told and what the next one did, at most
    assert least > 0 and max(len(events) for events in counted) <= least + 1
    versions = {tuple(event.fields["iteration"] for event in events[:least]) for events in counted}
    assert len(versions) == 1, "a version counts on all nodes"
    went = [[event.fields for event in events[:least]] for events in counted]  # bytes so far
    sizes = [{one["in_bubbles"] + one["late"] + one["by_rate"] for one in those} for those in zip(*went, strict=True)]
    assert [len(one) for one in sizes] == [1] * least, "every copy is whole"
    assert any(each[-1]["in_bubbles"] for each in went), "some in bubbles"


def test_without_throttled_links_it_is_refused(tmp_path_factory):
    here = [EmulatedHost("", "127.0.0.1", "lo")] * cluster.NODES
    with pytest.raises(FtError, match="network namespaces"):
        cluster.run(None, cluster.shapes(64)[0], here, tmp_path_factory.mktemp("c"), REST, 1.0)
