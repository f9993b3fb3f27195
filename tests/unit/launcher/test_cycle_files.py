"""The files that nvrx-watch reads: names, fields and times as its reader takes them; nothing of before is replaced."""

from __future__ import annotations

import json
import threading
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from ft_plugins.base import files
from ft_plugins.errors import ConfigError
from ft_plugins.launcher import command
from ft_plugins.launcher.agent import cycle_files
from ft_plugins.launcher.agent.cycle_files import CycleFiles

KEYS = (
    "job_id attempt_index cycle_number cycle_start_time cycle_end_time cycle_log_file active_nodes standby_nodes "
    "active_ranks generation"
).split()  # of the message NVRxCycleInfo, whose JSON the reader takes
SLURM = {"SLURM_JOB_ID": "77", "SLURM_ARRAY_JOB_ID": "70", "SLURM_RESTART_COUNT": "2"}


def read(folder: Path) -> dict[str, dict[str, object]]:
    """By name, without the link."""
    return {path.name: json.loads(path.read_text()) for path in folder.iterdir() if not path.is_symlink()}


def test_each_incarnation_has_a_file_that_is_open_until_it_ends(tmp_path: Path) -> None:
    cycles = CycleFiles(tmp_path / "new" / "folder", "job", {})
    folder = tmp_path / "new" / "folder"
    cycles.begin(0, ["a", "b"], 16)
    (first,) = read(folder).values()
    assert list(first) == sorted(first, key=list(first).index) and set(first) == set(KEYS)
    assert (first["job_id"], first["attempt_index"], first["cycle_number"]) == ("job", 0, 0)
    assert (first["active_nodes"], first["active_ranks"], first["cycle_end_time"]) == ("a,b", "0-15", "")
    cycles.begin(1, ["a", "c"], 1)
    cycles.end()
    cycles.end()
    found = read(folder)
    assert sorted(found) == ["cycle_info.job.0.0", "cycle_info.job.0.1"]
    assert [each["generation"] for each in found.values()] == [1, 1]
    for each in found.values():
        assert str(each["cycle_start_time"]).endswith("Z")
        began, ended = (
            datetime.fromisoformat(str(each[f"cycle_{at}_time"])[:-1] + "+00:00") for at in ("start", "end")
        )
        assert began <= ended and began.utcoffset() == timedelta(0)
    assert (folder / "cycle_info.job.current").resolve().name == "cycle_info.job.0.1"
    assert found["cycle_info.job.0.1"]["active_ranks"] == "0"


@pytest.mark.parametrize(
    ("environment", "job", "attempt"),
    [({}, "job", 0), (SLURM, "70", 2), ({"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "x"}, "77", 0)],
)
def test_the_job_is_slurms_where_there_is_one_and_an_attempt_of_before_is_kept(
    tmp_path: Path, environment: dict[str, str], job: str, attempt: int
) -> None:
    for number in range(attempt, attempt + 2):
        cycles = CycleFiles(tmp_path, "job", environment)
        for restarts in range(2):
            cycles.begin(restarts, ["a"], 2)
        assert sorted(read(tmp_path))[-1] == f"cycle_info.{job}.{number}.1"
    assert len(read(tmp_path)) == 4


@pytest.mark.parametrize("name", ["file", "n" * 300])
def test_a_folder_that_cannot_be_used_costs_the_file_and_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "file").write_text("")
    cycles = CycleFiles(tmp_path / name, "job", {})
    cycles.begin(0, ["a"], 2)
    cycles.end()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and said[0].startswith(
        f"ft-run: --ftp-cycle-info-dir {tmp_path}/{name}: cycle_info.job.0.0 cannot"
    )


def test_it_is_refused_where_no_round_of_ours_starts_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    words = "--rdzv-endpoint localhost:0 --rdzv-backend c10d --reft --ftp-cycle-info-dir d train.py".split()
    with pytest.raises(ConfigError, match="--ftp-cycle-info-dir: has no effect with --rdzv-backend c10d"):
        command.execute(command.plan(words, 1, str(tmp_path), "host"))


def test_a_folder_that_does_not_answer_holds_no_start_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: list[Path] = []
    answers = threading.Event()

    def write(path: Path, values: object) -> None:
        asked.append(path)
        answers.wait(90)

    monkeypatch.setattr(cycle_files, "SECONDS", 0.2)
    monkeypatch.setattr(files, "write_json", write)
    cycles = CycleFiles(tmp_path, "job", {})
    try:
        for restarts in range(2):
            cycles.begin(restarts, ["a"], 1)
        cycles.end()
        assert not answers.is_set() and len(asked) == 1, "no second thread waits for it"
        assert "the file system did not answer within 0.2 s); the job goes on without it" in "".join(capfd.readouterr())
    finally:
        answers.set()
