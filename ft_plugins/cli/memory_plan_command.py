"""`ft-plugins plan memory`: the host memory that protection of a job would claim.

In: the sizes of a model and of its parallelism, the flags of the job. Out: a table for people, JSON for programs.
Raises FtError.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

import typer

from ..config import Config
from ..errors import ConfigError
from ..planner.survival import columns, demand
from ..snapshot.segment.paths import SHM, SPARE, MemoryLimit, memory_limits, sizes_text
from ..systems.reft.dry_claim import ORDER, DryClaim, DryJob, NodeClaim, block_of, plan_claim, smaller_claims
from .pod_memory import pod_memory

GIB = float(1 << 30)
_LARGEST_GIB = 1024  # captured by a rank: a plan has its buckets one by one

AsJson = Annotated[bool, typer.Option("--json", help="one JSON object, for programs")]


class Precision(str, Enum):
    """How a model is trained; decides how many bytes of each parameter are captured."""

    bf16 = "bf16"
    fp32 = "fp32"
    pure_bf16 = "pure-bf16"

    @property
    def captured(self) -> tuple[float, str]:
        """Bytes of each parameter under Adam, and what they are. A 16-bit copy of a master is cast again."""
        return {
            Precision.bf16: (12, "fp32 master and two fp32 moments; the 16-bit copy is cast again"),
            Precision.fp32: (12, "fp32 parameter and two fp32 moments"),
            Precision.pure_bf16: (6, "bf16 parameter and two bf16 moments"),
        }[self]


def memory(
    context: typer.Context,
    parameters: Annotated[float, typer.Option(help="parameters of the model, such as 7e9")],
    precision: Annotated[
        Precision, typer.Option(help="how it is trained, by Adam; decides what is captured")
    ] = Precision.bf16,
    bytes_per_parameter: Annotated[
        float | None, typer.Option(help="bytes of each parameter that are captured, for other optimizers")
    ] = None,
    replicated: Annotated[
        bool, typer.Option("--replicated", help="data parallelism does not shard the optimizer's state")
    ] = False,
    tp: Annotated[int, typer.Option(min=1, help="tensor parallel size")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="pipeline parallel size")] = 1,
    dp: Annotated[int | None, typer.Option(min=1, help="data parallel size; unset: by --nodes")] = None,
    ranks_per_node: Annotated[int, typer.Option(min=1, help="ranks on a node")] = 8,
    nodes: Annotated[int | None, typer.Option(min=1, help="nodes of the job; unset: by --dp")] = None,
    order: Annotated[str, typer.Option(help="order of the parallel dimensions, as Megatron-LM's")] = ORDER,
    node_memory_gib: Annotated[
        float | None, typer.Option(help="GiB of a node; unset: what this machine has free now")
    ] = None,
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="print what a pod of the job needs, as parts of a manifest")
    ] = False,
    training_gib: Annotated[
        float | None,
        typer.Option(help="GiB of host memory that training takes on a node without protection, for --kubernetes"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compute the host memory that protection of a job claims on each node, and whether it fits. Flags of the job go
    after '--'."""
    flags = context.args
    config, rest = Config.from_flags(flags if {"--reft", "--baft"} & set(flags) else ["--reft", *flags])
    if rest:
        raise ConfigError(f"{rest[0]}: unknown; expected flags of the job, such as --reft-redundancy, after '--'")
    each, what = precision.captured if bytes_per_parameter is None else (bytes_per_parameter, "as given")
    job = DryJob(
        parameters, each, tp, pp, replicas(tp * pp, dp, ranks_per_node, nodes), ranks_per_node,
        sharded=not replicated, whole=averages(config), order=order,
    )  # fmt: skip
    training = training_bytes(kubernetes, training_gib)
    memory_plan = plan_memory(job, config, node_memory_gib)
    most = max(kind.most for kind in memory_plan.claim.kinds)
    pod = None if training is None else pod_memory(most, training)
    if as_json:
        print(json.dumps({"memory": memory_plan.block() | ({"kubernetes": pod.block()} if pod else {})}))
    else:
        print("\n".join(pod.lines() if pod else memory_plan.lines(what)))


def training_bytes(kubernetes: bool, training_gib: float | None) -> int | None:
    """What training itself takes in a pod; None if that is not asked for. Raises ConfigError."""
    if not kubernetes:
        if training_gib is not None:
            raise ConfigError("--training-gib: has no effect without --kubernetes; add it or drop this")
        return None
    if training_gib is None:
        raise ConfigError(
            "--kubernetes: what training itself takes is not known, and counts too; give --training-gib, the most that "
            "a run without protection has taken on a node"
        )
    demand("training_gib", training_gib, "from 0 to 1e6", 0 <= training_gib <= 1e6)
    return int(training_gib * GIB)


@dataclass(frozen=True)
class MemoryPlan:
    """What protection of a job would claim, and whether that fits."""

    job: DryJob
    claim: DryClaim
    fit: MemoryFit
    fits_most: bool  # also what may be claimed while the job trains
    less: str  # how to claim less, if it does not fit
    averaging: bool

    def block(self) -> dict[str, Any]:
        """The plan, for programs."""
        limits = [vars(one) for one in self.fit.limits]
        return block_of(self.claim) | {"fits": self.fit.fits, "fits_most": self.fits_most, "limits": limits}

    def lines(self, what: str) -> Iterator[str]:
        """The plan for people. `what`: the bytes that are captured of each parameter."""
        job = self.job
        sizes = f"tp {job.tp}, pp {job.pp}, dp {job.dp}, {job.ranks_per_node} ranks on a node"
        yield f"host memory of protection on each node; {sizes}"
        yield f"{job.parameters:g} parameters; captured of each: {job.bytes_each:g} bytes ({what})"
        yield from _table(self.claim)
        yield from _more(self.claim.kinds[0], self.fits_most)
        yield from self.fit.lines()
        if self.less:
            yield f"  to claim less: {self.less}"
        yield "  not counted: training itself, the process that ranks are forked from, and page cache"
        if self.averaging and job.sharded:
            yield "  nor parameters that averaged replicas hold apart from a sharded optimizer"


def plan_memory(job: DryJob, config: Config, node_memory_gib: float | None) -> MemoryPlan:
    """The plan of a job. Raises ConfigError."""
    if config.sync is not None:
        raise ConfigError("--sync: the state of local SGD's own is not known before a job; plan without it")
    demand("parameters", job.parameters, "from 1 to 1e15", 1 <= job.parameters <= 1e15)
    demand("bytes_per_parameter", job.bytes_each, "from 0.1 to 64", 0.1 <= job.bytes_each <= 64)
    captured = job.inventory(0).nbytes / (1 if job.sharded or job.whole else job.dp) / GIB
    if captured > _LARGEST_GIB:
        raise ConfigError(
            f"--parameters: a rank would capture {captured:.0f} GiB; expected at most {_LARGEST_GIB}: give more ranks"
        )
    claim = plan_claim(job, config)
    fit = fit_of(claim.kinds[0].total, node_memory_gib)
    fits_most = fit_of(claim.kinds[0].most, node_memory_gib).fits_later
    less = "" if fit.fits else smaller_claims(config, claim.losses)
    return MemoryPlan(job, claim, fit, fits_most, less, averages(config))


def averages(config: Config) -> bool:
    """Whether replicas may differ between two averagings."""
    return config.paft is not None and config.paft.mode != "audit"


def replicas(stages: int, dp: int | None, on_node: int, nodes: int | None) -> int:
    """The data-parallel size, of so many ranks of a replica. Raises ConfigError."""
    if dp is None and nodes is None:
        raise ConfigError("--dp, --nodes: give the data-parallel size or the number of nodes")
    ranks = (nodes or 0) * on_node if dp is None else dp * stages
    if ranks % stages:
        raise ConfigError(
            f"--nodes: {nodes} nodes of {on_node} ranks cannot be divided by tp x pp = {stages}; choose a number of "
            "nodes that can"
        )
    if nodes is not None and -(-ranks // on_node) != nodes:
        raise ConfigError(
            f"--nodes: tp x pp x dp = {ranks} ranks need {-(-ranks // on_node)} nodes of {on_node}, found {nodes}; "
            "give one of --dp and --nodes"
        )
    return ranks // stages


@dataclass(frozen=True)
class MemoryFit:
    """Whether a claim of `nbytes` fits into each of `limits`. `given`: they are those of a node that was named, not of
    this machine now."""

    nbytes: int
    limits: tuple[MemoryLimit, ...]
    given: bool

    @property
    def fits(self) -> bool:
        """Whether it fits into all of them."""
        return all(self.nbytes <= limit.free for limit in self.limits)

    @property
    def fits_later(self) -> bool:
        """Whether it is claimed as well while the job trains, if it is needed: a part of the memory is left then."""
        spare = min((limit.nbytes for limit in self.limits if limit.where != str(SHM)), default=0) // SPARE
        return all(self.nbytes + (spare if limit.where != str(SHM) else 0) <= limit.free for limit in self.limits)

    def lines(self) -> Iterator[str]:
        """For each limit, whether the claim fits."""
        for limit in self.limits:
            verdict = "fits" if self.nbytes <= limit.free else "does not fit"
            needed, free, whole = sizes_text(self.nbytes, limit.free, limit.nbytes)
            now = "" if self.given else f", of which {free} are free now"
            yield f"  {verdict}: {self.nbytes / limit.nbytes:.0%} of {whole} ({limit.where}){now}"
            if verdict != "fits" and not self.given:
                yield f"    {limit.remedy}"
        if self.given and self.limits[0].nbytes < 2 * self.nbytes and self.fits:
            yield f"  {SHM} must have {needed}: by default it may take half of a node's memory, so enlarge it"


def fit_of(nbytes: int, node_memory_gib: float | None) -> MemoryFit:
    """Whether a claim fits into a node of that memory, or into this machine as it is now. Raises ConfigError."""
    if node_memory_gib is None:
        return MemoryFit(nbytes, tuple(limit for limit in memory_limits() if limit.nbytes), False)
    if not 0.001 <= node_memory_gib <= 1e6:
        raise ConfigError(f"--node-memory-gib: expected a number from 0.001 to 1e6, found {node_memory_gib}")
    size = int(node_memory_gib * GIB)
    return MemoryFit(nbytes, (MemoryLimit("memory of a node", size, size, ""),), True)


def _table(claim: DryClaim) -> Iterator[str]:
    largest = claim.kinds[0]
    rows = [("", "GiB", "times what is captured")]
    for what, nbytes in (
        ("captured by one version", largest.captured),
        (f"{largest.slots} slots of snapshots", largest.snapshots),
        ("parity that ranks compute from their replicas", largest.own_parity),
        ("parity or copies of other nodes", largest.store),
        ("total", largest.total),
    ):
        rows.append((what, f"{nbytes / GIB:.2f}", f"{nbytes / largest.captured:.2f}"))
    yield from columns(rows)
    if len(claim.kinds) > 1:
        yield f"  these are figures of the node that claims most; others claim {claim.kinds[-1].total / GIB:.2f} GiB"
    if claim.losses:
        yield f"  of each redundancy group any {claim.losses} node{'s' * (claim.losses > 1)} may be lost"
    else:
        reason = f": {claim.unprotected}" if claim.unprotected else ""
        yield f"  a lost node is not survived from memory{reason}"


def _more(claim: NodeClaim, fits: bool) -> Iterator[str]:
    """What is claimed when it is needed. `fits`: whether there is room for all of it."""
    if claim.more:
        yield (
            f"  up to {claim.most_slots} slots, {claim.most / GIB:.2f} GiB ({claim.most / claim.captured:.2f} times), "
            "if versions are still being sent when the next one is captured"
        )
        if not fits:
            yield "    not all of that fits: the job then goes on with fewer slots (see --reft-slots)"
