"""The part of `ft-plugins plan` that starts with --memory: the host memory that protection of a job would claim.

In: the sizes of a model and of its parallelism, the flags of the job. Out: a table for people, JSON for programs.
Raises FtError.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from ..config import Config
from ..errors import ConfigError
from ..planner.survival import columns, demand
from ..snapshot.segment.room import SHM, SPARE, MemoryLimit, memory_limits, sizes_text
from ..systems.reft.dry_claim import DryClaim, DryJob, NodeClaim, block_of, plan_claim
from ..systems.reft.memory_advice import smaller_claims

OWN = (
    "memory parameters precision bytes_per_parameter replicated tp pp dp ranks_per_node order node_memory_gib"
).split()
SHARED = ("nodes", "as_json")  # with the rest of `plan`
GIB = float(1 << 30)
_LARGEST_GIB = 1024  # captured by a rank: a plan has its buckets one by one


class Precision(str, Enum):
    """How a model is trained; decides how many bytes of each parameter are captured."""

    bf16 = "bf16"
    fp32 = "fp32"
    pure_bf16 = "pure-bf16"

    @property
    def captured(self) -> tuple[int, str]:
        """Bytes of each parameter under Adam, and what they are. A 16-bit copy of a master is cast again."""
        return {
            Precision.bf16: (12, "fp32 master and two fp32 moments; the 16-bit copy is cast again"),
            Precision.fp32: (12, "fp32 parameter and two fp32 moments"),
            Precision.pure_bf16: (6, "bf16 parameter and two bf16 moments"),
        }[self]


@dataclass(frozen=True)
class MemoryOptions:
    """The options of the command line. `nodes`, `dp`: 0 for not given; one follows from the other."""

    parameters: float
    precision: Precision
    bytes_per_parameter: float | None
    replicated: bool
    tp: int
    pp: int
    dp: int
    ranks_per_node: int
    nodes: int
    order: str
    node_memory_gib: float | None

    def replicas(self) -> int:
        """The data-parallel size. Raises ConfigError."""
        for name in ("tp", "pp", "ranks_per_node"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')}: expected an integer >= 1, found {getattr(self, name)}")
        if self.dp < 1 and self.nodes < 1:
            raise ConfigError("--dp, --nodes: give the data-parallel size or the number of nodes")
        ranks = (self.dp * self.tp * self.pp) if self.dp > 0 else self.nodes * self.ranks_per_node
        if self.dp < 1 and ranks % (self.tp * self.pp):
            raise ConfigError(
                f"--nodes: {self.nodes} nodes of {self.ranks_per_node} ranks cannot be divided by tp x pp = "
                f"{self.tp * self.pp}; choose a number of nodes that can"
            )
        if self.nodes > 0 and -(-ranks // self.ranks_per_node) != self.nodes:
            raise ConfigError(
                f"--nodes: tp x pp x dp = {ranks} ranks need {-(-ranks // self.ranks_per_node)} nodes of "
                f"{self.ranks_per_node}, found {self.nodes}; give one of --dp and --nodes"
            )
        return ranks // (self.tp * self.pp)


def require_consistent(names: Sequence[str], flags: Sequence[str]) -> None:
    """Raises ConfigError for options that have no effect next to --memory, or without it; `flags`: those of the job."""
    if "memory" not in names:
        alone = [_flag(name) for name in names if name in OWN]
        if alone or flags:
            what = ", ".join(alone) or f"{flags[0]!r}"
            raise ConfigError(f"{what}: no effect without --memory; add it, or drop {what}")
        return
    others = [_flag(name) for name in names if name not in (*OWN, *SHARED)]
    if others:
        raise ConfigError(
            f"--memory plans host memory alone: {', '.join(others)}: no effect; drop them; flags of the job go after "
            "'--', such as -- --reft-redundancy raim6"
        )
    if "parameters" not in names:
        raise ConfigError("--parameters: missing; give the number of parameters of the model, such as 7e9")


def plan_memory(options: MemoryOptions, flags: Sequence[str], as_json: bool) -> None:
    """Print what each node would claim, and whether it fits. Raises FtError."""
    config, rest = Config.from_flags(list(flags) if {"--reft", "--baft"} & set(flags) else ["--reft", *flags])
    if rest:
        raise ConfigError(f"{rest[0]}: unknown; expected flags of the job, such as --reft-redundancy, after '--'")
    if config.sync is not None:
        raise ConfigError("--sync: the state of local SGD's own is not known before a job; plan without it")
    each: float
    each, what = options.precision.captured
    if options.bytes_per_parameter is not None:
        each, what = options.bytes_per_parameter, "as given"
    demand("parameters", options.parameters, "from 1 to 1e15", 1 <= options.parameters <= 1e15)
    demand("bytes_per_parameter", each, "from 0.1 to 64", 0.1 <= each <= 64)
    averaging = config.paft is not None and config.paft.mode != "audit"
    job = DryJob(
        options.parameters, each, options.tp, options.pp, options.replicas(), options.ranks_per_node,
        sharded=not options.replicated, whole=averaging, order=options.order,
    )  # fmt: skip
    captured = job.inventory(0).nbytes / (1 if job.sharded or job.whole else job.dp) / GIB
    if captured > _LARGEST_GIB:
        raise ConfigError(
            f"--parameters: a rank would capture {captured:.0f} GiB; expected at most {_LARGEST_GIB}: give more ranks"
        )
    claim = plan_claim(job, config)
    fit = fit_of(claim.kinds[0].total, options.node_memory_gib)
    fits_most = fit_of(claim.kinds[0].total + claim.kinds[0].more, options.node_memory_gib).fits_later
    if as_json:
        fits = {"fits": fit.fits, "fits_most": fits_most, "limits": [vars(one) for one in fit.limits]}
        print(json.dumps({"memory": block_of(claim) | fits}))
        return
    head = f"host memory of protection on each node; tp {job.tp}, pp {job.pp}, dp {job.dp}, {job.ranks_per_node} ranks "
    head += f"on a node\n{options.parameters:g} parameters; captured of each: {each:g} bytes ({what})"
    notes = ["not counted: training itself, processes that stand by for a restart, and page cache"]
    if averaging and job.sharded:
        notes.append("nor parameters that averaged replicas hold apart from a sharded optimizer")
    less = "" if fit.fits else smaller_claims(config, claim.losses)
    lines = [head, *_table(claim), *_more(claim.kinds[0], fits_most), *fit.lines()]
    lines += [f"  to claim less: {less}"] if less else []
    print("\n".join([*lines, *(f"  {note}" for note in notes)]))


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
        most = claim.total + claim.more
        yield (
            f"  up to {claim.most_slots} slots, {most / GIB:.2f} GiB ({most / claim.captured:.2f} times), if versions "
            "are still being sent when the next one is captured"
        )
        if not fits:
            yield "    not all of that fits: the job then goes on with fewer slots (see --reft-slots)"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
