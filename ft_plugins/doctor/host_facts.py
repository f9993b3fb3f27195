"""Gather what a node is like before a job: memory, names, ports, devices, folders, settings of the system.

Invariant: nothing is changed, and each look takes a bounded time; what the system does not say is None. In: what the
job's command says. Out: `HostFacts`.
"""

from __future__ import annotations

import os
import pwd
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import psutil

from ..adapters.framework_versions import judged_versions
from ..base.intake import within
from ..config import run_root
from ..errors import ConfigError, FtError
from ..launcher.rendezvous.endpoint import Endpoint, is_loopback
from ..smp.watch import liveness
from ..snapshot.segment.paths import MemoryLimit, memory_limits
from ..transport.calls import read_secret
from ..transport.door import ENOUGH
from ..transport.network_devices import NetworkDevice, ifnames_of, network_devices
from ..transport.own_address import address_of, only_local

SECONDS = 3.0  # for one look
CHECKPOINTS = "checkpoints"  # the role of a folder
PortState = Literal["free", "taken", "answers", "refuses", "silent"]
T = TypeVar("T")


@dataclass(frozen=True)
class DoctorJob:
    """What the command of a job says about its nodes. `need`: bytes of host memory on each; None if unknown."""

    nodes: int = 1
    endpoints: tuple[Endpoint, ...] = ()
    secret_file: str | None = None
    interface: str | None = None
    need: int | None = None
    address: str | None = None  # --local-addr
    checkpoints: Path | None = None  # the folder of the job's checkpoints

    @property
    def between_machines(self) -> tuple[Endpoint, ...]:
        """The endpoints that other machines can reach; none if all nodes are emulated on this one."""
        return tuple(each for each in self.endpoints if not is_loopback(each.host))


@dataclass(frozen=True)
class ResolvedName:
    """The addresses of a name, none if it has none; None if no answer came in time."""

    name: str
    addresses: tuple[str, ...] | None


@dataclass(frozen=True)
class EndpointPort:
    """The port of an endpoint: free or taken on this node, or what another node says when it is called. `reason`: why
    this node cannot listen there."""

    endpoint: Endpoint
    state: PortState
    reason: str = ""


@dataclass(frozen=True)
class UsedFolder:
    """A folder that the job uses. `problem`: why it cannot; '' if it can."""

    role: str
    path: str
    problem: str


@dataclass(frozen=True)
class HostFacts:
    """A node before a job. None: unknown."""

    host: str
    limits: tuple[MemoryLimit, ...] | None  # the first: of /dev/shm
    descriptors: int | None  # that a process of the job may have open; ft-run raises the soft limit
    secret_problem: str  # why the file of the secret is refused; '' if it is not, or none is given
    endpoints: tuple[ResolvedName, ...]
    own_names: tuple[ResolvedName, ...]
    ports: tuple[EndpointPort, ...]
    devices: tuple[NetworkDevice, ...] | None
    environment: Mapping[str, str]  # as `ifnames_of` gives it
    folders: tuple[UsedFolder, ...]
    ptrace_scope: int | None  # Yama's
    py_spy: bool
    too_old: tuple[str, ...]
    untested: tuple[str, ...]
    removes_ipc: bool | None  # systemd removes shared memory of this user at the last logout
    address: ResolvedName | None = None  # --local-addr


def gather(job: DoctorJob, environ: Mapping[str, str] = os.environ) -> HostFacts:
    """The facts of this node for that job."""
    devices = _or_none(network_devices)
    own = {address for device in devices or () for address in device.addresses}
    endpoints = tuple(_resolved(name) for name in dict.fromkeys(each.host for each in job.endpoints))
    addresses = {each.name: each.addresses or () for each in endpoints}
    names = dict.fromkeys([socket.gethostname(), _or_none(socket.getfqdn) or ""]) if job.nodes > 1 else ()
    too_old, untested = judged_versions()
    folders = [_checked_folder("temporary files", _temporary), _checked_folder("run directories", _run_root)]
    if (checkpoints := job.checkpoints) is not None:
        folders.append(_checked_folder(CHECKPOINTS, lambda: _writable(checkpoints), str(checkpoints)))
    return HostFacts(
        host=socket.gethostname(),
        limits=_or_none(lambda: tuple(memory_limits())),
        descriptors=_descriptors(),
        secret_problem=_secret_problem(job.secret_file),
        endpoints=endpoints,
        own_names=tuple(_resolved(name) for name in names if name not in ("", "localhost")),
        ports=tuple(
            _port(each, addresses[each.host], own) for each in job.endpoints if each.port and addresses[each.host]
        ),
        devices=devices,
        environment=ifnames_of(environ),
        folders=tuple(folders),
        ptrace_scope=_or_none(lambda: int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())),
        py_spy=bool(shutil.which("py-spy") or Path(sys.executable).with_name("py-spy").exists()),
        too_old=too_old,
        untested=untested,
        removes_ipc=_or_none(lambda: removes_ipc(Path("/"), os.getuid())),
        address=_resolved(job.address) if job.address else None,
    )


def removes_ipc(root: Path, user: int) -> bool:
    """Whether systemd, of the system at `root`, removes what a user has in /dev/shm when the user's last session ends.
    Not of system users, nor of users that linger. Raises OSError, KeyError for a user without a name."""
    if user < 1000 or not (root / "run/systemd/system").exists():
        return False
    if (root / "var/lib/systemd/linger" / pwd.getpwuid(user).pw_name).exists():
        return False
    folders = [root / folder / "systemd" for folder in ("usr/lib", "run", "etc")]
    parts = {file.name: file for folder in folders for file in folder.glob("logind.conf.d/*.conf")}
    whole = [file for folder in folders if (file := folder / "logind.conf").exists()][-1:]
    value = "yes"  # systemd's default
    for file in [*whole, *(parts[name] for name in sorted(parts))]:
        for line in file.read_text(errors="replace").splitlines():
            key, _, text = line.strip().partition("=")
            if key.strip() == "RemoveIPC":
                value = text.strip().lower() or "yes"
    return value not in ("no", "false", "off", "0", "n", "f")


def _or_none(look: Callable[[], T]) -> T | None:
    with suppress(OSError, ValueError, KeyError, psutil.Error):
        return within(SECONDS, look)
    return None


def _descriptors() -> int:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)


def _secret_problem(file: str | None) -> str:
    try:
        if file is not None:
            within(SECONDS, lambda: read_secret(Path(file)))
    except (ConfigError, TimeoutError) as error:
        return str(error)
    return ""


def _resolved(name: str) -> ResolvedName:
    try:
        found = within(SECONDS, lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except TimeoutError:
        return ResolvedName(name, None)
    except (OSError, UnicodeError):
        return ResolvedName(name, ())
    return ResolvedName(name, tuple(dict.fromkeys(address_of(entry[4]) for entry in found)))


def _port(endpoint: Endpoint, addresses: tuple[str, ...], own: set[str]) -> EndpointPort:
    here = [address for address in addresses if address in own or only_local(address)]
    if here:
        problems = [_bind_problem(address, endpoint.port) for address in here]
        return EndpointPort(endpoint, "taken" if all(problems) else "free", problems[0] if all(problems) else "")
    state: PortState = "silent"
    for address in addresses:
        try:
            with closing(socket.create_connection((address, endpoint.port), SECONDS / len(addresses))):
                return EndpointPort(endpoint, "answers")
        except ConnectionRefusedError:
            state = "refuses"
        except OSError:
            pass
    return EndpointPort(endpoint, state)


def _bind_problem(address: str, port: int) -> str:
    """Why this node cannot listen there; '' if it can. The socket is bound and does not listen, so it is in the way of
    no other process that does or looks."""
    try:
        with closing(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(socket.getaddrinfo(address, port, probe.family, probe.type)[0][4])
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _checked_folder(role: str, look: Callable[[], str], path: str = "") -> UsedFolder:
    try:
        return UsedFolder(role, within(SECONDS, look, "the file system"), "")
    except (OSError, FtError) as error:
        return UsedFolder(role, path or str(getattr(error, "filename", None) or ""), str(error))


def _temporary() -> str:
    """The folder of temporary files. Raises OSError if nothing can be written there."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"x")
    return tempfile.gettempdir()


def _writable(folder: Path) -> str:
    """The folder. Raises OSError if nothing can be written there or, before it exists, where it would be made."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    with tempfile.TemporaryFile(dir=there):
        return str(folder)


def _run_root() -> str:
    """The folder of run directories. Raises ConfigError, BusyError, OSError if files there cannot be written or
    locked."""
    lock = run_root() / f"doctor-{os.getpid()}.lock"
    try:
        descriptor = liveness.acquire(lock)
        if descriptor is not None:
            os.close(descriptor)
    finally:
        lock.unlink(missing_ok=True)
    return str(lock.parent)
