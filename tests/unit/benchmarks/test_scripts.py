"""Each benchmark, started as its users start it, ends with one line of JSON. It measures as little as it can here."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from harness.emulated_nodes import network

FOLDER = Path(__file__).parents[3] / "benchmarks"
SECONDS = 1800.0  # a bound for a benchmark that hangs; each takes a minute or so
WORDS = {
    "bubble_overhead": ("--quick", "--pairs", "2", "--dilation", "1"),
    "double_capture": ("--quick",),
    "dreamddp": ("--quick", "--parts", "emulated", "--columns", "resnet18_8"),
    "dreamddp_quality": ("--quick", "--learners", "deep_text"),
    "ledger_cost": ("--quick",),
    "local_sgd": ("--quick", "--scenarios", "even"),
    "local_sgd_quality": ("--quick", "--learners", "text"),
    "parity": ("--quick",),
    "recovery": ("--quick", "--only", "nodes"),
    "scale": ("--most", "64"),
    "sdc": ("--quick", "--learners", "text"),
    "simulate": ("--quick",),
    "snapshot_stall": ("--quick",),
    "sync_overhead": ("--rounds", "1", "--calibrations", "1"),
}
THROTTLED = ("bubble_overhead", "dreamddp", "local_sgd", "sync_overhead")


def without_links() -> str:
    """Why links cannot be throttled on this machine; '' if they can."""
    try:
        with network([1]) as (host,):
            if not host.namespace:
                return "network namespaces are not permitted: run as root or with CAP_NET_ADMIN"
            host.throttle(1000.0)
    except (OSError, subprocess.SubprocessError) as error:
        return f"links in network namespaces cannot be throttled: {error}"
    return ""


def test_every_benchmark_is_started_here() -> None:
    assert set(WORDS) == {path.stem for path in FOLDER.glob("*.py") if "__main__" in path.read_text()}


@pytest.mark.all_configurations
@pytest.mark.parametrize("name", WORDS)
def test_it_ends_with_its_figures_as_one_line_of_json(name: str) -> None:
    if name in THROTTLED and (reason := without_links()):
        pytest.skip(reason)
    words = [sys.executable, str(FOLDER / f"{name}.py"), *WORDS[name]]
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
    last = json.loads(output.splitlines()[-1])
    assert last["benchmark"] == name and last["figures"]


@pytest.mark.all_configurations
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_that_is_stopped_leaves_no_process_memory_network_or_folder(number: signal.Signals) -> None:
    words = [sys.executable, str(FOLDER / "recovery.py"), *WORDS["recovery"], "--namespaces"]
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


def smps_of(job: str) -> list[list[str]]:
    """The command lines of the job's SMPs."""
    lines = [each.info["cmdline"] or [] for each in psutil.process_iter(["cmdline"])]
    return [words for words in lines if "--run-dir" in words and words[words.index("--job") + 1].startswith(job)]


def wait_until(found: Callable[[], list[list[str]]]) -> list[list[str]]:
    deadline = time.monotonic() + SECONDS
    while not (now := found()):
        assert time.monotonic() < deadline, "the job did not start"
        time.sleep(0.05)
    return now
