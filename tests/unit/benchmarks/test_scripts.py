"""Each benchmark, started as its users start it, ends with one line of JSON. It measures as little as it can here."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from workloads.result_rows import ROWS
from workloads.running import BENCHMARKS

FOLDER = Path(__file__).parents[3] / "benchmarks"
SECONDS = 1800.0  # a bound for a benchmark that hangs; most take seconds


def test_every_benchmark_is_known_and_has_a_line_in_the_table():
    scripts = {path.stem for path in FOLDER.glob("*.py") if "__main__" in path.read_text()}
    assert scripts == BENCHMARKS.keys() | {"all"} and {row.benchmark for row in ROWS} == BENCHMARKS.keys()
    assert all(benchmark.quick <= 180 for benchmark in BENCHMARKS.values())


@pytest.mark.all_configurations
@pytest.mark.parametrize("name", BENCHMARKS)
def test_it_ends_with_its_figures_as_one_line_of_json(name, tmp_path):
    if reason := BENCHMARKS[name].missing(smoke=True):
        pytest.skip(reason)
    words = [sys.executable, str(FOLDER / "all.py"), "--smoke", "--only", name, "--output", str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as script:
        try:
            output, errors = script.communicate(timeout=SECONDS)
        except BaseException:
            script.terminate()  # it removes its nodes and networks
            try:
                script.communicate(timeout=120)
            finally:
                script.kill()
            raise
    assert script.returncode == 0, f"{output[-2000:]}\n{errors[-4000:]}"
    *_, own, table, whole = output.splitlines()
    last = json.loads(own)
    assert json.loads(whole)["figures"]["all_ended_well"]
    assert last["benchmark"] == name and (tmp_path / "smoke" / name / f"{name}.json").read_text() == f"{own}\n"
    assert " left: " in errors, "it says how far it is"
    measured = [row for row in ROWS if row.benchmark == name and row.figure in last["figures"]]
    page = (tmp_path / "smoke" / "results.md").read_text()
    assert measured or name == "scale", "the table has its figures of large jobs"
    assert all(row.meaning in page for row in measured) and table.endswith("results.md")


@pytest.mark.all_configurations
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_that_is_stopped_leaves_no_process_memory_network_or_folder(number):
    words = [sys.executable, str(FOLDER / "recovery.py"), "--smoke", "--namespaces"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as script:
        try:
            job = f"rec{script.pid}-"
            smps = wait_until(lambda: smps_of(job) if list(Path("/dev/shm").glob(f"ftp-{job}*-r0")) else [])
            folders = {Path(words[words.index("--run-dir") + 1]).relative_to("/tmp").parts[0] for words in smps}
            script.send_signal(number)
            errors = script.communicate(timeout=SECONDS)[1]
        finally:
            script.kill()
    assert script.returncode and folders, errors
    assert not smps_of(job) and not list(Path("/dev/shm").glob(f"ftp-{job}*")), errors
    assert not [folder for folder in folders if Path("/tmp", folder).exists()], errors
    assert not list(Path("/sys/class/net").glob(f"ft{script.pid % 100000}b")), errors


def smps_of(job):
    """The command lines of the job's SMPs."""
    lines = [each.info["cmdline"] or [] for each in psutil.process_iter(["cmdline"])]
    return [words for words in lines if "--run-dir" in words and words[words.index("--job") + 1].startswith(job)]


def wait_until(found):
    deadline = time.monotonic() + SECONDS
    while not (now := found()):
        assert time.monotonic() < deadline, "the job did not start"
        time.sleep(0.05)
    return now
