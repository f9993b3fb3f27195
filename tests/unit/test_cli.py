"""`ft-plugins`, as a user types it, against a real SMP."""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

from ft_plugins import cli
from ft_plugins.cli import checkpoint_command, commands, status_command, status_facts
from ft_plugins.cli.events_command import lines_of
from ft_plugins.config import Config, keys, run_directory
from ft_plugins.errors import FtError
from ft_plugins.events import Event, Events, catalogue, file_sink
from ft_plugins.smp.serve import client as smp
from ft_plugins.smp.watch import liveness
from ft_plugins.smp.watch.job_history import FtRunNote, FtRunPhase, write_note
from ft_plugins.smp.watch.job_state import State
from ft_plugins.snapshot.capture import manifest
from ft_plugins.snapshot.capture.manifest import Manifest, TensorRange
from ft_plugins.snapshot.capture.retention import Storage
from ft_plugins.snapshot.segment import paths
from ft_plugins.snapshot.segment.paths import path_of
from ft_plugins.snapshot.segment.segment import Segment
from ft_plugins.snapshot.segment.shape import Shape
from ft_plugins.snapshot.segment.slots import Version

DOCS = Path(__file__).resolve().parents[2] / "docs"
CONFIGURATION, OPERATING = DOCS / "configuration.md", DOCS / "operating.md"


@pytest.fixture
def own_run_root(own_environment, monkeypatch):
    """Run directories of this test alone."""
    folder = own_environment / uuid.uuid4().hex[:6]
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))


@pytest.fixture
def ft_plugins(own_run_root, monkeypatch, capsys):
    """The command: returns its stdout, or the line on stderr when it is expected to fail."""

    def run(*words, status=0):
        monkeypatch.setattr(sys, "argv", ["ft-plugins", *words])
        ended = 0
        try:
            cli.main()
        except SystemExit as exit:
            ended = exit.code
        out, err = capsys.readouterr()
        assert (ended or 0) == status, err + out
        return err if status else out

    return run


@pytest.fixture
def job(own_run_root):
    """A job of one rank on node n: an SMP that holds one segment, its trainer (this process), no ft-run."""
    name = f"cli-{uuid.uuid4().hex[:8]}"
    run_dir = run_directory(name, "n")
    smp.ensure(run_dir, name, "n", orphan_seconds=60)
    yield name
    if liveness.held(run_dir / "smp.lock"):
        with smp.Client(run_dir) as client:
            client.end()


def attach(job):
    """Have the SMP of `job` create a segment of a few pages for rank 0."""
    with smp.Client(run_directory(job, "n")) as client:
        token = client.fence()
        shape = Shape(nbytes=8192, small_nbytes=4096, buckets=1, layout=1)
        return client.attach(0, token, shape, {"model": "small"}, fresh=False)


# ------------------------------------------------------------------------------------------------ status, end, sweep


def jobs_in(line):
    """The jobs of `status --json`: one object in one line."""
    assert line.count("\n") == 1
    found = json.loads(line)
    assert found["format"] == status_command.FORMAT and abs(found["time"] - time.time()) < 60
    return list(found["jobs"])


def words_of(text):
    """A text without its line breaks and indentation."""
    return " ".join(text.split())


def test_status_of_a_node_without_jobs_says_so(ft_plugins):
    assert ft_plugins("status") == "no job is known here\n"
    assert jobs_in(ft_plugins("status", "--json")) == []


def test_status_shows_the_smp_and_what_it_holds(ft_plugins, job):
    path = attach(job)
    (report,) = jobs_in(ft_plugins("status", "--job", job, "--json"))
    assert (report["job"], report["node"], report["smp_answers"], report["ft_run_alive"]) == (job, "n", True, False)
    assert (report["ranks"], report["world_size"], report["nodes"], report["token"]) == (1, 1, None, 1)
    assert report["memory_bytes"] == path.stat().st_size
    assert [segment["path"] for segment in report["details"]["segments"]] == [str(path)]
    text = ft_plugins("status")
    assert text.startswith(f"{job} on node n: ORPHANED, 1 rank\n") and report["signal"] == "HEALTHY"
    assert "the launcher is gone and left no reason: killed, perhaps; memory holds no version" in words_of(text)
    for line in (
        "  training     no iteration is completed here yet; 0 restarts",
        f"  in memory    none yet; {path.stat().st_size / 2**20:.1f} MiB claimed",
        "  other nodes  no: a lost node is not survived from memory",
        "  storage      off",
        f"  processes    ft-run is gone; SMP pid {report['smp_pid']}; incarnation 1",
    ):
        assert f"{line}\n" in text


def test_status_shows_how_old_the_newest_iteration_and_version_are(ft_plugins, job):
    path = attach(job)
    with smp.Client(run_directory(job, "n")) as client:
        client.open_lineage(0, 1, 1, None)
    segment = Segment(path)
    segment.ranges = [(0, 8192)]
    segment.dirty(0, Version(1, 3), segment.header.token)
    segment.seal(0, Version(1, 3), segment.header.token, b"", segment.digests(0))
    segment.header.completed = 4
    segment.close()
    (report,) = jobs_in(ft_plugins("status", "--json"))
    time.sleep(1.2)
    (later,) = jobs_in(ft_plugins("status", "--json"))
    assert (later["iteration"], later["restarts"], later["downtime_seconds"]) == (4, 0, 0.0)
    assert later["newest"]["process"] | {"age_seconds": 0} == {
        "lineage": 1, "iteration": 3, "mark": "", "age_seconds": 0,
    }  # fmt: skip
    for before, after in (
        (report["iteration_age_seconds"], later["iteration_age_seconds"]),
        (report["newest"]["process"]["age_seconds"], later["newest"]["process"]["age_seconds"]),
    ):
        assert before < 1.2 <= after < 20
    assert re.search(r"training +iteration 4, \d s ago; 0 restarts\n", ft_plugins("status"))
    assert re.search(r"in memory +iteration 3, \d s ago \(lineage 1\); 0.1 MiB claimed\n", ft_plugins("status"))


def test_a_hung_smp_is_shown_with_the_reason_and_hides_no_other_job(ft_plugins, job, monkeypatch):
    hung = f"a-{job}"  # the first in order
    run_dir = run_directory(hung, "n")
    pid = smp.ensure(run_dir, hung, "n", orphan_seconds=60)
    monkeypatch.setattr(status_facts, "ASK_SECONDS", 1.0)
    try:
        os.kill(pid, signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while not liveness.is_stopped(pid, liveness.started(pid)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        found = jobs_in(ft_plugins("status", "--json"))
        assert [(report["job"], report["smp_answers"]) for report in found] == [(hung, False), (job, True)]
        said = f"the SMP of {run_dir} did not answer 'status' in time"
        assert (found[0]["smp_error"], found[1]["smp_error"]) == (said, None)
        text = ft_plugins("status")
        assert text.startswith(f"{hung} on node n: ORPHANED\n") and f"  error        {said}\n" in text
        assert "the SMP gives no answer" in text and f"SMP pid {found[1]['smp_pid']}" in text
    finally:
        os.kill(pid, signal.SIGCONT)
        with smp.Client(run_dir) as client:
            client.end()


def test_status_shows_the_last_alarm_that_nothing_has_ended(ft_plugins, job):
    events = Events("n")
    events.subscribe(file_sink(run_directory(job, "n") / "events.jsonl"))
    assert jobs_in(ft_plugins("status", "--job", job, "--json"))[0]["alarm"] is None
    events.emit(catalogue.CHECKPOINT_FAILED, lineage=1, iteration=20, reason="No space left on device")
    text = f"checkpoint.failed: node n: No space left on device. {catalogue.CHECKPOINT_FAILED.action}"
    alarm = jobs_in(ft_plugins("status", "--job", job, "--json"))[0]["alarm"]
    assert (alarm["name"], alarm["text"]) == ("checkpoint.failed", text)
    assert f"last alarm {alarm['time']}: {text}" in words_of(ft_plugins("status"))
    events.emit(catalogue.CHECKPOINT_COMPLETED, lineage=1, iteration=30)
    assert "last alarm" not in ft_plugins("status")


def test_a_job_that_has_ended_disappears_and_one_that_can_be_resumed_stays(ft_plugins, job, tmp_path, monkeypatch):
    ft_plugins("end", job)
    said = "no job is running here, and there is nothing to resume from; ended: 1 (`ft-plugins status --all`)\n"
    assert ft_plugins("status") == said and jobs_in(ft_plugins("status", "--json")) == []
    assert [each["job"] for each in jobs_in(ft_plugins("status", "--all", "--json"))] == [job]
    assert [each["job"] for each in jobs_in(ft_plugins("status", "--job", job, "--json"))] == [job]
    monkeypatch.setattr(paths, "SHM", tmp_path)
    path_of(job, "n", 0).write_bytes(b"a snapshot whose SMP was killed")
    text = ft_plugins("status")
    assert text.startswith(f"{job} on node n: ORPHANED\n")
    assert "is kept until a sweep: the SMP is gone too" in words_of(text)
    assert f"to resume from memory, or drop it: ft-plugins sweep --job {job} --older-than 0" in words_of(text)
    lock = liveness.acquire(run_directory(job, "n") / "lock")
    assert lock is not None and "UNPROTECTED" in ft_plugins("status")
    os.close(lock)


FACTS = {
    "job": "a-job-with-a-name-of-48-characters-and-not-a-one",
    "node": "node-with-a-name-of-forty-eight-characters-here",
    "state": "HUNG", "headline": "rank 3 is stopped by a signal; the others wait", "remedy": "continue it " * 9,
    "signal": "UNHEALTHY", "smp_answers": True, "smp_pid": 4194303, "smp_error": "the SMP did not answer", "token": 12,
    "ft_run_alive": True, "ranks": 8, "world_size": 16384, "nodes": 2048, "memory_bytes": 123 << 30,
    "iteration": 1234567, "iteration_age_seconds": 7300.0, "restarts": 11, "downtime_seconds": 4000.4,
    "down_for_seconds": 61.0, "slow": [[7, 1.52], [9, 2.0]], "proof": "proven: iteration 7 computed again, identical",
    "rehearsed": "rehearsed 2026-11-30, exact over 12 iterations",
    "protection": {"redundancy": "RAIM5", "losses": 1, "pace": "every 4 iterations"},
    "newest": {
        "process": {"lineage": 3, "iteration": 1234566, "age_seconds": 59.6, "mark": "certified"},
        "node": {"lineage": 3, "iteration": 1234560, "age_seconds": 130.0},
        "storage": {"lineage": 2, "iteration": 1200000, "age_seconds": 400000.0},
    },
    "storage": {"path": "/ck", "failed": "No space left on device", "kept": [[1, 500000], [1, 600000], [2, 700000]]},
    "metrics_error": "10.0.0.1, port 9400: Address already in use",
    "alarm": {"time": "2026-11-25 17:20:11+00:00", "name": "smp.lost", "text": "smp.lost: node n: " + 12 * "it died. "},
}  # fmt: skip


def test_a_paragraph_of_status_fits_a_terminal_of_80_columns_and_says_everything():
    text = status_command.text_of([FACTS, FACTS], 80)
    assert max(map(len, text.splitlines())) <= 80
    words = words_of(text)
    for part in (
        "HUNG, 8 of 16384 ranks, 2048 nodes",
        "iteration 1234567, 2.0 h ago; 11 restarts; down for 61 s, in total 66.7 min",
        "iteration 1234566, 60 s ago (lineage 3, certified); 123.0 GiB claimed",
        "iteration 1234560, 2.2 min ago (lineage 3); every 4 iterations; RAIM5: any 1 node of a group may be lost",
        "failed: No space left on device; iteration 1200000, 4.6 d ago (lineage 2); kept: iteration 500000, iteration "
        "600000, iteration 700000",
        "now rank 3 is stopped by a signal; the others wait to do continue it continue it",
        "ft-run is running; SMP pid 4194303; incarnation 12",
        "last restore proven: iteration 7 computed again, identical",
        "rehearsal rehearsed 2026-11-30, exact over 12 iterations",
        "slow rank 7 1.52 times, rank 9 2 times as long as the others",
        f"metrics 10.0.0.1, port 9400: Address already in use. {catalogue.METRICS_FAILED.action}",
    ):
        assert part in words, text
    assert len(status_command.text_of([FACTS], 0).splitlines()) == 14, "a pipe gets whole lines"
    first = status_command.text_of([FACTS | {"downtime_seconds": 61.4}], 80)
    assert "11 restarts; down for 61 s\n" in first
    assert "at least iteration 1234567" in status_command.text_of([FACTS | {"smp_answers": False}], 80)
    over = FACTS | {"ft_run_alive": False, "state": "ENDED"}
    assert "11 restarts; was down for 65.7 min in total\n" in status_command.text_of([over], 0), "it does not grow"
    assert "11 restarts\n" in status_command.text_of([over | {"downtime_seconds": 61.0}], 80)
    spare = FACTS | {"protection": None, "ranks": 0}
    assert "other nodes" not in status_command.text_of([spare], 80)
    assert "storage" not in status_command.text_of([spare | {"storage": None}], 80), "it has none that could be off"
    assert "no: a lost node is not survived" in status_command.text_of([spare | {"ranks": 2}], 80)


def test_status_shows_metrics_by_the_table_that_an_smp_serves(ft_plugins, job):
    path = attach(job)
    text = ft_plugins("status", "--prometheus")
    where = f'{{ftp_job="{job}",node="n"}}'
    assert f"ftp_memory_claimed_bytes{where} {path.stat().st_size}\n" in text and f"ftp_smp_answered{where} 1\n" in text
    with smp.Client(run_directory(job, "n")) as client:
        client.end()
    assert f"ftp_smp_answered{where} 0\n" in ft_plugins("status", "--all", "--prometheus")


def test_a_probe_fails_where_nothing_but_a_restart_of_the_container_helps(ft_plugins, job):
    attach(job)
    assert ft_plugins("status", "--probe", status=1) == ""
    lock = liveness.acquire(run_directory(job, "n") / "lock")
    assert lock is not None
    assert ft_plugins("status", "--probe") == f"{job} on node n: ok: STARTING: the ranks start\n"
    with smp.Client(run_directory(job, "n")) as client:
        client.end()
    ft_plugins("status", "--probe", status=1)
    os.close(lock)
    ft_plugins("status", "--probe", status=1)


def test_a_probe_looks_once_and_one_form_is_shown(ft_plugins):
    assert "drop --watch" in ft_plugins("status", "--probe", "--watch", status=1)
    assert "not allowed with" in ft_plugins("status", "--json", "--prometheus", status=2)


def test_the_help_of_status_explains_each_state(ft_plugins):
    text = ft_plugins("status", "--help")
    assert all(re.search(rf"^ +{state.value} +\w", text, re.MULTILINE) for state in State)


def every_command():
    """The words of each command and group of commands."""

    def below(table, before):
        yield before
        for name, (where, _) in table.items():
            yield from below(where, (*before, name)) if isinstance(where, dict) else [(*before, name)]

    return list(below(commands._COMMANDS, ()))


@pytest.mark.parametrize("words", every_command(), ids=" ".join)
def test_help_fits_80_columns_and_explains_each_option_and_command(ft_plugins, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "80")
    text = ft_plugins(*words, "--help")
    assert max(map(len, text.splitlines())) <= 80 and text.startswith(" ".join(("Usage: ft-plugins", *words)))
    assert "<bool>" not in text and "..." not in text.split("\n\n", 2)[2], "nothing is cut off"
    assert "completion" not in text and re.search(r"^  --help +Show", text, re.MULTILINE)
    assert len(re.findall(r"^  (?=\S)(?!--)", text.partition("\nOptions:")[0], re.MULTILINE)) >= 1, "what it does"


def test_a_misspelt_command_is_refused_with_the_similar_one(ft_plugins):
    assert "No such command 'statsu'. Did you mean 'status'?" in ft_plugins("statsu", status=2)


def test_the_keys_of_the_json_are_those_that_the_documentation_has(ft_plugins, job):
    attach(job)
    (report,) = jobs_in(ft_plugins("status", "--json"))
    page = OPERATING.read_text()
    table = page[page.index("| key |") :].split("\n\n")[0]
    keys_of_rows = [re.findall(r"`(\w+)`", row.split("|")[1]) for row in table.splitlines()[2:]]
    assert sorted(sum(keys_of_rows, [])) == sorted(report)


def test_status_loads_nothing_that_is_slow(job):
    """Imports are most of the 200 ms that the command may take."""
    slow = "torch numpy pydantic rich matplotlib cryptography".split()
    code = "import sys, ft_plugins.cli; sys.argv[1:] = ['status']; ft_plugins.cli.main(); "
    code += f"sys.stderr.write(' '.join(name for name in {slow} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], timeout=300, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and job in done.stdout, done.stderr


@contextlib.contextmanager
def watching(words, stdout, **more):
    """`status` with these words, ended after a minute if it has not. SIGINT ends it also where it is ignored here, as
    in what a script runs in the background."""
    code = "import signal, sys, ft_plugins.cli; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += f"sys.argv[1:] = {['status', *words]}; ft_plugins.cli.main()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=stdout, stderr=subprocess.PIPE, **more)
    limit = threading.Timer(60, process.kill)
    limit.start()
    try:
        yield process
    finally:
        limit.cancel()
        process.kill()
        process.wait()


@pytest.mark.parametrize("words", [("--watch", "0.1"), ("--watch", "0.1", "--json")])
def test_watch_shows_it_again_until_ctrl_c(job, words):
    with watching(words, subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        shown = 0
        while shown < 3:
            line = process.stdout.readline()
            assert line, "it ended by itself"
            shown += job in line
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
        assert (process.returncode, err) == (0, "")


def test_a_reader_that_has_seen_enough_ends_it_without_a_word(job):
    with watching(["--watch"], subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None and process.stderr.read() == ""
        assert process.wait(300) == 1


def test_ctrl_c_ends_it_as_every_other_command(ft_plugins, monkeypatch):
    def interrupted(*asked):
        raise KeyboardInterrupt

    monkeypatch.setattr(status_command, "_text", interrupted)
    assert status_command.arguments(["--json"]) is not None and status_command.arguments(["--job=a"]) is None
    ft_plugins("status", "--json", status=130)
    ft_plugins("status", "--job=a", status=130)


def test_watch_redraws_a_terminal_in_place(job):
    ours, theirs = os.openpty()
    with watching(["--watch"], theirs, env=os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "40"}) as process:
        os.close(theirs)
        drawn = b""
        while not (b"Ctrl-C ends" in drawn and b"processes" in drawn):
            drawn += os.read(ours, 1 << 16)
        process.send_signal(signal.SIGINT)
        while process.poll() is None:
            with contextlib.suppress(OSError):
                drawn += os.read(ours, 1 << 16)
        assert process.returncode == 0
    assert b"\x1b[?1049h" in drawn and b"\x1b[?1049l" in drawn, "the screen as it was before comes back"
    assert b"every 2 s" in drawn and job.encode() in drawn
    os.close(ours)


def test_an_interval_to_watch_that_is_no_number_of_seconds_or_not_watched_is_refused(ft_plugins):
    said = "0 is for --watch, and from 0.1 to 86400 s"
    assert said in words_of(ft_plugins("status", "--watch", "0", status=2))
    assert "'SECONDS': " in ft_plugins("status", "a", "--watch", "soon", status=2)
    assert "3 is for --watch" in ft_plugins("status", "a", "3", status=2)
    assert "no job 'soon' is known here" in ft_plugins("status", "soon", "--watch", status=1)


def test_status_reads_its_words_as_typer_reads_them(monkeypatch):
    seen = []
    monkeypatch.setattr(status_command, "_text", lambda asked: seen.append(asked) or "")
    monkeypatch.setattr(status_command, "_watch", lambda text, seconds, redraw: seen.append((text(), seconds)))
    monkeypatch.setattr(status_command, "_probe", lambda asked: seen.append(asked) or 0)
    words = [["a"], ["--job", "a"], ["--node", "n"], ["--all"], ["--watch"], ["--json"], ["--prometheus"], ["--probe"]]
    for chosen in (choice for count in (0, 1, 2) for choice in itertools.permutations(words, count)):
        typed = ["status", *itertools.chain(*chosen)]
        seen.clear()
        monkeypatch.setattr(sys, "argv", ["ft-plugins", *typed])
        quick = status_command.arguments(typed[1:])
        if quick is not None:
            with contextlib.suppress(SystemExit, FtError):
                cli.main()
            found = list(seen)
            seen.clear()
            with contextlib.suppress(SystemExit, FtError):
                cli.app(typed[0:])
            assert found == seen, typed
    strange = [
        "--help", "--jobs", "--job", "--job --all", "--job=a", "--watch 3", "a --watch", "a b", "--json --probe", "--",
        "x --job a",
    ]  # fmt: skip
    assert [status_command.arguments(line.split()) for line in strange] == [None] * len(strange)


def test_status_takes_the_name_of_a_job_as_end_does(ft_plugins, job):
    ft_plugins("end", job)
    assert ft_plugins("status", job) == ft_plugins("status", "--job", job) and f"{job} on node n: ENDED" in (
        ft_plugins("status", job)
    )
    assert [each["job"] for each in jobs_in(ft_plugins("status", job, "--json"))] == [job]
    assert f"--job {job} is not allowed" in words_of(ft_plugins("status", job, "--job", job, status=2))


def test_a_drain_of_a_job_that_has_ended_says_that_and_how(ft_plugins, job):
    ft_plugins("end", job)
    write_note(run_directory(job, "n"), FtRunNote(FtRunPhase.ENDED, status="succeeded"))
    said = ft_plugins("drain", "n", "--job", job, status=1)
    assert said.startswith(f"ft-plugins: no job '{job}' runs under ft-run here; node n: ENDED, ")
    assert said.endswith(" s ago, succeeded, exit status 0\n")


def test_end_drops_the_snapshots_and_ends_the_smp(ft_plugins, job):
    path = attach(job)
    assert path.exists()
    assert ft_plugins("end", job) == f"job {job} on node n: ended\n"
    assert not path.exists() and not liveness.held(run_directory(job, "n") / "smp.lock")
    assert "no SMP is running" in ft_plugins("end", job)


def test_end_refuses_a_job_that_is_running_under_ft_run(ft_plugins, job):
    path = attach(job)
    lock = liveness.acquire(run_directory(job, "n") / "lock")
    assert lock is not None
    assert "is running under ft-run; stop that first" in ft_plugins("end", job, status=1)
    os.close(lock)
    assert path.exists()


@pytest.mark.parametrize(
    "words", [("status", "--job", "nobody"), ("status", "nobody"), ("end", "nobody"), ("drain", "n", "--job", "nobody")]
)
def test_a_job_that_is_not_known_is_one_line_with_those_that_are(ft_plugins, job, words):
    running = words[0] == "drain"
    known = f"runs under ft-run here; known jobs: {job}" if running else f"is known here; expected one of: {job}"
    assert ft_plugins(*words, status=1) == f"ft-plugins: no job 'nobody' {known}\n"


def test_sweep_removes_what_a_dead_smp_left_and_nothing_else(ft_plugins, job, tmp_path, monkeypatch):
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


def test_end_recommends_a_sweep_of_its_own_job_which_leaves_all_others(ft_plugins, own_run_root, tmp_path, monkeypatch):
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


def test_a_checkpoint_of_a_job_without_a_folder_for_it_is_refused_by_the_flag(ft_plugins, job):
    attach(job)
    line = ft_plugins("checkpoint", "now", status=1)
    assert line == (
        f"ft-plugins: job {job} on node n: it has no folder for checkpoints; start the job with --reft-checkpoint-dir\n"
    )
    assert "  storage      off\n" in ft_plugins("status")


def test_a_checkpoint_before_there_is_a_version_says_so_and_one_that_fails_says_why(ft_plugins, job, tmp_path):
    storage = Storage(str(tmp_path / "ck"), 0, 1, 2, 1)
    with smp.Client(run_directory(job, "n")) as client:
        shape = Shape(nbytes=8192, small_nbytes=4096, buckets=1, layout=1, slots=4)
        path = client.attach(0, client.fence(), shape, {"model": "small"}, fresh=False, storage=storage)
    assert "no version is in memory yet" in ft_plugins("checkpoint", "now", "--job", job, status=1)
    mapped = Segment(path)
    mapped.ranges = [(0, 8192)]
    mapped.dirty(0, Version(1, 3), mapped.header.token)
    held = (TensorRange("weight", "uint8", "parameter", "own", 8192, 0, 8192, 0, (8192,)),)
    small = manifest.join(manifest.write(Manifest(0, 1, (0, 0), ((0, 8192),), held)), b"")
    mapped.write_small(0, small)
    mapped.seal(0, Version(1, 3), mapped.header.token, small, np.array([5], dtype=np.uint64))
    assert "no version is in memory yet" in ft_plugins("checkpoint", "now", status=1), "a seal that does not fit"
    mapped.digests(0)[:] = 5
    line = ft_plugins("checkpoint", "now", "--seconds", "20", status=1)
    assert "bucket 0 of slot 0 does not match its digest" in line
    assert "failed: rank 0: bucket 0" in words_of(ft_plugins("status"))
    mapped.close()


def test_a_checkpoint_is_not_asked_of_a_spare_or_a_drained_node_unless_no_other_one_is_here(
    ft_plugins, job, monkeypatch
):
    other, asked = run_directory(job, "m"), [job]
    lock = liveness.acquire(other / "smp.lock")
    assert lock is not None
    monkeypatch.setattr(checkpoint_command, "_checkpoint", lambda run_dir, *_: asked.append(run_dir.name) or "PATH")
    write_note(other, FtRunNote(FtRunPhase.SPARE))
    assert ft_plugins("checkpoint", "now") == "PATH\n" and asked == [job, "n"]
    write_note(run_directory(job, "n"), FtRunNote(FtRunPhase.ENDED, status="drained"))
    line = ft_plugins("checkpoint", "now", status=1)
    assert line == f"ft-plugins: job {job} on node m: it takes no part in training; give this on a node that trains\n"
    os.close(lock)


def test_a_checkpoint_of_an_unknown_job_names_those_that_are_known(ft_plugins, job):
    assert f"known jobs: {job}" in ft_plugins("checkpoint", "now", "--job", "nobody", status=1)


# ------------------------------------------------------------------------------------------------ config


def test_config_lists_every_key(ft_plugins):
    text = ft_plugins("config")
    assert all(key.flag in text and key.name in text for key in keys())


def test_config_as_json_is_a_block_that_is_accepted(ft_plugins):
    block = json.loads(ft_plugins("config", "--format", "json"))["ft_plugins"]
    assert Config.from_json(block).systems == ("reft", "baft", "paft")
    own = [key for key in keys() if key.path[0] == "reft" and not key.system]
    assert block["reft"] == {key.path[-1]: key.default for key in own if key.default is not None}
    assert "checkpoint_dir" not in block["reft"], "unset stays unset"


def test_config_turns_flags_into_the_other_spellings(ft_plugins):
    flags = ("--", "--reft", "--reft-interval", "4")
    block = json.loads(ft_plugins("config", "--format", "json", *flags))["ft_plugins"]
    assert block == {"reft": {"interval": 4}}
    assert ft_plugins("config", "--format", "env", *flags) == 'FTP_CONFIG=\'{"reft": {"interval": 4}}\'\n'
    assert ft_plugins("config", "--format", "flags", *flags) == "--reft --reft-interval=4\n"
    assert "--reft-interval              4 iterations" in ft_plugins("config", *flags)


def test_config_refuses_what_ft_run_would_refuse(ft_plugins):
    line = ft_plugins("config", "--", "--reft", "--reft-intrval", "4", status=1)
    assert line == "ft-plugins: --reft-intrval: unknown flag; did you mean --reft-interval?\n"
    assert "train.py: unknown" in ft_plugins("config", "--", "train.py", status=1)


def test_the_page_of_keys_is_the_generated_one(ft_plugins):
    generated = ft_plugins("config", "--format", "markdown")
    assert generated == CONFIGURATION.read_text(), "run `ft-plugins config --format markdown > docs/configuration.md`"


def test_the_configuration_is_explained_without_loading_torch():
    code = "import sys, ft_plugins.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


# ------------------------------------------------------------------------------------------------ plan

PAPER = (
    *("plan", "interval", "--nodes", "3072", "--group-nodes", "6"),
    *("--hw-rate", "1e-4", "--sw-rate", "1e-5", "--shape", "1.3"),
)
SAVING = (
    *("--state-gib", "60", "--iteration-seconds", "10", "--snapshot-seconds", "0.05"),
    *("--link-gib-per-second", "20", "--storage-gib-per-second", "50"),
)


def test_plan_begins_with_one_recommendation_and_its_reasons_and_ends_with_the_words_of_its_tables(ft_plugins):
    advised, *tables, terms = ft_plugins(*PAPER, *SAVING).split("\n\n")
    lines = advised.splitlines()
    flags = "--reft --reft-redundancy raim5 --reft-group-nodes 6 --reft-interval 6 --reft-checkpoint-dir FOLDER "
    assert lines[0] == f"recommended: {flags}--reft-checkpoint-interval 978"
    assert Config.from_flags(lines[0].removeprefix("recommended: ").split())[1] == []
    assert all(line.startswith("  - ") for line in lines[1:]) and len(lines) == 7
    assert lines[-1] == "  - in all this costs 0.21% of each day; checkpoints alone 52.75%"
    assert "REFT, RAIM5                      1            16.2" in tables[0] and "1398 iterations" in tables[-1]
    assert terms.startswith("terms ") and all(word in terms for word in ("losses per group", "tiers", "glossary"))
    found = json.loads(ft_plugins(*PAPER, *SAVING, "--replace-seconds", "60", "--json"))
    assert [f"  - {reason}" for reason in found["recommendation"]["reasons"]][0] == lines[1]
    tiers = found["intervals"]["schemes"]["raim5"]["tiers"]
    assert found["recommendation"]["interval"] == tiers["process"]["every"] == tiers["node"]["every"] == 6
    assert found["intervals"]["schemes"]["raim6"]["rebuild_seconds"] == 60 + 6 * 60 / 20
    without = json.loads(ft_plugins(*PAPER, "--json"))
    assert round(without["survival"]["schemes"]["raim5"]["days"], 1) == 16.2 and without["intervals"] is None


def test_plan_cuts_large_sharding_groups_as_a_job_does_and_knows_failure_domains(ft_plugins):
    large = ("plan", "interval", "--nodes", "2048", "--group-nodes", "512", "--hw-rate", "1e-3", "--sw-rate", "1e-4")
    assert "is cut into 64 redundancy groups of 8" in ft_plugins(*large)

    def days(*more):
        return float(json.loads(ft_plugins(*large, *more, "--json"))["survival"]["schemes"]["raim5"]["days"])

    by_size = [days("--reft-group-nodes", size) for size in ("512", "16", "8", "4")]
    assert by_size == sorted(by_size) and by_size[-1] > 3 * by_size[0]
    assert by_size[-1] > days("--reft-group-nodes", "auto") > by_size[1]
    racks = ("--domain-nodes", "16", "--domain-rate", "1e-3")
    assert days() > days(*racks) > days("--domain-nodes", "300", "--domain-rate", "1e-3")
    assert "some redundancy groups lose too many" in ft_plugins(*large, "--domain-nodes", "300", *racks[2:])
    assert "lose too many" not in ft_plugins(*large, *racks)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--nodes", "3071"), "nodes: expected a multiple of group_nodes (6), found 3071"),
        (("--reft-group-nodes", "1"), "redundancy_nodes: expected an integer >= 2, found 1"),
        (("--reft-group-nodes", "some"), "--reft-group-nodes: expected 'auto' or an integer >= 1, found 'some'"),
        (("--reft-group-nodes", "0"), "--reft-group-nodes: expected 'auto' or an integer >= 1, found '0'"),
        (("--domain-nodes", "0"), "domain_nodes: expected an integer >= 1, found 0"),
        (("--threshold", "1.5"), "threshold: expected a number above 0 and below 1, found 1.5"),
        (("--max-overhead", "0.02"), "max_overhead: no effect without state_gib, iteration_seconds, snapshot_"),
        (("--plot", "picture.gif"), "picture.gif: expected a name that ends in one of .png, .svg, .pdf"),
        (("--plot", "/proc/none/picture.png"), "/proc/none/picture.png: cannot be written (No such file"),
    ],
)
def test_plan_refuses_what_it_cannot_do_in_one_line(ft_plugins, words, said):
    line = ft_plugins(*PAPER, *words, status=1)
    assert line.startswith(f"ft-plugins: {said}") and line.count("\n") == 1


def layers_file(folder):
    """A profile of ten layers: 0.3 s of compute, 10 MB over 4 replicas."""
    times = {"forward_seconds": 0.01, "backward_seconds": 0.02, "communication_seconds": 0.04, "bytes": 1_000_000}
    layers = [{"name": f"h.{number}"} | times for number in range(10)]
    (folder / "layer-profile.json").write_text(json.dumps({"version": 1, "replicas": 4, "layers": layers}))
    return folder / "layer-profile.json"


def test_plan_compares_policies_of_synchronisation(ft_plugins, tmp_path):
    words = ("plan", "sync", str(layers_file(tmp_path)))
    table = ft_plugins(*words, "--sync-h", "5", "--link-mbps", "100", "--link-mbps", "1000")
    assert table.splitlines()[2].split()[:9] == "as profiled 5 0.52 0.312 0.312 0.362 0.38 0.316".split()
    ft_plugins(*words, "--plot", str(tmp_path / "sync.svg"))
    assert "<!-- DreamDDP -->" in (tmp_path / "sync.svg").read_text()
    found = json.loads(ft_plugins(*words, "--json"))["sync"]
    assert [link["mbps"] for link in found["links"]] == [None, 10, 100, 1000]
    assert found["links"][0]["pays"] == "dreamddp"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("FILE", "--sync-h", "11"), "H = 11 with 10 layers: expected 1 to 10 iterations"),
        (("FILE", "--sync-h", "\u0663"), "--sync-h: expected 'auto' or an integer >= 1, found"),
        (("FILE", "--link-mbps", "0"), "expected a link of more than 0 bytes per second, found 0.0"),
        (("FILE", "--link-mbps", "10", "--plot", "p.svg"), "a plot over bandwidth needs at least two"),
        (("/none.json",), "/none.json: cannot be read (No such file or directory)"),
    ],
)
def test_plan_refuses_what_it_cannot_compare_in_one_line(ft_plugins, tmp_path, words, said):
    file = str(layers_file(tmp_path))
    line = ft_plugins("plan", "sync", *(file if word == "FILE" else word for word in words), status=1)
    assert line.startswith(f"ft-plugins: {said}") and line.count("\n") == 1


# ------------------------------------------------------------------------------------------------ plan memory

MODEL = ("plan", "memory", "--parameters", "7e9", "--tp", "2", "--pp", "2", "--order", "tp-cp-ep-pp-dp")


def test_plan_of_memory_prints_each_purpose_and_whether_a_node_of_that_size_has_it(ft_plugins):
    text = ft_plugins(*MODEL, "--nodes", "4", "--node-memory-gib", "256")
    purposes = json.loads(ft_plugins(*MODEL, "--dp", "8", "--node-memory-gib", "256", "--json"))["memory"]
    (node,) = purposes["nodes"]
    assert (node["count"], node["ranks"], purposes["losses"], purposes["fits"]) == (4, 8, 1, True)
    assert node["captured"] == pytest.approx(7e9 * 12 / 4, rel=1e-6)
    for words, nbytes in (
        ("captured by one version", node["captured"]),
        (f"{node['slots']} slots of snapshots", node["snapshots"]),
        ("parity or copies of other nodes", node["store"]),
        ("total", node["total"]),
    ):
        row = next(line for line in text.splitlines() if line.startswith(f"  {words} "))
        figures = row.split()[-2:]
        assert figures == [f"{nbytes / 2**30:.2f}", f"{nbytes / node['captured']:.2f}"]
    assert "tp 2, pp 2, dp 8, 8 ranks on a node" in text and "12 bytes (fp32 master and two fp32 moments" in text
    assert f"  fits: {node['total'] / 2**30 / 256:.0%} of 256.0 GiB (memory of a node)\n" in text
    assert "of each redundancy group any 1 node may be lost" in text and "not counted: training itself" in text


def test_plan_of_memory_says_what_to_do_where_it_does_not_fit(ft_plugins):
    text = ft_plugins(*MODEL, "--nodes", "4", "--node-memory-gib", "64", "--", "--reft-redundancy", "raim6")
    assert "  does not fit: " in text and "to claim less: " in text and "--reft-redundancy raim5" in text
    assert (
        json.loads(ft_plugins(*MODEL, "--nodes", "4", "--node-memory-gib", "32", "--json"))["memory"]["fits"] is False
    )
    at_first = json.loads(ft_plugins(*MODEL, "--nodes", "4", "--node-memory-gib", "64", "--json"))["memory"]
    assert (at_first["fits"], at_first["fits_most"]) == (True, False)
    assert "not all of that fits" in ft_plugins(*MODEL, "--nodes", "4", "--node-memory-gib", "64")
    assert "not all of that fits" not in ft_plugins(*MODEL, "--nodes", "4", "--node-memory-gib", "256")
    most = (at_first["nodes"][0]["total"] + at_first["nodes"][0]["more"]) / 2**30
    for memory, fits in ((most * 1.02, False), (most * 1.06, True)):  # a twentieth of it is left for everything else
        text = ft_plugins(*MODEL, "--nodes", "4", "--node-memory-gib", f"{memory:.3f}", "--json")
        assert json.loads(text)["memory"]["fits_most"] is fits
    huge = ft_plugins("plan", "memory", "--parameters", "1e11", "--dp", "8", "--", "--reft-bucket-mib", "1024")
    assert huge.count("does not fit: ") >= 2 and "(/dev/shm), of which " in huge and "remount,size=" in huge
    assert "a lost node is not survived from memory: all ranks are on one node" in huge


def test_plan_of_memory_takes_the_precision_and_the_flags_of_the_job(ft_plugins):
    def total(*words):
        nodes = json.loads(ft_plugins(*MODEL, "--nodes", "4", *words[:2], "--json", *words[2:]))["memory"]["nodes"]
        return float(nodes[0]["total"] + nodes[0]["more"])

    whole = total("--precision", "bf16")
    assert total("--precision", "pure-bf16") == pytest.approx(whole / 2, rel=0.01)
    assert total("--bytes-per-parameter", "24") == pytest.approx(2 * whole, rel=0.01)
    assert total("--precision", "bf16", "--", "--reft-checkpoint-dir", "/ck") > 1.1 * whole
    stages_apart = ("plan", "memory", "--parameters", "7e9", "--tp", "2", "--pp", "2", "--nodes", "4")
    (baft,) = json.loads(ft_plugins(*stages_apart, "--json", "--", "--baft"))["memory"]["nodes"]
    assert baft["store"] == pytest.approx(2 * baft["captured"], rel=0.01), "copies of two versions"


def test_plan_of_memory_prints_what_a_pod_needs_with_room_for_training_and_its_spare_part(ft_plugins):
    import yaml

    asked = (*MODEL, "--nodes", "4", "--kubernetes", "--training-gib", "100")
    part = yaml.safe_load(ft_plugins(*asked))
    (volume,), (container,) = part["volumes"], part["containers"]
    memory = container["resources"]["limits"]["memory"]
    assert container["resources"]["requests"]["memory"] == memory
    plan = json.loads(ft_plugins(*asked, "--json"))["memory"]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": plan["kubernetes"]["shm_size_limit"]}
    assert memory == plan["kubernetes"]["memory"]
    most = max(node["total"] + node["more"] for node in plan["nodes"])
    for size, needed in ((volume["emptyDir"]["sizeLimit"], most), (memory, most + (100 << 30))):
        nbytes = int(size.removesuffix("Mi")) << 20
        assert 0 <= nbytes - nbytes / 20 - needed < 1 << 20, "a twentieth is left, as of a node"
    assert "kubernetes" not in json.loads(ft_plugins(*MODEL, "--nodes", "4", "--json"))["memory"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--dp, --nodes: give the data-parallel size or the number of nodes"),
        (("--parameters", "0.5", "--dp", "8"), "parameters: expected a number from 1 to 1e15, found 0.5"),
        (("--parameters", "1e13", "--dp", "8"), "--parameters: a rank would capture 13970 GiB; expected at"),
        (("--nodes", "1", "--tp", "3"), "--nodes: 1 nodes of 8 ranks cannot be divided"),
        (("--dp", "8", "--nodes", "2"), "--nodes: tp x pp x dp = 8 ranks need 1 nodes"),
        (("--dp", "8", "--kubernetes"), "--kubernetes: what training itself takes is not known"),
        (("--dp", "8", "--kubernetes", "--training-gib", "nan"), "training_gib: expected a number from 0 to 1e6"),
        (("--dp", "8", "--training-gib", "1"), "--training-gib: has no effect without --kubernetes"),
        (("--dp", "8", "--", "--reft-slts"), "--reft-slts: unknown flag"),
        (("--dp", "8", "--", "x"), "x: unknown; expected flags of the job"),
        (("--dp", "8", "--node-memory-gib", "0"), "--node-memory-gib: expected a number"),
        (("--dp", "8", "--", "--reft-redundancy", "raim5"), "--reft-redundancy raim5: all ranks are on one node"),
    ],
)
def test_plan_of_memory_refuses_what_it_cannot_plan_in_one_line(ft_plugins, words, said):
    line = ft_plugins("plan", "memory", "--parameters", "9", *words, status=1)
    assert line.startswith(f"ft-plugins: {said}") and line.count("\n") == 1


@pytest.mark.parametrize("command, missing", [("interval", "--nodes"), ("memory", "--parameters"), ("sync", "profile")])
def test_each_plan_names_what_it_needs(ft_plugins, command, missing):
    assert missing in ft_plugins("plan", command, status=2)


@pytest.mark.parametrize(
    "option, labels",
    [
        ("--plot", ("REFT, RAIM5, 512 nodes", "REFT, RAIM6, 8192 nodes", "checkpoints only, 2048 nodes")),
        ("--plot-groups", ("RAIM5, groups of 8", "RAIM6, groups of 512", "14%")),
    ],
)
def test_plan_draws_the_curves(ft_plugins, tmp_path, option, labels):
    words = ("plan", "interval", "--nodes", "2048", "--group-nodes", "512", "--sw-rate", "0", "--hw-rate")
    ft_plugins(*words, "1e-3", option, str(tmp_path / "drawn.svg"))
    drawn = (tmp_path / "drawn.svg").read_text()
    assert not [label for label in labels if f"<!-- {label} -->" not in drawn]
    ft_plugins(*words, "0", option, str(tmp_path / "still.png"))  # nothing ever fails: drawn as well
    assert (tmp_path / "still.png").read_bytes().startswith(b"\x89PNG")


def test_plan_says_what_to_install_where_there_is_no_matplotlib(ft_plugins, monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "ft_plugins.report.plan_pictures", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"] + ["matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    line = ft_plugins(*PAPER, "--plot", str(tmp_path / "survival.png"), status=1)
    assert line == "ft-plugins: pictures need matplotlib, which is not installed; pip install 'ft_plugins[report]'\n"
    assert not list(tmp_path.iterdir()) and "16.2" in ft_plugins(*PAPER)


def test_why_says_what_failed_and_what_to_do(ft_plugins):
    events = Events("n0")
    events.subscribe(file_sink(run_directory("failed", "n0") / "events.jsonl"))
    events.emit(catalogue.JOB_STARTED, nproc=4, script="train.py")
    assert ft_plugins("why", "failed") == "no failure is in the events of this job\n"
    assert ft_plugins("why", "failed", "--json") == "null\n"
    events.emit(catalogue.WORKER_FAILED, rank=3, local_rank=3, exitcode=1, signal="", message="ValueError: loss")
    assert " rank 3 on node n0, " in ft_plugins("why") and "ValueError: loss" in ft_plugins("why")
    assert json.loads(ft_plugins("why", "--json"))["words"] == "ValueError: loss"


def test_events_shows_what_happened_on_all_nodes_by_time(ft_plugins, monkeypatch):
    for seconds, node, name, fields in (
        (700, "n1", "job.started", {"nproc": 4, "script": "train.py"}),
        (500, "n0", "job.started", {"nproc": 4, "script": "train.py"}),
        (400, "n1", "routine.summed", {"of": "fence.waited", "count": 9}),
        (300, "n1", "protection.lost", {"reason": "no \x1b[31mmemory " + "word " * 30}),
    ):
        path = run_directory("told", node) / "events.jsonl"
        event = Event(name, time.time() - seconds, node, fields=fields)
        path.write_text((path.read_text() if path.exists() else "") + event.line() + "\n")
    first, second, third = ft_plugins("events", "told").splitlines()
    assert " n1: job.started (nproc 4, script train.py)" in first and " n0: " in second
    assert " ! n1: protection.lost: no \\x1b[31mmemory word" in third
    assert "routine.summed" in ft_plugins("events", "--routine")
    assert len(ft_plugins("events", "--since", "10m").splitlines()) == 2
    assert ft_plugins("events", "--limit", "1").splitlines() == ["2 older events are left out; see --limit", third]
    assert [json.loads(line)["node"] for line in ft_plugins("events", "--json").splitlines()] == ["n1", "n0", "n1"]
    assert "--since soon: expected a duration" in ft_plugins("events", "--since", "soon", status=1)


def test_followed_events_come_until_ctrl_c_also_of_a_node_that_joins(ft_plugins, monkeypatch):
    def emit(node, number):
        events = Events(node)
        events.subscribe(file_sink(run_directory("told", node) / "events.jsonl"))
        events.emit(catalogue.JOB_STARTED, nproc=number, script="train.py")

    def sleep(seconds):
        run_directory("another", "n0")
        waits.append(seconds)
        if len(waits) == 3:
            raise KeyboardInterrupt
        emit(f"n{len(waits)}", len(waits))

    waits = []
    emit("n0", 0)
    monkeypatch.setattr("ft_plugins.cli.events_command.time.sleep", sleep)
    shown = [json.loads(line) for line in ft_plugins("events", "--follow", "--json").splitlines()]
    assert [(event["node"], event["nproc"]) for event in shown] == [("n0", 0), ("n1", 1), ("n2", 2)]


def test_events_fit_a_terminal():
    event = Event("protection.lost", 0.0, "node", 3, fields={"reason": "word " * 50, "max_steps": 100, "s": 0.1 + 0.2})
    assert max(map(len, lines_of(event, 80))) <= 80 and "(max_steps 100, s 0.3)" in " ".join(lines_of(event, 80))


def test_trace_writes_a_file_that_perfetto_shows(ft_plugins, tmp_path):
    events = Events("n0", 3)
    events.subscribe(file_sink(run_directory("traced", "n0") / "events.jsonl"))
    events.emit(catalogue.SNAPSHOT_SEALED, lineage=1, iteration=4, seconds=0.5, bytes=8, slot=0)
    assert "1 entries" in ft_plugins("trace", "traced", "--to", str(tmp_path / "t.json"))
    assert "capture 4" in (tmp_path / "t.json").read_text()
    assert "give another file" in ft_plugins("trace", "--to", str(tmp_path), status=1)


def test_report_shows_where_the_time_of_each_restart_went(ft_plugins, tmp_path):
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
    assert "\ngoodput (ETTR) 0.00 % of 0.00 s, seen by node n0" in table
    rows = {line[:24].strip(): line[24:].split() for line in table.splitlines()}
    assert rows["end old processes"] == ["0.50"] and rows["import"] == ["1.75"] and rows["detect the failure"] == ["-"]
    assert rows["total, from detection"] == ["6.50"] and rows["of ranks"] == ["4"]
    assert max(map(len, table.splitlines())) <= 80
    lines = ft_plugins("report", "restarted", "--json")
    one, time_of_job = map(json.loads, lines.splitlines())
    assert one["total"] == pytest.approx(6.5)
    assert sum(time_of_job["goodput"]["parts"].values()) == pytest.approx(time_of_job["goodput"]["wall_seconds"])
    assert ft_plugins("report", "--events", str(run_dir / "events.jsonl"), "--json") == lines
    page = tmp_path / "page.html"
    assert ft_plugins("report", "--html", str(page)) == f"{page}\n"
    assert "Restart 1, to iteration 9: 6.50 s, from detection" in page.read_text()
    assert "no job 'other'" in ft_plugins("report", "other", status=1)
    assert "/gone: no such file" in ft_plugins("report", "--events", str(tmp_path / "gone"), status=1)
