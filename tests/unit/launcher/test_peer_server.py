"""The port of a node: real sockets on loopback, peers that behave and peers that do not."""

import socket
import threading
import time

import pytest

from ft_plugins.errors import ConfigError
from ft_plugins.events import Events
from ft_plugins.launcher.rendezvous import endpoint, peers
from ft_plugins.launcher.rendezvous.endpoint import Endpoint
from ft_plugins.launcher.rendezvous.peers import Credentials, ForeignError, PeerConnection, PeerServer
from ft_plugins.rehearse.driver import free_port

WAIT = 60.0
US = Credentials(b"sixteen bytes or more", "job", "n")


def reply(request, connection):
    if "fail" in request:
        raise RecursionError("an error of ours")
    return {"ok": True, **request, "text": "x" * request.get("size", 0)}


class Running:
    """A port on loopback that repeats what it is asked, and what it has reported."""

    def __init__(self, tick=lambda: 0.1):
        self.reports = []
        events = Events()
        events.subscribe(self.reports.append)
        self.gone = []
        listener = endpoint.listen_anywhere("127.0.0.1")
        self.post = PeerServer(listener, US, reply, self.gone.append, tick, events)
        self.place = f"127.0.0.1:{self.post.port}"

    def until(self, holds):
        deadline = time.monotonic() + WAIT
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture
def echo():
    found = Running()
    yield found
    found.post.close()
    found.post.close()


def test_requests_are_answered_also_long_and_several_at_once(echo):
    size = 900_000  # more than a socket holds
    one = PeerConnection(echo.place, WAIT, US)
    for number in range(3):
        assert one.ask({"number": number, "size": size})["text"] == "x" * size
    one.close()
    found = peers.ask_all([echo.place, "127.0.0.1:1"], {"do": "it"}, WAIT, US)
    assert found[echo.place] == {"ok": True, "do": "it", "text": ""} and "refused" in str(found["127.0.0.1:1"])


@pytest.mark.parametrize(
    ("them", "why"),
    [
        (Credentials(US.secret, "another", "n"), "it belongs to another job"),
        (Credentials(b"another secret, as long", "job", "n"), "does not know the secret of this job"),
    ],
)
def test_who_is_of_another_job_or_has_another_secret_hears_that_and_no_more(echo, them, why):
    with pytest.raises(ForeignError, match=why):
        peers.ask(echo.place, {}, WAIT, them)
    peers.ask(echo.place, {}, WAIT, US)


def test_one_who_does_not_answer_costs_the_bound_and_no_more():
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(ConnectionError, match="no answer within 0.2 s"):
        peers.ask(f"127.0.0.1:{mute.getsockname()[1]}", {}, 0.2, US)


def test_where_this_nodes_own_part_fails_all_connections_end_and_it_is_said_here():
    ready = threading.Event()

    def tick():
        if ready.is_set():
            raise KeyError("an error of ours")
        return 0.1

    broken = Running(tick)
    broken.post.check()
    others = [socket.create_connection(("127.0.0.1", broken.post.port), WAIT) for _ in range(3)]
    assert peers.ask(broken.place, {}, WAIT, US)
    ready.set()
    for other in others:
        with other:
            assert other.recv(1) == b""
    broken.post.close()  # waits for the thread
    with pytest.raises(RuntimeError, match="no longer answers") as found:
        broken.post.check()
    assert isinstance(found.value.__cause__, KeyError) and not broken.post.is_serving
    with pytest.raises(ConnectionError, match="refused"):
        peers.ask(broken.place, {}, WAIT, US)


@pytest.mark.parametrize("text", ["h:\u00b2", "h:99999", "h:" + "9" * 5000, "", "[::1]:x"])
def test_what_is_no_endpoint_is_refused_in_words(text):
    with pytest.raises(ConfigError, match="--rdzv-endpoint"):
        Endpoint.read(text)


def test_an_endpoint_is_this_machines_if_it_can_be_listened_on():
    port = free_port()
    found = endpoint.listen_as(Endpoint("127.0.0.9", port), peers.node_answers)
    assert found is not None and found.getsockname() == ("127.0.0.9", port)
    assert endpoint.listen_as(Endpoint("127.0.0.9", port), peers.node_answers, patience=0) is None  # taken
    assert endpoint.listen_as(Endpoint("192.0.2.1", port), peers.node_answers) is None  # no other process is there
    assert endpoint.listen_as(Endpoint("no-such-host.invalid", port), peers.node_answers) is None
    found.close()


def test_a_port_of_a_process_that_is_ending_is_waited_for_and_that_of_a_living_node_is_not(echo):
    place = Endpoint("127.0.0.9", free_port())
    ending = socket.create_server(("127.0.0.9", place.port))
    threading.Timer(0.3, ending.close).start()
    found = endpoint.listen_as(place, peers.node_answers, patience=WAIT)
    assert found is not None
    found.close()
    answers = Endpoint.read(echo.place)  # so nothing is waited for: an hour is longer than a test may take
    assert endpoint.listen_as(answers, peers.node_answers, patience=3600) is None


def test_loopback_addresses_that_differ_are_two_emulated_nodes():
    assert endpoint.emulated_apart("127.0.0.2", "127.0.0.1")
    assert not any(
        endpoint.emulated_apart(*pair) for pair in [("127.0.0.1", "127.0.0.1"), ("10.0.0.1", "127.0.0.1"), ("h", None)]
    )
