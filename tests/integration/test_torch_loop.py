"""The example of plain torch as a user starts it: killed in mid-run under ft-run, it ends as one without protection."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from ft_plugins.errors import EXIT_REFUSED
from ft_plugins.events import read
from harness.golden import assert_identical

EXAMPLE = Path(__file__).resolve().parents[2] / "launch" / "examples" / "torch_loop.py"
FT_RUN, TORCHRUN = ("-m", "ft_plugins.launcher.command"), ("-m", "torch.distributed.run", "--standalone")
ITERATIONS, KILLED_IN = 16, 9  # 6 iterations are an epoch
BOUND = 280


@dataclass(frozen=True)
class Run:
    """Of the example, in `folder`."""

    folder: Path

    @property
    def digests(self):
        return self.folder / "state-"

    @property
    def loss_log(self):
        return self.folder / "loss.jsonl"

    def start(self, *launcher, own=()):
        self.folder.mkdir(mode=0o700)
        words = [*launcher, str(EXAMPLE), "--iterations", str(ITERATIONS), "--loss-log", str(self.loss_log)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(self.folder)}
        out = self.folder / "out"  # no pipe: an SMP that stays would have it open
        with out.open("w") as told:
            done = subprocess.run(
                [sys.executable, *words, "--state-digest", str(self.digests), *own], cwd=self.folder.parent,
                env=environment, stdout=told, stderr=subprocess.STDOUT, timeout=BOUND, check=False,
            )  # fmt: skip
        return subprocess.CompletedProcess(words, done.returncode, out.read_text())

    def events(self, name):
        [path] = self.folder.glob("ft_plugins/*/*/events.jsonl")
        return [{"rank": event.rank, **event.fields} for event in read(path) if event.name == name]


@pytest.fixture
def folder(own_environment):
    """One whose path leaves room for that of a socket."""
    folder = own_environment / f"t{len(list(own_environment.iterdir()))}"
    folder.mkdir(mode=0o700)
    yield folder
    assert not list(Path("/dev/shm").glob(f"ftp-torch-{os.getpid()}-*"))


@pytest.mark.parametrize(
    "optimizer",
    [
        "adamw-amsgrad",
        *(pytest.param(one, marks=pytest.mark.all_configurations) for one in ("adam", "sgd", "sgd-momentum")),
    ],
)
def test_a_loop_of_plain_torch_that_is_killed_ends_bit_for_bit_as_one_without_the_package(folder, optimizer):
    """Its replicas have dropout of their own, and data that are shuffled in every epoch; it dies in its second one."""
    own, ranks = ("--optimizer", optimizer), ("--nproc-per-node", "2")
    golden, killed = Run(folder / "g"), Run(folder / "k")
    plain = golden.start(*TORCHRUN, *ranks, own=(*own, "--unprotected"))
    assert plain.returncode == 0, plain.stdout[-3000:]

    fault = f"--ftp-faults=update.end@iteration={KILLED_IN},rank=1,restart=0:kill"
    done = killed.start(*FT_RUN, *ranks, "--reft", "--ftp-job", f"torch-{os.getpid()}", fault, own=own)
    assert done.returncode == 0, done.stdout[-3000:]
    assert [event["iteration"] for event in killed.events("state.restored")] == [KILLED_IN - 1] * 2
    assert killed.events("protection.lost") == []
    assert_identical(killed, golden, 2)


def test_a_loop_that_asks_for_protection_without_ft_run_does_not_train(folder):
    run = Run(folder / "n")
    done = run.start()
    assert done.returncode == EXIT_REFUSED and not run.loss_log.exists()
    [line] = done.stdout.splitlines()[-1:]
    assert line.startswith("ConfigError: ft_plugins.attach: no system is switched on") and "ft-run" in line


def test_replicas_at_their_own_pace_go_on_from_their_last_synchronisation(folder):
    """Rank 1 is killed while its replicas apply their third synchronisation."""
    run = Run(folder / "a")
    fault = "--ftp-faults=sync.apply@rank=1,restart=0,hit=8:kill"  # the second of three modules
    sync = ("--sync-policy", "a_edit", "--sync-seconds", "0.1", "--sync-warmup", "2", "--sync-penalty-warmup", "1")
    done = run.start(
        *FT_RUN, "--nproc-per-node", "2", "--reft", *sync, "--ftp-job", f"torch-{os.getpid()}", fault,
        own=("--iterations", "120"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    synchronised = [event for event in run.events("replicas.synchronised") if event["rank"] == 0]
    numbers = [event["number"] for event in synchronised]
    assert numbers[:2] == [1, 2] and numbers[2:] == list(range(3, len(numbers) + 1)), "the third was made once more"
    assert sum(sum(event["iterations"]) for event in synchronised) + 2 * 2 >= 2 * 120
    assert [event["iteration"] for event in run.events("state.restored")] == [2 + 2] * 2  # warm-up and synchronisations
    models = [json.loads(Path(f"{run.digests}{rank:05d}.json").read_text())["model"] for rank in range(2)]
    assert models[0] == models[1], "replicas end with a synchronisation"


@pytest.mark.parametrize("order", ["average_first", "update_first"])
def test_killed_while_layers_are_averaged_it_ends_bit_for_bit_as_the_unfailed_run(folder, order):
    """Of three layers two and one in turn, all three after iterations 4, 8, 12 and 16. Killed in the exchange of
    iteration 7, at its second layer; then in the same iteration, when that one is applied."""
    sync = ("--sync-policy", "dreamddp", "--sync-h", "2", "--sync-tau", "4", "--sync-schedule", "equal")
    words = (*FT_RUN, "--nproc-per-node", "2", *sync, "--sync-order", order)
    golden, killed = Run(folder / "g"), Run(folder / "k")
    unfailed = golden.start(*words, "--ftp-job", f"torch-{os.getpid()}-g")
    assert unfailed.returncode == 0, unfailed.stdout[-3000:]
    averaged = {event["iteration"]: event["layers"] for event in golden.events("layers.averaged")}
    assert [len(averaged.get(step, "all")) for step in range(1, 9)] == [2, 1, 2, 3, 2, 1, 2, 3]

    faults = "sync.exchange@rank=1,hit=13,restart=0:kill;sync.apply@rank=0,hit=5,restart=1:kill"
    done = killed.start(*words, "--reft", "--ftp-job", f"torch-{os.getpid()}", f"--ftp-faults={faults}")
    assert done.returncode == 0, done.stdout[-3000:]
    assert [event["iteration"] for event in killed.events("state.restored")] == [4] * 4
    assert_identical(killed, golden, 2)
    assert averaged == {event["iteration"]: event["layers"] for event in killed.events("layers.averaged")}
