"""What is sent of a roster to a node that knows another one."""

from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.base.intake import parsed
from ft_plugins.errors import ProtocolError
from ft_plugins.launcher.rounds.field_types import MOST_NODES
from ft_plugins.launcher.rounds.roster import MOST_PAGES, PAGE, Place, Roster, RosterPage, RosterPages, assembled
from ft_plugins.transport import frame_codec

PLACES = st.builds(
    Place, st.sampled_from([f"n{number}" for number in range(6)]), st.sampled_from(["h:1", "i:2", "j:3"])
)
ROSTERS = st.builds(
    Roster, st.integers(1, 3), st.lists(PLACES, max_size=6).map(tuple), st.lists(PLACES, max_size=3).map(tuple)
)


def named(count, number=1, spares=0):
    """Rosters of long names."""
    places = [Place(f"node{each:05d}".ljust(48, "x"), f"10.0.{each >> 8}.{each & 255}:29400") for each in range(count)]
    return Roster(number, tuple(places[: count - spares]), tuple(places[count - spares :]))


def received(pages, base):
    """All pages for a node that knows `base`, as they arrive there."""
    first = through(pages.page(base, 0))
    return [first, *(through(pages.page(base, number)) for number in range(1, first.pages))]


def through(page):
    return parsed(RosterPage, frame_codec.unpack(frame_codec.pack(page)))


@settings(max_examples=300, deadline=None)
@given(ROSTERS, ROSTERS, ROSTERS)
def test_whatever_a_node_knows_it_ends_with_the_roster_that_was_sent(new, old, known):
    pages = RosterPages(new, old)
    assert assembled(received(pages, known.digest), known) == new
    assert assembled(received(pages, old.digest), old) == new
    assert assembled(received(pages, ""), known) == new


def test_a_node_that_knows_the_round_before_receives_what_changed_and_others_all():
    old = named(2048)
    members = list(old.members)
    members[700] = Place("substitute", "10.9.9.9:1")
    new = Roster(2, tuple(members), (Place("spare", "10.9.9.8:1"),))
    pages = RosterPages(new, old)
    [page] = received(pages, old.digest)
    assert page.nodes == ((700, "substitute", "10.9.9.9:1"), (2048, "spare", "10.9.9.8:1"))
    assert len(frame_codec.pack(asdict(page))) < 400
    for base in ("", named(2048, 7).digest):
        found = received(pages, base)
        assert [len(each.nodes) for each in found] == [PAGE] * 4 + [1]
        assert assembled(found, Roster(0)) == new


def test_pages_of_the_longest_names_and_endpoints_fit_into_messages():
    longest = "\U0001f4a0" * 294 + ":29400"  # four bytes each
    places = tuple(Place(f"node{number:05d}".ljust(48, "x"), longest) for number in range(MOST_NODES))
    pages = RosterPages(Roster(1, places, places))
    found = received(pages, "")
    assert len(found) == MOST_PAGES and all(len(each.nodes) == PAGE for each in found)
    for number in range(MOST_PAGES):
        view = {"do": "look", "roster": pages.page("", number), "names": [places[0].node] * 32, "text": "x" * 4000}
        assert len(frame_codec.pack(view)) < frame_codec.FRAME_LIMIT
    assert assembled(found, Roster(0)) == pages.roster


def test_a_page_after_the_last_one_is_the_last_one():
    """The roster may have become shorter since its first page was sent."""
    pages = RosterPages(named(PAGE + 1))
    assert pages.page("", 5) == pages.page("", 1)


def test_pages_of_two_rosters_are_not_put_together():
    old, new = RosterPages(named(2 * PAGE, 1)), RosterPages(named(2 * PAGE, 2))
    first, second = received(old, "")
    other = received(new, "")[1]
    assert assembled([first, second], Roster(0)) is not None
    for wrong in ([first, other], [first], [first, first], [second, first]):
        assert assembled(wrong, Roster(0)) is None


@pytest.mark.parametrize(
    "change",
    [
        {"digest": "0" * 32},
        {"members": 1},
        {"spares": 2},
        {"round": 9},
        {"nodes": [(0, "a", "h:1"), (1, "b", "h:2"), (2, "other", "h:3")]},
        {"nodes": [(0, "a", "h:1"), (1, "b", "h:2")]},
        {"nodes": [(0, "a", "h:1"), (1, "b", "h:2"), (3, "c", "h:3")]},
        {"base": "1" * 32},
    ],
    ids=["digest", "members", "spares", "round", "name", "missing", "beyond", "base"],
)
def test_what_does_not_result_in_the_announced_roster_is_not_kept(change):
    roster = Roster(1, (Place("a", "h:1"), Place("b", "h:2")), (Place("c", "h:3"),))
    [page] = received(RosterPages(roster), "")
    assert assembled([page], Roster(0)) == roster
    assert assembled([through(asdict(page) | change)], Roster(0)) is None


@pytest.mark.parametrize(
    "change",
    [
        {"members": MOST_NODES + 1},
        {"pages": MOST_PAGES + 1},
        {"nodes": [(0, "a", "h:1")] * (PAGE + 1)},
        {"nodes": [(2 * MOST_NODES, "a", "h:1")]},
        {"nodes": [(0, "x" * 49, "h:1")]},
        {"nodes": [(0, "a", "h:x")]},
        {"nodes": [(-1, "a", "h:1")]},
        {"digest": "x" * 32},
        {"digest": "0" * 33},
    ],
)
def test_a_page_that_exceeds_its_bounds_is_refused(change):
    page = RosterPages(named(2)).page("", 0)
    with pytest.raises(ProtocolError):
        parsed(RosterPage, page | change)
