"""A DeepSpeed script as users start it: ft-run and the block, or the one line and another launcher; and bad input."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ft_plugins.events import read
from ft_plugins.rehearse.driver import free_port
from harness.deepspeed_runs import EXAMPLE, DeepSpeedConfiguration, DeepSpeedRun
from harness.golden import assert_identical

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra [deepspeed]")

SMALLEST = DeepSpeedConfiguration(2, 1)
LINE = Path(__file__).with_name("deepspeed_line.py")
BOUND = 280
FT_RUN = ("-m", "ft_plugins.launcher.command")
DEEPSPEED = ("-m", "deepspeed.launcher.runner")  # what the command `deepspeed` is
TORCHRUN = ("-m", "torch.distributed.run")


def launched(run, launcher, script, ranks=2, **more):
    """The run as a command of its own, in its folder, with `more` in its environment."""
    number = [] if launcher[:2] == DEEPSPEED else ["--nproc-per-node", str(ranks)]
    words = [sys.executable, *launcher, *number, str(script), *run.spec().argv]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(run.folder)}
    # else torchrun's workers find the addresses of the incarnation before in its store, and hang in gloo (torch 2.13)
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    environment |= more
    told, alarms = run.folder / "out", run.folder / "err"  # no pipes: an SMP that stays has the launcher's open
    with told.open("w") as out, alarms.open("w") as err:
        done = subprocess.run(
            words, cwd=run.folder, env=environment, stdout=out, stderr=err, timeout=BOUND, check=False
        )
    return subprocess.CompletedProcess(words, done.returncode, told.read_text(), alarms.read_text())


@pytest.fixture
def short(tmp_path_factory, own_environment):
    """A folder whose path leaves room for that of a socket."""
    folder = own_environment / f"d{len(list(own_environment.iterdir()))}"
    folder.mkdir(mode=0o700)
    return folder


@pytest.mark.parametrize(
    ("launcher", "script"),
    [(FT_RUN, EXAMPLE), ((*TORCHRUN, "--max-restarts", "1", "--standalone"), LINE)],
    ids=["ft-run", "torchrun"],
)
def test_ft_run_and_the_one_line_survive_a_kill_and_end_as_an_unprotected_run(short, launcher, script):
    (short / "f").mkdir(mode=0o700)
    kill = {"reft": {}, "faults": "update.middle@iteration=4,rank=1,restart=0:kill"}
    run = DeepSpeedRun("f", short / "f", SMALLEST, kill)
    done = launched(run, launcher, script)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "ft_plugins configuration" in done.stdout
    [told] = [path.read_text().splitlines() for path in run.folder.glob("ft_plugins/*/*/events.jsonl")]
    restored = [event for event in map(json.loads, told) if event["name"] == "state.restored"]
    assert [event["iteration"] for event in restored] == [3, 3]
    (short / "g").mkdir(mode=0o700)
    golden = DeepSpeedRun("g", short / "g", SMALLEST)
    # without a block the line protects nothing; it does not restart, so needs no store whose port might be taken
    done = launched(golden, (*TORCHRUN, "--standalone"), LINE, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="0")
    assert done.returncode == 0, done.stderr[-3000:]
    assert_identical(run, golden, 2)
    assert not list(Path("/dev/shm").glob(f"ftp-{LINE.stem}-*"))


def test_a_script_that_exits_amid_training_keeps_its_memory_and_one_that_ends_says_what_it_drops(short):
    """Nothing but `sys.exit` within a function shows that its loop was not at its end."""
    script = short / "leaves.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(EXAMPLE.parent)!r})\nimport deepspeed_gpt\nlog = deepspeed_gpt.log\n"
        "def leave(args, engine, outcome):\n"
        "    log(args, engine, outcome)\n"
        "    if engine.global_steps == 3:\n"
        "        sys.exit(0)\n"
        "deepspeed_gpt.log = leave\n"
        "deepspeed_gpt.main(sys.argv[1:])\n"
    )
    run = DeepSpeedRun("e", short, SMALLEST, {"reft": {}, "orphan_seconds": 60.0}, iterations=5)
    left = launched(run, FT_RUN, script)
    assert left.returncode == 0, left.stderr[-3000:]
    assert "after iteration 3, before its own end: iteration 3 is kept in memory for 60 s" in left.stderr
    done = launched(run, FT_RUN, script)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "after iteration 5: iteration 5 is dropped, since nothing says where training ends" in done.stderr
    assert [json.loads(line)["iteration"] for line in run.loss_log.read_text().splitlines()] == [1, 2, 3, 4, 5]
    assert not list(Path("/dev/shm").glob(f"ftp-{script.stem}-*"))


def test_the_one_line_changes_nothing_under_an_ft_run_that_protects_nothing(short):
    run = DeepSpeedRun("n", short, SMALLEST, iterations=1)
    done = launched(run, FT_RUN, LINE)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "no system is on, nothing is protected" in done.stderr
    assert len(run.loss_log.read_text().splitlines()) == 1


def test_a_script_that_leaves_the_process_group_up_ends_in_order_too(short):
    script = short / "left_up.py"
    script.write_text(
        LINE.read_text()
        .replace("Path(__file__).resolve()", f"Path({str(LINE)!r})")
        .replace("import main", "import dist, main")
        .replace("    main(", "    sys.modules['deepspeed_gpt'].dist = LeftUp()\n    main(")
        .replace(
            "if __name__",
            "class LeftUp:\n"
            "    def __getattr__(self, name):\n"
            "        return (lambda: None) if name == 'destroy_process_group' else getattr(dist, name)\n\n\n"
            "if __name__",
        )
    )
    run = DeepSpeedRun("u", short, SMALLEST, {"reft": {}, "orphan_seconds": 60.0}, iterations=2)
    done = launched(run, (*TORCHRUN, "--standalone"), script)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [history] = run.folder.glob("ft_plugins/*/*/events.jsonl")
    assert any(event.name == "snapshot.sealed" for event in read(history))
    assert not list(Path("/dev/shm").glob(f"ftp-{script.stem}-*")), done.stderr


@pytest.mark.all_configurations
def test_deepspeeds_own_launcher_given_the_same_command_again_resumes(short):
    launcher = (*DEEPSPEED, "--num_gpus", "2", "--master_port", str(free_port()))
    run = DeepSpeedRun("l", short, SMALLEST, {"reft": {}, "orphan_seconds": 120.0})
    killed = launched(run.armed("update.middle@iteration=4,rank=1:kill"), launcher, LINE, DS_ACCELERATOR="cpu")
    assert killed.returncode != 0
    done = launched(run, launcher, LINE, DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [told] = [path.read_text().splitlines() for path in run.folder.glob("ft_plugins/*/*/events.jsonl")]
    restored = [event for event in map(json.loads, told) if event["name"] == "state.restored"]
    assert [event["iteration"] for event in restored] == [3, 3]
    logged = [json.loads(line)["iteration"] for line in run.loss_log.read_text().splitlines()]
    assert logged == [1, 2, 3, 3, 4, 5, 6], "the last completed one was computed again"
    assert [event["iteration"] for event in map(json.loads, told) if event["name"] == "resume.proven"] == [3]
    assert not list(Path("/dev/shm").glob(f"ftp-{LINE.stem}-*"))


def test_replicas_are_compared_under_torchrun_without_any_memory_to_see_to(short):
    """What a script's own loop computes with is gathered anew before its next forward, and no SMP is started."""
    paft = {"mode": "audit", "audit_interval": 1, "audit_at": "forward"}
    block = {"paft": paft, "faults": "update.copies@iteration=1,rank=1:flip=12~5"}
    run = DeepSpeedRun("p", short, SMALLEST, block, iterations=2)
    done = launched(run, (*TORCHRUN, "--standalone"), LINE)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "audit.failed: rank 0: after iteration 1: ranks 0, 1, one of these two" in done.stderr
    assert "copies that ranks compute with are rebuilt" in done.stdout
    assert not list(run.folder.glob("ft_plugins/*/*/events.jsonl"))


def test_a_job_builds_nothing_and_needs_no_compiler(short):
    commands, built = short / "bin", short / "built"
    commands.mkdir()
    for name in ("sh", "uname", "env"):
        (commands / name).symlink_to(f"/bin/{name}")
    run = DeepSpeedRun("c", short, SMALLEST, {"reft": {}}, iterations=1)
    done = launched(
        *(run, FT_RUN, EXAMPLE), PATH=str(commands), CC="/bin/false", CXX="/bin/false", TORCH_EXTENSIONS_DIR=str(built)
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert len(run.loss_log.read_text().splitlines()) == 1
    assert not built.exists() or not [path for path in built.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "launcher, script, block, message, ranks",
    [
        (FT_RUN, EXAMPLE, {"reft": {"intervall": 2}}, "unknown key; did you mean ft_plugins.reft.interval?", 1),
        (TORCHRUN, LINE, {"reft": 3}, "ft_plugins.reft: expected", 2),
        (TORCHRUN, LINE, {"paft": {}}, "--paft: has no effect with one data-parallel replica", 1),
        (TORCHRUN, LINE, {"resume": "memory"}, "has no effect while no system that protects state is on", 1),
    ],
)
def test_what_cannot_be_is_one_clear_line(short, launcher, script, block, message, ranks):
    """One line of ours: what torchrun and DeepSpeed say beside it about ranks that failed is their own."""
    run = DeepSpeedRun("bad", short, DeepSpeedConfiguration(ranks, 1))
    argv = run.spec().argv
    written = json.loads((short / "ds.json").read_text())
    (short / "ds.json").write_text(json.dumps({**written, "ft_plugins": block}))
    words = [sys.executable, *launcher, "--nproc-per-node", str(ranks), str(script), *argv]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(short)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=BOUND, check=False)
    assert done.returncode != 0
    lines = [line for line in (done.stdout + done.stderr).splitlines() if message in line]
    assert len(lines) == 1, done.stdout[-2000:] + done.stderr[-3000:]
