"""A node is destroyed whole, a fresh one takes its place: the run ends as the unfailed one, bit for bit.

Emulated nodes: own agent, SMP, workers and network namespace; real megatron-core, TP2 x PP2. The order tp-cp-ep-pp-dp
puts data-parallel replicas on different nodes, so that every sharding group spans several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ft_plugins.rig.forkserver import ForkServer, JobSpec, RunningJob
from ft_plugins.rig.golden import explain, loss_differences, state_differences
from ft_plugins.rig.gpt_runs import Configuration, GptRun
from ft_plugins.rig.journal import wait_for
from ft_plugins.rig.nodes import Place, destroy, network

Spec = Callable[..., JobSpec]
BOUND = 280
ARGV = ("--order", "tp-cp-ep-pp-dp")
ITERATIONS = 10


@pytest.fixture(scope="module")
def places() -> Iterator[list[Place]]:
    with network([11, 12, 13, 14, 5, 25]) as found:
        yield found


class Job:
    """A job on several nodes."""

    def __init__(self, server: ForkServer, jobs: Spec, run: GptRun, ranks: int, count: int, endpoint: str) -> None:
        self.server = server
        self.jobs = jobs
        self.run = run
        self.nproc = ranks // count
        self.count = count
        self.endpoint = endpoint
        self.nodes: dict[str, RunningJob] = {}
        self.secret = run.folder / "secret"
        self.secret.write_text("what the nodes of this job know")
        self.secret.chmod(0o600)

    def start(self, name: str, place: Place) -> RunningJob:
        known = {k: v for k, v in vars(self.run.spec(**place.fields())).items() if k not in ("name", "flags")}
        flags = (
            *self.run.spec().flags, "--ftp-node-name", name, "--ftp-secret-file", str(self.secret),
            "--ftp-detect-seconds", "5",
        )  # fmt: skip
        spec = self.jobs(
            **{**known, "node": name, "nnodes": self.count, "endpoint": self.endpoint, "nproc": self.nproc,
               "flags": flags, "rendezvous": "ft_plugins"}
        )  # fmt: skip
        self.nodes[name] = self.server.start(spec)
        return self.nodes[name]

    def until_counts(self, iteration: int) -> None:
        for job in self.nodes.values():
            wait_for(
                job.spec.run_dir / "events.jsonl",
                lambda lines: any(e["name"] == "node.counts" and e["iteration"] >= iteration for e in lines),
                BOUND,
            )

    def destroy(self, name: str) -> None:
        destroy(self.nodes.pop(name))

    def wait(self) -> None:
        for job in self.nodes.values():
            outcome = job.wait(BOUND)
            assert outcome["status"] == "succeeded", job.tail()


def golden_of(server: ForkServer, folder: Path, configuration: Configuration, ranks: int) -> GptRun:
    folder.mkdir()
    run = GptRun("golden", folder, configuration, argv=ARGV, iterations=ITERATIONS)
    job = server.start(run.spec(nproc=ranks))
    assert job.wait(BOUND)["status"] == "succeeded", job.tail()
    return run


@pytest.mark.parametrize("distributed", [False, True], ids=["replicated", "distopt"])
def test_a_lost_node_is_rebuilt_on_a_fresh_one(
    megatron_server: ForkServer, jobs: Spec, tmp_path: Path, places: list[Place], distributed: bool
) -> None:
    configuration = Configuration(bf16=True, distributed_optimizer=distributed, interleaved=False)
    golden = golden_of(megatron_server, tmp_path / "golden", configuration, 8)
    run = GptRun("lost", tmp_path, configuration, protected=True, argv=ARGV, iterations=ITERATIONS)
    job = Job(megatron_server, jobs, run, 8, 4, f"{places[0].address}:29400")
    for index, place in enumerate(places[:4]):
        job.start(f"n{index}", place)
    job.until_counts(2)
    job.destroy("n2")
    fresh = job.start("s2", places[4])
    job.wait()
    (tiers,) = {tuple(sorted({e.fields["tier"] for e in fresh.events("restore.done")}))}
    assert tiers == ("node",)
    found = state_differences(run.digests, golden.digests, 8) + loss_differences(run.loss_log, golden.loss_log)
    assert not found, explain(found)
