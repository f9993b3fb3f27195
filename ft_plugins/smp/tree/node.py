"""The node tier in one SMP: protects the slots of its node's ranks on other nodes, and stores what protects theirs.

Invariant: what it needs to continue is in files of the run directory, so an SMP that replaces it continues. While it is
suspended, because a new incarnation is starting, nothing is received, sent, committed or declared lost; complete
versions can be read. Decisions are made in `agreement` and `node_step`; `node_driver` carries them out.

In: requests of this node's trainers (`endpoint`, `protect`, `inventory`, `rebuild`) and of other nodes' SMPs.
Out: committed versions, pinned; rebuilt slots; `node.lost` events and `lost.json`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ...base import files
from ...base.intake import Count, read_json
from ...errors import FtError, ProtocolError
from ...events import catalogue, standing_alarm
from ...redundancy.exchange_plan import ExchangePlan
from ...snapshot.segment.paths import parity_path_of
from ...snapshot.segment.segment import Segment, marks_in, newest_run
from ...snapshot.segment.slots import Pin, SlotState, Version
from ...transport.calls import Handover, Peer
from ...transport.protocol import packed
from ..exchange import replica_checks, traffic
from ..exchange.pace import Pace
from ..exchange.parity_store import ParityStore, shape_of
from ..exchange.peer_endpoint import PeerEndpoint, PeerRequests
from ..exchange.readers import LocalReader
from ..exchange.rebuild import decode, fetch
from ..serve import job_file
from ..serve.node_context import NodeContext
from ..serve.requests import RebuildSlot, SpareState
from ..watch.hang import Stall
from ..watch.job_history import was_drained
from . import other_nodes
from .node_driver import NodeDriver
from .pinned import PinnedVersions
from .protection import Protection

# in the run directory
_RELEASED = "released.json"  # the lineage in which the job has continued without this node
_ALARMS = ("replicas", "checkpoints", "protection", "commits")  # topics that belong to one incarnation

SpareHandler = Callable[[SpareState], dict[str, Any]]
StatusHandler = Callable[[], dict[str, Any]]

_COUNT = TypeAdapter(Count)


class NodeTier:
    """Listens between `endpoint` and `close`, protects between `protect` and `suspend`."""

    def __init__(self, smp: NodeContext) -> None:
        """Continues from the files of a previous SMP."""
        run_dir, segments = smp.run_dir, smp.segments
        self._run_dir, self._job, self._node = run_dir, smp.job, smp.node
        self._segments, self._previous = segments, smp.previous
        self._events, self._alarms = smp.events, smp.alarms
        self._lock = threading.RLock()
        self._store: ParityStore | None = None
        self._memory = LocalReader(segments, smp.previous, lambda: self._store)
        self._requests = PeerRequests(
            self._memory, segments, self._storing, self._join, self._received, self._as_spare,
            lambda digest: job_file.read_content(run_dir, digest), self._status_here,
        )  # fmt: skip
        self._endpoint = PeerEndpoint(run_dir, smp.job, smp.node, self._requests.handle, smp.events)
        self._spare_handler: SpareHandler | None = None
        self._status_handler: StatusHandler | None = None
        self._asking = threading.Lock()  # so that threads and connections do not grow with the people who ask
        self._asked: tuple[list[dict[str, Any]], float] = [], 0.0  # the last answers, and since when
        self._released = _number(run_dir / _RELEASED)
        self._pinned = PinnedVersions(run_dir, segments)
        self._protection: Protection | None = None  # of the job that is, or was last, protected
        self._driver: NodeDriver | None = None
        self._measured: list[tuple[int, float]] | None = None  # by `claim`, for `protect`
        self.token = 0  # of the incarnation that is protected
        self._adopt()

    # ---- requests of this node's trainers ----

    def endpoint(self, address: str, secret_file: str, encrypt: bool = False) -> tuple[str, int]:
        """Listen for other nodes' SMPs on `address`; returns where. Raises ConfigError."""
        with self._lock:
            return self._endpoint.listen(address, secret_file, encrypt)

    def claim(self, protection: Protection, token: int) -> None:
        """Do what takes time before `protect`: no node may begin to miss others that still do it. Raises as `protect`
        does."""
        self._measured = self._links(protection)  # there is no other traffic now
        self.suspend()
        with self._lock:
            self._claim(protection, token)

    def protect(self, protection: Protection, token: int) -> dict[str, Any]:
        """Protect the job from now on. Returns the `bytes` claimed, the kernel's figure, and the `links`: bytes per
        second by position, if they are to be measured.

        Raises BudgetError, TopologyError, ProtocolError for a position that is not this node's.
        """
        measured, self._measured = self._measured, None
        links = self._links(protection) if measured is None else measured
        self.suspend()
        with self._lock:
            reference = job_file.write(self._run_dir, protection)
            store = self._claim(protection, token)
            self._pinned.begin(protection, store)
            self._driver = self._driver_of(protection, store)
            job_file.record(self._run_dir, reference, token)  # after the pins that it implies
            self._driver.start()
            return {"bytes": store.nbytes, "resident_bytes": store.resident_bytes, "links": links}

    def _links(self, protection: Protection) -> list[tuple[int, float]]:
        """Bytes per second to each position to which this node sends copies; [] if that is not to be measured, or
        cannot be."""
        if not protection.measure:
            return []
        plan = protection.plan()
        targets = [send.area.position for send in plan.sends[protection.position]]
        try:
            return traffic.measure(targets, lambda position: self._connect(protection, plan, position))
        except (FtError, OSError) as error:
            self._events.emit(catalogue.PROBE_FAILED, reason=str(error))
            return []

    def _claim(self, protection: Protection, token: int) -> ParityStore:
        """Claim the memory of the parity store. If that fails, this node stores no parity."""
        plan, position = protection.plan(), protection.position
        if position >= len(plan.nodes) or plan.nodes[position] != self._node:
            raise ProtocolError(f"node {self._node} is not at position {position} of the job's nodes {plan.nodes}")
        ranks = [rank for rank in plan.ranks[position] if rank in self._segments]
        replica_checks.by_target(plan, ranks, self._segments)
        shape = shape_of(plan, position, protection.shapes, protection.digest)
        if self._store is not None:
            if not self._store.linked:
                with suppress(FtError, OSError):  # without it parity is received again
                    self._store.write_again()
            self._store.close()
            self._store = self._protection = self._driver = None
        self._store = ParityStore(parity_path_of(self._job, self._node), plan, position, shape)
        self._protection, self.token = protection, token
        return self._store

    def _driver_of(self, protection: Protection, store: ParityStore) -> NodeDriver:
        plan = protection.plan()
        return NodeDriver(
            protection, store, self._pinned, self._segments, partial(self._connect, protection, plan),
            self._lock, self._events, self._alarms, lambda lost: self.declare_lost(self.token, lost),
            still=_stood_still(self._run_dir),
        )  # fmt: skip

    def inventory(self) -> dict[str, Any]:
        """What this node can provide: complete versions of each rank's slots, and of its parity."""
        with self._lock:
            parity = self.parity()
            self._alarms.forget("parity")
            reason = ""
            if self._store is not None and self._store.damage:
                reason = f"node {self._node}: {self._store.damage}"
                self._events.emit(catalogue.SLOT_CORRUPTED, reason=reason)
                self._alarms.say("parity", catalogue.SLOT_CORRUPTED, reason)
            known = [self._released, self._previous.lineage, *(s.newest_lineage for s in self._segments.values())]
            lineage, headers = max(known), {rank: each.header for rank, each in sorted(self._segments.items())}
            return {
                "slots": [[rank, _clean(segment)] for rank, segment in sorted(self._segments.items())],
                "marks": marks_in(self._segments.values()),
                "damage": reason,
                "completed": [[rank, it.completed] for rank, it in headers.items() if it.opened.lineage == lineage],
                "lineage": lineage,
                "run": newest_run([*self._segments.values(), *self._previous.all()]),
                **{name: value for name, value in parity.items() if name != "protection"},
            }

    def removed_files(self) -> list[Path]:
        """The parity store's file, if it was removed while its memory is used."""
        with self._lock:
            return [parity_path_of(self._job, self._node)] if self._store and not self._store.linked else []

    @property
    def ranks(self) -> int:
        """The number of ranks of the job that was protected last; 0 if none was."""
        return len(self._protection.nodes) if self._protection else 0

    @property
    def committed(self) -> Version | None:
        """The version that is committed on this node."""
        return self._pinned.committed

    def parity(self) -> dict[str, Any]:
        """The parity here of the job that was protected last, and the facts needed to decode it."""
        with self._lock:
            return {
                "parity": sorted(map(astuple, self._store.versions() if self._store else ())),
                "committed": packed(self._pinned.committed),
                "position": self._protection.position if self._protection else None,
                "plan": self._protection.digest if self._protection else 0,
                "protection": job_file.refer(self._protection)[0].block() if self._protection else None,
                "released": self._released,
            }

    def rebuild(self, request: RebuildSlot, protection: Protection, into: Segment | None = None) -> None:
        """Rebuild the slot of a rank of the job that `protection` describes: from `source` if that is given, otherwise
        from parity without the `lost` positions. `into` replaces the rank's own segment. Raises what `fetch` and
        `decode` raise."""
        rank, version, source = request.rank, request.version, request.source
        segment = self._segments.get(rank) if into is None else into
        if segment is None:
            raise ProtocolError(f"rank {rank}: rebuild before attach")
        for slot in segment.slots():  # a repeated request, or a corrupt slot
            if slot.version == version:
                segment.unpin(slot.index, ~Pin(0))
                segment.dirty(slot.index, None, request.token)
        began, timeout = time.monotonic(), protection.detect_seconds
        if source is not None:
            read_bytes = fetch(segment, version, request.token, self._endpoint.reader(source, timeout, self._memory))
        else:
            readers = {
                at: self._endpoint.reader((host, port), timeout, self._memory) for at, host, port in request.holders
            }
            read_bytes = decode(segment, version, request.token, protection.plan(), request.lost, readers)
        self._events.emit(
            catalogue.SLOT_REBUILT, about=rank, lineage=version.lineage, iteration=version.iteration,
            decoded=source is None, bytes=segment.shape.data_nbytes, read_bytes=read_bytes,
            seconds=time.monotonic() - began,
        )  # fmt: skip

    def status(self) -> dict[str, Any]:
        """For people: the committed version, the version being exchanged, and with which nodes."""
        with self._lock:
            driver = self._driver
            return {
                "nodes": list(driver.plan.nodes) if driver else [],
                "committed": packed(self._pinned.committed),
                "exchange": packed(driver.expected) if driver else None,
                **(driver.pace if driver else Pace(1, None)).status(),
                "redundancy": driver.plan.name if driver else "",
                "losses": driver.plan.losses if driver else 0,
                "parity_bytes": self._store.nbytes if self._store else 0,
                "released": self._released,
            }

    # ---- for the watch of this node's progress ----

    def place(self) -> tuple[int, int]:
        """This node's position, and how many nodes are in the tree of SMPs; (0, 0) if there is none."""
        driver = self._driver
        return (0, 0) if driver is None else (driver.protection.position, len(driver.plan.nodes))

    def report_stall(self, stall: Stall | None) -> None:
        """Report up the tree that this node's ranks hang, or that they do not."""
        if (driver := self._driver) is not None:
            driver.stall = stall

    def announced_stall(self) -> tuple[Stall, str] | None:
        """That the job hangs, as the tree's root announced, and the name of the node it waits for."""
        driver = self._driver
        stall = driver.announced_stall if driver is not None and not driver.stopped else None
        if driver is None or stall is None or stall.position >= len(driver.plan.nodes):
            return None
        return stall, driver.plan.nodes[stall.position]

    def restart_workers(self, token: int, lost: list[str]) -> None:
        """Notify the agent, through a file, that the workers of incarnation `token` must restart, and why."""
        files.write_json(self._run_dir / "lost.json", {"token": token, "lost": lost})

    def _connect(self, protection: Protection, plan: ExchangePlan, position: int, patience: float = 1.0) -> Peer:
        seconds = patience * protection.detect_seconds
        return self.peer(protection.endpoints[position], seconds, plan.nodes[position])

    def peer(self, where: tuple[str, int], timeout: float, node: str = "") -> Peer:
        """A connection to another node's SMP; `node` is its name, if that is known."""
        return self._endpoint.connect(where, timeout, node)

    # ---- for people on other nodes ----

    def serve_status(self, handler: StatusHandler) -> None:
        """Have `handler` answer what is known of the job on this node."""
        self._status_handler = handler

    def _status_here(self) -> dict[str, Any]:
        if self._status_handler is None:
            raise ProtocolError(f"node {self._node} is still starting")
        return self._status_handler()

    def others(self) -> list[tuple[str, tuple[str, int]]]:
        """The other nodes of the job that is, or was last, protected here, and where their SMPs listen."""
        with self._lock:
            of = self._protection
            places = [] if of is None else list(zip(of.plan().nodes, of.endpoints, strict=True))
        return [place for place in places if place[0] != self._node]

    def other_nodes(self, first: int, each: float, every: float) -> tuple[list[dict[str, Any]], int | None]:
        """A page of what `other_nodes.ask` finds of the job's other nodes, from the answer `first` on; and the answer
        with which the next page begins, None for none. All are asked for the first page, each of them for up to `each`
        seconds, `every` one together. Those who wait for another one's answers share them."""
        came = time.monotonic()
        with self._asking:
            if not first and self._asked[1] < came:
                peers = {node: self.peer(where, each, node) for node, where in self.others()}
                self._asked = other_nodes.ask(peers, every), time.monotonic()
            answers, following = self._asked[0], first + other_nodes.PAGE
            return answers[first:following], following if following < len(answers) else None

    # ---- a node that has no part in the job ----

    def serve_as_spare(self, handler: SpareHandler) -> None:
        """Have `handler` answer requests to this node as a spare."""
        self._spare_handler = handler

    def _as_spare(self, request: SpareState) -> dict[str, Any]:
        if self._spare_handler is None:
            raise ProtocolError(f"node {self._node} is still starting")
        return self._spare_handler(request)

    def release(self, lineage: int) -> None:
        """The job continues in `lineage` without this node: free the memory that protected it here."""
        self.unprotect()
        with self._lock:
            self._released = max(self._released, lineage)
            files.write_json(self._run_dir / _RELEASED, self._released)

    def unprotect(self) -> None:
        """Free the memory that protected the job here."""
        self.suspend()
        with self._lock:
            if self._store is not None:
                self._store.close()
            parity_path_of(self._job, self._node).unlink(missing_ok=True)
            self._store = self._protection = self._driver = None
            self._pinned.forget()
            (self._run_dir / job_file.PROTECTION_FILE).unlink(missing_ok=True)
            job_file.forget(self._run_dir)

    def declare_lost(self, token: int, lost: list[str]) -> None:
        """Notify the agent that these are lost, so that the workers of incarnation `token` restart."""
        self.restart_workers(token, lost)
        if not was_drained(self._run_dir):  # else it is this node that is not in the job any more
            self._events.emit(catalogue.NODE_LOST, lost=lost)

    # ---- requests of other nodes' SMPs ----

    def _storing(self, epoch: int) -> ParityStore:
        """The parity store, if it receives frames of that epoch. Raises ProtocolError."""
        with self._lock:
            if self._driver is None or self._driver.stopped:
                raise ProtocolError(f"node {self._node} does not store parity now")
            if epoch != self._driver.protection.lineage:
                current = self._driver.protection.lineage
                raise ProtocolError(f"rejected an exchange of lineage {epoch}; the current lineage is {current}")
            return self._driver.store

    def _received(self) -> None:
        if (driver := self._driver) is not None:
            driver.wake()

    def _join(self, epoch: int, position: int) -> Handover:
        with self._lock:  # the driver is that of this epoch
            self._storing(epoch)
            assert self._driver is not None
            return self._driver.join(position)

    # ---- begin and end ----

    def _adopt(self) -> None:
        """Continue from the files of a previous SMP, if there are any."""
        try:
            moved = self._endpoint.resume()
            reference, token = job_file.read_record(self._run_dir)
            with self._lock:
                protection = job_file.read(self._run_dir, reference)
                store = self._claim(protection, token)
                whole = self._pinned.resume(protection, store)
                self._driver = self._driver_of(protection, store)
                if whole and not moved:
                    self._driver.start()
            if moved:
                reason = f"the other nodes do not find this SMP ({moved}): they start their workers again to learn it"
                self._events.emit(catalogue.EXCHANGE_INTERRUPTED, reason=reason)
        except FileNotFoundError:
            return
        except (FtError, OSError, ValueError) as error:
            reason = f"the files of the previous SMP cannot be used: {error}"
            self._events.emit(catalogue.EXCHANGE_INTERRUPTED, reason=reason)

    def suspend(self) -> None:
        """Stop exchanging and watching; the memory stays and can be read. Idempotent.

        The version being sent stays pinned until `protect`: it may be committed on another node.
        """
        if self._driver is not None:
            self._driver.stop()
        self._alarms.forget(*_ALARMS)
        with suppress(IsADirectoryError):  # not a file of ours
            (self._run_dir / "lost.json").unlink(missing_ok=True)

    def close(self) -> None:
        """End protection. The memory stays; the files of the run directory go."""
        self.suspend()
        self._endpoint.close()
        if self._store is not None:
            self._store.close()
            self._store = None
        self._pinned.forget()
        self._endpoint.forget()
        for name in (job_file.PROTECTION_FILE, _RELEASED):
            (self._run_dir / name).unlink(missing_ok=True)
        job_file.forget(self._run_dir)


def _number(path: Path) -> int:
    """The number in a small file; 0 if there is none."""
    try:
        return read_json(path, _COUNT)
    except (OSError, ValueError):
        return 0


def _clean(segment: Segment) -> list[tuple[int, ...]]:
    slots = segment.slots()
    return sorted({astuple(slot.version) for slot in slots if slot.state is SlotState.CLEAN and slot.version})


def _stood_still(run_dir: Path) -> bool:
    """Whether the last alarm of this node is that commits stand still, so that the next one ends it."""
    alarm = standing_alarm(run_dir / "events.jsonl")
    return alarm is not None and alarm.name == catalogue.PROTECTION_STALLED.name
