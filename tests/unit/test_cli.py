"""`ft-plugins`, as a user types it, against a real SMP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ft_plugins import cli
from ft_plugins.cli import status_table
from ft_plugins.config import Config, keys, run_directory
from ft_plugins.events import Events, catalogue, file_sink
from ft_plugins.smp import client as smp
from ft_plugins.smp import liveness
from ft_plugins.snapshot import paths
from ft_plugins.snapshot.paths import path_of
from ft_plugins.snapshot.retention import Storage
from ft_plugins.snapshot.segment import Segment
from ft_plugins.snapshot.shape import Shape
from ft_plugins.snapshot.slots import Version

CONFIGURATION = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


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


def test_a_hung_smp_is_shown_with_the_reason_and_hides_no_other_job(
    ft_plugins: Command, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = f"a-{job}"  # the first in order
    run_dir = run_directory(hung, "n")
    pid = smp.ensure(run_dir, hung, "n", orphan_seconds=60)
    monkeypatch.setattr(status_table, "ASK_SECONDS", 1.0)
    try:
        os.kill(pid, signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while not liveness.is_stopped(pid, liveness.started(pid)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        found = [json.loads(line) for line in ft_plugins("status", "--json").splitlines()]
        assert [(report["job"], report["alive"]) for report in found] == [(hung, False), (job, True)]
        said = f"the SMP of {run_dir} did not answer 'status' in time"
        assert found[0]["error"] == said and "error" not in found[1]
        table = ft_plugins("status")
        assert "no answer" in table and "OFFLINE" in table and f"\njob {hung} on node n: {said}\n" in table
        assert f"pid {found[1]['pid']}" in table
    finally:
        os.kill(pid, signal.SIGCONT)
        with smp.Client(run_dir) as client:
            client.end()


def test_status_shows_the_last_alarm_that_nothing_has_ended(ft_plugins: Command, job: str) -> None:
    events = Events("n")
    events.subscribe(file_sink(run_directory(job, "n") / "events.jsonl"))
    assert json.loads(ft_plugins("status", "--job", job, "--json"))["alarm"] is None
    events.emit(catalogue.CHECKPOINT_FAILED, lineage=1, iteration=20, reason="No space left on device")
    text = f"checkpoint.failed: node n: No space left on device. {catalogue.CHECKPOINT_FAILED.action}"
    alarm = json.loads(ft_plugins("status", "--job", job, "--json"))["alarm"]
    assert (alarm["name"], alarm["text"]) == ("checkpoint.failed", text)
    assert f"last alarm of job {job}, {alarm['time']}: {text}\n" in ft_plugins("status")
    events.emit(catalogue.CHECKPOINT_COMPLETED, lineage=1, iteration=30)
    assert "last alarm" not in ft_plugins("status")


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
    monkeypatch.setattr(paths, "SHM", tmp_path)  # other tests have segments there which nobody owns
    events = run_directory("dead", "n") / "events.jsonl"
    events.write_text("")
    stale = path_of("dead", "n", 0)
    stale.write_bytes(b"left behind")
    assert ft_plugins("sweep") == "0 segments removed\n"  # young: can still be resumed from
    assert stale.exists()
    assert ft_plugins("sweep", "--older-than", "0") == f"removed {stale}\n1 segments removed\n"
    assert living.exists() and not stale.exists()


def test_end_recommends_a_sweep_of_its_own_job_which_leaves_all_others(
    ft_plugins: Command, own_run_root: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "SHM", tmp_path)
    left = {}
    for name in ("dead", "dead-2"):
        (run_directory(name, "n") / "events.jsonl").write_text("")
        left[name] = path_of(name, "n", 0)
        left[name].write_bytes(b"left behind")
    command = "`ft-plugins sweep --job dead --older-than 0`"
    assert f"{command} removes segments that it may have left" in ft_plugins("end", "dead")
    assert ft_plugins("sweep", "--job", "dead", "--older-than", "0") == f"removed {left['dead']}\n1 segments removed\n"
    assert left["dead-2"].exists() and not left["dead"].exists()


# ------------------------------------------------------------------------------------------------ checkpoint now


def test_a_checkpoint_of_a_job_without_a_folder_for_it_is_refused_by_the_flag(ft_plugins: Command, job: str) -> None:
    attach(job)
    line = ft_plugins("checkpoint", "now", status=1)
    assert line == (
        f"ft-plugins: job {job} on node n: it has no folder for checkpoints; start the job with --reft-checkpoint-dir\n"
    )
    assert "│ off" in ft_plugins("status")


def test_a_checkpoint_before_there_is_a_version_says_so_and_one_that_fails_says_why(
    ft_plugins: Command, job: str, tmp_path: Path
) -> None:
    storage = Storage(str(tmp_path / "ck"), 0, 1, 2, 1)
    with smp.Client(run_directory(job, "n")) as client:
        shape = Shape(nbytes=8192, small_nbytes=4096, buckets=1, layout=1, slots=4)
        path = client.attach(0, client.fence(), shape, {"model": "small"}, fresh=False, storage=storage)
    assert "no version is in memory yet" in ft_plugins("checkpoint", "now", "--job", job, status=1)
    mapped = Segment(path)
    mapped.ranges = [(0, 8192)]
    mapped.dirty(0, Version(1, 3), mapped.token)
    mapped.seal(0, Version(1, 3), mapped.token, b"", np.array([5], dtype=np.uint64))
    assert "no version is in memory yet" in ft_plugins("checkpoint", "now", status=1), "a seal that does not fit"
    mapped.digests(0)[:] = 5
    line = ft_plugins("checkpoint", "now", "--seconds", "20", status=1)
    assert "bucket 0 of slot 0 does not match its digest" in line
    assert "failed: rank 0: bucket 0" in " ".join(ft_plugins("status").replace("│", " ").split())
    mapped.close()


def test_a_checkpoint_of_an_unknown_job_names_those_that_are_known(ft_plugins: Command, job: str) -> None:
    assert f"known jobs: {job}" in ft_plugins("checkpoint", "now", "--job", "nobody", status=1)


# ------------------------------------------------------------------------------------------------ config


def test_config_lists_every_key(ft_plugins: Command) -> None:
    text = ft_plugins("config")
    assert all(key.flag in text and key.name in text for key in keys())


def test_config_as_json_is_a_block_that_is_accepted(ft_plugins: Command) -> None:
    block = json.loads(ft_plugins("config", "--format", "json"))["ft_plugins"]
    assert Config.from_json(block).systems == ("reft", "baft", "paft")
    own = [key for key in keys() if key.path[0] == "reft" and not key.system]
    assert block["reft"] == {key.path[-1]: key.default for key in own if key.default is not None}
    assert "checkpoint_dir" not in block["reft"], "unset stays unset"


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


def test_the_page_of_keys_is_the_generated_one(ft_plugins: Command) -> None:
    generated = ft_plugins("config", "--format", "markdown")
    assert generated == CONFIGURATION.read_text(), "run `ft-plugins config --format markdown > docs/configuration.md`"


def test_the_configuration_is_explained_without_loading_torch() -> None:
    code = "import sys, ft_plugins.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# ------------------------------------------------------------------------------------------------ plan

PAPER = ("plan", "--nodes", "3072", "--group-nodes", "6", "--hw-rate", "1e-4", "--sw-rate", "1e-5", "--shape", "1.3")
SAVING = (
    *("--state-gib", "60", "--iteration-seconds", "10", "--snapshot-seconds", "0.05"),
    *("--link-gib-per-second", "20", "--storage-gib-per-second", "50"),
)


def test_plan_prints_survival_and_with_what_saving_takes_the_intervals(ft_plugins: Command) -> None:
    survival = ft_plugins(*PAPER, "--threshold", "0.9")
    assert "REFT, RAIM5                      1            16.2" in survival and "0.408" in survival
    assert "intervals" not in survival
    both = ft_plugins(*PAPER, *SAVING)
    assert both.startswith(survival) and "1398 iterations" in both and "52.75%" in both


def test_plan_as_json_is_one_object(ft_plugins: Command) -> None:
    found = json.loads(ft_plugins(*PAPER, "--json"))
    assert round(found["survival"]["schemes"]["raim5"]["days"], 1) == 16.2 and found["intervals"] is None
    found = json.loads(ft_plugins(*PAPER, *SAVING, "--replace-seconds", "60", "--json"))
    assert found["intervals"]["costs"]["replace_seconds"] == 60
    assert found["intervals"]["schemes"]["raim6"]["rebuild_seconds"] == 60 + 6 * 60 / 20


def test_plan_cuts_large_sharding_groups_as_a_job_does_and_knows_failure_domains(ft_plugins: Command) -> None:
    large = ("plan", "--nodes", "2048", "--group-nodes", "512", "--hw-rate", "1e-3", "--sw-rate", "1e-4")
    assert "is cut into 64 redundancy groups of 8" in ft_plugins(*large)

    def days(*more: str) -> float:
        return float(json.loads(ft_plugins(*large, *more, "--json"))["survival"]["schemes"]["raim5"]["days"])

    by_size = [days("--reft-group-nodes", size) for size in ("512", "16", "8", "4")]
    assert by_size == sorted(by_size) and by_size[-1] > 3 * by_size[0]
    assert by_size[-1] > days("--reft-group-nodes", "auto") > by_size[1]
    racks = ("--domain-nodes", "16", "--domain-rate", "1e-3")
    assert days() > days(*racks) > days("--domain-nodes", "300", "--domain-rate", "1e-3")
    assert "some redundancy groups lose too many" in ft_plugins(*large, "--domain-nodes", "300", *racks[2:])
    assert "lose too many" not in ft_plugins(*large, *racks)


def test_plan_compares_sizes_of_redundancy_groups(ft_plugins: Command, tmp_path: Path) -> None:
    large = ("plan", "--nodes", "2048", "--group-nodes", "512", "--hw-rate", "1e-3", "--sw-rate", "1e-4")
    table = ft_plugins(*large)
    assert "survival by size of redundancy groups" in table and "  8 *" in table
    found = json.loads(ft_plugins(*large, "--reft-group-nodes", "16", "--json"))
    by_size = {one["nodes"]: one["days"] for one in found["group_sizes"] if one["scheme"] == "raim5"}
    assert by_size[16] == found["survival"]["schemes"]["raim5"]["days"] < by_size[8]
    ft_plugins(*large, "--plot-groups", str(tmp_path / "groups.svg"))
    drawn = (tmp_path / "groups.svg").read_text()
    assert all(f"<!-- {label} -->" in drawn for label in ("RAIM5, groups of 8", "RAIM6, groups of 512", "14%"))
    still = ("plan", "--nodes", "8", "--group-nodes", "8", "--hw-rate", "0", "--sw-rate", "0")
    ft_plugins(*still, "--plot-groups", str(tmp_path / "still.png"))
    assert (tmp_path / "still.png").read_bytes().startswith(b"\x89PNG")


PIPELINE = ("--stages", "8", "--microbatches", "32", "--message-passes", "0.05")


def test_plan_prints_bubbles_and_with_what_saving_takes_goodput(ft_plugins: Command) -> None:
    bubbles = ft_plugins(*PAPER, *PIPELINE)
    assert "1f1b *" in bubbles and "zero-bubble" in bubbles and "goodput" not in bubbles
    whole = ft_plugins(*PAPER, *SAVING, *PIPELINE, "--schedule", "interleaved", "--chunks", "4")
    assert "interleaved *" in whole and whole.count("\n  BAFT ") == 4
    assert "\n  iterations whose bubbles carry one version: ring: does not fit, pairs: 19\n" in whole
    found = json.loads(ft_plugins(*PAPER, *SAVING, *PIPELINE, "--restart-seconds", "60", "--json"))["pipeline"]
    assert found["pipeline"]["schedule"] == "1f1b" and len(found["bubble_shares_by_stage"]) == 8
    assert found["iterations_per_version"].keys() == {"ring", "pairs"}
    assert [plan["nodes"] for plan in found["goodput"]] == [3072, 12288, 49152, 196608]
    assert found["goodput"][0]["upkeeps"]["baft"]["restart_seconds"] == pytest.approx(60 + 60 / 20, rel=1e-3)
    assert json.loads(ft_plugins(*PAPER, *PIPELINE, "--json"))["pipeline"]["goodput"] == []


def test_plan_draws_the_pipeline(ft_plugins: Command, tmp_path: Path) -> None:
    ft_plugins(*PAPER, *SAVING, *PIPELINE, "--plot-bubbles", str(tmp_path / "pipeline.svg"))
    drawn = (tmp_path / "pipeline.svg").read_text()
    labels = [
        "forward",
        "receive, waiting",
        "rank of the pipeline",
        "BAFT",
        "synchronous replication",
        "restarts alone",
    ]
    assert all(f"<!-- {label} -->" in drawn for label in labels)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--nodes", "3071"), "nodes: expected a multiple of group_nodes (6), found 3071"),
        (("--reft-group-nodes", "1"), "--reft-group-nodes: expected an integer >= 2 or auto, found '1'"),
        (("--domain-nodes", "0"), "domain_nodes: expected an integer >= 1, found 0"),
        (("--threshold", "1.5"), "threshold: expected a number above 0 and below 1, found 1.5"),
        (("--max-overhead", "0.02"), "max_overhead: no effect without state_gib, iteration_seconds, snapshot_"),
        (("--chunks", "2"), "chunks: no effect without stages, microbatches; give them too"),
        ((*PIPELINE, "--schedule", "gpipe", "--chunks", "2"), "chunks, group, overlap: without effect in the schedule"),
        (("--restart-seconds", "60"), "restart_seconds: no effect without stages, microbatches; give them too"),
        ((*PIPELINE, "--restart-seconds", "60"), "restart_seconds: no effect without state_gib, iteration_seconds, "),
        ((*PIPELINE, "--message-passes", "-1"), "message_passes: expected a number from 0 to 100, found -1.0"),
        ((*PIPELINE, "--plot-bubbles", "p.svg"), "--plot-bubbles: has no effect without --stages, --microbatches and "),
        ((*PIPELINE, *SAVING, "--plot-bubbles", "p.gif"), "p.gif: expected a name that ends in one of .png"),
        (("--plot", "picture.gif"), "picture.gif: expected a name that ends in one of .png, .svg, .pdf"),
        (("--plot", "/proc/none/picture.png"), "--plot /proc/none/picture.png: cannot be written (No such file"),
    ],
)
def test_plan_refuses_what_it_cannot_do_in_one_line(ft_plugins: Command, words: tuple[str, ...], said: str) -> None:
    line = ft_plugins(*PAPER, *words, status=1)
    assert line.startswith(f"ft-plugins: {said}") and line.count("\n") == 1


def layers_file(folder: Path) -> Path:
    """A profile of ten layers: 0.3 s of compute, 10 MB over 4 replicas."""
    times = {"forward_seconds": 0.01, "backward_seconds": 0.02, "communication_seconds": 0.04, "bytes": 1_000_000}
    layers = [{"name": f"h.{number}"} | times for number in range(10)]
    (folder / "layer-profile.json").write_text(json.dumps({"version": 1, "replicas": 4, "layers": layers}))
    return folder / "layer-profile.json"


def test_plan_compares_policies_of_synchronisation(ft_plugins: Command, tmp_path: Path) -> None:
    words = ("plan", "--sync", str(layers_file(tmp_path)))
    table = ft_plugins(*words, "--sync-h", "5", "--link-mbps", "100", "--link-mbps", "1000")
    assert table.splitlines()[2].split()[:9] == "as profiled 5 0.52 0.312 0.312 0.362 0.38 0.316".split()
    assert "survival" not in table
    ft_plugins(*words, "--output", str(tmp_path / "sync.svg"))
    assert "<!-- DreamDDP -->" in (tmp_path / "sync.svg").read_text()
    found = json.loads(ft_plugins(*words, "--json"))["sync"]
    assert [link["mbps"] for link in found["links"]] == [None, 10, 100, 1000]
    assert found["links"][0]["pays"] == "dreamddp"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--nodes, --group-nodes, --hw-rate, --sw-rate: missing; give them, or --sync with a profile of layers"),
        (PAPER[1:-6], "--hw-rate, --sw-rate: missing; give them, or --sync"),
        ((*PAPER[1:], "--sync-h", "3"), "--sync-h: no effect without --sync"),
        (("--sync", "FILE", "--nodes", "3"), "--sync plans synchronisation alone: --nodes: no effect"),
        (("--sync", "FILE", "--shape", "1"), "--sync plans synchronisation alone: --shape: no effect"),
        (("--sync", "FILE", "--sync-h", "11"), "H = 11 with 10 layers: expected 1 to 10 iterations"),
        (("--sync", "FILE", "--sync-h", "\u0663"), "--sync-h: expected 'auto' or a number of iterations, found"),
        (("--sync", "FILE", "--link-mbps", "0"), "expected a link of more than 0 bytes per second, found 0.0"),
        (("--sync", "FILE", "--link-mbps", "10", "--output", "p.svg"), "a plot over bandwidth needs at least two"),
        (("--sync", "FILE", "--output", "p.gif"), "p.gif: expected a name that ends in one of .png, .svg, .pdf"),
        (("--sync", "/none.json"), "/none.json: cannot be read (No such file or directory)"),
    ],
)
def test_plan_refuses_what_it_cannot_compare_in_one_line(
    ft_plugins: Command, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    file = str(layers_file(tmp_path))
    line = ft_plugins("plan", *(file if word == "FILE" else word for word in words), status=1)
    assert line.startswith(f"ft-plugins: {said}") and line.count("\n") == 1


def test_plan_draws_the_curves(ft_plugins: Command, tmp_path: Path) -> None:
    ft_plugins(*PAPER, "--plot", str(tmp_path / "survival.svg"))
    drawn = (tmp_path / "survival.svg").read_text()
    labels = [f"REFT, RAIM5, {nodes} nodes" for nodes in (768, 3072, 12288)] + ["16.2 d", "0.408 d", "64.2 d"]
    assert all(f"<!-- {label} -->" in drawn for label in labels)
    still = ("plan", "--nodes", "2", "--group-nodes", "2", "--hw-rate", "0", "--sw-rate", "0")
    ft_plugins(*still, "--plot", str(tmp_path / "still.png"))  # nothing ever fails: drawn as well
    assert (tmp_path / "still.png").read_bytes().startswith(b"\x89PNG")


def test_plan_says_what_to_install_where_there_is_no_matplotlib(
    ft_plugins: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, "ft_plugins.report.plan_pictures", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"] + ["matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    line = ft_plugins(*PAPER, "--plot", str(tmp_path / "survival.png"), status=1)
    assert line == "ft-plugins: --plot needs matplotlib, which is not installed; pip install 'ft_plugins[report]'\n"
    assert not list(tmp_path.iterdir()) and "16.2" in ft_plugins(*PAPER)


def test_report_shows_where_the_time_of_each_restart_went(ft_plugins: Command, tmp_path: Path) -> None:
    assert "name the job" in ft_plugins("report", status=1)
    run_dir = run_directory("restarted", "n0")
    events = Events("n0")
    events.subscribe(file_sink(run_dir / "events.jsonl"))
    assert ft_plugins("report", "restarted") == "no restart has completed an iteration yet\n"
    now = time.monotonic()
    events.emit(
        catalogue.WORKERS_RESTARTED, restart=1, token=2, seconds=1.0, clock=now - 5, seen=now - 6.5, ended=now - 6
    )
    events.emit(
        catalogue.RANKS_RESUMED, restart=1, token=2, lineage=2, iteration=9, count=4, began=now - 4.75,
        joining=now - 3, grouped=0.5, built=now - 2, restored=now - 1.5, completed=now, processor={"began": 1.5},
    )  # fmt: skip
    table = ft_plugins("report")
    rows = {line[:24].strip(): line[24:].split() for line in table.splitlines()}
    assert rows["end old processes"] == ["0.50"] and rows["import"] == ["1.75"] and rows["detect the failure"] == ["-"]
    assert rows["total, from detection"] == ["6.50"] and rows["of ranks"] == ["4"]
    assert max(map(len, table.splitlines())) <= 80
    [line] = ft_plugins("report", "restarted", "--json").splitlines()
    assert json.loads(line)["total"] == pytest.approx(6.5)
    assert ft_plugins("report", "--events", str(run_dir / "events.jsonl"), "--json") == line + "\n"
    assert "no job 'other'" in ft_plugins("report", "other", status=1)
    assert "/gone: no such file" in ft_plugins("report", "--events", str(tmp_path / "gone"), status=1)
