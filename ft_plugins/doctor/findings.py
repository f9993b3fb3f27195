"""Judge the facts of a node: what would stop or harm a job, why, and what to do. Pure.

In: what the job's command says, and facts. Out: findings, the gravest first; an exit status.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from ..snapshot.segment.paths import SHM, MemoryLimit, sizes_text
from ..transport.door import RESERVE
from ..transport.network_devices import chosen_device, ifname_problems, usable_devices
from ..transport.own_address import only_local
from .host_facts import CHECKPOINTS, DoctorJob, EndpointPort, HostFacts, ResolvedName

_FEW_DESCRIPTORS = 4 * RESERVE
_DOCKERS_SHM = 64 << 20  # bytes, by default
_SECRET = "write one with: (umask 077; head -c 32 /dev/urandom | base64 > FILE), and copy it to all nodes"

_LOCAL = "set TMPDIR, and XDG_RUNTIME_DIR, to folders of yours on a local disk with room"
_SHARED = "give --reft-checkpoint-dir a folder that all nodes share and may write to"


class Grade(IntEnum):
    """How grave a finding is."""

    NOTE = 0
    WARNING = 1
    FAILURE = 2


@dataclass(frozen=True)
class NodeFinding:
    """Something about a node: what was found, why it matters to a job, what to do."""

    grade: Grade
    what: str
    why: str
    do: str


def findings(job: DoctorJob, facts: HostFacts) -> tuple[NodeFinding, ...]:
    """What is to be said about a node for that job, the gravest first."""
    looks = (_memory, _descriptors, _secret, _names, _ports, _interface, _ifnames, _folders, _versions, _system)
    found = [finding for look in looks for finding in look(job, facts)]
    return tuple(sorted(found, key=lambda finding: -finding.grade))


def exit_status(found: Sequence[NodeFinding]) -> int:
    """0: fine; 1: warnings; 2: the job will not work."""
    return int(max((finding.grade for finding in found), default=Grade.NOTE))


def _memory(job: DoctorJob, facts: HostFacts) -> Iterator[NodeFinding]:
    if facts.limits is None:
        yield NodeFinding(
            Grade.FAILURE, f"{SHM} cannot be examined", "snapshots are kept there", f"mount a tmpfs at {SHM}"
        )
    elif job.need is None:
        yield NodeFinding(
            Grade.NOTE, "the host memory that the job will claim is unknown", "so it is not compared with what is free",
            "give --parameters, or see 'ft-plugins plan memory'",
        )  # fmt: skip
        for limit in facts.limits[:1]:
            if limit.nbytes <= _DOCKERS_SHM:
                yield NodeFinding(
                    Grade.WARNING, f"{limit.where} has only {sizes_text(limit.nbytes)[0]} in all",
                    "that is too small for the snapshots of almost any model", limit.remedy,
                )  # fmt: skip
    else:
        yield from (_too_little(limit, job.need) for limit in facts.limits if limit.free < job.need)


def _too_little(limit: MemoryLimit, need: int) -> NodeFinding:
    needed, free, total = sizes_text(need, limit.free, limit.nbytes)
    return NodeFinding(
        Grade.FAILURE, f"{limit.where} has {free} free, of {total}",
        f"protection claims {needed} there when the job starts, unless it holds that already",
        f"{limit.remedy}; or remove what ended jobs have left with 'ft-plugins sweep'",
    )  # fmt: skip


def _descriptors(job: DoctorJob, facts: HostFacts) -> Iterator[NodeFinding]:
    if facts.descriptors is not None and facts.descriptors < _FEW_DESCRIPTORS:
        yield NodeFinding(
            Grade.WARNING, f"a process may have only {facts.descriptors} files and sockets open (hard limit)",
            "each node has connections to others, and segments and logs are files too",
            f"raise the hard limit to {_FEW_DESCRIPTORS} or more (ulimit -Hn, limits.conf, docker: --ulimit nofile)",
        )  # fmt: skip


def _secret(job: DoctorJob, facts: HostFacts) -> Iterator[NodeFinding]:
    if job.secret_file is None and (others := job.between_machines):
        yield NodeFinding(
            Grade.FAILURE, f"no --ftp-secret-file, and other machines can reach the endpoint {others[0]}",
            "any of them could take part in the job or end it, so it is refused", f"give --ftp-secret-file; {_SECRET}",
        )  # fmt: skip
    if facts.secret_problem:
        what, _, do = facts.secret_problem.rpartition("; ")
        yield NodeFinding(Grade.FAILURE, what or do, "nodes could not authenticate each other", do if what else _SECRET)


def _names(job: DoctorJob, facts: HostFacts) -> Iterator[NodeFinding]:
    for name in facts.endpoints:
        if not name.addresses:
            yield NodeFinding(
                Grade.WARNING if any(other.addresses for other in facts.endpoints) else Grade.FAILURE,
                f"the endpoint's host {name.name} {_unresolved(name)}",
                "this node does not find the others by it",
                "correct --rdzv-endpoint, /etc/hosts or DNS, or give an address",
            )  # fmt: skip
    if facts.address and not facts.address.addresses:
        yield NodeFinding(
            Grade.FAILURE, f"--local-addr {facts.address.name} {_unresolved(facts.address)}",
            "the other nodes would be given it as the address of this one", "give an address of this node, or drop it",
        )  # fmt: skip
    known = list(dict.fromkeys(address for name in facts.own_names for address in name.addresses or ()))
    named = job.interface and facts.environment.get("GLOO_SOCKET_IFNAME")
    if job.nodes > 1 and job.between_machines and facts.own_names and all(map(only_local, known)) and not named:
        names = " or ".join(name.name for name in facts.own_names)
        yield NodeFinding(
            Grade.WARNING, f"the name of this node ({names}) resolves to {', '.join(known) or 'nothing'}",
            "gloo then takes an address that no other node reaches",
            "name the device between the nodes by --ftp-interface and GLOO_SOCKET_IFNAME, or correct /etc/hosts",
        )  # fmt: skip

    first = {each.name: each.addresses[0] for each in (*facts.own_names, *facts.endpoints) if each.addresses}
    kinds = {":" in address for address in first.values() if not only_local(address)}
    if len(kinds) > 1 < job.nodes and "GLOO_SOCKET_IFNAME" not in facts.environment:
        yield NodeFinding(
            Grade.WARNING, "; ".join(f"{name} resolves to {address}" for name, address in first.items()),
            "one is of IPv4, one of IPv6, and gloo does not connect the two",
            "set GLOO_SOCKET_IFNAME to the device between the nodes, or correct /etc/hosts or DNS",
        )  # fmt: skip


def _unresolved(name: ResolvedName) -> str:
    return "does not resolve" if name.addresses == () else "was not resolved in time"


def _ports(job: DoctorJob, facts: HostFacts) -> Iterator[NodeFinding]:
    yield from (finding for port in facts.ports for finding in _port(port))


def _port(port: EndpointPort) -> Iterator[NodeFinding]:
    match port.state:
        case "taken":
            yield NodeFinding(
                Grade.FAILURE, f"this node cannot listen at the endpoint {port.endpoint} ({port.reason})",
                "the rendezvous listens there, unless what listens is this job's own ft-run",
                f"end what listens there (ss -ltnp 'sport = :{port.endpoint.port}'), or choose another port",
            )  # fmt: skip
        case "silent":
            yield NodeFinding(
                Grade.WARNING, f"the endpoint {port.endpoint} gives no answer",
                "its node is down, or a firewall or a missing route is between",
                "check that node, and let the port through",
            )  # fmt: skip
        case "refuses":
            yield NodeFinding(
                Grade.NOTE, f"nothing listens at the endpoint {port.endpoint}",
                "its host answers; the job may not run yet",
                "nothing, if the job has not started there",
            )  # fmt: skip


def _interface(job: DoctorJob, facts: HostFacts) -> Iterator[NodeFinding]:
    if job.interface is None or facts.devices is None:
        return
    device = chosen_device(job.interface, facts.devices)
    if device is None:
        problem = "no device or address of this node"
    elif not device.up:
        problem = f"the device {device.name} is down"
    elif not device.addresses:
        problem = f"the device {device.name} has no IP address"
    else:
        return
    yield NodeFinding(
        Grade.FAILURE, f"--ftp-interface {job.interface}: {problem}", "this node would have no address for the others",
        f"name one of {usable_devices(facts.devices)}, or bring it up",
    )  # fmt: skip


def _ifnames(job: DoctorJob, facts: HostFacts) -> Iterator[NodeFinding]:
    devices = facts.devices or ()
    for each in ifname_problems(job.interface, facts.environment, devices):
        said = f"{each.variable}={each.names}"
        if each.device is None:
            yield NodeFinding(
                Grade.FAILURE, f"{said} names no device of this node", "training would have no network",
                f"name one of {usable_devices(devices)}, or unset it",
            )  # fmt: skip
        else:
            yield NodeFinding(
                Grade.WARNING, f"{said} does not name {each.device}, which {each.other} does",
                "parts of the job would use different networks",
                f"set {each.variable}={each.device}, if that is not meant",
            )  # fmt: skip


def _folders(job: DoctorJob, facts: HostFacts) -> Iterator[NodeFinding]:
    for folder in facts.folders:
        if folder.problem:
            yield NodeFinding(
                Grade.FAILURE, f"the folder of {folder.role}{folder.path and f', {folder.path},'} cannot be used",
                folder.problem, _SHARED if folder.role == CHECKPOINTS else _LOCAL,
            )  # fmt: skip


def _versions(job: DoctorJob, facts: HostFacts) -> Iterator[NodeFinding]:
    for text in facts.too_old:
        yield NodeFinding(Grade.FAILURE, text, "older versions lack what protection needs", "install a newer one")
    for text in facts.untested:
        yield NodeFinding(
            Grade.WARNING, text, "what changed in it may not be followed", "rehearse the job first: ft-plugins rehearse"
        )


def _system(job: DoctorJob, facts: HostFacts) -> Iterator[NodeFinding]:
    if facts.removes_ipc:
        yield NodeFinding(
            Grade.WARNING, "systemd removes this user's shared memory at the last logout (RemoveIPC)",
            "the snapshots of a job that trains on would be gone",
            "set RemoveIPC=no in /etc/systemd/logind.conf, or run: loginctl enable-linger",
        )  # fmt: skip
    if facts.ptrace_scope and facts.py_spy:
        yield NodeFinding(
            Grade.NOTE, f"py-spy may not read other processes (kernel.yama.ptrace_scope is {facts.ptrace_scope})",
            "stacks of a hang are then those that the ranks write themselves",
            "sysctl kernel.yama.ptrace_scope=0, if wanted",
        )  # fmt: skip
