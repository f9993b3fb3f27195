"""Edges on a device's clock, and by how much the host was ahead of it."""

import time

import pytest
import torch

from ft_plugins.bubbles.timeline.record import CudaClock, clock_of

pytestmark = pytest.mark.gpu

CYCLES = 200_000_000  # a tenth of a second or more, on any device of today


def test_the_host_is_ahead_by_what_it_has_launched_and_by_nothing_once_it_has_waited():
    clock = clock_of(torch.device("cuda"))
    assert isinstance(clock, CudaClock)
    clock.room(4)
    torch.cuda.synchronize()
    clock.mark(0)
    began = time.perf_counter()
    torch.cuda._sleep(CYCLES)
    clock.mark(1)
    launched = time.perf_counter() - began
    torch.cuda.synchronize()
    whole = time.perf_counter() - began
    clock.mark(2)
    torch.cuda._sleep(CYCLES)
    clock.mark(3)
    assert not clock.ready(3), "asked, not waited for"
    torch.cuda.synchronize()
    assert clock.ready(3)
    seconds = clock.seconds(4)
    leads = clock.leads(seconds)
    assert launched < 0.2 * whole, "otherwise it was not ahead"
    # what the host takes between its own look at the time and the device's: launches, a tenth of the whole at most
    assert leads[1] == pytest.approx(whole, rel=0.1) and leads[3] == pytest.approx(seconds[3] - seconds[2], rel=0.1)
    assert min(leads) == 0 and leads[2] < 0.1 * whole and leads[0] < 0.1 * whole
