"""The place of every rank in the job: rank <-> (tp, cp, dp, pp) and (etp, ep, edp, pp), and its groups.

Invariant: groups and their order equal those of `megatron.core.parallel_state.initialize_model_parallel` for the same
sizes and `order`; every group is ascending. Pure arithmetic on strides: a query about one rank costs its group's size,
one about the job a single pass over the ranks; nothing is quadratic, so 16,384 ranks are not a problem.

A rank has two addresses. Dense layers (attention, MLP, embeddings) are laid out over tp, cp, dp, pp; expert layers over
etp, ep, edp, pp, with etp the expert tensor parallel size (default tp) and edp = world size / (etp ep pp). Both give a
rank the same pipeline stage.

In: parallel sizes, Megatron's order string. Out: `Topology`, read by adapters (replica sets), systems.reft (sharding
groups) and all code that places bytes on nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from ..errors import TopologyError

AXES = ("tp", "pp", "dp", "ep", "cp")  # axes missing in `order` are appended in this order, as Megatron does


@dataclass(frozen=True)
class Coords:
    """The address of a rank, each index from 0. tp, pp, dp, cp place dense layers; etp, ep, edp (with pp) experts."""

    tp: int
    pp: int
    dp: int
    cp: int = 0
    ep: int = 0
    etp: int = 0
    edp: int = 0


@dataclass(frozen=True)
class Axis:
    """One parallel dimension of a layout: neighbours along it are `stride` ranks apart."""

    name: str
    size: int
    stride: int

    def index(self, rank: int) -> int:
        """The index of `rank` along this axis."""
        return rank // self.stride % self.size


@dataclass(frozen=True)
class Topology:
    """The job's ranks. `vpp`: virtual stages per pipeline rank; `etp` defaults to tp.

    Raises TopologyError for sizes or an order that cannot be laid out, as Megatron does.
    """

    tp: int
    pp: int
    dp: int
    cp: int = 1
    ep: int = 1
    vpp: int = 1
    order: str = "tp-cp-ep-dp-pp"
    etp: int | None = None

    def __post_init__(self) -> None:
        sizes = {"tp": self.tp, "pp": self.pp, "dp": self.dp, "cp": self.cp, "ep": self.ep, "vpp": self.vpp}
        for name, size in (sizes | {"etp": self.expert_tp}).items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise TopologyError(f"{name}={size!r} is not a parallel size: expected an integer of at least 1")
        self._check_order(sizes)
        if self.vpp > 1 and self.pp == 1:
            raise TopologyError(f"vpp={self.vpp} needs pipeline stages, but pp=1: set pp above 1 or vpp to 1")
        self._check_experts()

    def _check_order(self, sizes: Mapping[str, int]) -> None:
        named = self.order.lower().split("-")
        unknown = [name for name in named if name not in AXES]
        if unknown or len(set(named)) != len(named):
            raise TopologyError(f"order '{self.order}' must name each of {', '.join(AXES)} at most once, joined by '-'")
        for name in AXES:
            if name not in named and sizes[name] != 1:
                raise TopologyError(f"order '{self.order}' leaves out {name}, whose size is {sizes[name]}: add it")

    def _check_experts(self) -> None:
        expert = self.expert_tp * self.ep * self.pp
        if self.world_size % expert:
            raise TopologyError(
                f"{self.world_size} ranks are not divisible by etp={self.expert_tp} x ep={self.ep} x pp={self.pp} "
                f"= {expert} for the experts; choose sizes whose product divides the number of ranks"
            )
        if self.pp == 1:
            return
        dense, sparse = self._axis("pp", expert=False), self._axis("pp", expert=True)
        last = self.order.lower().endswith("pp")
        if dense.stride != sparse.stride or not (last or self.expert_dp == self.dp):
            raise TopologyError(
                f"order '{self.order}' places the pipeline stages of dense layers {dense.stride} ranks apart and "
                f"those of experts {sparse.stride}, with dp={self.dp} and expert dp={self.expert_dp}; each pair must "
                f"be equal: end the order with pp, or choose ep x etp = tp x cp"
            )

    # sizes

    @property
    def expert_tp(self) -> int:
        """The tensor parallel size of experts."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_dp(self) -> int:
        """The number of replicas of each expert."""
        return self.world_size // (self.expert_tp * self.ep * self.pp)

    @property
    def world_size(self) -> int:
        """The number of ranks. Experts are spread over the same ranks, so ep is not a factor."""
        return self.tp * self.pp * self.dp * self.cp

    # addresses

    @cached_property
    def _dense(self) -> tuple[Axis, ...]:
        return self._layout({"tp": self.tp, "cp": self.cp, "ep": 1, "dp": self.dp, "pp": self.pp})

    @cached_property
    def _sparse(self) -> tuple[Axis, ...]:
        return self._layout({"tp": self.expert_tp, "cp": 1, "ep": self.ep, "dp": self.expert_dp, "pp": self.pp})

    def _layout(self, sizes: Mapping[str, int]) -> tuple[Axis, ...]:
        named = self.order.lower().split("-")
        names = [*named, *(name for name in AXES if name not in named)]
        strides = [prod(sizes[before] for before in names[:place]) for place in range(len(names))]
        return tuple(Axis(name, sizes[name], stride) for name, stride in zip(names, strides, strict=True))

    def dense_axes(self, *names: str) -> tuple[Axis, ...]:
        """The axes of dense layers with these names: tp, cp, dp or pp."""
        return tuple(self._axis(name, expert=False) for name in names)

    def _axis(self, name: str, expert: bool) -> Axis:
        return next(axis for axis in (self._sparse if expert else self._dense) if axis.name == name)

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise TopologyError(
                f"rank {rank} is not in this job of {self.world_size} ranks (0 to {self.world_size - 1})"
            )
        return rank

    def coords(self, rank: int) -> Coords:
        """The address of `rank`. Raises TopologyError for a rank outside of the job."""
        self._checked(rank)
        dense = {axis.name: axis.index(rank) for axis in self._dense}
        sparse = {axis.name: axis.index(rank) for axis in self._sparse}
        return Coords(dense["tp"], dense["pp"], dense["dp"], dense["cp"], sparse["ep"], sparse["tp"], sparse["dp"])

    # groups

    def group(self, axes: str, rank: int, expert: bool = False) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along `axes` ('dp-cp', 'tp-pp', ...), ascending, `rank` included.

        With `expert`, or if `axes` names ep, axes are those of the expert layout (tp is etp and dp is edp).
        Raises TopologyError for an axis that the layout does not have.
        """
        self._checked(rank)
        names = axes.split("-")
        expert = expert or "ep" in names
        known = ("tp", "ep", "dp", "pp") if expert else ("tp", "cp", "dp", "pp")
        if len(set(names)) != len(names) or any(name not in known for name in names):
            raise TopologyError(
                f"'{axes}' is not a group of {'expert' if expert else 'dense'} layers: join {', '.join(known)} by '-'"
            )
        ranks = [rank]
        for axis in self._sparse if expert else self._dense:
            if axis.name in names:
                base = -axis.index(rank) * axis.stride
                ranks = [at + base + axis.stride * index for index in range(axis.size) for at in ranks]
        return tuple(ranks)

    def replicas(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same dense parameters as `rank`: DP x CP at its tp and pp."""
        return self.group("dp-cp", rank)

    def expert_replicas(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same expert parameters as `rank`: expert data parallelism at its etp, ep and pp."""
        return self.group("dp", rank, expert=True)

    def sharding_groups(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """The sharding groups, by (pp, tp): the ranks, ascending, that share the capture of one state."""
        members: dict[tuple[int, int], list[int]] = {(p, t): [] for p in range(self.pp) for t in range(self.tp)}
        tensor, pipeline = self._axis("tp", expert=False), self._axis("pp", expert=False)
        for rank in range(self.world_size):
            members[pipeline.index(rank), tensor.index(rank)].append(rank)
        return {key: tuple(ranks) for key, ranks in members.items()}
