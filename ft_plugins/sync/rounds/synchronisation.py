"""Synchronise replicas module by module. Carries out a policy's rules; decides nothing by itself.

    remember          live -> anchors: the values that replicas start from together
    exchange          live values of all replicas -> the target of one module                          (collective)
    step              outer step from anchor to target: the result, which `apply` would be the first to need
    apply             the result becomes live

Each of the M ranks of a sync group owns 1/M of the coordinates of a bucket, its part: it receives the others' values
of its part, combines them, and sends the result to all. So a bucket takes two exchanges. Norms need no exchange of
their own in the sync group, because they travel with the buckets:

    values, first bucket     with the norm of the replica's change of the module (the pseudo-gradient): all members
                             judge the replicas by these norms
    results, every bucket    if changes are clipped, with the sum of squares of the mean change in the sender's part:
                             all members add up these sums in rank order, and derive the same clip factor

If several ranks of a replica hold parts of a module, they also add up its squares among themselves: those of the norm
before the exchanges, those of the clip factor after them. Without a penalty the norm is 0, or NaN if a value is not
finite: with every policy a replica with such a value is left out.

Invariant: after `apply` all replicas hold the same bits, whatever they held before; so do their anchors and momentum.
Of the methods, only `apply` writes live tensors, only `step` and what calls it write momentum, and only these and
`remember` write anchors; a restore writes `states` before training. `exchange` may run behind forward and backward; so
may `step` where no version of the state before is still to be captured.

In: modules, live tensors, rules. Out: changed tensors; judgements. Fault points, each with the module:

    sync.exchange   its exchange begins     sync.apply   anchors and momentum have moved, parameters have not"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, nan, sqrt

import torch

from ...base import faults
from ..averaging.aggregate import Aggregate, aggregate, weighted
from ..averaging.averager import LiveTensors, flat, read, write
from ..buckets import ItemPiece, ReplicaBucket
from ..links import Links
from .modules import GroupPlan, ModulePlan, Ranks
from .outer import OuterRules, outer_step
from .penalty import NO_PENALTY, Judgement, NormStatistics, PenaltyRules, clip_factor, judge


@dataclass
class ModuleState:
    """The anchors and the outer momentum of one module, by item, flat, in fp32 (float64 for float64 parameters); no
    anchors if the rules need none."""

    anchors: dict[str, torch.Tensor]
    momentum: dict[str, torch.Tensor]
    statistics: list[NormStatistics] = field(default_factory=list)  # by member of the sync group


@dataclass(frozen=True)
class SynchronisationRules:
    """How replicas are combined. `anchored`: whether the values of the last synchronisation are kept; without them the
    mean itself is applied, and a module of which no replica is finite stays as it is. `clips`: whether the norm of a
    module's mean change is bounded."""

    outer: OuterRules
    penalty: PenaltyRules | None
    anchored: bool = True

    def __post_init__(self) -> None:
        if not self.anchored and (self.penalty is not None or not self.outer.takes_target):
            raise ValueError("the change since the last synchronisation is unknown without anchors")

    @property
    def clips(self) -> bool:
        return self.penalty is not None and self.penalty.clip != float("inf")


class Synchronisation:
    """Synchronises the modules of one rank. `offload`: anchors and momentum are in host memory, and on the device one
    bucket at a time, while it is exchanged and again while it is applied. What `exchange` has computed is on the device
    until `apply`: as many bytes as the module's parameters."""

    def __init__(
        self, modules: Sequence[ModulePlan], groups: GroupPlan, links: Links, replica: Links, tensors: LiveTensors,
        rules: SynchronisationRules, offload: bool = False,
    ) -> None:  # fmt: skip
        """Claim memory. `links`: within the sync group; `replica`: within this rank's copy of the model."""
        self._modules = {module.name: module for module in modules}
        self._groups, self._links, self._replica = groups, links, replica
        self._tensors, self._rules = tensors, rules
        self._targets: dict[str, list[torch.Tensor]] = {}  # by module and bucket; none if it is rolled back
        self._judgements: dict[str, Judgement] = {}
        self._stepped: set[str] = set()  # modules whose targets are results
        self._factors: Sequence[float] | None = None
        self.divergences: dict[str, float] = {}  # by module, without anchors: this rank's part of DreamDDP's Gamma
        live = tensors()
        self.states: dict[str, ModuleState] = {}
        for module in modules:
            anchored = module.items if rules.anchored else ()
            anchors = {item.name: _anchor_of(item.name, live[item.name], offload) for item in anchored}
            momentum = {
                name: torch.zeros_like(anchor, pin_memory=anchor.is_pinned())
                for name, anchor in anchors.items()
                if rules.outer.has_buffer
            }
            statistics = [NormStatistics() for _ in self._members(module)] if rules.penalty else []
            self.states[module.name] = ModuleState(anchors, momentum, statistics)

    @staticmethod
    def _members(module: ModulePlan) -> Ranks:
        return module.items[0].replicas

    @property
    def nbytes(self) -> int:
        held = [each for state in self.states.values() for each in (*state.anchors.values(), *state.momentum.values())]
        return sum(tensor.nbytes for tensor in held)

    def remember(self) -> None:
        """Take the live values as anchors. Only while replicas are identical."""
        live = self._tensors()
        for state in self.states.values():
            for name, anchor in state.anchors.items():
                anchor.copy_(flat(name, live[name]))

    def begin(self, factors: Sequence[float] | None = None) -> None:
        """Begin a synchronisation: each module is then exchanged and applied once. `factors`: a further factor of each
        replica's weight."""
        self._factors = factors
        self.divergences.clear()

    # ---- background thread: collectives ----

    def exchange(self, name: str) -> float:
        """Combine the values of all replicas of one module into its target. A collective of the ranks that hold a part
        of the module, on all replicas.

        Returns the factor by which its change is clipped, 1.0 if it is not. A module is rolled back if all replicas are
        judged anomalous (its factor is 1.0), and if changes are clipped and the mean change is not finite (0.0).
        """
        module, live = self._modules[name], self._tensors()
        faults.reach("sync.exchange", module=name)
        values: list[torch.Tensor] = []
        self._targets[name] = values
        norm = self._norm(module)
        squares_by_bucket = []  # of the mean change, in the part of each rank of the sync group
        for place, bucket in enumerate(module.buckets):
            received = self._gather_own_part(name, bucket, read(bucket, live), norm if place == 0 else None)
            judgement = self._judgements[name]
            if judgement.rollback:
                return 1.0
            mean, squares = self._mean(name, bucket, received, judgement)
            values.append(mean)
            squares_by_bucket.append(squares)
        factor = self._clip_factor(name, torch.stack(squares_by_bucket).cpu()) if self._rules.clips else 1.0
        if factor == 0.0:  # the mean change is not finite, although each replica's is
            values.clear()
        elif factor != 1.0:
            for bucket, value in zip(module.buckets, values, strict=True):
                anchor = self._anchors(name, bucket).double()
                value.copy_(anchor + factor * (value.double() - anchor))
        return factor

    def _norm(self, module: ModulePlan) -> torch.Tensor:
        """The norm of this replica's change of a module, 0 without a penalty: (1,) float64, equal on all its ranks. It
        is not finite if any value is not, also in a bucket that is not `in_norm` because another rank counts it."""
        live, squares = self._tensors(), torch.zeros(1, dtype=torch.float64, device=self._links.device)
        for bucket in module.buckets:
            values = read(bucket, live)
            if self._rules.penalty is not None and bucket.in_norm:
                change = values.double() - self._anchors(module.name, bucket).double()
                squares += torch.dot(change, change)  # a pass less than square and sum
            else:
                least, most = values.aminmax()  # NaN if any value is
                squares += torch.where(least.isfinite() & most.isfinite(), 0.0, nan)
        holders = self._groups.holders[module.name]
        if len(holders) > 1:
            parts = self._replica.all_gather(holders, squares)
            squares = torch.zeros_like(squares)
            for part in parts:  # in rank order: the same bits on all ranks
                squares += part
        return squares.sqrt()

    def _gather_own_part(
        self, name: str, bucket: ReplicaBucket, own: torch.Tensor, norm: torch.Tensor | None
    ) -> torch.Tensor:
        """Gather all replicas' values of the part of a bucket that this rank combines; `own`: this replica's values of
        the whole bucket. If `norm` is given, that of this replica's change of the module, gather all replicas' norms in
        the same messages, and judge the module by them."""
        part = _part_size(bucket)
        rows = torch.zeros(len(bucket.replicas) * part, dtype=own.dtype, device=own.device)
        rows[: len(own)] = own
        if norm is None:
            return self._links.all_to_all(bucket.replicas, rows.view(-1, part))
        received, norms = self._links.all_to_all_with(bucket.replicas, rows.view(-1, part), norm)
        statistics = self.states[name].statistics or [NormStatistics()] * len(norms)
        self._judgements[name] = judge(norms.tolist(), statistics, self._rules.penalty or NO_PENALTY, self._factors)
        return received

    def _mean(
        self, name: str, bucket: ReplicaBucket, received: torch.Tensor, judgement: Judgement
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean of a bucket over its replicas, weighted as judged; and the squared norm of the mean change in the
        part of each rank, which that rank sends with its part: 0 if the bucket is not `in_norm`, an empty tensor if
        changes are not clipped. Without anchors squared distances from the mean are sent instead (`divergences`)."""
        if judgement.weights_are_equal:
            chosen = [place for place, weight in enumerate(judgement.weights) if weight]
            received = received if len(chosen) == len(received) else received[chosen]
            combined = aggregate(received, Aggregate.MEAN)
        else:
            combined = weighted(received, judgement.weights).to(received.dtype)
        if not self._rules.anchored:
            apart = torch.linalg.vector_norm(received - combined, dtype=torch.float64).square() / len(received)
            means, parts = self._links.all_gather_with(bucket.replicas, combined, apart.view(1))
            self.divergences[name] = self.divergences.get(name, 0.0) + sum(parts.tolist())
            return means.view(-1)[: bucket.elements], received.new_empty(0)
        if not self._rules.clips:
            means = self._links.all_gather(bucket.replicas, combined)
            return means.view(-1)[: bucket.elements], received.new_empty(0)
        start = bucket.replicas.index(self._links.rank) * _part_size(bucket)
        anchor = self._anchors(name, bucket)[start : start + len(combined)].double()  # shorter at the bucket's end
        squares = (combined[: len(anchor)].double() - anchor).square().sum().view(1)
        means, squares_by_rank = self._links.all_gather_with(bucket.replicas, combined, squares)
        if not bucket.in_norm:  # another rank of the replica counts it
            squares_by_rank = torch.zeros_like(squares_by_rank)
        return means.view(-1)[: bucket.elements], squares_by_rank

    def _anchors(self, name: str, bucket: ReplicaBucket) -> torch.Tensor:
        """A copy of the anchors of a bucket, on the device."""
        anchors = self.states[name].anchors
        return torch.cat([_on_device(_piece(anchors, piece), self._links.device) for piece in bucket.pieces])

    def _clip_factor(self, name: str, squares: torch.Tensor) -> float:
        """The factor for a module's mean change. `squares`: a row for each bucket, a column for the part of each rank
        of the sync group, in rank order."""
        assert self._rules.penalty is not None
        holders = self._groups.holders[name]
        total: float = sum(sum(column) for column in squares.T.tolist())
        if len(holders) > 1:
            own = torch.tensor([total], dtype=torch.float64, device=self._replica.device)
            total = sum(self._replica.all_gather(holders, own).view(-1).tolist())  # in rank order
        return clip_factor(sqrt(total), self._rules.penalty.clip)

    # ---- training thread; `step` also in the background ----

    @torch.no_grad()
    def step(self, name: str) -> list[tuple[str, torch.Tensor]]:
        """Move a module from its anchors to its target through the outer optimizer, or back to them; the targets become
        results, which are returned: item and values of each piece of each bucket. Nothing without anchors."""
        module, state, values = self._modules[name], self.states[name], self._targets[name]
        self._stepped.add(name)
        results = []
        if self._rules.anchored:
            back = not values  # after a rollback nothing is stepped
            if back:
                values += [self._anchors(name, bucket).to(getattr(torch, bucket.dtype)) for bucket in module.buckets]
            for bucket, value in zip(module.buckets, values, strict=True):
                pieces = value.split([piece.stop - piece.start for piece in bucket.pieces])
                for piece, part in zip(bucket.pieces, pieces, strict=True):
                    if not back:
                        self._step(state, piece, part)
                    results.append((piece.item, part))
        return results

    @torch.no_grad()
    def apply(self, name: str) -> Judgement:
        """Make the target of a module live, through the outer optimizer. Returns its judgement."""
        state, live = self.states[name], self._tensors()
        for value in self._targets[name]:
            if value.is_cuda:  # allocated on the background stream, which would reuse the memory before this has read
                value.record_stream(torch.cuda.current_stream(value.device))
        if name not in self._stepped:
            self.step(name)
        self._stepped.discard(name)
        faults.reach("sync.apply", module=name)
        for bucket, value in zip(self._modules[name].buckets, self._targets.pop(name), strict=False):
            write(bucket, live, value)
        judgement = self._judgements.pop(name)
        if self._rules.penalty is not None:
            state.statistics = list(judgement.statistics)
        return judgement

    def _step(self, state: ModuleState, piece: ItemPiece, value: torch.Tensor) -> None:
        """Move anchors and momentum of a piece by the outer optimizer. `value` is the target, and becomes the result,
        rounded to its dtype."""
        held = [_piece(tensors, piece) for tensors in (state.anchors, state.momentum) if tensors]
        moved = [_on_device(tensor, self._links.device) for tensor in held]
        anchor = moved[0]
        buffer = moved[1] if state.momentum else None
        outer_step(anchor, value.to(anchor.dtype), buffer, self._rules.outer)
        for tensor, result in zip(held, moved, strict=True):
            if tensor is not result:
                tensor.copy_(result)
        value.copy_(anchor)


def _anchor_of(name: str, live: torch.Tensor, offload: bool) -> torch.Tensor:
    """A flat copy of a parameter in fp32, or float64 if it is float64. With `offload` in host memory, and pinned there
    if the parameter is on a device."""
    dtype = live.dtype if live.dtype is torch.float64 else torch.float32
    device = torch.device("cpu") if offload else live.device
    anchor = torch.empty(live.numel(), dtype=dtype, device=device, pin_memory=offload and live.is_cuda)
    return anchor.copy_(flat(name, live))


def _on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor itself if it is there already, else a copy."""
    return tensor.to(device, non_blocking=True)


def _part_size(bucket: ReplicaBucket) -> int:
    """How many coordinates of a bucket each replica combines."""
    return ceil(bucket.elements / len(bucket.replicas))


def _piece(tensors: Mapping[str, torch.Tensor], piece: ItemPiece) -> torch.Tensor:
    return tensors[piece.item][piece.start : piece.stop]
