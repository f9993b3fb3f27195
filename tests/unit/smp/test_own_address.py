"""Where other nodes reach this one, also where a node resolves its own name to loopback."""

from __future__ import annotations

import pytest

from ft_plugins.errors import ConfigError
from ft_plugins.smp import own_address as module
from ft_plugins.smp.own_address import depends_on_name, own_address, towards_peer


@pytest.mark.parametrize(
    "own, peer, expected",
    [
        ("127.0.1.1", "10.0.0.2", "the way to 10.0.0.2"),
        ("127.0.0.1", "fd00::2", "the way to fd00::2"),
        ("::1", "10.0.0.2", "the way to 10.0.0.2"),
        ("127.0.1.1", "127.0.2.1", "127.0.1.1"),  # nodes emulated on one machine
        ("127.0.1.1", "::1", "127.0.1.1"),
        ("10.0.0.1", "10.0.0.2", "10.0.0.1"),
        ("10.0.0.1", "127.0.1.1", "10.0.0.1"),
        ("fe80::1%eth0", "fe80::2%eth0", "fe80::1%eth0"),
    ],
)
def test_a_loopback_address_is_replaced_for_a_peer_elsewhere_only(
    own: str, peer: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_on_the_way", lambda host: f"the way to {host}")
    assert towards_peer(own, peer) == expected


@pytest.mark.parametrize(
    "interface, towards, by_name",
    [
        (None, "node0.cluster", True),
        (None, "localhost", False),
        (None, "127.0.0.3", False),
        (None, "::1", False),
        ("lo", "node0.cluster", False),  # as asked for
    ],
)
def test_only_a_name_is_resolved_otherwise_elsewhere(interface: str | None, towards: str, by_name: bool) -> None:
    assert depends_on_name(interface, towards) == by_name


def test_the_way_to_a_host_is_that_of_the_kernel() -> None:
    assert own_address(None, "127.0.0.1") == own_address("127.0.0.1", "h") == own_address("lo", "h") == "127.0.0.1"
    with pytest.raises(ConfigError, match="no interface leads to 'no such host'.*--ftp-interface"):
        own_address(None, "no such host")
    with pytest.raises(ConfigError, match="--ftp-interface eth99: no device or address of this node"):
        own_address("eth99", "h")
