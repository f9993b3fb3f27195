"""The indices of waiting nodes, against counting them again."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.launcher.rounds.roster import Place, Roster
from ft_plugins.launcher.rounds.rounds import Candidate, Seat, Turnout, natural
from ft_plugins.launcher.rounds.waiting_nodes import Application, WaitingNodes

NAMES = ["n1", "n2", "n10", "m", "a9", "z"]
SEATS = st.none() | st.builds(lambda round, rank: Seat(round, rank, 6), st.integers(1, 4), st.integers(0, 5))
ROSTERS = st.builds(
    lambda number, names: Roster(number, tuple(Place(name, "h:1") for name in names)),
    st.integers(1, 4),
    st.lists(st.sampled_from(NAMES), unique=True),
)
STEPS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(NAMES), SEATS, st.integers(0, 9)),
    st.tuples(st.just("remove"), st.sampled_from(NAMES)),
    st.tuples(st.just("follow"), ROSTERS),
)


@settings(max_examples=500, deadline=None)
@given(ROSTERS, st.lists(STEPS, max_size=30))
def test_whoever_comes_and_goes_the_indices_say_what_counting_says(last, story):
    nodes, model = WaitingNodes(last), dict[str, Application]()
    for number, (what, *arguments) in enumerate(story):
        if what == "follow":
            last = arguments[0]
            nodes.follow(last)
        elif what == "remove":
            token = nodes.token(arguments[0])
            assert token == (model[arguments[0]].token if arguments[0] in model else None)
            assert nodes.remove(token or "?") == model.pop(arguments[0], None)
        elif arguments[0] not in model:
            name, seat, knows = arguments
            model[name] = Application(name, f"t{number % 3}-{name}", "h:1", seat, knows=knows)
            nodes.add(model[name])
        check(nodes, last, list(model.values()))


def check(nodes, last, expected):
    names = sorted((each.node for each in expected), key=natural)
    missing = [place.node for place in last.members if place.node not in names]
    candidates = [
        Candidate(each.node, max([seat for seat in (each.seat, last.seat(each.node)) if seat], default=None))
        for each in expected
    ]
    assert list(nodes) == expected and len(nodes) == len(expected)
    assert nodes.names() == names and nodes.names(2) == names[:2]
    assert nodes.missing() == missing and nodes.missing(2) == missing[:2]
    assert nodes.newest_round == max([0, *(max(each.knows, each.seat.round if each.seat else 0) for each in expected)])
    assert nodes.candidates({}) == candidates
    assert nodes.turnout == Turnout.of(candidates)
    assert all(each.token in nodes and nodes[each.token] == each for each in expected)
