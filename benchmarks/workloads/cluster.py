"""The emulated cluster: 4 nodes of 4 ranks in the shapes that BAFT was measured in, links throttled to scale.

How it is scaled. The paper's testbed: 4 servers of 4 A40, 10 Gb/s between them; batches of 128 and of 64 with 8 to a
microbatch. It names GPT-2 and not its size, and what it sends are parameters: assumed are GPT-2 of 345 M, 1,024
tokens, 25 Tflop/s of a rank in a pass (what lets iterations take 0.6 to 1.9 s; the paper loses 0.6 to 5.5 s with 1 to 3
iterations), and 2 bytes a parameter. From these follow forward and backward of each stage (workloads.jobs; the last one
has the head), which stages sleep for; and with SCALE, by which both are divided,

    link of a node    10 Gb/s / SCALE      bytes of a rank    2 x parameters / ranks / SCALE

so that transfer time over bubble time is the testbed's. What a rank sends there are 12 bytes for each of fewer
parameters: the whole state of a float32 Adam. A *whole* state of mixed precision at the testbed's size is six times as
much, and takes six times as many iterations.

Time can be stretched besides (`dilation`): passes take so many times as long and links carry so many times less, so
that transfer over bubble stays what it is. For what is not emulated, a schedule's Python, messages, SMPs, takes the
processor as long as ever, and here 16 ranks and 4 SMPs share a core or two where the testbed has many for each.
Stretched twice, sixteen ranks on two cores are still four times as crowded as ranks with a core each; stretched eight
times they would be as good as those. As what a snapshot takes of the processor is the same in every shape, shapes are
best compared where their iterations take about as long (`lasting`).

Not to scale: messages between stages, whose size the paper does not give. They are real, of MESSAGE_BYTES each.

Invariant: ranks of a node share a network namespace and its throttled link. In: shape, batch, schedule. Out: a running
job, and what its ranks and SMPs have written.
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

from ft_plugins.bubbles.timeline_values import unpack
from ft_plugins.errors import FtError
from ft_plugins.events import Event, catalogue, read
from ft_plugins.model.timeline import Profile
from ft_plugins.planner.pipeline import Pipeline
from ft_plugins.planner.simulate import PipelineLink, simulate
from ft_plugins.testing import megatron_runs
from ft_plugins.testing.emulated_nodes import EmulatedHost, destroy
from ft_plugins.testing.forkserver import ForkServer, JobSpec, RunningJob
from ft_plugins.testing.job_control import wait_for
from workloads import emulated_rank
from workloads.emulated_rank import StageSpec
from workloads.jobs import A40, PAPER_SHAPES, TrainingJob

NODES, RANKS_OF_NODE = 4, 4
SCALE = 50
LINK_MBPS = 10_000 // SCALE
MESSAGE_BYTES = 32 << 10
EMULATED_RANK = Path(emulated_rank.__file__).resolve()  # by its file: the fork server does not know `workloads`
PRELOAD = (*megatron_runs.PRELOAD, str(EMULATED_RANK))
_HIDDEN, _MICRO_BATCH = 64, 8
_STATE_OF_PARAMETER = 12  # bytes: float32 parameter, two moments
_PORT = 29750
_BURST_BYTES, _QUEUE_MS = 64 << 10, 100
_START = 120.0  # seconds in addition to the iterations


@dataclass(frozen=True)
class EmulatedJob:
    """A job on the cluster. `job` is the one of the testbed that it stands for; its second stage may be disturbed."""

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

    def lasting(self, seconds: float) -> EmulatedJob:
        """Stretched so many times that the passes of an iteration take about `seconds`."""
        times = replace(self.job.times(self.pipeline), links=(PipelineLink(),))
        own = max(timeline.seconds for timeline in simulate(self.pipeline, times))
        return replace(self, dilation=max(1, round(seconds / own)))

    @property
    def link_mbps(self) -> float:
        """Of a node."""
        return LINK_MBPS / self.dilation

    @cached_property
    def stages(self) -> tuple[StageSpec, ...]:
        """By pipeline rank."""
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
        """The job of one node; which one, `start` says."""
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
            runtime=str(runtime), nnodes=NODES, rendezvous="ft_plugins",
        )  # fmt: skip


def shapes(batch: int, chunks: int = 1, dilation: int = 1) -> tuple[EmulatedJob, ...]:
    """The paper's five, those that can be interleaved where there are several chunks."""
    machine = replace(A40, flops=25e12)
    found = [
        TrainingJob(
            f"d{dp}m{tp}p{pp}", machine, 345e6, 1024, 1024, dp, tp, pp, batch, micro_batch=_MICRO_BATCH, chunks=chunks,
            vocabulary=50257, state_bytes=2.0,
        )
        for dp, tp, pp in PAPER_SHAPES
        if chunks == 1 or batch // dp // _MICRO_BATCH % pp == 0
    ]  # fmt: skip
    return tuple(EmulatedJob(job, dilation=dilation) for job in found)


@dataclass(frozen=True)
class IterationBlock:
    """Seconds of iterations in one mode, without the one before which the mode was changed; those of the processor that
    a rank's process took in them. `completed` iterations had been protected at its end."""

    mode: str
    seconds: tuple[float, ...]
    processor: tuple[float, ...]
    completed: int

    @classmethod
    def read(cls, written: dict[str, Any]) -> IterationBlock:
        """From what a rank has written."""
        seconds, processor = (tuple(written[key][1:]) for key in ("seconds", "processor"))
        return cls(written["mode"], seconds, processor, written["completed"])


@dataclass(frozen=True)
class ClusterOutcome:
    """Of a job that is over. `blocks` by rank; the seconds of one are those of all, which meet in every update."""

    ranks: tuple[tuple[IterationBlock, ...], ...]
    profile: Profile
    events: tuple[tuple[Event, ...], ...]  # by node

    @property
    def blocks(self) -> tuple[IterationBlock, ...]:
        """Those of rank 0."""
        return self.ranks[0]

    def processor(self, mode: str) -> float:
        """Seconds of the processor that an iteration takes of a rank in this mode: the mean over ranks of medians."""
        return statistics.mean(
            statistics.median(used for block in blocks if block.mode == mode for used in block.processor)
            for blocks in self.ranks
        )


def run(
    server: ForkServer,
    one: EmulatedJob,
    places: Sequence[EmulatedHost],
    folder: Path,
    blocks: Sequence[tuple[str, int]],
    seconds: float,
    *flags: str,
    slower: int = 1,
) -> ClusterOutcome:
    """Run the job to its end, which takes `seconds` at most. Raises AssertionError with the output of a node that has
    not ended in order, FtError where links cannot be throttled.

    `slower`: from the first plan on links carry so many times less than what was planned with.
    """
    if not all(place.namespace for place in places):
        raise FtError("links cannot be throttled without network namespaces: run it as root, or with CAP_NET_ADMIN")
    secret = folder / "secret"
    secret.write_text("what the nodes of this job know")
    secret.chmod(0o600)
    spec = one.spec(folder, blocks, folder)
    jobs: list[RunningJob] = []
    try:
        for number, place in enumerate(places):
            place.throttle(one.link_mbps, _BURST_BYTES, _QUEUE_MS)
            words = (
                "--baft", "--baft-link-mbps", str(one.link_mbps), "--ftp-node-name", f"n{number}", "--ftp-secret-file",
                str(secret), *flags,
            )  # fmt: skip
            fields: dict[str, Any] = {**place.fields(), "endpoint": f"{places[0].address}:{_PORT}"}
            jobs.append(server.start(replace(spec, node=f"n{number}", flags=words, **fields)))
        if slower > 1:
            events = jobs[0].spec.run_dir / "events.jsonl"
            wait_for(
                events, lambda lines: any(event["name"] == catalogue.BUBBLES_PLANNED.name for event in lines), _START
            )
            for place in places:
                # as short a burst and as many bytes of queue as before: else messages that follow a silence would be
                # the faster the slower the link is, unless copies went before them, and what waits would be dropped
                place.throttle(one.link_mbps / slower, _BURST_BYTES // slower, _QUEUE_MS * slower)
        for job in jobs:
            outcome = job.wait(_START + seconds)
            assert outcome["status"] == "succeeded", job.tail()
    except BaseException:
        with ExitStack() as taken_down:  # all of them, also where one cannot be
            for job in jobs:
                taken_down.callback(destroy, job)  # SMPs outlive their job
        raise
    written = [json.loads((folder / f"rank-{rank:05d}.json").read_text()) for rank in range(NODES * RANKS_OF_NODE)]
    return ClusterOutcome(
        tuple(tuple(map(IterationBlock.read, each["blocks"])) for each in written),
        Profile(tuple(unpack(packed) for packed in written[0]["profile"])),
        tuple(tuple(read(job.spec.run_dir / "events.jsonl")) for job in jobs),
    )
