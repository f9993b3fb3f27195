"""One real rendezvous lead and emulated nodes, as many as a job has, over real sockets of this machine.

Real: the lead, in a process of its own, whose main thread does what torch's agent does between rounds; each node's
connections, handshakes, requests and replies, from a source address of its own; every reply is read and authenticated.
Emulated: the nodes share the calling process, have no ranks, and do not connect to the round's store; only one of them
checks the roster that it receives. So the time to form a round includes the processor time of all nodes on one core,
where nodes of a job have their own.

The story: all nodes start at once and form a round; they run for a while; one is lost and the others come back and wait
for a substitute; it comes, and the next round forms.

In: the number of nodes, for how long they wait. Out: `RendezvousFigures`.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ft_plugins.base.intake import parsed
from ft_plugins.launcher import job_identity
from ft_plugins.launcher.rendezvous.peers import PURPOSE
from ft_plugins.launcher.rounds.held_looks import longest_hold
from ft_plugins.launcher.rounds.node_messages import Message
from ft_plugins.launcher.rounds.roster import Roster, RosterPage, assembled
from ft_plugins.launcher.rounds.waiting_nodes import Application
from ft_plugins.transport import door
from ft_plugins.transport.channel import ClientHandshake, Party, Sealer
from ft_plugins.transport.dial import ADMITTED
from ft_plugins.transport.frame_codec import HANDSHAKE, PLAIN, Decoder, seal

SILENCE = 10.0  # seconds without a message after which a node is lost: the default
NAME_LENGTH = 48  # characters of a node's name: the longest
WORKERS = 8  # of a node
_LEAD = 0  # its number
_AGENT_SECONDS = 0.1  # between two looks of torch's agent at its workers
_SEARCH_SECONDS = (0.1, 1.0)  # first and longest pause between two searches of the leader
_RETRY_SECONDS = (0.02, 1.0)  # first and longest pause before a connection is tried again
_BOUND = 240.0  # seconds for each step of the story
_ABSENT_PORT = 9  # of the endpoints of emulated nodes; none listens there
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class RendezvousFigures:
    """What `nodes` nodes cost their rendezvous lead. Shares are of one processor; messages are requests and replies.

    `first_round_seconds`, `next_round_seconds`: from the start of the nodes, or of the substitute, until all have begun
    the round. `forming_messages`, `forming_bytes`, `forming_processor_seconds`: of the first round, with handshakes.
    `waiting_share`, `waiting_messages`, `waiting_bytes`: while all but one wait for a substitute, a second.
    `running_share`, `running_messages`: while workers run, a second. `longest_reply_seconds`: what a node waited for a
    reply, beyond the time for which it may be held back. `dropped`: connections that were closed in the first round to
    make room for newer ones, and made again. `threads`, `descriptors`: of the lead while nodes wait.
    """

    nodes: int
    first_round_seconds: float
    next_round_seconds: float
    waiting_share: float
    running_share: float
    forming_messages: int
    forming_bytes: int
    forming_processor_seconds: float
    waiting_messages: float
    waiting_bytes: float
    running_messages: float
    longest_reply_seconds: float
    dropped: int
    threads: int
    descriptors: int


def measure(nodes: int, waiting_seconds: float) -> RendezvousFigures:
    """The story with `nodes` nodes; they run, and then wait, for `waiting_seconds` each. Raises TimeoutError if a round
    does not form within minutes, RuntimeError for a lead that ends, or ranks that are not those of a round."""
    door.raise_limit()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    lead = context.Process(target=_lead, args=(theirs, port, nodes), daemon=True)
    lead.start()
    theirs.close()
    try:
        if not ours.poll(_BOUND):
            raise TimeoutError("the lead did not start")
        ours.recv()
        return asyncio.run(_Story(nodes, port, lead.pid or 0).run(waiting_seconds))
    finally:
        lead.kill()
        lead.join()


def _lead(ready: Connection, port: int, nodes: int) -> None:
    """The lead's process: takes part in each round, as torch's agent does."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    from ft_plugins.launcher import plugin

    place, run = f"127.0.0.1:{port}", _run(port)
    bounds = {"detect_seconds": SILENCE, "wait_seconds": _BOUND, "join_timeout": _BOUND}
    config: dict[str, Any] = {"node_name": _name(_LEAD), **bounds}
    handler: Any = plugin.create(RendezvousParameters("ft_plugins", place, run, nodes, nodes, **config))
    handler.workers = WORKERS
    ready.send(True)
    while True:
        handler.next_rendezvous()
        while not handler.num_nodes_waiting():
            time.sleep(_AGENT_SECONDS)


def _run(port: int) -> str:
    return f"rendezvous-scale-{port}"


def _name(number: int) -> str:
    return f"node{number:05d}".ljust(NAME_LENGTH, "-")


def _address(number: int) -> str:
    return f"127.1.{number >> 8}.{number & 255}"


@dataclass
class _Traffic:
    """Between all emulated nodes and the lead."""

    messages: int = 0
    bytes: int = 0
    dropped: int = 0  # connections, before they were admitted
    longest_reply: float = 0.0  # seconds

    def since(self, before: _Traffic) -> _Traffic:
        return _Traffic(self.messages - before.messages, self.bytes - before.bytes)

    def copy(self) -> _Traffic:
        return _Traffic(self.messages, self.bytes, self.dropped)


class _Link:
    """An authenticated connection to the lead."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, traffic: _Traffic) -> None:
        self._reader, self._writer, self._traffic = reader, writer, traffic
        self._decoder = Decoder(HANDSHAKE)
        self._sealer: Sealer | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, port: int, name: str, address: str, traffic: _Traffic) -> AsyncIterator[_Link]:
        """A connection that the lead has admitted; tried again while it is dropped for newer ones, as a node does."""
        pause, longest = _RETRY_SECONDS
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
            try:
                link = cls(reader, writer, traffic)
                try:
                    await link._prove(ClientHandshake(job_identity.user_secret(), Party(PURPOSE, _run(port), name)))
                except (EOFError, ConnectionResetError):
                    traffic.dropped += 1
                else:
                    yield link
                    return
            finally:
                writer.close()
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, longest)

    async def _prove(self, client: ClientHandshake) -> None:
        self._write(client.hello())
        answer, channel = client.answer(await self._receive())
        self._write(answer)
        self._decoder, self._sealer = Decoder(PLAIN, channel.opener), channel.sealer
        if await self._receive() != ADMITTED:
            raise ConnectionError("not admitted")

    async def ask(self, message: Message, held: float = 0.0) -> Message:
        """The reply, which the lead may hold back for `held` seconds."""
        began = time.monotonic()
        self._write(message)
        reply = await self._receive()
        self._traffic.longest_reply = max(self._traffic.longest_reply, time.monotonic() - began - held)
        return reply

    def _write(self, message: Message) -> None:
        nbytes, buffers = seal(message, sealer=self._sealer)
        self._writer.writelines(buffers)
        self._traffic.messages += 1
        self._traffic.bytes += nbytes

    async def _receive(self) -> Message:
        while True:
            place = self._decoder.space[0]
            place[:] = await self._reader.readexactly(len(place))
            self._traffic.bytes += len(place)
            if (received := self._decoder.filled(len(place))) is not None:
                self._traffic.messages += 1
                return received[0]


@dataclass
class _Node:
    """An emulated node."""

    number: int
    port: int
    traffic: _Traffic
    checks: bool = False  # that its roster is the announced one
    rank: int = -1
    begun: int = 0  # the round in which it takes part
    roster: Roster = field(default_factory=lambda: Roster(0))
    digest: str = Roster(0).digest  # of the last round that it knows
    round: int = 0

    @property
    def token(self) -> str:
        return f"token-{self.number}"

    async def live(self) -> None:
        """Find the lead, then take part in each round."""
        await self._search()
        async with _Link.open(self.port, _name(self.number), _address(self.number), self.traffic) as link:
            while True:
                await self._apply(link)
                seen = 0
                while True:
                    view = await self._look(link, seen, wants_roster=self.begun == 0)
                    seen = view["changes"]
                    await self._read_roster(link, view.get("roster"))
                    complete, chosen = view["phase"] == "complete", view.get("rank") is not None
                    if self.begun and not (complete and view["round"] == self.begun):
                        break
                    if complete and chosen and view["begun"]:
                        self.begun, self.rank = view["round"], view["rank"]
                self.begun = 0

    async def _search(self) -> None:
        pause, longest = _SEARCH_SECONDS
        while True:
            async with _Link.open(self.port, _name(self.number), _address(self.number), self.traffic) as link:
                if (await link.ask({"do": "meet", "lead": None}))["leading"]:
                    return
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(1.5 * pause, longest)

    async def _apply(self, link: _Link) -> None:
        application = Application(
            _name(self.number),
            self.token,
            f"{_address(self.number)}:{_ABSENT_PORT}",
            knows=self.round,
            workers=WORKERS,
        )
        message = {"do": "apply", "token": self.token, "application": vars(application), "base": self.digest}
        while not (reply := await link.ask(message))["accepted"]:
            await asyncio.sleep(_SEARCH_SECONDS[0])
        await self._read_roster(link, reply["roster"])

    async def _look(self, link: _Link, seen: int, wants_roster: bool) -> Message:
        wait = longest_hold(SILENCE) * random.uniform(0.75, 1.0)
        look = {"do": "look", "token": self.token, "round": self.round, "wait": wait, "seen": seen}
        return await link.ask(look | {"roster": wants_roster, "base": self.digest}, wait)

    async def _read_roster(self, link: _Link, first: Message | None) -> None:
        if not first:
            return
        pages = [first]
        for number in range(1, first["pages"]):
            ask = {"do": "roster", "token": self.token, "base": first["base"], "page": number}
            pages.append((await link.ask(ask))["roster"])
        if any((page["digest"], page["number"]) != (first["digest"], at) for at, page in enumerate(pages)):
            return  # the next look has a newer one
        if self.checks:
            roster = assembled([parsed(RosterPage, page) for page in pages], self.roster)
            if roster is None:
                raise RuntimeError("the pages of a roster do not result in it")
            self.roster = roster
        self.round, self.digest = first["round"], first["digest"]


class _Story:
    """The nodes, and the lead as the kernel sees it."""

    def __init__(self, nodes: int, port: int, lead: int) -> None:
        self._count = nodes
        self._port = port
        self._process = Path(f"/proc/{lead}")
        self._traffic = _Traffic()
        self._nodes = [_Node(number, port, self._traffic, checks=number == 1) for number in range(1, nodes)]
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def run(self, waiting_seconds: float) -> RendezvousFigures:
        """Each step ends within bounded time. Raises as `measure` does."""
        try:
            return await self._run(waiting_seconds)
        finally:
            await self._end(*self._tasks.values())

    async def _run(self, waiting_seconds: float) -> RendezvousFigures:
        began, used = time.monotonic(), self._processor_seconds()
        for node in self._nodes:
            self._start(node)
        await self._until(lambda: all(node.begun == 1 for node in self._nodes))
        first, forming = time.monotonic() - began, self._traffic.copy()
        used = self._processor_seconds() - used
        self._check_ranks()
        running, in_running = await self._share(waiting_seconds)
        lost = self._nodes.pop()
        await self._end(self._tasks.pop(lost.number))
        survivor = self._nodes[0]  # its workers fail with those of the lost node; the others hear of it from the lead
        await self._end(self._tasks.pop(survivor.number))
        survivor.begun = 0
        self._start(survivor)
        await self._until_waiting(self._count - 1)
        waiting, in_waiting = await self._share(waiting_seconds)
        threads, descriptors = self._threads(), len(list((self._process / "fd").iterdir()))
        began = time.monotonic()
        self._nodes.append(_Node(self._count, self._port, self._traffic))
        self._start(self._nodes[-1])
        await self._until(lambda: all(node.begun == 2 for node in self._nodes))
        again = time.monotonic() - began
        self._check_ranks()
        return RendezvousFigures(
            nodes=self._count,
            first_round_seconds=first,
            next_round_seconds=again,
            waiting_share=waiting,
            running_share=running,
            forming_messages=forming.messages,
            forming_bytes=forming.bytes,
            forming_processor_seconds=used,
            waiting_messages=in_waiting.messages / waiting_seconds,
            waiting_bytes=in_waiting.bytes / waiting_seconds,
            running_messages=in_running.messages / waiting_seconds,
            longest_reply_seconds=self._traffic.longest_reply,
            dropped=forming.dropped,
            threads=threads,
            descriptors=descriptors,
        )

    def _start(self, node: _Node) -> None:
        self._tasks[node.number] = asyncio.create_task(node.live())

    async def _end(self, *tasks: asyncio.Task[None]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _check_ranks(self) -> None:
        found = sorted(node.rank for node in self._nodes)
        if found != list(range(1, self._count)):
            raise RuntimeError(f"expected the ranks from 1 to {self._count - 1}, found others")

    async def _until(self, holds: Callable[[], bool]) -> None:
        async def held() -> bool:
            return holds()

        await self._poll(held)

    async def _until_waiting(self, count: int) -> None:
        """Until so many nodes wait."""
        async with _Link.open(self._port, "observer", "127.0.0.1", self._traffic) as link:

            async def wait() -> bool:
                view = await link.ask({"do": "look", "token": "observer"})
                return view["phase"] == "open" and view["waiting"] == count

            await self._poll(wait)

    async def _poll(self, holds: Callable[[], Awaitable[bool]]) -> None:
        deadline = time.monotonic() + _BOUND
        while not await holds():
            for task in self._tasks.values():
                if task.done():
                    task.result()
                    raise RuntimeError("a node has ended")
            if not self._process.exists():
                raise RuntimeError("the lead has ended")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no round of {self._count} nodes formed within {_BOUND:g} s")
            await asyncio.sleep(0.02)

    async def _share(self, seconds: float) -> tuple[float, _Traffic]:
        """The lead's share of a processor while `seconds` pass, and the traffic meanwhile."""
        traffic, used, began = self._traffic.copy(), self._processor_seconds(), time.monotonic()
        await asyncio.sleep(seconds)
        share = (self._processor_seconds() - used) / (time.monotonic() - began)
        return share, self._traffic.since(traffic)

    def _processor_seconds(self) -> float:
        fields = (self._process / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def _threads(self) -> int:
        lines = (self._process / "status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Threads:"))
