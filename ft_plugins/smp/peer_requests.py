"""What one SMP says to those of other nodes: directives to their reports, takings of what they send, bytes to read.

Invariant: a request of another epoch than the one that is protected here changes nothing; one that comes twice changes
what it changes once: a peer whose connection was closed sends it again. Fields are checked before they are used
(`requests`); whatever does not fit is a ProtocolError, which the connection carries back or ends with.

In: a request with its payload, as `wire.Server` hands it over. Out: the reply with its payload.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..errors import ProtocolError
from ..intake import shown
from ..snapshot.segment import Segment
from . import protocol, replica_checks, requests, wire
from .agreement import Directive, Report
from .frames import Data, Parity
from .parity_store import Vault
from .readers import Local, read_report, read_version, told
from .traffic import step_back
from .wire import Bytes


class Answers:
    """One node's. Holds nothing of its own."""

    def __init__(
        self,
        memory: Local,
        segments: Mapping[int, Segment],
        gathering: Callable[[Any], Vault],
        beat: Callable[[int, Report], tuple[Directive, list[int]]],
        outside: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> None:
        """`gathering(epoch)` is the vault that gathers in that epoch, `beat` takes a report of a position and returns
        the directive and the positions that are lost; both raise ProtocolError where there is no such thing here.
        `outside` answers for a job in which this node has no part."""
        self._memory = memory
        self._segments = segments
        self._gathering = gathering
        self._take_beat = beat
        self._outside = outside

    def handle(self, message: dict[str, Any], payload: Bytes) -> tuple[dict[str, Any], Bytes | None]:
        """The reply to a request. Raises ProtocolError, SegmentError."""
        match message.get("do"):
            case "read":
                return self.read(message)
            case "probe":  # how fast its payload came is all that is asked
                return {}, None
            case "spare" | "release":
                return self._outside(message), None
            case "beat":
                self._gathering(message.get("epoch"))
                return self.beat(message), None
            case "begin":  # of a lane: data comes by this connection, and nothing that is in a hurry
                step_back()
                return self.begin(self._gathering(message.get("epoch")), message), None
            case "take":
                step_back()  # the lane may have connected again since its `begin`
                part = requests.read(requests.TAKE, message)
                vault = self._gathering(message.get("epoch"))
                return {
                    "taken": vault.take(part.version, part.key, part.node, part.at, part.exponent, payload)
                }, None
            case "copy":
                copy = requests.read(requests.COPY, message)
                vault = self._gathering(message.get("epoch"))
                return {"taken": vault.take_copy(copy.version, copy.rank, copy.at, copy.total, payload)}, None
            case "check":
                self._gathering(message.get("epoch"))
                found = replica_checks.differing(self._segments, read_version(message.get("version")), payload)
                return ({"wait": True} if found is None else {"differ": found}), None
        raise ProtocolError(f"unknown request between SMPs: {shown(message.get('do'))}")

    def beat(self, message: dict[str, Any]) -> dict[str, Any]:
        """A node reports."""
        directive, lost = self._take_beat(protocol.number(message, "position"), read_report(message.get("report")))
        return {"exchange": told(directive.exchange), "counts": told(directive.counts), "lost": lost}

    def begin(self, vault: Vault, message: dict[str, Any]) -> dict[str, Any]:
        """A node wants to know what of its part is here already."""
        wanted = requests.read(requests.BEGIN, message)
        taken = vault.taken(wanted.version, wanted.nodes)
        if taken is None:
            return {"wait": True}
        return {"taken": taken, "copies": vault.copied(wanted.version, wanted.ranks)}

    def read(self, message: dict[str, Any]) -> tuple[dict[str, Any], Bytes | None]:
        """A node rebuilds."""
        match message.get("what"):
            case "data":
                version, (at, nbytes) = read_version(message.get("version")), _range(message)
                return {}, self._memory.read(Data(protocol.number(message, "rank"), version, at, nbytes))
            case "parity":
                block, (at, nbytes) = requests.read(requests.READ_PARITY, message), _range(message)
                return {}, self._memory.read(Parity(block.key, block.version, at, nbytes))
            case "copy" | "slot" as what:
                wanted = requests.read(requests.READ_WHOLE, message)
                whole = np.frombuffer(getattr(self._memory, what)(wanted.rank, wanted.version), dtype=np.uint8)
                return {"total": len(whole)}, whole[wanted.offset : wanted.offset + wire.PAYLOAD_LIMIT]
        raise ProtocolError(f"read of {shown(message.get('what'))}")


def _range(message: dict[str, Any]) -> tuple[int, int]:
    return protocol.number(message, "at"), protocol.number(message, "nbytes", 1 + wire.PAYLOAD_LIMIT)
