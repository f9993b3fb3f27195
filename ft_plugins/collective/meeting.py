"""How the ranks of an incarnation find each other: through the job's store, then by their secret.

Invariant: any process that reaches the store can read and write it, so an address from there is only a place to try. A
rank proves twice that it belongs there: by the nonce that rank 0 leaves in the store for this incarnation, then by the
job's secret. If only the first holds, the two ranks have different secrets: they can report that to all ranks, and
nothing else.

Rank 0 writes what all ranks have to know: the nonce, how many ranks a node has, and its host. A rank with others below
it writes where it listens, and its host. A rank reads the entry of rank 0 and that of the rank above it, and writes one
at most. If addresses depend on a name, the first ranks of the first two nodes write theirs too, for a node whose own
one is loopback: see `transport.own_address`. A loopback address is refused by the first rank that knows of another
host: each compares its own with the host of rank 0, and that of the rank above it with its own host.

In: the store, the rank's place, the secret. Out: a link to each neighbour, the nonce, what is wrong with a secret.
"""

from __future__ import annotations

import hmac
import ipaddress
import queue
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from ..errors import ConfigError, ProtocolError
from ..events import Events
from ..transport.channel import Channel, ClientHandshake, Party, ServerHandshake
from ..transport.dial import ADMITTED, Dialer
from ..transport.door import Door, DoorLimits, RejectedConnections, listen
from ..transport.frame_codec import HANDSHAKE, Message
from ..transport.framed import FramedSocket
from ..transport.loop import Loop
from ..transport.own_address import IDENTITY, host_identity, known_apart, only_local, towards_peer
from .operations import RankPlace, place_of
from .switch import RankLink

NONCE = 32  # bytes
_ENTRY_HEAD = 2 + IDENTITY  # bytes: port, host
_ENTRY_LIMIT = _ENTRY_HEAD + 64  # bytes: and address
_MOST_ON_NODE = 1 << 16  # ranks
_PROOF_SECONDS = 15.0  # for the second proof of a rank that has sent the first
_DOUBT_SECONDS = 3.0  # for the rank itself to come after one that failed its second proof
_PURPOSE = "ranks"
_LIMITS = DoorLimits()

T = TypeVar("T")
Arrived = tuple[socket.socket, int, Channel]


@dataclass(frozen=True)
class RankMeeting:
    """How this rank reaches the others. `name` distinguishes the meetings of an incarnation; `seconds` bounds it."""

    store: Any  # torch.distributed.Store
    name: str
    rank: int
    world_size: int
    on_node: int  # ranks of this node; rank 0's is used by all
    secret: bytes
    address: str  # of this node
    encrypt: bool
    seconds: float
    events: Events
    by_name: bool = False  # whether `address` depends on how this node resolves a name
    host: bytes = field(default_factory=host_identity)


@dataclass(frozen=True)
class Met:
    """The place of this rank, and its neighbours by rank. `key` is known to this job's ranks of this incarnation alone,
    as far as it has a secret. `address` is where other nodes reach this one.

    `refusal`: why the ranks cannot work together; '' if they can.
    """

    place: RankPlace
    links: dict[int, RankLink]
    key: bytes
    refusal: str
    address: str


def meet(meeting: RankMeeting) -> Met:
    """Connect to the neighbours in the tree. Every rank calls. Raises ProtocolError if they cannot be reached in time,
    ConfigError if the address of this node, or of the one above it, cannot be used."""
    until = time.monotonic() + meeting.seconds
    nonce, on_node, host = _agree_on_tree(meeting)
    place = place_of(meeting.rank, meeting.world_size, on_node)
    address = _reachable_address(meeting, on_node, until)
    if only_local(address) and known_apart(meeting.host, host):
        raise _unreachable(meeting, meeting.rank, address, 0)
    key = hmac.digest(meeting.secret or b"none", b"ft_plugins ranks" + nonce, "sha256")
    links: dict[int, RankLink] = {}
    refusals: list[str] = []

    def admit(connection: socket.socket, rank: int, channel: Channel, proven: Channel | str) -> None:
        if isinstance(proven, str):
            refusals.append(f"rank {place.rank}: rank {rank} {proven}")
            proven = channel
        links[rank] = RankLink(rank, connection, proven)

    proving = Party(_PURPOSE, meeting.name, str(place.rank), meeting.encrypt)
    with RankDoor(address, nonce, meeting.name, place.rank, meeting.events) as door:
        if place.children:
            door.open()
            entry = door.endpoint[1].to_bytes(2, "big") + meeting.host + address.encode()
            _ask(meeting, lambda: meeting.store.set(_key(meeting, str(place.rank)), entry))
        if place.parent is not None:
            admit(*dial(
                _read_entry(meeting, place.parent), nonce, door.me, place.parent, until,
                lambda connection: _prove(connection, until, key, proving),
            ))  # fmt: skip
        suspects: dict[int, tuple[socket.socket, int, Channel, str]] = {}  # maybe strangers that have read the nonce
        while missing := set(place.children) - links.keys():
            in_doubt = missing <= suspects.keys()
            try:
                late = min(until, time.monotonic() + _DOUBT_SECONDS) if in_doubt else until
                connection, rank, channel = door.next(late, missing)
            except ProtocolError:
                if not in_doubt:
                    raise
                for rank in missing:
                    admit(*suspects.pop(rank))
                break
            try:
                proven = _check(connection, min(until, time.monotonic() + _PROOF_SECONDS), key, proving)
            except (OSError, ProtocolError):  # cut off: it tries again
                connection.close()
                continue
            if isinstance(proven, Channel):
                admit(connection, rank, channel, proven)
            elif rank in suspects:
                connection.close()
            else:
                suspects[rank] = connection, rank, channel, proven
        for connection, *_ in suspects.values():
            connection.close()
    return Met(place, links, key, refusals[0] if refusals else "", address)


class RankDoor:
    """A listening socket for ranks that prove that they know `secret`."""

    def __init__(
        self, address: str, secret: bytes, name: str, rank: int, events: Events, encrypt: bool = False
    ) -> None:
        self.me = Party(_PURPOSE, name, str(rank), encrypt)
        self._address = address
        self._secret = secret
        self._events = events
        self._arrived: queue.SimpleQueue[Arrived] = queue.SimpleQueue()
        self._loop: Loop | None = None
        self._door: Door | None = None
        self.endpoint = ("", 0)

    def open(self) -> None:
        """Listen. Raises ConfigError if the address cannot be used."""
        listener = listen(self._address, 0, f"rank {self.me.node}")
        self.endpoint = (self._address, int(listener.getsockname()[1]))
        self._loop = Loop("ft-ranks-door")
        self._door = Door(
            self._loop, listener, self._secret, self.me, self._admit, RejectedConnections(self._events), _LIMITS
        )
        self._loop.start()

    def _admit(self, connection: socket.socket, address: str, channel: Channel) -> None:
        try:
            FramedSocket(connection, channel).send(ADMITTED)  # a new connection has room for it
            connection.setblocking(True)
            self._arrived.put((connection, int(channel.node), channel))
        except (OSError, ValueError):
            connection.close()

    def next(self, until: float, expected: set[int]) -> Arrived:
        """The next of the `expected` ranks that arrives; others are sent away. Raises ProtocolError if none does."""
        while (left := until - time.monotonic()) > 0:
            with suppress(queue.Empty):
                arrived = self._arrived.get(timeout=left)
                if arrived[1] in expected:
                    return arrived
                arrived[0].close()
        some = ", ".join(map(str, sorted(expected)[:8]))
        raise ProtocolError(
            f"rank {self.me.node}: rank {some} did not connect to {self.endpoint[0]}:{self.endpoint[1]} in time; "
            "check that the nodes reach each other there, or choose another --ftp-interface"
        )

    def __enter__(self) -> RankDoor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._loop is not None and self._door is not None:
            self._loop.stop()
            self._door.close()
            self._loop.close()
        with suppress(queue.Empty):
            while True:
                self._arrived.get_nowait()[0].close()


def dial(
    where: tuple[str, int], secret: bytes, me: Party, rank: int, until: float, greet: Callable[[socket.socket], T]
) -> tuple[socket.socket, int, Channel, T]:
    """Connect to `rank`, which listens at `where` for those that know `secret`, and `greet` it.

    Tries again when the connection is cut off: it may have made room for others. Raises ProtocolError if the rank
    cannot be reached in time, or is another one.
    """

    def met(connection: socket.socket, channel: Channel) -> tuple[socket.socket, int, Channel, T]:
        if channel.node != str(rank):
            raise ProtocolError(f"it is rank {channel.node}")
        return connection, rank, channel, greet(connection)

    dialer = Dialer(where, secret, me, retried=(OSError, ProtocolError))
    try:
        found = dialer.connect(until, met)
    except (OSError, ProtocolError) as error:
        raise ProtocolError(
            f"rank {me.node}: rank {rank} cannot be reached at {where[0]}:{where[1]} ({error}); check that the "
            "nodes reach each other there, or choose another --ftp-interface"
        ) from error
    dialer.surrender()
    return found


def _prove(connection: socket.socket, until: float, key: bytes, me: Party) -> Channel | str:
    """As the one that has dialled, prove that this rank knows the job's secret. Returns what is wrong with the other
    one if it cannot prove that. Raises OSError, ProtocolError."""
    line, handshake = FramedSocket(connection, bounds=HANDSHAKE), ClientHandshake(key, me)
    line.send(handshake.hello())
    challenge = _message(line, until)
    try:
        answer, channel = handshake.answer(challenge)
    except ProtocolError:
        line.send({"proof": bytes(NONCE)})
        return _wrong(challenge, me)
    line.send(answer)
    return channel


def _check(connection: socket.socket, until: float, key: bytes, me: Party) -> Channel | str:
    """The other side of `_prove`."""
    line, handshake = FramedSocket(connection, bounds=HANDSHAKE), ServerHandshake(key, me)
    hello = _message(line, until)
    line.send(handshake.challenge(hello))
    answer = _message(line, until)
    try:
        return handshake.finish(answer)
    except ProtocolError:
        return _wrong(hello, me)


def _wrong(message: Message, me: Party) -> str:
    if (message.get("encrypt") is True) is not me.encrypt:
        return "differs in --ftp-encrypt; give all nodes the same"
    return (
        "has another secret, or only one of the two has one; give --ftp-secret-file, with the same content, on all "
        "nodes"
    )


def _message(line: FramedSocket, until: float) -> Message:
    if (received := line.receive(until)) is None:
        raise ConnectionResetError("it hung up")
    return received[0]


def _key(meeting: RankMeeting, what: str) -> str:
    return f"ft_plugins/ranks/{meeting.name}/{what}"


def _ask(meeting: RankMeeting, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except RuntimeError as error:  # of torch
        raise ProtocolError(f"rank {meeting.rank}: the job's store did not answer: {error}") from error


def _agree_on_tree(meeting: RankMeeting) -> tuple[bytes, int, bytes]:
    """The incarnation's nonce, how many ranks of a node the tree assumes, and a host: of rank 0. Raises
    ProtocolError."""
    if meeting.rank == 0:
        nonce, on_node = secrets.token_bytes(NONCE), min(meeting.on_node, _MOST_ON_NODE)
        entry = nonce + on_node.to_bytes(4, "big") + meeting.host
        _ask(meeting, lambda: meeting.store.set(_key(meeting, "tree"), entry))
        return nonce, on_node, meeting.host
    entry = bytes(_ask(meeting, lambda: meeting.store.get(_key(meeting, "tree"))))
    nonce, ranks, host = entry[:NONCE], entry[NONCE:-IDENTITY], entry[-IDENTITY:]
    on_node = int.from_bytes(ranks, "big")
    if len(entry) != NONCE + 4 + IDENTITY or not 0 < on_node <= _MOST_ON_NODE:
        raise _foreign(meeting, 0, f"{len(entry)} bytes, {on_node} ranks on a node")
    return nonce, on_node, host


def _reachable_address(meeting: RankMeeting, on_node: int, until: float) -> str:
    """Where other nodes reach this one. Raises ProtocolError, ConfigError."""
    if not meeting.by_name or meeting.world_size <= on_node:
        return meeting.address
    if meeting.rank in (0, on_node):
        _ask(meeting, lambda: meeting.store.set(_key(meeting, f"from{meeting.rank}"), meeting.address.encode()))
    peer = on_node if meeting.rank < on_node else 0  # of another node
    if not only_local(meeting.address):
        return meeting.address
    entry, left = _key(meeting, f"from{peer}"), timedelta(seconds=max(0.001, until - time.monotonic()))
    try:
        meeting.store.wait([entry], left)
    except RuntimeError as error:
        raise ProtocolError(f"rank {meeting.rank}: rank {peer} did not come in time ({error})") from error
    try:
        address = str(ipaddress.ip_address(bytes(_ask(meeting, lambda: meeting.store.get(entry))).decode()))
    except ValueError as error:
        raise _foreign(meeting, peer, str(error)) from error
    return towards_peer(meeting.address, address)


def _read_entry(meeting: RankMeeting, rank: int) -> tuple[str, int]:
    """Where `rank` listens. Waits until it has written that. Raises ProtocolError; ConfigError if only its own host
    reaches that."""
    entry = bytes(_ask(meeting, lambda: meeting.store.get(_key(meeting, str(rank)))))
    try:
        if not _ENTRY_HEAD < len(entry) <= _ENTRY_LIMIT:
            raise ValueError(f"{len(entry)} bytes")
        address = str(ipaddress.ip_address(entry[_ENTRY_HEAD:].decode()))
    except ValueError as error:
        raise _foreign(meeting, rank, str(error)) from error
    if only_local(address) and known_apart(meeting.host, entry[2:_ENTRY_HEAD]):
        raise _unreachable(meeting, rank, address, meeting.rank)
    return address, int.from_bytes(entry[:2], "big")


def _unreachable(meeting: RankMeeting, rank: int, address: str, elsewhere: int) -> ConfigError:
    return ConfigError(
        f"rank {meeting.rank}: rank {rank} has the address {address}, which only its own host reaches, and rank "
        f"{elsewhere} runs on another host or in another network namespace; give --ftp-interface with a device or "
        f"address of the node of rank {rank} that others reach, or a host of the job in MASTER_ADDR (with ft-run: "
        "--rdzv-endpoint) that is not loopback there; gloo needs the device too, as GLOO_SOCKET_IFNAME"
    )


def _foreign(meeting: RankMeeting, rank: int, reason: str) -> ProtocolError:
    return ProtocolError(
        f"rank {meeting.rank}: the entry of rank {rank} in the job's store makes no sense ({reason}): another process "
        "writes to the store; make sure that only the job's nodes reach its port"
    )
