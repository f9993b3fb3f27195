"""Bind the configured systems to the host's hooks, in a fixed order: what `ft_plugins.attach` returns.

Invariant: a failure of protection does not stop training, unless protection is required. It becomes an event and a line
on standard error; training continues unprotected for up to `max_unprotected_steps` iterations, then the job ends. Only
this module lets protection degrade. What a user has to decide (another job's memory, too little memory, a bad key) ends
the job at start, on every rank, with one line.

In: a host, a configuration, the launch context. Out: hooks, called by the host; `resume`, called once before the loop.
"""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

from .base import faults
from .base.files import words_in
from .config import Config, LaunchContext, launch_context
from .errors import ConfigError, FencedError, FtError, LoopError, ProtectionError, ResumeError, StateChangedError
from .events import Events, catalogue, file_sink, log_sink, say
from .model import imported
from .model.host import Checking, Host, Looping
from .model.observation import ObservedHost
from .model.progress import FollowedHost, WorkPhase
from .model.timeline import SenderFacts
from .snapshot.segment.header import AT_END, EARLY, UNKNOWN
from .snapshot.segment.paths import REHEARSED_FILE
from .systems.followed import Disconnection, ProgressReport
from .systems.iteration_ledger import IterationLedger, learning_rate_of
from .systems.reft.capture_times import DEGRADED, PeerDegraded
from .systems.reft.carried import CarryingHost
from .systems.reft.claim import LossRecord, claim_memory, join_ranks, require_arguments, require_one_job
from .systems.reft.reft import Reft
from .systems.scalar_report import ScalarReport, scalar_report
from .systems.start_record import StartRecord
from .systems.synchronizer import Synchronizer, synchronizer_of
from .systems.transcript import Transcript

if TYPE_CHECKING:  # imports much that ranks without BAFT do not need
    from .bubbles.profile import Profiling
    from .systems.measured import Measurement


class Session:
    """The protection of one rank in one incarnation."""

    def __init__(self, host: Host, config: Config, context: LaunchContext, profiling: Profiling | None = None) -> None:
        """Start protection. Every rank of the job calls. Raises an FtError on all ranks if one of them raises one.

        `profiling`: how iterations are measured; None measures them only if BAFT is on.
        """
        self._host, self._config, self._context = host, config, context
        self._events = Events(config.node_name or (context.run_dir.name if context.run_dir else ""), host.rank)
        if context.run_dir is not None:
            self._events.subscribe(file_sink(context.run_dir / "events.jsonl"))
        self._events.subscribe(log_sink())
        self._start: StartRecord | None = StartRecord(context, self._events)  # until the first completed iteration
        self._scalars: ScalarReport | None = None  # from then on
        self._collective = join_ranks(config, context, self._events)
        self._require_reached_faults()
        faults.arm(config.faults, rank=host.rank, restart=context.restart)
        self._reft: Reft | None = None
        self._pending: dict[str, Any] | None = None  # small state whose data position and RNG are still to be restored
        # that the last `resume` opened, the version that it restored, and the iteration at which the state was then
        self._lineage = self._restored = self._at = 0
        self._degraded: Reft | None = None  # no longer captures, but still records completed iterations
        self._loss = LossRecord(context, config.max_unprotected_steps)
        self._disconnection = Disconnection()
        # the iteration that began last; the last one whose fence was passed; the last one whose update has ended
        self.iteration = self._fenced = self._updated = 0
        self._first = host.rank == 0 and context.restart == 0  # prints what is printed once per job
        if self._first:
            say(config.table(all_keys=False), who="")
            if context.run_dir is not None and (rehearsed := words_in(context.run_dir / REHEARSED_FILE)):
                say(rehearsed)
        self.measured: Measurement | None = None
        if config.baft is not None and not config.unprotected or profiling is not None:
            self.measured = self._measurement(profiling)
        self._carrying = CarryingHost(host)
        self._transcript: Transcript | None = None
        if config.transcript_dir is not None:
            self._transcript = Transcript(config.transcript_dir, cast(Host, self._carrying))
        self._sync: Synchronizer | None = None
        self.progress = ProgressReport()
        self._rate = learning_rate_of(host)
        # replicas that train at their own pace have no iterations in common with their versions
        own_pace = config.sync is not None and config.sync.policy == "a_edit"
        self.ledger = IterationLedger(host.rank, config.on_difference, self._events, keeps=not own_pace)
        self._ended = 0  # iterations of this incarnation
        self.last: int | None = None  # the iteration at which training ends, if known
        self._ending, self._stops = UNKNOWN, False  # the latter: the job is to end at a version point, from this one on
        self._deferred = 0  # the version whose tensors are captured during the next one
        try:
            if config.paft is not None or config.sync is not None:
                self._start_synchronizer()
            if config.capture is not None:
                self._start_reft()
        except BaseException:
            self._collective.close()
            raise

    def _require_reached_faults(self) -> None:
        """Raises ConfigError, on all ranks, for a fault that this host never reaches."""
        try:
            reached = getattr(self._host, "fault_points", {})
            faults.require_reached(faults.parse(self._config.faults), reached, self._host.framework)
        except ConfigError as error:
            error.echo = self._host.rank != 0
            self._collective.close()
            raise

    def _measurement(self, profiling: Profiling | None) -> Measurement:
        from .bubbles.profile import Profiling
        from .systems.measured import Measurement

        baft = self._config.baft
        if profiling is None and baft is not None:
            profiling = Profiling(iterations=baft.profile_iterations)
        return Measurement(
            self._host, baft, profiling or Profiling(), self._collective, self._events,
            lambda: SenderFacts() if self._reft is None else self._reft.sender_facts,
        )  # fmt: skip

    def _start_synchronizer(self) -> None:
        """Start PAFT or local SGD on every rank or on none. Raises what it raises, on all ranks."""
        require_one_job(self._host, self._config, self._collective)
        with self._collective.agreement():
            sync = synchronizer_of(self._host, self._config, self._events, self._context.run_dir)
        sync.connect(self._collective)
        sync.on_complete, sync.on_agreed = self._capture_deferred, self._replicas_agree
        self._sync = self._carrying.synchronizer = sync
        if self._first:
            say(sync.table())

    def _start_reft(self) -> None:
        """Start REFT on every rank or on none. Raises an FtError, on all ranks, if training may not begin."""
        require_one_job(self._host, self._config, self._collective)
        host = cast(Host, self._carrying)
        claimed = claim_memory(host, self._config, self._context, self._collective, self._events, self.ledger)
        if isinstance(claimed, FtError):
            self._degrade(claimed)
        else:
            self._reft = claimed
            self.progress.begin(self._host, self._config, self._context, self._events)

    def resume(self, loaded: int = 0, last: int | None = None) -> int:
        """Restore all state. Returns the last completed iteration, `loaded` if nothing newer exists.

        `loaded` is the iteration of the framework's own checkpoint, 0 for none; `last` that at which training ends, if
        known: if it is reached, data position and RNG are restored at once. May be called again when the framework has
        loaded a checkpoint. Raises ResumeError if what was asked for is missing, ConfigError if `last` makes no sense.
        """
        self._carrying.restored_state = None
        done = self._restore(loaded)
        if self._config.stop_after is not None and self._restored >= self._config.stop_after:
            raise ConfigError(
                f"--ftp-stop-after {self._config.stop_after}: the job is at iteration {self._restored} already: give a "
                "later one, or start without the checkpoint that it loads"
            )
        if self._start is not None:
            self._start.restored(self._lineage)
        if self._sync is not None:
            done = self._sync.begin(done, self._carrying.restored_state, last)
        self.last = last
        self._come_to(done)
        if self._ending == AT_END:
            self.restore_position()
        return done

    def _come_to(self, step: int, ending: int = UNKNOWN) -> None:
        """Record for ft-run whether training is at its own end after iteration `step`; `ending` if that is unknown."""
        known = UNKNOWN if self.last is None else EARLY if self._continues(step, self.last) else AT_END
        self._ending = AT_END if step == self._config.stop_after else known or ending
        if (reft := self._reft or self._degraded) is not None:
            reft.record_ending(self._ending)

    def _restore(self, loaded: int) -> int:
        """Returns the iteration at which the restored state is, `loaded` if none was restored."""
        if self._reft is None:
            mode = self._config.resume
            if self._config.capture is not None and mode.startswith(("memory", "before:")):  # no rank is protected
                message = f"--ftp-resume {mode} was asked for, but the job is not protected"
                raise ResumeError(message, echo=self._host.rank != 0)
            return loaded
        plan, at, self._pending = self._reft.resume(self._config.resume, loaded)
        self._lineage = plan.lineage
        if self._transcript is not None:
            self._transcript.lineage = plan.lineage
        if self._loss.clear() and not plan.fresh:  # an earlier incarnation lost protection
            self._events.emit(catalogue.PROTECTION_RESTORED, reason="snapshots are taken again")
        if self._host.rank == 0:
            say(plan.table(at))
        exchange = self._reft.exchange
        if self.measured is not None and exchange.copies is not None:
            self.measured.use_gate(self._reft.gate, exchange.copies, exchange.links)
        self._restored, self._at = plan.version.iteration if plan.version else loaded, at
        return at

    def restore_position(self) -> None:
        """Restore data position and generators, if that has not been done; the first iteration does."""
        if self._pending is not None:
            self._carrying.restore_position(self._pending, self._proves)
            self._pending = None
            if self._transcript is not None:
                self._transcript.restored(self._at)
            self._say_begun_again()

    @property
    def _proves(self) -> bool:
        """Whether the restored iteration is computed again."""
        return self._at < self._restored

    def _say_begun_again(self) -> None:
        """Name what has begun again and is not restored, on one of the ranks that run the same modules."""
        observed, host = self._carrying.observed, self._host
        if observed is None or not (words := observed.said()):
            return
        self._events.emit(catalogue.VALUES_RESTARTED, iteration=self._at, reason=words)
        topology = host.topology()
        if host.rank == topology.replicas(host.rank)[0] and not topology.coords(host.rank).tp:
            words = f"rank {host.rank}: begun again after the restore, since nothing restores it: {words}"
            say(words, alarm=not self._proves)

    def _continues(self, step: int, last: int) -> bool:
        return step < last if self._sync is None else self._sync.continues(step, last)

    def _version(self, step: int) -> int:
        """The number of the version at the end of iteration `step`; 0 if none may be taken there."""
        return step if self._sync is None else self._sync.version(step)

    def iterations(self, last: int, loaded: int = 0) -> Iterator[int]:
        """For a custom training loop: resume, then yield each remaining iteration up to `last` inclusive; where
        replicas train at their own pace, until they have done the work of `last` iterations of each.

        The version point is the end of the loop's body. `loaded` as in `resume`. After the last iteration protection
        ends in order; an iteration left by `break` or an exception is not captured. Raises what the hooks raise.
        """
        step = self.resume(loaded, last)
        while self._continues(step, last):
            step += 1
            self.iteration_begin(step)
            yield step
            self.complete(step)
        self.shutdown()

    def complete(self, step: int, ends: bool = False) -> None:
        """The end of iteration `step`, also if the host has not called all hooks of its update. `ends`: see
        `iteration_end`."""
        if self._fenced != step:  # the update was skipped, as a GradScaler does
            self.before_update(step)
        if self._updated != step:  # that, or several optimizers make it
            self.after_update(step)
        self.iteration_end(step, ends)

    # ---- hooks ----

    def iteration_begin(self, step: int) -> None:
        """An iteration begins. The first call restores data position and RNG."""
        if not self.iteration and isinstance(self._host, Looping):
            self._host.loop_begins()
        if not self.iteration and self._carrying.observed is not None and self._reft is not None:
            self._carrying.observed.begin()
        if (
            (reft := self._reft or self._degraded)
            and not self._deferred
            and (self._sync is None or self._sync.in_step)
            and reft.hold()  # the job is to end, and no rank can complete this iteration yet
        ):
            self._collective.announce(f"stop after {step}")
        self.restore_position()
        self.iteration = step
        self.ledger.begin(step)
        self.progress.words.begin(step)
        if self.measured is not None:
            self.measured.iteration_begin(step)
        if self._sync is not None and self._sync.waits_at_begin:
            self._synchronize(self._sync, lambda sync: sync.iteration_begin(step, self.wait_for_capture))

    def before_update(self, step: int) -> None:
        """The fence; then apply averages and repairs, to tensors that no capture is reading."""
        self.ledger.forwards_done()
        self.progress.words.edge(WorkPhase.FENCE)
        if self._sync is not None:
            self._synchronize(self._sync, lambda sync: sync.complete(step))
        if isinstance(self._host, Checking):  # what `complete` wrote is not a change by the loop
            self._host.before_fence(step)
        self._fenced = step
        if self._reft is not None:
            self._guarded(lambda reft: reft.before_update(step, self._version(step), self._rate()))
        if (sync := self._sync) is not None:
            self._synchronize(sync, lambda sync: sync.before_update(step))
            if self._reft is not None and (version := self._version(step - 1)):  # it is sealed, its verdict known
                self._guarded(lambda reft: reft.mark(version, sync.mark(step - 1)))
        self.progress.words.edge(WorkPhase.UPDATE)

    def wait_for_capture(self) -> None:
        """Seal the running capture: what follows may change tensors outside of an update."""
        if self._reft is not None:
            self._guarded(lambda reft: reft.wait_for_capture())

    def _synchronize(self, sync: Synchronizer, call: Callable[[Synchronizer], None]) -> None:
        """Call a hook, then void snapshots that hold a wrong replica, on all ranks, also if the hook raises: snapshots
        left on some ranks alone would look like lost state."""
        try:
            call(sync)
        finally:
            since = sync.tainted()
            if since is not None and self._reft is not None:
                self._guarded(lambda reft: reft.void(since))

    def after_update(self, step: int) -> None:
        """The update is done: from now on replicas may be compared and averaged."""
        self._updated = step
        self.progress.words.edge(WorkPhase.AFTER_UPDATE)
        if self._sync is not None:
            self._synchronize(self._sync, lambda sync: sync.after_update(step))

    def iteration_end(self, step: int, ends: bool = False) -> None:
        """The version point. `ends`: training ends here on all ranks, be it at its own end or before."""
        self._come_to(step)
        self._carrying.completed = step
        if self._reft is not None:
            self._guarded(lambda reft: reft.recomputed(self._version(step)))
        self._stops = self._stops or self._collective.announced(f"stop after {step}")
        self.progress.words.edge(WorkPhase.VERSION_POINT)
        if self.measured is not None:
            self.measured.bubbles_end()
        if self._transcript is not None:
            deferred = self._sync is not None and self._sync.defers(step)
            deferred = deferred or (self._proves and step == self._restored)  # is compared, not captured
            self._transcript.completed(step, self.ledger.seen(), self.progress.words.long_phases, deferred)
        self._version_point(step, (ends or self._stops) and self._ending != AT_END)
        self._say_begun_again()
        if self.measured is not None:
            self.measured.iteration_end(step)
        if self._start is not None:
            self._start.completed(step)
            self._start = None
            self._scalars = scalar_report(self._host, self._config, self._context.run_dir, self._events)
        if self._scalars is not None:
            self._scalars.completed(step)
        self.progress.words.end(step)
        self._ended += 1
        if self._ended == imported.AFTER_ITERATIONS:
            self._write_imported()
        if step == self._config.stop_after or self._stops and not self._deferred and self._ending != AT_END:
            self._stop()

    def _stop(self) -> None:
        """End in order after the last wanted iteration, once every rank has come so far."""
        self._collective.barrier()
        self.shutdown()
        sys.exit(0)

    def _write_imported(self) -> None:
        """Write down what this rank has imported, for preloaders."""
        context = self._context
        if variables := imported.outdated():
            reason = f"{', '.join(variables)}: set after a module that was imported ahead had read it"
            self._events.emit(catalogue.PRELOAD_OUTDATED, variables=list(variables), reason=reason)
        if context.run_dir is not None and self._config.preload != "off":
            with contextlib.suppress(OSError):
                imported.write(context.run_dir, context.local_rank, context.token, variables)

    def _version_point(self, step: int, last: bool) -> None:
        version = self._version(step)
        if self._reft is not None:
            later = self._sync is not None and self._sync.defers(step)
            if (lost := self._disconnection.due(self._collective.lost, step, time.monotonic())) is not None:
                self._events.emit(catalogue.RANKS_DISCONNECTED, peer=lost.rank, reason=lost.reason)
            if version:
                self._guarded(
                    lambda reft: self._defer(reft, version) if later else reft.iteration_end(version, last=last)
                )
            else:
                self.ledger.end(step, None)
            return
        if self._degraded is not None and version:
            self._degraded.record_completed(version)
        self._loss.count(self._host.rank, step)

    def _defer(self, reft: Reft, version: int) -> None:
        reft.defer(version)
        self._carrying.hold()
        self._deferred = version

    def _capture_deferred(self) -> None:
        """The tensors and the synchronizer's state of the deferred version are final."""
        version, self._deferred = self._deferred, 0
        if version and self._reft is not None:
            with self._carrying.held() as kept:
                self._guarded(lambda reft: reft.iteration_end(version, kept))

    def _replicas_agree(self, step: int) -> None:
        if (reft := self._reft) is not None:
            with contextlib.suppress(Exception):  # inside the audit; the fence marks it again
                reft.agreed(step)

    def shutdown(self) -> None:
        """The orderly end of training; a lost SMP does not fail it. Idempotent."""
        kind, _, trace = sys.exc_info()
        if self._ending == UNKNOWN and (  # `sys.exit` within a function of the script may come amid training
            self._stops or kind is SystemExit and traceback.extract_tb(trace)[-1].name != "<module>"
        ):
            self._come_to(self.iteration, EARLY)
        self.progress.end()
        if self._scalars is not None:
            self._scalars.close()
        self.ledger.summarize()
        if self._sync is not None:
            self.wait_for_capture()  # the synchronizer may change tensors
            self._sync.shutdown()
        if self._reft is not None:
            self._guarded(lambda reft: reft.close(in_order=True), over=True)
            self._reft = None
            self._events.emit(catalogue.RANK_ENDED)
        self._collective.close()

    def _guarded(self, call: Callable[[Reft], object], over: bool = False) -> None:
        """Call REFT. If it fails, protection degrades and training continues, on all ranks.

        The other ranks stop capturing too, so that the last version that all of them hold stays. Raises FencedError;
        StateChangedError and LoopError, which only the author of the loop can fix; ProtectionError if protection is
        required, unless training is `over`.
        """
        assert self._reft is not None
        try:
            call(self._reft)
        except (FencedError, StateChangedError, LoopError):
            raise
        except Exception as error:
            reft, self._reft = self._reft, None
            self._degraded = None if over else reft
            unaware = self._collective.announce(DEGRADED)
            self._degrade(error, "" if over or isinstance(error, PeerDegraded) else unaware)
            with contextlib.suppress(FtError, OSError, RuntimeError):  # errors of the failed capture, reported already
                reft.close(in_order=False)
            if self._config.require_protection and not over:
                raise ProtectionError(
                    f"rank {self._host.rank}: protection was lost and is required: {type(error).__name__}: {error}"
                ) from error

    def _degrade(self, error: Exception, unaware: str = "") -> None:
        """`unaware`: why some ranks may not know that this one no longer captures; '' if all do."""
        self._reft = None
        self._loss.begin()
        reason = str(error) if isinstance(error, FtError) else f"{type(error).__name__}: {error}"
        if unaware:
            reason += (
                f". Other ranks may not know ({unaware}): they would overwrite the last snapshot that all ranks have, "
                "so save a checkpoint if possible and restart now"
            )
        self._events.emit(
            catalogue.PROTECTION_LOST,
            reason=reason,
            max_steps=self._config.max_unprotected_steps,
            echo=isinstance(error, PeerDegraded),
        )
        if self.measured is not None:
            with contextlib.suppress(Exception):  # a device that has failed
                self.measured.release_gate()  # after what was said: it waits for the stream


def attach(
    host: Host,
    config: Config | None = None,
    context: LaunchContext | None = None,
    profiling: Profiling | None = None,
) -> Session:
    """Protect `host` as configured; `config` and `context` default to what ft-run passed in the environment.

    `host` is a `TorchHost` for a loop of plain torch. `profiling` measures iterations: `session.measured.profile`.
    Raises ConfigError if nothing is configured (`config=Config()` protects nothing on purpose), and what `Session` and
    the host's `install_edges` raise. The caller then iterates over `session.iterations`, or calls `resume` and the
    hooks that the host's `install` did not connect.
    """
    require_arguments(host, config)
    context = context or launch_context()
    chosen = config or context.config
    if chosen is None or config is None and not chosen.systems:
        raise ConfigError(
            "ft_plugins.attach: no system is switched on, so nothing would be protected: start the job with ft-run "
            "instead of torchrun and give --reft, or drop attach (attach(host, Config()) trains unprotected)"
        )
    session = Session(host, chosen, context, profiling)
    spans = session.measured is not None
    if session.measured is not None:
        host.install_edges(session.progress.with_spans(session.measured.edges))
    elif chosen.sync is None and chosen.paft is None:  # which follow or repeat the same functions themselves
        spans = session.progress.follow_spans(host)
    host.install(session)
    if isinstance(host, FollowedHost) and session.progress.written:
        host.install_progress(session.progress.words, spans)
    if isinstance(host, ObservedHost) and (chosen.capture is not None or chosen.unprotected):
        host.install_observer(session.ledger)
    return session
