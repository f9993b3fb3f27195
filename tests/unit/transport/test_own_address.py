"""Where other nodes reach this one, also where a node resolves its own name to loopback."""

import os
import socket
from pathlib import Path

import pytest

from ft_plugins.errors import ConfigError
from ft_plugins.transport import own_address as module
from ft_plugins.transport.own_address import (
    IDENTITY,
    UNKNOWN,
    address_of,
    depends_on_name,
    host_identity,
    known_apart,
    listening,
    own_address,
    towards_peer,
)


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
def test_a_loopback_address_is_replaced_for_a_peer_elsewhere_only(own, peer, expected, monkeypatch):
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
def test_only_a_name_is_resolved_otherwise_elsewhere(interface, towards, by_name):
    assert depends_on_name(interface, towards) == by_name


def test_the_way_to_a_host_is_that_of_the_kernel():
    assert own_address(None, "127.0.0.1") == own_address("127.0.0.1", "h") == own_address("lo", "h") == "127.0.0.1"
    with pytest.raises(ConfigError, match="no interface leads to 'no such host'.*--ftp-interface"):
        own_address(None, "no such host")
    with pytest.raises(ConfigError, match="--ftp-interface eth99: no device or address of this node"):
        own_address("eth99", "h")


def test_a_host_is_its_running_kernel_and_network_namespace(monkeypatch):
    boot, stat, own = Path.read_bytes, os.stat, host_identity()
    another = {"/proc/self/ns/net": "/proc/self/ns/mnt"}
    assert len(own) == IDENTITY and own == host_identity() != UNKNOWN
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"another boot" if path.name == "boot_id" else boot(path))
    rebooted = host_identity()
    monkeypatch.undo()
    monkeypatch.setattr(os, "stat", lambda path, **more: stat(another.get(path, path), **more))
    elsewhere = host_identity()
    monkeypatch.undo()
    assert len({own, rebooted, elsewhere}) == 3
    assert known_apart(own, rebooted) and known_apart(own, elsewhere) and not known_apart(own, host_identity())


def test_a_host_that_cannot_be_identified_may_be_any(monkeypatch):
    def missing(path):
        raise FileNotFoundError(path)

    own = host_identity()
    monkeypatch.setattr(Path, "read_bytes", missing)
    assert host_identity() == UNKNOWN
    assert not known_apart(own, UNKNOWN) and not known_apart(UNKNOWN, own) and not known_apart(UNKNOWN, UNKNOWN)


def test_a_link_local_address_keeps_its_device(monkeypatch):
    (entry,) = socket.getaddrinfo("fe80::1%lo", 9, type=socket.SOCK_STREAM)
    assert (address_of(entry[4]), address_of(("::1", 9, 0, 0)), address_of(("10.0.0.1", 9))) == (
        "fe80::1%lo", "::1", "10.0.0.1",
    )  # fmt: skip
    bound = []
    monkeypatch.setattr(socket, "create_server", lambda place, **_: bound.append(place))
    for address in ("fe80::1%lo", "127.0.0.2", ""):
        listening(address, 9, 1)
    assert bound == [("fe80::1", 9, 0, socket.if_nametoindex("lo")), ("127.0.0.2", 9), ("0.0.0.0", 9)]
