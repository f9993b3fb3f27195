"""Who comes to lead: stations of several nodes in this process, each at a port of its own, asked over the network."""

import contextlib
from dataclasses import asdict, dataclass
from itertools import islice

import pytest

from ft_plugins.errors import ProtocolError
from ft_plugins.events import Events
from ft_plugins.launcher.rendezvous import endpoint
from ft_plugins.launcher.rendezvous.leader_search import _AT_ONCE, LeaderSearch
from ft_plugins.launcher.rendezvous.peers import ASKED_AT_ONCE, Credentials, PeerServer
from ft_plugins.launcher.rendezvous.round_join import search_pauses
from ft_plugins.launcher.rounds.node_messages import Leader
from ft_plugins.launcher.rounds.node_service import NodeIdentity, NodeService
from ft_plugins.launcher.rounds.roster_file import RosterFile
from ft_plugins.launcher.rounds.round_machine import Place, Roster
from ft_plugins.launcher.rounds.rounds import Rules

REACH = 5.0
SECRET = b"sixteen bytes or more"
RULES = Rules(2, 3)


@dataclass
class Node:
    """A node that is there, and what it remembers."""

    service: NodeService
    roster_file: RosterFile
    search: LeaderSearch
    port: PeerServer

    @property
    def endpoint(self):
        return self.service.me.endpoint

    def place(self):
        return Place(self.service.me.node, self.endpoint)


@pytest.fixture
def make():
    """Nodes of these names, whose last round was that of all of them in this order."""
    made = []

    def nodes(*names, silence=60.0, run="job"):
        listeners = [endpoint.listen_anywhere("127.0.0.1") for _ in names]
        ends = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
        found = []
        for name, end, listener in zip(names, ends, listeners, strict=True):
            service = NodeService(NodeIdentity(run, name, f"token-{name}", end), RULES, silence)
            roster_file = RosterFile("job", None)
            roster_file.remember(Roster(1, tuple(Place(*pair) for pair in zip(names, ends, strict=True))))
            us = Credentials(SECRET, run, name)
            port = PeerServer(listener, us, service.answer, service.gone, service.tick, Events())
            found.append(Node(service, roster_file, LeaderSearch(service, roster_file, [], REACH, us), port))
        made.extend(found)
        return found

    yield nodes
    for node in made:
        node.port.close()


def lead(name, generation, **fields):
    return Leader(name, f"token-{name}", "127.0.0.1:1", generation, **{"round": 1, **fields})


def elect(node, candidate):
    reply = node.service.answer({"do": "elect", "lead": asdict(candidate)})
    return bool(reply["granted"])


def test_the_first_of_the_last_round_leads_and_the_others_find_it(make):
    a, b, c = make("a", "b", "c")
    for node in (a, b, c):
        node.service.wake()
    assert c.search.look(patient=True) is None and b.search.look(patient=True) is None  # a is awake, and before them
    found = a.search.look(patient=True)
    assert found is not None and (found.node, found.generation) == ("a", 1)
    assert [node.search.look(patient=True) for node in (a, b, c)] == [found] * 3


def test_a_node_leads_when_those_before_it_are_gone_or_asleep_or_have_been_waited_for(make):
    a, b, c = make("a", "b", "c")
    a.port.close()
    b.service.wake()
    assert c.search.look(patient=True) is None
    assert "refused" in c.search.unreached[a.endpoint]
    assert make("d", "e")[1].search.look(patient=True) is not None  # d has never been awake
    found = c.search.look(patient=False)
    assert found is not None and found.node == "c"
    assert b.search.look(patient=True) == found


def test_a_node_consents_once_a_generation_and_never_beside_a_lead_that_lives_there(make):
    a, b = make("a", "b")
    assert elect(b, lead("x", 3))
    assert not elect(b, lead("y", 3)) and not elect(b, lead("y", 2))
    assert elect(b, lead("y", 4))
    assert a.search.look(patient=True) is not None and a.service.leading is not None
    assert not elect(a, lead("x", 99))


def test_a_node_that_has_forgotten_the_last_round_does_not_lead_those_that_remember_it(make):
    a, b, c = make("a", "b", "c")
    a.roster_file.roster = Roster(0)  # its machine was started again
    a.search._given.extend(node.endpoint for node in (a, b, c))
    for node in (a, b, c):
        node.service.wake()
    assert a.search.look(patient=True) is None and a.service.leading is None
    found = b.search.look(patient=True)  # although a comes first, and is awake
    assert found is not None and found.node == "b"
    assert [node.search.look(patient=True) for node in (a, c)] == [found] * 2


def test_a_node_that_is_refused_by_one_does_not_lead_and_tries_a_later_generation(make):
    a, b, c = make("a", "b", "c")
    known = a.search.meet([b.endpoint, c.endpoint])
    assert elect(c, lead("x", 1))  # somebody is quicker there
    assert a.search._claim(known) is None and a.service.leading is None
    found = a.search.look(patient=True)
    assert found is not None and found.generation == 2


def test_a_node_does_not_take_the_lead_when_another_one_was_elected_meanwhile(make):
    [a] = make("a")
    own = Leader("a", "token-a", a.endpoint, 1, 1)
    assert elect(a, own)
    assert elect(a, lead("x", 2))
    assert not a.service.take_lead(own, None) and a.service.leading is None


def test_a_lead_is_found_by_hearsay_wherever_it_is(make):
    a, b = make("a", "b")
    [c] = make("c")
    found = c.search.look(patient=True)
    assert found is not None and found.node == "c"
    b.search.meet([c.endpoint])
    assert a.search.best(a.search.meet([b.endpoint])) is None  # b has met c, but does not follow it
    b.service.follow(found)
    assert a.search.best(a.search.meet([b.endpoint])) == found


def test_of_two_leads_the_one_with_the_newest_round_counts_then_one_at_work_then_the_later():
    ascending = [
        lead("d", 9),
        lead("c", 8, round=3),
        lead("a", 9, round=3),
        lead("b", 9, round=3),
        lead("a", 1, round=3, complete=True),
        lead("a", 1, round=4),
    ]
    assert sorted(ascending, key=lambda found: found.standing) == ascending


def test_a_node_of_another_job_is_none_of_ours_and_says_no_more(make):
    [a], [b] = make("a"), make("b", run="other")
    assert a.search.meet([b.endpoint]) == {}
    assert a.search.foreign == a.search.unreached == {b.endpoint: "it belongs to another job"}


def test_the_end_is_told_from_node_to_node(make):
    a, b = make("a", "b")
    b.service.close("it has succeeded", "succeeded")
    a.search.meet([b.endpoint])
    assert (a.service.closed, a.service.status) == ("it has succeeded", "succeeded")
    a.service.close("no", "failed")
    assert a.service.closed == "it has succeeded"  # the first word counts


def test_an_implausible_generation_is_not_believed_and_keeps_no_node_from_the_lead(make):
    a, b = make("a", "b")
    for generation in (1 << 32, 1 << 30):
        for request in ("elect", "meet"):
            with contextlib.suppress(ProtocolError):
                b.service.answer({"do": request, "lead": asdict(lead("x", generation))})
        a.service.heard_of(generation)
    found = a.search.look(patient=True)
    assert found is not None and (found.node, found.generation) == ("a", 1)


def test_of_a_connection_the_station_remembers_one_process(make):
    [a] = make("a")
    assert a.search.look(patient=True) is not None
    for number in range(1000):
        a.service.answer({"do": "look", "token": f"t{number}"}, connection=7)
    assert len(a.service._connections) == 1
    a.service.answer({"do": "look", "token": "t999"}, connection=8)
    assert a.service._connections == {8: "t999"}, "the newest one counts"
    a.service.gone(7)
    a.service.gone(8)
    assert not a.service._connections


APPLICATION = {"node": "x", "token": "t", "endpoint": "127.0.0.1:1"}
IMPLAUSIBLE = [
    *({"seat": {"round": number, "rank": rank, "size": 1}} for number, rank in ((2**32 - 1, 0), (1, 1))),
    *({"knows": value} for value in (2**64 - 1, -1, True)),
    *({"node": value} for value in ("x" * 1000, "9" * 5000, "a\nb")),
    {"endpoint": "h:\u00b2"},
    {"token": ""},
]
WRONG = [
    *({"do": name} for name in ("look", "no", "elect", "pickle", ["look"])),
    {"do": "look", "token": 7},
    {"do": "apply", "application": {"node": "x"}},
    {"do": "elect", "lead": {"node": "x", "token": "t", "endpoint": "e", "generation": 1 << 40}},
    {"do": "meet", "lead": [[[[[1]]]]]},
    {"do": "close", "reason": "\x1b[2J", "status": "failed"},
    {"do": "close", "reason": "x" * 2000, "status": "failed"},
    {"do": "serve", "token": "t", "store": "no\nplace"},
    {},
]


def test_who_does_not_lead_says_so_and_a_request_that_makes_no_sense_is_refused(make):
    [a] = make("a")
    assert a.service.answer({"do": "look", "token": "t"})["moved"] is True
    applying = ({"do": "apply", "token": "t", "application": APPLICATION | more} for more in IMPLAUSIBLE)
    for request in (*applying, *WRONG):
        with pytest.raises(ProtocolError):
            a.service.answer(request)


# ---- many nodes ----


def test_many_nodes_search_the_lead_less_and_less_often_and_few_do_as_before():
    few, many = ([round(each, 2) for each in islice(search_pauses(nodes), 8)] for nodes in (8, 2048))
    assert few == [0.1] * 8
    assert many == [0.1, 0.15, 0.23, 0.34, 0.51, 0.76, 1.0, 1.0], "never more than a second"
    assert max(islice(search_pauses(128), 100)) == 0.25


def test_a_lead_meets_absent_nodes_a_few_at_a_time_and_all_in_turn(make, monkeypatch):
    [a] = make("a")
    assert a.search.look(patient=True) is not None
    names = [f"n{number}" for number in range(100)]
    places = [Place(name, f"127.0.0.1:{number + 1}") for number, name in enumerate(names)]
    a.roster_file.remember(Roster(2, (a.place(), *places)))
    met = []
    monkeypatch.setattr(a.search, "meet", lambda endpoints, *rest, **named: met.append(list(endpoints)) or {})
    for _ in range(4):
        a.search.meet_absent(0.0, REACH)
        a.search._last_meeting = float("-inf")
    assert all(each[0] == a.endpoint and len(each) <= 1 + ASKED_AT_ONCE for each in met)
    turns = [endpoint for each in met for endpoint in each[1:]]
    assert set(turns) == {place.endpoint for place in places} and turns[:100] == [place.endpoint for place in places]
    for place in places[:50]:
        application = {"node": place.node, "token": place.node, "endpoint": place.endpoint}
        assert a.service.answer({"do": "apply", "token": place.node, "application": application})["accepted"]
    del met[:]
    for _ in range(2):
        a.search.meet_absent(0.0, REACH)
        a.search._last_meeting = float("-inf")
    assert {endpoint for each in met for endpoint in each[1:]} == {place.endpoint for place in places[50:]}


def test_a_candidate_among_many_needs_the_consent_of_each_of_them(make):
    nodes = make(*(f"n{number:02d}" for number in range(2 * _AT_ONCE)))
    known = nodes[0].search.meet([node.endpoint for node in nodes])
    last = max(nodes[1:], key=lambda node: node.endpoint)  # who is asked last
    assert elect(last, lead("x", 1))
    assert nodes[0].search._claim(known) is None and nodes[0].service.leading is None
    found = nodes[0].search.look(patient=True)
    assert found is not None and (found.node, found.generation) == ("n00", 2)
    assert not any(elect(node, lead("y", 2)) for node in nodes[1:]), "each has consented"
