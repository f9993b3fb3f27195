"""An unmodified Megatron-LM checkout under ft-run: what a user of `pretrain_gpt.py` gets, on the CPU.

Runs where MEGATRON_LM_PATH names a checkout of core_v0.16.1. The witness is Megatron's own checkpoint at the end of
each run: parameters, optimizer, scheduler, counters and random number generators, compared bit for bit. (Logs would not
do: the second loss logged after any start is a mean of two iterations.)
"""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ft_plugins.errors import EXIT_REFUSED
from harness.megatron_checkpoints import differences, read
from harness.megatron_lm import RUN_SECONDS, ft_run

pytestmark = pytest.mark.timeout(900)

ITERATIONS = 7
JOB = (
    *("--distributed-backend", "gloo", "--transformer-impl", "local", "--tensor-model-parallel-size", "2"),
    *("--pipeline-model-parallel-size", "2", "--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--micro-batch-size", "1", "--global-batch-size", "8"),
    *("--train-iters", str(ITERATIONS), "--lr", "1e-3", "--min-lr", "1e-4", "--lr-decay-style", "cosine"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "127", "--split", "90,5,5", "--num-workers", "0"),
    *("--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-bias-gelu-fusion", "--no-rope-fusion"),
    *("--no-bias-dropout-fusion", "--no-persist-layer-norm", "--seed", "1234", "--log-interval", "1"),
    *("--eval-iters", "1", "--eval-interval", "3", "--ckpt-format", "torch", "--save-interval", "4"),
)
HARDEST = (
    *("--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    *("--num-layers-per-virtual-pipeline-stage", "1"),
)
EDIT = ("--sync-policy", "edit", "--sync-tau", "2", "--sync-warmup", "1", "--sync-penalty-warmup", "1")
DREAMDDP = ("--sync-policy", "dreamddp", "--sync-h", "2", "--sync-warmup", "1")
SKIPPING = ("--iterations-to-skip", "2")  # the third: counted from 0; fp32, no distributed optimizer, 1F1B


def final_state(saved, iterations=ITERATIONS):
    """What Megatron saved at the end, by file."""
    folder = saved / f"iter_{iterations:07d}"
    files = sorted(folder.rglob("*.pt"))
    names = {file.name for file in files}
    assert len(files) == 4 * len(names), f"expected the files of 4 model-parallel ranks in {folder}, found {files}"
    return read(folder).state


@dataclass(frozen=True)
class Case:
    """A configuration, the iteration in which rank 3 is killed, and where."""

    name: str
    options: tuple[str, ...]
    point: str
    iteration: int
    protected: tuple[str, ...] = ("--reft", "--reft-interval", "1")


CASES = (
    Case("overlapped-interleaved", HARDEST, "iteration.forward", 6),  # Megatron's own save has 4, memory 5
    Case("skipped-iteration", SKIPPING, "update.middle", 4),  # what is restored is the skipped one's version point
    Case("edit", EDIT, "iteration.forward", 6),  # replicas are synchronised after 2, 4, 6
    Case("dreamddp", DREAMDDP, "iteration.forward", 6, ("--reft", "--reft-versions", "every")),  # half the layers each
)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def case(request):
    found = request.param
    return found


@pytest.fixture(scope="module")
def scalars(case, tmp_path_factory):
    """The folder of TensorBoard's files: one for all runs of a case, since its name is an argument, and compared."""
    return tmp_path_factory.mktemp("scalars") / case.name


@pytest.fixture(scope="module")
def script(checkout, corpus, case, scalars):
    return [checkout / "pretrain_gpt.py", *JOB, *case.options, "--data-path", corpus, "--tensorboard-dir", scalars]


@pytest.fixture(scope="module")
def unfailed(script, case, tmp_path_factory):
    saved = tmp_path_factory.mktemp("unfailed")
    run = ft_run(script, saved, "--save", saved, "--load", saved, job=f"unfailed-{case.name}")
    run.require_success()
    return run


def test_a_killed_run_ends_in_the_state_of_an_unfailed_one(script, case, unfailed, scalars, tmp_path):
    shutil.rmtree(scalars)  # those of the unfailed run
    kill = f"{case.point}@iteration={case.iteration},rank=3,restart=0:kill"

    killed = ft_run(
        *(script, tmp_path, "--save", tmp_path, "--load", tmp_path),
        *(*case.protected, "--ftp-faults", kill, "--ftp-orphan-seconds", 30),
        job=f"killed-{case.name}",
    )

    killed.require_success()
    assert [event.fields["signal"] for event in killed.events("worker.failed") if event.rank == 3] == ["SIGKILL"]
    restored = killed.events("state.restored")
    assert sorted(event.rank for event in restored) == list(range(8)), restored
    versions = {(event.fields["tier"], event.fields["iteration"]) for event in restored}
    sealed, older = ("process", case.iteration - 1), ("process", case.iteration - 2)
    assert versions in ({sealed}, {older}), versions
    assert differences(final_state(unfailed.saved), final_state(tmp_path)) == []
    assert not killed.events("resume.differed"), "scalars change nothing that is compared"
    written = EventAccumulator(str(scalars)).Reload()
    last = {tag: written.Scalars(tag)[-1] for tag in written.Tags()["scalars"]}
    assert last["lm loss"].step == last["ft/restarts"].step == ITERATIONS and last["ft/restarts"].value == 1
    lost = case.iteration - 1 - next(iter(versions))[1]
    assert last["ft/lost_iterations"].value == lost and last["ft/version_age_seconds/process"].value >= 0


def test_a_restart_from_megatrons_own_checkpoint_says_which_replicas_it_lost(checkout, corpus, tmp_path):
    """Replicas are synchronised every 128 iterations, so memory holds no version when rank 3 is killed in 6."""
    killed = ft_run(
        *([checkout / "pretrain_gpt.py", *JOB, *DREAMDDP, "--data-path", corpus], tmp_path),
        *("--save", tmp_path, "--load", tmp_path, "--reft", "--ftp-orphan-seconds", 30),
        *("--ftp-faults", "iteration.forward@iteration=6,rank=3,restart=0:kill"),
        job="killed-early",
    )
    killed.require_success()
    assert {(e.fields["tier"], e.fields["iteration"]) for e in killed.events("state.restored")} == {("storage", 4)}
    resets = killed.events("replicas.restarted")
    assert sorted(event.rank for event in resets) == list(range(8))
    assert {event.fields["iteration"] for event in resets} == {4}
    line = "the checkpoint of iteration 4 holds one replica: all 2 start from its parameters"
    assert killed.output.count(line) == 1, killed.output[-4000:]


def test_a_chain_of_starts_that_exit_early_advances_and_ends_in_the_state_of_one(checkout, corpus, tmp_path):
    """Each start exits before a checkpoint, and a snapshot, would be due; and Megatron itself saves nothing."""
    small = ("--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1", "--global-batch-size", "4")
    script = [checkout / "pretrain_gpt.py", *JOB, *small, "--data-path", corpus]
    whole, chain = tmp_path / "whole", tmp_path / "chain"
    ft_run(script, whole, "--save", whole, job="megatron-whole", ranks=2).require_success()
    ours = ("--reft", "--reft-interval", 10, "--reft-checkpoint-dir", tmp_path / "ck", "--reft-checkpoint-interval", 20)
    for number, reached in enumerate((3, 6), 1):
        left = ft_run(script, chain, "--exit-interval", 3, *ours, job="megatron-chain", ranks=2)
        left.require_success()
        stored = f"training ended after iteration {reached}, before its own end: iteration {reached} is in "
        assert stored + str(tmp_path / "ck" / "megatron-chain" / f"v{number}-{reached}") in left.output
        assert [event.fields["status"] for event in left.events("job.ended")] == ["stopped"]
    last = ft_run(script, chain, "--exit-interval", 3, "--save", chain, *ours, job="megatron-chain", ranks=2)
    last.require_success()
    assert "before its own end" not in last.output
    found, expected = (read(folder / f"iter_{ITERATIONS:07d}").state for folder in (chain, whole))
    given = "/mp_rank_00/model_optim_rng.pt/args/exit_interval: None and 3"
    assert expected and differences(expected, found) == [given], "nothing else differs"


def test_another_seed_ends_in_another_state(script, unfailed, tmp_path):
    other = ft_run(script, tmp_path, "--save", tmp_path, "--seed", 4321, job="megatron-seed")
    other.require_success()
    found = differences(final_state(unfailed.saved), final_state(tmp_path))
    assert any("exp_avg" in place for place in found), found


def test_a_run_without_a_synchronisation_is_one_clear_line(checkout, corpus, tmp_path):
    script = [checkout / "pretrain_gpt.py", *JOB, "--data-path", corpus]
    refused = ft_run(script, tmp_path, "--sync-policy", "edit", "--sync-warmup", ITERATIONS, job="megatron-warm")
    assert refused.status == EXIT_REFUSED, refused.output[-4000:]
    lines = [line for line in refused.output.splitlines() if "before the first synchronisation" in line]
    assert len(lines) == 1 and f"training ends at iteration {ITERATIONS}" in lines[0], refused.output[-4000:]


def test_help_shows_our_flags_among_megatrons(checkout, tmp_path):
    words = ("--distributed-backend", "gloo", "--help")
    shown = ft_run([checkout / "pretrain_gpt.py", *words], tmp_path, job="megatron-help", ranks=1)
    shown.require_success()
    for flag in ("--reft", "--reft-interval", "--ftp-resume", "--tensor-model-parallel-size"):
        assert flag in shown.output


def test_a_restore_leaves_what_megatrons_own_load_leaves(checkout, tmp_path):
    probe = Path(__file__).with_name("megatron_probe.py")
    folders = {name: tmp_path / name for name in ("restored", "loaded", "save")}
    for folder in folders.values():
        folder.mkdir()
    options = [*JOB, "--mock-data", "--bf16", "--use-distributed-optimizer", "--save", folders["save"]]

    kill = "update.middle@iteration=5,rank=0,restart=0:kill"  # Megatron has saved iteration 4; memory has sealed it
    ours = ft_run(
        *([probe, checkout, folders["restored"], *options], tmp_path),
        *("--reft", "--ftp-faults", kill, "--ftp-orphan-seconds", 30),
        job="megatron-restored",
    )
    ours.require_success()
    (folders["save"] / "latest_checkpointed_iteration.txt").write_text("4")
    theirs = ft_run(
        [probe, checkout, folders["loaded"], *options, "--load", folders["save"]], tmp_path, job="megatron-loaded"
    )
    theirs.require_success()

    for rank in range(8):
        restored, loaded = (
            torch.load(folders[name] / f"rank{rank}.pt", weights_only=False) for name in ("restored", "loaded")
        )
        assert restored["args"]["iteration"] == loaded["args"]["iteration"] == 4
        assert restored["args"]["num_floating_point_operations_so_far"] > 0
        assert restored["args"].pop("num_floating_point_operations_so_far") == loaded["args"].pop(
            "num_floating_point_operations_so_far"
        )
        assert differences(restored, loaded) == [], f"rank {rank}"


EXPORTED = 4  # the iteration whose checkpoint is exported
OWN = ("--ckpt-format", "torch_dist", "--dist-ckpt-optim-fully-reshardable", "--make-vocab-size-divisible-by", "64")
VIRTUAL = ("--num-layers-per-virtual-pipeline-stage", "1")
OF_THE_LOOP = ("curr_iteration", "do_train", "do_valid", "do_test", "num_query_groups")  # set where they are used
EXPORTS = {
    "bf16-distopt-interleaved-swiglu": ((*HARDEST[:4], "--swiglu"), VIRTUAL),
    "fp32-replicated-untied": (("--untie-embeddings-and-output-weights",), ()),
}


@pytest.mark.parametrize("options", EXPORTS.values(), ids=EXPORTS)
def test_an_exported_checkpoint_is_the_one_that_megatron_saves_and_goes_on_alike(checkout, corpus, tmp_path, options):
    model, virtual = options
    script = [checkout / "pretrain_gpt.py", *JOB, *model, *OWN, "--data-path", corpus]
    own, exported, gone_on, resized = (tmp_path / name for name in ("own", "exported", "gone-on", "resized"))
    storage = ("--reft", "--reft-checkpoint-dir", tmp_path / "ck", "--reft-checkpoint-interval", EXPORTED)
    storage += ("--ftp-orphan-seconds", 30)

    both = ft_run(script, own, *virtual, "--save", own, *storage, job=f"export-{len(model)}")
    both.require_success()
    (folder,) = (tmp_path / "ck").glob(f"*/v1-{EXPORTED}")
    command = [Path(sys.executable).with_name("ft-plugins"), "export", folder, "--to", exported]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS)
    assert done.returncode == 0, done.stderr
    theirs, ours = saved_by_megatron(own, EXPORTED), saved_by_megatron(exported, EXPORTED)
    for arguments in (vars(theirs["common"]["args"]), vars(ours["common"]["args"])):
        for name in OF_THE_LOOP:
            arguments.pop(name, None)
    assert differences(theirs, ours) == []

    plain = ft_run(script, gone_on, *virtual, "--load", exported, "--save", gone_on, job="export-gone-on")
    plain.require_success()
    assert not (gone_on / f"iter_{EXPORTED:07d}").exists(), "it went on from the exported checkpoint, not from nothing"
    assert differences(saved_by_megatron(own, ITERATIONS), saved_by_megatron(gone_on, ITERATIONS)) == []

    sizes = ("--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1")
    as_it_is = ("--train-iters", EXPORTED, "--save-interval", "3", "--use-checkpoint-opt_param-scheduler")
    other = ft_run(
        script, resized, *sizes, *as_it_is, "--load", exported, "--save", resized, job="export-resized", ranks=2
    )
    other.require_success()
    left, right = (saved_by_megatron(place, EXPORTED)["tensors"] for place in (exported, resized))
    assert differences(left, right) == []


def saved_by_megatron(place, iteration):
    """A `torch_dist` checkpoint: every global tensor, the objects, what is common to all ranks."""
    return read(place / f"iter_{iteration:07d}").state


# ---- a NaN in one replica, which Megatron's check of results sees before the optimizer does ----

FOUR_REPLICAS = ("--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1")
WRONG = 4  # the iteration whose update leaves a NaN in a weight of rank 2
NAN = f"update.parameters@iteration={WRONG},rank=2,restart=0:nan~3"


def saved_state(saved):
    return read(saved / f"iter_{ITERATIONS:07d}").state


@pytest.fixture(scope="module")
def replicated(checkout, corpus):
    return [checkout / "pretrain_gpt.py", *JOB, *FOUR_REPLICAS, "--save-interval", "100", "--data-path", corpus]


@pytest.fixture(scope="module")
def clean(replicated, tmp_path_factory):
    saved = tmp_path_factory.mktemp("unfailed")
    run = ft_run(replicated, saved, "--save", saved, job="checks-unfailed", ranks=4)
    run.require_success()
    return saved_state(saved)


def audited(replicated, saved, interval):
    run = ft_run(
        *(replicated, saved, "--save", saved, "--load", saved, "--reft", "--ftp-orphan-seconds", 30, "--paft"),
        *("--paft-mode", "audit", "--paft-audit-interval", interval, "--ftp-faults", NAN),
        job=f"checks-{interval}", ranks=4,
    )  # fmt: skip
    run.require_success()
    [injected] = run.events("fault.injected")
    assert "exp_avg" not in injected.fields["item"], "a weight, so that the loss becomes NaN"
    return run


@pytest.mark.all_configurations
@pytest.mark.timeout(1800)
def test_the_replica_is_repaired_before_megatrons_check_has_it_saved_and_the_job_ended(replicated, clean, tmp_path):
    run = audited(replicated, tmp_path, 1)
    [failed] = run.events("audit.failed")
    assert (failed.fields["ranks"], failed.fields["iteration"]) == ([2], WRONG)
    assert run.events("worker.failed") == [] and not (tmp_path / f"iter_{WRONG:07d}").exists()
    assert differences(clean, saved_state(tmp_path)) == []


@pytest.mark.all_configurations
@pytest.mark.timeout(1800)
def test_a_checkpoint_that_megatron_saved_of_the_wrong_replica_is_not_preferred_to_the_certified_version(
    replicated, clean, tmp_path
):
    """No audit of iteration 4 is due: Megatron's check saves that iteration and ends the job."""
    run = audited(replicated, tmp_path, 3)
    assert run.events("worker.failed") and (tmp_path / f"iter_{WRONG:07d}").exists()
    restored = run.events("state.restored")
    assert {event.fields["iteration"] for event in restored} == {3}, restored
    assert f"the framework's own, saved when replicas were not known to agree: {WRONG}" in run.output
    assert differences(clean, saved_state(tmp_path)) == []
