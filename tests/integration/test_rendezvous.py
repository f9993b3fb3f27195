"""Agents of three emulated nodes that meet through our rendezvous, and the one that leads it is killed; plain torchrun.

Each node has a loopback address of its own and two ranks, which end with their agent.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ft_plugins.config import run_directory
from ft_plugins.errors import EXIT_REFUSED
from ft_plugins.events import read
from ft_plugins.launcher import job_identity
from ft_plugins.launcher.rendezvous.peers import Credentials, ask
from ft_plugins.rehearse.driver import free_port
from ft_plugins.smp.watch import liveness
from ft_plugins.snapshot.segment import paths
from harness.forkserver import ForkServer, JobSpec
from harness.job_control import wait_for, wait_for_success, wait_until_gone

BOUND = 120.0
ROOT = Path(__file__).resolve().parents[2]
RANK = Path(__file__).with_name("meeting.py")
NPROC = 2


@pytest.fixture(scope="module")
def server():
    with ForkServer([str(RANK), "ft_plugins.launcher.node_launch"]) as found:
        yield found


class Nodes:
    """Nodes of one job by name, each at an address of its own; the first two addresses are known to all.

    The node at the first address leads: nobody else is started before it does.
    """

    size = 3
    words = ()  # more arguments of the ranks
    flags = ()  # of ft-run
    detect = 3.0

    def __init__(self, server, folder):
        self.journal, self.end = folder / "journal", folder / "end"
        self.running = {}
        self._server, self._folder = server, folder
        self._port = free_port()

    def start(self, number, name):
        spec = JobSpec(
            entry=f"{RANK}:main",
            argv=(str(self.journal), str(self.end), *self.words),
            name=f"meet-{os.getpid()}",
            folder=str(self._folder),
            node=name,
            nproc=NPROC,
            flags=self.flags,
            nnodes=self.size,
            endpoint=f"127.0.0.1:{self._port},127.0.0.2:{self._port}",
            address=f"127.0.0.{number}",
            rendezvous="ft_plugins",
            rendezvous_conf={"node_name": name, "detect_seconds": self.detect, "run_dir": str(self._folder)},
            environment={"NODE": name, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        self.running[name] = self._server.start(spec)
        if number == 1:
            self._until(lambda: self._lead("meet", "leading"), f"{name} does not lead")
        return self.running[name]

    def met(self, count):
        """The last lines of the journal, one for each rank, once `count` incarnations of all of them have met."""
        size = self.size * NPROC
        lines = wait_for(self.journal, lambda lines: len(lines) >= count * size, BOUND)
        return lines[(count - 1) * size : count * size]

    def finish(self):
        """Let the ranks end; every node succeeds."""
        self.end.touch()
        wait_for_success(self.running, BOUND)

    def waits(self, *names):
        """Wait until the lead says that these nodes wait, as spares or for a round."""
        self._until(lambda: self._lead("look", "names") == [*names], f"{names} do not wait")

    def _lead(self, request, field):
        """What the node at the first endpoint replies; None while it does not answer."""
        message = {"do": request} | ({"token": "test"} if request == "look" else {})
        us = Credentials(job_identity.user_secret(), f"meet-{os.getpid()}", "test")
        try:
            return ask(f"127.0.0.1:{self._port}", message, BOUND, us)[field]
        except ConnectionError:
            return None

    def _until(self, holds, otherwise):
        deadline = time.monotonic() + BOUND
        while not holds():
            assert time.monotonic() < deadline, otherwise
            time.sleep(0.02)


@pytest.fixture
def nodes(server, tmp_path):
    found = Nodes(server, tmp_path)
    yield found
    for job in found.running.values():
        job.kill()
        job.wait(BOUND)


def places(lines):
    """Group ranks by node; all ranks are there, each once, and have met each other."""
    assert sorted(line["rank"] for line in lines) == list(range(len(lines)))
    assert {(line["world_size"], line["total"]) for line in lines} == {(len(lines), sum(range(len(lines))))}
    assert all(line["rank"] // NPROC == line["group_rank"] for line in lines)
    return {line["node"]: line["group_rank"] for line in lines}


@pytest.mark.parametrize("names", [("a", "b", "c"), ("b", "c", "a")], ids=["of-rank-0", "of-rank-1"])
def test_the_node_that_leads_is_killed_and_a_substitute_takes_its_rank(nodes, names):
    for number, name in enumerate(names, 1):
        nodes.start(number, name)
    assert places(nodes.met(1)) == {"a": 0, "b": 1, "c": 2}
    leads = names[0]
    nodes.running.pop(leads).kill()
    nodes.start(4, "0")  # sorts before all others, by name as by address after the first
    found = places(nodes.met(2))
    expected = {"a": 0, "b": 1, "c": 2}
    expected["0"] = expected.pop(leads)
    assert found == expected
    nodes.finish()


@pytest.mark.parametrize("lost", ["a", "b"], ids=["which-leads", "which-does-not"])
def test_ranks_that_had_ended_are_started_again_when_another_node_is_lost(nodes, lost):
    nodes.size = 2
    nodes.words = ("b" if lost == "a" else "a", lost)  # the one ends early, the other one never
    for number, name in enumerate("ab", 1):
        nodes.start(number, name)
    first = nodes.met(1)
    for line in first:
        if line["node"] != lost:
            wait_until_gone(line["pid"], BOUND)
    nodes.running.pop(lost).kill()
    nodes.start(3, "substitute")
    expected = {"a": 0, "b": 1}
    expected["substitute"] = expected.pop(lost)
    assert places(nodes.met(2)) == expected
    nodes.finish()


def test_a_node_whose_ranks_had_ended_keeps_its_memory_when_the_job_ends_in_a_failure_elsewhere(nodes):
    nodes.size, nodes.words, nodes.flags = 2, ("a", "b"), ("--reft",)
    for number, name in enumerate("ab", 1):
        nodes.start(number, name)
    for place in nodes.met(1):
        if place["node"] == "a":
            wait_until_gone(place["pid"], BOUND)
    nodes.end.write_text("refuse")
    found = {name: job.wait(BOUND) for name, job in nodes.running.items()}
    try:
        assert {name: outcome["status"] for name, outcome in found.items()} == {"a": "succeeded", "b": "refused"}, found
        run_dir = nodes.running["a"].spec.run_dir
        [kept] = [event for event in read(run_dir / "events.jsonl") if event.name == "smp.retained"]
        assert "other nodes may still resume from these snapshots" in kept.fields["reason"]
        assert liveness.holder(run_dir / "smp.lock"), "it holds what they would resume from"
    finally:
        for job in nodes.running.values():
            liveness.kill_and_wait(liveness.holder(job.spec.run_dir / "smp.lock"), BOUND)
            paths.remove(job.spec.name, job.spec.node)


def test_all_nodes_and_a_spare_end_as_the_job_that_was_refused(nodes):
    nodes.size = 2
    for number, name in enumerate("ab", 1):
        nodes.start(number, name)
    nodes.met(1)
    nodes.start(3, "c")
    nodes.waits("c")
    nodes.end.write_text("refuse")
    found = {name: job.wait(BOUND) for name, job in nodes.running.items()}
    assert {name: outcome["status"] for name, outcome in found.items()} == dict.fromkeys("abc", "refused"), found
    assert f"exited with status {EXIT_REFUSED}" in found["c"]["reason"], "it knows why"


@pytest.mark.parametrize("listed", ["ab", "b"], ids=["another-leads", "the-only-endpoint-is-its-own"])
def test_where_a_node_is_refused_every_node_says_which_and_why_and_ends(tmp_path, listed):
    job, port = f"refused-{os.getpid()}", free_port()
    addresses = {"a": "127.0.0.1", "b": "127.0.0.2"}
    owned = liveness.acquire(paths.lock_of(job, "b"))  # as by an SMP of another run directory
    assert owned is not None
    script = tmp_path / "never.py"
    script.write_text("raise SystemExit(3)")
    command = [
        *(str(Path(sys.executable).with_name("ft-run")), "--nnodes", "2", "--nproc-per-node", "1"),
        *("--rdzv-endpoint", ",".join(f"{addresses[name]}:{port}" for name in listed)),
        *("--rdzv-conf", "detect_seconds=10", "--ftp-job", job, "--reft"),
    ]
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    started = {
        name: subprocess.Popen(
            [*command, "--local-addr", address, "--ftp-node-name", name, str(script)],
            env=environment, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for name, address in addresses.items()
    }  # fmt: skip
    try:
        said = {name: each.communicate(timeout=BOUND)[1] for name, each in started.items()}
    finally:
        for each in started.values():
            each.kill()
        os.close(owned)
        for name in addresses:
            liveness.kill_and_wait(liveness.holder(tmp_path / "ft_plugins" / job / name / "smp.lock"), BOUND)
            paths.remove(job, name)
    assert {name: each.returncode for name, each in started.items()} == dict.fromkeys("ab", EXIT_REFUSED), said
    assert "has memory on node b already" in said["b"], said["b"]
    assert "node b was refused: " in said["a"] and "has memory on node b already" in said["a"], said["a"]


def test_torchrun_finds_it_by_its_name(tmp_path):
    metadata = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(metadata, cwd=ROOT, check=True, timeout=BOUND, capture_output=True)
    journal, end = tmp_path / "journal", tmp_path / "end"
    end.touch()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend=ft_plugins"]
    done = subprocess.run(
        [*torchrun, str(RANK), str(journal), str(end)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"},
        timeout=BOUND,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = wait_for(journal, lambda lines: len(lines) >= 2, BOUND)
    assert sorted((line["rank"], line["world_size"], line["total"]) for line in lines) == [(0, 2, 1), (1, 2, 1)]


@pytest.fixture
def linked():
    """Two namespaces whose devices eth0 are joined and have link-local addresses alone: fe80::1 and fe80::2."""
    names = [f"ft{os.getpid() % 100000}l{number}" for number in (1, 2)]

    def ip(words):
        subprocess.run(["ip", *words.split()], check=True, capture_output=True, timeout=BOUND)

    made = []
    try:
        try:
            for name in names:
                ip(f"netns add {name}")
                made.append(name)
            ip(f"link add eth0 netns {names[0]} type veth peer name eth0 netns {names[1]}")
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("no permission to make network namespaces")
        for number, name in enumerate(names, 1):
            ip(f"-n {name} link set eth0 addrgenmode none")
            ip(f"-n {name} addr add fe80::{number}/64 dev eth0 nodad")
            for device in ("lo", "eth0"):
                ip(f"-n {name} link set {device} up")
        yield names
    finally:
        for name in made:
            ip(f"netns del {name}")


def test_a_protected_job_of_nodes_with_link_local_addresses_alone_trains(tmp_path, linked):
    job, secret = f"linked-{os.getpid()}", tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("x" * 32)
    command = [
        *(str(Path(sys.executable).with_name("ft-run")), "--nnodes", "2", "--nproc-per-node", "1"),
        *("--rdzv-endpoint", "[fe80::1%eth0]:29400", "--ftp-job", job, "--ftp-secret-file", str(secret), "--reft"),
        *("--ftp-interface", "eth0"),
    ]
    script = [str(ROOT / "launch" / "examples" / "torch_loop.py"), "--iterations", "3"]
    started = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *command, "--ftp-node-name", name, *script], cwd=tmp_path, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for name in linked
    ]  # fmt: skip
    try:
        said = [each.communicate(timeout=3 * BOUND)[0] for each in started]
    finally:
        for each in started:
            each.kill()
        for name in linked:
            liveness.kill_and_wait(liveness.holder(run_directory(job, name) / "smp.lock"), BOUND)
            paths.remove(job, name)
    assert [each.returncode for each in started] == [0, 0], said
    assert "RAIM5 over 2 nodes" in said[0] and "iteration     3 / 3" in said[0], said
