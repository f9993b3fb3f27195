"""A protected job of a framework's example on several emulated nodes, which a test starts and loses.

Invariant: every node has its own agent, SMP, workers and address, as in production. All nodes read the job's secret
from a file of mode 0600. A lost node is detected after five seconds unless the run's flags say otherwise. Every wait is
bounded. However the test ends, cut links are restored and silent nodes destroyed.

In: a run, its spec maker, hosts. Out: running nodes, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from ft_plugins.events import Event, catalogue
from ft_plugins.rehearse.driver import free_port
from ft_plugins.smp.watch import liveness

from .emulated_nodes import EmulatedHost, destroy, freeze
from .forkserver import RunningJob
from .job_control import Entry, is_stopped, wait_for, wait_for_success, wait_until
from .jobs import DETECT, Jobs, has_flag, write_secret
from .runs import ExampleRun

BOUND = 560.0  # seconds for any wait; many times the duration on two idle cores
DETECT_SECONDS = "5"


def until(job: RunningJob, condition: Callable[[list[Entry]], bool], seconds: float = BOUND) -> list[Entry]:
    """Wait until `condition` holds for the events of a node, and return them.

    Raises AssertionError with the node's output if the node ends first, TimeoutError with its output and stacks.
    """
    ended = False

    def holds(lines: list[Entry]) -> bool:
        nonlocal ended
        if condition(lines):
            return True
        assert not ended, f"node {job.spec.node} ended too early; its last events: {lines[-5:]}\n{job.tail()}"
        ended = job.ended  # its last lines are read once more
        return False

    try:
        return wait_for(job.spec.run_dir / "events.jsonl", holds, seconds)
    except TimeoutError as error:
        raise TimeoutError(f"node {job.spec.node}: {error}\n{job.stacks()}") from error


class MultiNodeJob:
    """A job on `count` nodes, a context manager. It can continue with `min_nodes` of them; 0: with all of them only."""

    def __init__(
        self, jobs: Jobs, run: ExampleRun, count: int, hosts: Sequence[EmulatedHost], *flags: str, min_nodes: int = 0
    ) -> None:
        """`hosts`: those at which the nodes find each other."""
        self.run = run
        self.nodes: dict[str, RunningJob] = {}  # those that run
        self._jobs, self._hosts, self._count = jobs, hosts, count
        run.folder.mkdir(parents=True, exist_ok=True)
        self._flags = ("--ftp-secret-file", str(write_secret(run.folder)), *flags)
        port = free_port()  # a node that was cut off may still hold that of another job
        self._fields = {
            "nproc": run.ranks // count,
            "nnodes": count,
            "min_nodes": min_nodes,
            "endpoint": ",".join(f"{host.address}:{port}" for host in hosts),
            "rendezvous": "ft_plugins",
        }
        self._silent: list[RunningJob] = []
        self._cut: list[EmulatedHost] = []

    def __enter__(self) -> MultiNodeJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for lost in self._silent:
            destroy(lost)
        for host in self._cut:
            host.reconnect()

    def start_all(self, faults: Mapping[str, str] | None = None) -> None:
        """Start the nodes n0, n1 and so on, each at one of the hosts; `faults`: by node."""
        for number, host in zip(range(self._count), self._hosts, strict=False):
            self.start(f"n{number}", host, faults=(faults or {}).get(f"n{number}", ""))

    def start(self, name: str, host: EmulatedHost, *more: str, faults: str = "") -> RunningJob:
        """Start a node of the job, or a substitute. `faults` are armed on this node only."""
        spec = self.run.armed(faults).spec(**host.fields())
        fields = {k: v for k, v in vars(spec).items() if k not in ("name", "flags")}
        flags = (*spec.flags, "--ftp-node-name", name, *self._flags, *more)
        if not has_flag(flags, DETECT):
            flags += (DETECT, DETECT_SECONDS)
        spec = self._jobs(**{**fields, **self._fields, "node": name, "flags": flags})
        self.nodes[name] = self._jobs.server(self.run.framework).start(spec)
        return self.nodes[name]

    def until_committed(self, iteration: int) -> None:
        """Wait until every node has committed a version of at least this iteration to the node tier."""
        for name in self.nodes:
            self._until(name, catalogue.VERSION_COMMITTED.name, iteration)

    def until_captured(self, name: str, iteration: int) -> None:
        """Wait until a rank of the node has captured at least this iteration."""
        self._until(name, catalogue.SNAPSHOT_SEALED.name, iteration)

    def _until(self, name: str, event: str, iteration: int) -> None:
        until(self.nodes[name], lambda lines: any(e["name"] == event and e["iteration"] >= iteration for e in lines))

    def until_smp_stopped(self, name: str) -> None:
        """Wait until the SMP of a node has stopped at its fault point."""
        job = self.nodes[name]

        def stopped() -> bool:
            if any(liveness.is_stopped(*smp) for smp in liveness.holder(job.spec.run_dir / "smp.lock")):
                return True
            assert not job.ended, f"node {name} ended too early:\n{job.tail()}"
            return False

        wait_until(stopped, BOUND, lambda: f"no SMP of node {name} has stopped")

    def until_rank_stopped(self, name: str, rank: int | None = None, starts: int = 1) -> None:
        """Wait until a rank of a node has stopped itself, in the incarnation in which it attached the `starts`th time.
        None: the first rank that attached."""

        def stopped(lines: list[Entry]) -> bool:
            attached = [e for e in lines if e["name"] == catalogue.RANK_ATTACHED.name and rank in (None, e["rank"])]
            pids = [*dict.fromkeys(e["pid"] for e in attached)]
            return len(pids) >= starts and is_stopped(pids[-1] if rank is not None else pids[0])

        until(self.nodes[name], stopped)

    def destroy(self, name: str) -> None:
        """Lose a node with all its processes and memory."""
        destroy(self.nodes.pop(name))

    def freeze(self, name: str) -> None:
        """Stop all processes of a node, with their connections open."""
        freeze(self.nodes[name])
        self._silent.append(self.nodes.pop(name))

    def cut(self, name: str, host: EmulatedHost) -> None:
        """Take down the link of a node, which is on `host`."""
        self._cut.append(host)
        host.cut()
        self._silent.append(self.nodes.pop(name))

    def wait(self) -> None:
        """Wait until every node has succeeded. Raises AssertionError with the output of a node that failed."""
        wait_for_success(self.nodes, BOUND)

    def refusals(self) -> list[str]:
        """Wait until every node has been refused. Returns the reasons."""
        outcomes = {name: job.wait(BOUND) for name, job in self.nodes.items()}
        assert {each["status"] for each in outcomes.values()} == {"refused"}, outcomes
        return [each["reason"] for each in outcomes.values()]

    def events(self, name: str) -> list[Event]:
        """The events of that name on all running nodes."""
        return [event for job in self.nodes.values() for event in job.events(name)]
