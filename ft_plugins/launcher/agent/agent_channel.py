"""Authenticated values that the agents of one incarnation publish through torch's store, for torch's rendezvous.

Invariant: any process can write to the store, so a value is trusted only with a proof by the job's secret. The proof
covers a nonce of every agent, and each agent requires that the store still has its own; so no value of another
incarnation or job is valid.

In: a part of the store for this incarnation, the secret, the name of the job. Out: values by name and group rank, or
None.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from ...errors import ConfigError

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
