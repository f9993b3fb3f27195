"""Emulated nodes on one machine, each with its own agent, SMP, workers and, if permitted, network namespace.

Invariant: a destroyed node leaves nothing: agent, workers and SMP get SIGKILL, shared memory and run directory are
removed. Nothing of a network outlives its context, also after a failure.

In: host numbers. Out: addresses, `JobSpec` fields, and the ways to lose a node.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ft_plugins.smp.watch import liveness
from ft_plugins.snapshot.segment import paths

from .forkserver import RunningJob

_SUBNET = "10.77.0"
_GONE_SECONDS = 20.0


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=300)


@dataclass(frozen=True)
class EmulatedHost:
    """The place of a node in the network: namespace ('' for this one), address and device."""

    namespace: str
    address: str
    device: str

    def fields(self) -> dict[str, object]:
        """The fields of a `JobSpec` on this host."""
        return {
            "address": self.address,
            "namespace": self.namespace,
            "environment": {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": self.device},
        }

    def cut(self) -> None:
        """Take the link down: the node goes silent, and no connection is reset."""
        _ip("netns", "exec", self.namespace, "ip", "link", "set", self.device, "down")

    def reconnect(self) -> None:
        """Bring the link up again."""
        _ip("netns", "exec", self.namespace, "ip", "link", "set", self.device, "up")

    def throttle(self, mbit: float, burst: int = 1 << 20, queue_ms: int = 100) -> None:
        """Limit what leaves the node to `mbit` megabits per second, after a burst of `burst` bytes.

        Packets that would wait longer than `queue_ms` are dropped, as are packets queued when this is called again.
        """
        tc, limit = f"netns exec {self.namespace} tc qdisc", f"burst {burst}b latency {queue_ms}ms"
        with suppress(subprocess.CalledProcessError):  # the first call finds no qdisc
            # Replaced, not changed: a queued packet longer than the new burst would block the queue for ever.
            _ip(*f"{tc} del dev {self.device} root".split())
        _ip(*f"{tc} add dev {self.device} root tbf rate {round(1000 * mbit)}kbit {limit}".split())


LOOPBACK = [EmulatedHost("", f"127.0.0.{host}", "lo") for host in range(1, 9)]  # need no permission, cannot be cut


@contextmanager
def network(hosts: Sequence[int]) -> Iterator[list[EmulatedHost]]:
    """A bridge with one namespace per node; `hosts[i]` is the last byte of the i-th address.

    Without permission to create namespaces: loopback addresses, which cannot be cut.
    """
    stem = f"ft{os.getpid() % 100000}"
    bridge = f"{stem}b"
    names = [f"{stem}n{host}" for host in hosts]
    try:
        try:
            _ip("link", "add", bridge, "type", "bridge")
        except (OSError, subprocess.CalledProcessError):
            names = []
            yield [EmulatedHost("", f"127.77.0.{host}", "lo") for host in hosts]
            return
        _ip("link", "set", bridge, "up")
        emulated = []
        for host, name in zip(hosts, names, strict=True):
            outer, inner = f"{stem}o{host}", f"{stem}i{host}"
            _ip("netns", "add", name)
            _ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", name)
            _ip("link", "set", outer, "master", bridge, "up")
            _ip("-n", name, "addr", "add", f"{_SUBNET}.{host}/24", "dev", inner)
            _ip("-n", name, "link", "set", inner, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            emulated.append(EmulatedHost(name, f"{_SUBNET}.{host}", inner))
        yield emulated
    finally:
        for host, name in zip(hosts, names, strict=False):  # no names without permission
            for words in (("link", "del", f"{stem}o{host}"), ("netns", "del", name)):
                with suppress(subprocess.CalledProcessError):
                    _ip(*words)  # the link by itself: it outlives its namespace for a moment, and its name is needed
        with suppress(OSError, subprocess.CalledProcessError):
            _ip("link", "del", bridge)


def destroy(job: RunningJob) -> None:
    """Lose the node with all its processes and memory."""
    job.kill()
    job.wait(_GONE_SECONDS)
    run_dir = job.spec.run_dir
    alive = liveness.kill_and_wait(liveness.holder(run_dir / "smp.lock"), _GONE_SECONDS)
    if alive:
        raise TimeoutError(f"the SMP with pid {alive[0]} was still alive {_GONE_SECONDS:.0f} s after SIGKILL")
    paths.remove(job.spec.name, job.spec.node)
    if run_dir.exists():  # a node may be lost before it has made one
        shutil.rmtree(run_dir)


def freeze(job: RunningJob) -> None:
    """Stop every process of the node: it goes silent with its connections open. `destroy` still works."""
    smp = [pid for pid, _ in liveness.holder(job.spec.run_dir / "smp.lock")]
    pids = [*smp, *_descendants(job.pid), job.pid]
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)


def _descendants(pid: int) -> list[int]:
    descendants = []
    with suppress(FileNotFoundError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            descendants += [int(child), *_descendants(int(child))]
    return descendants
