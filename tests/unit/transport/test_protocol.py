"""Refusals, fields and texts of messages, and who may send them within a node."""

import socket
import threading

import msgpack
import pytest

from ft_plugins import errors
from ft_plugins.errors import BudgetError, FencedError, ProtocolError
from ft_plugins.transport import protocol


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.settimeout(10)
    yield ours, theirs
    ours.close()
    theirs.close()


def test_messages_of_a_node_arrive_until_the_other_side_closes(pair):
    ours, theirs = pair
    for number in range(3):
        protocol.send(ours, {"number": number})
    assert [protocol.receive(theirs) for _ in range(3)] == [{"number": number} for number in range(3)]
    with pytest.raises(TimeoutError):
        protocol.receive(theirs, 0.0)
    ours.sendall(b"\0\0")
    ours.shutdown(socket.SHUT_WR)
    with pytest.raises(ProtocolError, match="the connection ended inside a frame's length"):
        protocol.receive(theirs)
    assert protocol.receive(theirs) is None


def test_one_that_reads_a_message_drop_by_drop_costs_the_timeout_and_not_a_timeout_for_each_drop(pair):
    ours, theirs = pair
    ours.settimeout(0.4)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    over = threading.Event()

    def drip():
        while not over.wait(0.1) and theirs.recv(4096):
            pass

    reader = threading.Thread(target=drip)
    reader.start()
    with pytest.raises(TimeoutError):  # no single drop takes as long
        protocol.send(ours, {"text": "x" * (1 << 18)})
    over.set()
    reader.join()


def test_a_refusal_arrives_as_the_error_that_was_raised():
    for kind in (BudgetError, FencedError, errors.ResumeError):
        with pytest.raises(kind, match="12 bytes") as caught:
            protocol.raise_refusal(protocol.refusal(kind("12 bytes")))
        assert type(caught.value) is kind
    protocol.raise_refusal({"ok": True})


@pytest.mark.parametrize("name", ["EXIT_REFUSED", "KeyboardInterrupt", "__doc__", None, 3, "NoSuchError"])
def test_a_refusal_of_unknown_kind_is_a_protocol_error(name):
    with pytest.raises(ProtocolError, match="because"):
        protocol.raise_refusal({"ok": False, "error": name, "message": "because"})
    with pytest.raises(ProtocolError, match="without a reason"):
        protocol.raise_refusal({"ok": 1})


def test_a_field_of_the_wrong_type_or_range_is_named():
    assert protocol.number({"do": "attach", "rank": 3}, "rank") == 3
    for value in (None, "3", True, 3.0, -1, 8):
        with pytest.raises(ProtocolError, match="attach: field 'rank' should be from 0 to 7"):
            protocol.number({"do": "attach", "rank": value}, "rank", 8)


def test_a_peer_of_this_user_is_let_in(pair):
    protocol.check_peer(pair[0])


def test_what_is_repeated_from_outside_is_short_and_has_no_control_characters():
    name = "\x1b[2J\r\n" + "x" * 100_000
    with pytest.raises(ProtocolError) as caught:
        protocol.number({"do": name}, "rank")
    assert str(caught.value).startswith("\\x1b[2J\\r\nxxx") and len(str(caught.value)) < 200
    with pytest.raises(ProtocolError) as caught:
        protocol.number({"do": [name], "rank": -1}, "rank")
    assert len(str(caught.value)) < 200
    reply = protocol.refusal(BudgetError("one\ntwo \x1b[31m" + "y" * (2 << 20)))
    assert len(msgpack.packb(reply)) < 5000
    with pytest.raises(BudgetError, match=r"^one\ntwo \\x1b\[31myyy") as refused:
        protocol.raise_refusal({"ok": False, "error": "BudgetError", "message": "one\ntwo \x1b[31m" + "y" * 5000})
    assert len(str(refused.value)) <= protocol.TEXT_LIMIT + len("\\x1b...")


def test_an_error_of_another_kind_is_a_line_with_its_place():
    try:
        {}["holders"]  # noqa: B018
    except KeyError as error:
        found = protocol.unexpected(error)
    assert str(found).startswith("KeyError: 'holders' (test_protocol.py:") and "\n" not in str(found)


def test_a_process_of_another_user_is_rejected_by_its_uid(pair, monkeypatch):
    uid = protocol.os.getuid()
    monkeypatch.setattr(protocol.os, "getuid", lambda: uid + 1)
    with pytest.raises(ProtocolError, match=f"rejected connection from uid {uid}; only uid {uid + 1} is allowed"):
        protocol.check_peer(pair[0])
