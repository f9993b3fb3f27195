"""The benchmark of local SGD runs to its end on throttled links, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.emulated_nodes import network

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 280.0  # a minute on two idle cores


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True, timeout=20).stdout
    return {line.split()[0] for line in listed.splitlines()}


@pytest.mark.all_configurations
def test_all_scenarios_are_measured_and_drawn(tmp_path: Path) -> None:
    with network([1]) as hosts:
        if not hosts[0].namespace:
            pytest.skip("network namespaces cannot be made here")
    command = [sys.executable, str(ROOT / "benchmarks" / "local_sgd.py"), "--quick", "--output", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}) as running:  # fmt: skip
        try:
            output, _ = running.communicate(timeout=SECONDS)
        finally:
            running.terminate()
    assert running.returncode == 0, output
    figures = json.loads(output.splitlines()[-1])["figures"]
    own = f"ft{running.pid % 100000}n"
    assert not [name for name in namespaces() if name.startswith(own)]
    for scenario in ("even", "consistent", "random", "traffic"):
        compute = figures[f"{scenario}_compute_ms"]
        assert 0.9 * compute < figures[f"{scenario}_edit_ms"], "sleeps take their time"
        assert 0.9 * compute < figures[f"{scenario}_plain_ms"]
    assert figures["consistent_plain_ms"] > 1.8 * figures["consistent_compute_ms"], "plain waits for the straggler"
    assert figures["traffic_plain_ms"] > 2 * figures["traffic_edit_ms"], "the link is throttled"
    assert figures["edit_traffic_x"] > 2 and figures["edit_traffic_x_bound"] > 2
    assert {path.name for path in tmp_path.iterdir()} >= {"iterations.png", "synchronisation.png", "local_sgd.json"}
