"""Ask the SMPs of a job's other nodes what is known of the job there, for people.

Invariant: it takes no longer than its caller allows, whatever those nodes do, and changes nothing. What comes from them
is checked and legible.

In: connections that are not made yet, by name of a node. Out: a map of plain values for each node.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any

from pydantic import AfterValidator

from ...base.intake import Count, Seconds, Text, parsed
from ...errors import FtError
from ...transport.calls import Peer
from ...transport.protocol import legible

AT_ONCE = 64  # nodes that are asked: so many threads and descriptors
PAGE = 64  # answers in one reply
_WORDS = 600  # characters of a text

Words = Annotated[Text, AfterValidator(lambda text: legible(text, _WORDS))]


@dataclass(frozen=True)
class OtherNode:
    """The part of `node_facts.Facts` that nodes report to each other; `held`: the newest iteration in memory, of that
    `lineage`; `safe`: `ResizeTransition.safe_lineage`."""

    state: Words
    headline: Words
    remedy: Words
    ranks: Count
    iteration: Count | None
    iteration_age_seconds: Seconds | None
    restarts: Count
    downtime_seconds: Seconds
    held: Count | None
    lineage: Count | None
    alarm: Words
    safe: Count


_UNKNOWN = dict.fromkeys(each.name for each in fields(OtherNode))


def reported(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What a node reports of its facts."""
    newest, alarm = facts["newest"]["process"] or {}, facts["alarm"]
    more = {"held": newest.get("iteration"), "lineage": newest.get("lineage"), "alarm": alarm["text"] if alarm else ""}
    more["safe"] = facts["details"]["safe_lineage"]
    known = {name: {**facts, **more}[name] for name in _UNKNOWN}
    return {name: value[:_WORDS] if isinstance(value, str) else value for name, value in known.items()}


def ask(peers: Mapping[str, Peer], seconds: float) -> list[dict[str, Any]]:
    """By name of the node: `node`, `error` ('' for none), and the fields of `OtherNode`, None where it did not answer.
    AT_ONCE are asked at a time. Returns after `seconds` at the latest, and has hung up then."""
    found: dict[str, dict[str, Any]] = {}
    until, left = time.monotonic() + seconds, iter(list(peers.items()))

    def work() -> None:
        for node, peer in left:  # which no other thread gets
            if time.monotonic() < until:
                one(node, peer)

    def one(node: str, peer: Peer) -> None:
        found[node] = {"node": node, "error": f"none within the {seconds:g} s for all nodes", **_UNKNOWN}
        try:
            known = parsed(OtherNode, peer.ask("status")[0].get("facts"), "status")
            found[node] = {"node": node, "error": "", **asdict(known)}
        except FtError as error:
            found[node] = {"node": node, "error": str(error), **_UNKNOWN}
        finally:
            peer.drop()

    threads = [threading.Thread(target=work, name="smp-others", daemon=True) for _ in range(min(AT_ONCE, len(peers)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    unasked = {"error": f"not asked: others took the {seconds:g} s for all nodes", **_UNKNOWN}
    answers = [found.get(node, {"node": node, **unasked}) for node in peers]
    for peer in peers.values():  # which ends the threads that still wait
        peer.close()
    return answers
