"""A job that hangs: the timeout of the test that waits for it reports the stack of each of its processes."""

import os
import threading

import pytest

from harness.job_control import wait_until


def wait_forever(argv):
    """Entry of each rank."""
    os.write(1, b"begun\n")  # at once: the ranks share the file
    threading.Event().wait()


def test_a_timeout_reports_the_stacks_of_the_agent_and_of_every_rank(torch_server, jobs):
    job = torch_server.start(jobs(entry=f"{__file__}:wait_forever", argv=(), flags=(), nproc=2))
    wait_until(lambda: job.tail().count("begun") == 2, 60, job.tail)
    with pytest.raises(TimeoutError, match="had not ended after 3 s") as caught:
        job.wait(3)
    assert not job.ended, "the report leaves the job running"
    report = str(caught.value)
    assert report.startswith(f"{job.spec.name} had not ended after 3 s:\nbegun\nbegun\nprocess {job.pid}:\n")
    agent, *ranks = report.split("process ")[1:]
    assert "in _invoke_run" in agent
    assert ["in wait_forever" in rank for rank in ranks] == [True, True]
