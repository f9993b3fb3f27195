"""Who sits where, against a model that tries every seating; rounds as their lead sees them, in made-up time: as
transcripts, in `rounds.txt`, and against a model that only knows who lives."""

import itertools
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.launcher.rounds import rounds
from ft_plugins.launcher.rounds.round_machine import Application, Phase, Place, Roster, RoundMachine
from ft_plugins.launcher.rounds.rounds import Candidate, Rules, Seat, Turnout, natural, ranks, size_of
from tests import transcripts

SILENCE = 10.0


class Rounds:
    """A lead and its nodes, `rules` first. Each node is heard of whenever time passes, unless it is `silent`: then its
    port does not answer either, unless it is only `busy`. What passes ends in a line: the phase, the next or complete
    round, its members, and what else is the case."""

    def __init__(self):
        self.now, self.candidates = 1000.0, {}
        self.muted, self.working, self.known, self.survivors, self.seen = set(), set(), set(), (), 0

    # ---- who sits where, and how large a round is ----

    def rules(self, least, most, sizes=(), own="", last=(), survived="", among=None, asked=False, **more):
        self.allowed = Rules(least, most, sizes, **more)
        if among is not None:
            self.allowed = self.allowed.among(among, *[True] * asked)
        roster = Roster(4, tuple(Place(node, f"{node}:1") for node in last)) if last else None
        self.lead = RoundMachine(self.allowed, SILENCE, roster, self.now, own)
        self.survivors = survived

    def seated(self, *names, round=1):
        for rank, name in enumerate(names):
            self.candidates[name] = Candidate(name, Seat(round, rank, len(names)))

    def node(self, *names, seat=None, **more):
        for name in names:
            self.candidates[name] = Candidate(name, seat and Seat(*seat), **more)

    def worn(self, replaceable=True, **failures):
        for name, count in failures.items():
            self.candidates[name] = replace(self.candidates[name], failures=count, replaceable=replaceable)

    def gone(self, *names):
        for name in names:
            del self.candidates[name]

    def ranks(self, size, leader=""):
        found = ranks(list(self.candidates.values()), size, leader)
        return dict(sorted(found.items(), key=lambda item: item[1]))

    def twice(self, name):
        return ranks([Candidate(name), Candidate(name)], 2)

    def left_out(self, size):
        return rounds.left_out(list(self.candidates.values()), size)

    def size(self, waited):
        return size_of(self.allowed, Turnout.of(list(self.candidates.values())), waited)

    def fit(self, *counts):
        return [self.allowed.fit(count) for count in counts]

    def seat(self, *of):
        return Seat(*of)

    def why_not_drained(self, node, draining="", running=True, lost=0, spares=("d",), leader=""):
        return rounds.why_not_drained(node, ("n10", "n2"), spares, draining, running, lost, leader) or "it is"

    # ---- a round as its lead sees it ----

    def come(self, *names, life=1, trained=False, failed=False, **seats):
        self.known |= {f"{name}/{life}" for name in names}
        seats = {name: Seat(*seat) for name, seat in seats.items()}
        for name in names:
            taken = name in self.survivors
            more = {"failed": failed, **({"trained": True, "opened": True} if trained else {})}
            application = Application(name, f"{name}/{life}", f"{name}:1", seats.get(name), took_part=taken, **more)
            if not self.lead.apply(application, self.now):
                return f"not {name}"

    def silent(self, *names, life=1):
        self.muted = {f"{name}/{life}" for name in names}

    def busy(self, *names):
        self.working = {f"{name}/1" for name in names}

    def hang_up(self, *names):
        for name in names:
            self.lead.hang_up(f"{name}/1", self.now)

    def answers(self, **at):
        self.lead.note_answers({f"{name}:1": node or "" for name, node in at.items()})

    def hear(self, name, knows):
        return self.lead.hear(f"{name}/1", knows, self.now)

    def checks(self, name, seconds):
        """All are heard of, and `name` is still being checked."""
        for _ in range(seconds):
            self.now += 1
            for token in self.known:
                self.lead.hear(token, self.lead.roster.round, self.now, ready=token != f"{name}/1")
            self.lead.step(self.now)
        return self.state()

    def serve(self, name):
        self.lead.serve(f"{name}/1", "store:1")

    def leave(self, name):
        self.lead.leave(f"{name}/1")

    def refuse(self, node, why, life=""):
        self.lead.refuse(node, why, self.now, life and f"{node}/{life}")

    def drain(self, node):
        changes = self.lead.changes
        said = self.lead.drain(node or "") or ("it is" if node else "none is")
        return said if self.lead.changes == changes else f"{said}, and all nodes learn of it"

    def depart(self, name):
        self.lead.depart(f"{name}/1", self.now)

    def finish(self, name, round):
        self.lead.finish(f"{name}/1", round)
        return self.lead.done

    def passes(self, seconds):
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            for token in self.known - self.muted:
                self.lead.hear(token, self.lead.roster.round, self.now)
            proposal = self.lead.proposal
            if proposal and self.lead.phase is Phase.PROPOSED:
                [rank0] = [token for token, rank in proposal.ranks.items() if rank == 0]
                if rank0 not in self.muted:
                    self.lead.serve(rank0, "store:1")
            self.lead.note_answers({f"{token[0]}:1": "" for token in self.muted - self.working})
            self.lead.step(self.now)
        return self.state()

    def stopped(self, seconds):
        """The lead, while all others go on."""
        self.now += seconds
        return self.passes(0.5)

    def watched(self, *names):
        return [name for name in names if f"{name}/1" in self.lead._alive]

    def news(self):
        """Whether what looks show has changed since this was asked last."""
        seen, self.seen = self.seen, self.lead.revision
        return self.seen != seen

    def state(self):
        lead = self.lead
        facts = {
            "waiting": lead.waiting(), "lost": lead.lost(self.now), "draining": lead.draining, "refused": lead.refused,
            "failures": lead._failures, "spares": [place.node for place in lead.roster.spares],
        }  # fmt: skip
        said = [f"{lead.phase.value} {lead.round}: {' '.join(self.members)}".rstrip(": ")]
        said += ["begun"] * lead.begun + ["hopeless"] * lead.is_hopeless
        said += [name for name in ("opened", "trained") if lead.proposal and getattr(lead.proposal, name)]
        return ", ".join(said + [f"{name} {transcripts.shown(of)}" for name, of in facts.items() if of])

    @property
    def members(self):
        return [place.node for place in self.lead.roster.members]


test_rounds = transcripts.of(__file__, Rounds)


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


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from(["come", "die", "leave"])), max_size=25))
def test_whatever_happens_who_stays_keeps_its_rank_and_nobody_silent_is_in(story):
    """Against a model that only knows who lives: nodes come, die and leave; all that live come back for each round."""
    job = Rounds()
    job.rules(2, 3, wait=4, last_call=4)
    lives = {}
    before = []
    for name, what in story:
        if what == "come":
            lives.setdefault(name, max([int(t[2:]) for t in job.known if t[0] == name], default=0) + 1)
        elif name in lives:
            token = f"{name}/{lives.pop(name)}"
            job.muted.add(token)
            if what == "leave":
                job.lead.leave(token)
        for each, life in lives.items():
            job.come(each, life=life)
        job.passes(2 * SILENCE)
        for each, life in lives.items():  # a second life waits until the first one is silent
            job.come(each, life=life)
        job.passes(2 * SILENCE)
        if len(lives) < 2:
            continue
        assert job.lead.phase is Phase.COMPLETE
        now = job.members
        assert set(now) <= set(lives) and len(now) == min(3, len(lives))
        assert set(job.lead.waiting()) == set(lives) - set(now)
        kept = [node for rank, node in enumerate(before) if node in lives and rank < len(now)]
        assert [node for node in kept if now.index(node) != before.index(node)] == []
        before = now
