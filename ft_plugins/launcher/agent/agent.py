"""The elastic agent of a node: torch's, with restarts bounded by progress and each incarnation fenced.

Invariant: workers start only with a new fencing token, after every process with an older one has ended. The restart
count that workers see grows by one with each restart. When a worker fails, the others hang in a collective that cannot
complete, so they are killed at once.

In: torch's specification of the workers, the job on this node, its watcher. Out: a `RunResult` that names the workers
that failed on their own, a `Verdict`; `worker.failed`, `round.ended`, `workers.restarted` events; `FTP_*` for workers.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import time
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

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
from torch.distributed.elastic.multiprocessing import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousStoreInfo

from ...config import worker_environment
from ...errors import ConfigError, ProtectionError
from ...events import Events, catalogue, say
from ...smp.watch import stacks
from ...smp.watch.hang import HANG
from ...smp.watch.job_history import FtRunNote, FtRunPhase, write_note
from ...snapshot.segment.header import EARLY, END
from .. import job_identity
from ..preload.parent import parent_of
from ..rendezvous import endpoint
from ..rendezvous.endpoint import Endpoint
from ..rendezvous.rendezvous import Rendezvous
from ..rounds.round_store import store_on
from ..rounds.rounds import ALL
from . import build_locks, left_traces, worker_failures
from .agent_channel import AgentChannel
from .draining import Departure, longest_wait
from .restarts import Life, LostPeers, Verdict, WorkerFailure, judge, root_cause
from .signals import SignalStop
from .start_watch import ATTACHED, HUNG, UNATTACHED, StartWatch
from .watcher import Job, Watcher
from .worker_failures import WorkerExits

_ENDED_PATIENCE = timedelta(seconds=10)  # after torch's barrier
_KILLED_SECONDS = 5.0
_ROUNDS_LOST = 5  # maximum in a row, each by a node that was lost just before workers started


class _RoundEnded(Exception):
    """The round ended while this node, whose workers had succeeded, waited for the others; or workers cannot go on
    without one that has left."""


class NodeDrained(Exception):
    """This node has left the job after that iteration, as was asked, and its ranks have ended."""

    def __init__(self, iteration: int) -> None:
        super().__init__(f"drained after iteration {iteration}")
        self.iteration = iteration


class ProgressAgent(LocalElasticAgent):
    """torch's agent, bounded by a count if `bounded`, else by progress. `watcher` is None if nothing is protected,
    `stop` if there is no job."""

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        job: Job | None,
        watcher: Watcher | None,
        events: Events,
        bounded: bool,
        stop: SignalStop | None,
        **torch_arguments: Any,
    ) -> None:
        super().__init__(spec, **torch_arguments)
        self._rdzv_handler = None  # type: ignore[assignment]  # torch 2.6 would end the round with its workers
        self._interval, spec.monitor_interval = spec.monitor_interval, 0.0  # waited in `_monitor_workers`
        self._exits = WorkerExits()  # of the running workers
        self._job = job
        self._watcher = watcher
        self._events = events
        self._bounded = bounded
        self._stop = stop
        self._store_of_workers: TCPStore | None = None  # on the node of group rank 0; serves until released
        self._channel: AgentChannel | None = None  # to the other nodes, if the rendezvous is not ours
        self._versions: list[int | None] = []  # the newest restorable iteration at each failure
        self._lives: list[Life] = []  # how each incarnation under this ft-run ended
        self._first_token = 0  # the first one under this ft-run
        self._token = 0  # of the running incarnation
        self._opened = False  # a rank has opened a lineage under this ft-run
        self._failed = False  # a worker here failed, and does not only report that others were lost
        self._failed_at: float | None = None  # monotonic; of a failure before the restart that follows it
        self._seen = self._ended = 0.0  # monotonic: why workers have to restart was seen; the old ones had ended
        self._dumping: float | None = None  # monotonic: the kernel was first seen to write the core of a worker
        self._started_at, self._oom_kills = 0.0, left_traces.oom_kills()  # when workers were started: epoch; a count
        handler = spec.rdzv_handler
        alive = handler.num_nodes_waiting if isinstance(handler, Rendezvous) else lambda: 0  # torch's have a thread
        self._preload = parent_of(job, spec, events, alive)
        self._departure = self._new_departure()
        self._start = StartWatch()
        self._builds: dict[Path, tuple[int, int]] = {}  # of extensions, at which killed ranks were
        self.verdict = Verdict(False, "failed", "")
        self.restarts = 0
        self.left = False  # a worker of this incarnation has ended with status 0 before the end of training
        self.all_ended = True  # the workers of all nodes have ended; known once those here have succeeded

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """torch's, but workers start again for the next round if this one ends while the node waits for others."""
        while True:
            try:
                result: RunResult = super()._invoke_run(role)
                return result
            except _RoundEnded:
                if self._is_left():
                    self._stop_workers(self._worker_group)
                    return RunResult(
                        WorkerState.SUCCEEDED, {each.global_rank: None for each in self._worker_group.workers}
                    )
                reason = "another node failed or left after the workers of this node had succeeded; they start again"
                self._events.emit(catalogue.ROUND_ENDED, reason=reason)
                self._worker_group.spec.max_restarts += 1  # not counted, like any change of nodes
            except SignalException as error:
                if self._stop is not None and (ended := self._end_workers(self._stop, error.sigval)):
                    return ended
                raise

    def _is_left(self) -> bool:
        """Whether a worker of this node has ended with status 0 before the end of training: no restart may undo that.
        It is remembered, because what remains of the workers is killed then."""
        self._exits.wait(0.0)
        failed = worker_failures.failed_workers(self._context())
        ranks = {
            self._worker_group.workers[one].global_rank
            for one, pid in self._context().pids().items()
            if pid in self._exits.ended and one not in failed
        }
        with suppress(ProtectionError):
            self.left = self.left or any(
                each["rank"] in ranks and each["ending"] == EARLY
                for each in (self._watcher.status()["segments"] if self._watcher and ranks else ())
            )
        return self.left

    def _end_workers(self, stop: SignalStop, number: signal.Signals) -> RunResult | None:
        """Pass signal `number` on, kill what is left when the workers' part of the grace is over, or at another signal.
        What is in memory is written meanwhile. The result, if the workers of all nodes had ended in order before."""
        self._note(FtRunPhase.STOPPING, f"{number.name} has come: what is in memory is written, and the ranks end")
        stop.begin()
        if self._pcontext is None:
            return None
        self._exits.wait(0.0)
        if len(self._exits.ended) == len(self._pcontext.pids()) and not worker_failures.failed_workers(self._pcontext):
            with suppress(_RoundEnded, TimeoutError):
                self._exit_barrier(stop.left_for_workers)
                stop.finish()
                return RunResult(WorkerState.SUCCEEDED, {each.global_rank: None for each in self._worker_group.workers})
        context = self._pcontext
        vars(context)["close"] = lambda *_, **__: type(context).close(context, signal.SIGKILL, 0)  # torch calls it next
        with suppress(SignalException):
            self._signal_workers(number)
            self._exits.wait_for_all(stop.left_for_workers)
        self._signal_workers()
        self._exits.wait_for_all(min(_KILLED_SECONDS, stop.left))
        return None

    def _note(self, phase: FtRunPhase, reason: str = "") -> None:
        """Leave what this ft-run does in the run directory."""
        if self._job:
            write_note(self._job.run_dir, FtRunNote(phase, reason))

    def _exit_barrier(self, seconds: float = float("inf")) -> None:
        """torch's, which mistakes a lost node for a finished one; with our rendezvous, its own wait, which raises
        TimeoutError after so many `seconds`."""
        self._note(FtRunPhase.LEAVING, "the ranks of this node have ended; ft-run waits for those of other nodes")
        handler = self._worker_group.spec.rdzv_handler
        if not isinstance(handler, Rendezvous):
            super()._exit_barrier()
            self.all_ended = self._all_have_ended()
        elif handler.wait_for_all(seconds):
            self.all_ended = handler.all_succeeded
        else:
            raise _RoundEnded

    def _all_have_ended(self) -> bool:
        """Whether the workers of all nodes have succeeded. torch waits for them, but does not report which came."""
        if self._channel is None:
            return True
        try:
            self._channel.publish("ended", b"1")
            return None not in self._channel.read_all("ended", _ENDED_PATIENCE)
        except DistError:
            return False

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        """torch's, repeated a few times if the round's store is lost before workers have started."""
        for left in reversed(range(_ROUNDS_LOST)):
            try:
                super()._initialize_workers(worker_group)
                return
            except DistError as error:
                if not left or not isinstance(worker_group.spec.rdzv_handler, Rendezvous):
                    raise
                reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"  # torch's has a stack of C++
                self._events.emit(catalogue.ROUND_LOST, reason=reason)
                say(f"the round was lost before workers had started: {reason}", alarm=True, who="ft-run: ")

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """torch's, then a store for this incarnation alone, because torch keeps one for the agent's life.

        In that one, restarted workers find what dead ones wrote: addresses and NCCL ids of processes that are gone
        (observed; pytorch issue 135712). Our rendezvous has a new store each time, and so has one that leaves the store
        to rank 0 of the workers.
        """
        spec = worker_group.spec
        handler = spec.rdzv_handler
        if isinstance(handler, Rendezvous):
            handler.opened = self._has_opened()
            handler.trained = bool(self._watcher and self._watcher.begun())
            handler.workers = spec.local_world_size
            handler.failed, self._failed = self._failed, False
            handler.replaceable = bool(self._watcher and self._watcher.replaceable())
        self._note(FtRunPhase.WAITING, "waiting for the nodes of the job")
        super()._rendezvous(worker_group)
        self._note(FtRunPhase.STARTING)
        if isinstance(handler, Rendezvous):
            return
        group: Any = worker_group  # torch annotates fields that it fills in later as None
        if handler.use_agent_store:
            store = self._serve_workers(spec, group)
            group.master_addr, group.master_port = store.master_addr, store.master_port

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """torch's ranks, in the order of the nodes. torch reads them from a store in which any process can write; here
        they come from authenticated nodes, unless there is no job and so no secret."""
        self._channel = None
        handler = spec.rdzv_handler
        if isinstance(handler, Rendezvous):
            return _workers(spec, handler.first_rank, handler.all_workers)
        if not self._job:
            workers: list[Worker] = super()._assign_worker_ranks(store, group_rank, group_world_size, spec)
            return workers
        if group_world_size == 1:
            return _workers(spec, 0, spec.local_world_size)
        secret = job_identity.load_secret(self._job.config.secret_file)
        self._channel = AgentChannel(
            self._incarnation_store(store, spec), secret, handler.get_run_id(), group_rank, group_world_size
        )
        self._channel.publish("workers", str(spec.local_world_size).encode())
        counts = [int(count) for count in self._read_all("workers")]
        return _workers(spec, sum(counts[:group_rank]), sum(counts))

    def _incarnation_store(self, store: Any, spec: WorkerSpec) -> PrefixStore:
        """The part of torch's rendezvous store for this incarnation. A dynamic rendezvous prefixes its store by round;
        a static one has only the restart count, which is equal on all nodes."""
        static = spec.rdzv_handler.get_backend() == "static"
        return PrefixStore(f"ft_plugins/{spec.max_restarts - self._remaining_restarts if static else 0}", store)

    def _read_all(self, name: str) -> list[bytes]:
        """The values that nodes published, by group rank. Raises ConfigError if one is not authentic."""
        if self._channel is None:
            raise RuntimeError("there are no other nodes")
        values = self._channel.read_all(name)
        if None in values:
            raise ConfigError(
                f"group rank {values.index(None)}: expected its value of '{name}', found one in the store of the "
                "rendezvous that another process wrote; drop --rdzv-backend: the rendezvous of ft-run authenticates "
                "nodes"
            )
        return [each for each in values if each is not None]

    def _serve_workers(self, spec: WorkerSpec, group: Any) -> RendezvousStoreInfo:
        """The store of this incarnation's workers, created on the node of group rank 0. It listens on the given address
        only, if there is one, and on loopback for a single node."""
        if group.group_rank:
            if self._channel:
                self._channel.publish("store", b"")
                place = Endpoint.read(self._read_all("store")[0].decode())
                return RendezvousStoreInfo(place.host, place.port)
            address = spec.master_addr or spec.local_addr
            return RendezvousStoreInfo.build(group.group_rank, self._incarnation_store(group.store, spec), address, 0)
        alone = group.group_world_size == 1
        address = endpoint.LOOPBACK if alone else spec.master_addr or spec.local_addr or socket.getfqdn()
        listener = endpoint.listen_anywhere(address if endpoint.is_literal(address) else None)
        port = int(listener.getsockname()[1])
        self._store_of_workers = store_on(listener, address, multi_tenant=True)
        if self._channel:
            self._channel.publish("store", str(Endpoint(address, port)).encode())
        elif not alone:
            RendezvousStoreInfo.build(0, self._incarnation_store(group.store, spec), address, port)
        return RendezvousStoreInfo(address, port)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        token = self._token = self._watcher.fence() if self._watcher else 0
        self.restarts = worker_group.spec.max_restarts - self._remaining_restarts
        if self._job:  # torch passes this process's environment on to workers
            done = {"resume": "auto"} if self._resumed(token, worker_group) else {}  # the command's `resume` holds once
            config = self._job.config.model_copy(update=done)
            os.environ.update(worker_environment(config, self._job.run_dir, token, os.getpid()))
        if self._channel:
            self._channel.publish("trained", str(int(bool(self._watcher and self._watcher.begun()))).encode())
        self._exits.close()
        self._departure = self._new_departure()
        if self._preload:
            self._preload.wait()
        if self.restarts and self._job:
            for path in build_locks.remove_stale(self._job.run_dir, self._builds):
                self._events.emit(catalogue.LOCK_REMOVED, path=str(path))
        clock, self._started_at = time.monotonic(), time.time()
        self._oom_kills = left_traces.oom_kills()
        with (
            self._watcher.paused() if self._watcher else nullcontext(),
            self._preload.starting(token) if self._preload else nullcontext(),
        ):
            started: dict[int, Any] = super()._start_workers(worker_group)
        context = self._context()
        self._exits, self.left = WorkerExits(context.pids().values()), False
        vars(context)["close"] = functools.partial(worker_failures.close_at_once, context)  # of this object only
        if self.restarts:
            seconds = None if self._failed_at is None else round(time.monotonic() - self._failed_at, 3)
            self._events.emit(
                catalogue.WORKERS_RESTARTED, restart=self.restarts, token=token, seconds=seconds, clock=clock,
                seen=self._seen, ended=self._ended, dumping=self._dumping,
            )  # fmt: skip
        self._failed_at = self._dumping = None
        pids = {worker.global_rank: context.pids()[worker.local_rank] for worker in worker_group.workers}
        self._start.begin(
            pids, worker_group.group_world_size != 1,
            again=bool(self._lives) and isinstance(self._lives[-1].end, LostPeers),
        )  # fmt: skip
        return started

    def end_preload(self) -> None:
        """End the process that ranks are forked from: no restart comes any more. Idempotent."""
        if self._preload:
            self._preload.end()

    def _has_opened(self) -> bool:
        """Whether a rank is known to have opened a lineage under this ft-run."""
        if self._watcher and not self._opened and self._first_token:
            self._opened = any(
                each["lineage_token"] >= self._first_token for each in self._watcher.status()["segments"]
            )
        return self._opened

    def _resumed(self, token: int, worker_group: WorkerGroup) -> bool:
        """Whether the command's `resume` is done: a rank has opened a lineage under this ft-run, or under the job's
        ft-run on another node. The answer is the same on all nodes."""
        own = self._has_opened()
        self._first_token = self._first_token or token
        handler = worker_group.spec.rdzv_handler
        if isinstance(handler, Rendezvous):
            self._opened = own or handler.opened_anywhere
        elif self._channel:
            self._channel.publish("opened", b"1" if own else b"0")
            if self._job and self._job.config.resume != "auto":
                self._opened = b"1" in self._read_all("opened")
        return self._opened

    def _nothing_begun(self) -> bool:
        """Whether it is certain that no node of the job had a version or a completed iteration when this incarnation
        began. Raises ProtectionError."""
        if self._watcher is None or self._watcher.begun():
            return False
        handler = self._worker_group.spec.rdzv_handler
        if isinstance(handler, Rendezvous):
            return not handler.trained_anywhere
        try:
            return self._channel is None or set(self._channel.read_all("trained", _ENDED_PATIENCE)) == {b"0"}
        except DistError:
            return False

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self._failed_at is None and self._is_left():
            raise _RoundEnded
        if self._failed_at is None:  # another node failed or joined: not counted
            self._seen = time.monotonic()
            worker_group.spec.max_restarts += 1
            handler = worker_group.spec.rdzv_handler
            reason = handler.waiting_reason if isinstance(handler, Rendezvous) else "nodes wait for the next round"
            self._lives.append(Life(LostPeers((reason,))))
            left = isinstance(handler, Rendezvous) and handler.left
            event = self._events.emit(
                catalogue.ROUND_CHANGED if left else catalogue.ROUND_ENDED,
                reason=f"{reason}; the workers of this node {'end' if handler.is_closed() else 'restart'} too",
            )
            if left:
                say(event.sentence(), who="ft-run: ")
            self._signal_workers()
        super()._restart_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> None:
        self._shutdown(signal.SIGKILL)
        self._ended = time.monotonic()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """torch's look at the workers, which also separates those that failed from those that were killed for it. Comes
        after the interval, or as soon as a worker has ended."""
        self._exits.wait(self._interval)
        seen = time.monotonic()
        with suppress(OSError):
            if self._dumping is None and (crashed := worker_failures.dumping(self._context())) is not None:
                self._dumping = seen
                say(
                    f"rank {self._worker_group.workers[crashed].global_rank} has crashed, and the kernel writes its "
                    "core; nothing restarts before that is written ('ulimit -c 0': no cores)", True, "ft-run: ",
                )  # fmt: skip
        first = worker_failures.failed_workers(self._context())
        left = bool(first) and self._is_left()
        result = self._end_after(first) if first else super()._monitor_workers(worker_group)
        if self._watcher:
            self._watcher.say_waiting(self._token)
        if result.state == WorkerState.FAILED:
            if not first:  # failed since our look: torch lists the ones that failed on their own first
                result.failures = dict(list(result.failures.items())[:1])
            self._failed_at = self._seen = seen
            self._decide(result, left)
        elif result.state == WorkerState.HEALTHY and self._watcher and (lost := self._watcher.lost(self._token)):
            return self._restart_without(LostPeers(tuple(lost)))
        elif self._watcher and self._job and self._job.config.capture and (over := self._look_at_start(
            self._job, self._watcher, result.state == WorkerState.SUCCEEDED
        )):  # fmt: skip
            return over
        elif result.state == WorkerState.HEALTHY:
            self._leave_if_asked()
            if self._preload:
                self._preload.turn()
        return result

    def _new_departure(self) -> Departure | None:
        if self._watcher is None or self._job is None:
            return None
        sync = self._job.config.sync
        timeout = (sync.timeout,) if sync is not None else ()
        return Departure(self._watcher, self._events, longest_wait(self._job.config.hang_seconds, *timeout))

    def _leave_if_asked(self) -> None:
        """Have the workers end, if the whole job is to; raises NodeDrained if this node is."""
        handler = self._worker_group.spec.rdzv_handler
        if self._departure is None or not isinstance(handler, Rendezvous):
            return
        if handler.leaves == ALL and self._watcher:
            with suppress(ProtectionError):
                self._watcher.hold(END)  # each time: ranks that start were not there the last time
        step = self._departure.step(handler.leaves not in ("", ALL))
        if step.give_up:
            handler.stay()
        if step.leave is not None:
            self._events.emit(catalogue.NODE_DRAINED, iteration=step.leave, seconds=round(self._departure.seconds, 3))
            self._shutdown(signal.SIGKILL)
            handler.depart()
            raise NodeDrained(step.leave)

    def _restart_without(self, cause: LostPeers) -> RunResult:
        """Kill the workers here: without the lost nodes or ranks they hang in a collective, or soon will. Raises
        _RoundEnded if what they wait for may be one here that has left."""
        if self._is_left():
            raise _RoundEnded
        self._failed_at = self._seen = time.monotonic()
        self._signal_workers()
        self._events.emit(
            catalogue.WORKERS_KILLED, lost=list(cause.lost), reason=f"{cause.line()}; {self._give_verdict(cause)}"
        )
        return RunResult(state=WorkerState.UNHEALTHY)

    def _look_at_start(self, job: Job, watcher: Watcher, succeeded: bool) -> RunResult | None:
        """Look at ranks that have not attached, or have ended without. Returns what that ends them with."""
        with suppress(ProtectionError):  # the SMP is being replaced: at the next look
            verdict = self._start.look(lambda: watcher.progress(self._token) is not None, succeeded)
            if verdict == HUNG and job.config.hang_seconds != 0:
                return self._hang_of_start(job)
            if verdict == ATTACHED:
                self._events.emit(catalogue.JOB_ADVANCED, iteration=0, seconds=round(time.time() - self._started_at, 1))
            if verdict == UNATTACHED:
                self._events.emit(catalogue.RANKS_UNATTACHED, seconds=round(time.time() - self._started_at, 1))
                if succeeded and job.config.require_protection:
                    return self._restart_without(LostPeers((
                        f"--ftp-require-protection: {catalogue.RANKS_UNATTACHED.what} "
                        f"{catalogue.RANKS_UNATTACHED.action}",
                    ), refused=True))  # fmt: skip
        return None

    def _hang_of_start(self, job: Job) -> RunResult | None:
        """Write stacks and report it; end the ranks if they start again for it: once, and while restarts are left. Idle
        ranks may wait for something outside, so the job is never ended for it."""
        start, ranks, folder = self._start, sorted(self._start.processes), Path()
        with suppress(OSError):
            folder = stacks.dump(job.run_dir, self._token, start.processes)
        again, said = start.alarms > 1 or self._remaining_restarts <= 0, "; ".join([
            f"the start on node {job.node}: no rank has used a processor for {start.idle:.0f} s",
            *(
                f"rank {rank} stands in {place}" for rank in ranks[:4]
                if (place := stacks.place(folder / f"rank{rank}.txt"))
            ),
        ])  # fmt: skip
        self._events.emit(
            catalogue.JOB_WAITING if again else catalogue.JOB_HUNG, about=ranks[0], iteration=0, phase="starting",
            seconds=round(start.idle, 1), stacks=str(folder), reason=f"{said}; stacks in {folder}",
            **({} if again else {"culprit": job.node, "even": True, "ranks": ranks}),
        )  # fmt: skip
        return None if again else self._restart_without(LostPeers((f"{HANG}{said}",)))

    def _signal_workers(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal the workers and their children, after a look at what they build: nothing shows it afterwards."""
        pids = worker_failures.unreaped(self._context())
        self._builds |= build_locks.builds_of(self._job.run_dir, pids) if self._job else {}
        for pid in pids:
            worker_failures.signal_group(pid, number)

    def _end_after(self, failed: dict[int, int]) -> RunResult:
        """Kill the remaining workers and their children; the result lists the failures of `failed` only."""
        context = self._context()
        self._signal_workers()
        self._exits.wait_for_all(_KILLED_SECONDS)  # torch's `close` looks for them in growing pauses
        context.close(signal.SIGKILL)
        failures = {}
        for local_rank, exitcode in failed.items():
            path = context.error_files.get(local_rank, "")
            failures[self._worker_group.workers[local_rank].global_rank] = ProcessFailure(
                local_rank, context.pids()[local_rank], exitcode, path if worker_failures.read_report(path) else ""
            )
        return RunResult(state=WorkerState.FAILED, failures=failures)

    def _decide(self, result: RunResult, left: bool) -> None:
        """Report the failures, find the cause and decide. Raises _RoundEnded if they only show that one has `left`."""
        failures = [worker_failures.described(rank, failure) for rank, failure in result.failures.items()]
        cause = root_cause(failures)
        if left and cause.secondary:
            raise _RoundEnded
        for failure in failures:
            self._events.emit(
                catalogue.WORKER_FAILED,
                rank=failure.rank,
                local_rank=failure.local_rank,
                exitcode=failure.exitcode,
                signal=failure.signal,
                message=failure.message,
                oom_kills=self._oom_kills_since() if failure.signal == "SIGKILL" else None,
                flight_record=left_traces.flight_record(failure.rank, self._started_at),
            )
        self._failed = not cause.secondary
        result.failures[cause.rank].timestamp = min(failure.timestamp for failure in result.failures.values())
        result.failures = {cause.rank: result.failures.pop(cause.rank)} | result.failures  # torch reports the earliest
        next_step = self._give_verdict(cause)
        if self.verdict.restart:  # else ft-run ends with the reason
            others = ", ".join(failure.name for failure in failures if failure is not cause)
            also = f"; ended too: {others}" if others else ""
            node = self._job.node if self._job else socket.gethostname()
            say(f"{cause.line(node)}{also}; {next_step}", alarm=True, who="ft-run: ")

    def _oom_kills_since(self) -> int | None:
        """Kills for lack of memory since the workers were started; None if the kernel's count is unknown."""
        now, before = left_traces.oom_kills(), self._oom_kills
        return None if now is None or before is None else max(0, now - before)

    def _give_verdict(self, cause: WorkerFailure | LostPeers) -> str:
        """Decide, and set torch's restart counter accordingly. Returns what comes now, for people."""
        self._lives.append(Life(cause))
        try:
            if not self._bounded and not cause.refused:
                self._versions.append(self._watcher.newest() if self._watcher else None)
                resumed, completed = (self._watcher and self._watcher.progress(self._token)) or (None, 0)
                self._lives[-1] = Life(
                    cause, resumed, completed, first=isinstance(cause, WorkerFailure) and self._nothing_begun()
                )
            self.verdict = judge(
                self._lives, self._versions, self._remaining_restarts if self._bounded else None,
                self._watcher.held if self._watcher else list,
            )  # fmt: skip
        except ProtectionError as error:
            self.verdict = Verdict(False, "failed", f"{cause.line()}; {error}")
        if same := self.verdict.recurring:
            self._events.emit(
                catalogue.FAILURE_RECURRED, resumed=[life.resumed for life in same],
                completed=[life.completed for life in same], reason=self.verdict.reason,
            )  # fmt: skip
        if not self.verdict.restart:
            self._remaining_restarts = 0
        held = self._versions[-1] if self._versions else None
        del self._versions[len(self._versions) - self._lives[-1].idle :]  # such a start is no attempt at a restore
        return self.verdict.what_comes(held, self._remaining_restarts - 1 if self._bounded else None)

    def _context(self) -> PContext:
        if self._pcontext is None:
            raise RuntimeError("the agent has not started its workers yet")
        return self._pcontext


def _workers(spec: WorkerSpec, first: int, total: int) -> list[Worker]:
    """The workers of a node whose first one has global rank `first` of `total`; all have the same role."""
    ranks = range(first, first + spec.local_world_size)
    return [
        Worker(local_rank=local, global_rank=rank, role_rank=rank, world_size=total, role_world_size=total)
        for local, rank in enumerate(ranks)
    ]
