"""What is DeepSpeed's alone of silent errors: scripts with a loop of their own, and modes that have no replicas."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.deepspeed_runs import DeepSpeedConfiguration, DeepSpeedRun
from harness.forkserver import ForkServer, JobSpec, RunningJob
from harness.golden import assert_identical

Spec = Callable[..., JobSpec]
BOUND = 280  # seconds for one run; far more than it takes on an idle machine

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra [deepspeed]")

AUDIT = {"mode": "audit", "audit_interval": 1}
SCRIPT = DeepSpeedConfiguration(4, 0, bf16=False)


def start(server: ForkServer, jobs: Spec, run: DeepSpeedRun) -> RunningJob:
    run.folder.mkdir()
    return server.start(jobs(**{**vars(run.spec()), "name": f"t{os.getpid()}-{abs(hash(run.folder)) % 10**6}"}))


def finished(server: ForkServer, jobs: Spec, run: DeepSpeedRun) -> RunningJob:
    job = start(server, jobs, run)
    outcome = job.wait(BOUND)
    assert outcome["status"] == "succeeded", f"{outcome}\n{job.tail()}"
    return job


def test_a_scripts_own_loop_is_repaired_before_its_next_forward_and_its_run_is_the_clean_one(
    deepspeed_server: ForkServer, jobs: Spec, tmp_path: Path
) -> None:
    """What it computes between the engine's calls cannot be computed again, and need not be."""
    golden = DeepSpeedRun("golden", tmp_path / "golden", SCRIPT)
    run = DeepSpeedRun(
        "audited", tmp_path / "audited", SCRIPT,
        {"paft": {**AUDIT, "audit_at": "forward"}, "faults": "update.parameters@iteration=3,rank=2:flip=30~3"},
    )  # fmt: skip
    finished(deepspeed_server, jobs, golden)
    job = finished(deepspeed_server, jobs, run)
    (differs,) = job.events("audit.failed")
    assert (differs.fields["iteration"], differs.fields["ranks"], differs.fields["majority"]) == (3, [2], True)
    assert_identical(run, golden, SCRIPT.ranks)


def test_zero3_which_keeps_nothing_together_is_refused_by_name(
    deepspeed_server: ForkServer, jobs: Spec, tmp_path: Path
) -> None:
    run = DeepSpeedRun("refused", tmp_path / "refused", DeepSpeedConfiguration(2, 3), {"paft": AUDIT})
    outcome = start(deepspeed_server, jobs, run).wait(BOUND)
    assert outcome["status"] == "refused"
    assert "ZeRO-3 gathers parameters only while they are used" in outcome["reason"]
