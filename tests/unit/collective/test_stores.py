"""A store that says nothing costs its own timeout, not torch's for ever; one that answers is torch's."""

import socket
import threading
from datetime import timedelta

import pytest
from torch.distributed import DistStoreError, PrefixStore, TCPStore

from ft_plugins.launcher.rounds.round_store import BoundedStore

TIMEOUT = timedelta(seconds=280)
SILENCE = timedelta(seconds=0.5)
HOST = "127.0.0.1"


class Relay:
    """Passes on what goes to `port`, until it is mute: then it takes everything and says nothing."""

    def __init__(self, port):
        self._to = port
        self._speaks = threading.Event()
        self._speaks.set()
        self._sockets = []
        self._listener = socket.create_server((HOST, 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def mute(self):
        self._speaks.clear()

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection((HOST, self._to))
            self._sockets += [near, far]
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source, target):
        try:
            while part := source.recv(1 << 16):
                if self._speaks.is_set():
                    target.sendall(part)
        except OSError:
            return

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        for each in [self._listener, *self._sockets]:
            each.close()


def client(port, timeout=TIMEOUT):
    make = lambda: TCPStore(HOST, port, None, False, timeout, wait_for_workers=False)  # noqa: E731
    return BoundedStore(make, timeout, f"{HOST}:{port}")


@pytest.fixture
def served():
    return TCPStore(HOST, 0, None, True, TIMEOUT, wait_for_workers=False)


@pytest.fixture
def relay(served):
    found = Relay(served.port)
    yield found
    found.close()


def test_a_store_that_answers_is_torchs_own_also_behind_a_prefix(served):
    bounded = client(served.port)
    store = PrefixStore("round/1", bounded)
    store.set("a", "1")
    assert (store.get("a"), store.add("n", 2), store.check(["a", "b"])) == (b"1", 2, False)
    store.wait(["a"])
    store.multi_set(["x", "y"], ["2", "3"])
    assert store.multi_get(["x", "y"]) == [b"2", b"3"]
    assert store.compare_set("c", "", "v") == b"v" and store.delete_key("x")
    assert served.get("round/1/a") == b"1"
    with pytest.raises(DistStoreError, match="missing"):  # in torch's own words
        store.wait(["missing"], timedelta(seconds=0.1))


def test_a_server_that_accepts_and_says_nothing_is_no_store():
    silent = pytest.raises(DistStoreError, match=r"the store at 127\.0\.0\.1:\d+ did not answer within")
    with socket.create_server((HOST, 0)) as listener, silent:
        client(listener.getsockname()[1], SILENCE)


@pytest.mark.parametrize("ask", [
    lambda store: store.get("a"), lambda store: store.add("a", 1), lambda store: store.check(["a"]),
    lambda store: store.wait(["a"]), lambda store: store.multi_get(["a"]),
])  # fmt: skip
def test_a_store_that_falls_silent_is_given_up_and_not_asked_again_meanwhile(relay, ask):
    store = client(relay.port)
    store.set("a", "1")
    relay.mute()
    store.set_timeout(SILENCE)
    with pytest.raises(DistStoreError, match="did not answer within"):
        ask(store)
    threads = threading.active_count()
    with pytest.raises(DistStoreError, match="has not answered the previous call"):
        store.get("a")
    assert threading.active_count() == threads
