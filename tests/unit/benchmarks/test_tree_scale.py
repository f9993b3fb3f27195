"""What the benchmark of the tree measures is what happened: versions everywhere, the lost node, every connection."""

from dataclasses import replace

import pytest

from workloads import tree_scale
from workloads.tree_scale import measure

DETECT = 1.5


@pytest.mark.parametrize(("nodes", "depth", "sockets"), [(1, 0, 0), (8, 1, 7), (40, 2, 9)])
def test_a_small_job_is_measured(nodes, depth, sockets):
    figures = measure(nodes, 2.0, DETECT)
    assert (figures.nodes, figures.depth, figures.iterations, figures.sockets) == (nodes, depth, 2, sockets)
    assert 0 <= figures.processor_share <= figures.processor_share_busiest < 1
    assert figures.messages <= figures.messages_busiest and figures.bytes <= figures.bytes_busiest
    assert figures.commit_seconds >= 0 and figures.elapsed_seconds >= 2 * figures.iteration_seconds
    if nodes > 1:
        seconds = figures.elapsed_seconds / figures.iterations
        assert 0 < figures.messages < 40 * seconds, "news of an iteration, and heartbeats; fewer where threads starve"
        assert figures.lost_seconds > 0  # the clock of a slow machine begins late
    assert figures.sockets_after_loss <= 2 * 17


def test_a_machine_that_is_too_slow_delays_iterations_and_the_figures_say_so(monkeypatch):
    """As slow as if encoding took longer than the three iterations are to take together."""
    monkeypatch.setattr(tree_scale, "_ENCODING_SECONDS", 2.0)
    figures = measure(2, 3.0, DETECT)
    assert figures.iterations == 3 and figures.elapsed_seconds > 6.0
    assert not figures.kept_up and replace(figures, elapsed_seconds=3.1).kept_up
