"""How long a job stands still after a failure, and what it loses: one trainer, one node, two nodes.

    python benchmarks/recovery.py [--quick] [--namespaces]

Emulated nodes with an agent, an SMP and one rank each, whose state (256 MiB; 64 with --quick) tells which version it
is; real processes, signals and sockets, torch alone. The failure comes at a random time within an iteration, after a
version counted; a lost node's substitute is started when the node is gone. What a row's seconds are, end to end:

    detect     the failure -> the first event of an agent or SMP that tells of it. A trainer that computes sees a lost
               peer at its next collective, so up to an iteration's compute (3 s; 0.5 with --quick) passes
    restart    -> every rank, imports aside, asks what there is: a new round, processes, memory of a fresh node claimed
    plan       -> the recovery plan is there, and own slots are verified
    rebuild    transfer and decoding of the lost slots, digests verified
    load       -> tensors and counters are in place         open    -> protected again, the step may begin
    total      the failure -> the last rank begins its step

The nodes stand on addresses of the loopback device, as its floor (`baselines.loopback`, measured around each failure)
does: `load_x_loopback` is what a rebuilt slot reads over sockets in a second, of one lost node, in multiples of it; for
two, `two_load_x_loopback`, both slots' bytes over the time in which either was rebuilt: their nodes share these cores.
--namespaces puts a bridge between the nodes, whose rate by itself is about half of the floor. What RAIM6 multiplies is
compiled when a fresh node first needs it: a second of `rebuild`, and of `open` with RAIM5, where the new node's vault
needs it. Claims: load_x_loopback >= 0.5, lost_iterations <= 1 from the process tier and <= 2 from the node tier.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from baselines import loopback
from figures import line
from ft_plugins.errors import FtError
from ft_plugins.events import Event, catalogue
from ft_plugins.smp import liveness
from ft_plugins.smp.client import Client
from ft_plugins.snapshot.paths import parity_store_of, segments_of
from ft_plugins.testing import fills
from ft_plugins.testing.emulated_nodes import EmulatedHost, destroy, network
from ft_plugins.testing.forkserver import ForkServer, JobSpec, RunningJob
from ft_plugins.testing.job_control import entries, wait_for

BOUND = 120.0  # seconds, for anything that is waited for
SIGNS = (  # the last where agents begin another round at once
    *(catalogue.WORKER_FAILED.name, catalogue.NODE_LOST.name, catalogue.WORKERS_KILLED.name),
    catalogue.INCARNATION_FENCED.name,
)
STEPS = ("detect", "restart", "plan", "rebuild", "load", "open", "total")
LOST = ("n1", "n2", "n0")  # one after the other, each when the one before is protected again
ENDLESS = 1_000_000  # iterations
AFTER = 2  # iterations that are run after the last failure
PORT = 29650


def rank(argv: list[str]) -> None:
    """The entry of each rank: `fills` up to the iteration that stands in the file named first, once it is there."""
    goal = Path(argv[0])
    iterations = int(goal.read_text()) if goal.exists() else ENDLESS
    fills.main([*argv[1:], "--iterations", str(iterations)])


@dataclass(frozen=True)
class Incident:
    """Seconds between the steps of one recovery; what was lost, and read for it."""

    name: str
    detect: float
    restart: float
    plan: float
    rebuild: float  # 0 where every rank found its slot in its own segment
    load: float
    open: float
    total: float
    lost: int
    tier: str
    rates: tuple[float, ...]  # bytes a second, of each rebuilt slot
    rate: float  # of all of them together
    floor: float  # bytes a second

    def row(self) -> str:
        parts = " ".join(f"{getattr(self, name):8.2f}" for name in STEPS)
        read = "-"
        if self.rate:
            read = f"{self.rate / 1e9:.2f} GB/s, {self.rate / self.floor:.2f} x {self.floor / 1e9:.2f}"
        return f"{self.name:<30} {parts} {self.lost:5}  {self.tier:<8} {read}"


HEAD = f"{'seconds':<30} {' '.join(f'{name:>8}' for name in STEPS)}  lost  tier     rebuilt slots: read, x loopback"


class Memory:
    """The most that nodes have held for one share: shared memory, and what the SMP holds beside it."""

    def __init__(self) -> None:
        self.peak_x_share = 0.0

    def look(self, job: RunningJob, share: int) -> None:
        """Look at a node now; nothing if it is being made or unmade."""
        with suppress(OSError, ValueError, KeyError):
            of_node = (job.spec.name, job.spec.node)
            held = sum(path.stat().st_blocks * 512 for path in [*segments_of(*of_node), parity_store_of(*of_node)])
            pid = int((job.spec.run_dir / "smp.lock").read_text())
            status = dict(part.split(":", 1) for part in Path(f"/proc/{pid}/status").read_text().splitlines())
            held += sum(int(status[name].split()[0]) << 10 for name in ("RssAnon", "RssFile"))
            self.peak_x_share = max(self.peak_x_share, held / share)

    @contextmanager
    def watched(self, cluster: Cluster) -> Iterator[None]:
        """Look at all nodes of a job, many times a second."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.05):
                for job in list(cluster.nodes.values()):
                    self.look(job, cluster.share)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


class Cluster:
    """A job over several nodes, a rank each. Use as a context manager: nothing of it is left behind."""

    def __init__(
        self,
        server: ForkServer,
        folder: Path,
        places: list[EmulatedHost],
        count: int,
        code: str,
        mib: int,
        compute: float,
    ) -> None:
        self._server = server
        self._folder = folder
        self._places = list(places)
        self._count = count
        self._name = f"rec{os.getpid()}-{code}"
        port = PORT + os.getpid() % 200
        self._endpoint = ",".join(f"{place.address}:{port}" for place in places)
        self._flags = ("--reft", "--reft-redundancy", code, "--ftp-secret-file", str(_secret(folder)),
                       "--ftp-detect-seconds", "5")  # fmt: skip
        self.share = mib << 20
        self.compute = compute
        self.goal = folder / f"goal-{code}"
        self.journal = folder / f"journal-{code}"
        self._argv = (str(self.goal), "--mib", str(mib), "--seconds", str(compute), "--journal", str(self.journal))
        self.nodes: dict[str, RunningJob] = {}

    def __enter__(self) -> Cluster:
        for index in range(self._count):
            self.start(f"n{index}")
        return self

    def __exit__(self, *_: object) -> None:
        for job in self.nodes.values():
            if liveness.held(job.spec.run_dir / "smp.lock"):
                with suppress(FtError), Client(job.spec.run_dir, timeout=5) as client:
                    client.end()
            destroy(job)

    def start(self, name: str) -> RunningJob:
        """A node on the next place."""
        fields = self._places.pop(0).fields()
        spec = JobSpec(
            entry=f"{Path(__file__).resolve()}:rank", argv=self._argv, name=self._name, folder=str(self._folder),
            flags=(*self._flags, "--ftp-node-name", name), node=name, nnodes=self._count, endpoint=self._endpoint,
            rendezvous="ft_plugins", **fields,  # type: ignore[arg-type]
        )  # fmt: skip
        self.nodes[name] = self._server.start(spec)
        return self.nodes[name]

    def until_committed(self, more: int, since: float = 0.0) -> int:
        """Wait until so many versions have counted on every node since a time; the newest iteration that does."""
        name = catalogue.VERSION_COMMITTED.name
        return min(
            max(event["iteration"] for event in wait_for(
                job.spec.run_dir / "events.jsonl",
                lambda found: sum(e["name"] == name and e["time"] > since for e in found) >= more, BOUND,
            ) if event["name"] == name)
            for job in self.nodes.values()
        )  # fmt: skip

    def events(self, since: float) -> list[Event]:
        """Of all nodes that there are, since a time."""
        return [event for job in self.nodes.values() for event in job.events() if event.time >= since]

    def until_restored(self, since: float) -> None:
        """Wait until every rank has restored after a time."""
        for job in list(self.nodes.values()):
            wait_for(
                job.spec.run_dir / "events.jsonl",
                lambda found: any(e["name"] == catalogue.STATE_RESTORED.name and e["time"] > since for e in found),
                BOUND,
            )

    def until_ended(self) -> bool:
        """Wait for the end; whether every tensor of every rank always was of one version, and all ranks ended."""
        statuses = [job.wait(BOUND)["status"] for job in self.nodes.values()]
        found = entries(self.journal)
        ended = sum("ended" in entry for entry in found)
        return set(statuses) == {"succeeded"} and ended == self._count and all(entry["torn"] == [] for entry in found)


def _secret(folder: Path) -> Path:
    path = folder / "secret"
    path.write_text("what the nodes of this job know")
    path.chmod(0o600)
    return path


def strike(
    cluster: Cluster, name: str, rng: random.Random, *, lost: Sequence[str] = (), killed: str = "", last: bool = False
) -> Incident:
    """Destroy the nodes `lost`, or kill the trainer on the node `killed`, at a random time; what came of it.

    After the `last` one the job ends by itself.
    """
    floors = [loopback(repeats=3)]
    cluster.until_committed(1, time.time())
    time.sleep(rng.uniform(0, cluster.compute))
    newest = max(event.fields["iteration"] for event in cluster.events(0) if event.type is catalogue.SNAPSHOT_SEALED)
    if last:
        cluster.goal.write_text(str(newest + AFTER))
    struck = time.time()
    if killed:
        os.kill(cluster.nodes[killed].events(catalogue.RANK_ATTACHED.name)[-1].pid, signal.SIGKILL)
    for each in lost:
        destroy(cluster.nodes.pop(each))
    for each in lost:
        cluster.start(f"{each}s")
    cluster.until_restored(struck)
    floors.append(loopback(repeats=3))
    found = measured(name, struck, cluster.events(struck), statistics.median(floors))
    print(found.row(), flush=True)
    return found


def measured(name: str, struck: float, events: list[Event], floor: float) -> Incident:
    """The steps of a recovery from what agents, SMPs and ranks have told since `struck`."""
    detected = min(event.time for event in events if event.name in SIGNS)
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
        name, detect=detected - struck, restart=asked - detected, plan=began - asked + verified - done,
        rebuild=done - began, load=loaded - verified, open=ended - loaded, total=ended - struck,
        lost=max(event.fields["lost"] for event in restores), tier=restores[0].fields["tier"],
        rates=tuple(event.fields["read_bytes"] / event.fields["seconds"] for event in rebuilt),
        rate=read / (done - began) if rebuilt else 0.0, floor=floor,
    )  # fmt: skip


def measure(quick: bool, namespaces: bool) -> dict[str, float | bool]:
    """All figures; a table on the way."""
    mib, compute = (64, 0.5) if quick else (256, 3.0)
    turns = LOST[:1] if quick else LOST
    rng = random.Random(1)
    memory = Memory()
    identical = True
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="ft-", dir="/tmp"))
        stack.callback(shutil.rmtree, folder)
        os.environ["OMP_NUM_THREADS"] = "1"
        hosts = range(101, 107)
        places = [EmulatedHost("", f"127.78.0.{host}", "lo") for host in hosts]
        if namespaces:
            places = stack.enter_context(network(hosts))
        preload = [str(Path(__file__).resolve()), "ft_plugins.launcher.node_launch"]
        server = stack.enter_context(ForkServer(preload))
        print(HEAD)
        with Cluster(server, folder, places, 3, "raim5", mib, compute) as job, memory.watched(job):
            job.until_committed(1)
            trainer = strike(job, "a trainer killed", rng, killed="n1")
            ones = [
                strike(job, "a node of three lost, RAIM5", rng, lost=(node,), last=node == turns[-1]) for node in turns
            ]
            identical &= job.until_ended()
        with Cluster(server, folder, places, 4, "raim6", mib, compute) as job, memory.watched(job):
            job.until_committed(1)
            two = strike(job, "two nodes of four lost, RAIM6", rng, lost=("n1", "n2"), last=True)
            identical &= job.until_ended()
    every = (trainer, *ones, two)
    return {
        "loopback_bytes_per_second": statistics.median(found.floor for found in every),
        "lost_iterations": max(found.lost for found in every),
        "lost_iterations_process_tier": trainer.lost,
        "load_x_loopback": statistics.median(one.rates[0] / one.floor for one in ones),
        "two_load_x_loopback": two.rate / two.floor,
        "seconds_detect": max(found.detect for found in every),
        "seconds_total": max(found.total for found in every),
        "seconds_total_trainer": trainer.total,
        "seconds_rebuild": statistics.median(one.rebuild for one in ones),
        "peak_memory_x_share": memory.peak_x_share,
        "identical": identical,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the state; ends within 50 s on 2 cores")
    parser.add_argument("--namespaces", action="store_true", help="a network namespace for each node, where allowed")
    options = parser.parse_args()
    print(line("recovery", measure(options.quick, options.namespaces)))


if __name__ == "__main__":
    sys.exit(main())
