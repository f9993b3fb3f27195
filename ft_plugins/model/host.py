"""The protocol between a framework adapter (the host) and everything that protects it (the hooks).

Iterations are counted from 1: `iteration_begin(k)` opens the k-th, `iteration_end(k)` is the version point at which k
iterations are completed, skipped updates included. A version's iteration is that k.

    host:   topology, inventory, tensors, names, fingerprint, small_state      facts, asked by the session
            restore, restore_position                                   state handed back
            install                                                     'call these hooks from now on'
            install_edges                                               'and these, around each span'
    hooks:  iteration_begin, before_update, after_update, iteration_end, shutdown
    edges:  begin, end                                                  only where a system asks for them
    steps:  learning_rate, gradients, copies, derive, recompute, ...    only where replicas are compared or averaged

Order in one iteration: iteration_begin(k), forward and backward, before_update(k), the optimizer's step,
after_update(k), the framework's own bookkeeping (scheduler, counters), iteration_end(k). The spans of an iteration lie
between its begin and after_update: forward and backward of each microbatch, sends and receives of the pipeline, what
reduces gradients or agrees on their norm, the update. Evaluation has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from .inventory import Inventory
from .timeline import Kind
from .topology import Topology

SIZES = ("dp", "world_size", "gradient_buckets")  # of a fingerprint, at its top or in a block of it


def resizable(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """What of a fingerprint must be equal for a job of another data-parallel size to take the state over."""
    return {
        key: resizable(value) if isinstance(value, Mapping) else value
        for key, value in fingerprint.items()
        if key not in SIZES
    }


class Hooks(Protocol):
    """What the host calls. `step` is the 1-based iteration; `iteration` the one that began last, 0 before the first."""

    iteration: int

    def iteration_begin(self, step: int) -> None: ...
    def before_update(self, step: int) -> None: ...
    def after_update(self, step: int) -> None: ...
    def iteration_end(self, step: int) -> None: ...
    def shutdown(self) -> None: ...


class Edges(Protocol):
    """What the host calls around each span, in the thread that trains and in the order of time: an end belongs to the
    begin before it. `microbatch` counts from 0, -1 for what is of none; `chunk` is that of an interleaved schedule.

    In the step path: to return within a few microseconds, and not to raise.
    """

    def begin(self, kind: Kind, microbatch: int = -1, chunk: int = 0) -> None: ...
    def end(self, kind: Kind, microbatch: int = -1, chunk: int = 0) -> None: ...


class Host(Protocol):
    """What a framework adapter offers; built after the framework has built model and optimizer."""

    framework: str  # for people: 'megatron-core 0.16.1'
    rank: int

    def topology(self) -> Topology:
        """Where every rank of the job stands."""
        ...

    def inventory(self) -> Inventory:
        """What this rank's state is made of. Optimizer moments exist already: adapters create them eagerly."""
        ...

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The live tensors, by item name; dense in memory. Restoring copies into them in place."""
        ...

    def fingerprint(self) -> Mapping[str, Any]:
        """What must be equal for captured state to belong to this job: architecture, precision, parallel sizes and
        order, optimizer kind, seed, batch sizes, data path with size and digest of its first MiB. Plain values; what
        depends on the data-parallel size stands under one of the keys `SIZES`."""
        ...

    def merged(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The small state of a rank that takes over from ranks of another data-parallel size: `parts` are the small
        states of all previous ranks at its place in the model, by rank."""
        ...

    def admits(self, replicas: int) -> bool:
        """Whether the job can be trained with so many data-parallel replicas and the same global batch."""
        ...

    def small_state(self) -> dict[str, Any]:
        """Counters, optimizer scalars, scheduler, scaler, data position, RNG: at the version point, for the codec."""
        ...

    def names(self) -> Mapping[str, Any] | None:
        """What the framework's own checkpoints call these tensors and how they are put together there, as plain values
        that the adapter reads again at an export; None where it knows of no such format. Does not raise."""
        ...

    def restore(self, small: Mapping[str, Any]) -> None:
        """The item tensors hold the version: set counters, scheduler and scalars, redo every side effect of the
        framework's own load and rebuild what is derivable (low-precision copies, gathered parameters)."""
        ...

    def restore_position(self, small: Mapping[str, Any]) -> None:
        """Right before the first iteration: the data position, then RNG last."""
        ...

    def install(self, hooks: Hooks) -> None:
        """Call `hooks` from now on."""
        ...

    def install_edges(self, edges: Edges) -> None:
        """Call `edges` from now on; before `install`, once. Raises UnsupportedError where this framework, version or
        engine has no spans that can be followed, by name."""
        ...


@runtime_checkable
class ReplicaOperations(Protocol):
    """What a host offers beside, to systems that change its tensors between two updates; one without is refused."""

    recomputes: bool  # whether `recompute` can be called, once `keep_iterations` was
    no_recompute_reason: str  # where it cannot: the reason, for people
    clips_together: str  # how gradients of one replica clip those of all, for people; '' where they do not

    def keep_iterations(self) -> None:
        """Keep of each iteration from now on what `recompute` needs, where that can be done. Once, before the first."""
        ...

    def copies(self) -> Inventory:
        """What this rank computes with and does not capture, for it is derived: parameters cast or gathered from what
        the optimizers of all replicas hold, of role COPY, changed by the update alone. Their names are none of an item.
        Of role PARAMETER where each rank's item is a view of its part of them: then they hold replicas of every item,
        by which a majority can repair it. Empty where parameters are items themselves. Raises UnsupportedError where
        they cannot be compared, by name."""
        ...

    def copy_tensors(self) -> Mapping[str, torch.Tensor]:
        """The live tensors of `copies`, by name; dense in memory."""
        ...

    def learning_rate(self) -> float:
        """Of the update that comes next, as the optimizer will apply it; the largest where there are several."""
        ...

    def gradients(self) -> Mapping[str, torch.Tensor]:
        """From `before_update` to the update: the live gradients after aggregation, by the item of their parameter.
        Empty where they cannot be had."""
        ...

    def recompute(self, step: int) -> None:
        """Forward, backward and reduction of iteration `step` once more, on the same data and random numbers, in place
        of the gradients that are there. All ranks of the job call together, inside of `before_update`."""
        ...

    def derive(self) -> None:
        """Item tensors were written, or copies are wrong: rebuild all that is derived from items (low-precision copies,
        gathered parameters). All ranks of the job call together."""
        ...

    def scalars(self) -> bytes:
        """What beside tensors decides the next update, encoded: counts of steps, parameter groups, schedule, scaler.
        Alike on replicas, but for a rank that has skipped an update, or made one, alone. b'' where there is nothing."""
        ...

    def restore_scalars(self, encoded: bytes) -> None:
        """Go on from what `scalars` of another replica are, at the same moment; of what both of them update."""
        ...

    def before_reduction(self, call: Callable[[int, Mapping[str, torch.Tensor]], None]) -> None:
        """Have `call(step, gradients)` called from now on with this rank's own gradients, right before they are
        aggregated, to alter them in place. Raises UnsupportedError where that moment cannot be had, by name."""
        ...


@runtime_checkable
class Skipping(Protocol):
    """What a host of `Session.iterations` may offer beside."""

    def before_skipped(self, step: int) -> None:
        """Iteration `step` ends without an update: its fence comes next. Raises StateChangedError where tensors were
        changed that only an update may change."""
        ...
