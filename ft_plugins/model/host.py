"""The protocol between a framework adapter (the host) and the systems that protect it (the hooks).

Iterations are counted from 1: `iteration_begin(k)` starts the k-th, `iteration_end(k)` is the version point after k
iterations, skipped updates included. A version's iteration is that k.

    host:   topology, inventory, tensors, names, fingerprint, small_state      facts, read by the session
            restore, restore_position                                   hand state back
            install                                                     call these hooks from now on
            install_edges                                               and these, around each span
    hooks:  iteration_begin, before_update, after_update, iteration_end, shutdown
    edges:  begin, end                                                  only if a system asks for them
    replica operations:  learning_rate, gradients, copies, recompute, ...    only if replicas are compared or averaged

Order in one iteration: iteration_begin(k), forward and backward, before_update(k), the optimizer's step,
after_update(k), the framework's own bookkeeping (scheduler, counters), iteration_end(k). The spans of an iteration lie
between iteration_begin and after_update: forward and backward of each microbatch, sends and receives of the pipeline,
collectives that reduce gradients or their norm, the update. Evaluation has no spans.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from .inventory import Inventory
from .timeline import Kind
from .topology import Topology

SIZES = ("dp", "world_size", "gradient_buckets")  # of a fingerprint, at its top or in a block of it


def resizable(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a fingerprint that must be equal for a job of another data-parallel size to take over the state."""
    return {
        key: resizable(value) if isinstance(value, Mapping) else value
        for key, value in fingerprint.items()
        if key not in SIZES
    }


class Hooks(Protocol):
    """What the host calls. `step` is the 1-based iteration; `iteration` the latest that began, 0 before the first."""

    iteration: int

    def iteration_begin(self, step: int) -> None: ...
    def before_update(self, step: int) -> None: ...
    def after_update(self, step: int) -> None: ...
    def iteration_end(self, step: int) -> None: ...
    def shutdown(self) -> None: ...


class Edges(Protocol):
    """What the host calls around each span, in the training thread and in order of time.

    `microbatch` is numbered from 0, -1 if the span belongs to none; `chunk` is the model chunk of an interleaved
    schedule. Both methods are in the step path: they return within a few microseconds and do not raise.
    """

    def begin(self, kind: Kind, microbatch: int = -1, chunk: int = 0) -> None: ...
    def end(self, kind: Kind, microbatch: int = -1, chunk: int = 0) -> None: ...


class Host(Protocol):
    """What a framework adapter offers; built after the framework's model and optimizer."""

    framework: str  # for messages: 'megatron-core 0.16.1'
    rank: int

    def topology(self) -> Topology:
        """The place of every rank of the job."""

    def inventory(self) -> Inventory:
        """The state items of this rank, also those that only updates will make."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The live tensors, by item name; dense in memory. A restore writes them in place. A tensor on the meta device
        stands for one that no update has made yet."""

    def fingerprint(self) -> Mapping[str, Any]:
        """Facts that must be equal for captured state to belong to this job.

        Architecture, precision, parallel sizes and order, optimizer kind, seed, batch sizes, data path with size and
        digest of its first MiB. Plain values; those that depend on the data-parallel size are under the keys `SIZES`.
        """

    def merged(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The small state of this rank after a resize. `parts`: the small states of all previous ranks at its place in
        the model, by rank."""

    def admits(self, replicas: int) -> bool:
        """Whether the job can run with this many data-parallel replicas and the same global batch."""

    def small_state(self) -> dict[str, Any]:
        """Counters, optimizer scalars, scheduler, scaler, data position, RNG at the version point, for the codec."""

    def names(self) -> Mapping[str, Any] | None:
        """How the framework's own checkpoints name and combine these tensors, as plain values that the adapter reads
        at an export; None if it knows no such format. Does not raise."""

    def restore(self, small: Mapping[str, Any]) -> None:
        """Complete a restore whose item tensors already hold the version.

        Set counters, scheduler and scalars, repeat every side effect of the framework's own load, and rebuild derived
        tensors (low-precision copies, gathered parameters).
        """

    def restore_position(self, small: Mapping[str, Any]) -> None:
        """Restore the data position, then RNG last; called right before the first iteration."""

    def install(self, hooks: Hooks) -> None:
        """Call `hooks` from now on."""

    def install_edges(self, edges: Edges) -> None:
        """Call `edges` from now on; once, before `install`. Raises UnsupportedError, by name, if the spans of this
        framework, version or engine cannot be followed."""


@runtime_checkable
class Planning(Protocol):
    """What a host offers in addition if its framework makes some of its tensors during training."""

    def allocate(self, absent: Collection[str]) -> None:
        """Before a restore: give memory to every item, except that the items `absent` have none."""


@runtime_checkable
class ReplicaOperations(Protocol):
    """What a host offers to systems that change its tensors between two updates; they refuse a host without it."""

    recomputes: bool  # whether `recompute` can be called, after `keep_iterations`
    no_recompute_reason: str  # if it cannot: why, for messages
    clips_together: str  # how gradients of one replica clip those of all, for messages; '' if they do not

    def keep_iterations(self, discarded: Callable[[], bool] = lambda: False) -> None:
        """From now on keep what `recompute` needs of each iteration, if possible. Once, before the first iteration.

        `discarded` waits until it is known whether the results of the running iteration will be discarded, because the
        parameters were wrong: a framework that checks results asks before it ends the job for them."""

    def copies(self) -> Inventory:
        """The derived tensors that this rank computes with and does not capture; only the update changes them.

        Parameters cast or gathered from what the optimizers of all replicas hold, with role COPY. Role PARAMETER if
        each rank's item is a view of its part of them: then they hold replicas of every item, and a majority can repair
        it. Names differ from those of items. Empty if parameters are items themselves. Raises UnsupportedError, by
        name, if they cannot be compared.
        """

    def copy_tensors(self) -> Mapping[str, torch.Tensor]:
        """The live tensors of `copies`, by name; dense in memory."""

    def finish_copies(self) -> None:
        """Complete the copies of the last update now, if the framework would do so during the next forward. All ranks
        of the job call together."""

    def learning_rate(self) -> float:
        """The learning rate of the next update, as the optimizer will apply it; the largest of several."""

    def gradients(self) -> Mapping[str, torch.Tensor]:
        """The live aggregated gradients, by the item of their parameter; valid from `before_update` to the update.
        Empty if the framework does not expose them."""

    def recompute(self, step: int) -> None:
        """Run forward, backward and reduction of iteration `step` again, on the same data and random numbers, and
        replace the gradients. All ranks of the job call together, within `before_update`."""

    def derive(self) -> None:
        """Rebuild all tensors that derive from items (low-precision copies, gathered parameters), after items were
        written or copies found wrong. All ranks of the job call together."""

    def scalars(self) -> bytes:
        """The state outside tensors that determines the next update, encoded: step counters, parameter groups,
        schedule, scaler. Equal on replicas unless a rank alone skipped or made an update. b'' if there is none."""

    def restore_scalars(self, encoded: bytes) -> None:
        """Take over `scalars` of another replica at the same point, for the parameters that both update."""

    def before_reduction(self, call: Callable[[int, Mapping[str, torch.Tensor]], None]) -> None:
        """From now on call `call(step, gradients)` with this rank's own gradients right before they are aggregated;
        it may change them in place. Raises UnsupportedError, by name, if the framework has no such point."""


@runtime_checkable
class Lacking(Protocol):
    """What a host has in addition if the framework's own checkpoints do not hold the whole state of a job."""

    checkpoint_lacks: str  # what they lack; '' for nothing


ScalarWriter = Callable[[Mapping[str, float], int], None]  # scalars by tag; the iteration that is completed


@runtime_checkable
class Writing(Protocol):
    """What a host has in addition if its framework writes scalars, as for TensorBoard."""

    write_scalars: ScalarWriter | None  # next to those of the framework; None on ranks, and in jobs, without a writer


@runtime_checkable
class Checking(Protocol):
    """What a host may offer in addition, if its loop could change tensors at a wrong time."""

    def before_fence(self, step: int) -> None:
        """Check iteration `step` before its fence, also if it makes no update; what had to be written since the version
        point is written. Raises StateChangedError if other tensors changed that only an update may change."""


@runtime_checkable
class Looping(Protocol):
    """Implemented by a host that notes where its script's loop begins."""

    def loop_begins(self) -> None:
        """The first iteration of an incarnation begins. Called once, before `restore_position`."""


class ObservedValues(Protocol):
    """The values that training keeps and a host does not capture."""

    differing: tuple[str, ...]  # after `recomputed`: what was not what it was

    def begin(self) -> None:
        """Before the first iteration of a process, and before `restore_position`."""

    def captured(self, iteration: int, state: Mapping[str, Any]) -> dict[str, Any]:
        """At the version point after `iteration`: what a version has of them, but for what is in its small state,
        `state`; 0: as large as that may become."""

    def restored(self, saved: Mapping[str, Any] | None, proves: bool) -> None:
        """After `restore_position`: compare with what the restored version has; None: it has nothing. `proves`:
        `recomputed` will be called."""

    def recomputed(self, saved: Mapping[str, Any]) -> None:
        """The version point of an iteration that was computed again, before `captured`; its version has `saved`."""

    def said(self) -> str:
        """What has begun again since this was asked last, in words; '' for nothing."""


@runtime_checkable
class Observing(Protocol):
    """Implemented by a host that observes values which it does not capture."""

    observed: ObservedValues


@runtime_checkable
class Grouped(Protocol):
    """What a host offers in addition, if it restores values of parameter groups by the number of the group."""

    def regrouped(self, small: Mapping[str, Any]) -> str:
        """How the parameters of the optimizer's groups differ from those in captured small state, with the name of one,
        and what to do; '' if they do not differ."""
