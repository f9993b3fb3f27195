"""Measure the downtime and the lost iterations of a failure: one trainer, one node, two nodes.

    python benchmarks/recovery.py [--quick] [--namespaces] [--only nodes|spare|frameworks] [--kills N] [--every K]

Each emulated node has an agent, an SMP and one rank whose state (256 MiB) shows its version.
Processes, signals and sockets are real; torch only. A failure is injected at a random time within an iteration after
a commit, and a substitute is started as soon as a lost node is gone. The columns, in seconds, end to end:

    detect     the failure -> the first event of an agent or SMP that reports it. A computing trainer notices a lost
               peer at its next collective, so up to an iteration's compute (3 s) passes
    restart    -> every rank (imports excluded) asks its SMP for versions: new round, processes, a fresh node's memory
    plan       -> the recovery plan is made, and own slots are verified
    rebuild    transfer and decoding of the lost slots, digests verified
    load       -> tensors and counters are restored         open    -> protected again, the step may begin
    total      the failure -> the last rank begins its step

Nodes use addresses of the loopback device, as does the baseline (`baselines.loopback`, measured before and after each
failure). `load_x_loopback`: bytes per second that the rebuild of one lost node reads over sockets, in multiples of the
baseline. `two_load_x_loopback`: the bytes of both slots over the time in which either was rebuilt, since their nodes
share these cores. --namespaces connects the nodes by a bridge, which reaches about half of the baseline.

Then, for Megatron and DeepSpeed: a rank of the quickstart's job of 8 is killed several times, under ft-run and, in the
same run, under torchrun with the framework's own checkpoints every K iterations (`workloads/restart_times.py`). The
phases of ft-run's restarts are those of `ft-plugins report`; `recovery_x`: how much longer torchrun takes from the kill
until the iteration in which it came is done, `restart_x`: until any iteration is done, lost ones not counted.

And a node of Megatron's example on two nodes is lost while a warm spare waits: `spare_seconds` until the next iteration
is done (`workloads/spare_times.py`).

Claims: load_x_loopback >= 0.5, two_load_x_loopback >= 0.4; lost_iterations <= 1 from the process tier and <= 2 from the
node tier; recovery_x >= 5 of both frameworks.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from baselines import loopback
from ft_plugins.events import Event, catalogue
from ft_plugins.snapshot.segment.paths import parity_path_of, segments_of
from harness import fills
from harness.emulated_nodes import EmulatedHost, destroy, network
from harness.forkserver import ForkServer, JobSpec, RunningJob
from harness.job_control import entries, wait_for
from workloads import restart_times, spare_times
from workloads.running import PROGRESS, Figures, arguments, run, say

BOUND = 120.0  # seconds, for any wait
MIB, COMPUTE = 256, 3.0  # state of a rank, seconds of an iteration
DETECTION_EVENTS = (  # the last one if agents start another round at once
    *(catalogue.WORKER_FAILED.name, catalogue.NODE_LOST.name, catalogue.WORKERS_KILLED.name),
    catalogue.INCARNATION_FENCED.name,
)
STEPS = ("detect", "restart", "plan", "rebuild", "load", "open", "total")
LOST = ("n1", "n2", "n0")  # in this order, each after the job is protected again
ENDLESS = 1_000_000  # iterations
AFTER = 2  # iterations after the last failure
PORT = 29650


def rank(argv: list[str]) -> None:
    """The entry of each rank: run `fills` up to the iteration in the file `argv[0]`, if that exists."""
    goal = Path(argv[0])
    iterations = int(goal.read_text()) if goal.exists() else ENDLESS
    fills.main([*argv[1:], "--iterations", str(iterations)])


@dataclass(frozen=True)
class Incident:
    """The steps of one recovery in seconds, the lost iterations, and the rates at which lost slots were read."""

    name: str
    detect: float
    restart: float
    plan: float
    rebuild: float  # 0 if every rank had its slot in its own segment
    load: float
    open: float
    total: float
    lost: int
    tier: str
    rates: tuple[float, ...]  # bytes per second, of each rebuilt slot
    rate: float  # of all rebuilt slots together
    loopback: float  # baseline, bytes per second

    def row(self) -> str:
        parts = " ".join(f"{getattr(self, name):8.2f}" for name in STEPS)
        read = "-"
        if self.rate:
            read = f"{self.rate / 1e9:.2f} GB/s, {self.rate / self.loopback:.2f} x {self.loopback / 1e9:.2f}"
        return f"{self.name:<30} {parts} {self.lost:5}  {self.tier:<8} {read}"


HEAD = f"{'seconds':<30} {' '.join(f'{name:>8}' for name in STEPS)}  lost  tier     rebuilt slots: read, x loopback"


class PeakMemory:
    """The peak memory of a node per share: its shared memory and the SMP's own memory."""

    def __init__(self) -> None:
        self.peak_x_share = 0.0

    def sample(self, job: RunningJob, share: int) -> None:
        """Measure a node now, unless it is starting or ending."""
        with suppress(OSError, ValueError, KeyError):
            node = (job.spec.name, job.spec.node)
            nbytes = sum(path.stat().st_blocks * 512 for path in [*segments_of(*node), parity_path_of(*node)])
            pid = int((job.spec.run_dir / "smp.lock").read_text())
            status = dict(part.split(":", 1) for part in Path(f"/proc/{pid}/status").read_text().splitlines())
            nbytes += sum(int(status[name].split()[0]) << 10 for name in ("RssAnon", "RssFile"))
            self.peak_x_share = max(self.peak_x_share, nbytes / share)

    @contextmanager
    def sampled(self, cluster: Cluster) -> Iterator[None]:
        """Measure all nodes of a job many times a second."""
        over = threading.Event()

        def sample_all() -> None:
            while not over.wait(0.05):
                for job in list(cluster.nodes.values()):
                    self.sample(job, cluster.share)

        thread = threading.Thread(target=sample_all)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


class Cluster:
    """A job on several nodes with one rank each. Use as a context manager: it leaves nothing behind."""

    def __init__(
        self,
        server: ForkServer,
        folder: Path,
        hosts: list[EmulatedHost],
        count: int,
        code: str,
        mib: int,
        compute: float,
    ) -> None:
        self._server = server
        self._folder = folder
        self._hosts = list(hosts)
        self._count = count
        self._name = f"rec{os.getpid()}-{code}"
        port = PORT + os.getpid() % 200
        self._endpoint = ",".join(f"{host.address}:{port}" for host in hosts)
        self._flags = ("--reft", "--reft-redundancy", code, "--ftp-secret-file", str(_secret(folder)),
                       "--ftp-detect-seconds", "5")  # fmt: skip
        self.share = mib << 20
        self.compute = compute
        self.goal = folder / f"goal-{code}"
        self.journal = folder / f"journal-{code}"
        self._argv = (str(self.goal), "--mib", str(mib), "--seconds", str(compute), "--journal", str(self.journal))
        self.nodes: dict[str, RunningJob] = {}

    def __enter__(self) -> Cluster:
        try:
            for index in range(self._count):
                self.start(f"n{index}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as cleanup:  # destroys every node even if one fails
            for job in self.nodes.values():
                cleanup.callback(destroy, job)

    def start(self, name: str) -> RunningJob:
        """Start a node on the next host."""
        fields = self._hosts.pop(0).fields()
        spec = JobSpec(
            entry=f"{Path(__file__).resolve()}:rank", argv=self._argv, name=self._name, folder=str(self._folder),
            flags=(*self._flags, "--ftp-node-name", name), node=name, nnodes=self._count, endpoint=self._endpoint,
            rendezvous="ft_plugins", **fields,  # type: ignore[arg-type]
        )  # fmt: skip
        self.nodes[name] = self._server.start(spec)
        return self.nodes[name]

    def until_committed(self, more: int, since: float = 0.0) -> int:
        """Wait for `more` commits on every node after time `since`; returns the newest iteration committed on all."""
        name = catalogue.VERSION_COMMITTED.name
        return min(
            max(event["iteration"] for event in wait_for(
                job.spec.run_dir / "events.jsonl",
                lambda events: sum(e["name"] == name and e["time"] > since for e in events) >= more, BOUND,
            ) if event["name"] == name)
            for job in self.nodes.values()
        )  # fmt: skip

    def events(self, since: float) -> list[Event]:
        """The events of all nodes after time `since`."""
        return [event for job in self.nodes.values() for event in job.events() if event.time >= since]

    def until_restored(self, since: float) -> None:
        """Wait until every rank has restored after time `since`."""
        for job in list(self.nodes.values()):
            wait_for(
                job.spec.run_dir / "events.jsonl",
                lambda events: any(e["name"] == catalogue.STATE_RESTORED.name and e["time"] > since for e in events),
                BOUND,
            )

    def until_ended(self) -> bool:
        """Wait for the end. Returns whether all ranks ended and none ever restored a torn version."""
        statuses = [job.wait(BOUND)["status"] for job in self.nodes.values()]
        journal = entries(self.journal)
        ended = sum("ended" in entry for entry in journal)
        return set(statuses) == {"succeeded"} and ended == self._count and all(entry["torn"] == [] for entry in journal)


def _secret(folder: Path) -> Path:
    path = folder / "secret"
    path.write_text("secret of an emulated job")
    path.chmod(0o600)
    return path


def inject_failure(
    cluster: Cluster, name: str, rng: random.Random, *, lost: Sequence[str] = (), killed: str = "", last: bool = False
) -> Incident:
    """Destroy the nodes `lost`, or kill the trainer on node `killed`, at a random time, and measure the recovery.

    After the `last` failure the job runs `AFTER` more iterations and ends.
    """
    PROGRESS.step(name)
    baselines = [loopback(repeats=3)]
    cluster.until_committed(1, time.time())
    time.sleep(rng.uniform(0, cluster.compute))
    newest = max(event.fields["iteration"] for event in cluster.events(0) if event.type is catalogue.SNAPSHOT_SEALED)
    if last:
        cluster.goal.write_text(str(newest + AFTER))
    failed = time.time()
    if killed:
        os.kill(cluster.nodes[killed].events(catalogue.RANK_ATTACHED.name)[-1].pid, signal.SIGKILL)
    for each in lost:
        destroy(cluster.nodes.pop(each))
    for each in lost:
        cluster.start(f"{each}s")
    cluster.until_restored(failed)
    baselines.append(loopback(repeats=3))
    incident = recovery_steps(name, failed, cluster.events(failed), statistics.median(baselines))
    say(incident.row())
    return incident


def recovery_steps(name: str, failed: float, events: list[Event], baseline: float) -> Incident:
    """The steps of a recovery, from the events of agents, SMPs and ranks after the failure at time `failed`."""
    detected = min(event.time for event in events if event.name in DETECTION_EVENTS)
    restores = [event for event in events if event.type is catalogue.STATE_RESTORED]
    rebuilt = [event for event in events if event.type is catalogue.SLOT_REBUILT]
    asked = max(event.time - event.fields["seconds"] for event in restores)
    verified = max(event.time - event.fields["seconds"] + event.fields["verify_seconds"] for event in restores)
    loaded = max(
        event.time - event.fields["seconds"] + event.fields["verify_seconds"] + event.fields["load_seconds"]
        for event in restores
    )
    ended = max(event.time for event in restores)
    began = min((event.time - event.fields["seconds"] for event in rebuilt), default=verified)
    done = max((event.time for event in rebuilt), default=began)
    read = sum(event.fields["read_bytes"] for event in rebuilt)
    return Incident(
        name, detect=detected - failed, restart=asked - detected, plan=began - asked + verified - done,
        rebuild=done - began, load=loaded - verified, open=ended - loaded, total=ended - failed,
        lost=max(event.fields["lost"] for event in restores), tier=restores[0].fields["tier"],
        rates=tuple(event.fields["read_bytes"] / event.fields["seconds"] for event in rebuilt),
        rate=read / (done - began) if rebuilt else 0.0, loopback=baseline,
    )  # fmt: skip


def lose_nodes(chosen: argparse.Namespace) -> Figures:
    """All figures. Prints a table."""
    lost = LOST[:1] if chosen.quick else LOST
    mib, compute = (16, 0.5) if chosen.smoke else (MIB, COMPUTE)
    PROGRESS.plan(4 + len(lost))
    rng = random.Random(1)
    memory = PeakMemory()
    identical = True
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="ft-", dir="/tmp"))
        stack.callback(shutil.rmtree, folder)
        os.environ["OMP_NUM_THREADS"] = "1"
        numbers = range(101, 107)
        hosts = [EmulatedHost("", f"127.78.0.{number}", "lo") for number in numbers]
        if chosen.namespaces:
            hosts = stack.enter_context(network(numbers))
        preload = [str(Path(__file__).resolve()), "ft_plugins.launcher.node_launch"]
        server = stack.enter_context(ForkServer(preload))
        say(HEAD)
        PROGRESS.step("starting three nodes")
        with Cluster(server, folder, hosts, 3, "raim5", mib, compute) as job, memory.sampled(job):
            job.until_committed(1)
            trainer = inject_failure(job, "a trainer killed", rng, killed="n1")
            ones = [
                inject_failure(job, "a node of three lost, RAIM5", rng, lost=(node,), last=node == lost[-1])
                for node in lost
            ]
            identical &= job.until_ended()
        PROGRESS.step("starting four nodes")
        with Cluster(server, folder, hosts, 4, "raim6", mib, compute) as job, memory.sampled(job):
            job.until_committed(1)
            two = inject_failure(job, "two nodes of four lost, RAIM6", rng, lost=("n1", "n2"), last=True)
            identical &= job.until_ended()
    every = (trainer, *ones, two)
    return {
        "loopback_bytes_per_second": statistics.median(each.loopback for each in every),
        "lost_iterations": max(each.lost for each in every),
        "lost_iterations_process_tier": trainer.lost,
        "load_x_loopback": statistics.median(one.rates[0] / one.loopback for one in ones),
        "two_load_x_loopback": two.rate / two.loopback,
        "seconds_detect": max(each.detect for each in every),
        "seconds_total": max(each.total for each in every),
        "seconds_total_trainer": trainer.total,
        "seconds_rebuild": statistics.median(one.rebuild for one in ones),
        "peak_memory_x_share": memory.peak_x_share,
        "identical": identical,
    }


def measure(chosen: argparse.Namespace) -> Figures:
    """All parts that are chosen."""
    only = chosen.only or ("nodes" if chosen.quick else None)
    figures = lose_nodes(chosen) if only in (None, "nodes") else {}
    if only in (None, "nodes", "spare") and find_spec("megatron"):
        losses = 1 if chosen.quick else 3
        PROGRESS.plan(2 * losses)
        figures |= spare_times.measure(losses)
    frameworks = [one for one in restart_times.FRAMEWORKS if only in (None, "frameworks", one)]
    PROGRESS.plan(10 * len(frameworks))  # such a part takes as long as ten failures of a node
    return figures | restart_times.measure(frameworks, chosen.kills, chosen.every)


if __name__ == "__main__":
    parser = arguments(__doc__, "one failure of each kind of nodes, one spare, no frameworks")
    parser.add_argument("--namespaces", action="store_true", help="one network namespace per node, if permitted")
    parts = ("nodes", "spare", *restart_times.FRAMEWORKS, "frameworks")
    parser.add_argument("--only", choices=parts, help="only this part")
    parser.add_argument("--kills", type=int, default=3, help="of each framework's job (default %(default)s)")
    parser.add_argument(
        "--every", type=int, default=24, help="iterations between the framework's checkpoints (default %(default)s)"
    )
    run("recovery", measure, parser)
