"""ft-run: torchrun's command line for jobs that survive failures.

    ft-run <torchrun's arguments> [--ftp-* --reft ...] script.py <its arguments> [--ftp-* --reft ...]

Invariant: our flags may stand before or after the script. They are removed from the command line and reach the ranks as
FTP_CONFIG; the script sees only its own arguments. Without any of them ft-run is torchrun: it reports that nothing is
protected. With a system on and no --max-restarts, a job is restarted as long as it makes progress.

In: a command line. Out: torchrun's exit status, or EXIT_REFUSED after one line that names the remedy.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.run import config_from_args, get_args_parser, parse_min_max_nnodes

from ..base import files
from ..base.intake import shown
from ..config import Config, add_flags, deepspeed_json, keys, merge, protects, run_directory, sources
from ..errors import EXIT_REFUSED, ConfigError, FtError
from ..events import Damage, catalogue, read
from ..snapshot.segment.paths import REHEARSED_FILE
from ..transport.network_devices import ifnames_of, interfaces_differ, network_devices
from . import job_identity, rehearsed, slurm
from .agent.watcher import Job
from .agent.why import why
from .node_launch import Outcome, launch
from .rendezvous import wait_report
from .rendezvous.rendezvous_settings import BACKEND

_WORKER = "ft_plugins.launcher.worker"
_STATIC = "static"  # ranks and addresses are given by the user: no node can be replaced
_STATIC_FLAGS = {"node_rank": "--node-rank", "master_addr": "--master-addr", "master_port": "--master-port"}
_UNSET = None
_DEFAULTS = {  # torchrun's
    "nnodes": "1:1", "max_restarts": 0, "rdzv_backend": _STATIC, "node_rank": 0, "master_addr": "127.0.0.1",
}  # fmt: skip
_NO_ID = "none"  # torchrun's


@dataclass(frozen=True)
class Plan:
    """A parsed command line. `torch` holds torchrun's arguments, the script and its arguments."""

    config: Config
    torch: argparse.Namespace
    job: str
    node: str
    bounded: bool
    from_slurm: str = ""  # the flags that Slurm gave
    digest: str = ""  # of the command, as rehearsals remember it
    words: tuple[str, ...] = ()  # of the command line, with all that says which job it is and how large

    @property
    def protected(self) -> bool:
        """Whether a system is on."""
        return bool(self.config.systems)


def parser() -> argparse.ArgumentParser:
    """torchrun's parser with our flags; options in `_DEFAULTS` are None unless given."""
    parser: argparse.ArgumentParser = get_args_parser()
    parser.prog = "ft-run"
    parser.description = "torchrun for jobs that survive failures. Takes torchrun's arguments; see group ft_plugins."
    add_flags(parser)
    for name, default in _DEFAULTS.items():
        if parser.get_default(name) == default:  # differs, or is text, if it comes from the environment
            parser.set_defaults(**{name: _UNSET})
    return parser


def plan(argv: Sequence[str], uid: int, folder: str, host: str, environment: Mapping[str, str] | None = None) -> Plan:
    """Parse a command line given by user `uid` in `folder` on `host`. `environment`: where Slurm's variables are, if
    anywhere. Raises ConfigError, SystemExit."""
    config, words = Config.from_flags(argv, whole=False)
    options = parser().parse_args(words)
    _refuse_misspelt(options, Path(folder))
    digest = rehearsed.digest_of(config, options)
    config = _with_deepspeed(config, options, Path(folder))
    if config.given() and not config.systems:
        remedy = _hint(options) or "add --reft or drop it"
        raise ConfigError(f"{config.flags()[0]}: has no effect while no system is on; {remedy}")
    if config.systems and options.no_python:
        raise ConfigError("--no-python: hooks need Python in each rank; give the Python script itself")
    if not (options.module or options.no_python) and not os.path.exists(os.path.join(folder, options.training_script)):
        raise ConfigError(f"script {options.training_script}: no such file in {folder}; give its path, or -m MODULE")
    step = slurm.step_of(environment or {}) if config.systems else None
    taken = _take_from(step, options) if step else []
    if options.nnodes is _UNSET:
        options.nnodes = _DEFAULTS["nnodes"]
    if step and step.node and not config.node_name:
        host = step.node
        taken.append(f"--ftp-node-name {job_identity.safe_name(host)}")
    if config.systems:
        _require_replaceable(options)
    id_given = "" if options.standalone else options.rdzv_id
    script, arguments = options.training_script, options.training_script_args
    job = job_identity.job_name(config.job, id_given, uid, folder, script, arguments)
    return Plan(
        config=config,
        torch=options,
        job=job,
        node=config.node_name or job_identity.safe_name(host),
        bounded=options.max_restarts is not _UNSET or not config.systems,
        from_slurm=" ".join(taken),
        digest=digest,
        words=(*_left_out(options, job, argv), *argv),
    )


def _left_out(options: argparse.Namespace, job: str, argv: Sequence[str]) -> list[str]:
    """The flags that the user did not give, because surroundings (Slurm, an environment, a folder) gave them."""
    given = argv[: len(argv) - len(options.training_script_args)]
    names = {word.partition("=")[0].replace("_", "-") for word in given}
    size = {"--nnodes": options.nnodes, "--nproc-per-node": options.nproc_per_node}
    meant = {**size, "--ftp-job": job, "--rdzv-endpoint": options.rdzv_endpoint}
    return [word for flag, value in meant.items() if value and flag not in names for word in (flag, value)]


def _take_from(step: slurm.SlurmStep, options: argparse.Namespace) -> list[str]:
    """Set what the user did not give to what Slurm says; the flags that were set. Raises ConfigError."""
    fixed = options.rdzv_backend == _STATIC or any(getattr(options, name) is not _UNSET for name in _STATIC_FLAGS)
    if options.standalone or fixed:
        return []
    taken = []
    if options.nnodes is _UNSET:
        options.nnodes = str(step.nodes)
        taken.append(f"--nnodes {options.nnodes}")
    if not options.rdzv_endpoint and parse_min_max_nnodes(options.nnodes)[1] > 1:
        options.rdzv_endpoint = step.endpoints
        taken.append(f"--rdzv-endpoint {options.rdzv_endpoint}")
    if taken and step.components > 1:
        raise ConfigError(
            f"Slurm's job is heterogeneous ({step.components} components), and a step has the nodes of one component "
            "alone, so that each would train by itself: give --nnodes and --rdzv-endpoint for all nodes that belong "
            "together"
        )
    if taken and step.tasks != step.nodes:
        raise ConfigError(
            f"Slurm starts {step.tasks} tasks on {step.nodes} nodes, expected one ft-run on each node: give srun "
            "--ntasks-per-node=1, or ft-run --nnodes and --rdzv-endpoint"
        )
    return taken


def _refuse_misspelt(options: argparse.Namespace, folder: Path) -> None:
    """Raises ConfigError for a word after the script that was meant for a flag of ours, unless the script names it."""
    script: str | None = None
    for word in options.training_script_args:
        if not (meant := sources.meant_flag(word, keys())):
            continue
        if script is None:
            with suppress(OSError):
                script = (folder / options.training_script).read_text(errors="replace")
        name = word.partition("=")[0]
        if re.search(rf"[\"']{re.escape(name)}[\"']", script or "") is None:
            raise ConfigError(f"{shown(name)[1:-1]}: unknown flag; did you mean {meant}?")


def _hint(options: argparse.Namespace) -> str:
    """Which word may have been meant to switch on a system; '' for none."""
    found = sources.resembling(options.training_script_args, [key for key in keys() if protects(key)])
    return f"did you mean {found[1]} by {shown(found[0])[1:-1]}?" if found else ""


def _with_deepspeed(config: Config, options: argparse.Namespace, folder: Path) -> Config:
    """`config` merged with the block of the script's DeepSpeed configuration. Raises ConfigError."""
    block = deepspeed_json.from_arguments(options.training_script_args, folder)
    return merge(config, block, ("the command line", "the DeepSpeed configuration"))


def execute(plan: Plan) -> Outcome:
    """Run the planned job to its end. Raises what `launch` raises."""
    options = argparse.Namespace(**vars(plan.torch))
    _choose_rendezvous(options, plan)
    options.run_path = False  # our worker does that anyway
    config, command, arguments = config_from_args(options)
    if not options.no_python:
        arguments = ["-u", "-m", _WORKER, *arguments[1:]]  # torchrun's are -u [-m] script args
    job, remedy = None, ""
    if plan.protected:
        again = wait_report.command([sys.argv[0], *plan.words])
        job = Job(plan.config, plan.job, plan.node, run_directory(plan.job, plan.node), again)
        if plan.config.transcript_dir is None:  # else it is a rehearsal
            with suppress(OSError):
                files.write(job.run_dir / REHEARSED_FILE, rehearsed.said(plan.digest))
    else:
        remedy = _hint(options) or "Add --reft."
        print(f"ft-run: no system is on, nothing is protected: running as torchrun. {remedy}", file=sys.stderr)
    try:
        return launch(config, command, arguments, job=job, bounded=plan.bounded, name=options.training_script)
    finally:
        if job is None:
            print(f"ft-run: the job ends; nothing was protected, as no system was on. {remedy}", file=sys.stderr)


def _require_replaceable(options: argparse.Namespace) -> None:
    """Raises ConfigError for several nodes whose ranks and addresses are fixed by their command lines."""
    if options.standalone or parse_min_max_nnodes(options.nnodes)[1] == 1:
        return
    given = [flag for name, flag in _STATIC_FLAGS.items() if getattr(options, name) is not _UNSET]
    if options.rdzv_backend == _STATIC:
        given.insert(0, "--rdzv-backend static")
    elif options.rdzv_backend is not _UNSET or not given and options.rdzv_endpoint:
        return
    raise ConfigError(
        f"--nnodes {options.nnodes} with {', '.join(given) or 'no --rdzv-endpoint'}: a lost node could not be "
        "replaced, because ranks are fixed; give --rdzv-endpoint host:port of any one node, the same on all nodes"
        + (f", and drop {', '.join(given)}" if given else "")
    )


def _choose_rendezvous(options: argparse.Namespace, plan: Plan) -> None:
    """With a system on, use our rendezvous unless another is given: it keeps ranks, survives lost nodes, authenticates.

    Otherwise do what torchrun's `run` does: one node needs no endpoint, and gets an id of its own.
    """
    if plan.protected and options.rdzv_backend is _UNSET and options.rdzv_endpoint and not options.standalone:
        options.rdzv_backend = BACKEND
        if options.rdzv_id == _NO_ID:
            options.rdzv_id = plan.job
    for name, default in _DEFAULTS.items():
        if getattr(options, name) is _UNSET:
            setattr(options, name, default)
    alone = options.rdzv_backend == _STATIC and not options.rdzv_endpoint and options.master_port is None
    if options.standalone or (alone and parse_min_max_nnodes(options.nnodes)[1] == 1):
        options.rdzv_backend = BACKEND if plan.protected else "c10d"
        options.rdzv_endpoint = "localhost:0"
        options.rdzv_id = str(uuid.uuid4())
    if plan.config.node_check and options.rdzv_backend != BACKEND:
        raise ConfigError(
            f"--ftp-node-check: has no effect with --rdzv-backend {options.rdzv_backend}, which starts a round without "
            "it; drop one of the two"
        )
    if options.master_port is None:
        options.master_port = 29500


def _interfaces_differ(config: Config, environment: Mapping[str, str]) -> str:
    """What names different network devices, in a sentence; '' if nothing does, or the devices are unknown."""
    ifnames = ifnames_of(environment)
    with suppress(OSError):
        return interfaces_differ(config.interface, ifnames, network_devices()) if ifnames else ""
    return ""


@record
def _raise(error: Exception) -> None:
    """Raise it, so that `record` writes it to the error file of ft-run's parent, as torchrun does."""
    raise error


@record
def _raise_for(outcome: Outcome, name: str) -> None:
    """Raise the error that ended the job; `record` copies it to the error file of ft-run's parent, if it wants one."""
    if outcome.status == "refused":
        raise FtError(outcome.reason)
    outcome.raise_for_failure(name)


def _where(plan: Plan) -> str:
    """For the last line of a protected job: its node, and the file that says what happened. Raises ConfigError."""
    if not plan.protected:
        return ""
    return f" (node {plan.node}; what happened is in {run_directory(plan.job, plan.node) / 'events.jsonl'})"


def _account(plan: Plan) -> list[str]:
    """Why a protected job failed, as `ft-plugins why` says it: in events of this node, since ft-run was started."""
    if not plan.protected:
        return []
    with suppress(Exception):  # the disk may be what failed, or a line damaged: the exit status must not change
        damage = Damage()
        events = list(read(run_directory(plan.job, plan.node) / "events.jsonl", damage))
        starts = [at for at, event in enumerate(events) if event.type is catalogue.JOB_STARTED]
        account = why(events[starts[-1] :]) if starts else None
        return [*(account.lines() if account else []), *([str(damage)] if damage.lines else [])]
    return []


def _require_temporary_folder(log_dir: str | None) -> None:
    """Raises ConfigError if torch could not make a folder for what ranks report."""
    if log_dir and not os.path.isdir(log_dir):
        return  # torch makes it
    try:
        with tempfile.TemporaryDirectory(dir=log_dir):
            return
    except OSError as error:
        raise ConfigError(
            f"no folder for what ranks report can be made ({error.strerror or error}); set TMPDIR, or --log-dir, to a "
            "folder that this user may write to and that has room"
        ) from error


def main(argv: Sequence[str] | None = None) -> int:
    """The console script."""
    where = ""
    try:
        words = sys.argv[1:] if argv is None else argv
        planned = plan(words, os.getuid(), os.getcwd(), socket.gethostname(), os.environ)
        if planned.from_slurm:
            print(f"ft-run: taken from Slurm: {planned.from_slurm}; flags that you give replace these", file=sys.stderr)
        if planned.protected and (differ := _interfaces_differ(planned.config, os.environ)):
            print(f"ft-run: warning: {differ}", file=sys.stderr)
        _require_temporary_folder(planned.torch.log_dir)
        where = _where(planned)
        outcome = execute(planned)
    except FtError as error:
        print(f"ft-run: {error}{where}", file=sys.stderr)
        return EXIT_REFUSED
    except SignalException as error:
        with suppress(SignalException, OSError):
            _raise(error)
        how = f"ended by {error.sigval.name}; give the same command again to resume"
        print(f"ft-run: {how}{where}", file=sys.stderr)
        return 128 + error.sigval
    if outcome.status == "drained":
        print(f"ft-run: {outcome.reason}{where}", file=sys.stderr)
    if outcome.status in ("succeeded", "stopped", "drained"):
        return outcome.exit_status
    try:
        _raise_for(outcome, planned.torch.training_script)
    except FtError as error:
        who = "" if str(error).startswith("ft_plugins: ") else "ft-run: "
        print(f"{who}{error}{where}", file=sys.stderr)
        return EXIT_REFUSED
    except ChildFailedError as error:
        print(error, file=sys.stderr)
    for line in _account(planned):
        print(f"ft-run: {line}", file=sys.stderr)
    print(f"ft-run: {outcome.reason}{where}", file=sys.stderr)
    return outcome.exit_status


if __name__ == "__main__":
    raise SystemExit(main())
