"""Restarts on standby workers, of real commands: they end bit for bit as the unfailed run, and leave nothing behind.

A rank stops itself in a late iteration, so that cores are idle until standbys are prepared; then it is killed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from ft_plugins.events import Event, read
from ft_plugins.smp.serve.client import Client
from ft_plugins.smp.watch import liveness
from harness import megatron_runs
from harness.deepspeed_runs import EXAMPLE as DEEPSPEED
from harness.deepspeed_runs import DeepSpeedConfiguration, DeepSpeedRun
from harness.golden import assert_identical

BOUND = 280.0
EXAMPLES = megatron_runs.EXAMPLE.parent
FT_RUN = (sys.executable, "-m", "ft_plugins.launcher.command")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
PATIENT = ("--ftp-detect-seconds", "600", "--ftp-hang-seconds", "0")  # a stopped rank is neither lost nor hangs
STOPPED_IN = 5  # iteration


@dataclass
class Command:
    """A job as a user starts it, in `folder`."""

    folder: Path
    words: tuple[str, ...]
    ranks: int
    process: subprocess.Popen[bytes] | None = None
    seen: set[psutil.Process] = field(default_factory=set)

    @property
    def digests(self) -> Path:
        return self.folder / "state-"

    @property
    def loss_log(self) -> Path:
        return self.folder / "loss.jsonl"

    @property
    def run_dir(self) -> Path | None:
        return next(iter(self.folder.glob("ft_plugins/*/*")), None)

    def start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(self.folder)}
        with (self.folder / "out").open("a") as told:
            self.process = subprocess.Popen(
                self.words, cwd=self.folder, env=environment, stdout=told, stderr=subprocess.STDOUT
            )

    def output(self) -> str:
        return (self.folder / "out").read_text()[-3000:]

    def end(self) -> int:
        assert self.process is not None
        return self.process.wait(BOUND)

    def events(self, name: str) -> list[Event]:
        path = self.run_dir and self.run_dir / "events.jsonl"
        return [event for event in read(path) if event.name == name] if path and path.exists() else []

    def pid_of(self, rank: int) -> int:
        return [event.pid for event in self.events("rank.attached") if event.rank == rank][-1]

    def prepared(self) -> list[psutil.Process]:
        """Its standbys, once they wait."""
        assert self.process is not None
        deadline = time.monotonic() + BOUND
        while not self.events("standbys.prepared"):
            assert time.monotonic() < deadline and self.process.poll() is None, self.output()
            assert not self.events("standby.refused"), self.events("standby.refused")
            time.sleep(0.1)
        self.seen |= set(psutil.Process(self.process.pid).children(recursive=True))
        return [each for each in self.seen if "ft_plugins.launcher.preload.standby" in each.cmdline()]

    def left(self) -> list[psutil.Process]:
        """Of the processes that were there: those that still are, the SMP apart."""
        _, alive = psutil.wait_procs(self.seen, 20)
        return [each for each in alive if "ft_plugins.smp" not in " ".join(each.cmdline())]

    def clean(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(BOUND)
        if (run_dir := self.run_dir) and liveness.held(run_dir / "smp.lock"):
            with Client(run_dir) as client:
                client.end()


class Maker:
    """Makes commands in folders of their own."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.made: list[Command] = []

    def folder(self) -> Path:
        folder = self._root / f"w{len(list(self._root.iterdir()))}"
        folder.mkdir(mode=0o700)
        return folder

    def command(self, folder: Path, words: tuple[Any, ...], ranks: int) -> Command:
        self.made.append(Command(folder, tuple(map(str, words)), ranks))
        return self.made[-1]

    def torch(self, killed: bool, script: Path = EXAMPLES / "torch_loop.py") -> Command:
        folder = self.folder()
        own = ("--iterations", 16, "--optimizer", "adamw-amsgrad", *files(folder))
        fault = f"--ftp-faults=update.end@iteration={STOPPED_IN},rank=1,restart=0:stop"
        protected = (*FT_RUN, "--nproc-per-node", 2, "--reft", *PATIENT, *self._name(), fault, script, *own)
        plain = (*TORCHRUN, "--nproc-per-node", 2, script, *own, "--unprotected")
        return self.command(folder, protected if killed else plain, 2)

    def megatron(self, killed: bool) -> Command:
        folder = self.folder()
        sizes = ("--tp", 2, "--bf16", "--distributed-optimizer", "--iterations", 8)
        fault = f"--ftp-faults=update.middle@iteration={STOPPED_IN},rank=1,restart=0:stop"
        protection = ("--reft", *PATIENT, *self._name(), fault) if killed else ()
        words = (*FT_RUN, "--nproc-per-node", 4, *protection, megatron_runs.EXAMPLE, *sizes, *files(folder))
        return self.command(folder, words, 4)

    def deepspeed(self, killed: bool) -> Command:
        folder = self.folder()
        fault = f"update.middle@iteration={STOPPED_IN},rank=1,restart=0:stop"
        block = {"reft": {}, "faults": fault, "detect_seconds": 600.0, "hang_seconds": 0.0} if killed else {}
        run = DeepSpeedRun("d", folder, DeepSpeedConfiguration(2, 1), block, iterations=8)
        return self.command(folder, (*FT_RUN, "--nproc-per-node", 2, DEEPSPEED, *run.spec().argv), 2)

    def _name(self) -> tuple[str, ...]:
        return ("--ftp-job", f"warm-{os.getpid()}-{len(self.made)}")


def files(folder: Path) -> tuple[Any, ...]:
    return "--loss-log", folder / "loss.jsonl", "--state-digest", folder / "state-"


@pytest.fixture
def make(own_environment: Path) -> Iterator[Maker]:
    maker = Maker(own_environment)
    yield maker
    for command in maker.made:
        command.clean()
    assert not [command.left() for command in maker.made if command.left()]
    assert not list(Path("/dev/shm").glob(f"ftp-warm-{os.getpid()}-*"))


FRAMEWORKS = [
    "torch",
    pytest.param("megatron", marks=pytest.mark.skipif(find_spec("megatron") is None, reason="needs [megatron]")),
    pytest.param("deepspeed", marks=pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs [deepspeed]")),
]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_killed_and_restarted_on_standbys_it_ends_bit_for_bit_as_the_unfailed_run(make: Maker, framework: str) -> None:
    golden, run = getattr(make, framework)(killed=False), getattr(make, framework)(killed=True)
    golden.start()
    assert golden.end() == 0, golden.output()
    run.start()
    standbys = {each.pid for each in run.prepared()}
    assert len(standbys) == run.ranks
    os.kill(run.pid_of(1), 9)
    assert run.end() == 0, run.output()
    [used] = run.events("standbys.used")
    assert (used.fields["count"], used.fields["cold"]) == (run.ranks, 0), run.events("standby.refused")
    attached = [event.pid for event in run.events("rank.attached")]
    assert set(attached[-run.ranks :]) == standbys
    restored = [event.fields["iteration"] for event in run.events("state.restored")]
    assert restored == [STOPPED_IN - 1] * run.ranks
    assert_identical(run, golden, run.ranks)
    assert run.events("protection.lost") == [] and run.left() == []


def test_a_standby_that_is_gone_is_replaced_by_a_new_process_beside_one_that_is_used(make: Maker) -> None:
    golden, run = make.torch(killed=False), make.torch(killed=True)
    golden.start()
    assert golden.end() == 0, golden.output()
    run.start()
    run.prepared()[0].kill()
    os.kill(run.pid_of(1), 9)
    assert run.end() == 0, run.output()
    [used] = run.events("standbys.used")
    assert (used.fields["count"], used.fields["cold"]) == (1, 1)
    assert [event.fields["reason"] for event in run.events("standby.refused")] == ["it has ended"]
    assert_identical(run, golden, 2)


def test_a_module_beside_the_script_that_has_changed_is_not_run_from_a_standby(make: Maker) -> None:
    own = make.folder()
    for name in ("torch_loop.py", "byte_text.py"):
        shutil.copy(EXAMPLES / name, own)
    golden, run = make.torch(killed=False), make.torch(killed=True, script=own / "torch_loop.py")
    golden.start()
    assert golden.end() == 0, golden.output()
    run.start()
    standbys = run.prepared()
    with (own / "byte_text.py").open("a") as file:
        file.write("\n# changed\n")
    os.kill(run.pid_of(1), 9)
    assert run.end() == 0, run.output()
    [used] = run.events("standbys.used")
    assert (used.fields["count"], used.fields["cold"]) == (0, 2)
    reasons = [event.fields["reason"] for event in run.events("standby.refused")]
    assert reasons == [f"{own / 'byte_text.py'} has changed since it was imported"] * 2
    assert not any(each.is_running() for each in standbys)
    assert_identical(run, golden, 2)


def test_standbys_end_with_an_ft_run_that_is_killed_and_the_same_command_resumes(make: Maker) -> None:
    golden, run = make.torch(killed=False), make.torch(killed=True)
    golden.start()
    assert golden.end() == 0, golden.output()
    run.start()
    assert len(run.prepared()) == 2 and run.process is not None
    run.process.kill()
    run.end()
    assert run.left() == []
    run.words = tuple(word for word in run.words if not word.startswith("--ftp-faults"))
    run.start()
    assert run.end() == 0, run.output()
    assert_identical(run, golden, 2)
