"""What the agents of one incarnation say to each other through torch's store, where that serves their rendezvous.

Invariant: the store takes all comers, so nothing is believed that does not carry a proof by the job's secret, bound to
the agents that meet now: each adds a number of its own, which it never takes back from the store, so that no word of
another incarnation or job fits.

In: a store that is theirs alone in this incarnation, the secret, the name of the job. Out: words by name and rank, or
None.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from ..errors import ConfigError

_NONCE = _PROOF = 32  # bytes
_PURPOSE = b"ft_plugins agents 2"  # of the key; another number wherever the words change


class AgentChannel:
    """The agents of `size` nodes. Each of them makes one, and waits for the others as long as the store does."""

    def __init__(self, store: Any, secret: bytes, job: str, rank: int, size: int) -> None:
        """Raises ConfigError where another node knows another secret or a stranger writes for one, DistError where not
        all of them come."""
        self._store, self._rank, self._size = store, rank, size  # torch annotates a store's values as text
        own = secrets.token_bytes(_NONCE)
        self._store.set(f"nonce/{rank}", own)
        nonces = list(self._store.multi_get([f"nonce/{each}" for each in range(size)]))
        if nonces[rank] != own or any(len(nonce) != _NONCE for nonce in nonces):
            raise ConfigError(
                f"group rank {rank}: expected the numbers of {size} agents in the store of the rendezvous, found one "
                "that another process wrote; end what else uses this endpoint, or drop --rdzv-backend, so that nodes "
                "meet where strangers cannot write"
            )
        nonces[rank] = own
        name = job.encode()
        bound = (_PURPOSE, len(name).to_bytes(8, "big"), name, size.to_bytes(8, "big"), *nonces)
        self._key = hmac.digest(secret, b"".join(bound), "sha256")
        self.say("here", b"")
        for each, word in enumerate(self.all_said("here")):
            if word is None:
                raise ConfigError(
                    f"the node of group rank {each} does not know the secret that the one of group rank {rank} knows; "
                    "give --ftp-secret-file, with the same content, on all nodes"
                )

    def say(self, name: str, word: bytes) -> None:
        """Let the others know `word`, once for each name."""
        self._store.set(f"{name}/{self._rank}", word + self._proof(name, self._rank, word))

    def all_said(self, name: str, patience: timedelta | None = None) -> Sequence[bytes | None]:
        """What each has said, by rank; None for a word that is not from there. Raises DistError where one is late."""
        keys = [f"{name}/{each}" for each in range(self._size)]
        if patience:
            self._store.wait(keys, patience)
        return [self._checked(name, each, found) for each, found in enumerate(self._store.multi_get(keys))]

    def _checked(self, name: str, rank: int, found: bytes) -> bytes | None:
        word, proof = found[:-_PROOF], found[-_PROOF:]
        return word if hmac.compare_digest(proof, self._proof(name, rank, word)) else None

    def _proof(self, name: str, rank: int, word: bytes) -> bytes:
        return hmac.digest(self._key, b"\0".join((name.encode(), str(rank).encode(), word)), "sha256")
