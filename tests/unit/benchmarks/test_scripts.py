"""Each benchmark, started as its users start it, ends with one line of JSON. It measures as little as it can here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ft_plugins.testing.emulated_nodes import network

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
