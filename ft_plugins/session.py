"""Binds the chosen systems to the host's hooks, in a fixed order: what `ft_plugins.attach` returns.

Invariant: an error of protection never harms training by itself. The one boundary where protection degrades is here:
the failure becomes an event and a line on standard error, training goes on unprotected for at most
`max_unprotected_steps`, then the job ends. What a user has to decide (another job's memory, too little memory, a bad
key) ends the job at start instead, with one line, on every rank alike.

In: a host, a configuration, the launch context. Out: hooks, called by the host; `resume`, called once before the loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any, cast

import msgpack

from . import faults
from .bubbles.profile import Profiling
from .config import Config, LaunchContext, PaftConfig, launch_context
from .errors import ConfigError, FencedError, FtError, ProtectionError, ResumeError, StateChangedError
from .events import Events, catalogue, file_sink, log_sink, say
from .model.host import Host, Skipping
from .model.timeline import SenderFacts
from .recovery.collective import Collective
from .recovery.plan import RecoveryPlan
from .smp.wire import read_secret
from .snapshot.layout import layer_bytes
from .snapshot.room import check_room
from .snapshot.segment import Shape
from .systems.carried import CarryingHost
from .systems.measured import Measured
from .systems.paft import Paft
from .systems.reft import DEGRADED, PeerDegraded, Reft, budget_table

_OF_A_NODE = {"node_name", "interface", "secret_file", "orphan_seconds", "faults"}  # may differ between nodes


class Session:
    """One rank's protection for the life of one incarnation."""

    def __init__(
        self, host: Host, config: Config, context: LaunchContext, profiling: Profiling | None = None
    ) -> None:
        """Claim memory. Every rank calls together. Raises an FtError on all ranks when one of them has one.

        `profiling`: where bubbles are planned with, how they are measured; None asks the host for no spans.
        """
        self._host = host
        self._config = config
        self._context = context
        self._collective = _collective(config)
        self._events = Events(config.node_name or (context.run_dir.name if context.run_dir else ""), host.rank)
        if context.run_dir is not None:
            self._events.subscribe(file_sink(context.run_dir / "events.jsonl"))
        self._events.subscribe(log_sink())
        faults.arm(config.faults, rank=host.rank, restart=context.restart)
        self._reft: Reft | None = None
        self._pending: dict[str, Any] | None = None  # small state whose position part is still to be restored
        self._state = False  # whether an earlier incarnation has left segments
        self._silent: Reft | None = None  # that captures no more
        self._unprotected: int | None = None  # steps since protection was lost; None while it holds
        self.iteration = 0  # that began last
        self._fenced = 0  # the iteration of the last update
        if host.rank == 0 and context.restart == 0:
            say(config.table(), who="")
        self.measured: Measured | None = None
        if config.baft is not None and profiling is None:
            profiling = Profiling(iterations=config.baft.profile_iterations)
        if profiling is not None:
            self.measured = Measured(host, config.baft, profiling, self._collective, self._events, self._sender_facts)
        self._carrying = CarryingHost(host)
        self._paft: Paft | None = None
        if config.paft is not None:
            self._unite(config.paft)
        if config.capture is not None:
            self._claim()

    def _sender_facts(self) -> SenderFacts:
        """What only this rank knows of what bubbles are planned with."""
        if self._reft is None:
            return SenderFacts()
        return SenderFacts(
            self._reft.capture_seconds, self._reft.beside_bytes, layers=layer_bytes(self._reft.layout)
        )

    def _unite(self, config: PaftConfig) -> None:
        """Have replicas compared or averaged, on every rank or on none. Raises what `Paft` raises, on all ranks."""
        failure: FtError | None = None
        self._require_one_job()
        try:
            self._paft = Paft(self._host, config, self._events)
        except FtError as error:
            failure = error
        self._collective.agree(failure)
        assert self._paft is not None
        self._paft.connect(self._collective)
        self._carrying.state, self._carrying.drifts = self._paft.state, self._paft.drifts
        if self._host.rank == 0 and self._context.restart == 0:
            say(self._paft.table())

    def _claim(self) -> None:
        """Claim the memory on every rank, or on none: without one rank no version is ever complete."""
        failure: FtError | None = None
        self._require_one_job()
        names = [name.decode() for name in self._collective.gather(self._events.node.encode())]
        try:
            self._reft = self._build(tuple(names))
        except FtError as error:
            failure = error
        self._collective.agree(None if isinstance(failure, ProtectionError) else failure)
        shape: Shape | None = None
        built = self._collective.gather(b"1" if failure is None else b"")
        # of an earlier incarnation, of any rank: then there may be state that all ranks can resume together
        self._state = any(self._collective.gather(b"1" if self._reft is not None and self._reft.claimed else b""))
        if all(built):
            assert self._reft is not None
            try:
                self._reft.check_replicas()
            except FtError as error:
                failure = error
            self._collective.agree(failure)
            try:
                self._reft.look_back(self._config.resume)
            except FtError as error:
                failure = error
            self._collective.agree(None if self._may_degrade(failure) else failure)
            if failure is not None:
                self._degrade(failure)
                return
            try:
                self._check_room(names)
            except FtError as error:
                failure = error
            self._collective.agree(failure)
            try:
                shape = self._reft.claim(fresh=self._config.resume == "fresh")
            except FtError as error:
                failure = error
        elif failure is None:
            failure = ProtectionError(f"rank {built.index(b'')} is not protected")
            failure.echo = True
        self._collective.agree(None if self._may_degrade(failure) else failure)
        own = [*astuple(shape)] if shape else None
        shapes = [msgpack.unpackb(part) for part in self._collective.gather(msgpack.packb(own))]
        if any(entry is None for entry in shapes):
            self._degrade(failure or ProtectionError(f"rank {shapes.index(None)} is not protected"))
        elif self._host.rank == 0 and self._context.restart == 0:
            for node in dict.fromkeys(names):
                held = {rank: Shape(*entry) for rank, entry in enumerate(shapes) if names[rank] == node}
                say(budget_table(held, node, self._reft.certifies if self._reft else 0), who="")
        if self._reft is not None:
            sizes = self._reft.nodes.tell_sizes()
            if sizes and self._host.rank == 0 and self._context.restart == 0:
                say(sizes)

    def _require_one_job(self) -> None:
        """All ranks were given the same configuration and know of each other. Raises ConfigError on all of them."""
        failure: FtError | None = None
        expected = self._host.topology().world_size
        if self._collective.world_size != expected:
            failure = ConfigError(
                f"rank {self._host.rank}: the job has {expected} ranks, but {self._collective.world_size} can be "
                "reached: call attach after torch.distributed.init_process_group"
            )
        self._collective.agree(failure)
        own = {key: value for key, value in self._config.model_dump().items() if key not in _OF_A_NODE}
        told = [msgpack.unpackb(part) for part in self._collective.gather(msgpack.packb(own))]
        for rank, block in enumerate(told):
            if block != told[0]:
                differing = sorted(key for key in block.keys() | told[0].keys() if block.get(key) != told[0].get(key))
                failure = ConfigError(
                    f"ft_plugins is not configured alike on all ranks: {', '.join(differing)} of rank {rank} is "
                    f"{[block.get(key) for key in differing]}, of rank 0 {[told[0].get(key) for key in differing]}; "
                    "give the same flags on all nodes"
                )
                break
        self._collective.agree(failure)

    def _build(self, nodes: tuple[str, ...]) -> Reft:
        if self._context.run_dir is None:
            flags = " ".join(f"--{name}" for name in self._config.systems)
            raise ProtectionError(
                "no snapshot process: start the job with ft-run instead of torchrun or python; "
                f"if it was, ft-run did not see this block: give {flags} as well"
            )
        context = self._context
        return Reft(
            cast(Host, self._carrying), self._config, self._collective, nodes, self._context.run_dir, context.token,
            self._events, context.master_addr,
        )  # fmt: skip

    def _check_room(self, names: list[str]) -> None:
        """Raises BudgetError when what the ranks of this node are about to claim together is not there."""
        assert self._reft is not None
        needed = 0 if self._reft.claimed else self._reft.shape.total
        parts = [msgpack.unpackb(part) for part in self._collective.gather(msgpack.packb(needed))]
        total = sum(part for part, name in zip(parts, names, strict=True) if name == self._events.node)
        ranks = sum(bool(part) for part, name in zip(parts, names, strict=True) if name == self._events.node)
        check_room(total, f"protection of {ranks} ranks on node {self._events.node}")

    def _may_degrade(self, failure: FtError | None) -> bool:
        """Whether training may begin without protection: nobody forbade it, and there is no state to be resumed."""
        if not isinstance(failure, ProtectionError) or self._config.require_protection or self._context.restart:
            return False
        return not self._state

    def resume(self, loaded: int = 0, last: int | None = None) -> int:
        """Restore, and go on from there in all that is beside: see `_restore`. Once more where a framework's own
        checkpoint is loaded after that: what was carried belongs to what was restored with it."""
        self._carrying.carried = None
        done = self._restore(loaded, last)
        if self._paft is not None:
            self._paft.begin(done, self._carrying.carried)
        return done

    def _restore(self, loaded: int, last: int | None) -> int:
        """Restore; returns the iterations completed in the restored state (`loaded` where nothing newer is in memory).

        `loaded` is the iteration that the framework's own checkpoint brought, 0 for none; `last` the iteration at which
        training ends, where the caller knows it: state that is complete has its data position and RNG at once. Raises
        ResumeError when what was asked for is not there.
        """
        if self._reft is None:
            if self._config.capture is not None and self._config.resume == "memory":  # one without leaves all without
                error = ResumeError("--ftp-resume memory was asked for, but protection cannot be had")
                error.echo = self._host.rank != 0
                raise error
            return loaded
        plan, self._pending = self._reft.resume(self._config.resume, loaded)
        self._regained(plan)
        if self._host.rank == 0:
            say(plan.table())
        if self.measured is not None and self._reft.copies is not None:
            self.measured.guard(self._reft.gate, self._reft.copies, self._reft.links)
        done = plan.version.iteration if plan.version else loaded
        if last is not None and done >= last:
            self._restore_position()
        return done

    def _restore_position(self) -> None:
        if self._pending is not None:
            self._host.restore_position(self._pending)
            self._pending = None

    def iterations(self, last: int, loaded: int = 0) -> Iterator[int]:
        """For a loop of one's own: resume, then give each iteration that is still to be done, `last` included.

        The loop's body is the iteration; its version point is where the body ends. `loaded` as in `resume`. After the
        last one protection ends in order; a loop that is left by `break` or an exception has no version of that
        iteration. Raises what `resume` and the hooks raise.
        """
        done = self.resume(loaded, last)
        for step in range(done + 1, last + 1):
            self.iteration_begin(step)
            yield step
            if self._fenced != step:  # the update was skipped, as a GradScaler does
                if isinstance(self._host, Skipping):
                    self._host.before_skipped(step)
                self.before_update(step)
                self.after_update(step)
            self.iteration_end(step)
        self.shutdown()

    # ---- hooks ----

    def iteration_begin(self, step: int) -> None:
        """The first one puts data position and RNG in place."""
        self._restore_position()
        self.iteration = step
        if self.measured is not None:
            self.measured.iteration_begin(step)
        if self._paft is not None and self._paft.early:
            self._agree(self._paft, lambda paft: paft.iteration_begin(step, self._rest))

    def before_update(self, step: int) -> None:
        """The fence; then what is averaged or repaired, in tensors that nobody captures."""
        self._fenced = step
        if self._reft is not None:
            self._guarded(lambda reft: reft.before_update(step))
        if self._paft is not None:
            paft = self._paft
            self._agree(paft, lambda paft: paft.before_update(step))
            if self._reft is not None:  # a verdict on the version before is known now, and that is sealed
                self._guarded(lambda reft: reft.mark(step - 1, paft.mark(step - 1)))

    def _rest(self) -> None:
        """The capture under way is sealed when this returns."""
        if self._reft is not None:
            self._guarded(lambda reft: reft.rest())

    def _agree(self, paft: Paft, call: Callable[[Paft], None]) -> None:
        """Settle what was compared; where a replica was wrong snapshots are void then, those of all ranks, also where
        the job ends: of some ranks alone they would look like state that was lost."""
        try:
            call(paft)
        finally:
            since = paft.tainted()
            if since is not None and self._reft is not None:
                self._guarded(lambda reft: reft.void(since))

    def after_update(self, step: int) -> None:
        """Replicas may be compared and averaged from now on."""
        if self._paft is not None:
            self._agree(self._paft, lambda paft: paft.after_update(step))

    def iteration_end(self, step: int) -> None:
        """The version point."""
        if self.measured is not None:
            self.measured.bubbles_end()
        self._version_point(step)
        if self.measured is not None:
            self.measured.iteration_end(step)

    def _version_point(self, step: int) -> None:
        if self._reft is not None:
            self._guarded(lambda reft: reft.iteration_end(step))
        elif self._unprotected is not None:
            self._unprotected += 1
            if self._silent is not None:
                self._silent.reached(step)
            if self._unprotected >= self._config.max_unprotected_steps:
                raise ProtectionError(
                    f"rank {self._host.rank}: iteration {step}: nothing has protected this job for "
                    f"{self._unprotected} iterations "
                    f"(--ftp-max-unprotected-steps); see the event '{catalogue.PROTECTION_LOST.name}' for the reason"
                )

    def shutdown(self) -> None:
        """The orderly end of training, which a lost SMP does not fail. Idempotent."""
        if self._paft is not None:
            self._paft.shutdown()
        if self._reft is not None:
            self._guarded(lambda reft: reft.close(in_order=True), over=True)
            self._reft = None
            self._events.emit(catalogue.RANK_ENDED)

    def _guarded(self, call: Callable[[Reft], object], over: bool = False) -> None:
        """The boundary where protection degrades: whatever its own code raises, training goes on, on all ranks alike.

        The other ranks stop capturing too, so that the last version that all of them hold stays. Raises FencedError,
        StateChangedError, which only the loop's author can mend, and ProtectionError where protection is required,
        unless training is `over`.
        """
        assert self._reft is not None
        try:
            call(self._reft)
        except (FencedError, StateChangedError):
            raise
        except Exception as error:
            reft, self._reft = self._reft, None
            self._silent = None if over else reft
            self._collective.tell_all(DEGRADED)
            self._degrade(error)
            with contextlib.suppress(FtError, OSError, RuntimeError):  # of a capture that had failed: reported already
                reft.close(in_order=False)
            if self._config.require_protection and not over:
                raise ProtectionError(
                    f"rank {self._host.rank}: protection was lost and is required: {type(error).__name__}: {error}"
                ) from error

    def _degrade(self, error: Exception) -> None:
        self._reft = None
        self._unprotected = 0
        if self.measured is not None:
            self.measured.let_go()
        self._events.emit(
            catalogue.PROTECTION_LOST,
            reason=str(error) if isinstance(error, FtError) else f"{type(error).__name__}: {error}",
            max_steps=self._config.max_unprotected_steps,
            echo=isinstance(error, PeerDegraded),
        )
        if (marker := self._marker) is not None:
            with contextlib.suppress(OSError):
                marker.touch(0o600)

    @property
    def _marker(self) -> Path | None:
        """The file by which a later incarnation knows that protection was lost on this node; one rank keeps it."""
        run_dir = self._context.run_dir
        return run_dir / "unprotected" if run_dir is not None and self._context.local_rank == 0 else None

    def _regained(self, plan: RecoveryPlan) -> None:
        """The job is protected from here on: that is said where an incarnation before this one had lost it."""
        if (marker := self._marker) is None:
            return
        with contextlib.suppress(OSError):
            marker.unlink()
            if not plan.fresh:
                self._events.emit(catalogue.PROTECTION_RESTORED, reason="snapshots are taken again")


def _collective(config: Config) -> Collective:
    """All ranks of the job. One whose secret cannot be read says why, where the others miss it; where none of them can
    read it, and nodes need it, that is reported then."""
    unread: ConfigError | None = None
    secret = b""
    try:
        secret = read_secret(Path(config.secret_file)) if config.secret_file else b""
    except ConfigError as error:
        unread = error
    try:
        return Collective(secret)
    except ConfigError as error:
        raise unread or error from None


def attach(
    host: Host,
    config: Config | None = None,
    context: LaunchContext | None = None,
    profiling: Profiling | None = None,
) -> Session:
    """Protect `host` as configured; `config` and `context` default to what ft-run passed by environment.

    `host` is a `TorchHost` for a loop of plain torch. `profiling` has bubbles measured: `session.measured.profile`.
    Raises ConfigError when nothing was configured (`config=Config()` protects nothing on purpose), and what `Session`
    and the host's `install_edges` raise. The caller then iterates over `session.iterations`, or calls `resume` and the
    hooks; the adapter's `install` makes the host call those that it can.
    """
    _require_host(host, config)
    context = context or launch_context()
    chosen = config or context.config
    if chosen is None or config is None and not chosen.systems:
        raise ConfigError(
            "ft_plugins.attach: no system is switched on, so nothing would be protected: start the job with ft-run in "
            "the place of torchrun and give --reft, or drop attach (attach(host, Config()) trains unprotected)"
        )
    session = Session(host, chosen, context, profiling)
    if session.measured is not None:
        host.install_edges(session.measured.edges)
    host.install(session)
    return session


def _require_host(host: Any, config: Any) -> None:
    """Raises ConfigError for arguments that are of other kinds."""
    call = "ft_plugins.attach(ft_plugins.TorchHost(model, optimizer, scheduler, loader))"
    if not all(callable(getattr(host, name, None)) for name in ("topology", "inventory", "small_state", "install")):
        raise ConfigError(f"ft_plugins.attach: expected a host, found a {type(host).__name__}: call {call}")
    if not isinstance(config, Config | None):
        raise ConfigError(
            f"ft_plugins.attach: expected a Config after the host, found a {type(config).__name__}: call {call}"
        )
