"""A round of torch's rendezvous: authenticated values that the agents of one incarnation publish through torch's store.

Invariant: any process can write to the store, so a value is trusted only with a proof by the job's secret. The proof
covers a nonce of every agent, and each agent requires that the store still has its own; so no value of another
incarnation or job is valid. Without a job there is no secret, and nothing is published.

In: a part of the store for this incarnation, the secret, the name of the job. Out: values by name and group rank, or
None; of a round, what `Rendezvous` knows of one of ours.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, Store, TCPStore
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousStoreInfo

from ...errors import ConfigError
from .. import job_identity
from ..rendezvous import endpoint
from ..rendezvous.endpoint import Endpoint
from ..rounds.round_store import store_on
from .watcher import Job

_PATIENCE = timedelta(seconds=10)  # for the other nodes, where one may be gone
_NONCE = _PROOF = 32  # bytes
_PURPOSE = b"ft_plugins agents 2"  # part of the key; increase the number when the format of published values changes


class AgentChannel:
    """Connects the agents of `group_size` nodes. Each constructs one, and waits for the others up to the store's
    timeout. `group_rank`: the node's rank in torch's rendezvous, not a training rank."""

    def __init__(self, store: Any, secret: bytes, job: str, group_rank: int, group_size: int) -> None:
        """Raises ConfigError if a node has a different secret or a foreign process wrote to the store,
        torch's DistError if an agent is missing."""
        self._store = store  # Any: torch annotates a store's values as str; they are bytes
        self._group_rank, self._group_size = group_rank, group_size
        own = secrets.token_bytes(_NONCE)
        self._store.set(f"nonce/{group_rank}", own)
        nonces = list(self._store.multi_get([f"nonce/{each}" for each in range(group_size)]))
        if nonces[group_rank] != own or any(len(nonce) != _NONCE for nonce in nonces):
            raise ConfigError(
                f"group rank {group_rank}: expected the nonces of {group_size} agents in the store of the rendezvous, "
                "found one that another process wrote; stop the other process that uses this endpoint, or drop "
                "--rdzv-backend: the rendezvous of ft-run authenticates nodes"
            )
        name = job.encode()
        bound = (_PURPOSE, len(name).to_bytes(8, "big"), name, group_size.to_bytes(8, "big"), *nonces)
        self._key = hmac.digest(secret, b"".join(bound), "sha256")
        self.publish("here", b"")  # its proof is valid only if the other agent derived the same key
        for each, value in enumerate(self.read_all("here")):
            if value is None:
                raise ConfigError(
                    f"the node of group rank {each} has a different secret from that of group rank {group_rank}, or "
                    "another process wrote its value in the store of the rendezvous; give --ftp-secret-file, with the "
                    "same content, on all nodes, or drop --rdzv-backend: the rendezvous of ft-run authenticates nodes"
                )

    def publish(self, name: str, value: bytes) -> None:
        """Publish this agent's value; once per name."""
        self._store.set(f"{name}/{self._group_rank}", value + self._proof(name, self._group_rank, value))

    def read_all(self, name: str, timeout: timedelta | None = None) -> Sequence[bytes | None]:
        """Wait for the values of all agents, by group rank; None for one without a valid proof. `timeout`: None or zero
        for the store's own. Raises torch's DistError if a value is late."""
        keys = [f"{name}/{each}" for each in range(self._group_size)]
        if timeout:
            self._store.wait(keys, timeout)
        return [self._checked(name, each, stored) for each, stored in enumerate(self._store.multi_get(keys))]

    def _checked(self, name: str, group_rank: int, stored: bytes) -> bytes | None:
        value, proof = stored[:-_PROOF], stored[-_PROOF:]
        return value if hmac.compare_digest(proof, self._proof(name, group_rank, value)) else None

    def _proof(self, name: str, group_rank: int, value: bytes) -> bytes:
        return hmac.digest(self._key, b"\0".join((name.encode(), str(group_rank).encode(), value)), "sha256")


class TorchRound:
    """Rounds of torch's rendezvous, one after the other, for the agent of one node. Fields are as in `Rendezvous`."""

    waiting_reason, left = "nodes wait for the next round", ""

    def __init__(self, job: Job | None) -> None:
        self.opened = self.trained = self.failed = self.replaceable = False
        self.workers = self.first_rank = self.all_workers = 0
        self.all_succeeded = True
        self.store: TCPStore | None = None  # of the workers, on the node of group rank 0; serves until released
        self._job = job
        self._channel: AgentChannel | None = None

    def join(self, store: Store, run: str, group_rank: int, group_size: int) -> None:
        """Meet the other agents, and learn which ranks are here. `store`: for this incarnation alone. Raises as
        `AgentChannel` does."""
        self._shared, self._channel, self.first_rank, self.all_workers = store, None, 0, self.workers
        if self._job and group_size > 1:
            secret = job_identity.load_secret(self._job.config.secret_file)
            self._channel = AgentChannel(store, secret, run, group_rank, group_size)
            for name, value in (("workers", self.workers), ("opened", self.opened), ("trained", self.trained)):
                self._channel.publish(name, str(int(value)).encode())
            counts = [int(count) for count in self._read_all("workers")]
            self.first_rank, self.all_workers = sum(counts[:group_rank]), sum(counts)

    def serve_workers(self, spec: WorkerSpec, group: Any) -> RendezvousStoreInfo:
        """The store of this incarnation's workers, created on the node of group rank 0. It listens on the given address
        only, if there is one, and on loopback for a single node."""
        if group.group_rank and self._channel:
            self._channel.publish("store", b"")
            place = Endpoint.read(self._read_all("store")[0].decode())
            return RendezvousStoreInfo(place.host, place.port)
        if group.group_rank:
            return RendezvousStoreInfo.build(group.group_rank, self._shared, spec.master_addr or spec.local_addr, 0)
        alone = group.group_world_size == 1
        address = endpoint.LOOPBACK if alone else spec.master_addr or spec.local_addr or socket.getfqdn()
        listener = endpoint.listen_anywhere(address if endpoint.is_literal(address) else None)
        port = int(listener.getsockname()[1])
        self.store = store_on(listener, address, multi_tenant=True)
        if self._channel:
            self._channel.publish("store", str(Endpoint(address, port)).encode())
        elif not alone:
            RendezvousStoreInfo.build(0, self._shared, address, port)
        return RendezvousStoreInfo(address, port)

    @property
    def opened_anywhere(self) -> bool:
        """Asked for only where it changes something. Raises ConfigError; torch's DistError if an agent is missing."""
        return self._job is not None and self._job.config.resume != "auto" and b"1" in self._read_all("opened")

    @property
    def trained_anywhere(self) -> bool:
        """True also if that is not known of all."""
        try:
            return self._channel is not None and set(self._channel.read_all("trained", _PATIENCE)) != {b"0"}
        except DistError:
            return True

    def wait_for_all(self, seconds: float) -> bool:
        """After torch's barrier, which does not report which nodes came: learn whether the workers of all have
        succeeded."""
        if self._channel:
            self.all_succeeded = False
            with suppress(DistError):
                self._channel.publish("ended", b"1")
                self.all_succeeded = None not in self._channel.read_all("ended", _PATIENCE)
        return True

    def _read_all(self, name: str) -> list[bytes]:
        """The values that nodes published, by group rank. Raises ConfigError if one is not authentic."""
        values = self._channel.read_all(name) if self._channel else ()
        if None in values:
            raise ConfigError(
                f"group rank {values.index(None)}: expected its value of '{name}', found one in the store of the "
                "rendezvous that another process wrote; drop --rdzv-backend: the rendezvous of ft-run authenticates "
                "nodes"
            )
        return [each for each in values if each is not None]
