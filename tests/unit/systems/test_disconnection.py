"""A lost connection is reported once, and only when the job has trained on."""

from ft_plugins.collective import LostNeighbour
from ft_plugins.systems.followed import QUIET_ITERATIONS, QUIET_SECONDS, Disconnection

LOST = LostNeighbour(3, "rank 1: the connection to rank 3 is lost", 100.0)
LATER = 100.0 + QUIET_SECONDS


def test_nothing_is_reported_while_it_can_be_the_death_of_the_other_rank():
    one = Disconnection()
    assert one.due(None, 6, 99.0) is None
    assert one.due(LOST, 7, LATER) is None
    assert one.due(LOST, 7 + QUIET_ITERATIONS - 1, LATER) is None, "it may have contributed to this one"
    assert one.due(LOST, 7 + QUIET_ITERATIONS, LATER - 0.1) is None, "iterations are short"


def test_it_is_reported_once_when_the_job_trains_on():
    one = Disconnection()
    due = [one.due(LOST, step, LATER) for step in range(7, 20)]
    assert due == [None] * QUIET_ITERATIONS + [LOST] + [None] * (12 - QUIET_ITERATIONS)
