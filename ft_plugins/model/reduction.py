"""What a host offers to local SGD: over which replicas gradients are reduced, and when modules are used.

Local SGD (EDiT, DiLoCo, Post Local SGD) lets replicas train on their own between two synchronisations. A replica here
is a whole copy of the model: the tensor- and pipeline-parallel ranks, and the ranks over which a ZeRO or FSDP shard
group divides it. The ranks that hold the same items on different replicas form a *sync group*: the replica set of an
item (`Item.replicas`).

    over ALL     gradients are averaged over every replica, as without local SGD: during warm-up
    over LOCAL   gradients are averaged over the ranks of this replica's own shard group only, or not at all

A module is the unit that local SGD synchronises and judges: the embedding, each layer, the head.

Invariant: gradients are averages over exactly the ranks that were reduced. Reductions of tensor, sequence and pipeline
parallelism, and those that keep tied embeddings equal, are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import Protocol, runtime_checkable


class ReducedOver(str, Enum):
    """Over which replicas gradients are averaged."""

    ALL = "all"
    LOCAL = "local"


class ModuleEdges(Protocol):
    """Receives the begin and the end of each forward and each backward of a module.

    Edges are for measurements and for what may start early, and never decide what training computes: the backward of a
    module whose graph cannot be followed is not reported. A call returns soon, raises nothing, and may come from a
    thread of the framework's, but never from two at once."""

    def forward_begin(self, module: str) -> None: ...

    def forward_end(self, module: str) -> None: ...

    def backward_begin(self, module: str) -> None: ...

    def backward_end(self, module: str) -> None: ...


@runtime_checkable
class ReductionControl(Protocol):
    """What a host offers to local SGD in addition to `ReplicaOperations`; it refuses a host without it."""

    def prepare_reduction(self) -> None:
        """Take control of the reduction, once, before `install`. Every rank of the job calls: groups may be made.
        Raises UnsupportedError, by name, for a mode in which gradients cannot be kept local."""

    def reduce_over(self, replicas: ReducedOver) -> None:
        """Reduce gradients that way from the next backward on. Called between two iterations; cheap, and may be called
        with the present value."""

    def require_own_pace(self) -> None:
        """Raises UnsupportedError, by name, if under LOCAL something still couples replicas in each iteration, so that
        they cannot make different numbers of iterations."""

    def shard_group(self) -> tuple[int, ...]:
        """The ranks over which LOCAL averages, ascending, this one included; this rank alone if there are none."""

    def modules(self) -> Mapping[str, str]:
        """The module of each item of role PARAMETER or MAIN_PARAMETER, by item name. Names are equal on all ranks that
        hold a part of the module, also of a tied embedding on two stages. Modules are in the order of the forward."""

    def before_modules(self, call: Callable[[str], None]) -> None:
        """From now on call `call(module)` right before each forward of each of this rank's modules, recomputations and
        evaluations included. Raises UnsupportedError, by name, if forwards cannot be followed."""

    def follow_modules(self, edges: ModuleEdges) -> None:
        """From now on report the edges of this rank's modules to `edges`, whatever of them is synchronised: parameters,
        masters or shards. Evaluations and recomputations included; a module with several parts has the edges of each.
        Training stays bit for bit the same. Raises UnsupportedError, by name, if forwards cannot be followed."""


@runtime_checkable
class ComputesWithCopies(Protocol):
    """A host whose forwards may read `ReplicaOperations.copies` in place of what is synchronised. A copy is called as
    the parameter, an item of it the same, with ':main' if it is a master or a shard."""

    def forward_order(self) -> Sequence[str]:
        """The modules that `before_modules` announces, also those of whose parameters this rank holds no shard, in the
        order of the forward."""


@runtime_checkable
class EarlyUpdates(Protocol):
    """A host that can update a module before the backward of the others has ended."""

    def early_refusal(self) -> str:
        """Why modules cannot be updated on their own here; '' if they can."""

    def update_modules_early(self, wanted: Callable[[], Collection[str]], updated: Callable[[str], None]) -> None:
        """From now on, when the backward has completed all gradients of a module among `wanted()`, update it and call
        `updated(module)`; the fence is passed before the first of an iteration. The others follow in the loop's own
        update. Not to be called if it is refused."""
