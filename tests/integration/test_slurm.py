"""The batch script of launch/slurm under a real Slurm: one controller and three nodes on this machine."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from ft_plugins.rehearse.driver import free_port
from harness.job_control import entries, wait_until

ROOT = Path(__file__).parents[2]
SCRIPT, LOOP = ROOT / "launch/slurm/train.sbatch", ROOT / "launch/examples/torch_loop.py"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
NODES = ("n1", "n2", "n3")
ITERATIONS = 1500
BOUND = 240.0
BITS = ("--hidden", "32", "--iterations", str(ITERATIONS))

pytestmark = [
    pytest.mark.all_configurations,
    pytest.mark.skipif(os.getuid() != 0, reason="daemons of Slurm are started by root"),
    pytest.mark.skipif(
        any(shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None for name in PROGRAMS),
        reason="needs Slurm: apt-get install slurmctld slurmd slurm-client munge",
    ),
]

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MpiDefault=none
KillWait=60
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
PartitionName=low Nodes=n1,n2,n3 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=120
PartitionName=high Nodes=n1,n2,n3 MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


class Cluster:
    """A Slurm of its own, whose daemons end with the test."""

    def __init__(self, folder):
        self.folder = folder
        self.name = f"slurm-{uuid.uuid4().hex[:12]}"  # of jobs: their memory outlives them
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
            "SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin",
            "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1",
            "FT_RUN": str(Path(sys.executable).with_name("ft-run")), "FT_SECRET": str(folder / "job.secret"),
        }  # fmt: skip
        self._daemons = []

    def start(self):
        for name in ("state", "tmp", *(f"spool.{node}" for node in NODES)):
            (self.folder / name).mkdir()
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        (self.folder / "munge.key").chmod(0o600)
        ports = [free_port() for _ in range(4)]
        text = CONFIGURATION.format(host=socket.gethostname(), folder=self.folder, ports=ports)
        for node, port in zip(NODES, ports[1:], strict=True):
            text += f"NodeName={node} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs=1\n"
        # nodes are named before the partitions that list them
        lines = sorted(text.splitlines(), key=lambda line: line.startswith("PartitionName"))
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        names = ("key-file=munge.key", "socket=munge.socket", "pid-file=munge.pid", "log-file=munge.log", "seed-file=m")
        munge = [f"--{name.replace('=', f'={self.folder}/')}" for name in names]
        self._daemon("munged", "--foreground", "--force", *munge)
        wait_until((self.folder / "munge.socket").exists, BOUND, lambda: "munged")
        self._daemon("slurmctld", "-D")
        for node in NODES:
            self._daemon("slurmd", "-D", "-N", node)
        wait_until(lambda: self.ask("sinfo", "-h", "-o", "%T") == "idle", BOUND, self.logs)

    def _daemon(self, *words):
        log = (self.folder / f"{len(self._daemons)}.out").open("wb")
        self._daemons.append(subprocess.Popen(words, env=self.environment, stdout=log, stderr=log, cwd=self.folder))
        log.close()

    def ask(self, *words):
        done = subprocess.run(
            words, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=BOUND, check=False
        )
        return done.stdout.strip()

    def logs(self):
        return "\n".join(path.read_text()[-2000:] for path in self.folder.glob("*.log"))

    def submit(self, *words, options):
        return SlurmJob(self, self.ask("sbatch", "--parsable", f"--job-name={self.name}", *options, *words))

    def end(self):
        self.ask("scancel", "--full", "--signal=KILL", "--user=root")
        below = [child for daemon in self._daemons for child in _below(daemon.pid)]
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(300)
            daemon.kill()
            daemon.wait(300)
        left = below + self.leftovers()
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, 60)
        self.ask(str(Path(sys.executable).with_name("ft-plugins")), "sweep", "--job", self.name, "--older-than", "0")

    def leftovers(self):
        """Processes that a step has left, as SMPs do by design."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]:
                    found.append(process)
        return found


def _below(pid):
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


class SlurmJob:
    """A job of that Slurm."""

    def __init__(self, cluster, number):
        assert number.isdigit(), cluster.logs()
        self.cluster, self.number = cluster, number

    def state(self):
        return self._field("JobState")

    def restarts(self):
        return int(self._field("Restarts"))

    def _field(self, name):
        shown = self.cluster.ask("scontrol", "show", "job", "-o", self.number)
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)[name]

    def output(self):
        path = self.cluster.folder / f"slurm-{self.number}.out"
        return path.read_text() if path.exists() else "no output"

    def until(self, *states):
        wait_until(lambda: self.state() in states, BOUND, lambda: f"{self.state()}\n{self.output()[-4000:]}")
        return self.state()

    def until_requeued(self, restarts):
        """Wait for that, and spare the two minutes that Slurm waits before it starts such a job again."""
        wait_until(lambda: self.restarts() == restarts, BOUND, self.output)
        self.until("PENDING", "RUNNING")
        # not at once: within the second of the requeue Slurm takes the new start for the one that it has just revoked
        self.cluster.ask("scontrol", "update", f"JobId={self.number}", "StartTime=now+5")

    def events(self, node, file="events.jsonl"):
        runtime = Path(self.cluster.environment["XDG_RUNTIME_DIR"])  # a short one: socket paths are bounded
        path = runtime / "ft_plugins" / self.cluster.name / node / file
        return list(entries(path)) if path.exists() else []

    def until_sealed(self, node, more=0):
        def sealed():
            found = [line for line in self.events(node) if line["name"] == "snapshot.sealed"]
            return len(found) > more

        wait_until(sealed, BOUND, self.output)


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.end()


def words(folder, *flags):
    return (
        "--nproc-per-node", "1", "--nnodes", "2", "--rdzv-endpoint", f"localhost:{free_port()}",
        "--reft-checkpoint-dir", str(folder / "ck"), "--reft-checkpoint-interval", "0", *flags,
        str(LOOP), "--reft", *BITS, "--state-digest", str(folder / "killed"),
    )  # fmt: skip


def require_exact(folder):
    """The final state of both ranks is that of a run that never failed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(LOOP), "--unprotected"]
    plain = [*command, *BITS, "--state-digest", str(folder / "golden")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(plain, env=environment, cwd=folder, capture_output=True, timeout=BOUND, check=True)
    golden = sorted(path for path in folder.iterdir() if path.name.startswith("golden"))
    assert len(golden) == 2
    for path in golden:
        killed = path.with_name(path.name.replace("golden", "killed"))
        assert json.loads(killed.read_text()) == json.loads(path.read_text())


def test_a_job_that_was_preempted_and_one_at_its_time_limit_resume_from_what_they_wrote(cluster, tmp_path):
    job = cluster.submit(str(SCRIPT), *words(tmp_path), options=("--nodes=2",))
    job.until_sealed("n1")
    high = cluster.submit(options=("--partition=high", "--nodes=3", "--exclusive", "--wrap=true"))
    job.until_requeued(1)
    assert "is in " in job.output(), "the checkpoint was named before the nodes were taken"
    assert high.until("COMPLETED", "FAILED") == "COMPLETED"

    sealed = [line for line in job.events("n1") if line["name"] == "snapshot.sealed"]
    job.until_sealed("n1", len(sealed))
    cluster.ask("scancel", "--batch", "--signal=USR1", job.number)  # as two minutes before the time limit
    job.until_requeued(2)
    assert job.until("COMPLETED", "FAILED", "CANCELLED") == "COMPLETED", job.output()[-4000:]
    resumed = [line for line in job.events("n1") if line["name"] == "state.restored" and line["iteration"]]
    assert len(resumed) == 2, "it began anew"
    require_exact(tmp_path)


def test_a_spare_takes_the_place_of_a_node_whose_processes_were_killed_and_the_job_ends_as_succeeded(cluster, tmp_path):
    job = cluster.submit(str(SCRIPT), *words(tmp_path), options=("--nodes=3",))
    wait_until(lambda: len([1 for node in NODES if job.events(node)]) == 3, BOUND, job.output)
    wait_until(lambda: sum(1 for node in NODES if _trains(job, node)) == 2, BOUND, job.output)
    wait_until(  # a lost node could be rebuilt
        lambda: any(
            line["name"] == "version.committed" for node in NODES for line in job.events(node, "events.recent.jsonl")
        ),
        BOUND,
        job.output,
    )
    lost = next(node for node in NODES if node != "n1" and _trains(job, node))
    for process in cluster.leftovers():  # all that runs on that node: what a lost node ends
        with suppress(psutil.Error):
            if process.environ().get("SLURMD_NODENAME") == lost and process.name() != "slurmstepd":
                process.send_signal(signal.SIGKILL)
    assert job.until("COMPLETED", "FAILED", "CANCELLED") == "COMPLETED", job.output()[-4000:]
    assert job.restarts() == 0
    require_exact(tmp_path)


def _trains(job, node):
    return any(line["name"] == "snapshot.sealed" for line in job.events(node))


def test_a_job_that_is_cancelled_leaves_a_checkpoint_and_stays_cancelled(cluster, tmp_path):
    job = cluster.submit(str(SCRIPT), *words(tmp_path), options=("--nodes=2",))
    job.until_sealed("n1")
    job.until_sealed("n2")
    cluster.ask("scancel", job.number)
    assert job.until("CANCELLED", "PENDING", "COMPLETED") == "CANCELLED"
    wait_until(lambda: cluster.ask("squeue", "-h") == "", BOUND, job.output)  # its processes have ended too
    assert (job.state(), job.restarts()) == ("CANCELLED", 0), job.output()[-4000:]
    assert "is in " in job.output()


def test_a_job_that_is_refused_is_not_requeued(cluster, tmp_path):
    job = cluster.submit(str(SCRIPT), *words(tmp_path, "--reft-interval", "-3"), options=("--nodes=2",))
    assert job.until("COMPLETED", "FAILED", "CANCELLED") == "FAILED"
    assert (job.restarts(), job._field("ExitCode")) == (0, "78:0"), job.output()
