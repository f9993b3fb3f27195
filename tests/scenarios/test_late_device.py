"""A job whose devices open the gates, because the host is ahead of them, loses a rank in a bubble and then a node. It
ends as the unfailed one, by the copies that were sent in such bubbles. The devices are emulated (harness.late_jobs).
"""

from dataclasses import replace
from importlib.util import find_spec

import pytest

from harness.claims import assert_restored, restores
from harness.emulated_nodes import network
from harness.golden import assert_identical
from harness.late_jobs import KILLED_IN
from harness.multinode import MultiNodeJob, until
from harness.shapes import JobShape

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra [deepspeed]")
SHAPE = JobShape(1, 2, 1, False, 100)
BAFT = ("--baft", "--baft-link-mbps", "400", "--baft-profile-iterations", "2")
ENTRY = "harness.late_jobs:deepspeed_example"


@pytest.fixture(scope="module")
def hosts():
    with network([11, 12, 25]) as found:
        yield found


def sent_in_openings(entries):
    """The versions since the first resume of which a node sent something while a device had its gate open for a bubble;
    on a busy machine some of that arrives late."""
    sent = [e for e in entries if e["name"] == "exchange.sent" and e["lineage"] > 1]
    return [e["iteration"] for e in sent if e["in_bubbles"] or e["late"]]


def test_a_rank_killed_in_a_bubble_that_its_device_opened_and_then_a_lost_node_resume_bit_for_bit(
    jobs, golden, tmp_path, hosts
):
    run = replace(SHAPE.run("deepspeed", tmp_path / "run", BAFT, protected=True), script=ENTRY)
    with MultiNodeJob(jobs, run, 2, hosts) as job:
        job.start_all()
        kept = sent_in_openings(until(job.nodes["n1"], lambda lines: bool(sent_in_openings(lines))))[0]
        job.until_committed(kept)
        assert job.nodes["n0"].events("worker.failed")[0].fields["signal"] == "SIGKILL"
        [resumed] = restores(job.nodes["n0"])
        assert resumed["tier"] == "process" and resumed["iteration"] >= KILLED_IN - 1
        planned = job.events("bubbles.planned")
        assert len({event.pid for event in planned}) == 4, "both ranks, before the kill and after"
        assert all(event.fields["by_device"] for event in planned)
        job.destroy("n1")
        fresh = job.start("s", hosts[-1])
        job.wait()
        assert_restored(fresh, "node", kept)
    assert_identical(run, golden(SHAPE.run("deepspeed")), run.ranks)
