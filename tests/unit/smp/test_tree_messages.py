"""What neighbours in the tree send each other comes back as it was packed, or is refused whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.errors import ProtocolError
from ft_plugins.smp.tree.agreement import LOST_LIMIT, Announcement, ExchangeDecision, Summary
from ft_plugins.smp.tree.tree_messages import (
    LEAVE,
    MESSAGE_LIMIT,
    from_child,
    from_parent,
    packed_announcement,
    packed_summary,
)
from ft_plugins.snapshot.segment.slots import Version
from ft_plugins.transport import frame_codec

numbers = st.integers(0, 2**63 - 1)
versions = st.none() | st.builds(Version, numbers, numbers)
lost = st.lists(numbers, max_size=LOST_LIMIT).map(tuple)
bitmaps = st.integers(0, 2**40) | st.sets(st.integers(0, 65535)).map(lambda ones: sum(1 << one for one in ones))
summaries = st.builds(Summary, bitmaps, numbers, versions, versions, versions, versions, versions, versions, lost)


@given(summaries)
def test_a_summary_arrives_as_it_was_and_within_the_limit(summary):
    message = frame_codec.pack(packed_summary(summary))
    assert len(message) <= MESSAGE_LIMIT
    assert from_child(frame_codec.unpack(message)) == summary


@given(st.builds(Announcement, st.builds(ExchangeDecision, versions, versions), lost))
def test_an_announcement_arrives_as_it_was(announcement):
    assert from_parent(frame_codec.unpack(frame_codec.pack(packed_announcement(announcement)))) == announcement


def test_a_child_may_leave():
    assert from_child(LEAVE) is None


SUMMARY = packed_summary(Summary(5, 3, Version(1, 2), lost=(1,)))
ANNOUNCEMENT = packed_announcement(Announcement())


@pytest.mark.parametrize("name", sorted(SUMMARY.keys() - {"do"}))
@pytest.mark.parametrize("value", [None, -1, 1.5, "1", True, [[1, -4]], {}, b"x" * 8193, [1] * 65, [None] * 5])
def test_a_summary_with_a_field_of_another_kind_is_refused(name, value):
    if (name, value) == ("stall", None):
        value = [1, 2, 3, 4, 5, 6, 7]  # no phase has that number, and 2 is no flag
    if (name, value) == ("behind", None):
        value = [9, 1, 0]  # nothing lacks that number
    with pytest.raises(ProtocolError, match=f"summary: {name}"):
        from_child({**SUMMARY, name: value})
    with pytest.raises(ProtocolError, match="Field required"):
        from_child({key: field for key, field in SUMMARY.items() if key != name})


@pytest.mark.parametrize(
    "change",
    [
        {"lost": [1] * 65},
        {"lost": [-1]},
        {"stall": [1]},
        {"stall": [1, 0, 2, 3, 1, 0, 1, "1"]},
        {"stall": [1, True, 2, 3, 1, 0, 1, 1]},
        {"stall": [1, 2, 2, 3, 1, 0, 1, 1]},
        {"behind": [0, 1, 1 << 16]},
        {"exchange": [1]},
        {"committed": 7},
        {"do": "summary"},
        {"do": None},
    ],
)
def test_an_announcement_that_is_malformed_is_refused(change):
    with pytest.raises(ProtocolError):
        from_parent({**ANNOUNCEMENT, **change})


@pytest.mark.parametrize("name", [None, "announce", "take", ["summary"], 7])
def test_other_messages_of_a_child_are_refused_by_name(name):
    with pytest.raises(ProtocolError, match="unknown message of a child"):
        from_child({**SUMMARY, "do": name})
