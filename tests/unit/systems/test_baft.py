"""When a rank's gate is open: by the plan that all ranks make of one profile, and by nothing else."""

from dataclasses import replace

import numpy as np
import pytest

from ft_plugins.bubbles.gate.gate import GATE_BYTES, STEADY, Gate
from ft_plugins.bubbles.gate.pacing_limits import LIMITS
from ft_plugins.config import BaftConfig
from ft_plugins.errors import ConfigError
from ft_plugins.events import Events
from ft_plugins.model.timeline import Kind, Profile, SenderFacts, Span, Timeline
from ft_plugins.redundancy.neighbour import plan_neighbours
from ft_plugins.systems.baft import HOLD_SECONDS, Baft

NODES = ("n0", "n1", "n2", "n3")  # two stages on n0 and n2, and on n1 and n3
STAGES = ((0, 2), (1, 3))
NBYTES = (10_000_000, 8_000_000, 9_000_000, 7_000_000)
CONFIG = BaftConfig(link_mbps=8_000.0, reserve_ms=1.0)  # 1 GB/s
ROOM = GATE_BYTES + 8


def copies():
    return plan_neighbours(NODES, STAGES, NBYTES)


def timeline(rank, *spans):
    return Timeline(rank, 1.0, tuple(Span(kind, begin, end) for kind, begin, end in spans))


def idle_together():
    """All ranks wait from 0.2 to 0.6 s, in a receive that begins a little later."""
    return Profile(
        tuple(
            timeline(
                rank,
                (Kind.FORWARD, 0.0, 0.2),
                (Kind.RECV, 0.25, 0.6),
                (Kind.BACKWARD, 0.6, 0.9),
                (Kind.UPDATE, 0.9, 1.0),
            )  # fmt: skip
            for rank in range(4)
        )
    )


def sending(plan, rank):
    (found,) = (one for one in plan.senders if one.transfer.sender == rank)
    return found


class Rank:
    """One rank's BAFT, with its gate in memory of its own."""

    def __init__(self, rank, config=CONFIG, pipelines=()):
        self.written = []
        self.now = 0.0  # seconds
        events = Events("n", rank)
        events.subscribe(self.written.append)
        self.baft = Baft(rank, config, events, pipelines, lambda: round(1e9 * self.now))
        self.gate = Gate(np.zeros(ROOM, dtype=np.uint8))
        self.baft.use_gate(self.gate, copies())

    def plan(self, profile, others=0):
        """With ranks elsewhere in the job that find they need so many iterations."""
        return self.baft.adopt(max(self.baft.plan(profile), others))

    @property
    def open(self):
        return self.gate.read() is not None

    @property
    def held_for(self):
        """Seconds until a held gate is released by itself."""
        found = self.gate.read()
        assert found is not None and [window[2] for window in found.windows] == [0]
        return found.windows[0][1] / 1e9 - self.now

    def play(self, late=0.0):
        """Whether the gate is open after each edge of an iteration as profiled, but for what is `late` in forward."""
        seen, began = [], self.now
        self.baft.iteration_begin()
        seen.append(self.open)
        for span in idle_together().timelines[0].spans:
            self.now = began + span.begin + (late if span.begin else 0.0)
            self.baft.begin(span.kind)
            seen.append(self.open)
            self.now = began + span.end + late
            self.baft.end(span.kind)
            seen.append(self.open)
        self.baft.iteration_end()
        return [*seen, self.open]

    def forward(self):
        """The first pass of an iteration, as profiled."""
        self.baft.iteration_begin()
        self.baft.begin(Kind.FORWARD)
        self.now += 0.2
        self.baft.end(Kind.FORWARD)


def test_a_gate_is_open_in_its_bubble_and_nowhere_else():
    rank = Rank(2)
    assert rank.play() == [False] * 10, "nothing is planned yet"
    plan = rank.plan(idle_together())
    assert plan is not None and not plan.paced_by_rate and plan.iterations == rank.gate.planned == 1
    # after forward, through the receive, until backward begins
    assert rank.play() == [False, False, True, True, True, False, False, False, False, False]


def test_a_bubble_that_begins_at_another_time_than_planned_is_left_alone():
    rank = Rank(2)
    rank.plan(idle_together())
    used = [False, False, True, True, True, False, False, False, False, False]
    assert rank.play(late=0.249) == rank.play(late=-0.199) == used, "in an iteration of 1 s"
    openings = rank.gate.openings
    assert rank.play(late=0.251) == rank.play(late=0.3) == [False] * 10
    assert rank.gate.openings == openings + 2, "its SMP sees that it lives"
    assert rank.play() == used, "one iteration tells nothing of the next"


def test_while_a_message_is_under_way_between_stages_nothing_goes():
    """Ranks 2 and 3 are the second stage. Their backward pass ends at 0.58 s, that of the first one begins at 0.6."""
    quick = idle_together().timelines[:2]
    later = [
        timeline(rank, (Kind.FORWARD, 0.0, 0.2), (Kind.BACKWARD, 0.55, 0.58), (Kind.UPDATE, 0.9, 1.0))
        for rank in (2, 3)
    ]
    for pipelines, used, seconds in (((), [(0.2, 0.55), (0.58, 0.6)], 0.0), (STAGES, [(0.2, 0.55)], 0.02)):
        plan = (rank := Rank(0, pipelines=pipelines)).plan(Profile((*quick, *later)))
        assert plan is not None
        found = [(0.2 + one.begin - 0.001, 0.2 + one.deadline + 0.001) for one in plan.senders[0].every]
        assert found == [pytest.approx(window) for window in used]
        assert rank.written[-1].fields["message_seconds"] == pytest.approx(seconds)


def test_what_is_allowed_is_what_the_link_carries_without_the_reserved_ends():
    rank = Rank(2)
    rank.plan(idle_together())
    rank.forward()
    found = rank.gate.read()
    assert found is not None and len(found.windows) == 1
    ((begin, deadline, nbytes),) = found.windows
    assert deadline - begin == pytest.approx(398e6, abs=2)  # 400 ms of bubble, 1 ms at both ends; ns are rounded
    assert nbytes == pytest.approx(398e6, abs=1)  # at 1 byte a nanosecond; its node sends nothing else


def test_the_link_is_what_was_named_else_what_was_measured_else_a_usual_one():
    def planned(mbps, links):
        rank = Rank(2, BaftConfig(link_mbps=mbps))
        rank.baft.use_gate(rank.gate, copies(), links)
        plan = rank.plan(idle_together())
        assert plan is not None
        return sending(plan, 2).every[0].nbytes, rank.written[-1].fields["link_mbps"], rank.gate.link_rate

    measured = {0: 5e8, 1: 4e8, 2: 3e8, 3: 2e8}  # rank 2 stands on position 2, its copy goes to position 0
    assert planned(8_000.0, measured) == (pytest.approx(398e6, abs=1), 8_000.0, pytest.approx(1e9))
    assert planned(None, measured) == (pytest.approx(0.3 * 398e6, abs=1), 2_400.0, pytest.approx(3e8))
    assert planned(None, {}) == (pytest.approx(1.25 * 398e6, abs=1), 10_000.0, pytest.approx(1.25e9))


def test_ranks_that_share_links_find_the_same_plan():
    plans = [Rank(rank).plan(idle_together()) for rank in range(4)]
    assert plans[0] == plans[2] and plans[1] == plans[3]
    sent = [[(one.transfer.sender, one.transfer.nbytes) for one in plan.senders] for plan in plans[:2] if plan]
    assert sent == [[(0, NBYTES[0]), (2, NBYTES[2])], [(1, NBYTES[1]), (3, NBYTES[3])]]


def test_all_ranks_go_by_what_the_job_has_agreed_on():
    rank = Rank(0)
    assert rank.baft.plan(idle_together()) == 1 and rank.gate.planned == 0 and rank.play() == [False] * 10
    plan = rank.baft.adopt(3)
    assert plan is not None and (plan.iterations, rank.gate.planned, rank.written[-1].fields["iterations"]) == (3, 3, 3)
    rank.forward()
    assert rank.open
    assert rank.baft.adopt(4) is None and rank.gate.planned == 3, "once for each plan"
    for forget in (rank.baft.drop_plan, lambda: rank.baft.use_gate(rank.gate, copies())):
        rank.baft.plan(idle_together())
        forget()
        assert rank.baft.adopt(4) is None and rank.gate.planned == 0


def test_what_the_ranks_tell_each_other_enters_the_plan_of_all():
    facts = tuple(SenderFacts(0.3 + rank / 100, 1000 * rank) for rank in range(4))
    timelines = idle_together().timelines
    plan = Rank(0).plan(Profile(timelines, facts))
    assert plan is not None
    assert [one.transfer.nbytes for one in plan.senders] == [NBYTES[0], NBYTES[2] + 2000]
    # the slowest capture is through at 0.33 s of a bubble from 0.2 to 0.6: what fits behind it is less
    quick = Rank(0).plan(Profile(timelines, (replace(facts[0], ready_seconds=0.0),) * 4))
    assert quick is not None
    (first, early) = (one.senders[0].iterations[0][0].nbytes for one in (plan, quick))
    assert first == early == plan.senders[0].transfer.nbytes, "there is room enough behind it"
    late = Rank(0).plan(Profile(timelines, (*facts[:3], replace(facts[3], ready_seconds=0.5985))))
    assert late is not None and late.iterations == 2, "0.5 ms are left of the first bubble"


def test_a_window_that_would_be_over_before_a_frame_is_on_its_way_is_none():
    def idle(*ends):
        """All wait from 0.2 to 0.2 + end, from 0.5 to 0.5 + end, ..."""
        edges = [(0.2 + 0.3 * place, 0.2 + 0.3 * place + end) for place, end in enumerate(ends)]
        computed = zip([0.0, *(end for _, end in edges)], [*(begin for begin, _ in edges), 1.0], strict=True)
        spans = [(Kind.FORWARD, begin, end) for begin, end in computed]
        return Profile(tuple(timeline(rank, *spans) for rank in range(4)))

    short, enough, long = (2e-3 + seconds for seconds in (1.9e-3, 2.1e-3, 0.02))  # beside 1 ms at both ends
    mixed = Rank(0).plan(idle(short, long, enough))
    assert mixed is not None and [grant.bubble for grant in mixed.senders[0].every] == [1, 2]
    only = Rank(0).plan(idle(short, short))
    assert only is not None and len(only.paced_by_rate) == 2 and "long enough" in only.senders[0].reason
    slow = Rank(0, BaftConfig(link_mbps=8.0))  # 1 KB a millisecond
    slow.baft.use_gate(slow.gate, plan_neighbours(NODES, STAGES, (50_000,) * 4))
    patient = slow.plan(idle(enough, long, short))
    assert patient is not None and [grant.bubble for grant in patient.senders[0].every] == [0, 1]
    assert min(grant.nbytes for grant in patient.senders[0].every) < 3000 < LIMITS.least_frame_bytes


@pytest.mark.parametrize(("granularity", "nbytes"), [("bytes", 398_000_000), ("layer", 300_000_000)])
def test_by_layers_the_gate_lets_through_what_whole_layers_have(granularity, nbytes):
    """398 MB fit into the bubble; layers of 300 and 100 MB and more."""
    layers = (300_000_000, 100_000_000)
    rank = Rank(2, BaftConfig(link_mbps=8_000.0, granularity=granularity))
    rank.baft.use_gate(rank.gate, plan_neighbours(NODES, STAGES, (sum(layers),) * 4))
    plan = rank.plan(replace(idle_together(), senders=(SenderFacts(layers=layers),) * 4))
    assert plan is not None and not plan.paced_by_rate and plan.granularity.value == granularity
    rank.forward()
    found = rank.gate.read()
    assert found is not None and found.windows[0][2] == pytest.approx(nbytes, abs=1)
    (event,) = rank.written
    assert event.fields["granularity"] == granularity and event.fields["fill_layers"] == plan.fill_layers


def test_by_bytes_a_rank_asks_only_how_full_its_own_layers_would_fill():
    """Of every rank it takes longer than all else that is planned, in the step path; what goes when is the same."""
    layers = (300_000_000, 100_000_000)
    facts = replace(idle_together(), senders=(SenderFacts(layers=layers),) * 4)

    def planned(rank, granularity):
        one = Rank(rank, BaftConfig(link_mbps=8_000.0, granularity=granularity))
        one.baft.use_gate(one.gate, plan_neighbours(NODES, STAGES, (sum(layers),) * 4))
        found = one.plan(facts)
        assert found is not None
        return found

    def asked(plan):
        return [one.transfer.sender for one in plan.senders if one.transfer.layers]

    first, last, all_layers = planned(0, "bytes"), planned(2, "bytes"), planned(2, "layer")
    assert (asked(first), asked(last), asked(all_layers)) == ([0], [2], [0, 2])
    assert [one.every for one in first.senders] == [one.every for one in last.senders]
    assert first.iterations == last.iterations and first.fill_layers is not None


def test_who_shares_no_bubble_goes_by_a_rate_over_the_whole_iteration():
    busy = [timeline(rank, (Kind.FORWARD, 0.0, 0.5), (Kind.BACKWARD, 0.5, 1.0)) for rank in range(4)]
    rank = Rank(0)
    plan = rank.plan(Profile(tuple(busy)))
    assert plan is not None and len(plan.paced_by_rate) == 2
    rank.baft.iteration_begin()
    rank.baft.begin(Kind.FORWARD)
    found = rank.gate.read()
    assert found is not None, "computing does not close it"
    assert found.windows[0][2] == NBYTES[0] and found.bubble == STEADY
    assert rank.gate.link_rate == pytest.approx(1e9), "its node sends nothing else"
    (event,) = rank.written
    assert event.name == "bubbles.planned" and "no bubbles" in event.fields["reason"]
    rank.plan(Profile(tuple(busy)), others=4)
    rank.baft.iteration_begin()
    found = rank.gate.read()
    assert found is not None and found.windows[0][2] == NBYTES[0] // 4, "the others take so long"


def test_while_iterations_are_recorded_nothing_goes_whatever_was_planned_before():
    rank = Rank(2)
    for planned in (False, True):
        if planned:
            rank.plan(idle_together())
        rank.baft.iteration_begin(held=True)
        for kind in (Kind.FORWARD, Kind.RECV, Kind.BACKWARD, Kind.UPDATE):
            rank.baft.begin(kind)
            rank.baft.end(kind)
            found = rank.gate.read()
            assert found is not None and [window[2] for window in found.windows] == [0]
        rank.baft.iteration_end()
        assert rank.held_for == 1.0, "what began to go now would be under way in the next one"
    assert rank.play() == [False, False, True, True, True, False, False, False, False, False], "as before"
    rank.baft.release_gate()
    rank.baft.iteration_begin(held=True)
    assert not rank.open and rank.baft.moved == 0, "its memory may be gone"


def test_an_iteration_that_lasts_is_held_to_its_end_and_that_of_a_dead_trainer_is_not():
    rank = Rank(2)
    rank.baft.iteration_begin(held=True)
    for _ in range(6):  # passes of a minute and a half
        rank.now += 90.0
        rank.baft.begin(Kind.FORWARD)
        found = rank.gate.read()
        assert found is not None and found.windows[0][1] == round(1e9 * (rank.now + HOLD_SECONDS))
        openings = rank.gate.openings
        rank.now += 20.0
        rank.baft.end(Kind.FORWARD)
        assert rank.gate.openings == openings, "nothing is written at every edge"
    rank.baft.iteration_end()
    assert rank.held_for == 1.0


def test_one_that_gives_a_plan_up_can_plan_again():
    rank = Rank(2)
    rank.plan(idle_together())
    rank.forward()
    rank.baft.drop_plan()
    assert not rank.open and rank.play() == [False] * 10 and rank.gate.planned == 0
    assert rank.plan(idle_together()) is not None
    rank.forward()
    assert rank.open and rank.gate.planned == 1


def test_one_that_lets_go_closes_its_gate_and_opens_it_no_more():
    rank = Rank(2)
    rank.plan(idle_together())
    rank.forward()
    assert rank.open
    rank.baft.release_gate()
    assert not rank.open and rank.play() == [False] * 10 and rank.gate.planned == 0
    assert rank.plan(idle_together()) is None


def test_a_profile_without_a_rank_is_refused_and_not_guessed():
    with pytest.raises(ConfigError, match="rank 2 has no timeline"):
        Rank(0).plan(Profile(idle_together().timelines[:2]))
