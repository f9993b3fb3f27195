"""A few emulated nodes and a real lead form two rounds, and what is measured is of them."""

from workloads.rendezvous_scale import NAME_LENGTH, SILENCE, _name, measure


def test_nodes_form_a_round_lose_one_and_form_the_next_with_a_substitute():
    found = measure(nodes=6, waiting_seconds=SILENCE / 4)
    assert found.nodes == 6
    assert found.first_round_seconds > 0 and found.next_round_seconds > 0
    # each of five connects twice (4 frames each), searches, applies and looks at least once
    assert 5 * (4 + 4 + 2 + 2 + 2) <= found.forming_messages < 5 * 60
    assert found.forming_bytes > 5 * NAME_LENGTH * 6, "each received the names of all"
    assert 0 < found.waiting_messages < 6 * 4 and found.waiting_bytes > found.waiting_messages * 50
    assert found.running_messages < 6 * 4
    assert 0 <= found.waiting_share < 1 and 0 <= found.running_share < 1
    assert found.threads >= 2 and found.descriptors > 5
    assert found.longest_reply_seconds > 0


def test_names_are_as_long_as_they_may_be_and_sort_by_number():
    names = [_name(number) for number in (0, 1, 9, 10, 2047)]
    assert names == sorted(names) and {len(name) for name in names} == {48}
