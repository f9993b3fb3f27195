"""Whatever a peer sends, repeats, leaves out or does not read, at every port of a job: it gains nothing, stops nobody.

Before its proof a connection costs nearly nothing, however many there are, and real peers get in past all of them.
Strangers come from many addresses of loopback.
"""

import contextlib
import errno
import os
import resource
import select
import socket
import struct
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ft_plugins.transport import channel, door
from ft_plugins.transport.channel import ClientHandshake
from tests.unit.transport.purposes import (
    IT,
    LISTENING,
    MALFORMED,
    PROVEN,
    SECONDS,
    SECRET,
    Known,
    eager,
    ended,
    frame,
    limits,
    read,
)  # fmt: skip


@pytest.fixture
def make(monkeypatch):
    """One of a purpose; the limits of its door, and whether events about strangers come one by one."""
    made = []

    def make_one(purpose, each=True, **changed):
        if each:
            eager(monkeypatch)
        with limits(monkeypatch, **changed):
            made.append(purpose())
        return made[-1]

    yield make_one
    for one in made:
        one.close()


@pytest.fixture(params=LISTENING)
def there(request, make):
    return make(LISTENING[request.param])


@pytest.fixture(params=LISTENING)
def crowded(request, make):
    """One with the same few places, and one event for all that are rejected."""
    return make(LISTENING[request.param], each=False, connections=64, of_one_address=8)


@pytest.fixture
def stranger():
    """Connections, from any address of loopback."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    door.raise_limit()
    with contextlib.ExitStack() as stack:

        def connect(where, address="127.0.0.1", said=b""):
            connection = stack.enter_context(where.connect(address))
            with contextlib.suppress(ConnectionError):
                connection.sendall(said)
            return connection

        yield connect
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def open_ones(connections, most):
    """How many the other side has not closed, once no more than `most` are open."""
    poller = select.poll()
    for connection in connections:
        poller.register(connection, select.POLLRDHUP)
    until = time.monotonic() + SECONDS
    while (found := len(connections) - len(poller.poll(0))) > most and time.monotonic() < until:
        time.sleep(0.01)
    return found


# ---- strangers, and how many ----


def test_silent_connections_take_no_threads_few_descriptors_and_keep_no_peer_out(crowded, stranger):
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    silent = [stranger(crowded, f"127.0.0.{2 + number % 100}") for number in range(300)]
    assert open_ones(silent, 64) <= 64
    assert len(os.listdir("/proc/self/fd")) - files - len(silent) <= 64
    assert threading.active_count() == threads
    assert crowded.goes_on()
    assert crowded.seen.get_nowait().name == "peer.rejected" and crowded.seen.empty(), "one event for all of them"


def test_one_address_takes_a_few_places_and_its_newest_connection_has_one(crowded, stranger):
    elsewhere = [stranger(crowded, f"127.0.0.{2 + number}") for number in range(10)]
    silent = [stranger(crowded) for _ in range(50)]
    assert open_ones(silent, 8) == open_ones(silent[-8:], 8) == 8
    assert open_ones(elsewhere, 10) == 10, "those of other addresses stay"


@pytest.mark.parametrize("purpose", LISTENING)
def test_one_more_than_there_may_be_closes_the_oldest_of_the_address_with_the_most(make, stranger, purpose):
    there = make(LISTENING[purpose], connections=4)
    alone = stranger(there, "127.0.0.2")
    crowd = [stranger(there, "127.0.0.3") for _ in range(3)]
    newest = stranger(there, "127.0.0.4")
    assert ended(crowd[0]) and open_ones([alone, *crowd[1:], newest], 4) == 4


def test_a_burst_of_real_peers_of_one_address_gets_in_whole(crowded, stranger):
    """More of them at once than one address may have unproven, among strangers: who had to make room comes again."""
    if crowded.purpose == "ranks":
        pytest.skip("each rank connects once")
    found = []
    threads = [threading.Thread(target=lambda: found.append(crowded.goes_on())) for _ in range(40)]
    for thread in threads:
        thread.start()
        stranger(crowded)
    for thread in threads:
        thread.join(SECONDS)
    assert found == [True] * len(threads)


@pytest.mark.parametrize("strangers", [True, False])
def test_without_a_descriptor_to_spare_the_oldest_stranger_makes_room_or_the_door_waits(
    crowded, stranger, monkeypatch, strangers
):
    silent = [stranger(crowded, f"127.0.0.{2 + number}") for number in range(4)] if strangers else []
    assert open_ones(silent, 4) == len(silent) and crowded.goes_on()
    monkeypatch.setattr(door, "_PAUSE_SECONDS", 0.05)
    accept, refusals = socket.socket.accept, [errno.EMFILE, errno.ENFILE]

    def without(listener):
        if refusals:
            code = refusals.pop()
            raise OSError(code, os.strerror(code))
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", without)
    assert crowded.goes_on() and not refusals
    assert open_ones(silent, 2) == len(silent[2:]) and open_ones(silent[2:], 2) == len(silent[2:])
    (reason,) = crowded.seen.get_nowait().fields["reasons"]
    assert reason.startswith("a connection could not be accepted: Too many open files")


def test_one_that_is_closed_closes_strangers_too_and_its_port(crowded, stranger):
    silent = [stranger(crowded) for _ in range(3)]
    assert crowded.goes_on()
    crowded.close()
    assert open_ones(silent, 0) == 0
    with pytest.raises(ConnectionRefusedError):
        crowded.connect()


# ---- what a stranger sends ----

BIG = 1 << 20
COSTLY = {
    "unfinished": struct.pack(">I", BIG) + b"\x00" * (BIG - 1),
    "a million maps": struct.pack(">I", BIG) + b"\xdd" + struct.pack(">I", BIG - 5) + b"\x80" * (BIG - 5),
    "a nested list": struct.pack(">I", 4000) + b"\x81\xa1a" + b"\x91" * 3996 + b"\x01",
}


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("name", COSTLY)
def test_what_strangers_send_takes_no_memory(crowded, stranger, name):
    before = most = resident()
    strangers = []
    for number in range(40):
        strangers.append(stranger(crowded, f"127.0.0.{2 + number}", COSTLY[name]))
        most = max(most, resident())
    assert open_ones(strangers, 0) == 0, "each was closed as soon as it announced more than a handshake needs"
    assert max(most, resident()) - before < 8 << 20, "40 of them, up to 1 MiB each"
    assert crowded.goes_on()


def hello_of(there, **changes):
    return {**ClientHandshake(SECRET, there.here).hello(), **changes}


HOSTILE = {
    "no map": lambda there: [1],
    "a number": lambda there: 1,
    "nested": lambda there: {"purpose": {"a": {"b": {}}}},
    "a key that is no text": lambda there: {b"purpose": "smp"},
    "escape codes": lambda there: hello_of(there, job="\x1b[2J"),
    "a large number": lambda there: hello_of(there, node=2**64 - 1),
    "a long name": lambda there: hello_of(there, job="j" * 1000),
    "a request": lambda there: {"do": "echo", "value": 1},
    "no nonce": lambda there: hello_of(there, nonce=b""),
    "a short nonce": lambda there: hello_of(there, nonce=b"x" * 31),
    "a long nonce": lambda there: hello_of(there, nonce=b"x" * 33),
    "encrypted by a truth of another kind": lambda there: hello_of(there, encrypt="yes", proof=b"x" * 32),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_hello_is_a_short_printable_reason_and_no_traceback(there, stranger, capfd, name):
    connection = stranger(there, said=frame(HOSTILE[name](there)))
    connection.shutdown(socket.SHUT_WR)
    assert there.rejected().isprintable() and there.goes_on() and "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("raw", [b"\xff\xff\xff\xff", b"\0\0\0\0", b"\0\0\0\x01\xc1", b"GET / HTTP/1.1\r\n\r\n"])
def test_what_is_no_frame_is_answered_by_a_close(there, stranger, raw):
    assert ended(stranger(there, said=raw)) and there.rejected() and there.goes_on()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_whatever_a_stranger_says_the_server_lives_on_and_carries_out_nothing(there, said):
    with there.connect() as connection:
        connection.sendall(said)
        with contextlib.suppress(OSError):  # it may have hung up by now
            connection.shutdown(socket.SHUT_WR)
        assert ended(connection)
    assert there.rejected() and not there.asked


@pytest.mark.parametrize("error", [RecursionError("deep"), MemoryError(), OverflowError("large"), UnicodeError("odd")])
def test_whatever_a_handshake_ends_with_the_thread_that_lets_peers_in_goes_on(there, stranger, monkeypatch, error):
    def fail(*args):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(channel.ServerHandshake, "challenge", fail)
        stranger(there, said=frame(hello_of(there)))
        reason = there.rejected()
    assert reason.startswith(type(error).__name__) and "(test_hostile_peers.py:" in reason
    assert there.goes_on()


def test_a_connection_that_is_reset_before_its_proof_is_counted(there):
    connection = there.connect()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    assert there.rejected() and there.goes_on()


# ---- who has no proof ----


def test_who_does_not_know_the_secret_is_not_let_in(there, stranger):
    connection = stranger(there, said=frame(hello_of(there)))
    read(connection)
    connection.sendall(frame({"proof": b"x" * 32}))
    assert ended(connection) and there.rejected() == "the peer does not know the secret of this job"


@pytest.mark.parametrize("what", ["job", "purpose"])
def test_a_peer_of_another_job_or_protocol_is_not_let_in(there, stranger, what):
    other = replace(there.here, **{what: "?" * len(getattr(there.here, what))})
    connection = stranger(there)
    if not there.says_foreign:
        connection.sendall(frame(ClientHandshake(SECRET, other).hello()))
        assert ended(connection), "not even a nonce"
        assert f"expected '{getattr(there.here, what)}', found '???" in there.rejected()
    else:
        proof, made = there.begun(connection, other)
        connection.sendall(proof)
        assert Known(connection, made).hear() == {"refused": True} and ended(connection)
        assert there.rejected() == "it belongs to another job"
    assert not there.asked and there.goes_on()


def test_a_stranger_does_not_learn_whether_it_guessed_the_name_of_the_job(there, stranger):
    if not there.says_foreign:
        pytest.skip("the reply to another name is a close")
    replies = []
    for job in (there.here.job, "?" * len(there.here.job)):
        connection = stranger(there, said=frame(hello_of(there, job=job)))
        replies.append(read(connection))
        connection.sendall(frame({"proof": bytes(32)}))
        assert ended(connection) and there.rejected() == "the peer does not know the secret of this job"
    assert replies[0].keys() == replies[1].keys() == {"node", "nonce", "encrypt", "proof"}


@pytest.mark.parametrize("instead", [{"do": "echo"}, {"proof": b""}, {"proof": "text"}, {"proof": None}, {}])
def test_a_request_in_place_of_a_proof_is_not_carried_out(there, stranger, instead):
    connection = stranger(there, said=frame(hello_of(there)))
    read(connection)
    connection.sendall(frame(instead))
    assert ended(connection) and there.rejected() and not there.asked


def test_what_was_said_once_opens_no_second_connection(there, stranger):
    """Somebody has recorded a whole handshake and says the same again, and tries the server's own proof."""
    client = ClientHandshake(SECRET, there.here)
    hello = frame(client.hello())
    recorded = stranger(there, said=hello)
    first = read(recorded)
    answer, made = client.answer(first)
    recorded.sendall(frame(answer))
    known = Known(recorded, made)
    assert known.hear() == {"ok": True}
    request = known.frame({"do": "echo", "value": 1})
    for proof in (answer["proof"], first["proof"], None):
        again = stranger(there, said=hello)
        told = read(again)
        assert told["nonce"] != first["nonce"] and told["proof"] != first["proof"]
        again.sendall(frame({"proof": proof or told["proof"]}) + request)
        assert ended(again) and there.rejected() == "the peer does not know the secret of this job"
    assert not there.asked


@pytest.mark.parametrize("purpose", LISTENING)
@pytest.mark.parametrize("said", ["nothing", "half a length", "hello", "drips"])
def test_a_stranger_who_goes_silent_or_drips_is_hung_up_on(make, stranger, purpose, said):
    there = make(LISTENING[purpose], seconds=0.2)
    hello = frame(hello_of(there))
    connection = stranger(there, said={"hello": hello, "half a length": b"\0\0"}.get(said, b""))
    if said == "hello":
        assert read(connection)["nonce"]
    elif said == "drips":
        pause = threading.Event()
        with contextlib.suppress(OSError):
            for byte in hello[:30]:  # 1.5 s, where 0.2 s are his
                connection.sendall(bytes([byte]))
                pause.wait(0.05)
            pytest.fail("after seven times his time he is still listened to")
    assert ended(connection) and there.rejected() == "no proof within 0.2 s"


# ---- peers that have proved themselves ----


@pytest.mark.parametrize("purpose", PROVEN)
@pytest.mark.parametrize("name", [*MALFORMED, "a frame that is repeated"])
def test_what_is_malformed_ends_its_connection_with_a_reason_and_no_other(make, capfd, purpose, name):
    ends_alone(make(PROVEN[purpose]), MALFORMED.get(name, lambda known: 2 * known.frame(IT)))
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("purpose", ["rendezvous", "tree", "ranks"])
def test_what_is_no_request_ends_its_connection_as_well(make, purpose):
    ends_alone(make(PROVEN[purpose]), lambda known: known.frame({"do": "pickle"}))


def ends_alone(there, said):
    known = there.introduced()
    with known.connection as connection:
        connection.sendall(said(known))
        assert there.disconnected().isprintable()
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(1 << 16):  # what was sent before, or a last word
                pass
    assert there.asked in ([], [IT], [{"do": "pickle"}]) and there.goes_on()


@pytest.mark.parametrize("purpose", ["smp", "rendezvous"])
def test_a_reply_that_is_not_read_is_not_held_for_its_peer(make, purpose):
    there = make(PROVEN[purpose])
    known = there.introduced()
    with known.connection as connection:
        connection.settimeout(0.5)
        before, request = resident(), known.frame({**IT, "value": "x" * 8000})
        with pytest.raises(TimeoutError):
            for _ in range(10_000):  # until neither side takes any more
                connection.sendall(request)
                request = known.frame({**IT, "value": "x" * 8000})
        assert resident() - before < 32 << 20
        assert there.goes_on()


@pytest.mark.parametrize(
    ("address", "crowd"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("unknown", "unknown"),
    ],
)
def test_addresses_that_one_machine_can_have_are_counted_as_one(address, crowd):
    assert door.crowd_of(address) == crowd
