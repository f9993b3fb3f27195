"""The leader's rounds: the incremental machine against one that looks at all nodes each time, and what a look costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.launcher.rounds import rounds
from ft_plugins.launcher.rounds.node_messages import Leader
from ft_plugins.launcher.rounds.node_service import NodeIdentity, NodeService
from ft_plugins.launcher.rounds.round_machine import Application, Phase, Place, Roster, RoundMachine
from ft_plugins.launcher.rounds.rounds import Candidate, Rules, Seat
from ft_plugins.transport import frame_codec
from harness.operations import instructions

SILENCE = 10.0


@dataclass
class Model:
    """The same rounds, from the definitions: everything is found by a search of all nodes."""

    rules: Rules
    roster: Roster
    now: float
    phase: Phase = Phase.OPEN
    round: int = 0  # of the proposed or complete round; 0: of neither
    ranks: dict[str, int] = field(default_factory=dict)
    store: str = ""
    waiting: dict[str, Application] = field(default_factory=dict)
    members: dict[str, str] = field(default_factory=dict)  # tokens
    heard: dict[str, float] = field(default_factory=dict)
    since_chosen: set[str] = field(default_factory=set)
    aware: set[str] = field(default_factory=set)
    ended: dict[str, float] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    answers: dict[str, str] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    blamed: bool = False
    enough_since: float | None = None
    looked: float = 0.0

    def silent(self, token):
        return self.now - self.heard.get(token, self.now) > SILENCE

    def last_round(self):
        known = [max(each.knows, each.seat.round if each.seat else 0) for each in self.waiting.values()]
        return max([self.roster.round, *known])

    def lost(self):
        lost = {token for token, since in self.ended.items() if self.now - since > SILENCE} - self.done
        return [node for node, token in self.members.items() if token in lost]

    def apply(self, application):
        node, token = application.node, application.token
        holders = [each.token for each in self.waiting.values() if each.node == node]
        holders += [each for name, each in self.members.items() if name == node]
        if any(each != token and not self.silent(each) for each in holders):
            return False
        for each in (*holders, token):
            self.leave(each)
        self.waiting[token], self.heard[token] = application, self.now
        if application.failed and not self.blamed and any(place.node == node for place in self.roster.members):
            self.blamed = True
            self.failures[node] += 1
        self.reopen()
        self.note_answers({application.endpoint: node})
        return True

    def hear(self, token, knows):
        if token in self.waiting or token in self.members.values():
            self.heard[token] = self.now
            self.since_chosen.add(token)
            self.ended.pop(token, None)
        if self.phase is Phase.COMPLETE and knows == self.round:
            self.aware.add(token)
        return token in self.waiting

    def hang_up(self, token):
        if token in self.waiting or token in self.members.values():
            self.heard[token] = float("-inf")
            self.since_chosen.discard(token)
        if token in self.members.values():
            self.ended[token] = self.now

    def leave(self, token):
        if self.waiting.pop(token, None) and self.phase is Phase.PROPOSED and token in self.ranks:
            self.open()

    def serve(self, token):
        if self.phase is Phase.PROPOSED and self.ranks.get(token) == 0:
            self.store = "h:1"

    def finish(self, token, number):
        if self.phase is Phase.COMPLETE and number == self.round and token in self.members.values():
            self.done.add(token)

    def open(self):
        if self.phase is Phase.COMPLETE:
            self.enough_since, self.answers = None, {}
        self.phase, self.round, self.ranks = Phase.OPEN, 0, {}

    def reopen(self):
        if self.phase is not Phase.COMPLETE or not self.waiting:
            return
        back = any(each.node in self.members for each in self.waiting.values())
        size = len(self.members)
        if back or self.rules.fit(size + len(self.waiting)) > size or self.lost():
            self.open()

    def step(self):
        stopped = max(0.0, self.now - self.looked - 1.0)
        self.looked = self.now
        self.heard = {token: min(at + stopped, self.now) for token, at in self.heard.items()}
        silent = [token for token in self.heard if self.silent(token)]
        for token in silent:
            self.leave(token)
        self.reopen()
        if self.phase is Phase.OPEN:
            self.choose()
        elif self.phase is Phase.PROPOSED:
            if self.store and set(self.ranks) <= self.since_chosen:
                self.complete()
        elif any(token in silent and token not in self.aware for token in self.members.values()):
            self.open()

    def choose(self):
        candidates = []
        for each in self.waiting.values():
            seats = [seat for seat in (each.seat, self.roster.seat(each.node)) if seat]
            candidates.append(Candidate(each.node, max(seats, default=None), each.wanted))
            candidates[-1] = replace(candidates[-1], failures=self.failures[each.node], replaceable=each.replaceable)
        if not self.rules.fit(len(candidates)):
            self.enough_since = None
            return
        self.enough_since = self.now if self.enough_since is None else self.enough_since
        waited, turnout = self.now - self.enough_since, rounds.Turnout.of(candidates)
        begun = bool(self.members) or any(each.took_part for each in self.waiting.values())
        late = not begun and turnout.back < turnout.last_size and waited < self.rules.last_call
        turnout = replace(turnout, expected=late or self.expected(candidates))
        if size := rounds.size_of(self.rules, turnout, waited):
            assigned = rounds.ranks(candidates, size)
            tokens = {each.node: each.token for each in self.waiting.values()}
            self.round, self.ranks = self.last_round() + 1, {tokens[node]: rank for node, rank in assigned.items()}
            self.phase, self.store, self.since_chosen = Phase.PROPOSED, "", set()

    def expected(self, candidates):
        newest = max((each.seat.round for each in candidates if each.seat), default=0)
        missing = [place for place in self.roster.members if place.node not in {each.node for each in candidates}]

        def alive(place):
            token = self.members.get(place.node)
            if token and not self.silent(token):
                return True
            in_doubt = self.heard.get(token or "") != float("-inf")  # it may be busy
            return self.answers[place.endpoint] == place.node if place.endpoint in self.answers else in_doubt

        return newest <= self.roster.round and any(map(alive, missing))

    def note_answers(self, answers):
        if self.phase is not Phase.COMPLETE:
            self.answers |= answers

    def complete(self):
        waiting = {each.node for each in self.waiting.values()}
        self.failures.update(place.node for place in self.roster.members if place.node not in waiting)
        self.blamed = False
        chosen = [self.waiting.pop(token) for token in sorted(self.ranks, key=self.ranks.__getitem__)]
        self.members = {each.node: each.token for each in chosen}
        members, spares = (
            tuple(Place(each.node, each.endpoint) for each in nodes) for nodes in (chosen, self.waiting.values())
        )
        self.roster = Roster(self.round, members, spares)
        self.phase, self.ended, self.done, self.aware = Phase.COMPLETE, {}, set(), set()


NODES = "abcd"
TOKENS = st.builds(lambda node, life: f"{node}/{life}", st.sampled_from(NODES), st.integers(1, 2))
SEATS = st.none() | st.builds(lambda number, rank: Seat(number, rank, 4), st.integers(1, 3), st.integers(0, 3))
STEPS = st.one_of(
    st.tuples(st.just("apply"), TOKENS, SEATS, st.none() | st.integers(0, 3), st.integers(0, 4)),
    st.tuples(st.just("live"), st.sampled_from([0.5, 3.0, 8.0, 30.0]), st.frozensets(TOKENS, max_size=4)),
    st.tuples(st.sampled_from(["hear", "hang_up", "die", "die", "leave", "finish"]), TOKENS),
    st.tuples(st.just("finish all")),
    st.tuples(st.just("lose"), TOKENS),
    st.tuples(st.just("stop"), st.sampled_from([5.0, 100.0])),
    st.tuples(st.just("come"), st.integers(1, 2)),
    st.tuples(
        st.just("note_answers"),
        st.dictionaries(st.sampled_from([f"{node}:1" for node in NODES]), st.sampled_from(["", *NODES])),
    ),
)
STORIES = st.builds(
    lambda begin, steps: [*begin, *steps],
    st.sampled_from([[], [("come", 1), ("live", 3.0, frozenset[str]())]]),
    st.lists(STEPS, max_size=40),
)
RULES = st.sampled_from(
    [
        Rules(2, 2, wait=4, last_call=4),
        Rules(2, 4, wait=4, last_call=4),
        Rules(1, 4, wait=20, last_call=2),
        Rules(2, 4, (2, 4), wait=4, last_call=4),
        Rules(2, 4, wait=4, last_call=2).among((2, 4)),
    ]
)
LAST = st.none() | st.builds(
    lambda names: Roster(2, tuple(Place(name, f"{name}:1") for name in names)),
    st.lists(st.sampled_from(NODES), unique=True, min_size=1),
)


@settings(max_examples=600, deadline=None)
@given(RULES, LAST, STORIES)
def test_whatever_happens_the_rounds_are_those_of_a_machine_that_looks_at_all_nodes(rules, last, story):
    machine, model = RoundMachine(rules, SILENCE, last, 1000.0), Model(rules, last or Roster(0), 1000.0, looked=1000.0)
    shown = machine.changes, outline(machine, model)
    seen = machine.revision, NodeService._seen_by_all(machine)
    dead = set()

    def both(what, *arguments):
        nonlocal shown, seen
        timed = (model.now,) if what in ("apply", "hear", "hang_up", "step") else ()
        found = getattr(machine, what)(*arguments, *timed)
        assert found == getattr(model, what)(*arguments[: 1 if what == "serve" else None])
        compare(machine, model)
        now = machine.changes, outline(machine, model)
        found_again = shown[1][-1] and not now[1][-1]  # of a lost node: does not have to be learned of
        assert shown[1] == now[1] or shown[0] != now[0] or found_again, "a node that looks has to learn of it"
        shown = now
        before, seen = seen, (machine.revision, NodeService._seen_by_all(machine))
        assert before[1] == seen[1] or before[0] != seen[0], "a look shows what was found at the same revision"

    def live(seconds, silent=frozenset()):
        end = model.now + seconds
        while model.now < end:
            model.now += 0.5
            for token in sorted({*model.waiting, *model.members.values()} - silent - dead):
                both("hear", token, model.round if model.phase is Phase.COMPLETE else 0)
            for token in [token for token, rank in model.ranks.items() if rank == 0 and token not in silent | dead]:
                both("serve", token, "h:1")
            both("step")

    for what, *arguments in story:
        if what == "apply":
            token, seat, wanted, knows = arguments
            dead.discard(token)
            more = {"took_part": knows > 2, "failed": knows % 2 == 1, "replaceable": wanted is None}
            both("apply", Application(token[0], token, f"{token[0]}:1", seat, wanted, knows, **more))
        elif what == "come":
            for node in NODES:
                dead.discard(f"{node}/{arguments[0]}")
                both("apply", Application(node, f"{node}/{arguments[0]}", f"{node}:1"))
        elif what == "live":
            live(*arguments)
        elif what == "stop":
            model.now += arguments[0]
            both("step")
        elif what == "hear":
            both("hear", arguments[0], 0)
        elif what in ("die", "lose"):
            dead.add(arguments[0])
            both("hang_up", arguments[0])
            live(SILENCE + 2 if what == "lose" else 0.0)
        elif what == "finish":
            both("finish", arguments[0], model.round)
        elif what == "finish all":
            for token in sorted(set(model.members.values()) - dead):
                both("finish", token, model.round)
        else:
            both(what, arguments[0])


def outline(machine, model):
    """What nodes act upon at once."""
    complete = model.phase is Phase.COMPLETE
    all_done = complete and model.done == set(model.members.values())
    return (
        machine.phase,
        machine.round if complete else 0,
        machine.begun,
        all_done,
        complete and bool(machine.lost_count),
    )


def compare(machine, model):
    assert machine.phase is model.phase and machine.roster == model.roster
    assert machine.last_round == model.last_round()
    assert machine.round == (model.round or model.last_round() + 1)
    names = sorted((each.node for each in model.waiting.values()), key=rounds.natural)
    assert machine.waiting() == names and machine.waiting_count == len(names)
    assert machine.missing() == [place.node for place in model.roster.members if place.node not in names]
    assert machine.places == [Place(each.node, each.endpoint) for each in model.waiting.values()]
    assert (machine.proposal.ranks if machine.proposal else {}) == model.ranks
    assert machine.begun == (model.phase is Phase.COMPLETE and set(model.members.values()) <= model.aware)
    assert machine.done == model.done
    assert sorted(machine.lost(model.now)) == sorted(model.lost())
    for token in (f"{node}/{life}" for node in NODES for life in (1, 2)):
        assert machine.is_waiting(token) == (token in model.waiting)
        assert machine.knows(token) == (token in model.waiting or token in model.members.values())


# ---- what it costs ----


class Lead:
    """A service that leads `count` nodes, in made-up time."""

    def __init__(self, count, monkeypatch):
        self.count = count
        self.now = 1000.0
        self.clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr("ft_plugins.launcher.rounds.node_service.time", self.clock)
        self.service = NodeService(NodeIdentity("job", "n0", "t0", "h:1"), Rules(count, count, wait=1e6), SILENCE)
        leader = Leader("n0", "t0", "h:1", 1)
        assert self.service.answer({"do": "elect", "lead": vars(leader)})["granted"]
        assert self.service.take_lead(leader, None)

    def apply(self, number):
        application = {"node": f"n{number}", "token": f"t{number}", "endpoint": "h:1", "workers": 8}
        return self.service.answer({"do": "apply", "token": f"t{number}", "application": application}, number + 1)

    def look(self, number, known=0, **fields):
        look = {"do": "look", "token": f"t{number}", "round": known, **fields}
        return self.service.answer_or_hold(look, number + 1)

    def tick(self):
        self.now += 0.1
        self.service.tick()

    def run_one_round(self):
        for number in range(self.count):
            self.apply(number)
        self.tick()
        self.service.answer({"do": "serve", "token": "t0", "store": "h:1"})
        for number in range(self.count):
            self.look(number)
        self.tick()
        for number in range(self.count):
            self.look(number, known=1)

    def lose_one(self):
        """The last node is lost; the others wait for a substitute."""
        self.service.gone(self.count)
        for number in range(self.count - 1):
            self.apply(number)
        for _ in range(3):
            self.tick()
            for number in range(self.count - 1):
                self.look(number, known=1)


def costs(lead):
    """Instructions for each thing that a lead does all the time; and bytes of a reply."""
    view = lead.look(3, known=1)
    assert view is not None and view["phase"] == "open" and view["waiting"] == lead.count - 1
    changes = view["changes"]
    found = {"look": instructions(lambda: lead.look(5, known=1)), "bytes": len(frame_codec.pack(view))}
    found["look held"] = instructions(lambda: lead.look(6, known=1, wait=2.0, seen=changes))
    found["nothing released"] = instructions(lead.service.released)
    found["step"] = instructions(lead.tick)
    lead.now += 3.0
    found["one released"] = instructions(lead.service.released)
    found["leading"] = instructions(lambda: lead.service.leading)
    found["meet"] = instructions(lambda: lead.service.answer({"do": "meet", "lead": None}))
    found["apply"] = instructions(lambda: lead.apply(7))
    found["look after it"] = instructions(lambda: lead.look(8, known=1))
    found["gone"] = instructions(lambda: lead.service.gone(10))
    return found


def test_what_a_lead_does_while_nodes_wait_costs_the_same_for_few_and_for_many(monkeypatch):
    few, many = (Lead(count, monkeypatch) for count in (16, 1024))
    found = []
    for lead in (few, many):
        monkeypatch.setattr("ft_plugins.launcher.rounds.node_service.time", lead.clock)
        lead.run_one_round()
        assert (view := lead.look(1, known=1)) is not None and view["begun"], view
        lead.lose_one()
        found.append(costs(lead))
    for name, few_nodes in found[0].items():
        more = 40 if name == "bytes" else 400  # of instructions, a look at each of the others takes ten times that
        assert found[1][name] <= few_nodes + more, f"{name}: {found[1][name]} for 1024 nodes, {few_nodes} for 16"


def test_a_node_receives_the_roster_once_and_only_what_changed(monkeypatch):
    lead = Lead(1024, monkeypatch)
    lead.run_one_round()
    view = lead.look(1, known=1, roster=True)
    assert view is not None and view.get("roster") is None
    first = lead.service.answer({"do": "look", "token": "t1", "round": 0, "roster": True})["roster"]
    assert len(first["nodes"]) == 512 and first["pages"] == 2
    lead.lose_one()
    lead.apply(2000)
    lead.tick()
    lead.service.answer({"do": "serve", "token": "t0", "store": "h:1"})
    for number in (*range(1023), 2000):
        lead.look(number, known=1)
    lead.tick()
    change = lead.service.answer({"do": "look", "token": "t1", "round": 1, "roster": True, "base": first["digest"]})
    assert [node for _, node, _ in change["roster"]["nodes"]] == ["n2000"]
    assert lead.apply(3000)["roster"]["pages"] == 2, "a new node receives all"
