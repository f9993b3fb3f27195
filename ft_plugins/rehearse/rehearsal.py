"""Rehearse a job: run a user's command for some iterations, unfailed and killed, and compare both bit for bit.

    run 1    unfailed
    run 2    without protection, three iterations: what protection changes without any failure shows
    run 3    killed in the iteration `kills[0]`, and again in `kills[1]`, by default the next one

All are jobs of their own; a run ends in order after the last iteration. Before each restore the state of the restarted
ranks is overwritten (`systems.transcript.disturb`), and no two starts have the same hash seed, so what is not restored
shows. On two emulated nodes the first kill takes a whole node with its memory, for which a fresh one comes.

Invariant: nothing of the job that is rehearsed is touched: neither its memory nor its checkpoints. A flag that
names a folder to save to is refused unless each run has its own ({run}); folders named elsewhere are not seen.

In: a command for ft-run. Out: transcripts, `Rehearsal`.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..base.files import make_private
from ..config import Config, deepspeed_json
from ..errors import ConfigError
from ..events import catalogue
from ..launcher.command import parser
from ..launcher.rehearsed import OURS, SAVES, STORAGE, digest_of, remember
from ..systems.transcript import transcript_path
from .display import Display
from .driver import DriveError, DrivenJob, DrivePhase
from .transcripts import (
    TRANSCRIPT,
    Comparison,
    TranscriptEntry,
    compare_transcripts,
    epoch_ends,
    not_exercised,
    read_transcripts,
)

RUN = "{run}"  # in the command: a folder of each run
_NODES = 2
_SET_HERE = {("job",), ("node_name",), ("resume",), ("faults",), ("reft", "checkpoint_dir")}
# what ft_plugins says of state that a restart does not put back, or refuses
_NAMES_LOST = re.compile(
    r"ft_plugins: (?!training starts|recovery: ).*(captured|compared|tracked|refused|protected|no version has|"
    r"no snapshot|beg[iu]ns? again|starts from the beginning|depends? on (it|one)|differ|results are not|"
    r"trains on other)"
).match
_ON_DIFFERENCE = "--ftp-on-difference"
_POLL_SECONDS = 0.2
_UNPROTECTED = 3  # iterations
_POINT = "update.end"  # after an update, before its version point


@dataclass(frozen=True)
class RehearsalPlan:
    """What to run: arguments of ft-run with {run} in place of a run's folder."""

    arguments: tuple[str, ...]
    folder: Path
    iterations: int
    kills: tuple[int, ...] | None  # None: chosen once the unfailed run is known
    nodes: int
    patience: float  # seconds without progress after which a run is considered hung
    digest: str  # of the command
    unprotected: bool = True  # run it without protection, too


@dataclass(frozen=True)
class Rehearsal:
    """The outcome. `refused`: the last words of a job that ended itself; '' if it went on to its end."""

    comparison: Comparison | None
    kills: tuple[int, ...]
    not_exercised: tuple[str, ...]
    refused: str = ""
    notices: tuple[str, ...] = ()  # what the job itself said of what is not captured, or begins again

    @property
    def exact(self) -> bool:
        return self.comparison is not None and self.comparison.exact

    def json(self) -> str:
        return json.dumps({"exact": self.exact, **asdict(self)}, indent=2)


def plan_rehearsal(
    command: Sequence[str],
    folder: Path,
    iterations: int,
    kills: Sequence[int],
    nodes: int,
    patience: float,
    unprotected: bool = True,
) -> RehearsalPlan:
    """Raises ConfigError for a command that cannot be rehearsed."""
    words = list(command)
    if words[:1] and Path(words[0]).name == "ft-run":
        words = words[1:]
    if not words:
        raise ConfigError("rehearse: expected a command after `--`, such as: ft-run --nproc-per-node 8 train.py --reft")
    config, rest = Config.from_flags(words, whole=False)
    flags = [flag for flag in config.flags() if flag.partition("=")[0] not in OURS]
    flags = [f"{STORAGE}={RUN}/reft-checkpoints" if flag.startswith(f"{STORAGE}=") else flag for flag in flags]
    if config.faults:
        raise ConfigError("--ftp-faults: a rehearsal injects its own; drop it")
    options = parser().parse_args(rest)
    in_json = [*deepspeed_json.from_arguments(options.training_script_args, Path.cwd()).given()]
    if not (("on_difference",) in in_json or any(flag.startswith(_ON_DIFFERENCE) for flag in flags)):
        flags.append(f"{_ON_DIFFERENCE}=warn")  # to the end, so that all that differs is seen
    for path in in_json:
        if path in _SET_HERE:
            raise ConfigError(
                f"ft_plugins.{'.'.join(path)} in the DeepSpeed configuration: a rehearsal sets it itself; rehearse "
                "with a copy of the configuration without it"
            )
    if any(k < 2 or k > iterations - 1 for k in kills) or sorted(set(kills)) != list(kills):
        given = ",".join(map(str, kills))
        raise ConfigError(f"--kill {given}: expected iterations in order, from 2 to {iterations - 1}")
    if not kills and iterations < 4:
        raise ConfigError(f"--iterations {iterations}: expected at least 4: two kills, and iterations after them")
    for word, following in zip(rest, [*rest[1:], ""], strict=True):
        name, _, value = word.partition("=")
        if SAVES(name) and RUN not in (value or following):
            raise ConfigError(
                f"{name}: both runs would save there, and the second would find what the first has saved: give "
                f"{name} {RUN}/checkpoints, which is a folder of each run"
            )
    digest = digest_of(config, options)
    if nodes == _NODES:
        rest = _halved(rest)
    arguments = (*flags, *rest)
    return RehearsalPlan(arguments, folder, iterations, tuple(kills) or None, nodes, patience, digest, unprotected)


def _halved(words: Sequence[str]) -> list[str]:
    """The words with half as many processes per node, for two nodes. Raises ConfigError."""
    options = parser().parse_args(list(words))
    if not str(options.nproc_per_node).isdigit() or int(options.nproc_per_node) % _NODES:
        raise ConfigError(
            f"--nproc-per-node {options.nproc_per_node}: expected an even number, of which each of {_NODES} emulated "
            "nodes takes a half"
        )
    if options.nnodes not in (None, "1", "1:1"):  # None: not given
        raise ConfigError(f"--nnodes {options.nnodes}: give the command of one node; --nodes emulates {_NODES}")
    half = str(int(options.nproc_per_node) // _NODES)
    scripts = len(words) - len(options.training_script_args)  # where the script's own words begin
    halved = [f"--nproc-per-node={half}"]  # also where the number comes from the environment
    skip = False
    for word in words[:scripts]:
        name, equals, _ = word.partition("=")
        if name.replace("_", "-") == "--nproc-per-node":
            skip = not equals
        elif skip:
            skip = False
        else:
            halved.append(word)
    return [*halved, *words[scripts:]]


def place_kills(iterations: int, boundaries: Sequence[int], begun: int = 0) -> tuple[int, int]:
    """The iterations to kill in, near the middle. Pure. `boundaries`: where epochs began or ended. If possible one
    comes after the kills, and one before them: what a script counts from zero is right in the first epoch. `begun`: the
    iteration of the checkpoint that the job itself loads."""
    middle = max(begun + 3, begun + (iterations - begun - 2) // 2 + 1)

    def merit(second: int) -> tuple[bool, bool, int]:
        return any(at > second for at in boundaries), any(at < second - 1 for at in boundaries), -abs(second - middle)

    second = max(range(begun + 3, max(begun + 4, iterations)), key=merit)
    return second - 1, second


def faults_of(kills: Sequence[int], ranks: int, nodes: int) -> str:
    """The faults that kill one rank in each of these iterations, each in another incarnation: the last rank, then the
    first. A whole node is killed from outside, while its last rank is stopped."""
    parts = []
    for restart, iteration in enumerate(kills):
        rank = ranks - 1 if restart % 2 == 0 else 0
        action = "stop" if nodes > 1 and not restart else "kill"
        parts.append(f"{_POINT}@iteration={iteration},rank={rank},restart={restart}:{action}")
    return ";".join(parts)


def rehearse(plan: RehearsalPlan, display: Display) -> Rehearsal:
    """Run and compare. Raises DriveError if a run cannot be judged, with the end of its output."""
    unfailed = _run(plan, "unfailed", "", (), display)
    ranks = max(entry.world_size for entry in unfailed)
    last = max(entry.iteration for entry in unfailed)
    begun = min(entry.iteration for entry in unfailed) - 1
    kills = plan.kills or place_kills(last, epoch_ends(unfailed), begun)
    if min(kills) < begun + 2:
        raise DriveError(f"the job begins with iteration {begun + 1}: kill it in {begun + 2} or later (--kill)")
    if last <= max(kills):
        raise DriveError(f"the job ends after iteration {last}: there is none after a kill in iteration {max(kills)}")
    apart: list[TranscriptEntry] = []
    if plan.unprotected:
        few = replace(plan, iterations=begun + _UNPROTECTED, arguments=("--ftp-unprotected", *plan.arguments))
        apart = _run(few, "unprotected", "", (), display)
    try:
        failed = _run(plan, "failed", faults_of(kills, ranks, plan.nodes), kills, display)
    except DriveError as error:
        return Rehearsal(None, kills, (), str(error), _notices(plan.folder))
    comparison = compare_transcripts(failed, unfailed, len(kills), apart)
    if comparison.exact:
        remember(plan.digest, comparison.sentence.splitlines()[0].partition(";")[0])
    return Rehearsal(comparison, kills, tuple(not_exercised(failed)), notices=_notices(plan.folder))


def _notices(folder: Path) -> tuple[str, ...]:
    """The lines of both runs' output that name what is not captured, or begins again after a restore."""
    logs = sorted([*folder.glob("*/output.log"), *folder.glob("*/node*/output.log")], reverse=True)  # unfailed first
    lines = (line for log in logs for line in log.read_text(errors="replace").splitlines())
    return tuple(dict.fromkeys(line for line in lines if _NAMES_LOST(line)))


def _run(plan: RehearsalPlan, name: str, faults: str, kills: Sequence[int], display: Display) -> list[TranscriptEntry]:
    """One run. Raises DriveError."""
    folder = plan.folder / name
    if folder.exists() and not (folder / TRANSCRIPT).is_dir():
        raise ConfigError(f"--out {plan.folder}: it holds a folder '{name}' of another kind; name another one")
    shutil.rmtree(folder, ignore_errors=True)
    make_private(folder / TRANSCRIPT)
    words = [word.replace(RUN, str(folder)) for word in plan.arguments]
    words = [
        f"--ftp-transcript-dir={folder / TRANSCRIPT}", f"--ftp-stop-after={plan.iterations}",
        "--ftp-resume=auto", *([f"--ftp-faults={faults}"] if faults else []), *words,
    ]  # fmt: skip
    job = f"rehearsal-{secrets.token_hex(4)}-{name}"  # nothing of an earlier rehearsal is resumed from
    log = transcript_path(folder / TRANSCRIPT, 0)
    display.begin(f"{name} run", plan.iterations)
    with _no_hash_seed(), DrivenJob(job, words, folder, log, plan.iterations, plan.nodes) as drive:
        try:
            _follow(drive, plan, kills, display)
        except DriveError as error:
            raise DriveError(f"{name} run: {error}\n{last_words(drive)}") from error
    return read_transcripts(folder / TRANSCRIPT)


def _follow(drive: DrivenJob, plan: RehearsalPlan, kills: Sequence[int], display: Display) -> None:
    """Follow the job to its end; destroy a node once its last rank is stopped and a version is committed."""
    node_to_kill = plan.nodes > 1 and bool(kills)
    since = None
    while (progress := drive.follow(_POLL_SECONDS, plan.patience)).phase is not DrivePhase.DONE:
        display.show(progress)
        if node_to_kill and progress.iteration >= kills[0] - 1:
            since = since or time.monotonic()
            committed = any(event.name == catalogue.VERSION_COMMITTED.name for event in drive.events())
            if committed and time.monotonic() > since + 1.0:  # let a version that is under way be committed too
                lost, fresh = drive.kill_node()
                display.say(f"{lost} was killed with its memory; {fresh} takes its place")
                node_to_kill = False
    display.show(progress)


def last_words(drive: DrivenJob) -> str:
    """What ft_plugins said last, else the last lines of the job's output."""
    lines = drive.tail(200).splitlines()
    ours = [line for line in lines if line.startswith(("ft_plugins: rank", "ft-run: "))]
    return "\n".join(ours[-3:] or lines[-10:])


@contextmanager
def _no_hash_seed() -> Iterator[None]:
    """Let every process choose its own hash seed."""
    seed = os.environ.pop("PYTHONHASHSEED", None)
    try:
        yield
    finally:
        if seed is not None:
            os.environ["PYTHONHASHSEED"] = seed


def report(outcome: Rehearsal) -> str:
    """The outcome for people."""
    killed = f"killed in iterations {', '.join(map(str, outcome.kills))}"
    compared = outcome.comparison
    lines = [
        f"NOT EXACT: {killed}, and the job did not go on to its end:\n{outcome.refused}"
        if compared is None
        else compared.sentence
    ]
    if compared is not None and not outcome.exact and compared.difference is not None:
        lines.append(
            "usual causes: state that belongs to nothing declared (a second optimizer, an average of the model, a "
            "GradScaler, a generator of its own); data read from the loop's beginning, or ahead; random numbers of the "
            "loader's workers; counters and lists in variables of the script, which begin again"
        )
    if compared is not None and compared.uncaptured:
        lines.append("not captured, and other values than in the unfailed run:")
        lines += [f"  {path}" for path in compared.uncaptured]
    if outcome.notices:
        lines.append("the job itself said:")
        lines += [f"  {line}" for line in outcome.notices]
    if outcome.not_exercised:
        lines.append("not shown by these iterations:")
        lines += [f"  {line}" for line in outcome.not_exercised]
    return "\n".join(lines)
