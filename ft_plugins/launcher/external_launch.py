"""Start an SMP for a job that another launcher (torchrun, DeepSpeed's) has started.

Invariant: as under ft-run, the SMP is not a child of training, the old incarnation is ended before the new one gets its
token, and an orderly end removes the segments. Missing, as the caller reports: restarts bounded by progress (the
launcher restarts, or the user repeats the command), replacement of a dead SMP during training, replacement of nodes.

In: the configuration, the launcher's context, an initialized process group. Out: the context that ft-run would give.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgpack

from ..config import Config, LaunchContext, run_directory
from ..errors import ConfigError, ProtectionError
from ..events import Events
from ..smp import client as smp
from ..systems.claim import join_ranks
from . import job_identity

_CALL_SECONDS = 30.0


def join(config: Config, context: LaunchContext) -> tuple[LaunchContext, Callable[[], None]]:
    """Collective. Returns the rank's context, and a function for every rank to call after an orderly end.

    Raises BusyError and ConfigError of any rank. After a ProtectionError the context is returned unchanged, and the
    session fails if protection is required.
    """
    collective = join_ranks(config, context, Events())
    started: tuple[str, int] | None = None
    with collective.agreement():
        if context.local_rank == 0:
            try:
                started = _bring_up(config)
            except ProtectionError as error:
                print(f"ft_plugins: {error}", file=sys.stderr, flush=True)
    nodes = [msgpack.unpackb(part) for part in collective.gather(msgpack.packb([context.group_rank, started]))]
    own = [place for group, place in nodes if group == context.group_rank and place is not None]
    if not own:
        return context, lambda: None
    run_dir, token = Path(own[0][0]), int(own[0][1])

    def leave() -> None:
        collective.barrier()  # every rank has released its segment
        if context.local_rank == 0:
            with smp.Client(run_dir, _CALL_SECONDS) as client:
                client.end()

    return replace(context, run_dir=run_dir, token=token, agent_pid=os.getppid()), leave


def _bring_up(config: Config) -> tuple[str, int]:
    """The run directory of this job on this node, and the token of this incarnation."""
    if config.capture is None:
        raise ConfigError("no system is on")
    job = job_identity.job_name(config.job, "", os.getuid(), os.getcwd(), sys.argv[0], sys.argv[1:])
    node = config.node_name or job_identity.safe_name(socket.gethostname())
    run_dir, launcher = run_directory(job, node), os.getppid()
    smp.ensure(run_dir, job, node, config.orphan_seconds, config.faults, _CALL_SECONDS, launcher)
    with smp.Client(run_dir, _CALL_SECONDS) as client:
        client.watch(launcher, config.detect_seconds, config.orphan_seconds)
        return str(run_dir), client.fence()
