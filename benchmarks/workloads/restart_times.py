"""Kill a rank of a job of 8 several times: under ft-run with REFT, and under torchrun with the framework's checkpoints.

    restart   the kill -> the next iteration that is completed, whichever it is
    redo      from then until the iteration in which the rank was killed is completed
    lost      iterations that were completed before the kill and computed again

Both jobs run the same example with the same sizes, one after the other, on an otherwise idle machine as far as that is
possible. Kills come at the same places: a quarter, a half, three quarters of the checkpoint interval after a
checkpoint, on average in the middle, as failures come. torchrun restarts by --max-restarts and looks every 0.1 s. It
gets TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which its restarted ranks find addresses of the killed ones in the
agent's store, and fail or hang (seen with torch 2.13 and gloo; pytorch issue 135712).

In: a framework, an interval. Out: `RestartTimes` of either side.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from ft_plugins.rehearse.driver import DrivenJob
from ft_plugins.report.recovery_phases import PHASES, RecoveryPhases, recovery_phases
from ft_plugins.smp.watch import liveness
from harness.forkserver import load
from workloads.running import PROGRESS, say

quickstart: Any = load(str(Path(__file__).resolve().parents[2] / "launch" / "quickstart.py"))
RANKS: int = quickstart.RANKS
KILLED = 5  # rank
BOUND = 300.0  # seconds, for any wait
_SAVING = 0.05  # of the time, for checkpoints: what a user may accept
ENDLESS = 100_000  # iterations
_POLL_SECONDS = 0.05
FRAMEWORKS: tuple[str, ...] = tuple(quickstart.FRAMEWORKS)


@dataclass(frozen=True)
class Kill:
    """One kill, in seconds and iterations. `phases`: of ft-run's job."""

    restart: float
    redo: float
    lost: int
    phases: RecoveryPhases | None = None

    @property
    def seconds(self) -> float:
        """From the kill until the iteration in which it came is completed."""
        return self.restart + self.redo


@dataclass(frozen=True)
class LogLine:
    """One line of the example's loss log: an iteration was completed at `time`, after so many restarts."""

    iteration: int
    restart: int
    time: float


@dataclass(frozen=True)
class RestartTimes:
    """All kills of one job, and the seconds of an iteration and of a save (0 for none)."""

    kills: tuple[Kill, ...]
    iteration: float
    save: float = 0.0

    def middle(self, value: Callable[[Kill], float]) -> float:
        """The median over the kills."""
        return median(map(value, self.kills))

    def phase(self, name: str) -> float:
        """The median of a phase over the kills; 0 if it is unknown."""
        return self.middle(lambda kill: (kill.phases.phases[name] or 0.0) if kill.phases else 0.0)


def read_lines(log: Path) -> list[LogLine]:
    """The complete lines of a loss log."""
    if not log.exists():
        return []
    lines = [line for line in log.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return [LogLine(one["iteration"], one["restart"], one["time"]) for one in map(json.loads, lines)]


def kill_of(killed: float, restarts: int, lines: Sequence[LogLine]) -> Kill | None:
    """What a kill at time `killed`, after so many restarts, has cost; None until that is known. Pure."""
    before = max((one.iteration for one in lines if one.restart <= restarts), default=0)
    after = [one for one in lines if one.restart > restarts]
    done = next((one for one in after if one.iteration > before), None)
    if done is None:
        return None
    first = after[0]
    return Kill(first.time - killed, done.time - first.time, max(0, before + 1 - first.iteration))


def seconds_of_iteration(lines: Sequence[LogLine]) -> float:
    """The median time between two lines of consecutive iterations of one start. Pure."""
    return median(
        later.time - earlier.time
        for earlier, later in zip(lines, lines[1:], strict=False)
        if later.restart == earlier.restart
    )


def with_reft(framework: str, folder: Path, kills: Sequence[int], flags: Sequence[str] = ()) -> RestartTimes:
    """Kills in iterations `kills` of a job under ft-run that captures every iteration."""
    plan = quickstart.parse(["--framework", framework, "--iterations", str(ENDLESS), "--out", str(folder)])
    folder.mkdir(parents=True)
    if plan.settings is not None:
        (folder / quickstart.SETTINGS).write_text(json.dumps(plan.settings))
    log = folder / "loss.jsonl"
    found: list[Kill] = []
    with DrivenJob(
        f"restart-{os.getpid()}-{framework}", [*flags, *plan.arguments(folder)], folder, log, ENDLESS
    ) as job:
        for number, at in enumerate(kills):
            _until(_reached(log, at, lambda: job.follow(_POLL_SECONDS, BOUND)), f"iteration {at}")
            killed = time.time()
            job.kill(KILLED)
            found.append(_cost(killed, number, log, lambda: job.follow(_POLL_SECONDS, BOUND)))
            found[-1] = replace(found[-1], phases=_phases(job, number))
        return RestartTimes(tuple(found), seconds_of_iteration(read_lines(log)))


def with_own_checkpoints(framework: str, folder: Path, kills: Sequence[int], every: int) -> RestartTimes:
    """The same job under torchrun, which saves every so many iterations."""
    plan = quickstart.parse(["--framework", framework, "--iterations", str(ENDLESS), "--out", str(folder)])
    folder.mkdir(parents=True)
    log, saves = folder / "loss.jsonl", folder / "checkpoints" / "saves.jsonl"
    saves.parent.mkdir()
    words = [
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", "99"),
        str(Path(__file__).with_name(f"own_checkpoint_{framework}.py")),
        *("--checkpoints", str(saves.parent), "--every", str(every)),
        *plan.job, "--iterations", str(ENDLESS), "--loss-log", str(log),
    ]  # fmt: skip
    if plan.settings is not None:
        settings = {name: value for name, value in plan.settings.items() if name != "ft_plugins"}
        (folder / quickstart.SETTINGS).write_text(json.dumps(settings))
        words += ["--deepspeed_config", str(folder / quickstart.SETTINGS)]
    found: list[Kill] = []
    killed_ranks: list[int] = []
    with (folder / "output.log").open("wb") as output:
        job = subprocess.Popen(
            [sys.executable, *words], stdout=output, stderr=output, start_new_session=True,
            env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        )  # fmt: skip
    try:
        for number, at in enumerate(kills):
            _until(_reached(log, at, job.poll), f"iteration {at}", job)
            killed = time.time()
            killed_ranks.append(_pid_of(KILLED, job.pid))
            os.kill(killed_ranks[-1], signal.SIGKILL)
            found.append(_cost(killed, number, log, job.poll))
        save = median(map(float, saves.read_text().split()))
        return RestartTimes(tuple(found), seconds_of_iteration(read_lines(log)), save)
    finally:
        _end(job)
        for group in killed_ranks:  # processes that a killed rank had started to write its checkpoint
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


def places(framework_kills: int, every: int) -> list[int]:
    """After which iterations to kill: a quarter, a half, three quarters of the interval after every second checkpoint,
    so that the job has gone on between two kills."""
    quarters = (1, 2, 3)
    return [(2 * number + 1) * every + quarters[number % 3] * every // 4 for number in range(framework_kills)]


def _reached(log: Path, iteration: int, look: Callable[[], object]) -> Callable[[], bool]:
    """Whether `iteration` is logged."""

    def reached() -> bool:
        look()
        return any(one.iteration >= iteration for one in read_lines(log))

    return reached


def _phases(job: DrivenJob, number: int) -> RecoveryPhases:
    """The phases of that recovery, once they are known."""
    _until(lambda: len(recovery_phases(job.events())) > number, "the phases of the recovery")
    return recovery_phases(job.events())[number]


def _cost(killed: float, restarts: int, log: Path, look: Callable[[], object]) -> Kill:
    """What a kill has cost, once that is known."""
    found: list[Kill] = []

    def known() -> bool:
        look()
        one = kill_of(killed, restarts, read_lines(log))
        found.extend([one] if one else [])
        return bool(found)

    _until(known, "an iteration after the kill")
    return found[0]


def _pid_of(rank: int, launcher: int) -> int:
    """The process of `rank` below `launcher`."""
    for process in psutil.Process(launcher).children(recursive=True):
        try:
            if process.environ().get("RANK") == str(rank):
                return process.pid
        except psutil.Error:
            continue
    raise AssertionError(f"no process of rank {rank} was found")


def _until(holds: Callable[[], object], what: str, job: subprocess.Popen[bytes] | None = None) -> None:
    deadline = time.monotonic() + BOUND
    while not holds():
        assert time.monotonic() < deadline, f"{what} did not come within {BOUND:.0f} s"
        assert job is None or job.poll() is None, f"the job ended with status {job.returncode if job else 0}"
        time.sleep(_POLL_SECONDS)


def _end(job: subprocess.Popen[bytes]) -> None:
    """End the launcher and what it has started."""
    started = [(each.pid, liveness.started(each.pid)) for each in psutil.Process(job.pid).children(recursive=True)]
    job.terminate()
    try:
        job.wait(30)
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait()
    liveness.kill_and_wait(started, 10)


def measure(frameworks: Sequence[str], kills: int, every: int) -> dict[str, float]:
    """The figures of all `frameworks`, and the least `recovery_x`. Prints a table."""
    found: dict[str, float] = {}
    if frameworks:
        os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
        say(head())
    for framework in frameworks:
        with tempfile.TemporaryDirectory(prefix="ft-", dir="/tmp") as folder:
            PROGRESS.step(f"{framework} under ft-run", 3)
            ours = with_reft(framework, Path(folder, "ft-run"), places(kills, every))
            PROGRESS.step(f"{framework} under torchrun", 7)
            theirs = with_own_checkpoints(framework, Path(folder, "torchrun"), places(kills, every), every)
        say("\n".join(rows(framework, ours, theirs, every)))
        found |= figures(framework, ours, theirs)
    ratios = [value for name, value in found.items() if name.endswith("_recovery_x")]
    return found | ({"recovery_x": min(ratios)} if ratios else {})


def head() -> str:
    """The head of the table of `rows`."""
    return f"{'seconds, medians':<26} " + " ".join(f"{name:>9}" for name in (*PHASES[1:], "restart", "redo", "total"))


def rows(framework: str, ours: RestartTimes, theirs: RestartTimes, every: int) -> list[str]:
    """A line for either side, and one on what was compared."""
    phases = " ".join(f"{ours.phase(name):9.2f}" for name in PHASES[1:])
    unknown = " ".join(f"{'-':>9}" for _ in PHASES[1:])

    def times(side: RestartTimes) -> str:
        values = (side.middle(lambda k: k.restart), side.middle(lambda k: k.redo), side.middle(lambda k: k.seconds))
        return " ".join(f"{value:9.2f}" for value in values)

    return [
        f"{framework + ', ft-run':<26} {phases} {times(ours)}",
        f"{framework + ', torchrun':<26} {unknown} {times(theirs)}",
        f"  lost iterations: {[one.lost for one in ours.kills]} and {[one.lost for one in theirs.kills]}, of "
        f"{ours.iteration:.2f} and {theirs.iteration:.2f} s; torchrun's checkpoint every {every} iterations takes "
        f"{theirs.save:.2f} s, {theirs.save / (every * theirs.iteration):.0%} of the time of training; with an "
        f"interval for which that is {_SAVING:.0%}, {theirs.save / _SAVING / 2:.1f} s would be lost on average",
    ]


def figures(framework: str, ours: RestartTimes, theirs: RestartTimes) -> dict[str, float]:
    """For the last line."""
    found = {f"{framework}_{name}_seconds": ours.phase(name) for name in PHASES[1:]}
    for side, one in (("", ours), ("own_checkpoint_", theirs)):
        found |= {
            f"{framework}_{side}restart_seconds": one.middle(lambda k: k.restart),
            f"{framework}_{side}recovery_seconds": one.middle(lambda k: k.seconds),
            f"{framework}_{side}lost_iterations": one.middle(lambda k: k.lost),
            f"{framework}_{side}iteration_seconds": one.iteration,
        }
    ratio = found[f"{framework}_own_checkpoint_recovery_seconds"] / found[f"{framework}_recovery_seconds"]
    restart = found[f"{framework}_own_checkpoint_restart_seconds"] / found[f"{framework}_restart_seconds"]
    # computed: with the interval for which saving takes that share of the time, half an interval is lost on average
    saving = found[f"{framework}_own_checkpoint_restart_seconds"] + theirs.save / _SAVING / 2
    return found | {
        f"{framework}_own_checkpoint_save_seconds": theirs.save,
        f"{framework}_recovery_x": ratio,
        f"{framework}_restart_x": restart,
        f"{framework}_recovery_x_saving_5_percent": saving / found[f"{framework}_recovery_seconds"],
    }
