"""Puts the world in place of what the product imports: connections, memory, files, threads. Once in a process, before
any world is made."""

import selectors
from types import SimpleNamespace

import torch.distributed.elastic.rendezvous.api  # noqa: F401  # what is foreign and heavy comes first
import xxhash  # noqa: F401

from . import shims

shims.install()

from ft_plugins.launcher.agent import watcher  # noqa: E402
from ft_plugins.launcher.rendezvous import leader_search, local_node, peers, rendezvous, round_join  # noqa: E402
from ft_plugins.launcher.rounds import roster_file  # noqa: E402
from ft_plugins.recovery import nodes as recovery_nodes  # noqa: E402
from ft_plugins.recovery import storage as recovery_storage  # noqa: E402
from ft_plugins.recovery.resize.sizes import SizeReport  # noqa: E402
from ft_plugins.smp.serve import client, job_file, leftovers, owner  # noqa: E402
from ft_plugins.smp.storage import checkpoint_schedule, checkpoints, folder_lease, persister  # noqa: E402
from ft_plugins.smp.tree import node as node_module  # noqa: E402
from ft_plugins.smp.tree import node_driver, pinned, tree_member  # noqa: E402
from ft_plugins.smp.watch import job_history  # noqa: E402
from ft_plugins.snapshot.checkpoint import checkpoint as checkpoint_module  # noqa: E402
from ft_plugins.snapshot.segment import claims  # noqa: E402
from ft_plugins.transport import loop  # noqa: E402

from . import disk, launcher, memory, network, sending, smp  # noqa: E402
from . import hub as hubs  # noqa: E402

_FILES = SimpleNamespace(write_json=smp.write_json, write=smp.write)


def _quiet(*_, **__):
    return None


def _started(pid):
    process = hubs.ACTIVE.processes.get(pid)
    return 0 if process is None else round(1e3 * process.began)


def _kill_and_wait(owners, seconds):
    for pid, began in owners:
        if began and _started(pid) == began:
            hubs.ACTIVE.world.kill(pid)
    hubs.ACTIVE.current.sleep(0.01)
    return []


def _holder(lock):
    """The SMP of the lock's machine."""
    held = lock.machine.node.smp
    return [] if held is None or not held.process.alive else [(held.process.pid, _started(held.process.pid))]


def _segment_at(path):
    return path.machine.memory[str(path)]


def _identified(pid):
    return f"{hubs.ACTIVE.current.process.machine.name}/{pid}"


def _has_ended(process):
    machine, _, pid = process.partition("/")
    return machine == hubs.ACTIVE.current.process.machine.name and not _started(int(pid))


_LIVENESS = SimpleNamespace(
    started=_started,
    identified=_identified,
    has_ended=_has_ended,
    kill_and_wait=_kill_and_wait,
    holder=_holder,
    held=lambda lock: False,
    age=lambda began: hubs.ACTIVE.now - began / 1e3,
)


def _say(words, *_, **__):
    hubs.ACTIVE.note(f"{hubs.ACTIVE.current.process.name}: {words}")


REPLACED = {
    loop: {
        "selectors": SimpleNamespace(DefaultSelector=network.Selector, EVENT_READ=selectors.EVENT_READ),
        "socket": SimpleNamespace(socketpair=network.pair),
    },
    tree_member: {"TreeLink": network.TreeLink, "packed_summary": smp.packed_summary},
    node_module: {
        "PeerEndpoint": smp.Endpoint, "ParityStore": memory.Store, "shape_of": memory.shape_of, "fetch": memory.fetch,
        "decode": memory.decode, "files": _FILES, "read_json": smp.read_json,
        "parity_path_of": lambda job, node: smp.Place(
            hubs.ACTIVE.current.process.machine, "/shm/parity"
        ),
        "replica_checks": SimpleNamespace(by_target=lambda plan, ranks, segments: {}),
        "standing_alarm": _quiet, "was_drained": lambda run_dir: False,
    },
    job_file: {"files": _FILES, "read_json": smp.read_json, "read_bytes": smp.read_bytes},
    job_history: {"files": _FILES, "read_bytes": smp.read_bytes},
    client: {"liveness": _LIVENESS, "paths": SimpleNamespace(remove=_quiet)},
    owner: {
        "files": _FILES, "read_json": smp.read_json, "liveness": _LIVENESS, "Segment": _segment_at,
        "segments": SimpleNamespace(create=memory.create),
        "paths": SimpleNamespace(
            path_of=lambda job, node, rank: smp.Place(hubs.ACTIVE.current.process.machine, f"/shm/rank{rank}")
        ),
    },
    leftovers: {"Segment": _segment_at},
    watcher: {"liveness": _LIVENESS, "read_json": smp.read_json},
    pinned: {"files": _FILES, "read_json": smp.read_json},
    node_driver: {"ExchangeSender": sending.Sender, "_POLL_SECONDS": 0.2, "OBSERVE_SECONDS": 0.2},
    recovery_nodes: {"Client": smp.Client},
    claims: {
        "segments_beside": lambda path: [], "check_room": memory.check_room, "missing": lambda paths, slots: 0,
    },
    roster_file: {
        "files": _FILES, "read_bytes": smp.read_bytes, "say": _say, "sizes": SimpleNamespace(SizeReport=SizeReport),
    },
    folder_lease: {"liveness": _LIVENESS},
    checkpoint_schedule: {"liveness": _LIVENESS, "NEAR_SECONDS": 0.03},
    persister: {
        "files": _FILES, "read_json": smp.read_json, "NEAR_SECONDS": 0.03, "within": lambda seconds, call: call(),
        "Segment": _segment_at,
    },
    checkpoints: {
        "persist": SimpleNamespace(write_rank=disk.write_rank), "staged_path": lambda run_dir, rank, layout: None,
        "print": _quiet,
    },
    checkpoint_module: {
        "unusable": disk.slowed(checkpoint_module.unusable), "publish": disk.slowed(checkpoint_module.publish),
        "withdraw": disk.slowed(checkpoint_module.withdraw), "require_own": disk.slowed(checkpoint_module.require_own),
    },
    recovery_storage: {
        "liveness": _LIVENESS, "within": lambda seconds, call: call(), "say": _say,
        "persist": SimpleNamespace(read_rank=disk.read_rank),
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
        if name != "print" and not hasattr(module, name):
            raise AttributeError(f"{module.__name__} has no {name} any more: what has taken its place?")
        setattr(module, name, value)
