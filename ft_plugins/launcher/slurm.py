"""What ft-run takes from Slurm where the user gave no flags: number of nodes, endpoints, name of this node.

Invariant: only a step over several nodes, as `srun` starts it, gives anything; a flag that was given is never replaced.
Host lists are expanded one name at a time, so a huge range costs nothing. Pure.

In: an environment. Out: a `SlurmStep`, or None outside such a step. Raises ConfigError.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..base.intake import shown
from ..errors import ConfigError

_LISTED = 4  # endpoints: any one that is alive is enough
_PORT, _PORTS = 29400, 1000  # the port is derived from the id of the job, so that two jobs of a node differ
_LONGEST, _GROUPS = 1 << 16, 16  # characters of a host list, brackets of a name
_ITEM = re.compile(r"(?:[^,\[\]]|\[[0-9,-]+\])+")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


@dataclass(frozen=True)
class SlurmStep:
    """A step over several nodes, seen from one of them. `hosts`: its first ones."""

    nodes: int
    tasks: int
    hosts: tuple[str, ...]
    node: str
    job_id: int
    components: int = 1  # of a heterogeneous job: a step has those of one of them only

    @property
    def endpoints(self) -> str:
        """For --rdzv-endpoint, the same on all nodes of the job."""
        return ",".join(f"{host}:{_PORT + self.job_id % _PORTS}" for host in self.hosts)


def step_of(environment: Mapping[str, str]) -> SlurmStep | None:
    """The step in which this process runs; None if it is not in one, or in one on a single node."""
    nodes, components = _number(environment, "SLURM_STEP_NUM_NODES"), _number(environment, "SLURM_HET_SIZE")
    if not nodes or (nodes < 2 and components < 2):
        return None
    return SlurmStep(
        nodes,
        _number(environment, "SLURM_STEP_NUM_TASKS"),
        tuple(itertools.islice(expand(environment.get("SLURM_STEP_NODELIST", "")), _LISTED)),
        environment.get("SLURMD_NODENAME", ""),
        _number(environment, "SLURM_JOB_ID"),
        components,
    )


def expand(hosts: str) -> Iterator[str]:
    """The names in a host list such as `n[001-003,7],m2`, in order. Raises ConfigError."""
    if not hosts or len(hosts) > _LONGEST:
        raise _unfit(hosts[:80])
    at = 0
    while at < len(hosts):
        item = _ITEM.match(hosts, at)
        if item is None or item.end() == len(hosts) - 1 or hosts[item.end() : item.end() + 1] not in ("", ","):
            raise _unfit(hosts[:80])
        if item[0].count("[") > _GROUPS:
            raise _unfit(hosts[:80])
        yield from _names(re.split(r"\[([0-9,-]+)\]", item[0]))
        at = item.end() + 1


def _names(parts: list[str]) -> Iterator[str]:
    """`parts`: text and ranges by turns."""
    if len(parts) == 1:
        yield parts[0]
        return
    for number in _numbers(parts[1]):
        for rest in _names(parts[2:]):
            yield parts[0] + number + rest


def _numbers(ranges: str) -> Iterator[str]:
    for part in ranges.split(","):
        found = _RANGE.fullmatch(part)
        if found is None or found[2] is not None and int(found[2]) < int(found[1]):
            raise _unfit(ranges[:80])
        for number in range(int(found[1]), int(found[2] or found[1]) + 1):
            yield f"{number:0{len(found[1])}}"


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name) or "0"
    if not re.fullmatch("[0-9]{1,10}", text):
        raise ConfigError(f"{name}: expected a number, found {shown(text)}; give --nnodes and --rdzv-endpoint yourself")
    return int(text)


def _unfit(found: str) -> ConfigError:
    return ConfigError(
        f"SLURM_STEP_NODELIST: expected hosts such as n[001-003,7],m2, found {shown(found)}; give --rdzv-endpoint"
    )
