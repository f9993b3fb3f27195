"""Ranks that an agent, which this process is, has forked from a preloader: real processes behind torch's handlers.

Packages count as installed in the user's site-packages, which lie in the folder of the test.
"""

import json
import os
import select
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing import api as torch_processes
from torch.distributed.elastic.rendezvous import RendezvousParameters

from ft_plugins.config import Config, worker_environment
from ft_plugins.events import Event, Events
from ft_plugins.launcher.agent.agent import ProgressAgent
from ft_plugins.launcher.agent.watcher import Job
from ft_plugins.launcher.preload import parent as preload
from ft_plugins.launcher.preload.new_process import Clocks
from ft_plugins.launcher.preload.parent import PreloadedParent, record_of
from ft_plugins.launcher.preload.preloader import NVML
from ft_plugins.launcher.rendezvous.rendezvous import Rendezvous
from ft_plugins.launcher.rendezvous.rendezvous_settings import RendezvousSettings
from ft_plugins.model import imported

from .rank_fields import PACKAGE, SCRIPT, SELDOM

WAIT = 300.0
SITE = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
READ = pytest.mark.all_configurations  # what is read of a script is asserted in `test_what_to_import`


@dataclass
class Node:
    """`ranks` ranks in `folder`, started again and again by the agent of `parent`."""

    folder: Path
    ranks: int = 1
    script: str = SCRIPT
    errors: str = ""  # the path of standard error, by default a file of each rank
    told: list[Event] = field(default_factory=list)
    token: int = 0

    def __post_init__(self):
        events = Events("n")
        events.subscribe(self.told.append)
        (self.folder / "train.py").write_text(self.script)
        self.config, _ = Config.from_flags(["--reft"])
        self.words = (str(self.folder / "train.py"),)
        self.run_dir = self.folder / "job" / "n"
        self.run_dir.mkdir(parents=True, exist_ok=True)
        job = Job(self.config, "job", "n", self.run_dir)
        self.parent = PreloadedParent(job, self.command, self.ranks, events)

    @property
    def command(self):
        return sys.executable, "-u", "-m", "ft_plugins.launcher.worker", *self.words

    def install(self, package, text):
        path = self.folder / SITE / f"{package}.py"
        path.write_text(text)
        return path

    def handlers(self, **environment):
        """What torch has for the ranks of the next incarnation."""
        self.token += 1
        ours = worker_environment(self.config, self.run_dir, self.token, os.getpid())
        place = {"WORLD_SIZE": str(self.ranks), "LOCAL_WORLD_SIZE": str(self.ranks), "MASTER_ADDR": "localhost"}
        return [
            torch_processes.get_subprocess_handler(
                entrypoint=self.command[0], args=self.command[1:], local_rank_id=rank, numa_options=None,
                env={**place, "RANK": str(rank), "LOCAL_RANK": str(rank), **ours, **environment},
                stdout=str(self.output(rank)), stderr=self.errors or str(self.output(rank, "err")),
            )
            for rank in range(self.ranks)
        ]  # fmt: skip

    def start(self, **environment):
        self.parent.wait()
        with self.parent.starting(self.token + 1):
            return self.handlers(**environment)

    def output(self, rank=0, name="out"):
        return self.folder / f"{name}-{self.token}-{rank}"

    def said(self, handlers):
        """What the ranks found; they have ended."""
        for handler in handlers:
            handler.proc.wait(WAIT)
        texts = [self.output(rank).read_text() for rank in range(self.ranks)]
        assert all(texts), self.output(0, "err").read_text()
        return [tuple(json.loads(text.splitlines()[-1])) for text in texts]

    def reasons(self, name):
        return [each.fields["reason"] for each in self.told if each.name == name]

    def forked(self):
        used = [each.fields for each in self.told if each.name == "preload.used"]
        return [(each["count"], each["cold"]) for each in used]

    def turn_until(self, holds):
        deadline = time.monotonic() + WAIT
        while not holds():
            assert time.monotonic() < deadline and not self.reasons("preload.refused"), self.told
            self.parent.turn()
            time.sleep(0.02)


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Makes a node, whose site-packages hold `package` and `seldom`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / SITE).mkdir(parents=True)
    monkeypatch.setenv("PYTHONUSERBASE", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / SITE}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("KNOWN", "before")
    nodes = []

    def made(**given):
        nodes.append(Node(tmp_path, **given))
        nodes[-1].install("package", PACKAGE)
        nodes[-1].install("seldom", "")
        return nodes[-1]

    yield made
    for node in nodes:
        node.parent.end()


def gone(pid):
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], WAIT)[0])
    finally:
        os.close(descriptor)


def test_a_forked_rank_is_what_a_new_process_is_field_by_field_at_every_start(make):
    reader, writer = os.pipe()  # in which one cannot seek, unlike in the preloader's own output
    node = make(ranks=2, errors=f"/proc/self/fd/{writer}")
    node.install("seldom", SELDOM)
    cold = node.said(node.handlers())
    node.parent.begin()
    for start in range(2):  # before the second one, what the ranks have imported is imported too
        handlers = node.start()
        forked = node.said(handlers)
        assert node.forked() == [(2, 0)] * (start + 1) and [each.proc.returncode for each in handlers] == [0, 0]
        for rank in range(2):
            (before, _), (after, _) = cold[rank], forked[rank]
            assert after["environment"].pop("FTP_TOKEN") == str(node.token)
            before["environment"].pop("FTP_TOKEN", None)
            before["descriptors"].pop("1", None)
            assert after["descriptors"].pop("1") == [str(node.output(rank)), True]
            assert after == before and after["young"] == [True, True]
            assert after["environment"]["SET_BY_PACKAGE"] == "once" and "SET_BY_SELDOM" not in after["environment"]
        one, other = (others for _, others in forked)
        assert one["modules"] == other["modules"]
        assert not set(map(str, one.values())) & set(map(str, other.values())) - {str(one["modules"])}
        assert node.output(0).read_text().startswith("the package is imported\n"), "once, in rank 0"
        assert "imported" not in node.output(1).read_text()
        node.turn_until(lambda: len([each for each in node.told if each.name == "preload.prepared"]) == 2)
    assert len(cold[0][0]) >= 60 and (node.run_dir / "exits").read_text() == "x" * 6
    assert os.read(reader, 1 << 16) == b"to standard error\n" * 6
    os.close(reader)
    os.close(writer)


def test_the_error_and_the_signal_of_a_forked_rank_are_those_of_a_new_process(make):
    node = make(ranks=2)
    node.words = (*node.words, "--fail")
    node.parent._command = node.command
    node.said(node.handlers())
    cold = node.output(1, "err").read_text()
    node.parent.begin()
    handlers = node.start()
    node.said(handlers)
    assert node.forked() == [(2, 0)] and [each.proc.returncode for each in handlers] == [1, 1]
    assert node.output(1, "err").read_text() == cold and cold.endswith("ValueError: a script's own error\n")
    node.words = (*node.words[:1], "--wait")
    node.parent.end()
    node.parent._command = node.command
    node.parent.begin()
    handlers = node.start()
    for handler in handlers:
        handler.close(signal.SIGKILL)  # to its process group
    assert [each.proc.wait(WAIT) for each in handlers] == [-9, -9]


def test_notices_of_preemption_are_not_the_preloaders(make):
    node = make()
    node.install("package", f"{PACKAGE}import os, signal\nos.kill(os.getpid(), signal.SIGUSR1)\n")
    node.parent.begin()
    assert node.parent._process is not None
    node.parent._process.send_signal(signal.SIGUSR2)  # Python starts
    node.said(node.start())
    assert node.forked() == [(1, 0)] and not node.reasons("preload.refused")


def test_packages_that_would_not_be_as_in_a_new_process_are_left_to_the_ranks(make):
    texts = {
        "reads": "import os; RANK = os.environ.get('RANK')",
        "reads_set": "import os; MODE = os.getenv('MODE')",
        "listens": "import socket; PORT = socket.create_server(('127.0.0.1', 0))",
        "runs": "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
        "moves": "import os; os.chdir('/')",
        "fails": "raise RuntimeError('not here')",
        "fine": "import os; COPY = dict(os.environ)",
        "absent_inside": "import no_such_module",
        "nicer": "import gc, os; os.nice(1); gc.disable()",
        "ends": "raise SystemExit(0)",
        "seeds": "import random; random.seed(1)",
        "seeds_numpy": "import numpy.random; numpy.random.seed(1)",
        "seeds_torch": "import torch; torch.manual_seed(1)",
        "shares": "import multiprocessing; LOCK = multiprocessing.Lock()",
        "alarms": "import signal; signal.setitimer(signal.ITIMER_REAL, 1000)",
        "keeps_a_folder": "import tempfile; FOLDER = tempfile.TemporaryDirectory()",
    }
    names = ", ".join(texts)
    script = f"import os\nos.environ['MODE'] = 'x'\nimport nicer\nif 0: import {names}\n{SCRIPT}"
    node = make(script=script)
    for package, text in texts.items():
        node.install(package, text)
    [(cold, _)] = node.said(node.handlers())
    node.parent.begin()
    [(same, _)] = node.said(node.start())
    assert node.forked() == [(1, 0)] and same["environment"]["MODE"] == "x"
    assert (same["nice"], same["collector"][0]) == (cold["nice"], False)
    left = {event.fields["module"]: event.fields["reason"] for event in node.told if event.name == "preload.reduced"}
    assert left.pop("listens").startswith("it keeps socket:[")
    assert left == {
        "reads": "it uses RANK of the environment when it is imported",
        "reads_set": "it uses MODE of the environment when it is imported",
        "runs": "it leaves a thread running",
        "moves": "it changes the working folder",
        "fails": "its import fails: RuntimeError: not here",
        "ends": "its import fails: SystemExit: 0",
        "seeds": "it uses a random generator when it is imported",
        "seeds_numpy": "it uses a random generator when it is imported",
        "seeds_torch": "it uses a random generator when it is imported",
        "shares": "it makes memory that forked processes share",
        "alarms": "it sets a timer when it is imported",
        "keeps_a_folder": "it makes temporary files when it is imported",
    }
    node.turn_until(lambda: len([each for each in node.told if each.name == "preload.prepared"]) == 2)
    assert "seldom" in imported.read_record(record_of(node.folder, node.command)).names


def test_what_ranks_had_imported_is_imported_ahead_of_the_next_start_and_by_the_next_job(make):
    node = make()
    node.words = ("-m", "train")
    node.parent = PreloadedParent(node.parent._job, node.command, 1, node.parent._events)
    node.install("seldom", "import sys; AHEAD = 'ft-preload' in open('/proc/self/comm').read()\nprint(f'{AHEAD=}')")
    node.parent.begin()
    node.said(node.start())
    assert "AHEAD=False" in node.output().read_text()
    node.turn_until(lambda: len([each for each in node.told if each.name == "preload.prepared"]) == 2)
    node.said(node.start())
    assert "AHEAD=True" in node.output().read_text()
    node.parent.end()
    node.parent.begin()
    node.said(node.start())
    assert "AHEAD=True" in node.output().read_text() and node.forked() == [(1, 0)] * 3


def test_a_file_that_has_changed_is_imported_again(make):
    node = make()
    node.parent.begin()
    node.parent.wait()
    path = node.install("package", PACKAGE.replace('environ.get("KNOWN")', 'environ.get("KNOWN"), 2'))
    [(same, _)] = node.said(node.start())
    own = "stack.0"  # to which it writes its stacks when it is asked
    assert {number for number, link in same["descriptors"].items() if not link[0].endswith(own)} == {"0", "1", "2"}
    assert same["package"][2] == ["before", 2] and node.forked() == [(1, 0)]
    assert node.reasons("preload.refused") == [f"{path} has changed since it was imported"]


@pytest.mark.parametrize("trouble", ["killed", "environment", pytest.param("set for C", marks=READ)])
def test_without_a_preloader_that_can_be_used_ranks_are_new_processes(make, trouble, capfd):
    node = make(script=f"import os; os.environ['OMP_PLACES'] = 'cores'\n{SCRIPT}" if trouble == "set for C" else SCRIPT)
    node.parent.begin()
    if trouble == "killed":
        assert node.parent._process is not None
        node.parent.wait()
        node.parent._process.kill()
        assert gone(node.parent._process.pid)
    [(same, _)] = node.said(node.start(**({"KNOWN": "after"} if trouble == "environment" else {})))
    assert node.forked() == [(0, 1)]
    [reason] = node.reasons("preload.refused")[:1]
    expected = {
        "killed": "it has ended; see", "environment": "the environment differs: KNOWN",
        "set for C": "the script sets OMP_PLACES, which"}[trouble]  # fmt: skip
    assert expected in reason and f"ft-run: the preloader cannot be used: {reason}" in capfd.readouterr().err
    assert same["package"][2] == ("after" if trouble == "environment" else "before")


def test_a_preloader_that_is_stopped_is_waited_for_briefly_while_the_node_goes_on_looking_at_the_round(
    make, monkeypatch, capfd
):
    assert preload._FORK_SECONDS == 10.0
    monkeypatch.setattr(preload, "_FORK_SECONDS", 2.0)
    node, looks = make(ranks=2), []
    node.parent._alive = lambda: looks.append(1)
    node.parent.begin()
    node.parent.wait()
    assert node.parent._process is not None
    os.kill(node.parent._process.pid, signal.SIGSTOP)
    waited = len(looks)
    node.said(node.start())
    assert node.forked() == [(0, 2)] and len(looks) > waited
    assert node.reasons("preload.refused") == ["it did not answer within 2 s"], "once: the other rank does not wait"
    assert "did not answer within 2 s; ranks import by themselves" in capfd.readouterr().err


def test_a_preloader_and_its_ranks_end_with_an_agent_that_is_killed(make):
    reader, writer = os.pipe()

    def agent():
        node = make()
        node.words = (*node.words, "--wait")
        node.parent._command = node.command
        node.parent.begin()
        [handler] = node.start()
        assert node.parent._process is not None and node.forked() == [(1, 0)]
        os.write(writer, f"{node.parent._process.pid} {handler.proc.pid}".encode())
        signal.pause()

    process = get_context("fork").Process(target=agent)
    process.start()
    assert select.select([reader], [], [], WAIT)[0]
    pids = list(map(int, os.read(reader, 40).split()))
    process.kill()
    process.join(WAIT)
    assert all(map(gone, pids))
    os.close(reader)
    os.close(writer)


def test_an_error_of_the_preloader_never_ends_the_agent(make, monkeypatch):
    node = make()
    with monkeypatch.context() as patch:
        patch.setattr(preload.packets, "pair", lambda: (_ for _ in ()).throw(OSError(24, "Too many")))
        node.parent.begin()
    assert "Too many" in node.reasons("preload.refused")[0]
    node.said(node.start())
    assert node.forked() == [(0, 1)]


def test_a_forked_rank_that_cannot_be_made_a_new_process_imports_by_itself(make):
    node = make()
    node.install("package", f"{PACKAGE}numpy.random.seed = None\n")
    node.parent.begin()
    [handler] = node.start()
    node.said([handler])
    assert node.forked() == [(1, 0)] and handler.proc.returncode == 0
    assert "imports by itself: TypeError" in node.output(0, "err").read_text()


def test_what_a_module_puts_first_on_the_path_stays_there(make):
    node = make()
    node.install("package", f"{PACKAGE}sys.path.insert(0, '/first')\n")
    [(cold, _)] = node.said(node.handlers())
    node.parent.begin()
    [(forked, _)] = node.said(node.start())
    assert node.forked() == [(1, 0)] and forked["path"] == cold["path"] and cold["path"][0] == "/first"


def test_a_module_of_the_script_that_is_called_as_one_of_python_is_not_executed_ahead(make):
    node = make(script=f"import this\n{SCRIPT}")
    (node.folder / "this.py").write_text("open('executed', 'a').write('x')")
    node.parent.begin()
    node.said(node.start())
    assert node.forked() == [(1, 0)] and (node.folder / "executed").read_text() == "x"


@READ
def test_a_module_of_the_script_that_sets_what_libraries_in_c_read_is_read_too(make):
    node = make(script=f"import beside\n{SCRIPT}")
    (node.folder / "beside.py").write_text("import os; os.environ['OMP_NUM_THREADS'] = '2'")
    node.parent.begin()
    node.said(node.start())
    assert node.forked() == [(0, 1)]
    assert "OMP_NUM_THREADS" in node.reasons("preload.refused")[0]


def test_what_accelerate_sets_for_a_moment_refuses_nothing(make):
    node = make(script=SCRIPT.replace("record()\n", f"os.environ[{NVML!r}] = '1'\nrecord()\n", 1))
    node.parent.begin()
    node.said(node.start())
    assert node.reasons("preload.refused") == [] and node.forked() == [(1, 0)]


@pytest.mark.parametrize("place", ["str(FOLDER)", pytest.param("f'{FOLDER}'", marks=READ)])
def test_a_script_gets_the_modules_of_the_folder_that_it_puts_first_on_the_path(make, place):
    """Told by reading where that is possible, else it has no preloader."""
    start = f"import sys\nfrom pathlib import Path\nFOLDER = Path(__file__).parent / 'own'\nsys.path.insert(0, {place})"
    node = make(script=f"{start}\nprint('an output')\n{SCRIPT}")
    (node.folder / "own").mkdir()
    (node.folder / "own" / "package.py").write_text(PACKAGE)
    node.parent.begin()
    [(same, _)] = node.said(node.start())
    assert same["package"][0] == str(node.folder / "own" / "package.py")
    assert node.forked() == ([(1, 0)] if place == "str(FOLDER)" else [(0, 1)])


@pytest.mark.all_configurations  # twelve seconds of imports
def test_a_file_that_changes_at_each_import_delays_one_rank_only(make):
    node = make(ranks=2)
    node.install("package", "import os\nos.utime(__file__)\n" + PACKAGE)
    node.parent.begin()
    node.said(node.start())
    assert node.forked() == [(0, 2)] and len(node.reasons("preload.refused")) == 2


@pytest.mark.parametrize("trouble", ["name", "versions"])
def test_a_preloader_that_cannot_be_described_does_not_end_the_agent(make, monkeypatch, trouble):
    node = make()
    words = ("\udcff.py",) if trouble == "name" else node.words
    if trouble == "versions":
        monkeypatch.setattr(preload.importlib.metadata, "version", lambda name: 1 / 0)
    command = (*node.command[:4], *words)
    spec = SimpleNamespace(entrypoint=command[0], args=command[1:], local_world_size=1)
    found = preload.parent_of(node.parent._job, spec, node.parent._events, lambda: 0)
    assert (found is None) == (trouble == "versions")
    if found is not None:
        found.end()
    else:
        assert "ZeroDivisionError" in node.reasons("preload.refused")[0]


def test_a_constant_that_is_about_as_large_as_a_clock_shows_is_not_moved():
    clocks = Clocks()
    module = ModuleType("constants")
    vars(module).update(Btu=time.monotonic(), _start_time=time.monotonic(), NOTED=time.time(), SECOND=int(time.time()))
    sys.modules["constants"] = module
    try:
        found = [each.name for each in clocks.noted() if each.names is vars(module)]
    finally:
        del sys.modules["constants"]
    assert found == ["_start_time", "NOTED", "SECOND"]


def test_a_preloader_that_imports_for_too_long_is_waited_for_once(make, monkeypatch):
    monkeypatch.setattr(preload, "_READY_SECONDS", 0.0)
    node = make()
    node.parent.begin()
    node.said(node.start())
    assert node.forked() == [(0, 1)] and node.reasons("preload.refused") == ["it did not answer within 0 s"]
    node.parent.wait()
    assert node.parent._process is None


def test_a_node_whose_ranks_wait_for_imports_goes_on_looking_at_the_round_and_says_so(make, monkeypatch, capsys):
    monkeypatch.setattr(preload, "_LONG_SECONDS", 0.0)
    node = make(script="import slow")
    gate = node.folder / "gate"
    os.mkfifo(gate)
    node.install("slow", f"open({str(gate)!r}).close()")
    handler = Rendezvous(RendezvousSettings.read(RendezvousParameters("ft_plugins", "localhost:0", "alone", 1, 1)))
    looks = []

    def look():
        looks.append(waiting())
        with suppress(OSError):  # it does not import `slow` yet
            os.close(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))
        return looks[-1]

    waiting = handler.num_nodes_waiting
    monkeypatch.setattr(handler, "num_nodes_waiting", look)
    spec = WorkerSpec("default", 1, handler, entrypoint=node.command[0], args=node.command[1:])
    agent = ProgressAgent(
        spec, job=node.parent._job, watcher=None, events=node.parent._events, bounded=True, stop=None,
        logs_specs=DefaultLogsSpecs(),
    )  # fmt: skip
    try:
        assert agent._preload is not None
        agent._preload.wait()
        assert looks and not node.reasons("preload.refused")
        assert capsys.readouterr().out.count("the preloader imports; ranks start when it is ready") == 1
    finally:
        agent.end_preload()
        handler.shutdown()


def test_a_script_and_modules_whose_names_are_not_text_are_as_in_a_new_process(make):
    node = make()
    folder = node.folder / "a\udcff"
    folder.mkdir()
    (folder / "late.py").write_text("")
    node.install("reader", f"import sys; sys.path.append({str(folder)!r}); import late")
    (folder / "t\udcfe.py").write_text(f"import reader\n{SCRIPT}")
    node.words = (str(folder / "t\udcfe.py"), "argument\udcfd")
    node.parent = PreloadedParent(node.parent._job, node.command, 1, node.parent._events)
    [(cold, _)] = node.said(node.handlers(ODD="v\udcfc"))
    node.parent.begin()
    [(forked, _)] = node.said(node.start(ODD="v\udcfc"))
    assert node.forked() == [(1, 0)] and forked["environment"].pop("FTP_TOKEN") != cold["environment"].pop("FTP_TOKEN")
    assert all(forked[name] == cold[name] for name in ("argv", "path", "name", "environment"))
