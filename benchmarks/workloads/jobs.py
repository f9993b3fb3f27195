"""Jobs for the planner: those of the BAFT paper, and a family from 16 to 16,384 ranks.

A job has sizes and speeds, which determine the times of a pass and the bytes of a message and of the state:

    forward      2 x parameters of a stage x tokens of a microbatch / (speed of a rank x tp); backward twice that, half
                 of it for weights (without recomputation). Layers are spread evenly over the stages; the last stage
                 also has the head: vocabulary x hidden
    message      tokens of a microbatch x hidden x 2 bytes / tp, through the link of a rank (the node's link divided by
                 its ranks, if the next stage is on another node)
    state        of a rank: `state_bytes` x parameters / (pp x tp x dp), its part of the replicated state or its shard

The paper's testbed has 4 nodes of 4 A40, 10 Gb/s between nodes (shared by their ranks) and 31.5 GB/s within. It does
not state the sizes of its models or the speed of an A40; assumed are 1.5 B parameters and 1,024 tokens for GPT-2, 512
tokens and 340 M or 1.27 B parameters for Bert-large and Bert-exlarge, and 40 Tflop/s. The family has nodes of 8 H100
with 400 Gb/s and 500 Tflop/s in a pass each. The largest job is the training of Llama 3 405B (The Llama 3 Herd of
Models: tp 8, pp 16, dp 128, 16 M tokens per batch, storage of 2 TB/s), with its failures: 419 in 54 days, 63 of them in
software.

Invariant: a job has dp x tp x pp ranks; the ranks of a tensor-parallel group, then of a data-parallel group, are
adjacent.

In: sizes. Out: `TrainingJob`, and from it `Pipeline`, `Times`, `Cluster`, `Costs`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ft_plugins.planner.intervals import Costs
from ft_plugins.planner.survival import Cluster
from workloads.pipelines.pipeline import Pipeline, PipelineSchedule
from workloads.pipelines.simulate import PipelineLink, Times

GIB = float(1 << 30)
FULL_STATE = 12.0  # bytes per parameter: fp32 master and two moments; bf16 copies are rebuilt
WEIGHTS_ONLY = 4.0  # fp32 parameters, which the paper sends; not enough to resume exactly
LLAMA3_INTERRUPTIONS, LLAMA3_SOFTWARE, LLAMA3_DAYS, LLAMA3_RANKS = 419, 63, 54, 16384
RANK_FAILURES = LLAMA3_INTERRUPTIONS / LLAMA3_DAYS / LLAMA3_RANKS  # a day
SOFTWARE_SHARE = LLAMA3_SOFTWARE / LLAMA3_INTERRUPTIONS


@dataclass(frozen=True)
class Machine:
    """The hardware of a cluster. Per second: flop of a rank, bytes of a link, bytes of storage for the cluster."""

    node_ranks: int
    flops: float
    node_link: float
    inner_link: float
    storage: float
    latency: float = 20e-6


A40 = Machine(node_ranks=4, flops=40e12, node_link=10e9 / 8, inner_link=31.5e9, storage=10e9 / 8)
H100 = Machine(node_ranks=8, flops=500e12, node_link=8 * 50e9, inner_link=400e9, storage=2e12 / LLAMA3_RANKS)


@dataclass(frozen=True)
class TrainingJob:
    """A 3D-parallel training job. `batch` is in sequences. With H100, `storage` is per rank."""

    name: str
    machine: Machine
    parameters: float
    hidden: int
    sequence: int
    dp: int
    tp: int
    pp: int
    batch: int
    micro_batch: int = 1
    chunks: int = 1
    vocabulary: int = 128256
    state_bytes: float = FULL_STATE

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def nodes(self) -> int:
        return self.ranks // self.machine.node_ranks

    @property
    def stages_per_node(self) -> int:
        """Pipeline ranks that share a node."""
        return max(1, self.machine.node_ranks // (self.tp * self.dp))

    @property
    def rank_bytes(self) -> float:
        """Bytes that a rank sends per checkpoint."""
        return self.state_bytes * self.parameters / self.ranks

    @property
    def rank_link(self) -> float:
        """Bytes per second to another node while all ranks of the node send."""
        return self.machine.node_link / self.machine.node_ranks

    def pipeline(self, schedule: PipelineSchedule | None = None) -> Pipeline:
        """One of its pipelines, with the job's own schedule or another one."""
        count = self.batch // self.dp // self.micro_batch
        if schedule is None:
            schedule = PipelineSchedule.INTERLEAVED if self.chunks > 1 else PipelineSchedule.ONE_F_ONE_B
        if schedule is PipelineSchedule.INTERLEAVED:
            return Pipeline(schedule, self.pp, count, max(2, self.chunks), overlap=True)
        return Pipeline(schedule, self.pp, count)

    def times(self, pipeline: Pipeline) -> Times:
        """The times of the passes and messages of a pipeline."""
        tokens = self.micro_batch * self.sequence
        head = float(self.vocabulary * self.hidden)
        parameters = [(self.parameters - head) / pipeline.virtual_stages] * pipeline.virtual_stages
        parameters[-1] += head
        forward = tuple(2 * part * tokens / (self.machine.flops * self.tp) for part in parameters)
        backward = tuple(2 * seconds for seconds in forward)
        outer, inner = (
            PipelineLink(self.machine.latency, self.rank_link),
            PipelineLink(self.machine.latency, self.machine.inner_link),
        )
        share = self.stages_per_node
        links = tuple(outer if (rank + 1) % share == 0 else inner for rank in range(self.pp))
        nbytes = 2.0 * tokens * self.hidden / self.tp
        return Times(forward, backward, forward, links=links, message_bytes=nbytes)

    def cluster(self) -> Cluster:
        """Its failure rates. Sharding groups have at most 8 nodes."""
        rate = RANK_FAILURES * self.machine.node_ranks
        group = next(size for size in (8, 4, 2) if self.nodes % size == 0)
        return Cluster(self.nodes, group, rate * (1 - SOFTWARE_SHARE), rate * SOFTWARE_SHARE)

    def costs(self, iteration_seconds: float, snapshot_seconds: float = 0.05) -> Costs:
        """The costs of saving its state."""
        storage = self.machine.storage * (self.ranks if self.machine is H100 else 1)
        return Costs(
            state_gib=self.rank_bytes * self.machine.node_ranks / GIB,
            iteration_seconds=iteration_seconds,
            snapshot_seconds=snapshot_seconds,
            link_gib_per_second=self.machine.node_link / GIB,
            storage_gib_per_second=storage / GIB,
        )


def _paper(dp: int, tp: int, pp: int, batch: int, model: str = "gpt2") -> TrainingJob:
    parameters, hidden, sequence, vocabulary = PAPER_MODELS[model]
    return TrainingJob(
        f"d{dp}m{tp}p{pp}", A40, parameters, hidden, sequence, dp, tp, pp, batch, micro_batch=8, vocabulary=vocabulary
    )


PAPER_MODELS = {  # parameters, hidden, tokens, vocabulary
    "gpt2": (1.5e9, 1600, 1024, 50257),
    "bert_large": (0.34e9, 1024, 512, 30522),
    "bert_exlarge": (1.27e9, 2048, 512, 30522),
}
PAPER_SHAPES = ((2, 2, 4), (4, 1, 4), (1, 4, 4), (2, 1, 8), (1, 2, 8))  # dp, tp, pp
PAPER = {batch: tuple(_paper(*shape, batch) for shape in PAPER_SHAPES) for batch in (128, 64)}
BERT = {
    model: tuple(_paper(*shape, batch, model) for batch in PAPER for shape in PAPER_SHAPES)
    for model in ("bert_large", "bert_exlarge")
}

FAMILY = (
    TrainingJob("16", H100, 8e9, 4096, 8192, 2, 2, 4, 64),
    TrainingJob("64", H100, 8e9, 4096, 8192, 4, 4, 4, 128, chunks=2),
    TrainingJob("256", H100, 70e9, 8192, 8192, 8, 4, 8, 256, chunks=2),
    TrainingJob("1024", H100, 70e9, 8192, 8192, 16, 8, 8, 512, chunks=5),
    TrainingJob("4096", H100, 405e9, 16384, 8192, 32, 8, 16, 1024, chunks=4),
    TrainingJob("16384", H100, 405e9, 16384, 8192, 128, 8, 16, 2048, chunks=4),
)
