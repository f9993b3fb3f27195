"""The elastic agent of a node: torch's own, with restarts bounded by progress and each incarnation fenced.

Invariant: workers are started only under a token that no earlier incarnation holds, and after those that held an
earlier one are gone. The restart count that workers see grows by one with each restart. When one worker fails, the
others sit in a collective that can never end: they are killed at once, with no grace.

In: torch's specification of the workers, the job on this node, its watcher. Out: a `RunResult` that names the workers
which failed by themselves, a `Verdict`; `worker.failed`, `round.ended`, `workers.restarted` events; `FTP_*` for
workers.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import PContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousStoreInfo

from ..config import Config, worker_environment
from ..errors import ConfigError, ProtectionError
from ..events import Events, catalogue
from ..intake import read_json
from . import endpoint as places
from . import job_secret
from .agent_channel import AgentChannel
from .rendezvous import Rendezvous
from .restarts import LostPeers, Verdict, WorkerFailure, judge, root_cause
from .watcher import Job, Watcher

_ENDED_PATIENCE = timedelta(seconds=10)  # after torch's own barrier
_REPORT, _REPORT_BYTES = TypeAdapter(dict[str, Any]), 16 << 20  # with the traceback of a worker
_ROUNDS_LOST = 5  # in a row, each by a node that was lost while workers were about to start


class _RoundEnded(Exception):
    """The round has ended while this node, whose workers had succeeded, waited for the others."""


class ProgressAgent(LocalElasticAgent):
    """torch's agent, bounded by progress unless `bounded`. `watcher` is None where no SMP protects the job."""

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        job: Job | None,
        watcher: Watcher | None,
        events: Events,
        bounded: bool,
        **torch_arguments: Any,
    ) -> None:
        super().__init__(spec, **torch_arguments)
        self._job = job
        self._watcher = watcher
        self._events = events
        self._bounded = bounded
        self._store_of_workers: TCPStore | None = None  # on the node of group rank 0: it serves as long as it is held
        self._exchanged: AgentChannel | None = None  # with the other nodes, where the rendezvous is not ours
        self._versions: list[int | None] = []
        self._before: WorkerFailure | None = None  # the last failure, if nothing had begun then
        self._first_token = 0  # of this ft-run
        self._token = 0  # of the running incarnation
        self._opened = False  # a lineage, under that or a later token
        self._failed_at: float | None = None  # of a failure not yet answered by a restart
        self.verdict = Verdict(False, "failed", "")
        self.restarts = 0
        self.all_ended = True  # on all nodes: known once the workers here have succeeded

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Torch's; where the round ends while others are waited for, workers are started again for the next one."""
        while True:
            try:
                result: RunResult = super()._invoke_run(role)
                return result
            except _RoundEnded:
                self._worker_group.spec.max_restarts += 1  # not counted, as any change of the nodes

    def _exit_barrier(self) -> None:
        """Torch's, which takes a lost node for one that has finished, unless the rendezvous knows better."""
        handler = self._worker_group.spec.rdzv_handler
        if not isinstance(handler, Rendezvous):
            super()._exit_barrier()
            self.all_ended = self._all_have_ended()
        elif not handler.wait_for_all(self._exit_barrier_timeout):
            raise _RoundEnded

    def _all_have_ended(self) -> bool:
        """Whether the workers of all nodes have succeeded. Torch waits for them as well, but does not say who came."""
        if self._exchanged is None:
            return True
        try:
            self._exchanged.say("ended", b"1")
            return None not in self._exchanged.all_said("ended", _ENDED_PATIENCE)
        except DistError:
            return False

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        """Torch's; and again, a few times, when the round's store is lost before workers were started."""
        for left in reversed(range(_ROUNDS_LOST)):
            try:
                super()._initialize_workers(worker_group)
                return
            except DistError as error:
                if not left or not isinstance(worker_group.spec.rdzv_handler, Rendezvous):
                    raise
                self._events.emit(catalogue.ROUND_LOST, reason=f"{type(error).__name__}: {error}")

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Torch's, and then a store for this incarnation alone, where torch would hand out one for the agent's life.

        In that one, the workers of a restart find what the dead ones wrote: addresses and NCCL ids of processes that
        are gone (seen; pytorch issue 135712). A rendezvous that leaves the store to rank 0 of the workers, as torch can
        be told to, has a new one each time anyway, and so has ours.
        """
        spec = worker_group.spec
        handler = spec.rdzv_handler
        if isinstance(handler, Rendezvous):
            handler.opened = self._has_opened()
            handler.trained = bool(self._watcher and self._watcher.begun())
            handler.workers = spec.local_world_size
        super()._rendezvous(worker_group)
        if isinstance(handler, Rendezvous):
            return
        group: Any = worker_group  # torch annotates what it fills in later as None
        if handler.use_agent_store:
            told = self._serve_workers(spec, group)
            group.master_addr, group.master_port = told.master_addr, told.master_port

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Torch's ranks, in the order of the nodes. Torch takes them from a store in which anybody writes, these come
        from what nodes have proved to each other. Without a job there is no secret to do so."""
        self._exchanged = None
        handler = spec.rdzv_handler
        if isinstance(handler, Rendezvous):
            return _workers(spec, handler.first_rank, handler.all_workers)
        if not self._job:
            found: list[Worker] = super()._assign_worker_ranks(store, group_rank, group_world_size, spec)
            return found
        if group_world_size == 1:
            return _workers(spec, 0, spec.local_world_size)
        known = job_secret.load_secret(self._job.config.secret_file)
        self._exchanged = AgentChannel(
            self._common(store, spec), known, handler.get_run_id(), group_rank, group_world_size
        )
        self._exchanged.say("workers", str(spec.local_world_size).encode())
        counts = [int(count) for count in self._all_said("workers")]
        return _workers(spec, sum(counts[:group_rank]), sum(counts))

    def _common(self, store: Any, spec: WorkerSpec) -> PrefixStore:
        """The part of a foreign rendezvous' store that is this incarnation's. A dynamic one prefixes its store by the
        round; a static one has only the count of restarts, equal on all its nodes."""
        static = spec.rdzv_handler.get_backend() == "static"
        return PrefixStore(f"ft_plugins/{spec.max_restarts - self._remaining_restarts if static else 0}", store)

    def _all_said(self, name: str) -> Sequence[bytes]:
        """What each node says, by group rank. Raises ConfigError where one is not from there."""
        if self._exchanged is None:
            raise RuntimeError("there are no other nodes")
        said = self._exchanged.all_said(name)
        if None in said:
            raise ConfigError(
                f"group rank {said.index(None)}: expected its word of '{name}', found one in the store of "
                "the rendezvous that is not from there; drop --rdzv-backend, so that nodes meet where strangers cannot "
                "write"
            )
        return [each for each in said if each is not None]

    def _serve_workers(self, spec: WorkerSpec, group: Any) -> RendezvousStoreInfo:
        """Where the store of this incarnation's workers is: on the node of group rank 0, which makes it. It listens on
        one address where that is known: the given one; on loopback for the workers of one node."""
        if group.group_rank:
            if self._exchanged:
                self._exchanged.say("store", b"")
                place = places.Endpoint.read(self._all_said("store")[0].decode())
                return RendezvousStoreInfo(place.host, place.port)
            address = spec.master_addr or spec.local_addr
            return RendezvousStoreInfo.build(group.group_rank, self._common(group.store, spec), address, 0)
        alone = group.group_world_size == 1
        address = places.LOOPBACK if alone else spec.master_addr or spec.local_addr or socket.getfqdn()
        listener = places.listen_anywhere(address if places.literal(address) else None)
        port = int(listener.getsockname()[1])
        self._store_of_workers = TCPStore(
            address, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
        )
        if self._exchanged:
            self._exchanged.say("store", str(places.Endpoint(address, port)).encode())
        elif not alone:
            RendezvousStoreInfo.build(0, self._common(group.store, spec), address, port)
        return RendezvousStoreInfo(address, port)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        token = self._token = self._watcher.fence() if self._watcher else 0
        self.restarts = worker_group.spec.max_restarts - self._remaining_restarts
        if self._job:  # torch hands its own environment on to workers; its signals travel the same way
            config = restarted(self._job.config) if self._resumed(token, worker_group) else self._job.config
            os.environ.update(worker_environment(config, self._job.run_dir, token, os.getpid()))
        if self._exchanged:
            self._exchanged.say("trained", str(int(bool(self._watcher and self._watcher.begun()))).encode())
        with self._watcher.paused() if self._watcher else nullcontext():
            started: dict[int, Any] = super()._start_workers(worker_group)
        context = self._context()
        vars(context)["close"] = functools.partial(_close_at_once, context)  # of this object, nothing global
        if self.restarts:
            seconds = None if self._failed_at is None else round(time.monotonic() - self._failed_at, 3)
            self._events.emit(catalogue.WORKERS_RESTARTED, restart=self.restarts, token=token, seconds=seconds)
        self._failed_at = None
        return started

    def _has_opened(self) -> bool:
        """Whether a rank of any node has opened a lineage under this ft-run, as far as is known here."""
        if self._watcher and not self._opened and self._first_token:
            self._opened = self._watcher.opened_since(self._first_token)
        return self._opened

    def _resumed(self, token: int, worker_group: WorkerGroup) -> bool:
        """Whether the `resume` of the command was carried out: an incarnation of this ft-run, or of one that goes on
        with it on another node, has opened its lineage on any rank. All nodes answer alike, as ranks must."""
        own = self._has_opened()
        self._first_token = self._first_token or token
        handler = worker_group.spec.rdzv_handler
        if isinstance(handler, Rendezvous):
            self._opened = own or handler.opened_anywhere
        elif self._exchanged:
            self._exchanged.say("opened", b"1" if own else b"0")
            if self._job and self._job.config.resume != "auto":  # else there is nothing to forget
                self._opened = b"1" in self._all_said("opened")
        return self._opened

    def _nothing_begun(self) -> bool:
        """Whether no node of the job has a version or had completed an iteration when this incarnation began, as far as
        that is known for certain. Raises ProtectionError."""
        if self._watcher is None or self._watcher.begun():
            return False
        handler = self._worker_group.spec.rdzv_handler
        if isinstance(handler, Rendezvous):
            return not handler.trained_anywhere
        try:
            return self._exchanged is None or set(self._exchanged.all_said("trained", _ENDED_PATIENCE)) == {b"0"}
        except DistError:
            return False

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self._failed_at is None:  # another node failed or joined: torch starts workers again without counting
            worker_group.spec.max_restarts += 1
            handler = worker_group.spec.rdzv_handler
            reason = handler.over if isinstance(handler, Rendezvous) else "the rendezvous says that nodes wait"
            self._events.emit(catalogue.ROUND_ENDED, reason=reason)
        super()._restart_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> None:
        self._shutdown(signal.SIGKILL)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Torch's look at the workers, but those that failed are told from those that were ended because of it."""
        first = self._failed_workers()
        result = self._end_after(first) if first else super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            if not first:  # failed between our look and torch's: torch lists those first that it found by themselves
                result.failures = dict(list(result.failures.items())[:1])
            self._decide(result)
        elif result.state == WorkerState.HEALTHY and self._watcher and (lost := self._watcher.lost(self._token)):
            return self._go_on_without(lost)
        return result

    def _go_on_without(self, lost: list[str]) -> RunResult:
        """Nodes or ranks are lost: the workers here sit in a collective that can never end, or soon will."""
        self._failed_at = time.monotonic()
        self._events.emit(catalogue.WORKERS_KILLED, lost=lost)
        for pid in self._context().pids().values():
            _kill_group(pid)
        self._give_verdict(LostPeers(tuple(lost)))
        return RunResult(state=WorkerState.UNHEALTHY)

    def _failed_workers(self) -> dict[int, int]:
        """Exit codes by local rank of the workers that failed by themselves: ended with an error, or reporting one."""
        context = self._context()
        failed = {}
        for local_rank, pid in context.pids().items():
            try:  # a look without reaping, which is torch's part
                found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                continue  # reaped before, so it did not fail
            if found and found.si_code != os.CLD_EXITED:
                failed[local_rank] = -found.si_status
            elif found and found.si_status:
                failed[local_rank] = found.si_status
        if failed:  # a peer that has written its report is on its way out, and may be the cause
            for local_rank, path in context.error_files.items():
                if report := _report(path):
                    code = report.get("errorCode", 1)
                    failed.setdefault(local_rank, code if type(code) is int else 1)
        return failed

    def _end_after(self, failed: dict[int, int]) -> RunResult:
        """Kill what is left of the workers and their children; the failures are those of `failed` alone."""
        context = self._context()
        for pid in context.pids().values():
            _kill_group(pid)
        context.close(signal.SIGKILL)
        failures = {}
        for local_rank, exitcode in failed.items():
            path = context.error_files.get(local_rank, "")
            failures[self._worker_group.workers[local_rank].global_rank] = ProcessFailure(
                local_rank, context.pids()[local_rank], exitcode, path if _report(path) else ""
            )
        return RunResult(state=WorkerState.FAILED, failures=failures)

    def _decide(self, result: RunResult) -> None:
        """Report the failures and find the cause."""
        self._failed_at = time.monotonic()
        failures = [_described(rank, failure) for rank, failure in result.failures.items()]
        for failure in failures:
            self._events.emit(
                catalogue.WORKER_FAILED,
                rank=failure.rank,
                local_rank=failure.local_rank,
                exitcode=failure.exitcode,
                signal=failure.signal,
                message=failure.message,
            )
        cause = root_cause(failures)
        result.failures[cause.rank].timestamp = min(failure.timestamp for failure in result.failures.values())
        result.failures = {cause.rank: result.failures.pop(cause.rank)} | result.failures  # torch names the earliest
        self._give_verdict(cause)

    def _give_verdict(self, cause: WorkerFailure | LostPeers) -> None:
        """Let torch's counter say what was decided."""
        before, self._before = self._before, None
        try:
            if not self._bounded and not (isinstance(cause, WorkerFailure) and cause.refused):
                self._versions.append(self._watcher.newest() if self._watcher else None)
                if isinstance(cause, WorkerFailure) and self._nothing_begun():
                    self._before = cause
            remaining = self._remaining_restarts if self._bounded else None
            self.verdict = judge(cause, self._versions, remaining, before if self._before else None)
        except ProtectionError as error:
            self.verdict = Verdict(False, "failed", f"{cause.line()}; {error}")
        if not self.verdict.restart:
            self._remaining_restarts = 0

    def _context(self) -> PContext:
        if self._pcontext is None:
            raise RuntimeError("the agent has not started its workers yet")
        return self._pcontext


def _workers(spec: WorkerSpec, first: int, total: int) -> list[Worker]:
    """The workers of a node whose first one has global rank `first` of `total`. All are of one role."""
    ranks = range(first, first + spec.local_world_size)
    return [
        Worker(local_rank=local, global_rank=rank, role_rank=rank, world_size=total, role_world_size=total)
        for local, rank in enumerate(ranks)
    ]


def restarted(config: Config) -> Config:
    """What ranks are told once the `resume` of the command was carried out by earlier ones."""
    return config.model_copy(update={"resume": "auto"})


def _close_at_once(context: PContext, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
    """`PContext.close`, which torch calls without a signal when a worker failed: then SIGKILL instead of SIGTERM."""
    type(context).close(context, death_sig or signal.SIGKILL, timeout)


def _kill_group(pid: int) -> None:
    """SIGKILL a worker that is not reaped yet, and all of its process group where it leads one."""
    try:
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # reaped: it ended in order


def _report(path: str) -> dict[str, Any]:
    """What a worker wrote into its error file; {} where there is none, or a part of one."""
    try:
        found = read_json(Path(path), _REPORT, _REPORT_BYTES).get("message", {}) if path else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _described(rank: int, failure: ProcessFailure) -> WorkerFailure:
    """A failure of torch's with its message in words and the finest time there is."""
    report = Path(failure.error_file)
    reported = report.is_file()
    message: Any = failure.message if reported or failure.exitcode < 0 else ""  # else it is torch's advice
    return WorkerFailure(
        rank=rank,
        local_rank=failure.local_rank,
        pid=failure.pid,
        exitcode=failure.exitcode,
        message=message.get("message", "") if isinstance(message, dict) else str(message),
        time=report.stat().st_mtime if reported else time.time(),
    )
