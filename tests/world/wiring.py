"""Puts the world in place of what the product imports: connections, memory, files, threads. Once in a process, before
any world is made."""

from __future__ import annotations

import selectors
from types import SimpleNamespace

import torch.distributed.elastic.rendezvous.api  # noqa: F401  # what is foreign and heavy comes first
import xxhash  # noqa: F401

from . import shims

shims.install()

from ft_plugins.launcher.rendezvous import leader_search, local_node, peers, rendezvous, round_join  # noqa: E402
from ft_plugins.launcher.rounds import roster_file  # noqa: E402
from ft_plugins.recovery import nodes as recovery_nodes  # noqa: E402
from ft_plugins.recovery.resize.sizes import SizeReport  # noqa: E402
from ft_plugins.smp.tree import node as node_module  # noqa: E402
from ft_plugins.smp.tree import node_driver, pinned, tree_member  # noqa: E402
from ft_plugins.snapshot.segment import claims  # noqa: E402
from ft_plugins.transport import loop  # noqa: E402

from . import launcher, memory, network, smp  # noqa: E402

_FILES = SimpleNamespace(write_json=smp.write_json)


def _read_bytes(path, limit):
    try:
        return path.machine.files[str(path)].encode()
    except KeyError:
        raise FileNotFoundError(2, "No such file or directory") from None


def _quiet(*_, **__):
    return None


def _say(words, *_, **__):
    from . import hub as hubs

    hubs.ACTIVE.note(f"{hubs.ACTIVE.current.process.name}: {words}")


REPLACED = {
    loop: {
        "selectors": SimpleNamespace(DefaultSelector=network.Selector, EVENT_READ=selectors.EVENT_READ),
        "socket": SimpleNamespace(socketpair=network.pair),
    },
    tree_member: {"TreeLink": network.TreeLink},
    node_module: {
        "PeerEndpoint": smp.Endpoint, "ParityStore": memory.Store, "shape_of": memory.shape_of, "fetch": memory.fetch,
        "decode": memory.decode, "job_file": smp.JobFiles, "files": _FILES, "read_json": smp.read_json,
        "parity_path_of": lambda job, node: smp.Place(
            __import__("tests.world.hub", fromlist=["ACTIVE"]).ACTIVE.current.process.machine, "/shm/parity"
        ),
        "replica_checks": SimpleNamespace(by_target=lambda plan, ranks, segments: {}),
        "standing_alarm": _quiet, "was_drained": lambda run_dir: False,
    },
    pinned: {"files": _FILES, "read_json": smp.read_json},
    node_driver: {"ExchangeSender": smp.Sender, "_POLL_SECONDS": 0.02},
    recovery_nodes: {"Client": smp.Client},
    claims: {
        "segments_beside": lambda path: [], "check_room": _quiet, "missing": lambda paths, slots: 0,
    },
    roster_file: {
        "files": _FILES, "read_bytes": _read_bytes, "say": _say, "sizes": SimpleNamespace(SizeReport=SizeReport),
    },
    leader_search: {"ask_all": launcher.ask_all},
    local_node: {"PeerConnection": launcher.PeerConnection},
    peers: {"ask_all": launcher.ask_all, "ask": launcher.ask},
    rendezvous: {
        "LocalNode": launcher.LocalNode, "PrefixStore": lambda prefix, store: store, "say": _say,
        "round_store": SimpleNamespace(connect=launcher.connect_store),
    },
    round_join: {
        "round_store": SimpleNamespace(serve=launcher.serve_store), "say": _say, "write_note": _quiet,
    },
}  # fmt: skip

for module, names in REPLACED.items():
    for name, value in names.items():
        if not hasattr(module, name):
            raise AttributeError(f"{module.__name__} has no {name} any more: what has taken its place?")
        setattr(module, name, value)
