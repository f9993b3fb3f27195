"""Authenticated values that the agents of one incarnation publish through torch's store, for torch's rendezvous.

Invariant: the store accepts anyone, so a value is trusted only with a proof by the job's secret. The proof covers a
nonce of every agent, and each agent uses its own nonce from memory, not from the store; so no value of another
incarnation or job is valid.

In: a part of the store for this incarnation, the secret, the name of the job. Out: values by name and rank, or None.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from ..errors import ConfigError

_NONCE = _PROOF = 32  # bytes
_PURPOSE = b"ft_plugins agents 2"  # of the key; to be renumbered when the values change


class AgentChannel:
    """Connects the agents of `size` nodes. Each constructs one, and waits for the others as long as the store does."""

    def __init__(self, store: Any, secret: bytes, job: str, rank: int, size: int) -> None:
        """Raises ConfigError if a node has another secret or a foreign process wrote to the store, DistError if an
        agent is missing."""
        self._store, self._rank, self._size = store, rank, size  # torch annotates a store's values as text
        own = secrets.token_bytes(_NONCE)
        self._store.set(f"nonce/{rank}", own)
        nonces = list(self._store.multi_get([f"nonce/{each}" for each in range(size)]))
        if nonces[rank] != own or any(len(nonce) != _NONCE for nonce in nonces):
            raise ConfigError(
                f"group rank {rank}: expected the nonces of {size} agents in the store of the rendezvous, found one "
                "that another process wrote; end the process that uses this endpoint too, or drop --rdzv-backend: "
                "the rendezvous of ft-run authenticates nodes"
            )
        nonces[rank] = own
        name = job.encode()
        bound = (_PURPOSE, len(name).to_bytes(8, "big"), name, size.to_bytes(8, "big"), *nonces)
        self._key = hmac.digest(secret, b"".join(bound), "sha256")
        self.publish("here", b"")
        for each, value in enumerate(self.read_all("here")):
            if value is None:
                raise ConfigError(
                    f"the node of group rank {each} has another secret than the one of group rank {rank}; give "
                    "--ftp-secret-file, with the same content, on all nodes"
                )

    def publish(self, name: str, value: bytes) -> None:
        """Publish this agent's value; once per name."""
        self._store.set(f"{name}/{self._rank}", value + self._proof(name, self._rank, value))

    def read_all(self, name: str, patience: timedelta | None = None) -> Sequence[bytes | None]:
        """The values of all agents, by rank; None for one without a valid proof. Raises DistError if one is late."""
        keys = [f"{name}/{each}" for each in range(self._size)]
        if patience:
            self._store.wait(keys, patience)
        return [self._checked(name, each, stored) for each, stored in enumerate(self._store.multi_get(keys))]

    def _checked(self, name: str, rank: int, stored: bytes) -> bytes | None:
        value, proof = stored[:-_PROOF], stored[-_PROOF:]
        return value if hmac.compare_digest(proof, self._proof(name, rank, value)) else None

    def _proof(self, name: str, rank: int, value: bytes) -> bytes:
        return hmac.digest(self._key, b"\0".join((name.encode(), str(rank).encode(), value)), "sha256")
