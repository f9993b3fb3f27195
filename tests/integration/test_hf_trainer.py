"""Hugging Face's Trainer, killed in mid-run under ft-run: each ends as one that never failed, bit for bit."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pytest

from ft_plugins.errors import EXIT_REFUSED
from ft_plugins.events import read
from harness import orderly_end
from harness.golden import explain, tree_differences
from harness.rehearsed import rehearsed

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

TRAINER, LOOP = (Path(__file__).with_name(name) for name in ("trainer_jobs.py", "accelerate_loops.py"))
EXAMPLE = Path(__file__).resolve().parents[2] / "launch" / "examples" / "hf_trainer.py"
RANKS = 2
UPDATES = 12  # of a job with DeepSpeed
FT_RUN, TORCHRUN = ("-m", "ft_plugins.launcher.command"), ("-m", "torch.distributed.run", "--standalone")
BOUND = 590


@dataclass(frozen=True)
class Case:
    """`arguments` of the script. `kills`: restart, rank, update and the moment in it; `restored` the iterations from
    which the job goes on. `stage` of ZeRO; None: DistributedDataParallel."""

    arguments: str
    kills: tuple[str, ...]
    restored: tuple[int, ...]
    stage: int | None = None
    flags: str = ""  # of ft-run, without DeepSpeed


_ACCUMULATED = "--accumulate 2 --evaluate 3 --samples 26"  # 4 updates in an epoch, the last of one batch
CASES = {
    # 5 updates in an epoch
    "zero1": Case("", ("0:1:7:update",), (6,), 1),
    "zero1-resumed-by-itself": Case("--checkpoint 4 --resume", ("0:1:7:end",), (6,), 1),
    "zero2-accumulated": Case(
        f"{_ACCUMULATED} --adjust", ("0:1:5:substep", "1:0:8:end", "2:1:9:evaluate"), (4, 7, 8), 2
    ),
    "zero3-augmented": Case("--augmented --evaluate 5", ("0:1:5:end", "1:0:8:end"), (4, 7), 3),
    "ddp-accumulated-augmented": Case(
        f"{_ACCUMULATED} --adjust --augmented --every 2", ("0:1:5:substep", "1:0:8:end", "2:1:9:evaluate"), (4, 7, 8)
    ),
    "fsdp2-accumulated": Case(f"{_ACCUMULATED} --fsdp", ("0:1:5:substep", "1:0:8:end"), (4, 7)),
    "ddp-workers-by-length": Case(
        "--workers 2 --strategy group_by_length --augmented", ("0:1:6:update", "1:0:9:end"), (5, 8)
    ),
    "ddp-checkpoints-early-stopping": Case(
        "--checkpoint 2 --evaluate 2 --patience 2 --resume --steps 16", ("0:1:7:end", "1:0:8:evaluate"), (6, 7)
    ),
    "ddp-killed-while-saving": Case("--checkpoint 4 --resume", ("0:0:4:saving", "1:0:8:saved"), (3, 7)),
    "zero1-killed-while-saving": Case("--checkpoint 4 --resume", ("0:0:4:saving", "1:0:8:saved"), (3, 7), 1),
    "ddp-stream": Case("--stream --samples 22", ("0:1:4:end", "1:1:9:update"), (3, 8)),
    "ddp-audited": Case("", ("0:1:7:end",), (6,), flags="--paft --paft-mode audit --paft-audit-interval 1"),
    "ddp-after-training": Case("--evaluate 5", ("0:1:12:after",), (12,)),
    "zero2-best-loaded-after-training": Case(
        "--checkpoint 3 --evaluate 3 --samples 14 --worst", ("0:1:7:update", "1:0:12:after"), (6, 12), 2
    ),
    "ddp-strange": Case("--strange exact --accumulate 2", ("0:1:4:substep", "1:0:7:end"), (3, 6)),
    "zero2-strange": Case("--strange exact --evaluate 3", ("0:1:7:update",), (6,), 2),
}


def run(folder, launcher, script, arguments, status=0):
    """The final state of each rank; what was printed, if the job ends with another status than 0: it is ended then."""
    folder.mkdir(mode=0o700)
    command = [str(script), str(folder / "state-"), *arguments]
    if "--ftp-job" not in arguments:  # not protected
        command.insert(0, orderly_end.__file__)
    words = [*launcher, "--nproc-per-node", str(RANKS), *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "XDG_RUNTIME_DIR": str(folder)}
    out = folder / "out"  # no pipe: an SMP that stays would have it open
    with out.open("w") as printed:
        done = subprocess.run(
            [sys.executable, *words], cwd=script.parent, env=environment, stdout=printed, stderr=subprocess.STDOUT,
            timeout=BOUND, check=False,
        )  # fmt: skip
    assert done.returncode == status, out.read_text()[-3000:]
    if status:
        ends = [str(Path(sys.executable).with_name("ft-plugins")), "end", arguments[arguments.index("--ftp-job") + 1]]
        subprocess.run(ends, env=environment, timeout=BOUND, check=True, stdout=subprocess.DEVNULL)
        return [out.read_text()]
    return [json.loads((folder / f"state-{rank}").read_text()) for rank in range(RANKS)]


def configuration(folder, stage, protected, accumulate="auto"):
    """A file with DeepSpeed's configuration."""
    settings = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage},
        "csv_monitor": {"enabled": True, "output_path": str(folder / f"csv-{protected}"), "job_name": "job"},
    }
    if protected:
        settings["ft_plugins"] = {"reft": {"interval": 1}}
    path = folder / f"zero{stage}-{protected}.json"
    path.write_text(json.dumps(settings))
    return str(path)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CASES)
def test_a_trainer_that_is_killed_ends_bit_for_bit_as_an_unprotected_one(own_environment, name):
    """Parameters, optimizer, scheduler, TrainerState with every logged number, callbacks, batches, generators."""
    case, folder = CASES[name], own_environment / f"hf-{list(CASES).index(name)}"
    folder.mkdir(mode=0o700)
    words = case.arguments.split()
    if case.stage is None:
        golden = run(folder / "g", TORCHRUN, TRAINER, words)
        protected = ["--reft", *case.flags.split()]
    else:  # on a CPU ft-run has DeepSpeed build nothing
        golden = run(folder / "g", FT_RUN, TRAINER, [*words, "--deepspeed", configuration(folder, case.stage, False)])
        protected = ["--deepspeed", configuration(folder, case.stage, True)]
    kills = [word for kill in case.kills for word in ("--kill", kill)]
    job = ["--ftp-job", f"hf-{name}-{os.getpid()}"]
    killed = run(folder / "k", FT_RUN, TRAINER, [*words, *protected, *job, *kills])
    require_exact(folder / "k", killed, golden, case.restored)
    assert ("best" in name) == any(state["engine"] and state["engine"][0] < UPDATES for state in killed)
    if case.stage is not None and case.restored[-1] < UPDATES:  # else the last start trains nothing
        require_scalars(folder / "csv-True" / "job", restarts=len(case.kills))


def require_scalars(folder, restarts):
    """Raises AssertionError unless DeepSpeed's monitor has written its scalars and ours, the last ones at the end."""
    own, ours = ((folder / f"{name}.csv").read_text().split() for name in ("Train_Samples_lr", "ft_restarts"))
    assert ours[0] == "step,restarts" and ours[-1] == f"{own[-1].partition(',')[0]},{float(restarts)}", (own, ours)


def require_exact(folder, killed, golden, iterations):
    """Raises AssertionError unless the job in `folder` ended as the golden one, restored after `iterations`."""
    differences = list(tree_differences("", {"ranks": golden}, {"ranks": killed}))
    assert not differences, explain(differences)
    [path] = folder.glob("ft_plugins/*/*/events.jsonl")
    events = list(read(path))
    of_rank_0 = [event.fields["iteration"] for event in events if event.name == "state.restored" and not event.rank]
    restored = [iteration for iteration, _ in groupby(of_rank_0)]  # once more where the Trainer loads a checkpoint
    assert restored == list(iterations)
    assert not [event for event in events if event.name in ("protection.lost", "resume.differed")]
    reasons = {event.fields["reason"] for event in events if event.name == "values.restarted"}
    named = {one.partition(" ")[0] for reason in reasons for one in reason.split("; ")}
    assert named <= {"main.seen#", "main.trainer.eval_dataset.read"}, reasons  # what these scripts count begins again


@pytest.mark.timeout(1800)
def test_a_whole_number_of_an_object_that_the_model_holds_is_named_where_it_begins_again(own_environment):
    """The job ends as if nothing were the matter; what the object counts may be used or not."""
    folder = own_environment / "hf-object"
    job = ["--reft", "--ftp-job", f"hf-object-{os.getpid()}", "--kill", "0:1:7:end"]
    run(folder, FT_RUN, TRAINER, ["--strange", "object", *job])
    printed = (folder / "out").read_text()
    assert printed.count("since nothing restores it: model.paced.step 0, was 5") == 1, printed


@pytest.mark.timeout(1800)
def test_a_trainer_whose_callback_changes_parameters_when_training_begins_is_refused_at_a_restart(own_environment):
    folder = own_environment / "hf-halved"
    job = ["--reft", "--ftp-job", f"hf-halved-{os.getpid()}", "--kill", "0:1:7:end"]
    [printed] = run(folder, FT_RUN, TRAINER, ["--strange", "halved", *job], status=EXIT_REFUSED)
    assert "on_train_begin" in printed


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("update", "own"), [(4, ()), (5, ()), (6, ()), (5, ("--skip",))])  # 3 in an epoch
def test_an_own_loop_over_accelerate_that_asks_where_the_engine_is_ends_bit_for_bit_as_an_unprotected_one(
    own_environment, update, own
):
    """Also one that passes over the batches of the restored epoch itself, and saves."""
    folder = own_environment / f"al-{update}{len(own)}"
    folder.mkdir(mode=0o700)
    golden = run(folder / "g", FT_RUN, LOOP, [configuration(folder, 1, False, 2), *own])
    job = ["--reft", "--ftp-job", f"al-{update}-{os.getpid()}", "--kill", f"1:{update}", *own]
    killed = run(folder / "k", FT_RUN, LOOP, [configuration(folder, 1, True, 2), *job])
    require_exact(folder / "k", killed, golden, [update - 1])


@pytest.mark.timeout(1800)
def test_an_own_loop_over_accelerate_that_begins_at_its_own_start_is_warned_of_and_refused(own_environment):
    folder = own_environment / "az"
    folder.mkdir(mode=0o700)
    words = [configuration(folder, 1, True, 2), "--from-zero", "--kill", "1:5"]
    [printed] = run(
        folder / "k", FT_RUN, LOOP, [*words, "--reft", "--ftp-job", f"az-{os.getpid()}"], status=EXIT_REFUSED
    )
    assert "so a restart will be refused: the loop would begin at its own start" in printed
    assert "iteration 3 was restored, but the loop begins at its own start" in printed


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stage", [None, 2])
def test_the_example_passes_a_rehearsal(own_environment, stage):
    folder = own_environment / f"hr-{stage}"
    folder.mkdir(mode=0o700)
    words = ["--reft"] if stage is None else ["--deepspeed", configuration(folder, stage, True)]
    job = [EXAMPLE, "--accumulate", 2, *words]
    outcome = rehearsed(folder, RANKS, job, "--iterations", 30, seconds=BOUND)
    missing = {one.partition(":")[0] for one in outcome["not_exercised"]}
    assert not {"an evaluation", "an epoch's end after a resume"} & missing


@pytest.mark.timeout(1800)
def test_an_own_loop_over_accelerate_passes_a_rehearsal(own_environment):
    folder = own_environment / "ar"
    folder.mkdir(mode=0o700)
    job = [LOOP, folder / "state-", configuration(folder, 1, True, 2), "--reft"]
    outcome = rehearsed(folder, RANKS, job, "--iterations", 8, seconds=BOUND, uncaptured=["main.seen#"])
    assert "an evaluation" not in {one.partition(":")[0] for one in outcome["not_exercised"]}  # in its first epoch
