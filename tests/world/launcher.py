"""`ft-run` of one node of the world: the product's rendezvous, and its rule for restarts, over the world's network.

Of the product: `Rendezvous`, `RoundJoin`, `LeaderSearch`, `LeaderLink`, `NodeService`, `RoundMachine`, `Watcher`,
`Incarnations`. Of the world: connections, and the loop in which the agent looks at its workers.
"""

import os
import secrets
from types import SimpleNamespace

from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousGracefulExitError

from ft_plugins.errors import FtError, ProtectionError, ProtocolError
from ft_plugins.launcher.agent.restarts import Incarnations, Life, LostPeers, WorkerFailure, root_cause
from ft_plugins.launcher.agent.watcher import Watcher
from ft_plugins.launcher.rendezvous import peers, rendezvous
from ft_plugins.launcher.rendezvous.endpoint import Endpoint
from ft_plugins.launcher.rendezvous.leader_search import LeaderSearch
from ft_plugins.launcher.rendezvous.local_node import LeaderLink
from ft_plugins.launcher.rendezvous.peers import Credentials
from ft_plugins.launcher.rendezvous.rendezvous_settings import RendezvousSettings
from ft_plugins.launcher.rounds.node_service import NodeIdentity, NodeService
from ft_plugins.launcher.rounds.roster_file import RosterFile
from ft_plugins.launcher.rounds.rounds import Rules
from ft_plugins.transport.framed import EndedError

from . import hub as hubs
from .hub import Signal
from .network import Waiting
from .rank import Rank
from .smp import Client, Events, Place, Smp

PORT = 29400
ASKING = 60.0  # seconds for which a request to the SMP is repeated
LOOK = 0.2  # seconds between two looks of the agent at its workers


class PeerConnection:
    """As `launcher.rendezvous.peers.PeerConnection`."""

    def __init__(self, endpoint, seconds, credentials):
        task = hubs.ACTIVE.current
        place = Endpoint.read(endpoint)
        self.endpoint, self._seconds, self._awaited = endpoint, seconds, 0
        try:
            network = task.hub.world.network
            self._end = network.connect(task.process, credentials.node, (place.host, place.port), seconds)
        except OSError as error:
            raise ConnectionError(str(error)) from error

    def ask(self, message):
        self.send(message)
        while self._awaited > 1:
            self.receive()
        return self.receive()

    def send(self, message):
        try:
            self._end.send(message)
        except OSError as error:
            raise ConnectionError(str(error)) from error
        self._awaited += 1

    def is_readable(self, seconds):
        end = self._end
        if not end.readable and seconds > 0:
            waiting = Waiting(hubs.ACTIVE)
            end.watchers.setdefault(waiting)
            waiting.signal.wait(seconds)
            end.watchers.pop(waiting, None)
        return end.readable

    def receive(self):
        try:
            reply = self._end.receive(self._seconds)
        except (OSError, ProtocolError, EndedError) as error:
            self.close()
            raise ConnectionError(str(error)) from error
        self._awaited -= 1
        return reply

    def close(self):
        self._end.close()


def ask(endpoint, message, seconds, credentials):
    connection = PeerConnection(endpoint, seconds, credentials)
    try:
        return connection.ask(message)
    finally:
        connection.close()


def ask_all(endpoints, message, seconds, credentials):
    """As `peers.ask_all`: concurrently."""
    replies, process = {}, hubs.ACTIVE.current.process

    def attempt(endpoint):
        try:
            replies[endpoint] = ask(endpoint, message, seconds, credentials)
        except ConnectionError as error:
            replies[endpoint] = error

    distinct = list(dict.fromkeys(endpoints))
    tasks = [process.spawn(lambda each=each: attempt(each), "ask") for each in distinct]
    for task in tasks:
        task.over.wait()
    return {each: replies[each] for each in distinct}


class PeerServer:
    """As `launcher.rendezvous.peers.PeerServer`: one thread that answers, and releases looks that are held."""

    rejected, is_serving = "", True

    def __init__(self, process, where, service):
        self._process, self._service = process, service
        self._ends, self._held, self._numbers, self._queue = {}, set(), 0, []
        self._used = {}  # by number, the longest unused one first
        self._wake, self._closed = Signal(process.hub), False
        process.hub.world.network.listen(process, where, self._accept)
        process.spawn(self._run, "ft-post")

    def _accept(self, end):
        self._numbers += 1
        number = self._numbers
        self._ends[number] = end
        self._used[number] = self._process.hub.now
        end.taken = lambda message: self._arrived(number, message)
        end.watchers.setdefault(Waiting(None, lambda: self._arrived(number, None)))
        return self._service.me.node

    def _arrived(self, number, message):
        self._queue.append((number, message))
        self._wake.set()

    def look(self):
        self._wake.set()

    def check(self):
        pass

    def _run(self):
        task, service = self._process.hub.current, self._service
        pause = 0.0
        while not self._closed:
            self._wake.wait(pause)
            self._wake = Signal(task.hub)
            queue, self._queue = self._queue, []
            for number, message in queue:
                if message is None:
                    self._drop(number)
                    continue
                if number not in self._ends:
                    continue
                del self._used[number]
                self._used[number] = task.hub.now
                if number in self._held:
                    self._held.discard(number)
                    self._reply(number, service.release(number))
                reply = service.answer_or_hold(message, number)
                if reply is None:
                    self._held.add(number)
                else:
                    self._reply(number, reply)
            while self._used and task.hub.now - self._used[number := next(iter(self._used))] > peers._IDLE_SECONDS:
                self._drop(number)
            pause = max(0.01, service.tick())
            for number, reply in service.released():
                if number in self._held:
                    self._held.discard(number)
                    self._reply(number, reply)

    def _drop(self, number):
        if (end := self._ends.pop(number, None)) is not None:
            del self._used[number]
            self._held.discard(number)
            end.close()
            self._service.gone(number)

    def _reply(self, number, reply):
        end = self._ends.get(number)
        if end is not None and end.is_open and not end.is_ended:
            end.send(reply)

    def close(self):
        self._closed = True
        self._wake.set()
        for end in self._ends.values():
            end.close()


class LocalNode:
    """As `launcher.rendezvous.local_node.LocalNode`."""

    def __init__(self, settings):
        process = hubs.ACTIVE.current.process
        self.settings, self.reach = settings, settings.reach
        self.rest = min(1.0, settings.silence / 10)
        self.events = Events(settings.node)
        self.listener, self.host = None, settings.node
        own = f"{settings.node}:{PORT}"
        self.credentials = Credentials(b"", settings.run, settings.node)
        self.me = NodeIdentity(settings.run, settings.node, secrets.token_hex(8), own)
        self.service = service = NodeService(self.me, settings.rules, settings.silence)
        self.roster_file = RosterFile(settings.run, settings.run_dir)
        given = [str(each) for each in settings.endpoints]
        self.search = LeaderSearch(service, self.roster_file, given, self.reach, self.credentials)
        self.search.taken = lambda: ""
        self.link = LeaderLink(service, self.reach, settings.silence, self.credentials)
        self.server = PeerServer(process, (settings.node, PORT), service)

    def read_sizes(self):
        pass

    def close(self):
        self.link.close()
        self.server.close()


class RoundStore:
    """The store of a round: only that its node is reached matters here."""

    def __init__(self, where=None):
        self.port = where or hubs.ACTIVE.world.network.port()
        self.process = hubs.ACTIVE.current.process


def serve_store(listener, host, bound):
    store = RoundStore()
    hubs.ACTIVE.world.network.listen(store.process, (host, store.port), lambda end: host)
    return store


def connect_store(place, bound, reach):
    process, network = hubs.ACTIVE.current.process, hubs.ACTIVE.world.network
    try:
        network.connect(process, "", (place.host, place.port), reach).close()
    except OSError as error:
        raise ConnectionError(f"the store at {place} was lost: {error}") from error
    return RoundStore(place.port)


class Watching(Watcher):
    """What the agent asks the SMP of its node. Who starts it again is below."""

    def __init__(self, node, run_dir):
        self._job = SimpleNamespace(run_dir=run_dir, node=node.name)
        self._events, self._connect, self._patience = Events(node.name), Client, ASKING
        self._pid = self._started = 0

    def watch(self, detect):
        self._request("watch", lambda client: client.watch(os.getpid(), detect))

    def end(self):
        self._request("end", lambda client: client.end())


class Agent:
    """One `ft-run`."""

    def __init__(self, node):
        self.node, self.world = node, node.world
        self.process = node.world.hub.process(f"{node.name}.ft-run", node.machine)
        self.ranks, self.incarnations = [], Incarnations()
        self.handler, self.result = None, None
        self.process.spawn(self._main, "agent")

    def _main(self):
        self.run_dir = Place(self.node.machine, f"/run/job/{self.node.name}")
        self.watcher = Watching(self.node, self.run_dir)
        self.process.spawn(self._watch_smp, "watcher")
        world = self.world
        endpoints = tuple(Endpoint(name, PORT) for name in world.endpoints)
        settings = RendezvousSettings(
            "job", self.node.name, endpoints, None, Rules(world.nodes, world.nodes, last_call=3.0, wait=world.wait),
            600.0, world.silence, None, self.run_dir, b"", False, False,
        )  # fmt: skip
        self.handler = handler = rendezvous.Rendezvous(settings)
        try:
            self.result = self._invoke(handler)
        except RendezvousGracefulExitError:
            self.result = "spare"
        except RendezvousClosedError as error:
            self.result = f"closed: {error}"
        except (FtError, OSError) as error:
            self.result = f"failed: {error}"
        handler.status = {"succeeded": "succeeded", "spare": "succeeded"}.get(self.result, "failed")
        handler.reason = self.result
        for rank in self.ranks:
            world.kill(rank.process.pid)
        handler.shutdown()
        self.world.over(self.node, self.result)
        if self.result in ("succeeded", "spare"):
            self.ended = True
            try:
                self.watcher.end()
            except FtError as error:
                world.hub.note(f"{self.node.name}: end: {error}")
        world.hub.current.sleep(0.05)
        self.process.end(0 if self.result in ("succeeded", "spare") else 1)
        world.hub.current.sleep()

    ended = False

    @property
    def leads(self):
        """Whether it leads the rounds. From a leader that was cut off all others were away."""
        return self.handler is not None and self.handler._node.service.leading is not None

    def _watch_smp(self):
        """Start the SMP, and again whenever it has died."""
        pause, hub = 0.1, self.world.hub
        while not self.ended:
            if self.node.smp is None or not self.node.smp.process.alive:
                self.node.smp = Smp(self.node)
            self.watcher.watch(self.world.detect_seconds)
            self.node.smp.process.ended.wait()
            hub.current.sleep(pause)

    def _invoke(self, handler):
        while True:
            handler.opened = self._has_opened()
            handler.trained = self.watcher.begun()
            handler.workers = self.world.per_node
            handler.replaceable = self.watcher.replaceable()
            info = handler.next_rendezvous()
            handler.failed = False
            self.world.begun(self.node, handler._round, info.rank)
            token = self.token = self.watcher.fence()
            self.first = self.first or token
            gang = self.world.gang(handler._round, handler.all_workers)
            self.ranks = [
                Rank(self, gang, handler.first_rank + local, token, handler.all_workers)
                for local in range(self.world.per_node)
            ]
            verdict = self._monitor(handler)
            if verdict is not None:
                return verdict

    first = token = failures = 0

    def _monitor(self, handler):
        """Until the workers have to start again (None), or the job is over."""
        hub = self.world.hub
        while True:
            hub.current.sleep(LOOK)
            ended = [rank for rank in self.ranks if not rank.process.alive]
            failed = [rank for rank in ended if rank.process.status]
            if failed:
                return self._failed(handler, failed)
            if len(ended) == len(self.ranks):
                if handler.wait_for_all():
                    return "succeeded" if handler.all_succeeded else "the job is over"
                return None
            if lost := self.watcher.lost(self.token):
                return self._restart(handler, LostPeers(tuple(lost)))
            if handler.num_nodes_waiting():
                self._kill()
                self.incarnations.lives.append(Life(LostPeers((handler.waiting_reason,))))
                return None

    def _has_opened(self):
        return bool(self.first) and any(
            each["lineage_token"] >= self.first for each in self.watcher.status()["segments"]
        )

    def _failed(self, handler, failed):
        failures = []
        for rank in failed:
            error = getattr(rank.process, "error", "")
            words = f"{type(error).__name__}: {error}"
            failures.append(WorkerFailure(rank.rank, 0, rank.process.pid, rank.process.status, words, 0))
        cause = root_cause(failures)
        handler.failed = not cause.secondary
        self.failures += handler.failed
        return self._restart(handler, cause)

    def _restart(self, handler, cause):
        self._kill()
        trained = handler.trained_anywhere
        try:
            verdict = self.incarnations.end(cause, None, self.watcher, self.token, lambda: trained)
        except ProtectionError as error:
            return f"failed: {error}"
        self.world.hub.note(f"{self.node.name}: {cause.line()}; restart {verdict.restart} {verdict.reason}")
        return None if verdict.restart else f"{verdict.status}: {verdict.reason}"

    def _kill(self):
        for rank in self.ranks:
            self.world.kill(rank.process.pid)
