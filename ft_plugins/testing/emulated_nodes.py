"""Emulated nodes on one machine: each with its own agent, SMP, workers and, where it can be made, network namespace.

Invariant: a node is destroyed whole: agent, workers and SMP by SIGKILL, its shared memory and run directory wiped, its
link gone first if it is to go silent. Nothing of a network outlives its context, also after a failure.

In: names of nodes. Out: addresses, `JobSpec` fields, and the ways in which a node is lost.
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

from ..smp import liveness
from ..snapshot import paths
from .forkserver import RunningJob

_SUBNET = "10.77.0"
_GONE_SECONDS = 20.0


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@dataclass(frozen=True)
class EmulatedHost:
    """Where a node is in the network: namespace ('' for this one), address and device."""

    namespace: str
    address: str
    device: str

    def fields(self) -> dict[str, object]:
        """The fields of a `JobSpec` that follow from it."""
        return {
            "address": self.address,
            "namespace": self.namespace,
            "environment": {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": self.device},
        }

    def cut(self) -> None:
        """Take the link down: silence, without a reset of any connection."""
        _ip("netns", "exec", self.namespace, "ip", "link", "set", self.device, "down")

    def mend(self) -> None:
        """Bring the link back."""
        _ip("netns", "exec", self.namespace, "ip", "link", "set", self.device, "up")

    def throttle(self, mbit: float, burst: int = 1 << 20, queue_ms: int = 100) -> None:
        """Let no more than `mbit` megabits per second leave the node, but for `burst` bytes after a silence; what would
        wait for more than `queue_ms` is dropped. What waits when it is called again is dropped too."""
        tc, limit = f"netns exec {self.namespace} tc qdisc", f"burst {burst}b latency {queue_ms}ms"
        with suppress(subprocess.CalledProcessError):  # there is none yet
            # not changed in its place: one packet that waits and is longer than the new burst would block it for ever
            _ip(*f"{tc} del dev {self.device} root".split())
        _ip(*f"{tc} add dev {self.device} root tbf rate {round(1000 * mbit)}kbit {limit}".split())


@contextmanager
def network(hosts: Sequence[int]) -> Iterator[list[EmulatedHost]]:
    """A bridge with one namespace a node; `hosts[i]` is the last number of the i-th address.

    Without the right to make namespaces: loopback addresses of this one, which cannot be cut.
    """
    stem = f"ft{os.getpid() % 100000}"
    bridge = f"{stem}b"
    try:
        _ip("link", "add", bridge, "type", "bridge")
    except (OSError, subprocess.CalledProcessError):
        yield [EmulatedHost("", f"127.77.0.{host}", "lo") for host in hosts]
        return
    names = [f"{stem}n{host}" for host in hosts]
    try:
        _ip("link", "set", bridge, "up")
        places = []
        for host, name in zip(hosts, names, strict=True):
            outer, inner = f"{stem}o{host}", f"{stem}i{host}"
            _ip("netns", "add", name)
            _ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", name)
            _ip("link", "set", outer, "master", bridge, "up")
            _ip("-n", name, "addr", "add", f"{_SUBNET}.{host}/24", "dev", inner)
            _ip("-n", name, "link", "set", inner, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            places.append(EmulatedHost(name, f"{_SUBNET}.{host}", inner))
        yield places
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)
        with suppress(subprocess.CalledProcessError):
            _ip("link", "del", bridge)


def destroy(job: RunningJob) -> None:
    """Lose the node with all of its processes and memory."""
    job.kill()
    job.wait(_GONE_SECONDS)
    run_dir = job.spec.run_dir
    left = liveness.kill_and_wait(liveness.holder(run_dir / "smp.lock"), _GONE_SECONDS)
    if left:
        raise TimeoutError(f"the SMP with pid {left[0]} was not gone {_GONE_SECONDS:.0f} s after SIGKILL")
    paths.remove(job.spec.name, job.spec.node)
    if run_dir.exists():  # not yet, when it is lost in the first moments
        shutil.rmtree(run_dir)


def freeze(job: RunningJob) -> None:
    """Stop every process of the node: it goes silent with all connections open. `destroy` still works."""
    smp = [pid for pid, _ in liveness.holder(job.spec.run_dir / "smp.lock")]
    pids = [*smp, *_descendants(job.pid), job.pid]
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)


def _descendants(pid: int) -> list[int]:
    found = []
    with suppress(FileNotFoundError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += [int(child), *_descendants(int(child))]
    return found
