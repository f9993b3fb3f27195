"""A job that does not end in its time: the test that waits for it says where its agent and its ranks are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from ft_plugins.testing.forkserver import ForkServer, JobSpec


def waits_for_ever(argv: Sequence[str]) -> None:
    """What a rank runs."""
    print("begun", flush=True)
    threading.Event().wait()


def test_who_waits_for_a_job_that_hangs_is_told_where_every_process_of_it_is(
    torch_server: ForkServer, jobs: Callable[..., JobSpec]
) -> None:
    job = torch_server.start(jobs(entry=f"{__file__}:waits_for_ever", argv=(), flags=(), nproc=2))
    with pytest.raises(TimeoutError, match="had not ended after 3 s") as caught:
        job.wait(3)
    assert not job.ended, "it was looked at only"
    said = str(caught.value)
    assert said.startswith(f"{job.spec.name} had not ended after 3 s:\nbegun\nbegun\nprocess {job.pid}:\n")
    agent, *ranks = said.split("process ")[1:]
    assert "in _invoke_run" in agent
    assert ["in waits_for_ever" in rank for rank in ranks] == [True, True]
