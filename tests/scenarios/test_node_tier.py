"""A node is lost at every point of the node tier's work: what is restored is one complete version, and a known one.

Three emulated nodes with one rank each; tensors are filled with their iteration number. A fault stops the SMP of one
node at the point; then that node is destroyed whole. The exchange is throttled so that it takes many iterations.
"""

import os
import signal
import time
from pathlib import Path

import pytest

from ft_plugins.cli.status_command import text_of
from ft_plugins.cli.status_facts import facts_of
from ft_plugins.smp.watch import liveness
from ft_plugins.snapshot.segment import paths
from harness.emulated_nodes import network
from harness.fills_runs import FillsRun
from harness.job_control import entries, wait_for
from harness.jobs import DETECT
from harness.multinode import MultiNodeJob

BOUND = 280


@pytest.fixture(scope="module")
def places():
    with network(range(31, 37)) as found:
        yield found


class Nodes(MultiNodeJob):
    """Three nodes that fill 8 MiB each, and what they have written."""

    def __init__(self, jobs, run, places):
        super().__init__(jobs, run, 3, places)
        self.journal, self._places = run.journal, list(places)

    def begin(self, name, faults="", mbps=80, detect=10, *more):
        """Start a node at the next address."""
        flags = (DETECT, str(detect), "--reft-exchange-mbps", str(mbps), *more)
        return self.start(name, self._places.pop(0), *flags, faults=faults)

    def counted(self, name):
        """The newest iteration that counts, as a node has said."""
        return max((event.fields["iteration"] for event in self.nodes[name].events("version.committed")), default=0)

    def lose_at_stop(self, name):
        """Wait until the SMP of a node has stopped itself, then destroy the node."""
        self.until_smp_stopped(name)
        self.destroy(name)

    def restored(self, restores):
        """What was written at restores, once there are so many."""
        return wait_for(self.journal, lambda found: len(found) >= restores, BOUND)

    def end(self):
        for job in self.nodes.values():
            job.kill()
        for job in self.nodes.values():
            job.wait(BOUND)
        assert_whole(entries(self.journal))


def assert_whole(found):
    """Every restore was of one complete version, the same on all ranks that restored together."""
    for entry in found:
        assert entry["torn"] == [] and entry["counter"] == entry["restored"], entry
    later = [entry["restored"] for entry in found if entry["restored"]]
    for first in range(0, len(later) - 2, 3):
        assert len(set(later[first : first + 3])) == 1, "three ranks restore together, one version"


@pytest.fixture
def job(jobs, tmp_path, places):
    def make(replicated=False):
        return Nodes(jobs, FillsRun("fills", tmp_path, 1_000_000, 3, 8, 0.05, replicated), places)

    return make


POINTS = [
    "exchange.frame@hit=1",  # the first frame of the first version
    "exchange.frame@hit=20",  # in the middle of a later one
    "parity_store.xored@hit=1",
    "parity_store.xored@hit=13",
    "parity_store.seal.before@hit=1",  # all is here, nothing is sealed
    "parity_store.seal.before@hit=3",
]


def refused_or_young(story, under_way):
    """Nothing has counted: the job ends with the reason, unless not even two versions had been captured, or the nodes
    that are left have all of the first one to be exchanged."""
    deadline = time.monotonic() + BOUND
    while time.monotonic() < deadline:
        found = entries(story.journal)
        if len(found) >= 6 and found[-1]["restored"]:
            assert {entry["restored"] for entry in found[3:]} == {under_way}
            story.end()
            return
        names = ("training.started", "state.lost")
        scratch = [event for running in story.nodes.values() for name in names for event in running.events(name)]
        again = [event for event in scratch if event.fields["reason"] != "no version was captured before"]
        if again:
            assert all(event.fields["completed"] <= 2 for event in again)
            story.end()
            return
        if any(running.events("job.ended") for running in story.nodes.values()):
            for running in story.nodes.values():
                outcome = running.wait(BOUND)
                assert outcome["status"] == "refused" and "holds no version" in outcome["reason"], running.tail()
            return
        time.sleep(0.02)
    raise AssertionError("neither refused nor started again")


@pytest.mark.parametrize("point", POINTS)
def test_a_node_lost_at_a_point_of_the_exchange_leaves_the_version_that_counted_before(job, point):
    story = job()
    story.begin("n0")
    story.begin("n2")
    story.begin("n1", f"{point}:stop")
    story.lose_at_stop("n1")
    counted = story.counted("n0")
    under_way = max(event.fields["iteration"] for event in story.nodes["n0"].events("exchange.started"))
    story.begin("s1")
    if not counted:
        assert point.endswith("hit=1"), "nothing has counted yet"
        refused_or_young(story, under_way)
        return
    found = story.restored(6)
    # what was being exchanged is taken if the nodes that are left have all of it: its seal on the lost one is no matter
    assert {entry["restored"] for entry in found[3:]} <= {counted, under_way}
    story.until_committed(counted + 1)
    story.end()


@pytest.mark.parametrize("point", ["rebuild.frame@hit=4", "parity_store.xored@hit=2"], ids=["decode", "redundancy"])
def test_a_substitute_that_is_lost_in_its_turn_is_replaced_by_another(job, point):
    story = job()
    for name in ("n0", "n1", "n2"):
        story.begin(name)
    story.until_committed(2)
    story.destroy("n1")
    counted = story.counted("n0")
    story.begin("s1", f"{point}:stop")
    story.lose_at_stop("s1")
    story.begin("t1")
    restores = 6 if point.startswith("rebuild") else 9
    found = story.restored(restores)
    assert {entry["restored"] for entry in found[-3:]} == {counted}
    story.until_committed(counted + 1)
    story.end()


@pytest.mark.parametrize(
    ("point", "replicated"),
    [("parity_store.xored@hit=21", False), ("exchange.check@hit=8", True), ("parity_store.seal.before@hit=4", True)],
)
def test_an_smp_killed_in_the_middle_goes_over_it_anew_and_what_then_counts_is_right(job, point, replicated):
    """Between XOR and cursor of what is sent; where replicas are compared; when all that is not sent is there."""
    story = job(replicated)
    story.begin("n0")
    story.begin("n1", f"{point},position=1:kill")
    story.begin("n2")
    running = story.nodes["n1"]
    wait_for(running.spec.run_dir / "events.jsonl", lambda e: any(x["name"] == "smp.lost" for x in e), BOUND)
    wait_for(running.spec.run_dir / "events.jsonl", lambda e: sum(x["name"] == "smp.started" for x in e) >= 2, BOUND)
    story.until_committed(story.counted("n0") + 2)
    story.destroy("n2")
    counted = story.counted("n0")
    under_way = max(event.fields["iteration"] for event in story.nodes["n0"].events("exchange.started"))
    story.begin("s2")
    found = story.restored(6)
    # what was being exchanged is taken if the nodes that are left have all of it, though nobody had heard so yet
    assert {entry["restored"] for entry in found[3:]} in ({counted}, {under_way})
    story.end()


def test_a_job_that_chooses_its_interval_leaves_time_for_the_exchange_and_rebuilds_a_lost_node(job):
    """An exchange takes at least 1.6 s here, and an iteration 0.05 s; no failure is expected."""
    story = job()
    auto = ("--reft-interval", "auto", "--reft-hw-rate", "0", "--reft-sw-rate", "0")
    for name in ("n0", "n1", "n2"):
        story.begin(name, "", 40, 10, *auto)
    (change,) = _named(story.nodes["n0"], "interval.changed", 1)
    since, interval = change["iteration"], change["interval"]
    assert interval > 1, change
    story.until_committed(since + 2 * interval)
    story.destroy("n1")
    counted = story.counted("n0")
    assert counted % interval == 0, "what ranks do not capture is not waited for"
    story.begin("s1", "", 40, 10, *auto)
    found = story.restored(6)
    assert {entry["restored"] for entry in found[3:]} <= {counted, counted + interval}
    after = max(entry["restored"] for entry in found[3:])
    story.until_committed(after + 2 * interval)
    own = [event.fields["iteration"] for event in story.nodes["s1"].events("snapshot.sealed")]
    changes = [event.fields for event in story.nodes["n0"].events("interval.changed")[1:]]
    assert changes or all(iteration % interval == 0 for iteration in own), "a substitute captures as all others do"
    story.end()


def printed(story, *words):
    """How often each `protection.<word>` was printed on all nodes."""
    said = "".join(running.tail(1000) for running in story.nodes.values())
    return [said.count(f"ft_plugins: protection.{word}: node ") for word in words]


def test_commits_that_stand_still_are_an_alarm_with_the_node_until_the_next_commit(job):
    """One node sends no more while its ranks train on and its SMP answers; then its SMP is replaced."""
    story = job()
    story.begin("n0", mbps=400, detect=5)
    story.begin("n1", "exchange.frame@hit=60:hold", mbps=400, detect=5)
    story.begin("n2", mbps=400, detect=5)
    held = story.nodes["n1"]
    for running in story.nodes.values():
        (stalled,) = _named(running, "protection.stalled", 1)
        assert stalled["waits_for"] == "n1" and "what node n1 sends does not arrive at node n" in stalled["reason"]
        assert stalled["iterations"] > 10 and stalled["seconds"] >= 15
        (facts,) = facts_of([running.spec.run_dir])
        assert facts["alarm"]["name"] == "protection.stalled"
        assert "protection.stalled" in text_of([facts], 80).splitlines()[1], "before all that looks healthy"
    liveness.kill_and_wait(liveness.holder(held.spec.run_dir / "smp.lock"), BOUND)
    for running in story.nodes.values():
        if running is not held:  # the new SMP there has nothing to take back
            _named(running, "protection.resumed", 1)
        (facts,) = facts_of([running.spec.run_dir])
        assert facts["alarm"] is None or facts["alarm"]["name"] != "protection.stalled"
    deadline = time.monotonic() + BOUND
    while (said := printed(story, "stalled", "resumed")) != [1, 1]:  # a trainer prints it after its next iteration
        assert said <= [1, 1] and time.monotonic() < deadline, said
        time.sleep(0.1)
    story.end()


def test_files_removed_from_shared_memory_are_an_alarm_and_a_killed_rank_still_resumes_from_that_memory(job):
    """As systemd does at a logout (RemoveIPC), or a cleaning script: segments, parity store and lock of one node."""
    story = job()
    for name in ("n0", "n1", "n2"):
        story.begin(name, mbps=400)
    story.until_committed(3)
    cleaned = story.nodes["n1"]
    files = [*paths.files_of(cleaned.spec.name, "n1"), paths.parity_path_of(cleaned.spec.name, "n1")]
    names = {path.name for path in files}
    for path in names:
        (paths.SHM / path).unlink()
    (removed,) = _named(cleaned, "segments.removed", 1)
    assert {Path(path).name for path in removed["paths"]} == {one for one in names if not one.endswith(".lock")}
    (facts,) = facts_of([cleaned.spec.run_dir])
    assert facts["alarm"]["name"] == "segments.removed" and "RemoveIPC" in facts["alarm"]["text"]
    story.until_committed(story.counted("n0") + 2)
    before = story.counted("n0")
    attached = cleaned.events("rank.attached")[-1]
    os.kill(attached.pid, signal.SIGKILL)
    found = story.restored(6)
    assert all(entry["restored"] >= before for entry in found[3:]), "not the beginning, and not an older version"
    assert not cleaned.events("slot.rebuilt"), "from its own memory"
    _named(cleaned, "segments.recovered", 1)
    (facts,) = facts_of([cleaned.spec.run_dir])
    assert facts["alarm"] is None or facts["alarm"]["name"] != "segments.removed"
    assert all((paths.SHM / path).exists() for path in names)
    assert liveness.held(paths.lock_of(cleaned.spec.name, "n1"))
    story.until_committed(max(entry["restored"] for entry in found) + 2)
    story.end()


def _named(running, name, count):
    """The events of that name in the history of a node, once there are so many."""
    path = running.spec.run_dir / "events.jsonl"
    found = wait_for(path, lambda lines: sum(line["name"] == name for line in lines) >= count, BOUND)
    return [line for line in found if line["name"] == name]
