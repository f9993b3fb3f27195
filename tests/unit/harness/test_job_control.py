"""How a harness waits for its nodes."""

import json
import subprocess

import pytest

from harness.forkserver import JobSpec, RunningJob
from harness.job_control import wait_for_success

SECONDS = 90.0


def test_a_harness_ends_with_the_reason_of_the_first_node_that_failed_though_others_still_run(tmp_path):
    specs = {node: JobSpec("m:f", (), "job", str(tmp_path), node=node) for node in "ab"}
    (tmp_path / "b.outcome.json").write_text(json.dumps({"status": "refused", "reason": "its memory is busy"}))
    with subprocess.Popen(["sleep", "600"]) as lives, subprocess.Popen(["cat"], stdin=subprocess.PIPE) as ends:
        jobs = {"a": RunningJob(specs["a"], lives.pid), "b": RunningJob(specs["b"], ends.pid)}
        ends.kill()
        try:
            with pytest.raises(AssertionError, match="node b: refused: its memory is busy"):
                wait_for_success(jobs, SECONDS)
            assert not jobs["a"].ended
        finally:
            lives.kill()
