"""What listens in a job, each with real code behind a real socket, for peers that misbehave."""

import contextlib
import queue
import socket
import struct
import threading
import time
from dataclasses import replace

import msgpack

from ft_plugins.collective import meeting
from ft_plugins.collective.meeting import RankDoor
from ft_plugins.collective.operations import FrameKind, place_of
from ft_plugins.collective.switch import RankLink, Switch
from ft_plugins.errors import ProtocolError
from ft_plugins.events import Events
from ft_plugins.launcher.rendezvous import endpoint, peers
from ft_plugins.launcher.rendezvous.peers import Credentials, PeerConnection, PeerServer
from ft_plugins.smp.tree.agreement import ExchangeEpoch, Summary
from ft_plugins.smp.tree.tree_member import Connected, TreeMember
from ft_plugins.smp.tree.tree_messages import packed_summary
from ft_plugins.smp.tree.tree_state import TreeState
from ft_plugins.transport import calls, door
from ft_plugins.transport.calls import Peer, Server
from ft_plugins.transport.channel import TAG, ClientHandshake, Party, ServerHandshake
from ft_plugins.transport.frame_codec import FRAME_LIMIT, PAYLOAD_LIMIT
from ft_plugins.transport.loop import Loop

SECRET = b"a secret of 32 bytes, all random"
JOB = "a-job"
SECONDS = 90.0  # for what has to happen; the machine of the tests has other work too


def frame(message):
    """One of a handshake."""
    packed = msgpack.packb(message)
    return struct.pack(">I", len(packed)) + packed


def read(connection):
    """One frame of a handshake; None at the end."""
    head = connection.recv(4, socket.MSG_WAITALL)
    if len(head) < 4:
        return None
    return msgpack.unpackb(connection.recv(struct.unpack(">I", head)[0], socket.MSG_WAITALL))


def ended(connection):
    """Whether the other side hangs up, saying nothing more."""
    connection.settimeout(SECONDS)
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


class Known:
    """One end of a connection after its handshake, which says and hears what the test wants."""

    def __init__(self, connection, channel):
        self.connection = connection
        self._channel = channel

    def unit(self, content):
        """Content and tag."""
        return b"".join(map(bytes, self._channel.sealer.seal(content)))

    def frame(self, message, payload=None):
        """As it is sent, with whatever the message announces."""
        packed = msgpack.packb(message)
        head = struct.pack(">I", len(packed)) + self.unit(packed)
        return head if payload is None else head + self.unit(payload)

    def say(self, message, payload=None):
        self.connection.sendall(self.frame(message, payload))

    def hear(self):
        """A message, with its payload under `payload`; None at the end."""
        head = self.connection.recv(4, socket.MSG_WAITALL)
        if len(head) < 4:
            return None
        found = msgpack.unpackb(self._unit(struct.unpack(">I", head)[0]))
        return {**found, "payload": self._unit(found["bytes"])} if "bytes" in found else found

    def _unit(self, length):
        raw = self.connection.recv(length + TAG, socket.MSG_WAITALL)
        return bytes(self._channel.opener.open(raw[:-TAG], raw[-TAG:]))


def changed(raw, at):
    """With a bit of the byte at `at` the other way round."""
    whole = bytearray(raw)
    whole[at] ^= 1
    return bytes(whole)


def nested(depth):
    return {"a": nested(depth - 1)} if depth else 1


IT = {"do": "echo", "value": 1}
MALFORMED = {
    "no msgpack": lambda known: struct.pack(">I", 3) + known.unit(b"\xc1\xc1\xc1"),
    "nothing": lambda known: struct.pack(">I", 0) + known.unit(b""),
    "a longer frame than the limit": lambda known: struct.pack(">I", FRAME_LIMIT + 1),
    "the longest that four bytes can say": lambda known: b"\xff\xff\xff\xff",
    "a huge list": lambda known: struct.pack(">I", 5) + known.unit(b"\xdd\xff\xff\xff\xff"),
    "a list": lambda known: known.frame([1, 2]),
    "a text": lambda known: known.frame("echo"),
    "a key that is no text": lambda known: known.frame({1: 2}),
    "nested": lambda known: known.frame(nested(500)),
    "a message that was changed": lambda known: changed(known.frame(IT), 6),
    "a tag that was changed": lambda known: changed(known.frame(IT), -1),
    "a message without a proof": lambda known: struct.pack(">I", 1) + b"\x80" + bytes(TAG),
    "frames in another order": lambda known: b"".join([known.frame({**IT, "at": at}) for at in (0, 1)][::-1]),
}


def announced(known, payload=b"hello", **changes):
    return known.frame({**IT, "bytes": len(payload), **changes}, payload)


# where payloads are expected
PAYLOADS = {
    "a payload beyond its limit": lambda known: announced(known, bytes=PAYLOAD_LIMIT + 1),
    "a payload of less than nothing": lambda known: announced(known, bytes=-1),
    "a payload of so many": lambda known: announced(known, bytes="1"),
    "a payload that was changed": lambda known: changed(announced(known), -TAG - 1),
    "a payload whose tag was changed": lambda known: changed(announced(known), -1),
    "a payload that is shorter": lambda known: announced(known, bytes=4),
}
CUT = {
    "inside a length": lambda known: b"\0\0",
    "inside a frame": lambda known: known.frame(IT)[:-1],
    "inside a payload": lambda known: announced(known)[: -TAG - 1],
    "inside a payload's tag": lambda known: announced(known)[:-1],
    "before a payload": lambda known: announced(known)[: -TAG - 5],
}


class Served:
    """One end of a job that peers connect to, and what it has reported."""

    purpose = ""
    says_foreign = False  # to a peer of another job that knows the secret

    def __init__(self):
        self.asked = []
        self.seen = queue.Queue()
        self.events = Events("n")
        self.events.subscribe(self.seen.put)
        self.here = Party(self.purpose, JOB, "1")

    # was-annotation

    def close(self):
        """Stop listening."""

    def goes_on(self):
        """Whether a real peer gets in and is answered."""
        raise NotImplementedError

    def rejected(self):
        """The reason for which the next stranger was not admitted."""
        found = self.seen.get(timeout=SECONDS)
        assert found.name == "peer.rejected" and found.fields["count"] == 1
        assert found.fields["addresses"] == {"127.0.0.1": 1} and len(found.line()) < 600
        return str(*found.fields["reasons"])

    def disconnected(self):
        """The reason for which the connection of a peer that has proved itself was ended."""
        return self.rejected()

    def connect(self, address="127.0.0.1"):
        return socket.create_connection(self.endpoint, SECONDS, (address, 0))

    def begun(self, connection, me=None, secret=SECRET):
        """The client's proof, which is not sent yet, and its channel."""
        client = ClientHandshake(secret, me or self.here)
        connection.sendall(frame(client.hello()))
        answer, made = client.answer(read(connection))
        return frame(answer), made

    def introduced(self, me=None):
        """A connection of a peer that has been admitted."""
        connection = self.connect()
        proof, made = self.begun(connection, me)
        connection.sendall(proof)
        known = Known(connection, made)
        assert known.hear() == {"ok": True}
        return known


class Smp(Served):
    """The SMP of a node."""

    purpose = "smp"

    def __init__(self, handle=None, encrypt=False):
        super().__init__()
        self.threads = set()
        self._handle = handle or (lambda message, payload: ({"echo": message.get("value")}, payload))
        me = replace(self.here, node="there", encrypt=encrypt)
        self.server = Server("127.0.0.1", 0, me, SECRET, self._answer, self.events)
        self.endpoint, self.close = self.server.endpoint, self.server.close

    def _answer(self, message, payload):
        self.asked.append(message)
        self.threads.add(threading.get_ident())
        return self._handle(message, payload)

    def goes_on(self):
        with contextlib.closing(Peer(self.endpoint, self.here, SECRET, SECONDS)) as peer:
            return bool(peer.ask("echo", value=7)[0]["echo"] == 7)

    def disconnected(self):
        found = self.seen.get(timeout=SECONDS)
        assert found.name == "peer.disconnected" and found.fields["peer"] == "1"
        return str(found.fields["reason"])


class Rendezvous(Served):
    """The port of a node's ft-run."""

    purpose, says_foreign = "rendezvous", True

    def __init__(self):
        super().__init__()
        self.gone = []
        there = Credentials(SECRET, JOB, "there")
        listener = endpoint.listen_anywhere("127.0.0.1")
        self.server = PeerServer(listener, there, self._answer, self.gone.append, lambda: 0.1, self.events)
        self.endpoint, self.close = ("127.0.0.1", self.server.port), self.server.close

    def _answer(self, message, connection):
        self.asked.append(message)
        return {"echo": message["value"]}

    def goes_on(self):
        self.server.check()
        peer = PeerConnection(f"127.0.0.1:{self.server.port}", SECONDS, Credentials(SECRET, JOB, "1"))
        with contextlib.closing(peer):
            return bool(peer.ask({"do": "echo", "value": 7})["echo"] == 7)


class AtRank(Served):
    """A rank that waits for those below it."""

    purpose = "ranks"

    def __init__(self):
        super().__init__()
        self.door = RankDoor("127.0.0.1", SECRET, JOB, 0, self.events)
        self.door.open()
        self.endpoint, self.close = self.door.endpoint, self.door.close

    def goes_on(self):
        until = time.monotonic() + SECONDS
        connection, *_ = meeting.dial(self.endpoint, SECRET, self.here, 0, until, lambda connection: None)
        with connection, self.door.next(until, {1})[0]:
            return True


LISTENING = {"smp": Smp, "rendezvous": Rendezvous, "ranks": AtRank}


def _pair(purpose):
    """A peer, and the end of a connection that has admitted it."""
    ours, theirs = socket.socketpair()
    me = Party(purpose, JOB, "1")
    client, server = ClientHandshake(SECRET, me), ServerHandshake(SECRET, me)
    answer, channel = client.answer(server.challenge(client.hello()))
    ours.settimeout(SECONDS)
    return Known(ours, channel), theirs, server.finish(answer)


class InTree(Served):
    """The root of the tree of SMPs; a peer reports to it."""

    purpose = "smp"

    def __init__(self):
        super().__init__()
        self.reasons = queue.Queue()
        self.loop = Loop("smp-tree")
        state = TreeState(ExchangeEpoch(1, None, 3, 1), 0, 60.0, time.monotonic())
        self.member = TreeMember(
            self.loop, state, lambda *_: None, lambda: None, lambda node, reason: self.reasons.put(reason)
        )
        self.loop.start()

    def introduced(self, me=None, position=1):
        known, theirs, channel = _pair(self.purpose)
        self.member.adopt(position, Connected(theirs, channel), lambda: None)
        return known

    def goes_on(self):
        other = self.introduced(position=2)
        with other.connection:
            other.say(packed_summary(Summary(1 << 2, 0)))
            return bool(other.hear()["do"] == "announce")

    def disconnected(self):
        return self.reasons.get(timeout=SECONDS)

    def close(self):
        self.loop.stop()
        self.member.close()
        self.loop.close()


class InRanks(Served):
    """A rank at work, and the one below it."""

    purpose = "ranks"

    def __init__(self):
        super().__init__()
        self.known, theirs, channel = _pair(self.purpose)
        self.switch = Switch(place_of(0, 2, 1), {1: RankLink(1, theirs, channel)}, SECONDS)

    def introduced(self, me=None):
        return self.known

    def goes_on(self):
        try:  # the tree of ranks is broken then, and says so
            self.switch.result(self.switch.start(FrameKind.GATHER, b""))
        except ProtocolError as error:
            return self.switch.lost is not None and str(error) == self.switch.lost.reason
        return False

    def disconnected(self):
        deadline = time.monotonic() + SECONDS
        while self.switch.lost is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return self.switch.lost.reason

    def close(self):
        self.switch.close()
        self.known.connection.close()


PROVEN = {
    "smp": Smp, "rendezvous": Rendezvous, "tree": InTree, "ranks": InRanks,
}  # fmt: skip


@contextlib.contextmanager
def limits(monkeypatch, **changed):
    """All doors that are opened meanwhile have these limits."""
    with monkeypatch.context() as patched:
        for module in (calls, peers, meeting):
            patched.setattr(module, "_LIMITS", replace(module._LIMITS, **changed))
        yield


def eager(monkeypatch):
    """Each rejected connection is an event of its own."""
    made = lambda events: door.RejectedConnections(events, every=0)  # noqa: E731
    for module in (calls, peers, meeting):
        monkeypatch.setattr(module, "RejectedConnections", made)
