"""Standby workers of an agent, which this process is: real processes behind torch's handlers."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import api as torch_processes

from ft_plugins.config import Config, worker_environment
from ft_plugins.events import Event, Events
from ft_plugins.launcher.preload import standby_plan, standby_pool
from ft_plugins.launcher.preload.standby_pool import StandbyPool
from ft_plugins.model import imported

WAIT = 120.0
SCRIPT = """
from __future__ import annotations
import faulthandler, json, os, resource, signal, sys, tempfile, threading, warnings
from multiprocessing import get_context
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent / "more"))
sys.path.append(os.environ["PLACE"])  # which is in PYTHONPATH, too
os.environ["EXTENDED"] = os.environ["EXTENDED"] + "once"
warnings.filterwarnings("ignore", category=FutureWarning)
import beside
import torch
from ft_plugins.config import launch_context
from ft_plugins.model import imported
os.environ["TMPDIR"] = os.environ["PLACE"]

context = launch_context()
imported.write(context.run_dir, context.local_rank, context.token)
links = []
for each in os.listdir("/proc/self/fd"):
    if os.path.lexists(f"/proc/self/fd/{each}"):
        links.append(os.readlink(f"/proc/self/fd/{each}"))
told = {
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "path": sys.path,
    "environment": dict(os.environ),
    "flags": str(sys.flags),
    "name": (__name__, __file__, __package__),
    "main": sys.modules["__main__"].__dict__ is globals(),
    "handlers": {str(number): str(signal.getsignal(number)) for number in signal.valid_signals()},
    "blocked": len(signal.pthread_sigmask(0, [])),
    "leads": os.getpid() == os.getsid(0) == os.getpgid(0),
    "faulthandler": faulthandler.is_enabled(),
    "thread": threading.current_thread() is threading.main_thread(),
    "nice": os.nice(0),
    "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
    "finders": [type(each).__name__ for each in sys.meta_path],
    "descriptors": sorted(link for link in links if not link.startswith("/proc/")),
    "torch": (torch.is_grad_enabled(), torch.get_num_threads()),
    "main_of_beside": beside.MAIN is sys.modules["__main__"],
    "noted": beside.NOTED - beside.KEPT[0] > 1,
    "temporary": tempfile.gettempdir() == os.environ["TMPDIR"],
    "filters": [str(each) for each in warnings.filters],
    "oom_score_adj": Path("/proc/self/oom_score_adj").read_text(),
    "beside": (beside.__file__, beside.IMPORTED_IN == os.getpid(), beside.LOCAL.value),
}
print("to standard error", file=sys.stderr)
print(json.dumps(told))
if sys.argv[1:] == ["fail"]:
    raise ValueError("a script's own error")
"""
BESIDE = """
import __main__ as MAIN
import os, threading, time
from pathlib import Path
NOTED = time.time()
KEPT = [NOTED]
SETTINGS = Path(__file__).with_name("settings.txt").read_text()
os.environ["SET_BY_AN_IMPORT"] += "once"
IMPORTED_IN = os.getpid()
LOCAL = threading.local()
LOCAL.value = 3
"""
JOIN = "import torch.distributed as d; 'standby' in ' '.join(sys.orig_argv) and d.init_process_group('gloo')"
MORE = pytest.mark.all_configurations


@dataclass
class Node:
    """One rank in `folder`, started again and again by the agent of `pool`."""

    folder: Path
    config: Config
    told: list[Event] = field(default_factory=list)
    token: int = 0
    module: bool = False

    def __post_init__(self) -> None:
        events = Events("n")
        events.subscribe(self.told.append)
        self.pool = StandbyPool(self.config, self.folder, 1, events)
        (self.folder / "train.py").write_text(SCRIPT)
        (self.folder / "beside.py").write_text(BESIDE)
        (self.folder / "settings.txt").write_text("LOCAL.value = 3")
        (self.folder / "place").mkdir()

    def start(self, *words: str, **environment: str) -> Any:
        """The rank in its next incarnation: what torch has for it."""
        self.token += 1
        ours = worker_environment(self.config, self.folder, self.token, os.getpid())
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        fresh = {
            "SET_BY_AN_IMPORT": "", "EXTENDED": "", "PLACE": str(self.folder / "place"),
            "PYTHONPATH": f"{self.folder / 'place'}:{os.environ.get('PYTHONPATH', '')}",
            "MASTER_ADDR": "localhost", "MASTER_PORT": str(29500 + self.token), "OMP_NUM_THREADS": "1",
            "TORCHELASTIC_RESTART_COUNT": str(self.token - 1),
            "TORCHELASTIC_ERROR_FILE": str(self.folder / f"error-{self.token}.json"),
        }  # fmt: skip
        script = ["-m", "train"] if self.module else [str(self.folder / "train.py")]
        with self.pool.starting(self.token):
            return torch_processes.get_subprocess_handler(
                entrypoint=sys.executable, args=("-u", "-m", "ft_plugins.launcher.worker", *script, *words),
                env={**place, **fresh, **ours, **environment}, local_rank_id=0,
                stdout=str(self.folder / f"out-{self.token}"), stderr=str(self.folder / f"err-{self.token}"),
                numa_options=None,
            )  # fmt: skip

    def said(self, handler: Any) -> dict[str, Any]:
        """What the rank found when it ran; it has ended."""
        handler.proc.wait(WAIT)
        text = (self.folder / f"out-{self.token}").read_text()
        error = (self.folder / f"err-{self.token}").read_text()
        assert text, (handler.proc.returncode, error)
        assert "to standard error" in error
        found: dict[str, Any] = json.loads(text)
        return found

    def wait_until(self, event: str) -> Event:
        deadline = time.monotonic() + WAIT
        while not (found := [each for each in self.told if each.name == event]):
            assert time.monotonic() < deadline and not self.refusals(), self.told
            self.pool.turn()
            time.sleep(0.02)
        return found[-1]

    def run_cut_short(self) -> None:
        """A first incarnation that had imported what this process has, and the module beside the script."""
        self.start().proc.kill()
        imported.write(self.folder, 0, self.token)
        written = imported.read(self.folder, 0)
        whole = replace(written, names=(*written.names, "beside"))
        imported.path_of(self.folder, 0).write_text(json.dumps(asdict(whole)))

    def prepared(self, *words: str, whole: bool = False) -> int:
        """A first incarnation has ended, and a standby waits: its pid. `whole`: it ran, and told what it found."""
        if whole:
            self.cold = self.said(self.start(*words))
        else:
            self.run_cut_short()
        self.wait_until("standbys.prepared")
        [standby] = self.pool._standbys.values()
        return standby.process.pid

    def refusals(self) -> list[str]:
        return [each.fields["reason"] for each in self.told if each.name == "standby.refused"]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Node]]:
    """Makes a node; no pause before its first standby."""
    monkeypatch.setattr(standby_plan, "SETTLED_SECONDS", 0.0)
    monkeypatch.setattr(standby_plan, "may_import", lambda idle, turn: True)
    monkeypatch.chdir(tmp_path)
    nodes: list[Node] = []

    def made(*flags: str, module: bool = False) -> Node:
        config, _ = Config.from_flags(["--reft", *(flags or ("--ftp-warm-workers", "on"))])
        nodes.append(Node(tmp_path, config, module=module))
        return nodes[0]

    yield made
    for node in nodes:
        node.pool.end()


def gone(pid: int) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], WAIT)[0])
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("module", [False, pytest.param(True, marks=MORE)], ids=["script", "module"])
def test_a_standby_becomes_the_rank_and_all_is_as_in_a_new_process(make: Callable[..., Node], module: bool) -> None:
    node = make(module=module)
    pid = node.prepared("--lr", "1", whole=True)
    assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"  # the kernel ends it before a rank
    time.sleep(1.1)
    handler = node.start("--lr", "1")
    assert handler.proc.pid == pid and node.refusals() == []
    warm, cold = node.said(handler), node.cold
    assert handler.proc.returncode == 0
    before, after = cold.pop("environment"), warm.pop("environment")
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert after["SET_BY_AN_IMPORT"] == "once"
    assert changed == {"FTP_TOKEN", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE"}
    for each in (warm, cold):
        each["descriptors"] = [link.replace("-2", "-1") for link in each["descriptors"]]
    assert warm["beside"][1:] == [True, 3] and warm["main_of_beside"] and warm["temporary"]
    assert (cold.pop("noted"), warm.pop("noted")) == (False, True)  # as if it had been imported just now
    assert warm == cold
    [used] = [event for event in node.told if event.name == "standbys.used"]
    assert (used.fields["count"], used.fields["cold"]) == (1, 0)


def test_its_error_is_that_of_a_new_process(make: Callable[..., Node]) -> None:
    node = make()
    pid = node.prepared("fail", whole=True)
    handler = node.start("fail")
    node.said(handler)
    assert (handler.proc.pid, handler.proc.returncode) == (pid, 1)
    texts = [json.loads((node.folder / f"error-{token}.json").read_text())["message"] for token in (1, 2)]
    assert [text["message"] for text in texts] == ["ValueError: a script's own error"] * 2
    last = [(node.folder / f"err-{token}").read_text().splitlines()[-3:] for token in (1, 2)]
    assert last[0] == last[1]


@pytest.mark.parametrize("name", ["beside.py", "settings.txt", pytest.param("train.py", marks=MORE)])
def test_a_file_that_has_changed_is_imported_again(make: Callable[..., Node], name: str) -> None:
    node = make()
    pid = node.prepared()
    path = node.folder / name
    before = path.stat()
    path.write_text(path.read_text().replace("LOCAL.value = 3", "LOCAL.value = 4"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a copy that keeps times
    shutil.rmtree(node.folder / "__pycache__", ignore_errors=True)  # Python itself looks at time and size alone
    handler = node.start()
    assert handler.proc.pid != pid and gone(pid)
    assert node.refusals() == [f"{path} has changed since it was imported"]
    assert node.said(handler)["beside"][2] == (4 if name == "beside.py" else 3)


@pytest.mark.parametrize(
    ("beside", "change", "taken"),
    [
        ("", {"RANK": "1", "WORLD_SIZE": "2"}, True),
        ("RANK = int(os.environ['RANK'])", {"RANK": "1", "WORLD_SIZE": "2"}, False),
        pytest.param("PORT = os.environ.get('MASTER_PORT')", {}, False, marks=MORE),
        pytest.param("", {"OMP_NUM_THREADS": "2"}, False, marks=MORE),
        pytest.param("", {"CUDA_VISIBLE_DEVICES": "1"}, False, marks=MORE),
    ],
    ids=["handed-over", "rank-read", "port-read", "threads", "devices"],
)
def test_what_imports_have_read_is_as_it_was(
    make: Callable[..., Node], beside: str, change: dict[str, str], taken: bool
) -> None:
    node = make()
    with (node.folder / "beside.py").open("a") as file:
        file.write(beside)
    pid = node.prepared()
    handler = node.start(**change)
    assert (handler.proc.pid == pid) is taken, node.refusals()
    assert taken or "the environment differs: " in node.refusals()[0]
    assert {name: node.said(handler)["environment"][name] for name in change} == change


@pytest.mark.parametrize("moment", ["waiting", *(pytest.param(one, marks=MORE) for one in ("handed-over", "stopped"))])
def test_one_that_is_killed_or_does_not_answer_is_replaced_by_a_new_process(
    make: Callable[..., Node], moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make()
    pid = node.prepared()
    if moment == "waiting":
        os.kill(pid, signal.SIGKILL)
    else:  # after it has said that no file has changed
        monkeypatch.setattr(standby_pool, "_TAKE_SECONDS", 0.3)
        checked = node.pool._check

        def check() -> None:
            checked()
            os.kill(pid, signal.SIGKILL if moment == "handed-over" else signal.SIGSTOP)

        monkeypatch.setattr(node.pool, "_check", check)
    handler = node.start()
    assert handler.proc.pid != pid and gone(pid)
    assert node.refusals() == ["no answer in time" if moment == "stopped" else "it has ended"]
    assert node.said(handler)["argv"] == [str(node.folder / "train.py")]


@pytest.mark.parametrize(
    ("beside", "reason"),
    [
        ("if 'standby' in ' '.join(sys.orig_argv): raise RuntimeError('not here')", "RuntimeError: not here"),
        ("open('/var/tmp/ftp-standby-log', 'a')", "an import writes to the file /var/tmp/ftp-standby-log"),
        pytest.param(
            "PORT = socket.create_server(('127.0.0.1', 0))", "an import holds a connection or a port", marks=MORE
        ),
        (
            "torch.cuda.is_available() or setattr(torch.cuda, '_initialized', 'standby' in ' '.join(sys.orig_argv))",
            "an import has created a CUDA context",
        ),
        (
            "import torch.distributed as d; 'standby' in ' '.join(sys.orig_argv) and d.init_process_group('gloo')",
            "MASTER_",
        ),
        ("import yaml", "has not: "),
        pytest.param("os.chdir('/')", "an import changes the working folder", marks=MORE),
        pytest.param("os.environ['EXTENDED'] = ''", "uses before: EXTENDED", marks=MORE),
        pytest.param(
            "import warnings; warnings.simplefilter('error')", "('error') after the script has ('ignore')", marks=MORE
        ),
    ],
    ids=["fails", "writes", "listens", "cuda", "joins", "more", "moves", "sets", "filters"],
)
def test_a_module_that_does_more_than_to_define_names_is_not_imported_ahead(
    make: Callable[..., Node], beside: str, reason: str
) -> None:
    node = make()
    if "/var/tmp" in beside:
        Path("/var/tmp/ftp-standby-log").touch()
    (node.folder / "beside.py").write_text(f"{BESIDE}import socket, sys, torch\n{beside}\n")
    node.run_cut_short()
    if reason == "has not: ":
        written = imported.read(node.folder, 0)
        names = [name for name in written.names if not name.startswith("yaml")]
        imported.path_of(node.folder, 0).write_text(json.dumps(asdict(replace(written, names=tuple(names)))))
    assert reason in node.wait_until("standby.refused").fields["reason"]
    assert node.pool._standbys == {}


def test_with_too_little_memory_there_is_none(make: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby_pool.room, "headroom", lambda: 1 << 30)
    node = make("--ftp-warm-workers", "auto")
    node.run_cut_short()
    assert "GiB" in node.wait_until("standbys.omitted").fields["reason"]
    assert node.pool._standbys == {}


def test_none_is_started_before_the_running_incarnation_has_imported(make: Callable[..., Node]) -> None:
    """What an earlier one has written does not count."""
    node = make()
    node.run_cut_short()
    node.start().proc.kill()
    assert not imported.path_of(node.folder, 0).exists()
    imported.write(node.folder, 0, node.token - 1)
    for _ in range(20):
        node.pool.turn()
    assert node.pool._standbys == {} and node.told == []


@pytest.mark.parametrize("at", ["turn", "restart"])
def test_an_error_of_a_standby_never_ends_the_agent(
    make: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    node = make()
    if at == "turn":
        node.run_cut_short()
        with monkeypatch.context() as patch:
            patch.setattr(standby_pool.socket, "socketpair", lambda: (_ for _ in ()).throw(OSError(24, "Too many")))
            deadline = time.monotonic() + WAIT
            while not node.refusals() and time.monotonic() < deadline:
                node.pool.turn()
        assert "Too many" in node.refusals()[0]
    else:
        pid = node.prepared()
        monkeypatch.setattr(node.pool, "_check", lambda: 1 // 0)
        assert node.start().proc.pid != pid and gone(pid)
        assert "ZeroDivisionError" in node.refusals()[0]


def test_it_ends_with_an_agent_that_is_killed(make: Callable[..., Node]) -> None:
    reader, writer = os.pipe()

    def agent() -> None:
        os.write(writer, str(make().prepared()).encode())
        signal.pause()

    process = get_context("fork").Process(target=agent)
    process.start()
    assert select.select([reader], [], [], WAIT)[0]
    pid = int(os.read(reader, 20))
    os.kill(pid, signal.SIGSTOP)  # so that it does not notice that its socket is closed
    process.kill()
    process.join(WAIT)
    assert gone(pid)
    os.close(reader)
    os.close(writer)
