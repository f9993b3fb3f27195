"""Authentication tags by a key that only the ranks of one incarnation have: sender and content of each payload.

Invariant: no two payloads of one sender share a purpose and a number, so a payload cannot be replayed in another place,
and the nonces of AES-GMAC never repeat under a key.

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
    """Makes and checks the proofs of one rank."""

    def __init__(self, rank: int, key: bytes) -> None:
        self._rank = rank
        self._key = key
        self._ciphers: dict[str, AESGCM] = {}  # by purpose

    def word(self, word: str) -> bytes:
        """The proof, of 32 bytes, that a rank of this incarnation announced `word`."""
        return hmac.digest(self._key, word.encode(), "sha256")

    def tag(self, purpose: str, number: int, sender: int, payload: Buffer) -> bytes:
        """The tag of payload `number` of `sender` for `purpose`."""
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
