"""The emulated cluster: 4 nodes of 4 ranks in the shapes of the BAFT paper, with links throttled to scale.

Scale. The paper's testbed has 4 servers with 4 A40 each and 10 Gb/s between them; batches of 128 and 64, 8 samples per
microbatch. The paper names GPT-2 but not its size, and sends parameters only. Assumed: GPT-2 with 345 M parameters,
1,024 tokens, 25 Tflop/s per rank in a pass (gives iterations of 0.6 to 1.9 s; the paper loses 0.6 to 5.5 s with 1 to 3
iterations). A copy holds what a restart needs: the master parameters and both moments of a mixed-precision Adam, 12
bytes per parameter, six times what the paper sends. These give the forward and backward time of each stage
(workloads.jobs; the last stage has the head), which stages sleep for. Dividing both of the following by SCALE keeps the
testbed's ratio of transfer time to bubble time:

    link of a node    10 Gb/s / SCALE      bytes of a rank    12 x parameters / ranks / SCALE

A rank here has fewer parameters, of the same 12 bytes each: the state of a float32 Adam.

Time can also be stretched (`dilation`): passes take longer and links carry less by the same factor, which keeps the
ratio of transfer to bubble. What is not emulated (the schedule's Python, messages, SMPs) takes constant processor time,
and 16 ranks and 4 SMPs share a core or two here, where the testbed has many. Stretched twice, sixteen ranks on two
cores are still four times as crowded as ranks with a core each; stretched eight times they would be equal. A snapshot
takes the same processor time in every shape, so compare shapes at about the same iteration time (`stretched_to`).

Not to scale: messages between stages, whose size the paper does not give. They are real, MESSAGE_BYTES each.

Invariant: the ranks of a node share a network namespace and its throttled link. In: shape, batch, schedule. Out: a
finished job, and what its ranks and SMPs wrote.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ft_plugins.bubbles.timeline.timeline_values import unpack
from ft_plugins.errors import FtError
from ft_plugins.events import Event, catalogue, read
from ft_plugins.model.timeline import Profile
from harness import megatron_runs
from harness.emulated_nodes import EmulatedHost, destroy
from harness.forkserver import ForkServer, JobSpec, RunningJob
from harness.job_control import wait_for, wait_for_success
from workloads import emulated_rank
from workloads.emulated_rank import StageSpec
from workloads.jobs import A40, PAPER_SHAPES, TrainingJob
from workloads.pipelines.pipeline import Pipeline
from workloads.pipelines.simulate import PipelineLink, simulate

NODES, RANKS_OF_NODE = 4, 4
SCALE = 300
LINK_MBPS = 10_000 / SCALE
MESSAGE_BYTES = 6 << 10
EMULATED_RANK = Path(emulated_rank.__file__).resolve()  # as a file: the fork server cannot import `workloads`
PRELOAD = (*megatron_runs.PRELOAD, str(EMULATED_RANK))
_HIDDEN, _MICRO_BATCH = 64, 8
_STATE_OF_PARAMETER = 12  # bytes: float32 parameter, two moments
_PORT = 29750
_BURST_BYTES, _QUEUE_MS = 12 << 10, 100
_START = 120.0  # seconds in addition to the iterations


@dataclass(frozen=True)
class EmulatedJob:
    """A job on the cluster that stands for `job` on the testbed. Its second stage may be disturbed."""

    job: TrainingJob
    jitter: float = 0.0
    drift: float = 1.0
    drift_after: float = 0.0
    dilation: int = 1

    @property
    def name(self) -> str:
        return f"{self.job.name}b{self.job.batch}" + (f"v{self.job.chunks}" if self.job.chunks > 1 else "")

    @property
    def pipeline(self) -> Pipeline:
        return self.job.pipeline()

    def stretched_to(self, seconds: float) -> EmulatedJob:
        """This job with time stretched so that the passes of an iteration take about `seconds`."""
        times = replace(self.job.times(self.pipeline), links=(PipelineLink(),))
        own = max(timeline.seconds for timeline in simulate(self.pipeline, times))
        return replace(self, dilation=max(1, round(seconds / own)))

    @property
    def link_mbps(self) -> float:
        """Rate of a node's link."""
        return LINK_MBPS / self.dilation

    @cached_property
    def stages(self) -> tuple[StageSpec, ...]:
        """The stages by pipeline rank."""
        chunks, times = self.pipeline.chunks, self.job.times(self.pipeline)
        parameters = round(self.job.rank_bytes / SCALE * self.job.dp / _STATE_OF_PARAMETER)
        return tuple(
            StageSpec(
                self.dilation * sum(times.forward[chunk * self.job.pp + rank] for chunk in range(chunks)),
                self.dilation * sum(times.backward[chunk * self.job.pp + rank] for chunk in range(chunks)),
                parameters,
                *((self.jitter, self.drift, self.drift_after) if rank == 1 else ()),
            )
            for rank in range(self.job.pp)
        )

    def spec(self, folder: Path, blocks: Sequence[tuple[str, int]], runtime: Path) -> JobSpec:
        """The job of one node. `run` adds the node's name, flags and host."""
        (folder / "blocks.json").write_text(json.dumps(blocks))
        job, words = self.job, []
        words += ["--stages", json.dumps([asdict(stage) for stage in self.stages])]
        words += ["--blocks", str(folder / "blocks.json"), "--out", str(folder)]
        sequence = MESSAGE_BYTES // (4 * _HIDDEN * _MICRO_BATCH)
        for flag, value in (
            ("tp", job.tp), ("pp", job.pp), ("virtual-stages", self.pipeline.chunks), ("hidden", _HIDDEN),
            ("layers", job.pp * self.pipeline.chunks), ("heads", 4), ("sequence", sequence),
            ("global-batch", job.batch), ("micro-batch", _MICRO_BATCH),
            ("iterations", sum(count + 1 for _, count in blocks)),
        ):  # fmt: skip
            words += [f"--{flag}", str(value)]
        return JobSpec(
            f"{EMULATED_RANK}:main", tuple(words), f"cluster-{self.name}", str(folder), RANKS_OF_NODE,
            runtime=str(runtime), nnodes=NODES, rendezvous="ft_plugins", max_restarts=0,
        )  # fmt: skip


def shapes(batch: int, chunks: int = 1, dilation: int = 1) -> tuple[EmulatedJob, ...]:
    """The paper's five shapes; with several chunks, those that can be interleaved."""
    machine = replace(A40, flops=25e12)
    jobs = [
        TrainingJob(
            f"d{dp}m{tp}p{pp}", machine, 345e6, 1024, 1024, dp, tp, pp, batch, micro_batch=_MICRO_BATCH, chunks=chunks,
            vocabulary=50257, state_bytes=float(_STATE_OF_PARAMETER),
        )
        for dp, tp, pp in PAPER_SHAPES
        if chunks == 1 or batch // dp // _MICRO_BATCH % pp == 0
    ]  # fmt: skip
    return tuple(EmulatedJob(job, dilation=dilation) for job in jobs)


@dataclass(frozen=True)
class IterationBlock:
    """Wall and processor seconds of a rank's iterations in one mode, without the first. `completed`: protected
    iterations at the end of the block."""

    mode: str
    seconds: tuple[float, ...]
    processor: tuple[float, ...]
    completed: int

    @classmethod
    def read(cls, block: dict[str, Any]) -> IterationBlock:
        """From a block in a rank's output file."""
        seconds, processor = (tuple(block[key][1:]) for key in ("seconds", "processor"))
        return cls(block["mode"], seconds, processor, block["completed"])


@dataclass(frozen=True)
class ClusterOutcome:
    """The result of a finished job. `ranks`: blocks by rank; wall seconds agree, as ranks meet in every update."""

    ranks: tuple[tuple[IterationBlock, ...], ...]
    profile: Profile
    events: tuple[tuple[Event, ...], ...]  # by node

    @property
    def blocks(self) -> tuple[IterationBlock, ...]:
        """The blocks of rank 0."""
        return self.ranks[0]

    def processor(self, mode: str) -> float:
        """Processor seconds of an iteration in a mode: the mean over ranks of the medians."""
        return statistics.mean(
            statistics.median(used for block in blocks if block.mode == mode for used in block.processor)
            for blocks in self.ranks
        )


def run(
    server: ForkServer,
    one: EmulatedJob,
    hosts: Sequence[EmulatedHost],
    folder: Path,
    blocks: Sequence[tuple[str, int]],
    seconds: float,
    *flags: str,
    slower: int = 1,
) -> ClusterOutcome:
    """Run the job to its end, within `seconds`. `slower`: factor by which links get slower after the first plan.

    Raises AssertionError with the output of a node that failed, FtError if links cannot be throttled.
    """
    if not all(host.namespace for host in hosts):
        raise FtError("cannot throttle links without network namespaces; run as root or with CAP_NET_ADMIN")
    secret = folder / "secret"
    secret.write_text("secret of an emulated job")
    secret.chmod(0o600)
    spec = one.spec(folder, blocks, folder)
    jobs: list[RunningJob] = []
    try:
        for number, host in enumerate(hosts):
            host.throttle(one.link_mbps, _BURST_BYTES, _QUEUE_MS)
            words = (
                "--baft", "--baft-link-mbps", str(one.link_mbps), "--ftp-node-name", f"n{number}", "--ftp-secret-file",
                str(secret), "--ftp-hang-seconds", "0",  # blocks without protection complete no iteration
                *flags,
            )  # fmt: skip
            fields: dict[str, Any] = {**host.fields(), "endpoint": f"{hosts[0].address}:{_PORT}"}
            jobs.append(server.start(replace(spec, node=f"n{number}", flags=words, **fields)))
        if slower > 1:
            events = jobs[0].spec.run_dir / "events.jsonl"
            wait_for(
                events, lambda lines: any(event["name"] == catalogue.BUBBLES_PLANNED.name for event in lines), _START
            )
            for host in hosts:
                # Keep the burst's duration and the queue's bytes. Otherwise a slower link would let messages after a
                # pause through faster, unless copies preceded them, and would drop queued packets.
                host.throttle(one.link_mbps / slower, _BURST_BYTES // slower, _QUEUE_MS * slower)
        wait_for_success({job.spec.node: job for job in jobs}, _START + seconds)
    except BaseException:
        with ExitStack() as cleanup:  # destroys every node even if one fails
            for job in jobs:
                cleanup.callback(destroy, job)  # SMPs outlive their job
        raise
    outputs = [json.loads((folder / f"rank-{rank:05d}.json").read_text()) for rank in range(NODES * RANKS_OF_NODE)]
    return ClusterOutcome(
        tuple(tuple(map(IterationBlock.read, each["blocks"])) for each in outputs),
        Profile(tuple(unpack(packed) for packed in outputs[0]["profile"])),
        tuple(tuple(read(job.spec.run_dir / "events.jsonl")) for job in jobs),
    )
