"""A session that measures where the bubbles are: real ranks, a host that tells of its spans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ft_plugins.adapters.plain import PlainHost
from ft_plugins.bubbles.gate import GATE_BYTES, Gate
from ft_plugins.bubbles.plan import BubblePlan
from ft_plugins.bubbles.profile import Profiling
from ft_plugins.bubbles.shown import Row
from ft_plugins.config import BaftConfig, Config, LaunchContext
from ft_plugins.errors import UnsupportedError
from ft_plugins.events import Events, read
from ft_plugins.model.host import Edges
from ft_plugins.model.timeline import Kind, Profile
from ft_plugins.redundancy.neighbour import plan_neighbours
from ft_plugins.session import attach
from ft_plugins.systems.baft import Baft

Ranks = Callable[..., list[Any]]
SETTINGS = Profiling(warmup=1, iterations=2)


class Telling(PlainHost):
    """Tells of one forward of microbatch `rank` and an update in each iteration."""

    edges: Edges | None = None

    def install_edges(self, edges: Edges) -> None:
        self.edges = edges

    def iterate(self) -> None:
        assert self.edges is not None
        for kind, microbatch in ((Kind.FORWARD, self.rank), (Kind.UPDATE, -1)):
            self.edges.begin(kind, microbatch)
            self.edges.end(kind, microbatch)


def _train(rank: int, world: int, run_dir: Path) -> Profile | None:
    host = Telling({"w": torch.zeros(4)}, rank=rank, world_size=world)
    place = LaunchContext(None, run_dir, 0, None, rank, rank, world, world, 0, 0)
    session = attach(host, Config(), place, SETTINGS)
    session.resume()
    for step in range(1, 6):
        session.iteration_begin(step)
        host.iterate()
        session.iteration_end(step)
    session.shutdown()
    assert session.profiler is not None
    return session.profiler.profile


def test_after_the_first_iterations_every_rank_knows_the_spans_of_all(
    ranks: Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = ranks(_train, 2, tmp_path)
    assert first is not None and first == second
    for rank, timeline in enumerate(first.timelines):
        assert timeline.rank == rank
        assert timeline.shape == ((Kind.FORWARD, rank, 0), (Kind.UPDATE, -1, 0))
    done = sorted(read(tmp_path / "events.jsonl"), key=lambda event: event.rank)
    assert [(event.name, event.rank, event.fields["spans"]) for event in done] == [
        ("profile.done", 0, 2),
        ("profile.done", 1, 2),
    ]
    printed = capfd.readouterr().out
    assert printed.count("where an iteration's time goes") == 1, "by one rank"
    assert len(printed.split("time goes\n")[1].strip().splitlines()) == 3, "a head, and a line for each rank"


def _place() -> LaunchContext:
    return LaunchContext(None, None, 0, None, 0, 0, 1, 1, 0, 0)


def test_a_host_without_spans_is_refused_by_name_and_only_if_asked() -> None:
    host = PlainHost({"w": torch.zeros(4)})
    with pytest.raises(UnsupportedError, match="a training loop of torch alone has no pipeline"):
        attach(host, Config(), _place(), SETTINGS)
    session = attach(host, Config(), _place())
    assert session.profiler is None and session.edges is None
    session.iteration_begin(1)
    session.iteration_end(1)


def _plan(rank: int, world: int, run_dir: Path) -> None:
    """Train with copies that are planned by what was measured."""
    host = Telling({"w": torch.zeros(4)}, rank=rank, world_size=world)
    session = attach(host, Config(), LaunchContext(None, run_dir, 0, None, rank, rank, world, world, 0, 0), SETTINGS)
    session._baft = Baft(rank, BaftConfig(link_mbps=8_000.0), session._events)
    gate = Gate(np.zeros(GATE_BYTES + 8, dtype=np.uint8))
    session._baft.guard(gate, plan_neighbours(("n0", "n1"), ((0, 1),), (8, 16)))
    session.resume()
    for step in range(1, 6):
        session.iteration_begin(step)
        host.iterate()
        session.iteration_end(step)
    session.shutdown()


def test_every_rank_tells_its_iteration_and_what_is_planned_in_it(ranks: Ranks, tmp_path: Path) -> None:
    ranks(_plan, 2, tmp_path)
    told = sorted((e for e in read(tmp_path / "events.jsonl") if e.name == "baft.timeline"), key=lambda e: e.rank)
    rows = [Row.read(event.rank, event.fields) for event in told]
    assert [(row.rank, row.receiver, row.nbytes) for row in rows] == [(0, 1, 8), (1, 0, 16)]
    assert all([kind for kind, _, _ in row.spans] == [Kind.FORWARD, Kind.UPDATE] for row in rows)


class Unplannable(Baft):
    """Its bubbles cannot be planned."""

    def plan(self, profile: Profile) -> BubblePlan | None:
        raise IndexError("no such slot")


def test_a_plan_that_fails_ends_neither_training_nor_anything_else(tmp_path: Path) -> None:
    host = Telling({"w": torch.zeros(4)}, rank=0, world_size=1)
    session = attach(host, Config(), LaunchContext(None, tmp_path, 0, None, 0, 0, 1, 1, 0, 0), SETTINGS)
    gate = Gate(np.zeros(GATE_BYTES + 8, dtype=np.uint8))
    baft = Unplannable(0, BaftConfig(link_mbps=8_000.0), Events("n", 0))
    baft.guard(gate, plan_neighbours(("n0", "n1"), ((0, 1),), (8, 8)))
    session._baft = baft
    session.resume()
    for step in range(1, 6):
        session.iteration_begin(step)
        host.iterate()
        session.iteration_end(step)
    session.shutdown()
    (lost,) = [event for event in read(tmp_path / "events.jsonl") if event.name == "profile.lost"]
    assert "IndexError: no such slot" in lost.fields["reason"]
    assert gate.read() is None
