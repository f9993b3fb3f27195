"""A session that measures where the bubbles are: real ranks, a host that tells of its spans."""

import contextlib
import time

import numpy as np
import pytest
import torch

from ft_plugins.bubbles.gate.gate import GATE_BYTES, Gate
from ft_plugins.bubbles.profile import Profiling
from ft_plugins.bubbles.timeline.record import EdgeFanout, Recorder
from ft_plugins.bubbles.timeline.timeline_values import Row
from ft_plugins.config import BaftConfig, Config
from ft_plugins.errors import UnsupportedError
from ft_plugins.events import Events, read
from ft_plugins.model.timeline import Kind, Profile, Span, Timeline
from ft_plugins.redundancy.neighbour import plan_neighbours
from ft_plugins.session import attach
from ft_plugins.systems.baft import Baft
from harness.plain_host import PlainHost

from .incarnation import context

SETTINGS = Profiling(warmup=1, iterations=2)


class Telling(PlainHost):
    """Tells of one forward of microbatch `rank` and an update in each iteration."""

    edges = None

    def install_edges(self, edges):
        self.edges = edges

    def iterate(self):
        assert self.edges is not None
        for kind, microbatch in ((Kind.FORWARD, self.rank), (Kind.UPDATE, -1)):
            self.edges.begin(kind, microbatch)
            self.edges.end(kind, microbatch)


def _begun(run_dir, rank=0, world=1, settings=SETTINGS, kind=Telling):
    """A host, its session and what measures it."""
    host = kind({"w": torch.zeros(4)}, rank=rank, world_size=world)
    session = attach(host, Config(), context(rank, world, run_dir), settings)
    assert session.measured is not None
    return host, session, session.measured


def _events(run_dir, name):
    return [event for event in read(run_dir / "events.jsonl") if event.name == name]


def _run(session, host):
    session.resume()
    for step in range(1, 7):
        session.iteration_begin(step)
        host.iterate()
        session.iteration_end(step)
    session.shutdown()


def _train(rank, world, run_dir):
    host, session, measured = _begun(run_dir, rank, world)
    _run(session, host)
    return measured.profile


def test_after_the_first_iterations_every_rank_knows_the_spans_of_all(ranks, tmp_path, capfd):
    first, second = ranks(_train, 2, tmp_path)
    assert first is not None and first == second
    for rank, timeline in enumerate(first.timelines):
        assert timeline.rank == rank
        assert timeline.shape == ((Kind.FORWARD, rank, 0), (Kind.UPDATE, -1, 0))
    done = _events(tmp_path, "profile.completed")
    assert sorted((event.rank, event.fields["spans"]) for event in done) == [(0, 2), (1, 2)]
    printed = capfd.readouterr().out
    assert printed.count("where an iteration's time goes") == 1, "by one rank"
    assert len(printed.split("time goes\n")[1].strip().splitlines()) == 3, "a head, and a line for each rank"


def test_a_host_without_spans_is_refused_by_name_and_only_if_asked():
    host = PlainHost({"w": torch.zeros(4)})
    with pytest.raises(UnsupportedError, match="a plain torch loop has no pipeline"):
        attach(host, Config(), context(0, 1), SETTINGS)
    session = attach(host, Config(), context(0, 1))
    assert session.measured is None
    session.iteration_begin(1)
    session.iteration_end(1)


def _plan(rank, world, run_dir, link_mbps=8_000.0):
    """Train with copies that are planned by what was measured."""
    host, session, measured = _begun(run_dir, rank, world)
    measured.baft = Baft(rank, BaftConfig(link_mbps=link_mbps), session._events)
    gate = Gate(np.zeros(GATE_BYTES + 8, dtype=np.uint8))
    measured.baft.use_gate(gate, plan_neighbours(("n0", "n1"), ((0, 1),), (8, 16)))
    _run(session, host)


def test_every_rank_tells_its_iteration_and_what_is_planned_in_it(ranks, tmp_path):
    ranks(_plan, 2, tmp_path)
    told = sorted(_events(tmp_path, "timeline.recorded"), key=lambda e: e.rank)
    rows = [Row.read(event.rank, event.fields) for event in told]
    assert [(row.rank, row.receiver, row.nbytes) for row in rows] == [(0, 1, 8), (1, 0, 16)]
    assert len({event.fields["iteration"] for event in told}) == 1 and told[0].fields["iteration"] > 0
    assert all([kind for kind, _, _ in row.spans] == [Kind.FORWARD, Kind.UPDATE] for row in rows)


def test_where_nobody_knows_what_links_carry_one_line_says_what_is_assumed(ranks, tmp_path, capfd):
    said = "10000 megabits per second are assumed"
    ranks(_plan, 2, tmp_path)
    assert said not in capfd.readouterr().out, "it was configured"
    ranks(_plan, 2, tmp_path, None)
    assert capfd.readouterr().out.count(said) == 1, "by one rank"


def _apart(rank, world, run_dir, faultless=True):
    """Iterations of a version, and whose plans this rank knows, where ranks 0 and 2 share no links with 1 and 3."""
    host, session, measured = _begun(run_dir, rank, world)
    measured.baft = Baft(rank, BaftConfig(), session._events)
    gate = Gate(np.zeros(GATE_BYTES + 8, dtype=np.uint8))
    links = {0: 1e9, 1: 1e9 if faultless else 0.0, 2: 1e9, 3: 1e9}
    measured.baft.use_gate(gate, plan_neighbours(("n0", "n1", "n2", "n3"), ((0, 2), (1, 3)), (8, 8, 8, 10**10)), links)
    _run(session, host)
    return gate.planned, [copy.rank for copy in measured.baft._sharing]


def test_all_ranks_go_by_the_iterations_of_the_slowest_and_one_says_which_it_is(ranks, tmp_path, capfd):
    planned, together = zip(*ranks(_apart, 4, tmp_path), strict=True)
    assert together == ([0, 2], [1, 3], [0, 2], [1, 3])
    assert len(set(planned)) == 1 and planned[0] > 100, "10 GB at 1 GB/s, in iterations of less than 0.1 s"
    printed, told = capfd.readouterr()
    assert printed.count(f"a version every {planned[0]} iteration(s)") == 1, "by one rank"
    assert "2 ranks share no links with these" in printed and "not be planned" not in told
    most = f"The ranks that share links with rank 1 need the most iterations, {planned[0]}"
    assert printed.rstrip().endswith(most), "the first of the nodes that rank 3 shares links with"


def test_where_some_ranks_cannot_plan_the_others_do_and_one_line_says_so(ranks, tmp_path, capfd):
    planned, _ = zip(*ranks(_apart, 4, tmp_path, False), strict=True)
    assert planned == (1, 0, 1, 0)
    _, told = capfd.readouterr()
    lines = [line for line in told.splitlines() if "profile.lost" in line]
    assert len(lines) == 1 and "bubbles of 2 ranks could not be planned" in lines[0] and "rank 1" in lines[0]
    events = _events(tmp_path, "profile.lost")
    lost = {event.rank: event.fields["reason"] for event in events}
    assert "link from position 1 to 3 has no bandwidth" in lost[1] and "no bandwidth" in lost[3] and 2 not in lost


def test_copies_are_held_in_the_iterations_that_are_recorded_and_one_in_which_they_went_is_left_out(tmp_path):
    host, session, measured = _begun(tmp_path, settings=Profiling(warmup=2, iterations=3))
    gate = Gate(np.zeros(GATE_BYTES, dtype=np.uint8))
    measured.baft = Baft(0, BaftConfig(), Events("n", 0))
    measured.baft.use_gate(gate, plan_neighbours(("n0", "n1"), ((0, 1),), (8, 8)))
    session.resume()
    seen = []
    for step in range(1, 8):
        session.iteration_begin(step)
        found = gate.read()
        seen.append(None if found is None else found.windows[0][2])
        host.iterate()
        if step == 4:
            gate.count_move()  # a frame that the snapshot process had taken before
        session.iteration_end(step)
        assert (gate.read() is not None) is (step in (3, 4, 5)), "held until the next one begins"
    session.shutdown()
    assert seen == [None, None, 0, 0, 0, None, None]
    (done,) = _events(tmp_path, "profile.completed")
    assert done.fields["left_out"] == [4]


class Paced(Telling):
    """Computes for 20 ms, then waits for `seconds` for a message."""

    seconds = 0.02

    def iterate(self):
        assert self.edges is not None
        for kind in (Kind.FORWARD, Kind.RECV, Kind.UPDATE):
            self.edges.begin(kind)
            time.sleep({Kind.FORWARD: 0.02, Kind.RECV: self.seconds}.get(kind, 0.0))
            self.gates.append(self.gate.read())
            self.edges.end(kind)


def _replan(rank, world, run_dir):
    """What the gate says in each receive: how many bytes may go in how many ms, of a plan or held."""
    settings = Profiling(warmup=1, iterations=3, watch_every=1, ask_every=4, tolerance=0.5, misses=2)
    host, session, measured = _begun(run_dir, rank, world, settings, Paced)
    host.gate, host.gates = Gate(np.zeros(GATE_BYTES, dtype=np.uint8)), []
    # 1 kB/ms. By its clock no bubble is late, however busy this machine is: such would be left alone
    measured.baft = Baft(rank, BaftConfig(link_mbps=8.0), Events("n", rank), clock_ns=lambda: 0)
    host.edges = EdgeFanout(measured.baft, measured.edges)
    measured.baft.use_gate(host.gate, plan_neighbours(("n0", "n1"), ((0, 1),), (10_000, 10_000)))
    session.resume()
    seen = []
    for step in range(1, 31):
        host.seconds = 0.02 if step < 10 else 0.1
        host.gates.clear()
        session.iteration_begin(step)
        host.iterate()
        session.iteration_end(step)
        receiving = host.gates[1]
        phase = "held" if receiving and not receiving.windows[0][2] else "planned" if receiving else "closed"
        length = (receiving.windows[0][1] - receiving.windows[0][0]) // 1_000_000 if receiving else 0
        seen.append((phase, length))
        assert host.gates[0] is None or phase == "held", "open while it computes"
    session.shutdown()
    return seen


def test_a_profile_that_no_longer_fits_is_measured_and_planned_anew_and_the_gate_is_open_for_less_meanwhile(
    ranks, tmp_path
):
    first, second = ranks(_replan, 2, tmp_path)
    assert [phase for phase, _ in first] == [phase for phase, _ in second], "all ranks in step"
    phases = [phase for phase, _ in first]
    assert phases[:7] == ["closed", "held", "held", "held", "closed", "closed", "closed"]
    again = phases.index("held", 7)
    assert set(phases[7:again]) == {"planned"} and phases[again : again + 3] == ["held"] * 3
    lengths = [length for phase, length in first[7:again]]
    assert again > 10 and max(lengths) < 90, "longer bubbles are not used before they were measured"
    assert max(length for phase, length in first[again + 3 :] if phase == "planned") >= 90
    plans = _events(tmp_path, "profile.completed")
    assert len(plans) >= 4, "two of each rank"


class Unplannable(Baft):
    """Its bubbles cannot be planned at first."""

    fails = True

    def plan(self, profile):
        if self.fails:
            raise IndexError("no such slot")
        return super().plan(profile)


def test_a_plan_that_fails_ends_neither_training_nor_anything_else(tmp_path):
    host, session, measured = _begun(tmp_path)
    gate = Gate(np.zeros(GATE_BYTES + 8, dtype=np.uint8))
    baft = Unplannable(0, BaftConfig(link_mbps=8_000.0), Events("n", 0))
    baft.use_gate(gate, plan_neighbours(("n0", "n1"), ((0, 1),), (8, 8)))
    measured.baft = baft
    _run(session, host)
    (lost,) = _events(tmp_path, "profile.lost")
    assert "IndexError: no such slot" in lost.fields["reason"]
    assert gate.read() is None and gate.planned == 0
    baft.fails = False
    facts = Profile(tuple(Timeline(rank, 1.0, (Span(Kind.FORWARD, 0.0, 0.5),)) for rank in range(2)))
    measured._agreed([measured._planned(facts)])
    assert gate.planned == 1, "another profile is planned with"


def test_where_iterations_can_no_longer_be_measured_a_plan_made_before_holds_no_longer(tmp_path, monkeypatch):
    """Nobody would notice that it fits no more: then nothing would go but a trickle, for as long as the job runs."""
    host, session, measured = _begun(tmp_path, settings=Profiling(warmup=1, iterations=1, watch_every=1, ask_every=2))
    gate = Gate(np.zeros(GATE_BYTES + 8, dtype=np.uint8))
    session.resume()
    for step in range(1, 7):
        session.iteration_begin(step)
        host.iterate()
        session.iteration_end(step)
    measured.baft = Baft(0, BaftConfig(link_mbps=8_000.0), Events("n", 0))
    measured.baft.use_gate(gate, plan_neighbours(("n0", "n1"), ((0, 1),), (8, 8)))
    facts = Profile(tuple(Timeline(rank, 1.0, (Span(Kind.FORWARD, 0.0, 0.5),)) for rank in range(2)))
    measured._agreed([measured._planned(facts)])
    assert gate.planned == 1

    def fails(recorder):
        raise RuntimeError("the clock of the device is gone")

    monkeypatch.setattr(Recorder, "take", fails)
    for step in range(7, 13):
        session.iteration_begin(step)
        host.iterate()
        session.iteration_end(step)
    session.shutdown()
    assert gate.planned == 0 and gate.read() is None
    (lost,) = _events(tmp_path, "profile.lost")
    assert "the clock of the device is gone" in lost.fields["reason"] and lost.fields["reason"].endswith(
        "restart the job to use bubbles again"
    )


def test_a_log_on_a_full_disk_loses_lines_and_never_the_job(tmp_path):
    host = Telling({"w": torch.zeros(4)}, rank=0, world_size=1)
    session = attach(host, Config(), context(0, 1, tmp_path), SETTINGS)
    with contextlib.suppress(OSError), open("/dev/full", "w") as full, contextlib.redirect_stdout(full):
        _run(session, host)
        assert session.measured is not None and session.measured.profile is not None
        told = True
    assert told, "training went on"
