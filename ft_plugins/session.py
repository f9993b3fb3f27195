"""Binds the chosen systems to the host's hooks, in a fixed order: what `ft_plugins.attach` returns.

Invariant: an error of protection never harms training by itself. The one boundary where protection degrades is here:
the failure becomes an event and a line on standard error, training goes on unprotected for at most
`max_unprotected_steps`, then the job ends. What a user has to decide (another job's memory, too little memory, a bad
key) ends the job at start instead, with one line, on every rank alike.

In: a host, a configuration, the launch context. Out: hooks, called by the host; `resume`, called once before the loop.
"""

from __future__ import annotations

import sys
from typing import Any

import msgpack

from . import faults
from .config import Config, LaunchContext, launch_context
from .errors import FencedError, FtError, ProtectionError, ResumeError
from .events import Event, Events, file_sink
from .model.host import Host
from .recovery.collective import Collective
from .snapshot.segment import Shape
from .systems.reft import Reft, budget_table


class Session:
    """One rank's protection for the life of one incarnation."""

    def __init__(self, host: Host, config: Config, context: LaunchContext) -> None:
        """Claim memory. Every rank calls together. Raises an FtError on all ranks when one of them has one."""
        self._host = host
        self._config = config
        self._context = context
        self._collective = Collective()
        self._events = Events(config.node_name or (context.run_dir.name if context.run_dir else ""), host.rank)
        if context.run_dir is not None:
            self._events.subscribe(file_sink(context.run_dir / "events.jsonl"))
        if host.rank == 0:
            self._events.subscribe(_alarm)
        faults.arm(config.faults, rank=host.rank, restart=context.restart)
        self._reft: Reft | None = None
        self._pending: dict[str, Any] | None = None  # small state whose position part is still to be restored
        self._unprotected: int | None = None  # steps since protection was lost; None while it holds
        if host.rank == 0 and context.restart == 0:
            print(config.table(), flush=True)
        if config.reft is not None:
            self._claim()

    def _claim(self) -> None:
        failure: FtError | None = None
        shape: Shape | None = None
        names = [name.decode() for name in self._collective.gather(self._events.node.encode())]
        try:
            if self._context.run_dir is None:
                raise ProtectionError("no snapshot process: start the job with ft-run instead of torchrun or python")
            assert self._config.reft is not None
            self._reft = Reft(
                self._host,
                self._config.reft,
                self._collective,
                tuple(names),
                self._context.run_dir,
                self._context.token,
                self._events,
            )
            shape = self._reft.claim(fresh=self._config.resume == "fresh")
        except FtError as error:
            failure = error
        if self._config.require_protection or not isinstance(failure, ProtectionError):
            self._collective.agree(failure)
        else:
            self._collective.agree(None)
        own = [shape.nbytes, shape.small_nbytes, shape.buckets, shape.layout] if shape else None
        shapes = [msgpack.unpackb(part) for part in self._collective.gather(msgpack.packb(own))]
        if any(entry is None for entry in shapes):  # without one rank no version is ever complete
            reason = str(failure) if failure else f"rank {shapes.index(None)} is not protected"
            self._degrade(ProtectionError(reason))
            return
        if self._host.rank == 0 and self._context.restart == 0:
            for node in dict.fromkeys(names):
                held = {rank: Shape(*entry) for rank, entry in enumerate(shapes) if names[rank] == node}
                print(budget_table(held, node), flush=True)

    def resume(self, loaded: int = 0) -> int:
        """Restore; returns the iterations completed in the restored state (`loaded` where nothing newer is in memory).

        `loaded` is the iteration that the framework's own checkpoint brought, 0 for none. Raises ResumeError when
        memory was asked for and holds nothing.
        """
        resume = self._config.resume
        if self._reft is None:
            if (
                self._config.reft is not None and resume == "memory"
            ):  # every rank is here: one without leaves all without
                self._collective.agree(
                    ResumeError("--ftp-resume memory was asked for, but protection cannot be had (see protection.lost)")
                    if self._host.rank == 0
                    else None
                )
            return loaded
        plan, self._pending = self._reft.resume(memory=resume in ("auto", "memory"), loaded=loaded)
        if plan.version is None and resume == "memory" and not (loaded and plan.completed):
            self._collective.agree(
                ResumeError(f"--ftp-resume memory was asked for, but {plan.reason}; --ftp-resume auto starts without")
                if self._host.rank == 0
                else None
            )
        if self._host.rank == 0:
            print(f"ft_plugins: {plan.table()}", flush=True)
        return plan.version.iteration if plan.version else loaded

    # ---- hooks ----

    def iteration_begin(self, step: int) -> None:
        """The first one puts data position and RNG in place."""
        if self._pending is not None:
            self._host.restore_position(self._pending)
            self._pending = None

    def before_update(self, step: int) -> None:
        """The fence."""
        if self._reft is not None:
            self._guarded(lambda reft: reft.before_update(step))

    def after_update(self, step: int) -> None:
        """No system uses it yet inside the step."""

    def iteration_end(self, step: int) -> None:
        """The version point."""
        if self._reft is not None:
            self._guarded(lambda reft: reft.iteration_end(step))
        elif self._unprotected is not None:
            self._unprotected += 1
            if self._unprotected >= self._config.max_unprotected_steps:
                raise ProtectionError(
                    f"rank {self._host.rank}: iteration {step}: nothing has protected this job for "
                    f"{self._unprotected} iterations "
                    "(--ftp-max-unprotected-steps); see the event 'protection.lost' for the reason"
                )

    def shutdown(self) -> None:
        """The orderly end of training, which a lost SMP does not fail. Idempotent."""
        if self._reft is not None:
            self._guarded(lambda reft: reft.close(in_order=True))
            self._reft = None

    def _guarded(self, call: Any) -> None:
        """The boundary where protection degrades."""
        try:
            call(self._reft)
        except FencedError:
            raise
        except (FtError, OSError, RuntimeError) as error:
            reft, self._reft = self._reft, None
            self._degrade(error)
            if reft is not None:
                reft.close(in_order=False)

    def _degrade(self, error: Exception) -> None:
        self._reft = None
        self._unprotected = 0
        self._events.emit("protection.lost", reason=str(error), max_steps=self._config.max_unprotected_steps)


def _alarm(event: Event) -> None:
    """What a person must see even if nobody reads the events."""
    if event.name in {"protection.lost", "slot.corrupt", "restore.scratch"}:
        print(f"ft_plugins: {event.name}: {event.fields.get('reason')}", file=sys.stderr, flush=True)


def attach(host: Host, config: Config | None = None, context: LaunchContext | None = None) -> Session:
    """Protect `host` as configured; `config` and `context` default to what ft-run passed by environment.

    Raises ConfigError when nothing was configured, and what `Session` raises. The caller then calls `resume`; the
    adapter's `install` makes the host call the hooks.
    """
    context = context or launch_context()
    chosen = config or context.config
    if chosen is None:
        chosen = Config()
    session = Session(host, chosen, context)
    host.install(session)
    return session
