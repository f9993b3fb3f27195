"""Run a job on this node from start to end: torch's `launch_agent`, with our agent, a lock, and an SMP kept alive.

Invariant: one ft-run per job and node. An orderly end removes the segments, and so does a refusal if they hold no
version; any other end leaves them to the SMP, for the same command to resume from.

In: a launch configuration of torch, an entrypoint, the job. Out: an `Outcome`; `job.started` and `job.ended` events.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic import events as torch_events
from torch.distributed.elastic import metrics
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, _get_addr_and_port

from ..base import files
from ..config import Config
from ..errors import EXIT_DRAINED, EXIT_REFUSED, ConfigError, FtError, ProtectionError
from ..events import Event, Events, catalogue, file_sink, log_sink, say
from ..recovery.resize import sizes
from ..smp.serve import leftovers
from ..smp.watch.job_history import FtRunNote, FtRunPhase, write_note
from ..snapshot.segment import paths
from ..snapshot.segment.header import AT_END, EARLY
from ..transport import door
from ..transport.own_address import own_address
from . import plugin, worker
from .agent.agent import NodeDrained, ProgressAgent
from .agent.draining import cannot_be_drained
from .agent.node_check import NodeCheck
from .agent.orderly_end import EndPlan, end_plan, reached
from .agent.restarts import Status
from .agent.signals import SignalStop, end_by_signals, notices, report_missed
from .agent.watcher import Job, Watcher
from .job_identity import JobLock, load_secret
from .rendezvous import round_join
from .rendezvous.endpoint import Endpoint, address_towards
from .rendezvous.peers import Credentials
from .rendezvous.rendezvous import Rendezvous
from .rendezvous.rendezvous_settings import BACKEND, RendezvousSettings

_ELSEWHERE = "other nodes may still resume from these snapshots; run 'ft-plugins end' when the job is over"
_UNBOUNDED = 1_000_000_000  # restarts that torch's counter allows if progress decides


@dataclass(frozen=True)
class Outcome:
    """How a job ended on this node."""

    status: Status
    reason: str = ""  # one line for people; of `_run`, if it succeeded, '' but for a spare
    return_values: dict[int, Any] = field(default_factory=dict)  # by global rank of this node; None of scripts
    failures: dict[int, ProcessFailure] = field(default_factory=dict)  # by global rank, of the last incarnation
    restarts: int = 0
    everywhere: bool = True  # whether a success is confirmed on all nodes

    @property
    def exit_status(self) -> int:
        """With which ft-run ends."""
        statuses = {"drained": EXIT_DRAINED, "refused": EXIT_REFUSED, "recurring": EXIT_REFUSED}
        return 0 if self.status in ("succeeded", "stopped") else statuses.get(self.status, 1)

    def raise_for_failure(self, name: str) -> None:
        """Raise torch's ChildFailedError if workers failed, so that `record` copies the error."""
        if self.failures:
            raise ChildFailedError(name, self.failures)


def launch(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str,
    args: Sequence[Any] = (),
    *,
    job: Job | None = None,
    bounded: bool = False,
    name: str = "",
) -> Outcome:
    """Run a job on this node until it ends, protected by an SMP if `job` is given.

    A callable `entrypoint` needs start_method fork if `job` is given. `bounded`: restarts are limited by
    `config.max_restarts`, else by progress. `name`: the entrypoint's name for people. Raises BusyError, ConfigError,
    ProtectionError, FencedError; ValueError for another start method; SignalException if a signal ends this process
    (workers have got it too, and the SMP waits for the same command). From the end of a protected job on, these signals
    are ignored.
    """
    name = name or (entrypoint if isinstance(entrypoint, str) else entrypoint.__qualname__)
    door.raise_limit()
    events = Events(job.node if job else "")
    outcome: Outcome | None = None
    with ExitStack() as stack:
        watcher = check = None
        if job:
            lock, run_dir = None, job.run_dir
            end_by_signals(signals_of(config))
            try:
                _parameters(config, job)  # refuses an interface that is not there
                lock = stack.enter_context(JobLock(run_dir))
                stack.push(lambda kind, error, trace: write_note(run_dir, ending(outcome, error)))
                stack.push(lambda kind, error, trace: _count_end(ending(outcome, error)))
                if config.max_nodes == 1:
                    us = load_secret(job.config.secret_file), job.name, job.node, job.config.encrypt
                    round_join.require_alone(Credentials(*us), run_dir)
                write_note(run_dir, FtRunNote(FtRunPhase.STARTING))
                events.subscribe(file_sink(run_dir / "events.jsonl"))
                events.subscribe(log_sink("ft-run: "))
                _sweep_old(job, events)
                check = _checked(job, events, stack)
                watcher = _protect(job, events, stack)
            except FtError as error:
                _report_refusal(config, job, error, serves=lock is not None)
                raise
            if watcher is None or _holds_nothing(watcher):  # sizes of an earlier configuration
                (job.run_dir / sizes.FILE).unlink(missing_ok=True)
            if not isinstance(entrypoint, str):
                if config.start_method != "fork":
                    raise ValueError(f"a callable entrypoint is forked; start_method is '{config.start_method}'")
                copies = [lock.close, *([watcher.close_copies] if watcher else [])]
                entrypoint = worker.forked(entrypoint, copies)
        events.emit(catalogue.JOB_STARTED, nproc=config.nproc_per_node, script=name)
        status, everywhere = "failed", True
        stop = SignalStop(watcher, events, job.config.grace_seconds) if job else None
        try:
            with notices(watcher, signals_of(config), job.node) if watcher and job else nullcontext():
                outcome = _run(config, entrypoint, args, job, watcher, events, bounded, stop, check)
            status, everywhere = outcome.status, outcome.everywhere
        except ConfigError:
            status = "refused"
            raise
        except SignalException:
            status = "signalled"
            if stop:
                stop.finish()
            raise
        finally:
            if watcher and job and outcome and status in ("succeeded", "stopped"):
                end = EndPlan(drop=True, words=outcome.reason)  # of a spare, which holds nothing that the job has not
                if status == "stopped" or not outcome.reason:
                    end = _conclude(watcher, job, events, everywhere, status == "stopped", 0 in outcome.return_values)
                status, outcome = end.status, replace(outcome, status=end.status, reason=end.words)
                if end.drop:
                    _end_in_order(watcher, events)
                elif status == "succeeded":
                    events.emit(catalogue.SMP_RETAINED, reason=end.words)
            elif watcher and status == "refused" and _holds_nothing(watcher):
                _end_in_order(watcher, events)
            events.emit(catalogue.JOB_ENDED, status=status)
        return outcome


def ending(outcome: Outcome | None, error: BaseException | None) -> FtRunNote:
    """How ft-run ends that has this outcome, or raises this error."""
    match error:
        case None if outcome is not None:
            return FtRunNote(FtRunPhase.ENDED, outcome.reason, outcome.status, outcome.exit_status)
        case SignalException():
            return FtRunNote(FtRunPhase.ENDED, f"by {error.sigval.name}", "signalled", 128 + error.sigval)
        case FtError():
            return FtRunNote(FtRunPhase.ENDED, str(error), "refused", EXIT_REFUSED)
    return FtRunNote(FtRunPhase.ENDED, f"{type(error).__name__}: {error}", "failed", 1)


def _count_end(note: FtRunNote) -> None:
    """In a step of Slurm on one node, as of a node that was brought back: add how ft-run ends to the file that
    launch/slurm/train.sbatch has made to decide about a requeue, unless it only left."""
    path = Path(f"slurm-{os.environ.get('SLURM_JOB_ID')}.ended")
    alone = os.environ.get("SLURM_STEP_NUM_NODES") == "1"
    if alone and path.exists() and note.status not in ("refused", "drained"):
        with suppress(OSError), open(path, "a", opener=files.private) as ended:
            ended.write(f"{note.exit_status}\n")


def _report_refusal(config: LaunchConfig, job: Job, error: FtError, serves: bool) -> None:
    """Report to the other nodes, if there are any, that this one does not come. See `round_join.report_refusal`."""
    if config.rdzv_backend == BACKEND and config.max_nodes > 1:
        with suppress(FtError, OSError):
            reachable = replace(job, config=job.config.model_copy(update={"interface": None}))
            round_join.report_refusal(RendezvousSettings.read(_parameters(config, reachable)), str(error), serves)


def _sweep_old(job: Job, events: Events) -> None:
    """Remove segments of other jobs that their SMP, had it lived, would have removed by now."""
    seconds = max(job.config.orphan_seconds, Config().orphan_seconds)  # the other job's may be longer
    try:
        removed = leftovers.sweep(job.run_dir.parent.parent, seconds, keep=(job.name, job.node), patient=True)
    except OSError as error:
        events.emit(catalogue.SWEEP_FAILED, reason=str(error))
        return
    if removed:
        for name, node in sorted({paths.owner_of(path) for path in removed}):
            print(
                f"ft-run: removed from shared memory what job {name} had left there (node {node}): none of its "
                "processes lives, and it did not want it to be kept for longer",
                file=sys.stderr,
            )
        events.emit(catalogue.SWEEP_COMPLETED, paths=[str(path) for path in removed])


def _checked(job: Job, events: Events, stack: ExitStack) -> NodeCheck | None:
    """The site's own check of this node, passed; None without one. Raises NodeError."""
    if job.config.node_check is None:
        return None
    check = NodeCheck(job.config.node_check, job.config.node_check_seconds, job.node, events)
    stack.callback(check.stop)
    check.require()
    return check


def _protect(job: Job, events: Events, stack: ExitStack) -> Watcher | None:
    """The watcher of this node's SMP; None if there is no SMP and none is required. Raises ProtectionError."""
    watcher = Watcher(job, events)
    stack.callback(watcher.stop)
    try:
        watcher.start()
    except ProtectionError as error:
        events.emit(catalogue.PROTECTION_LOST, reason=str(error))
        if job.config.require_protection:
            raise
        print(f"ft-run: nothing is protected on node {job.node}: {error}", file=sys.stderr)
        return None
    return watcher


def _holds_nothing(watcher: Watcher) -> bool:
    """Whether this node has no version in memory."""
    try:
        return watcher.empty()
    except ProtectionError:
        return False  # keep the segments


def _conclude(watcher: Watcher, job: Job, events: Events, everywhere: bool, left: bool, leads: bool) -> EndPlan:
    """Write what is to be in storage once the ranks have ended in order, and say what becomes of memory. `everywhere`:
    those of all nodes are known to have; `left`: see `reached`. `leads`: rank 0 is here, so this node reports what is
    the same on all."""
    facts: tuple[int, int, int | None] = (EARLY if left else AT_END, 0, None)  # without an SMP
    try:
        facts = reached(watcher.status(), left)
        outcome = watcher.checkpoint("the job ends", only_due=facts[0] == AT_END)
    except ProtectionError as error:
        outcome = {"state": "failed", "reason": str(error)}
    report_missed(events, outcome)
    plan = end_plan(*facts, outcome, job.name, job.config.orphan_seconds)
    if plan.words and (leads or facts[0] != AT_END):
        say(plan.words, alarm=True, who="ft-run: ")
    return plan if everywhere else replace(plan, drop=False, words=_ELSEWHERE)


def _end_in_order(watcher: Watcher, events: Events) -> None:
    """Remove the segments. If that fails, it is reported; the job's success stands."""
    try:
        watcher.end()
    except FtError as error:
        events.emit(catalogue.SMP_RETAINED, reason=str(error))
        print(f"ft-run: segments may be left in shared memory ({error}); see 'ft-plugins sweep'", file=sys.stderr)


def _run(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str,
    args: Sequence[Any],
    job: Job | None,
    watcher: Watcher | None,
    events: Events,
    bounded: bool,
    stop: SignalStop | None,
    check: NodeCheck | None,
) -> Outcome:
    """Build the agent and run it."""
    handler, spec = _specify(config, entrypoint, args, job, bounded)
    if isinstance(handler, Rendezvous):
        handler.events.subscribe(functools.partial(_forward, events))
        if check:
            handler.check_before_rounds(check)
        if job:
            handler.refuse_requests(_refused(job.config, stop=False), _refused(job.config, stop=True))
    known = inspect.signature(LocalElasticAgent.__init__).parameters  # newer versions of torch have more
    names = ("logs_specs", "start_method", "log_line_prefix_template", "shutdown_timeout")
    options = {name: getattr(config, name) for name in names if name in known}
    agent = ProgressAgent(spec, job=job, watcher=watcher, events=events, bounded=bounded, stop=stop, **options)
    metrics.initialize_metrics(metrics.MetricsConfig(config.metrics_cfg))
    result: RunResult | None = None
    reason = "this node left the rendezvous"
    close, over = True, None
    status: Status = "failed"
    try:
        result = agent.run()
        end_by_signals(signals_of(config) if job else "", over=True)
        if result:
            ended: Status = "stopped" if agent.left else "succeeded"
            status = ended if result.state == WorkerState.SUCCEEDED else agent.verdict.status
            reason = "a rank left the job before its own end" if agent.left else agent.verdict.reason
        _record(agent.get_event_succeeded(), config)
    except NodeDrained as drained:
        status = "drained"
        node = job.node if job else ""
        return Outcome("drained", f"node {node} is {drained}; the job goes on without it", restarts=agent.restarts)
    except SignalException:
        close = False  # else the other nodes could not continue
        _record(agent.get_event_failed(), config)
        raise
    except (RendezvousError, DistError) as error:
        _record(agent.get_event_failed(), config)
        reason = f"the rendezvous was lost ({type(error).__name__}: {error})"
    except Exception as error:
        _record(agent.get_event_failed(), config)
        status, reason = "refused" if isinstance(error, FtError) else "failed", f"{type(error).__name__}: {error}"
        raise
    finally:
        agent.end_preload()
        if close:
            if isinstance(handler, Rendezvous):
                over = None if result else handler.over
                handler.status, handler.reason = status, reason
            handler.shutdown()
    if over and over[0] == "succeeded":
        return Outcome("succeeded", "this node was a spare and was not needed")
    if over:
        return Outcome(over[0], f"the job is over: {over[1]}", restarts=agent.restarts)
    if result is None:
        return Outcome("failed", f"{reason}; see the output of the other nodes", restarts=agent.restarts)
    if result.state == WorkerState.SUCCEEDED:
        return Outcome(
            status, return_values=result.return_values, restarts=agent.restarts, everywhere=agent.all_ended
        )
    reason = agent.verdict.reason or "a worker (see torch's error) hangs in the kernel: check this node's disk and GPUs"
    return Outcome(agent.verdict.status, reason, failures=result.failures, restarts=agent.restarts)


def _refused(config: Config, stop: bool) -> str:
    if stop and not config.capture:
        return "no snapshots are taken of this job: end it by SIGTERM to each ft-run"
    apart = config.sync is not None and config.capture is not None and config.capture.versions != "every"
    redundancy = "any" if stop else config.capture and config.capture.redundancy
    return cannot_be_drained(redundancy or "", apart, _always_deferred(config))


def _always_deferred(config: Config) -> bool:
    """Whether each version that is sent to other nodes ends in the iteration after it."""
    sync, capture = config.sync, config.capture
    if sync is None or capture is None or sync.apply != "forward":
        return False
    return bool(capture.begins_with[0] * capture.exchange_interval % sync.tau == 0)


def _forward(events: Events, event: Event) -> None:
    events.emit(catalogue.EVENTS[event.name], **event.fields)


def _rendezvous_defaults(job: Job) -> dict[str, Any]:
    """Settings of our rendezvous for a protected job, which --rdzv-conf may override."""
    settings: dict[str, Any] = {
        "node_name": job.node, "run_dir": job.run_dir, "detect_seconds": job.config.detect_seconds,
        "command": job.command,
    }  # fmt: skip
    if job.config.secret_file:
        settings |= {"secret_file": job.config.secret_file, "encrypt": job.config.encrypt}
    return settings | ({"wait_seconds": job.config.capture.wait_seconds} if job.config.capture else {})


def _towards(config: LaunchConfig) -> str | None:
    """The address at which other nodes reach this one, if its command names another; no name has to resolve to it."""
    places = [Endpoint.read(part) for part in config.rdzv_endpoint.split(",") if part.strip()]
    return address_towards(places) if places and config.max_nodes > 1 else None


def _parameters(config: LaunchConfig, job: Job | None) -> RendezvousParameters:
    defaults = _rendezvous_defaults(job) if job and config.rdzv_backend == BACKEND else {}
    local = config.local_addr
    if job and job.config.interface and not local and config.max_nodes > 1:
        local = own_address(job.config.interface, "")
    return RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=local,
        **(defaults | config.rdzv_configs),
    )


def signals_of(config: LaunchConfig) -> str:
    """The signals at which torch's agent ends the job, comma-separated. An older torch has no option for them."""
    return getattr(config, "signals_to_handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT")


def _record(event: Any, config: LaunchConfig) -> None:
    """Torch's own event. An older torch has no option for where it goes, which is nowhere by default."""
    torch_events.record(event, getattr(config, "event_log_handler", "null"))


def _specify(
    config: LaunchConfig, entrypoint: Callable[..., Any] | str, args: Sequence[Any], job: Job | None, bounded: bool
) -> tuple[RendezvousHandler, WorkerSpec]:
    """The rendezvous and the workers, as `launch_agent` derives them from its configuration."""
    if config.rdzv_backend == BACKEND:
        rendezvous_registry.handler_registry.register(BACKEND, plugin.create)  # even if entry points are not installed
    parameters = _parameters(config, job)
    master_addr, master_port = _get_addr_and_port(parameters)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = signals_of(config)  # read when workers are started
    handler = rendezvous_registry.get_rendezvous_handler(parameters)
    options: dict[str, Any] = {f.name: getattr(config, f.name) for f in fields(WorkerSpec) if hasattr(config, f.name)}
    options |= {
        "local_world_size": config.nproc_per_node,
        "rdzv_handler": handler,
        "entrypoint": entrypoint,
        "args": tuple(args),
        "max_restarts": config.max_restarts if bounded else _UNBOUNDED,
        "master_addr": master_addr,
        "master_port": master_port,
        "local_addr": parameters.local_addr or _towards(config),
    }
    return handler, WorkerSpec(**options)
