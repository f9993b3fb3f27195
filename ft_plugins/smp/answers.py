"""What one SMP says to those of other nodes: directives to their reports, takings of what they send, bytes to read.

Invariant: a request of another epoch than the one that is protected here changes nothing. Fields are checked before
they are used; whatever does not fit is a ProtocolError, which the connection carries back or ends with.

In: a request with its payload, as `wire.Server` hands it over. Out: the reply with its payload.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..errors import ProtocolError
from ..snapshot.segment import Segment
from . import checks, protocol, wire
from .frames import Data, Parity
from .peers import Local, read_report, read_version, told
from .pins import Directive, Report
from .priority import step_back
from .vault import Vault
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
        """The reply to a request. Raises ProtocolError, SegmentError, and KeyError for a field that is missing."""
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
                section, stripe, which = protocol.field(message, "key", list)
                done = self._gathering(message.get("epoch")).take(
                    read_version(message["version"]), (section, stripe, which), protocol.number(message, "node"),
                    protocol.number(message, "at"), protocol.number(message, "exponent", 255), payload,
                )  # fmt: skip
                return {"taken": done}, None
            case "copy":
                done = self._gathering(message.get("epoch")).take_copy(
                    read_version(message["version"]), protocol.number(message, "rank"),
                    protocol.number(message, "at"), protocol.number(message, "total"), payload,
                )  # fmt: skip
                return {"taken": done}, None
            case "check":
                self._gathering(message.get("epoch"))
                found = checks.differing(self._segments, read_version(message["version"]), payload)
                return ({"wait": True} if found is None else {"differ": found}), None
        raise ProtocolError(f"'{message.get('do')}' is no request between SMPs")

    def beat(self, message: dict[str, Any]) -> dict[str, Any]:
        """A node reports."""
        directive, lost = self._take_beat(protocol.number(message, "position"), read_report(message["report"]))
        return {"exchange": told(directive.exchange), "counts": told(directive.counts), "lost": lost}

    def begin(self, vault: Vault, message: dict[str, Any]) -> dict[str, Any]:
        """A node wants to know what of its part is here already."""
        version = read_version(message["version"])
        nodes = [(int(section), int(node)) for section, node in protocol.field(message, "nodes", list)]
        taken = vault.taken(version, nodes)
        if taken is None:
            return {"wait": True}
        return {"taken": taken, "copies": vault.copied(version, protocol.field(message, "ranks", list))}

    def read(self, message: dict[str, Any]) -> tuple[dict[str, Any], Bytes | None]:
        """A node rebuilds."""
        version = read_version(message["version"])
        match message.get("what"):
            case "data":
                at, nbytes = _range(message)
                return {}, self._memory.read(Data(protocol.number(message, "rank"), version, at, nbytes))
            case "parity":
                section, stripe, which = protocol.field(message, "key", list)
                at, nbytes = _range(message)
                return {}, self._memory.read(Parity((section, stripe, which), version, at, nbytes))
            case "copy" | "slot" as what:
                rank, at = protocol.number(message, "rank"), protocol.number(message, "offset")
                whole = np.frombuffer(getattr(self._memory, what)(rank, version), dtype=np.uint8)
                return {"total": len(whole)}, whole[at : at + wire.PAYLOAD_LIMIT]
        raise ProtocolError(f"read of '{message.get('what')}'")


def _range(message: dict[str, Any]) -> tuple[int, int]:
    return protocol.number(message, "at"), protocol.number(message, "nbytes", 1 + wire.PAYLOAD_LIMIT)
