"""Between SMPs: who does not know the secret gets nothing, what does not fit ends its connection, no wait is unbounded.

The other side is played byte by byte where it misbehaves; what peers do to a server is in `test_hostile_peers`.
"""

import contextlib
import os
import queue
import socket
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from ft_plugins.base.intake import within
from ft_plugins.errors import BudgetError, ConfigError, FencedError, ProtocolError
from ft_plugins.events import Events
from ft_plugins.smp.exchange.frames import Data
from ft_plugins.smp.exchange.readers import PipelinedPeer
from ft_plugins.snapshot.segment.slots import Version
from ft_plugins.transport import calls, channel
from ft_plugins.transport.calls import SECRET_LIMIT, Peer, Server, read_secret
from ft_plugins.transport.channel import TAG, Party
from ft_plugins.transport.dial import prove
from ft_plugins.transport.door import DoorLimits
from ft_plugins.transport.frame_codec import PAYLOAD_LIMIT
from harness.job_control import wait_until
from tests.unit.transport.purposes import (
    CUT,
    JOB,
    MALFORMED,
    PAYLOADS,
    SECONDS,
    SECRET,
    Known,
    Smp,
    eager,
    ended,
    frame,
    read,
)  # fmt: skip

HERE, THERE = Party("smp", JOB, "1"), Party("smp", JOB, "there")
TIMEOUT = 0.3  # of a Peer that is meant to run into it


def shake(connection, secret=SECRET):
    """The server's half of the handshake."""
    server = channel.ServerHandshake(secret, THERE)
    connection.sendall(frame(server.challenge(read(connection))))
    known = Known(connection, server.finish(read(connection)))
    known.say({"ok": True})
    return known


@pytest.fixture
def node(monkeypatch):
    made = []
    eager(monkeypatch)

    def make(*args, **kwargs):
        made.append(Smp(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def peer():
    made = []

    def make(endpoint, secret=SECRET, me=HERE, timeout=SECONDS, node=""):
        made.append(Peer(endpoint, me, secret, timeout, node))
        return made[-1]

    yield make
    for each in made:
        each.close()
        each.drop()


@pytest.fixture
def played():
    """Where a server listens that does with each connection, in turn, what the test says; all is closed afterwards."""
    with contextlib.ExitStack() as stack:

        def make(*scripts):
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            listener.settimeout(SECONDS)

            def serve():
                for script in scripts:
                    with contextlib.suppress(OSError):
                        connection = stack.enter_context(listener.accept()[0])
                        connection.settimeout(SECONDS)
                        script(connection)

            thread = threading.Thread(target=serve, daemon=True)
            thread.start()
            stack.callback(thread.join, SECONDS)
            host, port = listener.getsockname()
            return str(host), int(port)

        yield make


def spent(began):
    return time.monotonic() - began


# ---- requests and replies ----


@pytest.mark.parametrize("encrypt", [False, True])
@pytest.mark.parametrize("size", [0, 1, 4096, PAYLOAD_LIMIT])
def test_a_payload_comes_back_byte_by_byte_and_is_writable(node, peer, size, encrypt):
    def change(message, payload):
        payload ^= 1
        return {"echo": message["value"]}, payload

    there = node(change, encrypt=encrypt)
    payload = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    reply, back = peer(there.endpoint, me=replace(HERE, encrypt=encrypt)).ask("echo", payload, value=[1, "two", None])
    assert reply["echo"] == [1, "two", None] and (back == payload ^ 1).all() and len(back) == size
    assert there.asked[0]["do"] == "echo" and there.seen.empty()


def test_requests_of_many_threads_on_one_connection_get_the_replies_that_are_theirs(node, peer):
    there = node()
    one, wrong = peer(there.endpoint), []

    def ask(thread):
        for number in range(40):
            value = thread * 1000 + number
            payload = np.full(1 + 37 * number, thread, dtype=np.uint8)
            reply, back = one.ask("echo", payload, value=value)
            if reply["echo"] != value or len(back) != len(payload) or (back != thread).any():
                wrong.append(value)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    assert not wrong and len(there.asked) == 320 and len(there.threads) == 1, "all over one connection"


@pytest.mark.parametrize("kind", [BudgetError, FencedError, ProtocolError])
def test_a_refusal_arrives_as_what_it_was_and_the_connection_goes_on(node, peer, kind):
    def refuse(message, payload):
        if message["do"] == "refuse":
            raise kind("not today")
        return {}, payload

    there = node(refuse)
    one = peer(there.endpoint)
    for _ in range(2):
        with pytest.raises(kind, match="not today"):
            one.ask("refuse")
        assert one.ask("echo", np.ones(3, dtype=np.uint8))[1].tolist() == [1, 1, 1]
    assert len(there.threads) == 1 and there.seen.empty()


def test_after_an_error_the_next_request_makes_a_new_connection(played, peer):
    def hang_up(connection):
        shake(connection).hear()
        connection.close()

    def answer(connection):
        known = shake(connection)
        assert known.hear() == {"do": "second"}
        known.say({"ok": True, "number": 2})

    one = peer(played(hang_up, answer))
    with pytest.raises(ProtocolError, match="did not answer 'first'"):
        one.ask("first")
    assert one.ask("second")[0]["number"] == 2


def test_a_server_that_was_replaced_at_its_port_is_found_again(node, peer):
    there = node()
    one = peer(there.endpoint)
    one.ask("echo")
    there.server.close()
    with contextlib.suppress(ProtocolError):
        one.ask("echo")  # the last request of the old connection, at most
    again = Server(*there.endpoint, THERE, SECRET, lambda message, payload: ({"new": True}, None), Events("n"))
    with contextlib.closing(again):
        with contextlib.suppress(ProtocolError):
            one.ask("echo")
        assert one.ask("echo")[0].get("new") is True


def test_a_port_that_is_taken_is_an_error_that_names_it_and_the_option(node):
    host, port = node().endpoint
    with pytest.raises(ConfigError, match=rf"{host}:{port}.*--ftp-interface"):
        Server(host, port, THERE, SECRET, lambda message, payload: ({}, None), Events("n"))
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1.*--ftp-interface"):  # an address of nobody
        Server("192.0.2.1", 0, THERE, SECRET, lambda message, payload: ({}, None), Events("n"))


# ---- who is let in ----


def test_a_server_that_does_not_know_the_secret_is_told_nothing(played, peer):
    heard = queue.Queue()

    def impostor(connection):
        hello = read(connection)
        heard.put(hello)
        connection.sendall(frame(channel.ServerHandshake(b"a guess of it", THERE).challenge(hello)))
        heard.put(read(connection))

    with pytest.raises(ProtocolError, match="does not know the secret.*--ftp-secret-file"):
        peer(played(impostor)).ask("echo", np.ones(9, dtype=np.uint8), value="precious")
    assert sorted(heard.get(timeout=SECONDS)) == ["encrypt", "job", "node", "nonce", "purpose"]
    assert heard.get(timeout=SECONDS) is None, "it hangs up, without a proof that could be tried offline"


def test_a_server_that_hangs_up_during_the_handshake_may_be_of_another_job():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionResetError, match="hung up during the handshake; is it of this job"):
            prove(ours, SECRET, HERE, time.monotonic() + SECONDS)


def test_a_node_that_is_not_the_expected_one_is_asked_nothing(node, peer):
    there = node()
    with pytest.raises(ProtocolError, match="expected the SMP of node elsewhere there, found that of node there"):
        peer(there.endpoint, node="elsewhere").ask("echo")
    assert not there.asked
    assert peer(there.endpoint, node="there").ask("echo", value=1)[0]["echo"] == 1


def test_a_recorded_server_is_not_believed_a_second_time(node, played, peer):
    """Somebody stands between: hands a peer's first words on to the true server, and the answer to another peer too."""
    true, recorded, nonces = node().endpoint, [], []

    def relay(connection):
        hello = read(connection)
        nonces.append(hello["nonce"])
        with socket.create_connection(true, SECONDS) as onwards:
            onwards.sendall(frame(hello))
            recorded.append(read(onwards))
        connection.sendall(frame(recorded[0]))
        assert "proof" in read(connection), "it was for this one"

    def replay(connection):
        nonces.append(read(connection)["nonce"])
        connection.sendall(frame(recorded[0]))
        read(connection)

    between = played(relay, replay)
    with pytest.raises(ProtocolError, match="hung up|reset|no answer"):
        peer(between, timeout=1).ask("echo")
    with pytest.raises(ProtocolError, match="does not know the secret"):
        peer(between).ask("echo")
    assert len(set(nonces)) == 2


def test_where_all_places_are_busy_none_is_let_in_until_a_request_ends(node, peer, monkeypatch):
    monkeypatch.setattr(calls, "_CONNECTIONS", 1)
    go_on, begun = threading.Event(), threading.Event()

    def slow(message, payload):
        begun.set()
        assert message["do"] != "wait" or go_on.wait(SECONDS)
        return {"echo": message.get("value")}, payload

    there = node(slow)
    known = there.introduced()
    with known.connection:
        known.say({"do": "wait", "value": 3})
        assert begun.wait(SECONDS)
        with pytest.raises(ProtocolError, match="hung up|reset|no answer"):  # the last one if cut off in an attempt
            peer(there.endpoint, timeout=0.5).ask("echo")
        assert "node 1: all 1 connections are busy" in there.rejected()
        go_on.set()
        assert known.hear()["echo"] == 3, "a request is never cut off to make room"
        assert peer(there.endpoint).ask("echo", value=1)[0]["echo"] == 1, "it tries until there is a place"


def test_an_idle_connection_makes_room_first_the_oldest_of_the_same_node(node, monkeypatch):
    monkeypatch.setattr(calls, "_CONNECTIONS", 3)
    there = node()
    other = Party("smp", JOB, "other")
    with contextlib.ExitStack() as stack:

        def newer(who=HERE):
            known = there.introduced(who)
            stack.enter_context(known.connection)
            return known

        def alive(known):
            known.say({"do": "echo", "value": 7})
            answered = bool(known.hear()["echo"] == 7)
            open_ones = there.server._serving._open  # each becomes idle only after its reply has been sent
            wait_until(lambda: not any(each.busy for each in [*open_ones]), SECONDS, lambda: f"busy: {[*open_ones]}")
            return answered

        others, first, second = newer(other), newer(), newer()
        assert alive(first), "since then the second has been idle for longer"
        third = newer()
        assert ended(second.connection)
        assert alive(others) and alive(first) and alive(third)
        newest = newer(Party("smp", JOB, "a third node"))
        assert ended(others.connection) and alive(first) and alive(third) and alive(newest)


@pytest.fixture
def impatient(node, monkeypatch):
    """A server whose patience with proven peers can be seen."""
    monkeypatch.setattr(calls, "IDLE_SECONDS", 0.2)
    monkeypatch.setattr(calls, "PART_SECONDS", 0.2)
    return node()


def test_an_idle_connection_is_closed_and_its_peer_connects_again_without_an_error(impatient, peer):
    one = peer(impatient.endpoint)
    assert one.ask("echo", value=1)[0]["echo"] == 1
    assert one._line is not None and ended_unread(one._line.connection)
    payload = np.ones(PAYLOAD_LIMIT, dtype=np.uint8)
    assert one.ask("echo", payload, value=2)[0]["echo"] == 2
    assert ended_unread(one._line.connection) and one.ask("echo", value=3)[0]["echo"] == 3
    assert [message["value"] for message in impatient.asked] == [1, 2, 3] and impatient.seen.empty()


def ended_unread(connection):
    """As `ended`; whoever reads it next sees the end as well."""
    connection.settimeout(SECONDS)
    return connection.recv(1, socket.MSG_PEEK) == b""


def test_a_line_connects_again_too(impatient):
    line = PipelinedPeer(impatient.endpoint, HERE, SECRET, SECONDS)
    wanted, into = Data(0, Version(1, 2), 0, 0), np.empty(0, dtype=np.uint8)
    for _ in range(2):
        line.ask_for(wanted)
        line.take(into)
        assert line._line is not None and ended_unread(line._line.connection)
    line.release()
    assert len(impatient.asked) == 2


def test_a_request_that_is_cut_off_twice_is_an_error(played, peer):
    def answer_once(connection):
        known = shake(connection)
        known.hear()
        known.say({"ok": True})
        hang_up_on(known)

    def hang_up_on(known):
        known.hear()
        known.connection.close()

    one = peer(played(answer_once, lambda connection: hang_up_on(shake(connection))))
    one.ask("first")
    with pytest.raises(ProtocolError, match="did not answer 'second': it hung up"):
        one.ask("second")


def test_one_that_drips_a_frame_or_reads_no_reply_is_hung_up_on(node, monkeypatch):
    monkeypatch.setattr(calls, "PART_SECONDS", 0.2)
    impatient = node()  # with a connection that is idle, as while the frames below are made, it has patience
    known, pause = impatient.introduced(), threading.Event()
    with known.connection as dripping, contextlib.suppress(OSError):
        for byte in known.frame({"do": "echo", "value": "x" * 60})[:60]:
            dripping.sendall(bytes([byte]))
            pause.wait(0.05)
        pytest.fail("after many times its time it is still listened to")
    assert "within 0.2 s" in impatient.disconnected()
    deaf = impatient.introduced()
    with deaf.connection as connection:
        frames = [deaf.frame({"do": "echo", "bytes": PAYLOAD_LIMIT}, bytes(PAYLOAD_LIMIT)) for _ in range(16)]
        with contextlib.suppress(OSError):
            connection.sendall(b"".join(frames))
        assert "within 0.2 s" in impatient.disconnected()


def test_the_kernel_looks_after_a_peer_that_is_gone(node, monkeypatch):
    served = queue.Queue()
    real = calls.Serving.take
    monkeypatch.setattr(calls.Serving, "take", lambda serving, one: served.put(one.connection) or real(serving, one))
    with node().introduced().connection:
        connection = served.get(timeout=SECONDS)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        for name in ("TCP_KEEPIDLE", "TCP_USER_TIMEOUT"):
            assert 0 < connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) <= 120_000, name
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < calls.IDLE_SECONDS


# ---- what does not fit ----


def announced(known, payload=b"hello", **changes):
    return known.frame({"do": "echo", "bytes": len(payload), **changes}, payload)


@pytest.mark.parametrize("name", CUT)
def test_a_connection_that_ends_in_the_middle_is_an_event(node, name):
    there = node()
    known = there.introduced()
    with known.connection as connection:
        connection.sendall(CUT[name](known))
        connection.shutdown(socket.SHUT_WR)
        assert ended(connection)
    assert there.disconnected() and not there.asked


def test_a_connection_that_ends_between_frames_is_none(node):
    there = node()
    known = there.introduced()
    with known.connection as connection:
        known.say({"do": "echo", "value": 3})
        assert known.hear()["echo"] == 3
        connection.shutdown(socket.SHUT_WR)
        assert ended(connection)
    assert there.seen.empty()


@pytest.mark.parametrize("name", [*MALFORMED, *PAYLOADS, *CUT])
def test_a_reply_that_is_malformed_is_an_error_and_its_connection_is_not_used_again(played, peer, name):
    def answer_badly(connection):
        known = shake(connection)
        known.hear()
        connection.sendall({**MALFORMED, **PAYLOADS, **CUT}[name](known))
        connection.shutdown(socket.SHUT_WR)
        assert ended(connection)

    def answer(connection):
        known = shake(connection)
        known.hear()
        known.say({"ok": True, "fine": 1})

    one = peer(played(answer_badly, answer))
    with pytest.raises(ProtocolError, match="did not answer 'first'") as failed:
        one.ask("first")
    assert "timed out" not in str(failed.value), "what was announced is not waited for"
    assert one.ask("second")[0]["fine"] == 1


# ---- who says nothing ----


def quiet(connection):
    """Takes what comes and says nothing."""


def quiet_after_the_handshake(connection):
    shake(connection)


def quiet_within_a_reply(connection):
    known = shake(connection)
    known.hear()
    connection.sendall(known.frame({"ok": True})[:-1])


def quiet_within_a_payload(connection):
    known = shake(connection)
    known.hear()
    connection.sendall(announced(known)[: -TAG - 3])


@pytest.mark.parametrize("script", [quiet, quiet_after_the_handshake, quiet_within_a_reply, quiet_within_a_payload])
def test_a_peer_that_goes_silent_costs_its_timeout_and_no_more(played, peer, script):
    def answer(connection):
        known = shake(connection)
        known.hear()
        known.say({"ok": True, "fine": 1})

    one = peer(played(script, answer), timeout=TIMEOUT)
    began = time.monotonic()
    with pytest.raises(ProtocolError, match="no answer within 0.3 s"):
        one.ask("echo")
    assert spent(began) > TIMEOUT * 0.9
    one._timeout = SECONDS
    assert one.ask("echo")[0]["fine"] == 1, "what comes late on the old connection is nobody's answer"


def test_a_peer_that_takes_a_request_in_drips_costs_its_timeout_and_no_more(played, peer):
    taken, pause = [0], threading.Event()

    def drip(connection):
        known = shake(connection)
        known.hear()
        known.say({"ok": True})
        while part := connection.recv(1 << 14):
            taken[0] += len(part)
            pause.wait(0.02)

    one = peer(played(drip), timeout=TIMEOUT)
    one.ask("first")
    assert one._line is not None
    one._line.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    with pytest.raises(ProtocolError, match="did not answer 'second'"):
        one.ask("second", np.zeros(PAYLOAD_LIMIT, dtype=np.uint8))
    assert taken[0] < PAYLOAD_LIMIT / 2, "each drip passed in time, all of them did not"


def test_requests_that_stop_halfway_do_not_keep_the_others_waiting(node, peer):
    """As the lanes of a node that has lost its power: as many as its eight ranks and their two streams each."""
    there = node()
    with contextlib.ExitStack() as held:
        for _ in range(24):
            known = there.introduced()
            held.enter_context(known.connection).sendall(known.frame({"do": "echo", "value": "x" * 60})[:40])
        assert peer(there.endpoint).ask("echo", value=1)[0]["echo"] == 1


def test_a_reply_to_a_request_that_was_given_up_is_not_taken_for_that_of_the_next_one(node, peer, monkeypatch):
    """A signal's handler may raise anything between a request and its reply."""
    one = peer(node().endpoint)
    one.ask("echo", value=0)

    def interrupted(*args):
        raise SystemExit(3)

    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr(Peer, "receive", interrupted)
        one.ask("echo", value=1)
    assert one.ask("echo", value=2)[0]["echo"] == 2


@pytest.fixture
def hasty(node, monkeypatch):
    """A server whose patience with strangers can be seen."""
    monkeypatch.setattr(calls, "_LIMITS", DoorLimits(seconds=0.2))
    return node()


def test_one_who_has_proved_who_he_is_may_take_his_time(hasty):
    known = hasty.introduced()
    with known.connection:
        raw = known.frame({"do": "echo", "value": 4})
        known.connection.sendall(raw[:10])
        threading.Event().wait(0.5)  # where a stranger has 0.2 s
        known.connection.sendall(raw[10:])
        assert known.hear()["echo"] == 4


# ---- hanging up ----


def test_hanging_up_ends_a_request_that_is_under_way(node, peer):
    asked, go_on = threading.Event(), threading.Event()

    def wait(message, payload):
        asked.set()
        go_on.wait(SECONDS)
        return {}, None

    there = node(wait)
    one, failures = peer(there.endpoint, timeout=10 * SECONDS), []

    def ask():
        try:
            one.ask("echo")
        except ProtocolError as error:
            failures.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    assert asked.wait(SECONDS)
    one.close()
    thread.join(SECONDS)
    assert not thread.is_alive() and len(failures) == 1, "it does not wait for the answer"
    go_on.set()
    with pytest.raises(ProtocolError, match="hung up"):
        one.ask("echo")
    one.close()
    assert len(there.asked) == 1


def test_hanging_up_before_the_first_request_makes_no_connection(node, peer):
    there = node()
    one = peer(there.endpoint)
    one.close()
    with pytest.raises(ProtocolError, match="hung up"):
        one.ask("echo")
    assert not there.asked and one._dialer.connection is None


def test_hanging_up_ends_a_request_that_is_still_connecting(played, peer):
    called = threading.Event()

    def quiet_from_the_start(connection):
        read(connection)
        called.set()

    patience = 4.0
    one, failures = peer(played(quiet_from_the_start), timeout=patience), []

    def ask():
        try:
            one.ask("echo")
        except ProtocolError as error:
            failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert called.wait(SECONDS)
    one.close()
    thread.join(patience / 2)
    ended_early = not thread.is_alive()
    thread.join(SECONDS)
    assert len(failures) == 1 and ended_early


def test_hanging_up_ends_a_call_that_nobody_answers(peer):
    """A listener whose queue is full leaves a call without any word, as a host does that is gone."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        one, failures = peer(listener.getsockname(), timeout=SECONDS), []

        def ask():
            try:
                one.ask("echo")
            except ProtocolError as error:
                failures.append(error)

        thread = threading.Thread(target=ask)
        began = time.monotonic()
        thread.start()
        while one._dialer.connection is None:
            assert spent(began) < SECONDS / 2
            time.sleep(0.005)
        thread.join(0.2)
        assert thread.is_alive(), "or the queue was not full"
        one.close()
        thread.join(SECONDS / 2)
        assert not thread.is_alive() and len(failures) == 1


def test_nothing_is_asked_after_hanging_up(played, peer):
    called, closed = threading.Event(), threading.Event()
    heard = queue.Queue()

    def slow_to_shake(connection):
        hello = read(connection)
        called.set()
        assert closed.wait(SECONDS)
        connection.sendall(frame(channel.ServerHandshake(SECRET, THERE).challenge(hello)))
        heard.put(read(connection))

    one = peer(played(slow_to_shake))

    def ask():
        with contextlib.suppress(ProtocolError):
            one.ask("echo")

    thread = threading.Thread(target=ask)
    thread.start()
    assert called.wait(SECONDS)
    one.close()
    closed.set()
    thread.join(SECONDS)
    assert heard.get(timeout=SECONDS) is None


def test_a_server_that_has_closed_lets_nobody_in(node, peer):
    there = node()
    one = peer(there.endpoint)
    one.ask("echo")
    there.server.close()
    with pytest.raises(ProtocolError, match="did not answer"):
        peer(there.endpoint).ask("echo")
    with pytest.raises(ProtocolError, match="did not answer"):
        for _ in range(2):  # a connection ends at its next request
            one.ask("echo")
    there.server.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_request_that_the_handler_stumbles_over_is_answered_by_a_close_and_an_event(node, peer):
    there = node(lambda message, payload: ({"version": message["version"]}, None))
    with pytest.raises(ProtocolError):
        peer(there.endpoint).ask("begin")
    assert there.disconnected().startswith("KeyError: 'version' (test_calls.py:")


# ---- the secret ----


@pytest.fixture
def secret_file(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    return path


def test_a_secret_is_read_without_the_white_space_around_it(secret_file):
    assert read_secret(secret_file) == SECRET
    secret_file.write_bytes(b"\n" + SECRET + b" \r\n")
    assert read_secret(secret_file) == SECRET
    secret_file.chmod(0o400)
    assert read_secret(secret_file) == SECRET


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o601, 0o610, 0o602])
def test_a_secret_that_others_can_get_at_is_refused(secret_file, mode):
    secret_file.chmod(mode)
    with pytest.raises(ConfigError, match=f"expected mode 0600 .*found mode {mode:04o}.*chmod 600") as refused:
        read_secret(secret_file)
    assert str(secret_file) in str(refused.value) and "--ftp-secret-file" in str(refused.value)
    assert SECRET.decode() not in str(refused.value)


def test_a_secret_of_somebody_else_is_refused(secret_file, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ConfigError, match=f"user 12345, found mode 0600 and user {secret_file.stat().st_uid}"):
        read_secret(secret_file)


@pytest.mark.parametrize("held", [b"", b"x" * 15, b" " * 100, b"\n" + b"y" * 15 + b"\n"])
def test_a_secret_that_could_be_guessed_is_refused(secret_file, held):
    secret_file.write_bytes(held)
    with pytest.raises(ConfigError, match=f"at least 16 bytes, found {len(held.strip())}; .*/dev/urandom"):
        read_secret(secret_file)
    secret_file.write_bytes(held.strip() + b"z" * 16)
    assert read_secret(secret_file) == held.strip() + b"z" * 16


def test_no_more_is_read_than_a_secret_may_have(secret_file):
    secret_file.write_bytes(b"s" * (SECRET_LIMIT + 5))
    with pytest.raises(ConfigError, match=f"{secret_file}: cannot be read .*more than {SECRET_LIMIT} bytes"):
        read_secret(secret_file)
    secret_file.write_bytes(b"s" * SECRET_LIMIT)
    assert read_secret(secret_file) == b"s" * SECRET_LIMIT


def test_a_secret_that_is_not_there_or_no_file_is_refused_at_once(secret_file):
    folder, no_file = secret_file.parent, "not a regular file"
    os.mkfifo(folder / "pipe", 0o600)
    for path, why in [(folder / "none", "No such file"), (folder, no_file), (folder / "pipe", no_file)]:
        with pytest.raises(ConfigError, match=f"--ftp-secret-file.*{path}: cannot be read .*{why}"):
            within(10.0, lambda path=path: read_secret(path), "the reader")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_secret(folder / "a\0b")
    (folder / "linked").symlink_to(secret_file)
    assert read_secret(folder / "linked") == SECRET
