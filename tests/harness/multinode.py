"""A protected job of a framework's example on several emulated nodes, which a test starts and loses.

Invariant: every node has its own agent, SMP, workers and address, as in production. All nodes read the job's secret
from a file of mode 0600. A lost node is detected after five seconds unless the run's flags say otherwise.

In: a run, the fork server, hosts. Out: running nodes, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from ft_plugins.events import catalogue

from .emulated_nodes import EmulatedHost, destroy
from .forkserver import ForkServer, JobSpec, RunningJob
from .golden import ComparableRun
from .job_control import Entry, wait_for, wait_for_success

BOUND = 560.0  # seconds for any wait; many times the duration on two idle cores
DETECT, DETECT_SECONDS = "--ftp-detect-seconds", "5"
HANG = "--ftp-hang-seconds"

Spec = Callable[..., JobSpec]


def has_flag(flags: Sequence[str], name: str) -> bool:
    """Whether the flag `name` is given, as a word or before a '='."""
    return any(word.split("=")[0] == name for word in flags)


def until(job: RunningJob, condition: Callable[[list[Entry]], bool], seconds: float = BOUND) -> list[Entry]:
    """Wait until `condition` holds for the events of a node, and return them.

    Raises AssertionError with the node's output if the node ends first, TimeoutError with its output and stacks.
    """
    ended = False

    def holds(lines: list[Entry]) -> bool:
        nonlocal ended
        if condition(lines):
            return True
        assert not ended, f"node {job.spec.node} ended too early:\n{job.tail()}"
        ended = job.ended  # its last lines are read once more
        return False

    try:
        return wait_for(job.spec.run_dir / "events.jsonl", holds, seconds)
    except TimeoutError as error:
        raise TimeoutError(f"node {job.spec.node}: {error}\n{job.stacks()}") from error


class ExampleRun(ComparableRun, Protocol):
    """A run of an example of any framework. `armed` returns the same run with these faults, if any."""

    @property
    def folder(self) -> Path: ...

    def spec(self, **fields: object) -> JobSpec: ...

    def armed(self, faults: str) -> ExampleRun: ...


class MultiNodeJob:
    """A job of `ranks` on `count` nodes. It can continue with `min_nodes`; 0: only with all of them."""

    def __init__(
        self,
        server: ForkServer,
        jobs: Spec,
        run: ExampleRun,
        ranks: int,
        count: int,
        endpoint: str,
        *flags: str,
        min_nodes: int = 0,
    ) -> None:
        self.run = run
        self.nodes: dict[str, RunningJob] = {}
        self._server = server
        self._jobs = jobs
        self._flags = flags
        self._fields = {
            "nproc": ranks // count,
            "nnodes": count,
            "min_nodes": min_nodes,
            "endpoint": endpoint,
            "rendezvous": "ft_plugins",
        }
        self._secret: Path = run.folder / "secret"
        self._secret.write_text("secret of an emulated job")
        self._secret.chmod(0o600)

    def start(self, name: str, host: EmulatedHost, *more: str, faults: str = "") -> RunningJob:
        """Start a node of the job, or a substitute. `faults` are armed on this node only."""
        spec = self.run.armed(faults).spec(**host.fields())
        fields = {k: v for k, v in vars(spec).items() if k not in ("name", "flags")}
        flags = (*spec.flags, "--ftp-node-name", name, "--ftp-secret-file", str(self._secret), *self._flags, *more)
        if not has_flag(flags, DETECT):
            flags += (DETECT, DETECT_SECONDS)
        spec = self._jobs(**{**fields, **self._fields, "node": name, "flags": flags})
        self.nodes[name] = self._server.start(spec)
        return self.nodes[name]

    def until_committed(self, iteration: int) -> None:
        """Wait until every node has committed a version of at least this iteration to the node tier."""
        for job in self.nodes.values():
            until(
                job,
                lambda lines: any(
                    e["name"] == catalogue.VERSION_COMMITTED.name and e["iteration"] >= iteration for e in lines
                ),
            )

    def until_captured(self, name: str, iteration: int) -> None:
        """Wait until a rank of the node has captured at least this iteration."""
        until(
            self.nodes[name],
            lambda lines: any(
                e["name"] == catalogue.SNAPSHOT_SEALED.name and e["iteration"] >= iteration for e in lines
            ),
        )

    def destroy(self, name: str) -> None:
        """Lose a node with all its processes and memory."""
        destroy(self.nodes.pop(name))

    def wait(self) -> None:
        """Wait until every node has succeeded. Raises AssertionError with the output of a node that failed."""
        wait_for_success(self.nodes, BOUND)
