"""Local SGD when a node is lost: rebuilt from parity on a fresh one, bit for bit; or for good, at another size.

Each emulated node is one replica of two ranks. Nodes protect each other by RAIM5; without a reduction over replicas
only a synchronisation joins them. Golden runs have the same policy and no snapshots.
"""

import subprocess
import sys
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from ft_plugins.model.digest import tensor_digest
from harness.averagings import averagings, reached
from harness.claims import restores
from harness.deepspeed_runs import DeepSpeedConfiguration, DeepSpeedRun
from harness.emulated_nodes import network
from harness.golden import assert_identical, explain, losses, state_differences
from harness.job_control import captured
from harness.megatron_runs import MegatronConfiguration, MegatronRun
from harness.multinode import MultiNodeJob, until

BOUND = 280  # seconds for one wait; far more than it takes on an idle machine
TAU, ITERATIONS = 3, 10
EDIT = {"policy": "edit", "tau": TAU, "penalty_warmup": 1, "alpha": 0.3, "threshold": 1.5, "clip": 0.02}
PER_NODE = 2
PATIENT = ("--ftp-detect-seconds", "20")  # a rank that has stopped itself is not found to be lost before its node is
REFERENCE = f"{Path(__file__).with_name('takes_over.py')}:main"
LOADER = f"{Path(__file__).with_name('loads_export.py')}:main"
DATA_LAST = ("--order", "tp-cp-ep-pp-dp")  # Megatron: a node is a replica
FP32 = MegatronConfiguration(bf16=False, distributed_optimizer=False, interleaved=False)
SHARDED = MegatronConfiguration(bf16=True, distributed_optimizer=True, interleaved=False)
INSTANCES = ("--num-distributed-optimizer-instances", "2")


@dataclass(frozen=True)
class Mode:
    """A framework's way to train, under local SGD. `block`: further keys of `sync`; `policy`: the others."""

    framework: str
    block: dict[str, Any]
    stage: int = 0
    pp: int = 2
    megatron: MegatronConfiguration = FP32
    argv: tuple[str, ...] = ()
    ranks: int = 6  # of a job that is resized
    batch: int = 12  # its global batch
    policy: dict[str, Any] = field(default_factory=lambda: EDIT)

    def run(self, name, folder, ranks, protected, iterations, batch=0):
        """A run of the example."""
        sync = {**self.policy, **self.block}
        if self.framework == "deepspeed":
            configuration = DeepSpeedConfiguration(
                ranks, self.stage, bf16=False, pp=self.pp, axes="data-pipe-model", batch=batch
            )
            block = {"sync": sync, **({"reft": {}} if protected else {})}
            return DeepSpeedRun(name, folder, configuration, block, iterations=iterations)
        flags = [f"--sync-{key.replace('_', '-')}={value}" for key, value in sync.items()]
        argv = (*DATA_LAST, "--tp", "1", "--pp", str(self.pp), *self.argv)
        if batch:
            argv += ("--global-batch", str(batch))
        return MegatronRun(
            name, folder, self.megatron, protected, flags=tuple(flags), argv=argv, ranks=ranks, iterations=iterations
        )


needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra [deepspeed]")
PIPELINE = Mode("deepspeed", {})  # applied in forwards
ZERO2 = Mode("deepspeed", {"shard_ranks": 2}, stage=2, pp=0)  # behind an iteration
REPLICATED = Mode("megatron", {"apply": "forward"})
WAITING = Mode("megatron", {"apply": "wait"})  # the example describes its state before a synchronisation ends otherwise
DISTOPT = Mode("megatron", {"apply": "wait"}, pp=1, megatron=SHARDED, argv=INSTANCES)
MODES = [
    pytest.param(PIPELINE, id="deepspeed-pipeline", marks=needs_deepspeed),
    pytest.param(ZERO2, id="deepspeed-zero2", marks=needs_deepspeed),
    pytest.param(REPLICATED, id="megatron"),
    pytest.param(DISTOPT, id="megatron-distopt"),
]


@pytest.fixture(scope="module")
def places():
    with network([11, 12, 13, 14, 5]) as found:
        yield found


def stopping(mode, fault):
    """Further arguments of `MultiNodeJob.start` that arm a fault on one node."""
    if mode.framework == "deepspeed":
        return ("--ftp-faults", fault), {}  # its file is common to all nodes
    return (), {"faults": fault}


def until_all_captured(job, iteration):
    """Wait until every rank of every node has captured `iteration`.

    Not until it is committed: a job that has just restarted exchanges the version it restored first, so a quick one may
    begin to capture `iteration` before it is announced, and then it never is.
    """
    for each in job.nodes.values():
        until(each, lambda lines, ranks=each.spec.nproc: captured(lines, iteration, ranks), BOUND)


def tiers(job):
    """Tier and iteration that each incarnation of a node restored."""
    return [(fields["tier"], fields["iteration"]) for fields in restores(job)]


def lose_both(mode, jobs, folder, places, stops, until_second):
    """Run a job on two nodes of which each is lost in turn, n1 first: where its ranks 0 and 2 stop. The second one once
    `until_second` returns. The run is in `folder`; it ends with substitutes for both."""
    run = mode.run("nodes", folder, 4, True, ITERATIONS)
    job = MultiNodeJob(jobs, run, 2, places[:4], *PATIENT)
    for number, stop in enumerate(stops):
        more, faults = stopping(mode, stop)
        job.start(f"n{number}", places[number], *more, **faults)
    job.until_rank_stopped("n1", 2)
    job.until_committed(TAU)
    job.destroy("n1")
    second = job.start("s1", places[2])
    job.until_rank_stopped("n0", 0, 2)
    until_second(job)
    job.destroy("n0")
    third = job.start("s0", places[3])
    job.wait()
    assert tiers(second)[0] == ("node", TAU)
    assert tiers(third)[0] in [("node", TAU), ("node", 2 * TAU)]
    return job


@pytest.mark.parametrize("mode", MODES)
def test_a_node_lost_between_synchronisations_and_one_right_after_one_are_rebuilt_from_parity(
    mode, jobs, golden, tmp_path, places
):
    """What the second synchronisation has changed is not captured everywhere when the second node is lost. Until a
    version is committed by the substitute, too, a second loss is one too many."""
    whole = golden(mode.run("golden", Path(), 4, False, ITERATIONS))
    at = "iteration.forward@iteration"
    stops = f"{at}={2 * TAU + 1},rank=0:stop", f"{at}={TAU + 2},rank=2:stop"
    job = lose_both(mode, jobs, tmp_path, places, stops, lambda job: job.until_committed(TAU))
    assert_identical(job.run, whole, 4)
    assert {event.fields["iteration"] for event in job.nodes["s0"].events("replicas.synchronised")} >= {3 * TAU}


DREAMDDP = {"policy": "dreamddp", "tau": TAU, "h": 2, "schedule": "equal"}
LAYERED = [
    pytest.param(replace(PIPELINE, policy=DREAMDDP), id="deepspeed-pipeline", marks=needs_deepspeed),
    pytest.param(replace(ZERO2, policy=DREAMDDP), id="deepspeed-zero2", marks=needs_deepspeed),
    pytest.param(replace(REPLICATED, policy=DREAMDDP, block={}), id="megatron"),
    pytest.param(replace(DISTOPT, policy=DREAMDDP, block={}), id="megatron-distopt"),
]


@pytest.mark.parametrize("mode", LAYERED)
def test_a_node_lost_while_layers_are_averaged_is_rebuilt_from_parity(mode, jobs, golden, tmp_path, places):
    """All layers are synchronised after iterations 3, 6 and 9. A rank of one node stops in iteration 5, while layers
    are applied, and one of the other node in 8, in their exchange."""
    unfailed = mode.run("golden", Path(), 4, False, ITERATIONS)
    whole, expected = golden(unfailed), averagings([golden.job(unfailed)])
    applied, exchanged = reached(expected, TAU, 2, 0, TAU + 2), reached(expected, TAU, 0, TAU, 2 * TAU + 2)
    # on a busy machine the loss may end a second round, that of the first restart
    second = ";".join(f"sync.exchange@rank=0,hit={exchanged},restart={restart}:stop" for restart in (1, 2))
    stops = second, f"sync.apply@rank=2,hit={applied}:stop"
    job = lose_both(mode, jobs, tmp_path, places, stops, lambda job: until_all_captured(job, 2 * TAU))
    assert_identical(job.run, whole, 4)
    found = averagings(job.nodes.values())
    assert found == {key: expected[key] for key in found} and {step for _, step in found} >= {8, 10}


def reference(jobs, mode, name, folder, ranks, iterations, *words):
    """A run without snapshots, whose state `takes_over` writes and reads. `ranks`: of the job; its configuration is
    that of the job that is resized."""
    run = mode.run(name, folder, mode.ranks, False, iterations, mode.batch)
    argv = (mode.framework, *map(str, words), *run.spec().argv)
    jobs.finish(run, entry=REFERENCE, argv=argv, nproc=ranks)
    return run


def parameters(run, rank):
    """Digests of a rank's parameters at the end, by name."""
    found = run.state(rank)["parameters"]
    return found


WAITED = replace(PIPELINE, block={"apply": "wait"})
RESIZED = [
    pytest.param(WAITED, 3, id="deepspeed-pipeline", marks=needs_deepspeed),
    pytest.param(WAITED, 2, id="deepspeed-pipeline-the-last-replica-alone", marks=needs_deepspeed),
    pytest.param(replace(ZERO2, batch=24), 3, id="deepspeed-zero2-in-flight", marks=needs_deepspeed),
    pytest.param(WAITING, 3, id="megatron"),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("mode", "replicas"), RESIZED)
def test_a_job_goes_on_with_one_replica_fewer_and_again_with_all(mode, replicas, jobs, tmp_path, places):
    """The state of iteration 3 is taken over by the replicas that are left, that of iteration 6 by all. Where
    synchronisations are applied behind an iteration, one more follows the last one, so that the final state shows it.
    """
    in_flight, ranks = mode.stage > 0, replicas * PER_NODE
    mode, last = replace(mode, ranks=ranks), 3 * TAU + in_flight
    run = mode.run("resized", tmp_path / "resized", ranks, True, last, mode.batch)
    job = MultiNodeJob(jobs, run, replicas, places[:4], *PATIENT, "--reft-wait-seconds", "1", min_nodes=replicas - 1)
    stops = [f"iteration.forward@iteration={2 * TAU + 2},rank=0,restart=1:stop"]
    stops += [f"iteration.forward@iteration={TAU + 2},rank=2:stop", ""]
    for number, stop in enumerate(stops[:replicas]):
        more, faults = stopping(mode, stop) if stop else ((), {})
        job.start(f"n{number}", places[number], *more, **faults)
    job.until_rank_stopped("n1", 2)
    job.until_committed(TAU)
    job.destroy("n1")
    job.until_rank_stopped("n0", 0, 2)
    until_all_captured(job, 2 * TAU)
    fresh = job.start("s", places[3])
    job.wait()
    taken_over = [event.fields["iteration"] for event in job.nodes["n0"].events("state.resharded")]
    assert sorted(set(taken_over)) == [TAU, 2 * TAU] and fresh.events("state.resharded")
    said = "\n".join(each.tail(2000) for each in job.nodes.values())  # by rank 0: a round may begin without a slow n0
    if replicas == 2:
        assert "local SGD with 1 replica: there is no other one to synchronise with" in said
    else:
        assert "3 replicas became 2" in said and "2 replicas became 3" in said

    folder, all_of_them, fewer = tmp_path / "reference", tmp_path / "all", tmp_path / "fewer"
    reference(jobs, mode, "r1", folder, ranks, last, "--give-at", TAU, "--give", all_of_them)
    taking = ("--replica-ranks", PER_NODE, PER_NODE, "--replicas")
    words = ("--take", all_of_them, *taking, replicas, "--give-at", 2 * TAU, "--give", fewer)
    reference(jobs, mode, "r2", folder, ranks - PER_NODE, last, *words)
    whole = reference(jobs, mode, "r3", folder, ranks, last, "--take", fewer, *taking, replicas - 1)
    assert_continues(run, whole, ranks, since=2 * TAU)
    for rank in range(PER_NODE):
        first, *others = (parameters(run, rank + replica * PER_NODE) for replica in range(replicas))
        assert all(other != first for other in others) if in_flight else all(other == first for other in others)


def test_instances_of_the_distributed_optimizer_continue_with_fewer_ranks_each(jobs, tmp_path, places):
    """Four nodes of one rank, two instances; one node is lost, another one is a spare. The replicas stay the same ones,
    so statistics of norms do too: they decide what is left out and clipped."""
    mode, last = replace(DISTOPT, ranks=4, batch=24), 3 * TAU
    run = mode.run("instances", tmp_path / "instances", 4, True, last, mode.batch)
    job = MultiNodeJob(jobs, run, 4, places[:4], *PATIENT, "--reft-wait-seconds", "1", min_nodes=2)
    job.start_all({"n1": f"iteration.forward@iteration={TAU + 2},rank=1:stop"})
    job.until_rank_stopped("n1", 1)
    job.until_committed(TAU)
    job.destroy("n1")
    job.wait()
    assert {event.fields["iteration"] for event in job.nodes["n0"].events("state.resharded")} == {TAU}
    assert "replicas became" not in job.nodes["n0"].tail(2000)

    folder, four = tmp_path / "reference", tmp_path / "four"
    reference(jobs, mode, "r1", folder, 4, last, "--give-at", TAU, "--give", four)
    taking = ("--take", four, "--replica-ranks", 2, 1, "--replicas", 2)
    whole = reference(jobs, mode, "r2", folder, 2, last, *taking)
    assert_continues(run, whole, 2, since=TAU)


def assert_continues(run, whole, ranks, since):
    """The final state of two runs is identical, and so are their losses after iteration `since`."""
    found = state_differences(run.digests, whole.digests, ranks)
    assert not found, explain(found)
    later = [{k: v for k, v in losses(log).items() if k > since} for log in (run.loss_log, whole.loss_log)]
    assert later[0] == later[1]


# export


def written(jobs, mode, folder, iteration):
    """A protected run of two replicas that ends at `iteration`, and the checkpoint of that iteration."""
    run = mode.run("written", folder, 2 * PER_NODE, True, iteration)
    stores = ("--reft-checkpoint-dir", str(folder / "ck"), "--reft-checkpoint-interval", str(iteration))
    flags = (*run.spec().flags, *stores)
    jobs.finish(run, flags=flags)
    (found,) = (folder / "ck").glob(f"*/v1-{iteration}")
    return run, found


def export(checkpoint, target):
    """`ft-plugins export` as a user gives it. Returns what it prints."""
    command = [Path(sys.executable).with_name("ft-plugins"), "export", checkpoint, "--to", target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BOUND)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def tensors_in(folder):
    """Digests of all tensors in the files of a DeepSpeed checkpoint."""
    found = []

    def visit(value):
        if isinstance(value, torch.Tensor):
            found.append(tensor_digest(value.detach()))
        for part in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
            visit(part)

    for path in folder.rglob("*.pt"):
        visit(torch.load(path, weights_only=False))
    return found


def moments(run, rank):
    """Digests of a rank's first moments at the end, by item."""
    items = run.state(rank)["items"]
    return {name: digest for name, digest in items.items() if name.endswith("exp_avg")}


@needs_deepspeed
@pytest.mark.parametrize("mode", [pytest.param(PIPELINE, id="deepspeed-pipeline")])
def test_an_export_has_the_synchronised_parameters_and_the_moments_of_the_first_replica(mode, jobs, tmp_path):
    run, checkpoint = written(jobs, mode, tmp_path / "run", 2 * TAU)
    said = export(checkpoint, tmp_path / "exported")
    assert f"iteration {2 * TAU}" in said and "replica" not in said
    found = tensors_in(tmp_path / "exported")
    for rank in range(PER_NODE):
        assert parameters(run, rank) == parameters(run, rank + PER_NODE)
        owned = [name for name in parameters(run, rank) if not name.startswith("tied_modules") or rank == 0]
        assert owned and all(parameters(run, rank)[name] in found for name in owned)
        first, second = moments(run, rank), moments(run, rank + PER_NODE)
        kept = [name for name in first if not name.startswith("tied_modules") or rank == 0]
        assert kept and all(first[name] in found and second[name] not in found for name in kept)


@needs_deepspeed
@pytest.mark.parametrize("mode", [pytest.param(ZERO2, id="deepspeed-zero2-in-flight")])
def test_an_export_of_replicas_that_differ_is_the_first_one_and_says_so(mode, jobs, tmp_path):
    """Its synchronisation was in flight: what the first replica had then is what it has without one."""
    _, checkpoint = written(jobs, mode, tmp_path / "run", TAU)
    said = export(checkpoint, tmp_path / "exported")
    assert "this is replica 0 of 2" in said and f"at iteration {TAU} replicas had different parameters" in said
    apart = replace(mode, block={**mode.block, "tau": 100}).run("apart", tmp_path / "apart", 4, False, TAU)
    jobs.finish(apart)
    found = tensors_in(tmp_path / "exported")
    own, other = parameters(apart, 0), parameters(apart, PER_NODE)
    assert own and all(digest in found for digest in own.values())
    assert own == parameters(apart, 1) and any(digest not in found for digest in other.values())


@pytest.mark.parametrize(
    "mode", [pytest.param(REPLICATED, id="megatron"), pytest.param(DISTOPT, id="megatron-distopt")]
)
def test_an_export_loads_into_megatron_with_the_synchronised_parameters(mode, jobs, tmp_path):
    """All replicas of the job that loads it hold what the first one had, bit for bit. With apply forward the example
    describes its state before the last synchronisation is applied: then the run that waits for it is compared."""
    run, checkpoint = written(jobs, mode, tmp_path / "run", 2 * TAU)
    if mode.block["apply"] == "forward":
        run = replace(mode, block={"apply": "wait"}).run("waits", tmp_path / "waits", 2 * PER_NODE, False, 2 * TAU)
        jobs.finish(run)
    said = export(checkpoint, tmp_path / "exported")
    assert f"iteration {2 * TAU}" in said and "replica" not in said
    loaded = replace(run, folder=tmp_path / "loaded")
    iteration = tmp_path / "exported" / f"iter_{2 * TAU:07d}"
    argv = (str(iteration), str(loaded.digests), *mode.megatron.argv(), *run.argv)
    jobs.finish(loaded, entry=LOADER, argv=argv, flags=())
    for rank in range(2 * PER_NODE):
        first = rank % PER_NODE
        assert parameters(loaded, rank) == parameters(run, first) == parameters(run, first + PER_NODE)
        assert moments(loaded, rank) == moments(run, first) != moments(run, first + PER_NODE)
