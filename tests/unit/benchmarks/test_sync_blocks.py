"""Blocks, pairs and the throttle of a comparison within one run."""

import pytest

import sync_overhead
from ft_plugins.errors import FtError
from workloads.sync_blocks import PLAIN, costs, interval, next_rate, shuffled

MODES = (PLAIN, "sync", "dyn")


def test_every_round_has_each_mode_once_and_the_order_follows_from_the_seed():
    rounds = shuffled(MODES, 20, 1)
    assert all(sorted(one) == sorted(MODES) for one in rounds)
    assert len(set(rounds)) > 3, "not the same order each time"
    assert rounds == shuffled(MODES, 20, 1) != shuffled(MODES, 20, 2)


def test_a_cost_is_that_of_its_own_round_so_that_a_slower_machine_does_not_count():
    rounds = [{PLAIN: slow, "sync": 1.25 * slow, "dyn": 1.01 * slow} for slow in (1.0, 3.0, 2.0, 1.0)]
    found = costs(rounds)
    assert found.keys() == {"sync", "dyn"}
    assert found["sync"].value == pytest.approx(0.25) and found["dyn"].value == pytest.approx(0.01)
    assert found["sync"].low == pytest.approx(found["sync"].high)


def test_one_disturbed_block_moves_the_interval_and_not_the_figure():
    rounds = [{PLAIN: 1.0, "sync": 1.2}] * 8 + [{PLAIN: 1.0, "sync": 3.0}]
    assert costs(rounds)["sync"].value == pytest.approx(0.2)


def test_the_interval_has_what_the_shares_have():
    low, high = interval([0.1, 0.2, 0.3] * 10)
    assert 0.1 <= low <= 0.2 <= high <= 0.3
    assert interval([0.1, 0.2, 0.3]) == interval([0.1, 0.2, 0.3])


class Machine:
    """Compute, and a link over which gradients go in every iteration and averages in every `h`-th."""

    def __init__(self, compute, work, nbytes, h):
        self.compute, self.work, self.nbytes, self.h = compute, work, nbytes, h

    def plain(self, rate):
        return self.compute + self.nbytes / rate

    def share(self, rate):
        return (self.work + self.nbytes / rate) / self.h / self.plain(rate)


@pytest.mark.parametrize(("first", "work"), [(1e6, 0.0), (2e7, 0.002), (1e8, 0.01)])
def test_the_rate_is_found_within_a_few_steps(first, work):
    machine, rate = Machine(0.045, work, 786432, 2), first
    for _ in range(3):
        rate = next_rate(rate, machine.plain(rate), machine.share(rate), 2, 0.23, machine.nbytes)
    assert machine.share(rate) == pytest.approx(0.23, abs=1e-6)


def test_no_step_is_beyond_a_factor_and_what_cannot_be_is_refused():
    assert next_rate(1e6, 0.05, 5.0, 2, 0.23, 1e6) == pytest.approx(8e6)
    with pytest.raises(FtError, match="cannot cost 23%: expected less than 20%"):
        next_rate(1e6, 0.05, 0.1, 5, 0.23, 1e6)


@pytest.mark.parametrize("ranks", sync_overhead.WORKERS)
def test_more_workers_have_the_ratios_of_the_calibrated_ones(ranks):
    plan = sync_overhead.planned(2, 1, 1)
    more = sync_overhead.scaled(plan, 100.0, ranks)
    link, one = more.mbps * more.compute_seconds, 100.0 * plan.compute_seconds
    assert link == pytest.approx(one) and more.compute_seconds > plan.compute_seconds
    assert more.calibrations == 0 and sorted(more.blocks[0]) == sorted(("plain", *sync_overhead.SCALED))
