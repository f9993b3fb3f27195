"""The emulated cluster: Megatron's own schedule over throttled links, compute that sleeps, copies in its bubbles."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ft_plugins.errors import FtError
from harness.emulated_nodes import EmulatedHost, network
from harness.forkserver import ForkServer
from workloads import cluster
from workloads.emulated_rank import OFF, ON, ONCE

BLOCKS = [(ON, 20), (OFF, 3), (ONCE, 3), (ON, 4)]


@pytest.fixture
def places() -> Iterator[list[EmulatedHost]]:
    with network(range(1, cluster.NODES + 1)) as found:
        if not found[0].namespace:
            pytest.skip("network namespaces cannot be made here")
        yield found


@pytest.mark.all_configurations
def test_copies_of_all_ranks_go_in_bubbles_and_only_while_protection_is_on(
    places: list[EmulatedHost], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("c")
    one = cluster.shapes(64)[0]
    with ForkServer(cluster.PRELOAD) as server:
        outcome = cluster.run(server, one, places, folder, BLOCKS, 120.0, "--baft-reserve-ms", "4")
    assert [(block.mode, len(block.seconds)) for block in outcome.blocks] == BLOCKS
    assert [block.completed for block in outcome.blocks] == [21, 21, 21, 26], "protected iterations alone are counted"
    assert len(outcome.profile.timelines) == 16
    plans = [event for events in outcome.events for event in events if event.name == "bubbles.planned"]
    assert sorted(event.rank for event in plans) == list(range(16)) and not any(e.fields["reason"] for e in plans)
    counted = [[event for event in events if event.name == "version.committed"] for events in outcome.events]
    least = min(len(events) for events in counted)
    # the job ended between what one node told and what the next one did, at most
    assert least > 0 and max(len(events) for events in counted) <= least + 1
    versions = {tuple(event.fields["iteration"] for event in events[:least]) for events in counted}
    assert len(versions) == 1, "a version counts on all nodes"
    for events in counted:
        assert events[-1].fields["in_bubbles"] > events[-1].fields["late"], events[-1].fields


def test_without_throttled_links_it_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    here = [EmulatedHost("", "127.0.0.1", "lo")] * cluster.NODES
    with pytest.raises(FtError, match="network namespaces"):
        cluster.run(None, cluster.shapes(64)[0], here, tmp_path_factory.mktemp("c"), BLOCKS, 1.0)  # type: ignore[arg-type]
