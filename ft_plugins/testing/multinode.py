"""A protected job of a framework's example on several emulated nodes, which a test starts and loses.

Invariant: every node is what a user has: an agent, an SMP, workers, an address of its own. All nodes read the job's
secret from a file of mode 0600, and a lost node is detected after five seconds unless the run's flags say otherwise.

In: a run, the fork server, hosts. Out: running nodes, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from ..events import catalogue
from .emulated_nodes import EmulatedHost, destroy
from .forkserver import ForkServer, JobSpec, RunningJob
from .golden import Described
from .job_control import Entry, wait_for

BOUND = 560.0  # seconds for any wait: many times what it takes on two idle cores
DETECT, DETECT_SECONDS = "--ftp-detect-seconds", "5"

Spec = Callable[..., JobSpec]


def has_flag(flags: Sequence[str], name: str) -> bool:
    """Whether the flag of that name is among them, as a word or before a '='."""
    return any(word.split("=")[0] == name for word in flags)


def until(job: RunningJob, condition: Callable[[list[Entry]], bool], seconds: float = BOUND) -> list[Entry]:
    """The events of a node once `condition` holds of them. Raises AssertionError with the node's output if it ends
    before that, TimeoutError."""
    over = False

    def holds(lines: list[Entry]) -> bool:
        nonlocal over
        if condition(lines):
            return True
        assert not over, f"node {job.spec.node} has ended before:\n{job.tail()}"
        over = job.ended  # its last lines are read once more
        return False

    return wait_for(job.spec.run_dir / "events.jsonl", holds, seconds)


class ExampleRun(Described, Protocol):
    """A run of an example, whichever framework it uses. `armed` is the same run with these faults, if any."""

    @property
    def folder(self) -> Path: ...

    def spec(self, **fields: object) -> JobSpec: ...

    def armed(self, faults: str) -> ExampleRun: ...


class MultiNodeJob:
    """A job of `ranks` on `count` nodes; it can go on with `min_nodes`, with all of them unless given."""

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
        self._secret.write_text("what the nodes of this job know")
        self._secret.chmod(0o600)

    def start(self, name: str, place: EmulatedHost, *more: str, faults: str = "") -> RunningJob:
        """Start a node of the job, or a substitute; `faults` are armed on this node alone."""
        spec = self.run.armed(faults).spec(**place.fields())
        known = {k: v for k, v in vars(spec).items() if k not in ("name", "flags")}
        flags = (*spec.flags, "--ftp-node-name", name, "--ftp-secret-file", str(self._secret), *self._flags, *more)
        if not has_flag(flags, DETECT):
            flags += (DETECT, DETECT_SECONDS)
        spec = self._jobs(**{**known, **self._fields, "node": name, "flags": flags})
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
        """Lose a node with all of its processes and memory."""
        destroy(self.nodes.pop(name))

    def wait(self) -> None:
        """Wait until every node has ended in order. Raises AssertionError with the output of one that did not."""
        for name, job in self.nodes.items():
            try:
                outcome = job.wait(BOUND)
            except TimeoutError as error:
                others = [f"node {other}:\n{each.stacks()}" for other, each in self.nodes.items() if other != name]
                raise TimeoutError("\n\n".join([f"node {name}: {error}", *others])) from error
            assert outcome["status"] == "succeeded", job.tail()
