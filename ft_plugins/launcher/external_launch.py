"""Start an SMP for a job that another launcher (torchrun, DeepSpeed's) has started.

Invariant: as under ft-run, the SMP is not a child of training, the old incarnation is ended before the new one gets its
token, and an orderly end removes the segments. Missing, as the caller reports: restarts bounded by progress (the
launcher restarts, or the user repeats the command), replacement of a dead SMP during training, replacement of nodes.

The ranks stay connected between the two, so that at the end each notices at once if another one does not come.

In: the configuration, the launcher's context, an initialized process group. Out: the context that ft-run would give.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgpack

from ..collective import Collective
from ..config import Config, LaunchContext, run_directory
from ..errors import ConfigError, ProtectionError
from ..events import Events
from ..smp.serve import client as smp
from ..systems.reft.claim import join_ranks
from . import job_identity

_CALL_SECONDS = 30.0


@dataclass
class Joined:
    """A rank's part in the SMP of its node, until `leave`."""

    collective: Collective
    run_dir: Path
    leads: bool  # on its node
    over: bool = False

    def leave(self, in_order: bool) -> None:
        """Close the connections to the other ranks; a second call does nothing. If training ended `in_order`, every
        rank calls, and the SMP ends before that. Raises ProtocolError, and what the SMP replies."""
        if self.over:
            return
        self.over = True
        with self.collective:
            if not in_order:
                return
            self.collective.barrier()  # every rank has released its segment
            if self.leads:
                with smp.Client(self.run_dir, _CALL_SECONDS) as client:
                    client.end()


def join(config: Config, context: LaunchContext) -> tuple[LaunchContext, Callable[[bool], None]]:
    """Collective. Returns the rank's context, and a function to call at the end, with whether that is orderly.

    Raises BusyError and ConfigError of any rank. After a ProtectionError the context is returned unchanged, and the
    session fails if protection is required.
    """
    with contextlib.ExitStack() as stack:
        collective = stack.enter_context(join_ranks(config, context, Events()))
        place = _place(config, context, collective)
        if place is None:
            return context, lambda in_order: None
        stack.pop_all()
    run_dir, token = place
    joined = Joined(collective, run_dir, context.local_rank == 0)
    return replace(context, run_dir=run_dir, token=token, agent_pid=os.getppid()), joined.leave


def _place(config: Config, context: LaunchContext, collective: Collective) -> tuple[Path, int] | None:
    """Run directory and token of this node, once its first rank has started the SMP; None if it could not."""
    started: tuple[str, int] | None = None
    with collective.agreement():
        if context.local_rank == 0:
            try:
                started = _bring_up(config)
            except ProtectionError as error:
                print(f"ft_plugins: {error}", file=sys.stderr, flush=True)
    nodes = [msgpack.unpackb(part) for part in collective.gather(msgpack.packb([context.group_rank, started]))]
    own = [place for group, place in nodes if group == context.group_rank and place is not None]
    return (Path(own[0][0]), int(own[0][1])) if own else None


def _bring_up(config: Config) -> tuple[str, int]:
    """The run directory of this job on this node, and the token of this incarnation."""
    if config.capture is None:
        raise ConfigError("no system is on")
    if config.node_check:
        raise ConfigError("--ftp-node-check: has no effect without ft-run; start the job with it, or drop the key")
    job = job_identity.job_name(config.job, "", os.getuid(), os.getcwd(), sys.argv[0], sys.argv[1:])
    node = config.node_name or job_identity.safe_name(socket.gethostname())
    run_dir, launcher = run_directory(job, node), os.getppid()
    smp.ensure(run_dir, job, node, config.orphan_seconds, config.faults, _CALL_SECONDS, launcher)
    with smp.Client(run_dir, _CALL_SECONDS) as client:
        client.watch(launcher, config.detect_seconds, config.orphan_seconds, config.metrics_place)
        return str(run_dir), client.fence()
