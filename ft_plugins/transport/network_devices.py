"""The network devices of this node, and whether all that name one name the same.

`--ftp-interface` is of protection, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME of torch's process groups: where they
differ, parts of a job use different networks.

Invariant: nothing is concluded where the devices are unknown. In: what the job's command and environment say. Out:
`IfnameProblem`.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

GLOO, NCCL = IFNAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
INTERFACE = "--ftp-interface"


@dataclass(frozen=True)
class NetworkDevice:
    """A network device of this node, and its IP addresses."""

    name: str
    up: bool
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class IfnameProblem:
    """`variable` has the value `names`, which does not name the `device` that `other` names; `device` is None if it
    names no device of this node."""

    variable: str
    names: str
    device: str | None = None
    other: str = INTERFACE


def network_devices() -> tuple[NetworkDevice, ...]:
    """The devices of this node."""
    import psutil  # slow

    state, families = psutil.net_if_stats(), (socket.AF_INET, socket.AF_INET6)
    return tuple(
        NetworkDevice(
            name,
            name in state and state[name].isup,
            tuple(entry.address for entry in entries if entry.family in families),
        )
        for name, entries in psutil.net_if_addrs().items()
    )


def ifnames_of(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that name devices, those that are set."""
    return {name: environment[name] for name in IFNAMES if environment.get(name)}


def chosen_device(interface: str, devices: Sequence[NetworkDevice]) -> NetworkDevice | None:
    """The device of this name or address."""
    return next((each for each in devices if interface == each.name or interface in each.addresses), None)


def usable_devices(devices: Sequence[NetworkDevice]) -> str:
    """The names of those that can be chosen, for people."""
    return ", ".join(each.name for each in devices if each.up and each.addresses) or "none"


def ifname_problems(
    interface: str | None, environment: Mapping[str, str], devices: Sequence[NetworkDevice]
) -> tuple[IfnameProblem, ...]:
    """Which variables name no device, or another one than `interface` does; without one, than gloo's variable does.
    Pure."""
    named = {
        variable: [each.name for each in devices if _names_device(names, each.name, exact=variable == GLOO)]
        for variable, names in environment.items()
    }
    other, wanted = GLOO, named.get(GLOO, [])
    if interface:
        device = chosen_device(interface, devices)
        other, wanted = INTERFACE, [device.name] if device else []
    problems = []
    for variable, names in environment.items():
        if devices and not named[variable]:
            problems.append(IfnameProblem(variable, names))
        elif wanted and not set(wanted) & set(named[variable]):
            problems.append(IfnameProblem(variable, names, wanted[0], other))
    return tuple(problems)


def interfaces_differ(interface: str | None, environment: Mapping[str, str], devices: Sequence[NetworkDevice]) -> str:
    """One sentence on what names different devices, and what to do; '' if nothing does. Pure."""
    problems = ifname_problems(interface, environment, devices)
    if not problems:
        return ""
    said = [f"{INTERFACE} {interface}"] if interface else []
    said += [f"{variable}={names}" for variable, names in environment.items()]
    absent = [each.variable for each in problems if each.device is None]
    if absent:
        words = f"{' and '.join(absent)} names no device of this node; name one of {usable_devices(devices)}"
        return f"{', '.join(said)}: {words}"
    remedy = " ".join(f"{each.variable}={each.device}" for each in problems)
    return (
        f"{', '.join(said)} name different devices, so parts of the job use different networks; "
        f"set {remedy}, if that is not meant"
    )


def _names_device(names: str, device: str, exact: bool) -> bool:
    """Whether a list of devices has this one. NCCL's has prefixes; '=' makes them exact, '^' excludes."""
    excluded = not exact and names.startswith("^")
    rest = names.removeprefix("^") if excluded else names
    whole = exact or rest.startswith("=")
    listed = [name.strip() for name in rest.removeprefix("=").split(",")]
    return any(device == name if whole else device.startswith(name) for name in listed if name) != excluded
