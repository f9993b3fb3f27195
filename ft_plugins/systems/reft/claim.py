"""Start of protection on all ranks together, and the record of its loss.

Invariant: every rank claims its memory, or none does: without one rank's share no version is ever complete. An error
that the user has to act on is raised on every rank. A ProtectionError lets training begin unprotected instead, on all
ranks, unless protection is required or an earlier incarnation left state to resume from.

In: a host, a configuration, the launch context. Out: the ranks of the job; a `Reft` with its memory claimed, or the
reason why there is none; `LossRecord`, which limits training without protection.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import msgpack
import xxhash

from ...collective import Collective
from ...config import Config, LaunchContext
from ...errors import ConfigError, FtError, ProtectionError
from ...events import Events, catalogue, say
from ...model.host import Host
from ...recovery.nodes import RankLayout
from ...redundancy.exchange_plan import positions
from ...snapshot.capture.double import replica_shares
from ...snapshot.segment.paths import check_room, memory_bytes
from ...snapshot.segment.shape import Shape
from ...transport.calls import read_secret
from ..iteration_ledger import IterationLedger
from .dry_claim import smaller_claims
from .failure_domains import JobNodeNames, exchange_names
from .reft import Reft
from .reft_plan import check_replicas
from .reft_reports import budget_table

# may differ between nodes
_PER_NODE = {"node_name", "failure_domain", "interface", "metrics", "secret_file", "orphan_seconds", "faults"}


def join_ranks(config: Config, context: LaunchContext, events: Events) -> Collective:
    """Connect to all ranks of the job. Raises ConfigError, on all ranks, if one cannot read the secret file that it is
    given, or if their secrets differ; ProtocolError.
    """
    unread: ConfigError | None = None
    secret = b""
    try:
        secret = read_secret(Path(config.secret_file)) if config.secret_file else b""
    except ConfigError as error:  # reported to the other ranks, which wait for this one
        unread = ConfigError(f"rank {context.rank}: {error}")
    return Collective(secret, config.interface, config.encrypt, context, events, unread)


def require_arguments(host: Any, config: Any) -> None:
    """Check what `attach` was called with. Raises ConfigError for arguments of the wrong type."""
    call = "ft_plugins.attach(ft_plugins.TorchHost(model, optimizer, scheduler, loader))"
    if not all(callable(getattr(host, name, None)) for name in ("topology", "inventory", "small_state", "install")):
        raise ConfigError(f"ft_plugins.attach: expected a host, found a {type(host).__name__}: call {call}")
    if not isinstance(config, Config | None):
        raise ConfigError(
            f"ft_plugins.attach: expected a Config after the host, found a {type(config).__name__}: call {call}"
        )


def require_one_job(host: Host, config: Config, collective: Collective) -> None:
    """Check that all ranks reach each other and have the same configuration. Raises ConfigError on all of them."""
    with collective.agreement():
        expected = host.topology().world_size
        if collective.world_size != expected:
            raise ConfigError(
                f"rank {host.rank}: expected {expected} ranks in the job, found {collective.world_size}: call attach "
                "after torch.distributed.init_process_group"
            )
    own = {key: value for key, value in config.model_dump().items() if key not in _PER_NODE}
    packed = msgpack.packb(own)
    if len(set(collective.gather(xxhash.xxh3_64_digest(packed)))) == 1:
        return
    blocks = [msgpack.unpackb(part) for part in collective.gather(packed)]
    with collective.agreement():
        for rank, block in enumerate(blocks):
            differing = sorted(key for key in block.keys() | blocks[0].keys() if block.get(key) != blocks[0].get(key))
            if differing:
                raise ConfigError(
                    f"ft_plugins is not configured the same way on all ranks: {', '.join(differing)} of rank {rank} is "
                    f"{[block.get(key) for key in differing]}, of rank 0 {[blocks[0].get(key) for key in differing]}; "
                    "give the same flags on all nodes"
                )


def may_begin_unprotected(error: FtError, config: Config, restart: int, state: bool) -> bool:
    """Whether training may begin although protection failed with `error`. Pure. `state`: there is state to resume."""
    return isinstance(error, ProtectionError) and not (config.require_protection or restart or state)


def claim_memory(
    host: Host, config: Config, context: LaunchContext, collective: Collective, events: Events,
    ledger: IterationLedger,
) -> Reft | FtError:  # fmt: skip
    """Claim the memory of every rank. Returns the reason if the job begins unprotected. Every rank of the job calls.

    Raises an FtError, on all ranks, if training may not begin.
    """
    names = exchange_names(
        collective, events.node, config.failure_domain, context.run_dir, fresh=config.resume == "fresh"
    )
    nodes = names.nodes
    reft: Reft | None = None
    with collective.agreement(lambda error: isinstance(error, ProtectionError)) as building:
        reft = _build(host, config, context, collective, events, names, ledger)
    built = collective.gather(b"1" if reft is not None else b"")
    # a segment of any rank: all ranks may be able to resume from an earlier incarnation's state
    state = any(collective.gather(b"1" if reft is not None and reft.claimed else b""))

    def tolerable(error: FtError) -> bool:
        return may_begin_unprotected(error, config, context.restart, state)

    if reft is not None and all(built):
        with collective.agreement():
            check_replicas(host.inventory(), collective)
        with collective.agreement(tolerable) as resizing:
            reft.find_previous_size(config.resume)
        if resizing.tolerated is not None:
            return resizing.tolerated
        with collective.agreement():
            _check_room(reft, config, collective, nodes)
    shape: Shape | None = None
    with collective.agreement(tolerable) as claiming:
        if building.tolerated is not None:
            raise building.tolerated
        if reft is None or not all(built):
            raise ProtectionError(f"rank {built.index(b'')} is not protected", echo=True)
        shape = reft.claim(fresh=config.resume == "fresh")
    own = [*astuple(shape), reft.claimed_slots] if shape and reft else None
    parts = [msgpack.unpackb(part) for part in collective.gather(msgpack.packb([own, memory_bytes()]))]
    shapes, memory = [part[0] for part in parts], [part[1] for part in parts]
    if reft is None or None in shapes:
        return claiming.tolerated or ProtectionError(f"rank {shapes.index(None)} is not protected")
    first = host.rank == 0 and context.restart == 0
    if first:
        claims = [(Shape(*values[:-1]), values[-1]) for values in shapes]
        say(budget_table(claims, nodes, reft.plan.schedule.compared, memory), who="")
    if first and reft.plan.lacking > 0:
        say(
            "if a process fails, the job resumes from the newest snapshot that all ranks still have; with so few slots "
            "(--reft-slots) that may be the one that other nodes keep. With "
            f"{reft.plan.lacking} more it is the last one, or the one before"
        )
    if first or (host.rank == 0 and names.domains != names.reported):
        for line in reft.nodes.describe_domains():
            say(line)
    sizes = reft.nodes.report_sizes()
    if sizes and first:
        say(sizes)
    return reft


def _build(
    host: Host, config: Config, context: LaunchContext, collective: Collective, events: Events, names: JobNodeNames,
    ledger: IterationLedger,
) -> Reft:  # fmt: skip
    if context.run_dir is None:
        flags = " ".join(f"--{name}" for name in config.systems)
        raise ProtectionError(
            "no snapshot process (SMP): start the job with ft-run instead of torchrun or python; "
            f"if it was, ft-run did not see this configuration: give {flags} as well"
        )
    return Reft(host, config, collective, names, context.run_dir, context.token, events, ledger)


def _check_room(reft: Reft, config: Config, collective: Collective, nodes: Sequence[str]) -> None:
    """Raises BudgetError if this node lacks the memory that its ranks and its SMP are about to claim: all of it is
    checked at once, by the first rank of the node, so that no rank claims what another one will miss."""
    facts = RankLayout(reft.plan.shape, replica_shares(reft.plan.layout))
    parts = collective.gather(msgpack.packb([0 if reft.claimed else facts.shape.first_total, facts.pack()]))
    if not reft.nodes.leads:
        return
    claims = [msgpack.unpackb(part) for part in parts]
    names, ranks = positions(nodes)
    node = nodes[collective.rank]
    position = names.index(node)
    needed = [claims[rank][0] for rank in ranks[position] if claims[rank][0]]
    if not needed:
        return
    (store,) = reft.nodes.store_bytes([RankLayout.unpack(packed) for _, packed in claims], [position])
    claim = f"node {node}: protection of {len(needed)} ranks"
    if store:
        claim += ", with parity or copies of other nodes,"
    check_room(sum(needed) + store, claim, smaller=smaller_claims(config, reft.nodes.losses))


class LossRecord:
    """Counts the iterations since this incarnation lost protection, and records the loss for the next one.

    The record is a file in the run directory, written by one rank of each node.
    """

    def __init__(self, context: LaunchContext, limit: int) -> None:
        """`limit`: how many iterations may run without protection."""
        self._limit = limit
        self._iterations: int | None = None  # None while the job is protected, or was never to be
        run_dir = context.run_dir
        self._file = run_dir / "unprotected" if run_dir is not None and context.local_rank == 0 else None

    def begin(self) -> None:
        """Count from now on: protection is lost."""
        self._iterations = 0
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.touch(0o600)

    def count(self, rank: int, step: int) -> None:
        """Count iteration `step`, if protection is lost. Raises ProtectionError at the limit."""
        if self._iterations is None:
            return
        self._iterations += 1
        if self._iterations >= self._limit:
            raise ProtectionError(
                f"rank {rank}: iteration {step}: the job ends after {self._iterations} iterations without protection "
                f"(--ftp-max-unprotected-steps); see the event '{catalogue.PROTECTION_LOST.name}' for the reason"
            )

    def clear(self) -> bool:
        """Remove the record of an earlier incarnation. Returns whether there was one."""
        if self._file is None:
            return False
        try:
            self._file.unlink()
        except OSError:
            return False
        return True
