"""Send one wrong summary to the SMP at position 0, as the SMP of another node would: with the secret of the job."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ft_plugins.smp.tree.agreement import Summary
from ft_plugins.smp.tree.tree_member import TreeLink
from ft_plugins.smp.tree.tree_messages import packed_summary
from ft_plugins.snapshot.segment.slots import Version
from ft_plugins.transport.calls import PURPOSE, Peer
from ft_plugins.transport.channel import Party

SECONDS = 30.0


def main(where: str, secret: str, job: str, node: str, lineage: int, position: int, iteration: int) -> None:
    """`where`: the run directory of the SMP at position 0."""
    listening = json.loads((Path(where) / "endpoint.json").read_text())
    endpoint = (listening["address"], listening["port"])
    peer = Peer(endpoint, Party(PURPOSE, job, node), Path(secret).read_bytes(), SECONDS)
    peer.ask("join", epoch=lineage, position=position)
    wrong = Version(lineage, iteration)
    link = TreeLink(0, *peer.surrender())
    link.send(packed_summary(Summary(1 << position, iteration, wrong, wrong, wrong, wrong, wrong, wrong)))
    link.close()


if __name__ == "__main__":
    main(*sys.argv[1:5], *map(int, sys.argv[5:]))  # type: ignore[arg-type]
