"""Who sits where, against a model that tries every seating; rounds as their lead sees them, in made-up time."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.errors import ConfigError
from ft_plugins.launcher.rounds.field_types import LIMIT
from ft_plugins.launcher.rounds.round_machine import Application, Phase, Place, Roster, RoundMachine
from ft_plugins.launcher.rounds.rounds import (
    ALL,
    Candidate,
    Rules,
    Seat,
    Turnout,
    left_out,
    natural,
    ranks,
    size_of,
    why_not_drained,
)

SILENCE = 10.0


def size_now(rules, candidates, waited):
    return size_of(rules, Turnout.of(candidates), waited)


def seated(*names, number=1):
    """Nodes that sat in this order in round `number`."""
    return [Candidate(name, Seat(number, rank, len(names))) for rank, name in enumerate(names)]


# ---- who sits where ----


def test_the_first_round_is_in_the_order_of_the_names_read_as_people_do():
    names = ["node10", "node2", "node1", "Node1"]
    assert ranks([Candidate(name) for name in names], 4) == {"Node1": 0, "node1": 1, "node2": 2, "node10": 3}
    as_read = ["r2", "r2n", "r2n0", "r2n1", "r2n10", "r10n1"]
    assert sorted(sorted(as_read), key=natural) == as_read


def test_a_substitute_takes_the_vacant_rank_whatever_it_is_called():
    survivors = [found for found in seated("b", "c", "d", "e") if found.node != "d"]
    for name in ("a", "cc", "z"):
        assert ranks([*survivors, Candidate(name)], 4) == {"b": 0, "c": 1, name: 2, "e": 3}


def test_in_a_smaller_round_those_keep_their_rank_who_can():
    survivors = [found for found in seated("a", "b", "c", "d") if found.node != "b"]
    assert ranks(survivors, 3) == {"a": 0, "d": 1, "c": 2}
    assert ranks(survivors, 2) == {"a": 0, "c": 1}  # d waits as a spare


def test_a_node_of_an_older_round_has_its_rank_back_before_new_ones_choose():
    now = seated("a", "b", number=7)
    assert ranks([*now, Candidate("0"), Candidate("old", Seat(5, 3, 4))], 4) == {"a": 0, "b": 1, "0": 2, "old": 3}
    late = Candidate("late", Seat(5, 1, 4))  # b sits there since
    assert ranks([*now, Candidate("0"), late], 3) == {"a": 0, "b": 1, "0": 2}


def test_a_wanted_rank_is_given_if_nobody_has_it():
    first = [Candidate("a", wanted=2), Candidate("b"), Candidate("c", wanted=2)]
    assert ranks(first, 3) == {"a": 2, "b": 0, "c": 1}
    assert ranks([*seated("x", "y"), Candidate("w", wanted=1)], 3) == {"x": 0, "y": 1, "w": 2}


def test_a_leader_is_no_spare_where_a_rank_is_given_to_a_node_that_had_none():
    names = [Candidate(name) for name in ("a", "b", "z")]
    assert ranks(names, 2, "z") == {"a": 0, "z": 1} and ranks(names, 3, "z") == {"a": 0, "b": 1, "z": 2}
    assert ranks(names, 2, "b") == ranks(names, 2, "not here") == {"a": 0, "b": 1}
    assert ranks([*seated("a", "b"), Candidate("z")], 2, "z") == {"a": 0, "b": 1}, "they hold state"
    survivors = seated("a", "b", "c")[1:]
    assert ranks([*survivors, Candidate("0"), Candidate("z")], 3, "z") == {"z": 0, "b": 1, "c": 2}
    rounds = Rounds(Rules(2, 2))
    rounds.gathering = RoundMachine(rounds.rules, SILENCE, None, rounds.now, "z")
    rounds.come("a", "b", "z")
    rounds.pass_by(1)
    assert rounds.members == ["a", "z"] and rounds.gathering.waiting() == ["b"]


def test_two_of_one_name_or_too_few_are_a_mistake_of_the_caller():
    with pytest.raises(ValueError, match="different names"):
        ranks([Candidate("a"), Candidate("a")], 2)
    with pytest.raises(ValueError, match="3 nodes"):
        ranks([Candidate("a"), Candidate("b")], 3)


@pytest.mark.parametrize("wrong", [(0, 0, 1), (LIMIT + 1, 0, 1), (1, -1, 1), (1, 1, 1), (1, 0, LIMIT + 1)], ids=str)
def test_a_seat_is_of_a_round_from_1_and_has_a_rank_below_its_size(wrong):
    assert Seat(LIMIT, 0, LIMIT) > Seat(1, LIMIT - 1, LIMIT)
    with pytest.raises(ValueError, match="a rank below the size"):
        Seat(*wrong)


def model(candidates, size):
    """Every way to seat `size` of the candidates is looked at; the one that pleases most is taken."""
    last = max((found.seat.round for found in candidates if found.seat), default=0)
    newest = [found for found in candidates if found.seat and found.seat.round == last]
    by_age = sorted(
        (found for found in candidates if found.seat), key=lambda found: (-found.seat.round, found.seat.rank)
    )
    by_name = sorted(candidates, key=lambda found: natural(found.node))

    def pleases(seating):
        def at_own(found):
            return found.seat is not None and seating.get(found.node) == found.seat.rank

        def low(found):
            return -seating.get(found.node, size)

        return [
            sum(map(at_own, newest)),  # who was in the last round sits where it sat
            [low(found) for found in by_age if found in newest],  # or at all, as low as can be
            [at_own(found) for found in by_age],  # then who was in an older one
            [found.wanted is not None and seating.get(found.node) == found.wanted for found in by_name],
            [low(found) for found in by_name],
        ]

    seatings = (
        dict(zip((found.node for found in chosen), range(size), strict=True))
        for chosen in itertools.permutations(candidates, size)
    )
    return max(seatings, key=pleases)


@st.composite
def rooms(draw):
    names = draw(st.lists(st.sampled_from(["n1", "n2", "n10", "m", "a9", "z"]), min_size=1, max_size=5, unique=True))
    places = draw(st.permutations([(number, rank) for number in (3, 8) for rank in range(4)]))
    found = []
    for name, (number, rank) in zip(names, places, strict=False):
        seat = Seat(number, rank, 4) if draw(st.booleans()) else None
        found.append(Candidate(name, seat, draw(st.none() | st.integers(0, 3))))
    return found, draw(st.integers(1, len(names)))


@settings(max_examples=400, deadline=None)
@given(rooms(), st.randoms())
def test_the_seating_is_the_best_of_all(room, random):
    candidates, size = room
    found = ranks(candidates, size)
    assert sorted(found.values()) == list(range(size))
    assert found == model(candidates, size)
    random.shuffle(candidates)
    assert ranks(candidates, size) == found  # whoever came first
    new = [each.node for each in candidates if each.node in found and not each.seat]
    for leader in (each.node for each in candidates):
        led = ranks(candidates, size, leader)
        place = found.get(leader, max((found[node] for node in new), default=None))
        assert led.get(leader) == place, "it has a rank wherever one is given to a node that had none"
        assert {node: rank for node, rank in led.items() if node != leader}.items() <= found.items()


# ---- how large, and when ----


def test_a_first_round_waits_a_last_call_for_those_who_may_still_come():
    rules = Rules(2, 4, last_call=30, wait=300)
    nodes = [Candidate(name) for name in "abcd"]
    assert size_now(rules, nodes[:1], 1e9) == 0
    assert size_now(rules, nodes[:3], 29.9) == 0
    assert size_now(rules, nodes[:3], 30) == 3
    assert size_now(rules, nodes, 0) == 4
    assert size_now(rules, [*nodes, Candidate("e")], 0) == 4


def test_a_round_goes_on_at_once_when_all_are_back_and_else_waits_for_a_substitute():
    rules = Rules(2, 4, last_call=30, wait=300)
    last = seated("a", "b", "c")
    assert size_now(rules, last, 0) == 3  # as large as before: nobody is missing
    assert size_now(rules, last[:2], 299) == 0
    assert size_now(rules, last[:2], 300) == 2
    assert size_now(rules, [*last[:2], Candidate("new")], 299) == 0  # c may come back
    assert size_now(rules, [*last, Candidate("new")], 0) == 4


def test_only_allowed_sizes_are_taken():
    rules = Rules(4, 8, (8, 6, 4), wait=60)
    last = seated(*"abcdefgh")
    assert [rules.fit(count) for count in range(10)] == [0, 0, 0, 0, 4, 4, 6, 6, 8, 8]
    assert size_now(rules, last[:7], 59) == 0
    assert size_now(rules, last[:7], 60) == 6
    assert size_now(rules, last[:3], 1e9) == 0
    told = rules.among((4, 6, 8))  # by ranks, whose state is on these nodes
    assert size_now(told, last[:7], 1e9) == 0, "none of those that are back becomes a spare"
    assert size_now(told, last[:6], 60) == 6 and size_now(told, [*last[:7], Candidate("new")], 0) == 8
    asked = rules.among((4, 6, 8), spares_asked=True)
    assert size_now(asked, last[:7], 59) == 0, "a substitute is waited for first"
    assert size_now(asked, last[:7], 60) == 6 and size_now(asked, last[:3], 1e9) == 0
    with pytest.raises(ConfigError, match="sizes: expected .* 4 to 8.*found 2, 9"):
        Rules(4, 8, (2, 4, 9))


# ---- a round as its lead sees it ----


@dataclass
class Rounds:
    """A gathering and its nodes; each of them is heard of whenever time passes, unless it is `silent`: then its port
    does not answer either, unless it is only `busy`."""

    rules: Rules
    gathering: RoundMachine = field(init=False)
    now: float = 1000.0
    silent: set[str] = field(default_factory=set)
    busy: set[str] = field(default_factory=set)
    known: set[str] = field(default_factory=set)
    survivors: str = ""  # of a round of another leader

    def __post_init__(self):
        self.gathering = RoundMachine(self.rules, SILENCE, None, self.now)

    def come(self, *names, life=1, **seats):
        self.known |= {f"{name}/{life}" for name in names}
        return [
            self.gathering.apply(
                Application(name, f"{name}/{life}", f"{name}:1", seats.get(name), took_part=name in self.survivors),
                self.now,
            )
            for name in names
        ]

    def pass_by(self, seconds):
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            for token in self.known - self.silent:
                self.gathering.hear(token, self.gathering.roster.round, self.now)
            proposal = self.gathering.proposal
            if proposal and self.gathering.phase is Phase.PROPOSED:
                [rank0] = [token for token, rank in proposal.ranks.items() if rank == 0]
                if rank0 not in self.silent:
                    self.gathering.serve(rank0, "store:1")
            self.gathering.note_answers({f"{token[0]}:1": "" for token in self.silent - self.busy})
            self.gathering.step(self.now)

    @property
    def members(self):
        return [place.node for place in self.gathering.roster.members]


def test_a_node_that_no_longer_waits_is_not_watched_any_longer_unless_it_is_of_the_round():
    rounds = with_spares("x")
    rounds.come("a")
    assert "x/1" in rounds.gathering._alive
    for token in ("x/1", "a/1"):
        rounds.gathering.leave(token)
    assert "x/1" not in rounds.gathering._alive and "a/1" in rounds.gathering._alive


def test_a_round_is_complete_only_after_each_node_was_heard_of_since_it_was_chosen():
    rounds = Rounds(Rules(2, 2))
    rounds.come("a", "b")
    rounds.silent = {"b/1"}
    rounds.pass_by(5)
    assert rounds.gathering.phase is Phase.PROPOSED
    rounds.pass_by(7)  # b is given up; its place is open again
    assert rounds.gathering.phase is Phase.OPEN and rounds.gathering.waiting() == ["a"]
    rounds.come("c")
    rounds.pass_by(1)
    assert rounds.gathering.phase is Phase.COMPLETE and rounds.members == ["a", "c"]


def test_a_round_waits_for_a_node_that_is_being_checked_and_takes_a_spare_if_it_fails():
    rounds = with_spares("d", wait=60)
    rounds.come("a", "b", "c")
    rounds.now += 0.5
    rounds.gathering.step(rounds.now)
    assert rounds.gathering.phase is Phase.PROPOSED
    rounds.gathering.serve("a/1", "store:1")
    for _ in range(100):  # b lives all the time
        rounds.now += 1
        for token in ("a/1", "b/1", "c/1", "d/1"):
            rounds.gathering.hear(token, 1, rounds.now, ready=token != "b/1")
        rounds.gathering.step(rounds.now)
        assert rounds.gathering.phase is Phase.PROPOSED
    rounds.gathering.leave("b/1")
    rounds.gathering.refuse("b", "its check failed", rounds.now, "b/2")
    assert not rounds.gathering.refused, "another process on the node says so"
    rounds.gathering.refuse("b", "its check failed", rounds.now, "b/1")
    rounds.silent = {"b/1"}
    rounds.pass_by(2)  # less than a node of the last round is waited for
    assert rounds.gathering.begun and rounds.members == ["a", "d", "c"]


def test_a_round_without_a_store_is_not_complete():
    rounds = Rounds(Rules(2, 2))
    rounds.come("a", "b")
    for _ in range(4):
        rounds.now += 1
        for token in ("a/1", "b/1"):
            rounds.gathering.hear(token, 0, rounds.now)
        rounds.gathering.serve("b/1", "not:0")  # not from rank 0
        rounds.gathering.step(rounds.now)
    assert rounds.gathering.phase is Phase.PROPOSED
    rounds.pass_by(1)
    assert rounds.gathering.phase is Phase.COMPLETE and rounds.gathering.proposal is not None
    assert rounds.gathering.proposal.store == "store:1"


def test_a_round_begins_when_all_of_its_nodes_know_of_it():
    rounds = Rounds(Rules(2, 2))
    rounds.come("a", "b")
    rounds.pass_by(1)
    assert rounds.gathering.phase is Phase.COMPLETE and not rounds.gathering.begun
    rounds.gathering.hear("a/1", 1, rounds.now)
    rounds.gathering.hear("b/1", 0, rounds.now)  # its look was sent before, or it has not got the reply
    assert not rounds.gathering.begun
    rounds.gathering.hear("b/1", 1, rounds.now)
    assert rounds.gathering.begun
    rounds.silent = {"b/1"}
    rounds.pass_by(SILENCE + 1)
    assert rounds.gathering.begun, "from then on it is lost when somebody says so"


def test_a_node_that_goes_before_a_round_has_begun_lets_nobody_begin_it():
    for gone in ("silent", "closed"):
        rounds = Rounds(Rules(2, 2))
        rounds.come("a", "b")
        rounds.pass_by(1)
        rounds.silent = {"b/1"}
        if gone == "closed":
            rounds.gathering.hang_up("b/1", rounds.now)
        rounds.pass_by(1 if gone == "closed" else SILENCE + 1)
        assert rounds.gathering.phase is Phase.OPEN and not rounds.gathering.hear("a/1", 1, rounds.now)
        rounds.come("a", "c")
        rounds.pass_by(2)
        assert rounds.gathering.begun and (rounds.gathering.round, rounds.members) == (2, ["a", "c"])


def test_a_surplus_node_waits_as_a_spare_and_takes_the_rank_of_a_lost_one():
    rounds = Rounds(Rules(2, 2, wait=60))
    rounds.come("b", "c")
    rounds.pass_by(1)
    rounds.come("a")
    rounds.pass_by(100)
    assert rounds.gathering.phase is Phase.COMPLETE and rounds.gathering.waiting() == ["a"]
    rounds.silent = {"b/1"}
    rounds.gathering.hang_up("b/1", rounds.now)
    rounds.come("c")  # its workers failed with b's
    rounds.pass_by(1)
    assert rounds.gathering.phase is Phase.COMPLETE
    assert (rounds.gathering.round, rounds.members) == (2, ["a", "c"])


def with_spares(*spares, last=None, wait=60):
    """A round of a, b and c with spares; with `last`, of a new leader, d, that remembers it."""
    rounds = Rounds(Rules(3, 3, wait=wait))
    rounds.gathering = RoundMachine(rounds.rules, SILENCE, last, rounds.now, "d")
    rounds.come(*(() if last else "abc"))
    rounds.pass_by(1)
    rounds.come(*spares)
    rounds.pass_by(1)
    return rounds


def test_a_survivor_that_says_nothing_while_its_workers_end_keeps_its_place_until_its_port_was_asked():
    for answer in ("a", ""):
        rounds = with_spares("x")
        rounds.silent = rounds.busy = {"a/1"}
        rounds.come("b", "c")
        rounds.pass_by(SILENCE + 20)
        assert rounds.gathering.phase is Phase.OPEN, "not known to be lost"
        rounds.gathering.note_answers({"a:1": answer})
        rounds.pass_by(2)
        assert rounds.members == list("abc" if answer else "xbc")
        assert rounds.gathering.phase is (Phase.OPEN if answer else Phase.COMPLETE)


def test_a_spare_that_comes_early_when_a_whole_job_starts_again_leaves_the_place_to_the_node_that_holds_state():
    def started_again():
        rounds = Rounds(Rules(3, 3, wait=60, last_call=30))
        rounds.come("b", "c", "x", b=Seat(4, 1, 3), c=Seat(4, 2, 3))
        rounds.pass_by(20)
        assert rounds.gathering.phase is Phase.OPEN, "a may be started a little later"
        return rounds

    rounds = started_again()
    rounds.come("a", a=Seat(4, 0, 3))
    rounds.pass_by(1)
    assert rounds.members == ["a", "b", "c"]
    rounds = started_again()
    rounds.pass_by(12)
    assert rounds.members == ["x", "b", "c"], "it does not come"


def test_a_spare_takes_the_place_of_the_lost_node_alone_and_that_of_a_living_one_only_after_the_wait():
    rounds = with_spares("x", "y")
    rounds.silent = {"a/1"}
    rounds.gathering.hang_up("a/1", rounds.now)
    rounds.come("b")
    rounds.pass_by(5)
    assert rounds.gathering.phase is Phase.OPEN, "c is alive"
    rounds.come("c")
    rounds.pass_by(1)
    assert rounds.members == ["x", "b", "c"]
    rounds.silent |= {"x/1"}  # without a word: the machine is off
    rounds.come("b", "c")
    rounds.pass_by(SILENCE - 2)
    assert rounds.gathering.phase is Phase.OPEN
    rounds.pass_by(3)
    assert rounds.members == ["y", "b", "c"]
    rounds.come("z")
    rounds.come("c", "y")
    rounds.pass_by(58)
    assert rounds.gathering.phase is Phase.OPEN
    rounds.pass_by(4)
    assert rounds.members == ["y", "z", "c"]


def test_a_leader_of_other_rounds_asks_at_the_ports_of_the_nodes_that_it_remembers_who_is_alive():
    last = Roster(4, tuple(Place(node, f"{node}:1") for node in "abcd"))
    rounds = with_spares("b", "d", "x", "y", last=last)
    rounds.pass_by(30)
    assert rounds.gathering.phase is Phase.OPEN, "a and c may be alive"
    rounds.gathering.note_answers({"a:1": "", "c:1": "c"})
    rounds.pass_by(1)
    assert rounds.gathering.phase is Phase.OPEN
    rounds.gathering.note_answers({"a:1": "substitute", "c:1": ""})  # at the address of a
    rounds.pass_by(1)
    assert (rounds.gathering.round, rounds.members) == (5, ["d", "b", "x"])


def test_a_substitute_takes_the_place_of_a_lost_leader_at_once_though_the_new_leader_has_led_no_round():
    for alive in (True, False):
        rounds = Rounds(Rules(3, 3, wait=60, last_call=30), survivors="bc")
        last = Roster(4, tuple(Place(node, f"{node}:1") for node in "abc"))
        rounds.gathering = RoundMachine(rounds.rules, SILENCE, last, rounds.now, "b")
        rounds.come("b", "c", "x")
        rounds.gathering.note_answers({"a:1": "a" if alive else ""})
        rounds.pass_by(1)
        assert rounds.members == list("abc" if alive else "xbc"), "a may still come where it answers"
        assert rounds.gathering.phase is (Phase.OPEN if alive else Phase.COMPLETE)


def refused(rules, *come, last=None):
    """Nodes that wait, and b, which was refused."""
    rounds = Rounds(rules)
    rounds.gathering = RoundMachine(rules, SILENCE, last, rounds.now, "a")
    rounds.come(*come)
    rounds.gathering.refuse("b", "its memory is busy", rounds.now)
    return rounds


def test_a_job_that_cannot_go_on_without_a_refused_node_ends_unless_another_comes_in_time():
    rounds = refused(Rules(2, 2), "a")
    assert rounds.gathering.refused == "node b was refused: its memory is busy"
    rounds.pass_by(SILENCE - 1)
    assert not rounds.gathering.is_hopeless
    rounds.pass_by(2)
    assert rounds.gathering.is_hopeless
    rounds = refused(Rules(2, 2), "a")
    rounds.come("c")
    rounds.pass_by(2 * SILENCE)
    assert rounds.members == ["a", "c"] and not rounds.gathering.is_hopeless and not rounds.gathering.refused
    rounds = refused(Rules(2, 2), "a")
    rounds.pass_by(5)
    rounds.come("b", life=2)  # the cause is removed
    rounds.pass_by(2 * SILENCE)
    assert rounds.members == ["a", "b"] and not rounds.gathering.is_hopeless


def test_nodes_go_on_waiting_where_a_refused_one_may_be_replaced():
    for rules, running in ((Rules(2, 3), False), (Rules(2, 2), True)):
        rounds = refused(rules, *(() if running else "a"))
        if running:  # it lost a node; the one in its place was refused
            rounds.gathering.apply(Application("a", "a/1", "a:1", took_part=True), rounds.now)
            rounds.known.add("a/1")
        rounds.pass_by(3 * SILENCE)
        assert rounds.gathering.waiting() == ["a"] and not rounds.gathering.is_hopeless
        assert rounds.gathering.refused.startswith("node b was refused")


def test_a_node_that_is_drained_leaves_and_a_spare_takes_its_rank_at_once():
    rounds = with_spares("d", wait=600)
    assert rounds.gathering.begun
    changes = rounds.gathering.changes
    assert rounds.gathering.drain("b") == "" and rounds.gathering.draining == "b"
    assert rounds.gathering.changes > changes, "the node learns of it at once"
    assert rounds.gathering.drain("c") == "node b is being drained: one node at a time"
    rounds.pass_by(100)  # until a version is committed
    assert rounds.gathering.begun and rounds.gathering.draining == "b"
    rounds.silent = {"b/1"}
    rounds.gathering.depart("b/1", rounds.now)
    assert rounds.gathering.phase is Phase.OPEN
    rounds.gathering.hang_up("b/1", rounds.now)
    rounds.come("a", "c")
    rounds.pass_by(2)
    assert rounds.gathering.begun and rounds.members == ["a", "d", "c"] and not rounds.gathering.draining
    assert not rounds.gathering._failures


@pytest.mark.parametrize("how", ["drained", "lost", "in silence"])
def test_as_many_spares_as_nodes_wait_for_the_survivors_of_a_node_that_is_gone_before_these_come(how):
    rounds = with_spares("x", "y", "z", wait=60)
    rounds.silent = {"b/1"}
    if how == "drained":
        rounds.gathering.drain("b")
        rounds.gathering.depart("b/1", rounds.now)
    if how != "in silence":
        rounds.gathering.hang_up("b/1", rounds.now)
        rounds.pass_by(SILENCE + 1)
        assert rounds.gathering.phase is Phase.OPEN, "a and c are alive: their ranks end"
    rounds.come("a")
    rounds.pass_by(SILENCE + 1)
    assert rounds.gathering.phase is Phase.OPEN, "c is alive"
    rounds.come("c")
    rounds.pass_by(2)
    assert rounds.members == ["a", "x", "c"] and rounds.gathering.waiting() == ["y", "z"]


def test_spares_alone_wait_no_longer_than_they_may_for_survivors_that_live_and_do_not_come():
    rounds = with_spares("x", "y", "z", wait=60)
    rounds.gathering.drain("b")
    rounds.silent = {"b/1"}
    rounds.gathering.depart("b/1", rounds.now)
    rounds.pass_by(58)
    assert rounds.gathering.phase is Phase.OPEN
    rounds.pass_by(4)
    assert rounds.members == ["x", "y", "z"]
    rounds = with_spares("x", "y", "z", wait=600)
    rounds.silent = {"a/1", "b/1", "c/1"}
    for token in rounds.silent:
        rounds.gathering.hang_up(token, rounds.now)
    rounds.pass_by(SILENCE + 3)
    assert rounds.members == ["x", "y", "z"], "none of them lives"


def test_a_leader_that_was_drained_itself_is_not_waited_for():
    rounds = with_spares("x", wait=600)
    rounds.gathering._own = "b"
    rounds.gathering.drain("b")
    rounds.silent = {"b/1"}
    rounds.gathering.depart("b/1", rounds.now)
    rounds.come("a", "c")
    rounds.pass_by(2)
    assert rounds.members == ["a", "x", "c"]


def test_a_node_stays_where_its_drain_is_taken_back_or_the_spare_is_gone():
    for how in ("taken back", "spare gone", "node lost"):
        rounds = with_spares("d", wait=600)
        rounds.gathering.drain("b")
        changes = rounds.gathering.changes
        if how == "taken back":
            assert rounds.gathering.drain("") == ""
        elif how == "spare gone":
            rounds.gathering.leave("d/1")
        else:
            rounds.silent = {"b/1"}
            rounds.gathering.hang_up("b/1", rounds.now)
            rounds.pass_by(SILENCE + 1)
            rounds.come("a", "c")
        rounds.pass_by(2)
        assert not rounds.gathering.draining and rounds.gathering.changes > changes
        assert rounds.members == (["a", "d", "c"] if how == "node lost" else ["a", "b", "c"])


def test_a_failure_meanwhile_does_not_end_a_drain():
    rounds = with_spares("d", wait=600)
    rounds.gathering.drain("b")
    rounds.come("a", "b", "c")
    rounds.pass_by(2)
    assert rounds.gathering.round == 2 and rounds.gathering.begun and rounds.gathering.draining == "b"


def test_a_stop_of_all_nodes_needs_no_spare_and_holds_until_the_job_has_ended():
    rounds = with_spares(wait=600)
    changes = rounds.gathering.changes
    assert rounds.gathering.drain(ALL) == "" and rounds.gathering.changes > changes, "all nodes learn of it at once"
    assert rounds.gathering.drain(ALL) == "", "given again"
    rounds.come("a", "b", "c")  # a rank has failed meanwhile
    rounds.pass_by(2)
    assert rounds.gathering.round == 2 and rounds.gathering.begun and rounds.gathering.draining == ALL


@pytest.mark.parametrize(
    ("node", "said", "more"),
    [
        (ALL, "the job is between two rounds", {"running": False}),
        (ALL, "", {"spares": (), "draining": "n2"}),
        ("n2", "all nodes are being drained", {"draining": ALL}),
        ("d", "node d is a spare, and has no part in the job", {}),
        ("d", "node d is a spare, but leads the others: when its ft-run ends, all ranks start again", {"leader": "d"}),
        ("x", "there is no node x in this job; its nodes are n2, n10", {}),
        ("n2", "no spare waits that could take the place of node n2", {"spares": ()}),
        ("n2", "the job is between two rounds", {"running": False}),
        ("n2", "the job is between two rounds, or waits for a lost node", {"lost": 1}),
        ("n2", "", {}),
    ],
)
def test_what_cannot_be_drained_is_refused_in_one_line(node, said, more):
    facts = {"members": ("n10", "n2"), "spares": ("d",), "draining": "", "running": True, "lost": 0}
    found = why_not_drained(node, **{**facts, **more})
    assert found.startswith(said) and bool(found) == bool(said)


def test_a_command_that_is_given_twice_on_a_node_does_no_harm():
    rounds = refused(Rules(2, 2), "b")
    rounds.pass_by(2 * SILENCE)
    assert not rounds.gathering.is_hopeless and not rounds.gathering.refused, "b waits"
    rounds = with_spares()
    for phase in (Phase.COMPLETE, Phase.OPEN):
        rounds.gathering.refuse("b", "another ft-run owns the job there", rounds.now)
        assert rounds.gathering.phase is phase and not rounds.gathering.refused
        rounds.come("a")
    rounds.come("b", "c")
    rounds.pass_by(1)
    assert rounds.members == ["a", "b", "c"]


def test_a_refused_node_of_the_last_round_is_replaced_at_once_by_a_spare_that_waits():
    last = Roster(4, (Place("a", "a:1"), Place("b", "b:1")))
    rounds = refused(Rules(2, 2, wait=60), "a", "c", last=last)
    rounds.gathering.note_answers({"b:1": "b"})  # where it says why
    rounds.pass_by(1)
    assert rounds.members == ["a", "c"] and not rounds.gathering._failures


def test_a_node_with_which_the_round_can_be_larger_opens_it_and_one_with_which_it_cannot_does_not():
    rounds = Rounds(Rules(2, 4, (2, 4), last_call=5))
    rounds.come("a", "b")
    rounds.pass_by(7)
    assert rounds.members == ["a", "b"]
    rounds.come("c")
    rounds.pass_by(20)
    assert rounds.gathering.phase is Phase.COMPLETE
    rounds.come("d")
    rounds.pass_by(1)
    assert rounds.gathering.phase is Phase.OPEN and rounds.gathering.waiting() == ["c", "d"]
    rounds.come("a", "b")
    rounds.pass_by(1)
    assert (rounds.gathering.round, rounds.members) == (2, ["a", "b", "c", "d"])


def test_survivors_that_an_admissible_size_leaves_over_are_spares_until_it_can_be_larger():
    rounds = Rounds(Rules(2, 4, wait=20).among((2, 4), spares_asked=True))
    rounds.come(*"abcd")
    rounds.pass_by(1)
    assert rounds.members == [*"abcd"]
    rounds.silent = {"d/1"}
    rounds.come("a", "b", "c")
    rounds.pass_by(19)
    assert rounds.gathering.phase is Phase.OPEN, "d, or one in its place, may come"
    rounds.pass_by(3)
    assert (rounds.gathering.phase, rounds.members) == (Phase.COMPLETE, ["a", "b"])
    assert [place.node for place in rounds.gathering.roster.spares] == ["c"] == rounds.gathering.waiting()
    rounds.come("d", life=2)
    rounds.pass_by(1)
    assert rounds.gathering.phase is Phase.OPEN and rounds.gathering.waiting() == ["c", "d"]
    rounds.come("a", "b")
    rounds.pass_by(1)
    assert (rounds.gathering.round, rounds.members) == (3, [*"abcd"]), "c and d have the ranks that they had"


def test_a_name_is_free_again_when_its_holder_is_silent_but_not_before():
    rounds = Rounds(Rules(2, 2))
    rounds.come("a", "b")
    rounds.pass_by(1)
    assert rounds.come("a", life=2) == [False]
    assert rounds.gathering.phase is Phase.COMPLETE  # the living a is not disturbed
    rounds.gathering.hang_up("a/1", rounds.now)
    rounds.silent = {"a/1"}
    assert rounds.come("a", life=2) == [True]
    rounds.pass_by(1)
    assert rounds.gathering.phase is Phase.OPEN


def test_a_node_whose_connection_has_ended_is_replaced_by_one_that_waits_unless_it_is_heard_of_again():
    rounds = Rounds(Rules(2, 2))
    rounds.come("a", "b")
    rounds.pass_by(1)
    rounds.come("c")
    rounds.gathering.hang_up("a/1", rounds.now)
    rounds.pass_by(SILENCE + 2)
    assert rounds.gathering.lost(rounds.now) == [] and rounds.gathering.phase is Phase.COMPLETE
    rounds.silent = {"a/1"}
    rounds.gathering.hang_up("a/1", rounds.now)
    rounds.pass_by(SILENCE - 1)
    assert rounds.gathering.phase is Phase.COMPLETE
    rounds.pass_by(2)
    assert rounds.gathering.lost(rounds.now) == ["a"] and rounds.gathering.phase is Phase.OPEN
    rounds.come("b")
    rounds.pass_by(1)
    assert rounds.members == ["c", "b"] and rounds.gathering.lost(rounds.now) == []


def test_nodes_tell_when_they_are_done_with_the_round_they_are_in():
    rounds = Rounds(Rules(2, 2))
    rounds.come("a", "b")
    rounds.pass_by(1)
    for token, number in (("a/1", 1), ("a/1", 1), ("b/1", 7), ("x/1", 1)):
        rounds.gathering.finish(token, number)
    assert rounds.gathering.done == {"a/1"}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from(["come", "die", "leave"])), max_size=25))
def test_whatever_happens_who_stays_keeps_its_rank_and_nobody_silent_is_in(story):
    """Against a model that only knows who lives: nodes come, die and leave; all that live come back for each round."""
    rounds = Rounds(Rules(2, 3, wait=4, last_call=4))
    lives = {}
    before = []
    for name, what in story:
        if what == "come":
            lives.setdefault(name, max([int(t[2:]) for t in rounds.known if t[0] == name], default=0) + 1)
        elif name in lives:
            token = f"{name}/{lives.pop(name)}"
            rounds.silent.add(token)
            if what == "leave":
                rounds.gathering.leave(token)
        for each, life in lives.items():
            rounds.come(each, life=life)
        rounds.pass_by(2 * SILENCE)
        for each, life in lives.items():  # a second life waits until the first one is silent
            rounds.come(each, life=life)
        rounds.pass_by(2 * SILENCE)
        if len(lives) < 2:
            continue
        assert rounds.gathering.phase is Phase.COMPLETE
        now = rounds.members
        assert set(now) <= set(lives) and len(now) == min(3, len(lives))
        assert set(rounds.gathering.waiting()) == set(lives) - set(now)
        kept = [node for rank, node in enumerate(before) if node in lives and rank < len(now)]
        assert [node for node in kept if now.index(node) != before.index(node)] == []
        before = now


# ---- nodes that have failed often ----


def worn(candidates, failures, replaceable=True):
    return [replace(each, failures=failures.get(each.node, 0), replaceable=replaceable) for each in candidates]


def test_a_node_that_failed_twice_is_a_spare_where_there_is_another_one_and_else_takes_part():
    nodes = [*seated("a", "b", "c"), Candidate("x")]
    assert ranks(worn(nodes, {"b": 1}), 3) == {"a": 0, "b": 1, "c": 2}
    assert ranks(worn(nodes, {"b": 2}), 3) == {"a": 0, "x": 1, "c": 2}
    assert ranks(worn(nodes[:3], {"b": 9}), 3) == {"a": 0, "b": 1, "c": 2}, "there is no better one"
    assert ranks(worn(nodes, {"b": 2, "x": 3}), 3) == {"a": 0, "b": 1, "c": 2}, "the other one is worse"
    assert ranks(worn(nodes, {"b": 2}), 3, "b") == {"a": 0, "x": 1, "c": 2}, "a leader that fails too"


def test_of_the_last_round_one_node_at_most_is_left_out_and_only_if_the_others_can_rebuild_it():
    nodes = [*seated("a", "b", "c"), Candidate("x"), Candidate("y")]
    assert left_out(worn(nodes, {"a": 2, "b": 3}), 3) == {"b"}
    assert not left_out(worn(nodes, {"b": 3}, replaceable=False), 3)
    assert not left_out(worn([nodes[0], *nodes[2:]], {"a": 3}), 3), "b is lost: two may be too many"
    assert left_out(worn([nodes[0], *nodes[2:]], {"x": 3}), 3) == {"x"}, "but of two spares the better one is taken"


def test_a_node_that_came_back_after_it_was_lost_twice_does_not_get_its_rank_back_before_a_fresh_one():
    old = Candidate("old", Seat(1, 2, 3))
    three = [*seated("a", "b", "lost", number=2)[:2], old, Candidate("fresh")]
    assert ranks(worn(three, {"old": 2}), 3) == {"a": 0, "b": 1, "fresh": 2}
    assert "old" in ranks(worn(three, {"old": 1}), 3)


def test_a_failure_counts_for_the_node_that_failed_first_and_for_one_that_was_lost():
    rounds = with_spares("d", wait=1)

    def fail(first, *others):
        for node in (first, *others):
            said = Application(node, f"{node}/1", f"{node}:1", failed=True, replaceable=True, took_part=True)
            assert rounds.gathering.apply(said, rounds.now)
        rounds.come(*(name for name in "abc" if name in rounds.members and name not in (first, *others)))
        rounds.pass_by(3)

    fail("b", "c")  # c's workers have failed as a consequence
    assert rounds.members == ["a", "b", "c"] and rounds.gathering._failures == {"b": 1}
    fail("b", "a")
    assert rounds.members == ["a", "d", "c"] and rounds.gathering.waiting() == ["b"]
    rounds.silent = {"d/1"}
    rounds.gathering.hang_up("d/1", rounds.now)
    rounds.come("a", "c")
    rounds.pass_by(SILENCE + 3)
    assert rounds.members == ["a", "b", "c"], "there is no other one"
    assert rounds.gathering._failures == {"b": 2, "d": 1}
