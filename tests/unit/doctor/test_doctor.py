"""`ft-plugins doctor`: a healthy node is left in peace, and each fault of a node is named, with what to do."""

import json
import os
import socket
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from ft_plugins import cli
from ft_plugins.adapters import framework_versions
from ft_plugins.doctor import host_facts
from ft_plugins.doctor.findings import Grade, exit_status, findings
from ft_plugins.doctor.host_facts import (
    DoctorJob,
    EndpointPort,
    HostFacts,
    ResolvedName,
    UsedFolder,
    gather,
    removes_ipc,
)
from ft_plugins.launcher.rendezvous.endpoint import Endpoint
from ft_plugins.snapshot.segment.paths import MemoryLimit
from ft_plugins.transport.network_devices import NetworkDevice

GIB = 1 << 30
DOOR = Endpoint("node-a", 29400)
SHM = MemoryLimit("/dev/shm", 8 * GIB, 8 * GIB, "enlarge it")
CGROUP = MemoryLimit("a group", 9 * GIB, 9 * GIB, "raise it")
DEVICE = NetworkDevice("eth0", True, ("10.0.0.1",))
OTHER = NetworkDevice("ib0", True, ("10.1.0.1",))
JOB = DoctorJob(2, (DOOR,), "job.secret", "eth0", 4 * GIB)
HEALTHY = HostFacts(
    host="node-a", limits=(SHM, CGROUP), descriptors=1 << 16, secret_problem="",
    endpoints=(ResolvedName("node-a", ("10.0.0.1",)),), own_names=(ResolvedName("node-a", ("10.0.0.1",)),),
    ports=(EndpointPort(DOOR, "free"),), devices=(DEVICE, OTHER), environment={},
    folders=(UsedFolder("temporary files", "/tmp", ""),), ptrace_scope=0, py_spy=True, too_old=(), untested=(),
    removes_ipc=False,
)  # fmt: skip


def port(state):
    return {"ports": (EndpointPort(DOOR, state, "in use"),)}


def environment(**variables):
    return {"environment": variables}


def test_a_healthy_node_has_no_findings():
    assert findings(JOB, HEALTHY) == () and exit_status(()) == 0


FAULTS = [
    ({}, {"limits": (replace(SHM, free=GIB), CGROUP)}, Grade.FAILURE, "/dev/shm has 1.0 GiB free", "enlarge it; or"),
    ({}, {"limits": (SHM, replace(CGROUP, free=GIB))}, Grade.FAILURE, "a group has 1.0 GiB free", "raise it; or"),
    ({}, {"limits": None}, Grade.FAILURE, "/dev/shm cannot be examined", "mount a tmpfs"),
    ({"need": None}, {}, Grade.NOTE, "will claim is unknown", "give --parameters"),
    ({}, {"descriptors": 512}, Grade.WARNING, "only 512 files and sockets", "raise the hard limit to 1024"),
    ({"secret_file": None}, {}, Grade.FAILURE, "no --ftp-secret-file", "give --ftp-secret-file; write one with"),
    ({}, {"secret_problem": "--ftp-secret-file x: bad; mend it"}, Grade.FAILURE, "--ftp-secret-file x: bad", "mend it"),
    ({}, {"endpoints": (ResolvedName("b", ()),)}, Grade.FAILURE, "b does not resolve", "correct --rdzv-endpoint"),
    ({}, {"endpoints": (ResolvedName("b", None),)}, Grade.FAILURE, "not resolved in time", "correct --rdzv-endpoint"),
    ({}, {"endpoints": (*HEALTHY.endpoints, ResolvedName("b", ()))}, Grade.WARNING, "b does not resolve", "correct"),
    ({}, {"address": ResolvedName("b", ())}, Grade.FAILURE, "--local-addr b does not resolve", "an address of this"),
    ({}, {"own_names": (ResolvedName("a", ("127.0.1.1",)),)}, Grade.WARNING, "(a) resolves to 127.0.1.1", "GLOO"),
    ({}, {"own_names": (ResolvedName("a", ()),)}, Grade.WARNING, "(a) resolves to nothing", "--ftp-interface"),
    ({}, {"own_names": (ResolvedName("a", ("fd00::1", "10.0.0.1")),)}, Grade.WARNING,
     "a resolves to fd00::1; node-a resolves to 10.0.0.1", "set GLOO_SOCKET_IFNAME"),
    ({}, port("taken"), Grade.FAILURE, "cannot listen at the endpoint node-a:29400 (in use)", "sport = :29400"),
    ({}, port("silent"), Grade.WARNING, "node-a:29400 gives no answer", "let the port through"),
    ({}, port("refuses"), Grade.NOTE, "nothing listens at the endpoint", "nothing, if"),
    ({"interface": "eth1"}, {}, Grade.FAILURE, "eth1: no device or address of this node", "name one of eth0, ib0,"),
    ({}, {"devices": (replace(DEVICE, up=False),)}, Grade.FAILURE, "the device eth0 is down", "bring it up"),
    ({}, {"devices": (replace(DEVICE, addresses=()),)}, Grade.FAILURE, "eth0 has no IP address", "name one of none"),
    ({}, environment(GLOO_SOCKET_IFNAME="ib0"), Grade.WARNING, "GLOO_SOCKET_IFNAME=ib0 does not name eth0", "=eth0,"),
    ({}, environment(NCCL_SOCKET_IFNAME="^eth"), Grade.WARNING, "NCCL_SOCKET_IFNAME=^eth does not name", "=eth0,"),
    ({}, environment(NCCL_SOCKET_IFNAME="=eth"), Grade.FAILURE, "NCCL_SOCKET_IFNAME==eth names no device", "eth0, ib0"),
    ({"interface": None}, environment(GLOO_SOCKET_IFNAME="eth0", NCCL_SOCKET_IFNAME="=ib0"), Grade.WARNING,
     "NCCL_SOCKET_IFNAME==ib0 does not name eth0, which GLOO_SOCKET_IFNAME does", "set NCCL_SOCKET_IFNAME=eth0,"),
    ({"interface": None}, environment(GLOO_SOCKET_IFNAME="eth"), Grade.FAILURE, "=eth names no device", "eth0, ib0"),
    ({}, {"folders": (UsedFolder("temporary files", "/t", "Read-only file system"),)}, Grade.FAILURE, "/t, cannot be",
     "set TMPDIR"),
    ({}, {"folders": (UsedFolder("checkpoints", "/c", "Read-only file system"),)}, Grade.FAILURE, "/c, cannot be",
     "give --reft-checkpoint-dir a folder that all nodes"),
    ({}, {"too_old": ("torch 2.1 is older than 2.6",)}, Grade.FAILURE, "torch 2.1 is older", "install a newer one"),
    ({}, {"untested": ("DeepSpeed 9 is untested",)}, Grade.WARNING, "DeepSpeed 9 is untested", "ft-plugins rehearse"),
    ({}, {"removes_ipc": True}, Grade.WARNING, "RemoveIPC", "enable-linger"),
    ({}, {"ptrace_scope": 1}, Grade.NOTE, "ptrace_scope is 1", "ptrace_scope=0"),
]  # fmt: skip


@pytest.mark.parametrize(("job", "facts", "grade", "what", "do"), FAULTS)
def test_each_fault_is_the_one_finding(job, facts, grade, what, do):
    (found,) = findings(replace(JOB, **job), replace(HEALTHY, **facts))
    assert (found.grade, exit_status([found])) == (grade, int(grade))
    assert what in found.what and do in found.do and found.why


@pytest.mark.parametrize(
    "facts",
    [
        environment(GLOO_SOCKET_IFNAME="ib0,eth0", NCCL_SOCKET_IFNAME="eth"),
        environment(NCCL_SOCKET_IFNAME="^docker,lo"),
        environment(NCCL_SOCKET_IFNAME="=eth0"),
        {"own_names": (ResolvedName("a", ("127.0.1.1",)),), **environment(GLOO_SOCKET_IFNAME="eth0")},
        {"own_names": (ResolvedName("a", ("fd00::1",)),), **environment(GLOO_SOCKET_IFNAME="eth0")},
        {"ptrace_scope": 1, "py_spy": False},
        port("answers"),
        {"descriptors": None, "devices": None, "ptrace_scope": None, "removes_ipc": None},
    ],
)
def test_what_is_as_it_should_be_or_unknown_is_no_finding(facts):
    assert findings(JOB, replace(HEALTHY, **facts)) == ()


def test_a_job_of_which_no_endpoint_resolves_does_not_work():
    facts = replace(HEALTHY, endpoints=(ResolvedName("b", ()), ResolvedName("c", None)))
    assert [each.grade for each in findings(JOB, facts)] == [Grade.FAILURE, Grade.FAILURE]


def test_a_job_without_a_figure_on_dockers_shared_memory_is_warned():
    small = replace(SHM, nbytes=64 << 20, free=64 << 20)
    found = findings(replace(JOB, need=None), replace(HEALTHY, limits=(small,)))
    assert [each.grade for each in found] == [Grade.WARNING, Grade.NOTE] and "only 64.0 MiB in all" in found[0].what


def test_nodes_that_are_emulated_on_one_machine_need_no_secret_and_no_address():
    job = replace(JOB, endpoints=(Endpoint("127.0.0.1", 29400),), secret_file=None)
    assert findings(job, replace(HEALTHY, own_names=(ResolvedName("a", ("127.0.1.1",)),))) == ()


# ---- facts ----


def test_a_port_of_this_node_is_free_until_a_process_listens_there():
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        place = Endpoint("127.0.0.1", listener.getsockname()[1])
        assert gather(DoctorJob(1, (place,))).ports == (EndpointPort(place, "taken", "Address already in use"),)
    assert [each.state for each in gather(DoctorJob(1, (place,))).ports] == ["free"]


def test_the_port_of_another_node_answers_refuses_or_is_silent(monkeypatch):
    monkeypatch.setattr(host_facts, "only_local", lambda address: False)
    monkeypatch.setattr(host_facts, "network_devices", lambda: ())
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        place = Endpoint("127.0.0.1", listener.getsockname()[1])
        assert [each.state for each in gather(DoctorJob(1, (place,))).ports] == ["answers"]
    assert [each.state for each in gather(DoctorJob(1, (place,))).ports] == ["refuses"]

    def timed_out(address, seconds):
        assert seconds <= host_facts.SECONDS
        raise TimeoutError

    monkeypatch.setattr(host_facts.socket, "create_connection", timed_out)
    assert [each.state for each in gather(DoctorJob(1, (place,))).ports] == ["silent"]


def test_a_name_that_is_never_answered_is_given_up(monkeypatch):
    def hanging(seconds, call, what=""):
        raise TimeoutError

    monkeypatch.setattr(host_facts, "within", hanging)
    facts = gather(DoctorJob(2, (DOOR,)))
    assert facts.endpoints == (ResolvedName("node-a", None),) and facts.limits is None and facts.devices is None


@pytest.mark.parametrize(
    ("whole", "part", "expected"),
    [("", "", True), ("RemoveIPC=no", "", False), ("#RemoveIPC=no", "", True), ("RemoveIPC=no", "RemoveIPC=yes", True)],
)
def test_systemd_removes_shared_memory_unless_its_configuration_says_no(tmp_path, monkeypatch, whole, part, expected):
    monkeypatch.setattr(host_facts.pwd, "getpwuid", lambda user: type("Entry", (), {"pw_name": "ann"}))
    assert not removes_ipc(tmp_path, 1000), "systemd does not run"
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    (tmp_path / "etc/systemd/logind.conf.d").mkdir(parents=True)
    (tmp_path / "etc/systemd/logind.conf").write_text(f"[Login]\n{whole}\n")
    (tmp_path / "etc/systemd/logind.conf.d/site.conf").write_text(f"[Login]\n{part}\n")
    (tmp_path / "usr/lib/systemd/logind.conf.d").mkdir(parents=True)
    (tmp_path / "usr/lib/systemd/logind.conf.d/site.conf").write_text("[Login]\nRemoveIPC=no\n")  # the one in etc wins
    assert removes_ipc(tmp_path, 1000) is expected and not removes_ipc(tmp_path, 999)
    (tmp_path / "var/lib/systemd/linger").mkdir(parents=True)
    (tmp_path / "var/lib/systemd/linger/ann").touch()
    assert not removes_ipc(tmp_path, 1000)


def test_versions_are_judged_by_what_is_installed(monkeypatch):
    versions = {"torch": "2.1.0+cpu", "megatron-core": "0.16.9", "deepspeed": "9.1"}
    monkeypatch.setattr(framework_versions.metadata, "version", versions.__getitem__)
    monkeypatch.setattr(
        framework_versions.metadata, "requires", lambda name: ["torch>=2.6", 'deepspeed>=0.16.9; extra == "deepspeed"']
    )
    too_old, untested = framework_versions.judged_versions()
    assert too_old == ("torch 2.1.0+cpu is older than 2.6",)
    assert [text.partition(";")[0] for text in untested] == ["DeepSpeed 9.1 is untested with ft_plugins"]


# ---- the command ----


@pytest.fixture
def doctor(monkeypatch, capsys, tmp_path):
    """Run the command in a folder of its own; returns exit status and output."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["ft-plugins", "doctor", *words])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return int(stop.value.code or 0), capsys.readouterr().out

    return run


def test_five_planted_faults_are_the_five_findings(doctor, monkeypatch, tmp_path):
    """Shared memory and the folder of temporary files are planted as facts: root can write everywhere."""
    (tmp_path / "job.secret").write_text("x" * 32)
    (tmp_path / "job.secret").chmod(0o644)
    read_only = UsedFolder("temporary files", "/scratch", "[Errno 30] Read-only file system")

    def planted(job):
        facts = gather(job)
        assert facts.limits and all(not folder.problem for folder in facts.folders)
        return replace(
            facts, limits=(replace(SHM, nbytes=GIB, free=GIB),), folders=(read_only, *facts.folders[1:]),
            own_names=HEALTHY.own_names, descriptors=1 << 16, untested=(), ptrace_scope=0, removes_ipc=False,
        )  # fmt: skip

    monkeypatch.setattr(host_facts, "gather", planted)
    job = ("ft-run", "--nnodes", "2", "--nproc-per-node", "8", "--rdzv-endpoint", "no-such-host.invalid:29400")
    flags = ("--reft", "--ftp-secret-file", "job.secret", "--ftp-interface", "no-such0")
    status, said = doctor("--json", "--parameters", "7e9", "--", *job, *flags)
    found = json.loads(said)
    assert (status, found["exit_status"], found["node"]) == (2, 2, socket.gethostname())
    assert {each["grade"] for each in found["findings"]} == {"failure"}
    for expected, each in zip(
        (
            "/dev/shm has 1.0 GiB free",
            "expected mode 0600",
            "no-such-host.invalid does not resolve",
            "--ftp-interface no-such0: no device",
            "temporary files, /scratch, cannot be used",
        ),
        found["findings"],
        strict=True,
    ):
        assert expected in each["what"]
    status, said = doctor("--parameters", "7e9", "--", *job, *flags)
    assert status == 2 and said.startswith(f"{socket.gethostname()}: will not work\n")
    assert all(len(line) <= 80 for line in said.splitlines()) and said.count("to do: ") == 5


def test_a_healthy_node_ends_with_status_0_and_says_only_that(doctor, monkeypatch):
    seen = []
    monkeypatch.setattr(host_facts, "gather", lambda job: seen.append(job) or HEALTHY)
    Path("train.py").touch()
    status, said = doctor("--parameters", "1e6", "--", "ft-run", "--nproc-per-node", "4", "train.py", "--reft")
    assert (status, said) == (0, f"{socket.gethostname()}: fine\n")
    assert seen[0].nodes == 1 and seen[0].endpoints == () and 0 < (seen[0].need or 0) < GIB


def test_a_command_that_ft_run_would_refuse_is_a_failure(doctor):
    status, said = doctor("--", "--reft-intervall", "3")
    assert status == 2 and "did you mean --reft-interval?" in said


def test_what_the_command_says_of_checkpoints_and_the_address_is_examined(doctor, monkeypatch):
    seen = []
    monkeypatch.setattr(host_facts, "gather", lambda job: seen.append(job) or gather(job))
    job = ("--ftp-job", "j", "--reft", "--reft-checkpoint-dir", "/proc/here", "--local-addr", "no-such-host.invalid")
    status, said = doctor("--json", "--", *job)
    found = [each["what"] for each in json.loads(said)["findings"] if each["grade"] == "failure"]
    assert status == 2 and seen[0].checkpoints == Path("/proc/here/j")
    assert found == [
        "--local-addr no-such-host.invalid does not resolve",
        "the folder of checkpoints, /proc/here/j, cannot be used",
    ], "nobody, not even root, can make a file in /proc"


def test_the_folder_of_checkpoints_is_looked_for_where_it_would_be_made(tmp_path):
    (tmp_path / "file").touch()
    for name, problem in (("new/folder", ""), ("file/folder", "Not a directory")):
        facts = gather(DoctorJob(checkpoints=tmp_path / name))
        assert facts.folders[2].path == str(tmp_path / name) and problem in facts.folders[2].problem
        assert bool(facts.folders[2].problem) is bool(problem)
    assert os.listdir(tmp_path) == ["file"]


def test_folders_are_left_as_they_were(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    facts = gather(DoctorJob())
    assert facts.folders[1] == UsedFolder("run directories", str(tmp_path / "ft_plugins"), "")
    assert os.listdir(tmp_path / "ft_plugins") == []
