"""Networks of emulated nodes."""

from harness.emulated_nodes import network


def test_a_network_can_follow_another_one_of_the_same_names_at_once():
    """A link that went with its namespace alone would be there for a moment longer: seen in one try of five."""
    for _ in range(25):
        with network([1]) as hosts:
            assert len(hosts) == 1
