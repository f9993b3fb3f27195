"""Prove recovery: pretrain a small GPT twice, kill one process of the second run, compare the final states.

    bash launch/quickstart.sh [--framework megatron|deepspeed] [--data FILE] [--iterations N] [--out DIR]
                              [--baft]    on two emulated nodes; kills a whole node
                              [--policy edit|diloco|post_local_sgd|dreamddp]    local SGD

Invariant: the exit status is 0 only if the killed run restored exactly once, from memory, and its final state is
bit-identical to that of the other run. Both runs use `ft-run` as users do; the kill comes from outside. Whatever
happens, the runs leave nothing behind but the files in the output folder.

In: a text file, or nothing. Out: table, report.json, report.png, with --baft bubbles.png, and a folder of logs per run.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from os import getpid
from pathlib import Path
from typing import Any

from rich.console import Console

from ft_plugins.config import Config
from ft_plugins.errors import ConfigError, FtError
from ft_plugins.events import catalogue
from ft_plugins.rehearse.display import Display, display_on
from ft_plugins.rehearse.driver import DriveError, DrivenJob, DrivePhase, raising_signals
from ft_plugins.rehearse.transcripts import TRANSCRIPT, compare_transcripts, read_transcripts
from quickstart_report.bubble_use import bubble_use
from quickstart_report.comparison import EvidenceError, RunComparison, RunRecord, compare_runs
from quickstart_report.comparison_text import table, verdict
from quickstart_report.run_pictures import draw_bubbles, draw_comparison

EXAMPLES = Path(__file__).resolve().parent / "examples"
FRAMEWORKS = {"megatron": "megatron_gpt.py", "deepspeed": "deepspeed_gpt.py"}
RANKS = 8
USUAL, WITH_BAFT = (2, 2, 2), (1, 4, 2)  # tp, pp, dp; with two stages hardly any bubble is open at both ends
FAILED_STATUS = 1
REPORT, PICTURE, BUBBLES, SETTINGS = "report.json", "report.png", "bubbles.png", "deepspeed.json"
BAFT_NODES = 2
LINK_MBPS = 200.0  # link rate for planning bubbles: the share of a cluster's links for a model of this size
PROFILED = 4  # iterations to plan bubbles from
POLICIES = ("edit", "diloco", "post_local_sgd", "dreamddp")
LAYERED_H = 2  # iterations in which DreamDDP averages each layer: a pipeline stage has at least two layers of its own
LONGEST_TAU = 8  # iterations between two synchronisations, so that a short run has several
_KILLED_RANK = 5
_POLL_SECONDS = 0.2
_WRITTEN = ("output.log", "loss.jsonl", "events*.jsonl", "smp.log", f"{TRANSCRIPT}/*.jsonl")
_OF_NODES = ("node*/output.log", "node*/events*.jsonl", "node*/smp.log")


@dataclass(frozen=True)
class QuickstartPlan:
    """What to run. The process of `rank` is killed once iteration `kill_at` is logged; None: a whole
    node, once a version is committed, too.

    Megatron's example is protected by flags, DeepSpeed's by a block of its configuration, `settings`.
    """

    data: Path | None
    out: Path
    iterations: int
    kill_at: int
    rank: int | None
    patience: float  # seconds without progress after which a run is considered hung
    job: tuple[str, ...]  # flags of the example
    framework: str = "megatron"
    settings: dict[str, Any] | None = None
    nodes: int = 1  # above 1: with BAFT
    sync: tuple[str, ...] = ()  # flags of local SGD

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sizes of tensor, pipeline and data parallelism."""
        return WITH_BAFT if self.nodes > 1 else USUAL

    @property
    def example(self) -> Path:
        """The script to run."""
        return EXAMPLES / FRAMEWORKS[self.framework]

    def arguments(self, folder: Path) -> list[str]:
        """The arguments of ft-run for a run in `folder`."""
        flags: list[str] = []
        if self.settings is None:  # --ftp-cpu: so that Megatron can be imported before the script asks for the CPU
            flags += ["--reft", "--reft-interval", "1", "--ftp-orphan-seconds", "60", "--ftp-cpu"]
        if self.settings is None and self.nodes > 1:
            block = Config.from_json({"baft": baft_block()})
            flags += block.flags()
        flags += [*self.sync, f"--ftp-transcript-dir={folder / TRANSCRIPT}"]
        words = ["--nproc-per-node", str(RANKS // self.nodes), *flags, str(self.example), *self.job]
        words += ["--deepspeed_config", str(self.out / SETTINGS)] if self.settings is not None else []
        words += ["--iterations", str(self.iterations)]
        words += ["--loss-log", str(folder / "loss.jsonl")]
        return words if self.data is None else [*words, "--data", str(self.data)]


def parse(argv: Sequence[str]) -> QuickstartPlan:
    """The plan of a command line. Raises ConfigError, SystemExit."""
    parser = argparse.ArgumentParser(
        prog="quickstart", description="Pretrain a small GPT twice, kill a process in the second run, and compare."
    )
    parser.add_argument(
        "--framework", choices=tuple(FRAMEWORKS), default="megatron", help="to train with (default %(default)s)"
    )
    parser.add_argument("--data", type=Path, help="any text file (default: the sources of Python's standard library)")
    parser.add_argument("--iterations", type=int, default=80, help="iterations of each run (default %(default)s)")
    parser.add_argument(
        "--kill-at",
        type=int,
        help="kill once this iteration is logged (default: half of them)",
    )
    parser.add_argument(
        "--baft",
        action="store_true",
        help="run on two emulated nodes that send copies to each other in pipeline bubbles; draws bubbles.png",
    )
    parser.add_argument(
        "--kill-rank",
        type=int,
        help=f"rank to kill (default {_KILLED_RANK}; with --baft: a whole node with its memory)",
    )
    parser.add_argument(
        "--policy", choices=POLICIES, help="let the replicas train on their own and synchronise them by this policy"
    )
    parser.add_argument("--out", type=Path, default=Path("quickstart-out"), help="folder (default %(default)s)")
    parser.add_argument(
        "--patience", type=float, default=240.0, help="abort a run after this many seconds without progress"
    )
    parser.add_argument("--quick", action="store_true", help="a smaller model and 12 iterations")
    options = parser.parse_args(argv)
    iterations = (30 if options.baft else 12) if options.quick else options.iterations
    kill_at = iterations // 2 if options.kill_at is None else options.kill_at
    if not 2 <= kill_at <= iterations - 2:
        raise ConfigError(f"--kill-at {kill_at}: expected 2 to {iterations - 2}, of {iterations} iterations")
    rank = _KILLED_RANK if options.kill_rank is None and not options.baft else options.kill_rank
    if rank is not None and not 0 <= rank < RANKS:
        raise ConfigError(f"--kill-rank {rank}: expected 0 to {RANKS - 1}")
    if options.data is not None and (not options.data.is_file() or not options.data.stat().st_size):
        raise ConfigError(
            f"--data {options.data}: expected a text file that is not empty; omit it for the default text"
        )
    deepspeed = options.framework == "deepspeed"
    if options.policy and options.baft:
        raise ConfigError("--policy: local SGD and --baft exclude each other; drop one of the two")
    sync = sync_keys(options.policy, kill_at) if options.policy else None
    job = (deepspeed_flags if deepspeed else job_flags)(options.quick, *(WITH_BAFT if options.baft else USUAL))
    if sync and not deepspeed:  # an instance is one replica
        job += ("--num-distributed-optimizer-instances", str(USUAL[2]))
    plan = QuickstartPlan(
        data=options.data.resolve() if options.data else None,
        out=options.out.resolve(),
        iterations=iterations,
        kill_at=kill_at,
        rank=rank,
        patience=options.patience,
        job=job,
        framework=options.framework,
        settings=deepspeed_settings(options.quick, options.baft, sync) if deepspeed else None,
        nodes=BAFT_NODES if options.baft else 1,
        sync=tuple(Config.from_json({"sync": sync}).flags()) if sync and not deepspeed else (),
    )
    if not plan.example.is_file():
        raise ConfigError(f"{plan.example} is missing: the quickstart runs from a checkout of the project")
    return plan


def sync_keys(policy: str, kill_at: int) -> dict[str, Any]:
    """Keys of local SGD, with a synchronisation before the kill. Runs that are compared need the same schedule of
    layers, which a measured one is not."""
    layered = {"h": LAYERED_H, "schedule": "equal"} if policy == "dreamddp" else {}
    return {"policy": policy, "tau": max(1, min(LONGEST_TAU, kill_at // 2)), **layered}


def deepspeed_flags(quick: bool, tp: int, pp: int, dp: int) -> tuple[str, ...]:
    """Flags of DeepSpeed's example: the same model as a PipelineModule, in sizes for two cores."""
    sizes = {"--tp": tp, "--pp": pp, "--layers": 4, "--hidden": 64 if quick else 128, "--sequence": 64}
    return tuple(word for name, size in sizes.items() for word in (name, str(size)))


def baft_block() -> dict[str, Any]:
    """The configuration of BAFT."""
    return {"link_mbps": LINK_MBPS, "profile_iterations": PROFILED}


def deepspeed_settings(quick: bool, baft: bool, sync: dict[str, Any] | None = None) -> dict[str, Any]:
    """DeepSpeed's configuration: bf16 with ZeRO-1, and the block of ft_plugins. `sync`: keys of local SGD."""
    block: dict[str, Any] = {"reft": {"interval": 1}, "orphan_seconds": 60.0}
    block |= {"baft": baft_block()} if baft else {}
    block |= {"sync": {**sync, "shard_ranks": 1}} if sync else {}
    batch, micro = (16, 2) if quick else (64, 8)
    return {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 5}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "steps_per_print": 1_000_000,
        "ft_plugins": block,
    }


def job_flags(quick: bool, tp: int, pp: int, dp: int) -> tuple[str, ...]:
    """Flags of Megatron's example: distributed optimizer, bf16, dropout on, sizes for two cores."""
    sizes = {"--layers": 4, "--hidden": 64 if quick else 128, "--sequence": 64}
    sizes |= {"--global-batch": 16, "--micro-batch": 2} if quick else {"--global-batch": 64, "--micro-batch": 8}
    flags = ["--tp", str(tp), "--pp", str(pp), "--bf16", "--distributed-optimizer", "--lr", "1e-3", "--warmup", "5"]
    return (*flags, *(word for name, size in sizes.items() for word in (name, str(size))))


def run(plan: QuickstartPlan, name: str, title: str, kill: bool, display: Display) -> RunRecord:
    """One run of the job, from start to clean-up. Raises DriveError with the job's last output."""
    folder = plan.out / name
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in (*_WRITTEN, *_OF_NODES):
        for stale in folder.glob(pattern):
            stale.unlink()
    display.begin(title, plan.iterations)
    job = f"quickstart-{getpid()}-{name}"
    with DrivenJob(job, plan.arguments(folder), folder, folder / "loss.jsonl", plan.iterations, plan.nodes) as drive:
        try:
            follow(drive, plan, kill, display)
        except DriveError as error:
            raise DriveError(f"{error}\n\nlast lines of its output:\n{drive.tail()}") from error
    return RunRecord(drive.began, drive.ended, drive.events(), drive.losses())


def follow(drive: DrivenJob, plan: QuickstartPlan, kill: bool, display: Display) -> None:
    """Show the job until it is done; with `kill`, inject the planned failure once. Raises DriveError."""
    failed = not kill
    while (progress := drive.follow(_POLL_SECONDS, plan.patience)).phase is not DrivePhase.DONE:
        display.show(progress)
        due = progress.iteration >= plan.kill_at and (plan.rank is not None or _is_protected(drive))
        if not failed and progress.phase is DrivePhase.TRAINING and due:
            display.say(f"{inject_failure(drive, plan)} after iteration {progress.iteration} was logged")
            failed = True
    display.show(progress)
    if not failed:
        raise DriveError(
            f"the job ended before iteration {plan.kill_at} was seen"
            f"{'' if plan.rank is not None else ' and a version committed'}, so no process was killed; see {drive.log}"
        )


def _is_protected(drive: DrivenJob) -> bool:
    """Whether a version outlives the loss of a node."""
    return any(event.type is catalogue.VERSION_COMMITTED for event in drive.events())


def inject_failure(drive: DrivenJob, plan: QuickstartPlan) -> str:
    """Kill the planned process or node, and return a description. Raises DriveError."""
    if plan.rank is not None:
        pid = drive.kill(plan.rank)
        return f"SIGKILL sent to rank {plan.rank} (pid {pid})"
    lost, fresh = drive.kill_node()
    return f"SIGKILL sent to all processes of {lost}, its memory wiped, {fresh} started as substitute,"


def prove(plan: QuickstartPlan, console: Console, display: Display) -> RunComparison:
    """Both runs, then the comparison. Raises FtError."""
    try:
        plan.out.mkdir(parents=True, exist_ok=True)
        for name in (REPORT, PICTURE, BUBBLES):  # results of an earlier start
            (plan.out / name).unlink(missing_ok=True)
        if plan.settings is not None:
            (plan.out / SETTINGS).write_text(json.dumps(plan.settings, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--out {plan.out}: {error.strerror}; name a writable folder") from error
    unfailed = run(plan, "unfailed", "unfailed run", False, display)
    failed = run(plan, "failed", "run with one kill", True, display)
    display.close()
    ours, theirs = (read_transcripts(plan.out / name / TRANSCRIPT) for name in ("failed", "unfailed"))
    outcome = compare_transcripts(ours, theirs, restores=1)
    report = compare_runs(failed, unfailed, () if outcome.exact else outcome.sentence.splitlines())
    (plan.out / REPORT).write_text(report.json() + "\n")
    draw_comparison(failed, unfailed, report, plan.out / PICTURE)
    console.print(table(report))
    use = bubble_use(unfailed.events)
    if use is not None:
        draw_bubbles(use, plan.out / BUBBLES)
        console.print(f"{use.traffic.line()} (in the unfailed run).", highlight=False, soft_wrap=True)
    elif plan.nodes > 1:
        raise EvidenceError(f"no bubbles were planned in the unfailed run; see {plan.out / 'unfailed'}")
    console.print(f"report: {plan.out / REPORT}\npicture: {plan.out / PICTURE}", highlight=False, soft_wrap=True)
    if use is not None:
        console.print(f"bubbles: {plan.out / BUBBLES}", highlight=False, soft_wrap=True)
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 proven, 1 not proven, 130 after Ctrl-C."""
    console = Console()
    display: Display | None = None
    try:
        with raising_signals():
            plan = parse(sys.argv[1:] if argv is None else argv)
            display = display_on(console, RANKS)
            tp, pp, dp = plan.shape
            display.say(
                f"A GPT on {plan.data or 'the sources of Python'}: TP{tp} x PP{pp} x DP{dp} = {RANKS} processes"
                f"{f' on {plan.nodes} emulated nodes' if plan.nodes > 1 else ''}, "
                f"{plan.iterations} iterations, once without and once with a failure. Logs: {plan.out}"
            )
            report = prove(plan, console, display)
    except FtError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return FAILED_STATUS
    except KeyboardInterrupt:
        print("quickstart: interrupted; its processes have ended and their memory is released", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        if display is not None:
            display.close()
    console.print(verdict(report), style="bold green" if report.proven else "bold red", highlight=False, soft_wrap=True)
    return 0 if report.proven else FAILED_STATUS


if __name__ == "__main__":
    raise SystemExit(main())
