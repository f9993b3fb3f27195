"""Authenticate payloads between the ranks of one incarnation, by a key that only they have.

Invariant: the caller never uses a number twice for one sender and purpose. So a payload is accepted only in its own
place, and no nonce of AES-GMAC repeats under a key: each purpose has a key, and the nonce is sender and number.

In: the incarnation's key, payloads. Out: tags of TAG bytes; a ProtocolError for a payload that does not match its tag.
"""

from __future__ import annotations

import hmac

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ..errors import ProtocolError

TAG = 16  # bytes

Buffer = bytes | bytearray | memoryview


class Proofs:
    """Makes and checks the tags of one rank."""

    def __init__(self, rank: int, key: bytes) -> None:
        self._rank = rank
        self._key = key
        self._ciphers: dict[str, AESGCM] = {}  # by purpose

    def word(self, word: str) -> bytes:
        """32 bytes that prove that a rank of this incarnation has published `word`."""
        return hmac.digest(self._key, word.encode(), "sha256")

    def tag(self, purpose: str, number: int, sender: int, payload: Buffer) -> bytes:
        """The tag of payload `number` that `sender` sends for `purpose`."""
        return self._cipher(purpose).encrypt(_nonce(sender, number), b"", payload)

    def check(self, purpose: str, number: int, sender: int, payload: Buffer, tag: Buffer) -> None:
        """Raises ProtocolError when `payload` is not what `sender` sent."""
        try:
            self._cipher(purpose).decrypt(_nonce(sender, number), tag, payload)
        except InvalidTag as error:
            raise ProtocolError(
                f"rank {self._rank}: rejected data of rank {sender}: it was altered in transit. Another process takes "
                "part in the job's traffic; make sure that only the job's nodes reach its ports, then start the job "
                "again"
            ) from error

    def _cipher(self, purpose: str) -> AESGCM:
        if purpose not in self._ciphers:
            self._ciphers[purpose] = AESGCM(hmac.digest(self._key, b"payloads " + purpose.encode(), "sha256"))
        return self._ciphers[purpose]


def _nonce(sender: int, number: int) -> bytes:
    return sender.to_bytes(4, "little") + number.to_bytes(8, "little")
