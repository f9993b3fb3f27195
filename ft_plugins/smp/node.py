"""The node tier as the SMP of one node runs it: protects the slots of its ranks on other nodes, and theirs here.

Invariant: it decides nothing. Which version is exchanged and which one counts is `pins.decide`, asked at position 0;
what is sent where is the exchange plan, which every trainer and SMP computes alike. What it was told stands in a file
of the run directory, so that an SMP which replaces it goes on. While it is suspended (a new incarnation is starting)
nothing is gathered, sent, counted or declared lost; what is there can be read.

In: requests of this node's trainers (`endpoint`, `protect`, `inventory`, `rebuild`) and of other nodes' SMPs.
Out: versions that count, pinned; slots put back together; `version.committed`, `node.lost` events and `lost.json`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from .. import files
from ..bubbles.gate import Gate
from ..bubbles.gate_pacer import GatePacer
from ..bubbles.plan import by_rate_shares
from ..errors import FtError, ProtocolError
from ..events import Events, catalogue
from ..intake import Address, Count, Port, Text, read_json
from ..redundancy.plan import ExchangePlan
from ..snapshot.paths import vault_of
from ..snapshot.segment import Segment, marks_in
from ..snapshot.slots import Mark, Pin, SlotState, Version
from . import checks, probe, protocol, requests, wire
from .alarms import Alarms
from .answers import Answers
from .channel import Who
from .exchange import Exchange, RatePacer
from .kept import Kept
from .pace import Pace
from .peers import Coordinator, Local, Remote, beat_seconds, read_maybe, told
from .pins import Directive, Report
from .protection import Protection
from .rebuild import Reader, decode, fetch
from .resize.previous_segments import PreviousSegments
from .vault import Vault, shape_of
from .wire import Peer, Server

_TOLD = "protection.json"  # in the run directory
_RELEASED = "released.json"  # likewise: the lineage in which the job has gone on without this node
_LISTENS = "endpoint.json"  # likewise
_TOLD_OF = ("replicas", "checkpoints", "protection")  # alarms of one incarnation
_POLL_SECONDS = 0.005  # while the version to be exchanged is being sealed: two iterations must not pass unseen


@dataclass(frozen=True)
class _Listens:
    """Where an SMP listens for those of other nodes, and by which secret it knows them."""

    address: Address
    port: Port
    secret_file: Text
    encrypt: Annotated[bool, Field(strict=True)]


_WHERE, _COUNT, _BLOCK = TypeAdapter(_Listens), TypeAdapter(Count), TypeAdapter(dict[str, Any])


class NodeTier:
    """Between `endpoint` and `close` it listens; between `protect` and `suspend` it protects."""

    def __init__(
        self,
        run_dir: Path,
        job: str,
        node: str,
        segments: Mapping[int, Segment],
        former: PreviousSegments,
        events: Events,
        alarms: Alarms | None = None,
    ) -> None:
        """`segments` are the SMP's own, by rank, `former` those of other sizes of the job. Goes on with what an SMP
        before it was told."""
        self._run_dir = run_dir
        self._job = job
        self._node = node
        self._segments = segments
        self._events = events
        self._lock = threading.RLock()
        self._server: Server | None = None
        self._secret = b""
        self._me = Who(wire.PURPOSE, job, node)
        self._vault: Vault | None = None
        self._former = former
        self._memory = Local(segments, former, lambda: self._vault)
        self._answers = Answers(self._memory, segments, self._gathering, self._take_beat, self._ask_outside)
        self._outside: Callable[[dict[str, Any]], dict[str, Any]] | None = None
        self._released = _number(run_dir / _RELEASED)
        self._kept = Kept(run_dir, segments)
        self._told: Protection | None = None
        self._plan: ExchangePlan | None = None
        self._first: Peer | None = None  # where the agreement is reached
        self._coordinator: Coordinator | None = None
        self._exchange: Exchange | None = None
        self._pace = Pace(1, None)
        self._directive = Directive()
        self._missed: Version | None = None
        self._alarms = alarms or Alarms(run_dir)
        self._protected = False  # by a version that counts since this incarnation began
        self._began = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.token = 0  # of the incarnation that is protected: stands in `lost.json`
        self._adopt()

    # ---- requests of this node's trainers ----

    def endpoint(self, address: str, secret_file: str, encrypt: bool = False) -> tuple[str, int]:
        """Listen for other nodes' SMPs on `address`; where. Raises ConfigError."""
        with self._lock:
            same = self._secret == wire.read_secret(Path(secret_file)) and self._me.encrypt == encrypt
            if self._server is None or self._server.endpoint[0] != address or not same:
                port = 0
                with suppress(OSError, ValueError):
                    before = read_json(self._run_dir / _LISTENS, _WHERE)
                    port = before.port if before.address == address else 0
                self._listen(address, port, secret_file, encrypt)
            assert self._server is not None
            return self._server.endpoint

    def _listen(self, address: str, port: int, secret_file: str, encrypt: bool) -> None:
        self._secret = wire.read_secret(Path(secret_file))
        self._me = replace(self._me, encrypt=encrypt)
        if self._server is not None:
            self._server.close()
        self._server = Server(address, port, self._me, self._secret, self._answers.handle, self._events)
        where = _Listens(address, self._server.endpoint[1], secret_file, encrypt)
        files.write_json(self._run_dir / _LISTENS, asdict(where))

    def protect(self, told_now: Protection, token: int) -> dict[str, Any]:
        """Protect the job as it is now. Returns the bytes that are claimed, the kernel's figure, and what the links
        carry, where that is to be measured.

        Raises BudgetError, TopologyError, ProtocolError for a position that is not this node's.
        """
        links = self._links(told_now) if told_now.measure else []  # nothing else moves now
        self.suspend()
        with self._lock:
            vault = self._begin(told_now, token)
            self._kept.begin(told_now, vault)
            self._pace = Pace(told_now.interval, self._kept.counted)
            files.write_json(self._run_dir / _TOLD, {**told_now.block(), "token": token})  # what it says to be kept is
            self._run()
            return {"bytes": vault.nbytes, "resident_bytes": vault.resident_bytes, "links": links}

    def _links(self, told_now: Protection) -> list[tuple[int, float]]:
        """Bytes per second to each position to which this node sends copies; none where that cannot be measured."""
        plan = told_now.plan()
        targets = [send.area.position for send in plan.sends[told_now.position]]
        try:
            return probe.measure(
                targets, lambda at: self.peer(told_now.endpoints[at], told_now.detect_seconds, plan.nodes[at])
            )
        except (FtError, OSError) as error:
            self._events.emit(catalogue.PROBE_FAILED, reason=str(error))
            return []

    def _begin(self, told_now: Protection, token: int) -> Vault:
        plan = told_now.plan()
        if told_now.position >= len(plan.nodes) or plan.nodes[told_now.position] != self._node:
            raise ProtocolError(f"node {self._node} was told that it is position {told_now.position} of {plan.nodes}")
        checks.by_target(plan, [r for r in plan.ranks[told_now.position] if r in self._segments], self._segments)
        shape = shape_of(plan, told_now.position, told_now.shapes, told_now.digest)
        if self._vault is not None:
            self._vault.close()
            self._vault = self._told = self._plan = None  # where the next one cannot be had, there is none
        self._vault = Vault(vault_of(self._job, self._node), plan, told_now.position, shape)
        self._told, self._plan, self.token = told_now, plan, token
        self._first = self._connect(0)
        self._coordinator = Coordinator(told_now.epoch(), told_now.detect_seconds) if told_now.position == 0 else None
        self._directive, self._missed, self._protected = Directive(), None, False
        return self._vault

    def inventory(self) -> dict[str, Any]:
        """What this node can hand out: complete versions of each rank's slots, and of its parity."""
        with self._lock:
            return {
                "slots": [[rank, _clean(segment)] for rank, segment in sorted(self._segments.items())],
                "marks": marks_in(self._segments.values()),
                "completed": [[rank, segment.completed] for rank, segment in sorted(self._segments.items())],
                "lineage": max(
                    [self._released, self._former.lineage, *(s.newest_lineage for s in self._segments.values())]
                ),
                "released": self._released,
                "parity": sorted(map(astuple, self._vault.versions() if self._vault else ())),
                "counted": told(self._kept.counted),
                "position": self._told.position if self._told else None,
                "plan": self._told.digest if self._told else 0,
            }

    @property
    def ranks(self) -> int:
        """Of the job that is, or was last, protected; 0 for none yet."""
        return len(self._told.nodes) if self._told else 0

    @property
    def counted(self) -> Version | None:
        """What counts for that job on this node."""
        return self._kept.counted

    def parity(self) -> dict[str, Any]:
        """Of the job that was protected last: its parity here, and what one has to know to decode by it."""
        with self._lock:
            parity: list[Version] = list(self._vault.versions()) if self._vault else []
            return {
                "parity": sorted(map(astuple, parity)),
                "counted": told(self._kept.counted),
                "position": self._told.position if self._told else None,
                "plan": self._told.digest if self._told else 0,
                "protection": self._told.block() if self._told else None,
                "released": self._released,
            }

    def rebuild(
        self, rank: int, token: int, told_now: Protection, request: dict[str, Any], into: Segment | None = None
    ) -> None:
        """Put the slot of `rank` back together: from `source` if that is given, else from parity without the `lost`.

        `holders` says where what lay at each position of the plan is now; `into` is the segment, the rank's own if not
        given. Raises what `fetch` and `decode` raise.
        """
        wanted = requests.read(requests.REBUILD, request)
        version, source = wanted.version, wanted.source
        segment = self._segments.get(rank) if into is None else into
        if segment is None:
            raise ProtocolError(f"rank {rank}: rebuild before attach")
        for slot in segment.slots():  # asked again after an SMP was replaced over it, or what is there is corrupt
            if slot.version == version:
                segment.unpin(slot.index, ~Pin(0))
                segment.dirty(slot.index, None, token)
        began = time.monotonic()
        if source is not None:
            holder = self._reader(source, told_now.detect_seconds)
            read_bytes = fetch(segment, version, token, holder)
        else:
            readers = {at: self._reader((host, port), told_now.detect_seconds) for at, host, port in wanted.holders}
            read_bytes = decode(segment, version, token, told_now.plan(), wanted.lost, readers)
        self._events.emit(
            catalogue.SLOT_REBUILT, about=rank, lineage=version.lineage, iteration=version.iteration,
            decoded=source is None, bytes=segment.shape.nbytes, read_bytes=read_bytes, seconds=time.monotonic() - began,
        )  # fmt: skip

    def status(self) -> dict[str, Any]:
        """For people: what counts, what is being exchanged, with whom."""
        with self._lock:
            return {
                "nodes": list(self._plan.nodes) if self._plan else [],
                "counts": told(self._kept.counted),
                "exchange": told(self._directive.exchange),
                **self._pace.status(),
                "parity_bytes": self._vault.nbytes if self._vault else 0,
                "released": self._released,
            }

    def _filled(self) -> dict[str, list[list[int]]]:
        """Bytes of copies in those bubbles in which most has gone, as [rank, bubble, bytes]; nothing without any."""
        found = [[rank, *one] for rank, pacer in sorted(self._pace.pacers.items()) for one in pacer.filled()]
        return {"filled": found} if found else {}

    def _reader(self, where: tuple[str, int], timeout: float) -> Reader:
        if self._server is not None and where == self._server.endpoint:
            return self._memory
        return Remote(where, self._me, self._secret, timeout)

    def _connect(self, position: int) -> Peer:
        assert self._told is not None and self._plan is not None
        return self.peer(self._told.endpoints[position], self._told.detect_seconds, self._plan.nodes[position])

    def peer(self, where: tuple[str, int], timeout: float, node: str = "") -> Peer:
        """A way to another node's SMP; `node` is its name, where that is known."""
        return Peer(where, self._me, self._secret, timeout, node)

    # ---- a node without a part in the job ----

    def serve_outside(self, outside: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Who answers what is asked of this node when it has no part in the job."""
        self._outside = outside

    def _ask_outside(self, message: dict[str, Any]) -> dict[str, Any]:
        if self._outside is None:
            raise ProtocolError(f"node {self._node} is just starting")
        return self._outside(message)

    def release(self, lineage: int) -> None:
        """The job goes on in `lineage` without this node: what protected it here is given back."""
        self.unprotect()
        with self._lock:
            self._released = max(self._released, lineage)
            files.write_json(self._run_dir / _RELEASED, self._released)

    def unprotect(self) -> None:
        """What protected the job here is of no use to it any more: its memory is given back."""
        self.suspend()
        with self._lock:
            if self._vault is not None:
                self._vault.close()
            vault_of(self._job, self._node).unlink(missing_ok=True)
            self._vault = self._told = self._plan = None
            self._kept.forget()
            (self._run_dir / _TOLD).unlink(missing_ok=True)

    # ---- the agreement ----

    def _run(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._agree, args=(self._stop,), name="smp-node-tier", daemon=True)
        self._thread.start()

    def _agree(self, stop: threading.Event) -> None:
        """The thread: report, hear the directive, follow it, until stopped."""
        told_now, plan = self._told, self._plan
        assert told_now is not None and plan is not None
        period = beat_seconds(len(plan.nodes), told_now.detect_seconds)
        heard = time.monotonic()  # of position 0
        declared = False
        while not stop.is_set():
            began = time.monotonic()
            lost: list[int] = []
            try:
                directive, lost = self._beat(told_now)
                heard = time.monotonic()
                self._follow(directive)
            except (FtError, OSError) as error:
                if time.monotonic() - heard > told_now.detect_seconds:
                    lost = [0]
                    self._events.emit(catalogue.COORDINATOR_LOST, reason=str(error)) if not declared else None
            if lost and not declared and not stop.is_set():
                with suppress(OSError):  # of a disk that is full now: told with the next beat, or the one after
                    self.declare(self.token, [f"node {plan.nodes[position]}" for position in lost])
                    declared = True
            while not stop.is_set() and self._poll() and time.monotonic() - began < period:
                stop.wait(_POLL_SECONDS)
            stop.wait(max(0.0, period - (time.monotonic() - began)))

    def _beat(self, told_now: Protection) -> tuple[Directive, list[int]]:
        report = self._report()
        if self._coordinator is not None:
            return self._take_beat(told_now.position, report)
        assert self._first is not None
        reply, _ = self._first.ask("beat", epoch=told_now.lineage, position=told_now.position, report=told(report))
        directive = Directive(read_maybe(reply.get("exchange")), read_maybe(reply.get("counts")))
        return directive, [int(position) for position in reply.get("lost", [])]

    def _report(self) -> Report:
        with self._lock:
            told_now = self._told
            assert told_now is not None and self._vault is not None
            running = self._exchange
            if running is not None and running.differences:
                self._missed = running.version  # it can never count: a later one is tried
                self._alarms.say("replicas", catalogue.REPLICA_DIVERGED, str(running.differences[0]))
            exchange = running.version if running is not None else None
            encoded = exchange if running is not None and running.done and exchange in self._vault.versions() else None
            if encoded is not None and told_now.audited and encoded != told_now.base:
                mark = self._kept.mark(encoded)
                encoded = encoded if mark.preferred else None
                if mark in (Mark.UNAUDITED, Mark.DIFFERING):
                    self._missed = exchange  # it can never count either
            begun = self._kept.begun(told_now.lineage)
            if self._pace.captured(Version(told_now.lineage, begun)):
                self._tell_pace()
            return Report(begun, exchange, self._missed, encoded, self._kept.counted)

    def _tell_pace(self) -> None:
        """Every node knows it, one says so."""
        if self._told is not None and self._told.position == 0:
            kind = catalogue.EXCHANGE_SLOWED if self._pace.rarer else catalogue.EXCHANGE_RECOVERED
            self._events.emit(kind, **self._pace.fields())
            self._alarms.say("checkpoints", kind, self._pace.words())

    def _tell_protected(self, counts: Version) -> None:
        """The first version that counts after a recovery, which had lost its redundancy: one node says it."""
        if self._told is not None and self._told.position == 0 and self._told.base is not None and not self._protected:
            words = f"iteration {counts.iteration} is protected on all nodes: a lost node is survived again"
            self._alarms.say("protection", catalogue.PROTECTION_RESTORED, words)
        self._protected = True

    def _follow(self, directive: Directive) -> None:
        with self._lock:
            if self._told is None or self._vault is None or self._stop.is_set():
                return
            counts = directive.counts
            if counts is not None and counts != self._kept.counted and self._kept.count(counts):
                changed = self._pace.counted(counts)
                self._events.emit(
                    catalogue.VERSION_COMMITTED, lineage=counts.lineage, iteration=counts.iteration,
                    seconds=round(time.monotonic() - self._began, 3), position=self._told.position,
                    **self._pace.fields(), **self._filled(),
                )  # fmt: skip
                if changed:
                    self._tell_pace()
                self._tell_protected(counts)
            if directive.exchange != self._directive.exchange:
                self._end_exchange()
                self._kept.turn_to(directive)
                self._missed = None
                self._began = time.monotonic()
                if directive.exchange is not None:
                    self._vault.begin(directive.exchange)
            self._directive = directive

    def _poll(self) -> bool:
        """Pin the version to be exchanged as its ranks seal it, and begin to send; whether some have not yet."""
        with self._lock:
            version = self._directive.exchange
            if self._exchange is not None and self._exchange.corrupt:
                self._missed = self._exchange.version  # it can never be sent from here
            if version is None or self._exchange is not None or self._missed == version or self._stop.is_set():
                return False
            assert self._plan is not None and self._told is not None and self._vault is not None
            pinned = self._kept.source(version)
            if pinned is None:
                self._missed = version
            if not pinned:
                return pinned is False
            self._events.emit(catalogue.EXCHANGE_STARTED, lineage=version.lineage, iteration=version.iteration)
            rate = RatePacer(self._told.exchange_mbps * 1e6 / 8)
            ranks = self._plan.ranks[self._told.position]
            if self._told.stages and not self._pace.pacers:
                shares = by_rate_shares({rank: self._plan.nbytes[rank] for rank in ranks})
                self._pace.pacers = {
                    rank: GatePacer(Gate(self._segments[rank].gate), rate, by_rate_share=share)
                    for rank, share in shares.items()
                }
            self._exchange = Exchange(
                self._plan, self._told.position, version, self._told.lineage,
                {rank: self._segments[rank] for rank in ranks}, self._connect, rate, self._events, self._vault.alike,
                self._pace.pacers,
            )  # fmt: skip
            return False

    def _end_exchange(self) -> None:
        running, self._exchange = self._exchange, None
        if running is not None:
            running.stop()

    def declare(self, token: int, lost: list[str]) -> None:
        """Tell the agent, through a file: those are lost, the workers of incarnation `token` have to start again."""
        files.write_json(self._run_dir / "lost.json", {"token": token, "lost": lost})
        self._events.emit(catalogue.NODE_LOST, lost=lost)

    # ---- requests of other nodes' SMPs ----

    def _gathering(self, epoch: Any) -> Vault:
        """The vault, if this node gathers in that epoch. Raises ProtocolError."""
        with self._lock:
            if self._told is None or self._vault is None or self._stop.is_set():
                raise ProtocolError(f"node {self._node} does not gather parity now")
            if epoch != self._told.lineage:
                raise ProtocolError(f"an exchange of lineage {epoch}; this is {self._told.lineage}")
            return self._vault

    def _take_beat(self, position: int, report: Report) -> tuple[Directive, list[int]]:
        coordinator = self._coordinator
        if coordinator is None:
            raise ProtocolError(f"node {self._node} is not at position 0")
        return coordinator.beat(position, report), coordinator.lost()

    # ---- begin and end ----

    def _adopt(self) -> None:
        """Go on with what an SMP before this one was told, if its files are here."""
        try:
            where = read_json(self._run_dir / _LISTENS, _WHERE)
            self._listen(where.address, where.port, where.secret_file, where.encrypt)
            block = read_json(self._run_dir / _TOLD, _BLOCK)
            token = protocol.number(block, "token")
            with self._lock:
                told_before = Protection.read(block)
                whole = self._kept.go_on(told_before, self._begin(told_before, token))
                self._pace = Pace(told_before.interval, self._kept.counted)
                if whole:
                    self._run()
        except FileNotFoundError:
            return
        except (FtError, OSError, ValueError) as error:
            self._events.emit(
                catalogue.EXCHANGE_INTERRUPTED, reason=f"what the SMP before was told cannot be used: {error}"
            )

    def suspend(self) -> None:
        """Stop exchanging and watching; what is here stays and can be read. Idempotent.

        What was being sent stays pinned until `protect`: it may count on another node.
        """
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            if self._first is not None:
                self._first.close()
            self._thread.join()
            self._thread = None
        with self._lock:
            self._end_exchange()
            self._pace.pacers = {}  # they hold the segments
            self._coordinator = None
            if self._vault is not None:
                self._vault.pause()
        self._alarms.forget(*_TOLD_OF)
        with suppress(IsADirectoryError):  # not ours
            (self._run_dir / "lost.json").unlink(missing_ok=True)

    def close(self) -> None:
        """The end of the SMP."""
        self.suspend()
        if self._server is not None:
            self._server.close()
        if self._vault is not None:
            self._vault.close()
            self._vault = None
        self._kept.forget()
        for name in (_LISTENS, _TOLD, _RELEASED):
            (self._run_dir / name).unlink(missing_ok=True)


def _number(path: Path) -> int:
    """What stands in a small file; 0 where there is none."""
    try:
        return read_json(path, _COUNT)
    except (OSError, ValueError):
        return 0


def _clean(segment: Segment) -> list[tuple[int, ...]]:
    slots = segment.slots()
    return sorted({astuple(slot.version) for slot in slots if slot.state is SlotState.CLEAN and slot.version})
