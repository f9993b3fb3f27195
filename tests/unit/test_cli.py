"""`ft-plugins`, as a user types it, against a real SMP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ft_plugins import cli
from ft_plugins.config import Config, keys, run_directory
from ft_plugins.smp import client as smp
from ft_plugins.smp import liveness
from ft_plugins.snapshot import segment
from ft_plugins.snapshot.segment import Shape, path_of

README = Path(__file__).resolve().parents[2] / "README.md"


Command = Callable[..., str]


@pytest.fixture
def own_run_root(own_environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run directories of this test alone."""
    folder = own_environment / uuid.uuid4().hex[:6]
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))


@pytest.fixture
def ft_plugins(own_run_root: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command: returns its stdout, or the line on stderr when it is expected to fail."""

    def run(*words: str, status: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["ft-plugins", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        assert (ended.value.code or 0) == status, err + out
        return err if status else out

    return run


@pytest.fixture
def job(own_run_root: None) -> Iterator[str]:
    """A job of one rank on node n: an SMP that holds one segment, its trainer (this process), no ft-run."""
    name = f"cli-{uuid.uuid4().hex[:8]}"
    run_dir = run_directory(name, "n")
    smp.ensure(run_dir, name, "n", orphan_seconds=60)
    yield name
    if liveness.held(run_dir / "smp.lock"):
        with smp.Client(run_dir) as client:
            client.end()


def attach(job: str) -> Path:
    """Have the SMP of `job` create a segment of a few pages for rank 0."""
    with smp.Client(run_directory(job, "n")) as client:
        token = client.fence()
        shape = Shape(nbytes=8192, small_nbytes=4096, buckets=1, layout=1)
        return client.attach(0, token, shape, {"model": "small"}, fresh=False)


# ------------------------------------------------------------------------------------------------ status, end, sweep


def test_status_of_a_node_without_jobs_says_so(ft_plugins: Command) -> None:
    assert ft_plugins("status").strip() == "no job is known here"
    assert ft_plugins("status", "--json") == ""


def test_status_shows_the_smp_and_what_it_holds(ft_plugins: Command, job: str) -> None:
    path = attach(job)
    report = json.loads(ft_plugins("status", "--job", job, "--json"))
    assert (report["job"], report["node"], report["alive"], report["ft_run_alive"]) == (job, "n", True, False)
    assert [segment["path"] for segment in report["segments"]] == [str(path)]
    table = ft_plugins("status")
    assert job in table and f"pid {report['pid']}" in table and "none yet" in table and "gone" in table


def test_end_drops_the_snapshots_and_ends_the_smp(ft_plugins: Command, job: str) -> None:
    path = attach(job)
    assert path.exists()
    assert ft_plugins("end", job) == f"job {job} on node n: ended\n"
    assert not path.exists() and not liveness.held(run_directory(job, "n") / "smp.lock")
    assert "no SMP is running" in ft_plugins("end", job)


def test_end_refuses_a_job_that_is_running_under_ft_run(ft_plugins: Command, job: str) -> None:
    path = attach(job)
    lock = liveness.acquire(run_directory(job, "n") / "lock")
    assert lock is not None
    assert "is running under ft-run; stop that first" in ft_plugins("end", job, status=1)
    os.close(lock)
    assert path.exists()


@pytest.mark.parametrize("words", [("status", "--job", "nobody"), ("end", "nobody")])
def test_a_job_that_is_not_known_is_one_line_with_those_that_are(
    ft_plugins: Command, job: str, words: tuple[str, ...]
) -> None:
    line = ft_plugins(*words, status=1)
    assert line == f"ft-plugins: no job 'nobody' is known here; expected one of: {job}\n"


def test_sweep_removes_what_a_dead_smp_left_and_nothing_else(
    ft_plugins: Command, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    living = attach(job)
    monkeypatch.setattr(segment, "SHM", tmp_path)  # other tests have segments there which nobody owns
    events = run_directory("dead", "n") / "events.jsonl"
    events.write_text("")
    stale = path_of("dead", "n", 0)
    stale.write_bytes(b"left behind")
    assert ft_plugins("sweep") == "0 segments removed\n"  # young: can still be resumed from
    assert stale.exists()
    assert ft_plugins("sweep", "--older-than", "0") == f"removed {stale}\n1 segments removed\n"
    assert living.exists() and not stale.exists()


# ------------------------------------------------------------------------------------------------ config


def test_config_lists_every_key(ft_plugins: Command) -> None:
    text = ft_plugins("config")
    assert all(key.flag in text and key.name in text for key in keys())


def test_config_as_json_is_a_block_that_is_accepted(ft_plugins: Command) -> None:
    block = json.loads(ft_plugins("config", "--format", "json"))["ft_plugins"]
    assert Config.from_json(block).systems == ("reft",)
    assert block["reft"] == {"interval": 1, "bucket_mib": 4}


def test_config_turns_flags_into_the_other_spellings(ft_plugins: Command) -> None:
    flags = ("--", "--reft", "--reft-interval", "4")
    block = json.loads(ft_plugins("config", "--format", "json", *flags))["ft_plugins"]
    assert block == {"reft": {"interval": 4}}
    assert ft_plugins("config", "--format", "env", *flags) == 'FTP_CONFIG=\'{"reft": {"interval": 4}}\'\n'
    assert ft_plugins("config", "--format", "flags", *flags) == "--reft --reft-interval=4\n"
    assert "--reft-interval              4 iterations" in ft_plugins("config", *flags)


def test_config_refuses_what_ft_run_would_refuse(ft_plugins: Command) -> None:
    line = ft_plugins("config", "--", "--reft", "--reft-intrval", "4", status=1)
    assert line == "ft-plugins: --reft-intrval: unknown flag; did you mean --reft-interval?\n"
    assert "train.py: unknown" in ft_plugins("config", "--", "train.py", status=1)


def test_the_readme_shows_the_keys_as_they_are(ft_plugins: Command) -> None:
    generated = ft_plugins("config", "--format", "markdown")
    assert generated in README.read_text(), "put the output of `ft-plugins config --format markdown` into README.md"


def test_the_configuration_is_explained_without_loading_torch() -> None:
    code = "import sys, ft_plugins.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
