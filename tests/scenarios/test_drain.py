"""Nodes leave a running job, and a spare takes their place: one that is drained, without any loss, and one that failed
twice.

Emulated nodes of one rank each on loopback addresses, which the command reaches as it does a node's own; real
megatron-core with two replicas and a distributed optimizer, so that what the drained node holds exists on it alone. An
exchange takes several iterations, so most iterations are of no version that the others could continue from.
"""

from dataclasses import replace

import pytest

from ft_plugins import cli
from ft_plugins.errors import FtError
from ft_plugins.events import catalogue
from ft_plugins.launcher.rendezvous import control
from harness.claims import assert_restored, restored
from harness.emulated_nodes import LOOPBACK
from harness.golden import assert_identical
from harness.job_control import wait_until
from harness.multinode import BOUND, MultiNodeJob
from harness.shapes import JobShape

SHAPE = JobShape(1, 1, 2, True, 240)
SLOWLY = ("--reft-exchange-mbps", "8")
AUDITED = ("--paft", "--paft-mode", "audit", "--paft-audit-interval", "1")
EDIT = ("--sync-policy", "edit", "--sync-tau", "4", "--sync-warmup", "1", "--sync-apply", "update")


def drain(job, node):
    """The command, on the machine of all nodes. Raises FtError."""
    assert control.drain  # is imported, which takes long
    cli.app(["drain", node, "--job", job.nodes["n1"].spec.name], standalone_mode=False)


def until_spare(job, name):
    note = job.nodes[name].spec.run_dir / "ft-run.json"
    wait_until(lambda: note.exists() and "is a spare" in note.read_text(), BOUND, lambda: job.nodes[name].tail())


@pytest.mark.all_configurations
@pytest.mark.parametrize(
    ("leaving", "replicas", "flags"),
    [("n1", (), ()), ("n0", (), ()), ("n1", (), AUDITED), ("n1", EDIT, ("--reft-versions", "every"))],
    ids=["a-node", "the-node-that-leads", "replicas-are-audited", "replicas-differ"],
)
def test_a_drained_node_leaves_at_a_committed_version_and_no_iteration_is_lost(
    jobs, golden, tmp_path, leaving, replicas, flags, monkeypatch, capsys
):
    shape = replace(SHAPE, distributed=replicas != EDIT)  # replicas that train alone hold an optimizer each
    run = shape.run("megatron", tmp_path / "run", (*SLOWLY, *replicas, *flags), protected=True)
    with MultiNodeJob(jobs, run, 2, LOOPBACK[:2]) as job:
        job.start_all()
        job.until_committed(4)
        monkeypatch.setenv("XDG_RUNTIME_DIR", job.nodes["n1"].spec.runtime)
        with pytest.raises(FtError, match=f"no spare waits that could take the place of node {leaving}"):
            drain(job, leaving)
        spare = job.start("s", LOOPBACK[2])
        until_spare(job, "s")
        with pytest.raises(FtError, match="there is no node n7 in this job; its nodes are n0, n1"):
            drain(job, "n7")
        assert not job.events(catalogue.WORKERS_RESTARTED.name), "the job was not disturbed"
        drain(job, leaving)
        assert f"node {leaving} leaves at the next version" in capsys.readouterr().out
        gone = job.nodes.pop(leaving)
        outcome = gone.wait(BOUND)
        assert outcome["status"] == "drained" and f"node {leaving} is drained" in outcome["reason"], outcome
        [drained] = gone.events(catalogue.NODE_DRAINED.name)
        at = drained.fields["iteration"]
        job.wait()
        assert_restored(spare, "node", at, at)
        [stayed] = [each for name, each in job.nodes.items() if name != "s"]
        assert restored(stayed) == [at]
        replaced = [event.fields for event in stayed.events(catalogue.NODE_REPLACED.name)]
        assert replaced == [{"gone": [leaving], "new": ["s"], "asked": [leaving]}]
        assert [event.fields["lost"] for event in stayed.events(catalogue.STATE_RESTORED.name)] == [0]
        assert not stayed.events(catalogue.ROUND_ENDED.name), "a drain is no alarm"
        [resumed] = spare.events(catalogue.RANKS_RESUMED.name)
        assert resumed.fields["iteration"] == at + 1, "no iteration is computed again"
    assert_identical(run, golden(shape.run("megatron", flags=replicas)), run.ranks)


@pytest.mark.all_configurations
def test_a_node_whose_rank_was_the_first_to_fail_twice_gives_its_place_to_a_spare(jobs, golden, tmp_path):
    run = SHAPE.run("megatron", tmp_path / "run", protected=True)
    faults = ";".join(f"iteration.forward@iteration={at},restart={restart}:kill" for restart, at in enumerate((60, 90)))
    with MultiNodeJob(jobs, run, 2, LOOPBACK[:2]) as job:
        job.start_all({"n1": faults})
        job.until_committed(4)
        spare = job.start("s", LOOPBACK[2])
        until_spare(job, "s")
        job.wait()
        failed = job.nodes["n1"].events(catalogue.WORKER_FAILED.name)
        assert [event.fields["signal"] for event in failed] == ["SIGKILL", "SIGKILL"]
        assert not job.events(catalogue.NODE_REPLACED.name), "the node is there, as a spare"
        assert len(restored(job.nodes["n0"])) == 2 and len(restored(job.nodes["n1"])) == 1
        assert_restored(spare, "node", 60, 89)
    assert_identical(run, golden(SHAPE.run("megatron")), run.ranks)
