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
from pathlib import Path
from typing import Any

from torch.distributed import DistError, PrefixStore
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

from ...config import worker_environment
from ...errors import ProtectionError
from ...events import Events, catalogue, say
from ...smp.watch.job_history import FtRunNote, FtRunPhase, write_note
from ...snapshot.segment.header import END
from ..preload.parent import parent_of
from ..rendezvous.rendezvous import Rendezvous
from ..rounds.rounds import ALL
from . import build_locks, left_traces, start_watch, worker_failures
from .agent_channel import TorchRound
from .draining import departure_of
from .orderly_end import have_left
from .restarts import Incarnations, Life, LostPeers, Verdict, WorkerFailure, root_cause
from .signals import SignalStop
from .start_watch import StartWatch
from .watcher import Job, Watcher
from .worker_failures import WorkerExits

_KILLED_SECONDS = 5.0
_OVER_SHARE = 0.1  # of the grace; for the other nodes to report that their workers have ended too
_ROUNDS_LOST = 5  # maximum in a row, each by a node that was lost just before workers started


class _RoundEnded(Exception):
    """The round ended while this node, whose workers had succeeded, waited for the others; or workers cannot go on
    without one that has left."""


class NodeDrained(Exception):
    """This node has left the job, as was asked, and its ranks have ended: after which iteration."""


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
        self._stop = stop
        handler = spec.rdzv_handler
        self._round = handler if isinstance(handler, Rendezvous) else TorchRound(job)
        self._bounded = bounded
        self._incarnations = Incarnations()
        self._first_token = 0  # the first one under this ft-run
        self._token = 0  # of the running incarnation
        self._opened = False  # a rank has opened a lineage under this ft-run
        self._failed = False  # a worker here failed, and does not only report that others were lost
        self._failed_at: float | None = None  # monotonic; of a failure before the restart that follows it
        self._seen = self._ended = 0.0  # monotonic: why workers have to restart was seen; the old ones had ended
        self._dumping: float | None = None  # monotonic: the kernel was first seen to write the core of a worker
        self._started_at, self._oom_kills = 0.0, left_traces.oom_kills()  # when workers were started: epoch; a count
        alive = handler.num_nodes_waiting if isinstance(handler, Rendezvous) else lambda: 0  # torch's have a thread
        self._preload = parent_of(job, spec, events, alive)
        self._departure = departure_of(job, watcher, events)
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
                return super()._invoke_run(role)
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
        ended = self._exits.in_order(self._context())
        ranks = {self._worker_group.workers[local_rank].global_rank for local_rank in ended}
        if self._watcher and ranks and not self.left:
            with suppress(ProtectionError):
                self.left = have_left(ranks, self._watcher.status())
        return self.left

    def _end_workers(self, stop: SignalStop, number: signal.Signals) -> RunResult | None:
        """Pass signal `number` on, kill what is left when the workers' part of the grace is over, or at another signal.
        What is in memory is written meanwhile, unless the job is over, as one whose workers on all nodes have ended in
        order; then its result is returned."""
        self._note(FtRunPhase.STOPPING, f"{number.name} has come: what is in memory is written, and the ranks end")
        context = self._pcontext
        ended = context is not None and self._exits.in_order(context) == context.pids().keys()
        stop.begin(write=not ended or isinstance(self._round, TorchRound))  # torch's barrier has a time of its own
        for seconds in (_OVER_SHARE * stop.left, stop.left_for_workers) if ended else ():
            with suppress(_RoundEnded, TimeoutError):
                self._exit_barrier(seconds)
                stop.finish()
                return RunResult(WorkerState.SUCCEEDED, {each.global_rank: None for each in self._worker_group.workers})
            stop.begin()
        if context is None:
            return None
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
        if isinstance(self._round, TorchRound):
            super()._exit_barrier()
        if not self._round.wait_for_all(seconds):
            raise _RoundEnded
        self.all_ended = self._round.all_succeeded

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        """torch's, repeated a few times if the round's store is lost before workers have started."""
        for left in reversed(range(_ROUNDS_LOST)):
            try:
                super()._initialize_workers(worker_group)
                return
            except DistError as error:
                if not left or isinstance(self._round, TorchRound):
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
        spec, of = worker_group.spec, self._round
        of.opened = self._has_opened()
        of.trained = bool(self._watcher and self._watcher.begun())
        of.workers = spec.local_world_size
        of.failed, self._failed = self._failed, False
        of.replaceable = bool(self._watcher and self._watcher.replaceable())
        self._note(FtRunPhase.WAITING, "waiting for the nodes of the job")
        super()._rendezvous(worker_group)
        self._note(FtRunPhase.STARTING)
        if isinstance(of, TorchRound) and spec.rdzv_handler.use_agent_store:
            group: Any = worker_group  # torch annotates fields that it fills in later as None
            store = of.serve_workers(spec, group)
            group.master_addr, group.master_port = store.master_addr, store.master_port

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """torch's ranks, in the order of the nodes. torch reads them from a store in which any process can write; here
        they come from authenticated nodes, unless there is no job and so no secret."""
        if isinstance(self._round, TorchRound):  # a dynamic one prefixes its store by round, a static one does not
            static = spec.rdzv_handler.get_backend() == "static"
            part = f"ft_plugins/{spec.max_restarts - self._remaining_restarts if static else 0}"
            self._round.join(PrefixStore(part, store), spec.rdzv_handler.get_run_id(), group_rank, group_world_size)
            if not self._job:
                return list(super()._assign_worker_ranks(store, group_rank, group_world_size, spec))
        first, total = self._round.first_rank, self._round.all_workers  # all have the same role
        return [
            Worker(local, global_rank=first + local, role_rank=first + local, world_size=total, role_world_size=total)
            for local in range(spec.local_world_size)
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        token = self._token = self._watcher.fence() if self._watcher else 0
        self.restarts = worker_group.spec.max_restarts - self._remaining_restarts
        self._first_token = self._first_token or token
        if self._job:  # torch passes this process's environment on to workers
            # a rank has opened a lineage, here or under the job's ft-run on another node: all nodes find the same
            self._opened = self._has_opened() or self._round.opened_anywhere
            done = {"resume": "auto"} if self._opened else {}  # the command's `resume` holds once
            config = self._job.config.model_copy(update=done)
            os.environ.update(worker_environment(config, self._job.run_dir, token, os.getpid()))
        self._exits.close()
        self._departure = departure_of(self._job, self._watcher, self._events)
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
        again = any(isinstance(life.end, LostPeers) for life in self._incarnations.lives[-1:])
        self._start.begin(pids, worker_group.group_world_size != 1, again)
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

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self._failed_at is None:  # another node failed or joined: not counted
            if self._is_left():
                raise _RoundEnded
            self._seen = time.monotonic()
            worker_group.spec.max_restarts += 1
            reason, left = self._round.waiting_reason, self._round.left
            self._incarnations.lives.append(Life(LostPeers((reason,))))
            kind = catalogue.ROUND_CHANGED if left else catalogue.ROUND_ENDED
            too = "end too" if worker_group.spec.rdzv_handler.is_closed() else "restart too"
            event = self._events.emit(kind, reason=f"{reason}; the workers of this node {too}")
            if left:  # it is no alarm, which the log shows anyway
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
        elif cause := self._cannot_go_on(result.state):
            return self._restart_without(cause)
        elif result.state == WorkerState.HEALTHY:
            self._leave_if_asked()
            if self._preload:
                self._preload.turn()
        return result

    def _cannot_go_on(self, state: WorkerState) -> LostPeers | None:
        """Why the workers cannot go on although none has failed; None if they can."""
        job, watcher = self._job, self._watcher
        if job is None or watcher is None:
            return None
        if state == WorkerState.HEALTHY and (lost := watcher.lost(self._token)):
            return LostPeers(tuple(lost))
        if job.config.capture:
            ended, last = state == WorkerState.SUCCEEDED, self._remaining_restarts <= 0
            with suppress(ProtectionError):  # the SMP is being replaced: at the next look
                verdict = self._start.look(lambda: watcher.progress(self._token) is not None, ended)
                return start_watch.answer(verdict, self._start, job, self._token, self._events, ended, last)
        return None

    def _leave_if_asked(self) -> None:
        """Have the workers end, if the whole job is to; raises NodeDrained if this node is."""
        if self._departure is None or isinstance(handler := self._round, TorchRound):
            return
        if handler.leaves == ALL and self._watcher:
            with suppress(ProtectionError):
                self._watcher.hold(END)  # each time: ranks that start were not there the last time
        step = self._departure.step(handler.leaves not in ("", ALL))
        if step.give_up:
            handler.stay()
        if step.leave is not None:
            seconds = round(time.monotonic() - self._departure.began, 3)
            self._events.emit(catalogue.NODE_DRAINED, iteration=step.leave, seconds=seconds)
            self._shutdown(signal.SIGKILL)
            handler.depart()
            raise NodeDrained(f"drained after iteration {step.leave}")

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
        failures = {
            self._worker_group.workers[local].global_rank: worker_failures.failure_of(context, local, exitcode)
            for local, exitcode in failed.items()
        }
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
                oom_kills=left_traces.oom_kills_since(self._oom_kills) if failure.signal == "SIGKILL" else None,
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

    def _give_verdict(self, cause: WorkerFailure | LostPeers) -> str:
        """Decide, and set torch's restart counter accordingly. Returns what comes now, for people."""
        left = self._remaining_restarts if self._bounded else None
        of = self._incarnations
        try:
            self.verdict = of.end(cause, left, self._watcher, self._token, lambda: self._round.trained_anywhere)
        except ProtectionError as error:
            self.verdict = Verdict(False, "failed", f"{cause.line()}; {error}")
        if same := self.verdict.recurring:
            facts = {"resumed": [life.resumed for life in same], "completed": [life.completed for life in same]}
            self._events.emit(catalogue.FAILURE_RECURRED, **facts, reason=self.verdict.reason)
        if not self.verdict.restart:
            self._remaining_restarts = 0
        return self.verdict.what_comes(of.newest, left and left - 1)

    def _context(self) -> PContext:
        if self._pcontext is None:
            raise RuntimeError("the agent has not started its workers yet")
        return self._pcontext
