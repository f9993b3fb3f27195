"""A job that hangs is noticed, its culprit named with stacks, and goes on; one that is only slow is left alone."""

from pathlib import Path

import pytest

from ft_plugins.events import catalogue
from ft_plugins.rehearse.driver import free_port
from harness.forkserver import RunningJob
from harness.job_control import entries, wait_for
from harness.jobs import write_secret

BOUND = 280
HANG_SECONDS = "2"


@pytest.fixture
def run(torch_server, jobs, tmp_path):
    def start(*words, restarts, hang_seconds=HANG_SECONDS, flags=(), bound=BOUND):
        journal = tmp_path / "journal"
        given = ("--reft", "--ftp-hang-seconds", hang_seconds, *flags)
        argv = ("--journal", str(journal), *words)
        job = torch_server.start(jobs(entry="harness.hangs:main", argv=argv, flags=given, nproc=2))
        outcome = job.wait(bound)
        last = words[words.index("--iterations") + 1] if "--iterations" in words else 9
        said = f"the job succeeded: training ended after iteration {last}; exit status 0"
        assert outcome == {"status": "succeeded", "reason": said, "restarts": restarts}, job.tail()
        return job, entries(journal)

    return start


@pytest.fixture(scope="module")
def unfailed():
    """The digest of each rank's final state where nothing happens, once a test has found it."""
    return {}


def ended(found):
    return {entry["rank"]: entry["ended"] for entry in found if "ended" in entry}


def require_as_unfailed(run, unfailed, found, tmp_path):
    """Compares bit for bit with a run in which nothing happens."""
    assert len(ended(found)) == 2
    if not unfailed:
        (tmp_path / "journal").unlink()
        unfailed.update(ended(run(restarts=0)[1]))
    assert ended(found) == unfailed


@pytest.mark.parametrize(
    ("how", "phase", "function", "ranks"),
    [
        ("sleep-forward", "forward", "before_forward", [1]),
        ("sleep-loader", "data", "in_loader", [1]),
        ("stop-backward", "after_forward", "", [1]),
        ("spin-forward", "forward", "before_forward", [1]),
        ("spin-with-lock", "forward", "before_forward", [1]),
        ("deadlock", "after_forward", "all_reduce", []),
    ],
)
def test_a_job_that_hangs_restarts_with_its_culprit_named_and_ends_as_the_unfailed_one(
    run, unfailed, tmp_path, how, phase, function, ranks
):
    job, found = run("--how", how, restarts=1, flags=("--ftp-detect-seconds", "60"))
    [hung] = [event.fields for event in job.events(catalogue.JOB_HUNG.name)]
    assert (hung["iteration"], hung["phase"], hung["ranks"], hung["even"]) == (6, phase, ranks, not ranks)
    assert hung["culprit"] == "node0" and float(HANG_SECONDS) <= hung["seconds"] < 20
    if ranks:
        assert hung["about"] == ranks[0]
    stacks = [(Path(hung["stacks"]) / f"rank{rank}.txt").read_text() for rank in range(2)]
    assert "in all_reduce" in stacks[0] if how == "deadlock" else "in backward" in stacks[0]
    assert f"in {function}" in stacks[1] if function else "is stopped by a signal" in stacks[1]
    who = "rank 1 of node node0, " if ranks else "all ranks, none behind the others, "
    [line] = [line for line in job.log.read_text().splitlines() if "no iteration was completed for" in line]
    assert f"workers.killed: node node0: hang of {who}" in line and "all workers restart" in line
    resumed = {entry["from"] for entry in found if entry.get("restart") == 1}
    # a process that is stopped, or whose interpreter's lock is never given back, may not have sealed the last one
    unsealed = how in ("spin-with-lock", "stop-backward")
    assert resumed <= {5, 6} and len(resumed) == 1 if unsealed else resumed == {6}
    require_as_unfailed(run, unfailed, found, tmp_path)


@pytest.mark.parametrize("how", ["slow-evaluation", "slow-first", "slow-save"])
def test_a_job_that_is_slow_where_it_may_be_is_left_alone(run, unfailed, tmp_path, how):
    job, found = run("--how", how, restarts=0)
    assert job.events(catalogue.JOB_HUNG.name) == []
    require_as_unfailed(run, unfailed, found, tmp_path)


def test_by_default_a_rank_that_takes_more_than_a_minute_between_two_iterations_is_left_alone_with_an_alarm(
    run, unfailed, tmp_path
):
    job, found = run("--how", "slow-upload", "--seconds", "75", restarts=0, hang_seconds="auto", bound=300)
    assert job.events(catalogue.JOB_HUNG.name) == []
    [waiting] = [event.fields for event in job.events(catalogue.JOB_WAITING.name)]
    assert (waiting["about"], waiting["iteration"], waiting["phase"]) == (1, 6, "after_update")
    line = "waiting for rank 1 of node node0, after the update of iteration 6; its stack stands in "
    assert line in waiting["reason"] and "in _upload" in waiting["reason"]
    assert f"ft-run: job.waiting: node node0: {waiting['reason'].rstrip('.')}" in job.log.read_text()
    require_as_unfailed(run, unfailed, found, tmp_path)


def test_a_slow_rank_is_named_with_its_factor_and_left_alone(run):
    job, found = run("--how", "straggle", "--seconds", "0.1", "--iterations", "50", restarts=0)
    [slow] = [event.fields for event in job.events(catalogue.RANK_SLOWED.name)]
    assert slow["about"] == 1 and slow["factor"] > 1.5 and slow["seconds"] > 0.05
    assert len(ended(found)) == 2


def run_on_two_nodes(server, jobs, folder, how):
    """Start a rank on each of two nodes, which protect each other, and wait for both."""
    secret, journal = write_secret(folder), folder / "journal"
    endpoint, running = f"localhost:{free_port()}", list[RunningJob]()
    given = ("--reft", "--ftp-hang-seconds", HANG_SECONDS, "--ftp-secret-file", str(secret))
    for node in ("node0", "node1"):
        spec = jobs(
            entry="harness.hangs:main", argv=("--journal", str(journal), "--how", how), nnodes=2,
            node=node, endpoint=endpoint, flags=(*given, "--ftp-node-name", node),
        )  # fmt: skip
        running.append(server.start(spec))
        if node == "node0":  # agents are sorted by address and pid: the first one started has rank 0
            wait_for(spec.run_dir / "events.jsonl", lambda lines: any(e["name"] == "smp.started" for e in lines), BOUND)
    for job in running:
        assert job.wait(2 * BOUND)["status"] == "succeeded", job.tail()
    return running, entries(journal)


def test_on_two_nodes_both_name_the_rank_of_one_and_go_on(torch_server, jobs, run, unfailed, tmp_path):
    running, found = run_on_two_nodes(torch_server, jobs, tmp_path, "sleep-forward")
    for rank, job in enumerate(running):
        [hung] = [event.fields for event in job.events(catalogue.JOB_HUNG.name)]
        assert (hung["about"], hung["culprit"], hung["iteration"], hung["phase"]) == (1, "node1", 6, "forward")
        stack = (Path(hung["stacks"]) / f"rank{rank}.txt").read_text()
        assert ("in before_forward" if rank else "in backward") in stack
    # the agent that acts first says so; the other one may see the end of the round before it reads why
    named = "rank 1 of node node1, in the forward of iteration 6"
    assert any(named in job.log.read_text() for job in running)
    assert {entry["from"] for entry in found if entry.get("restart")} <= {5, 6}
    require_as_unfailed(run, unfailed, found, tmp_path)
