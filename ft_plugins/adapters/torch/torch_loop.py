"""The host for a training loop of plain torch: one process, or data-parallel replicas in torch.distributed.

    host = ft_plugins.TorchHost(model, optimizer, scheduler, loader)
    session = ft_plugins.attach(host)                     # under `ft-run ... --reft`
    for step in session.iterations(1000):                 # resumes: the rest of 1000 iterations
        inputs, targets = next(batches)
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

Invariant: the whole training state is captured, or an error names what cannot be: parameters, buffers, which of them
are trained, modes and extra state of modules, all tensors and numbers of the optimizer, groups, scheduler, data
position, random number generators. The optimizer is untouched until its first update; what that will make is known when
the host is built (`planned_state`). Another tensor that is added, removed or replaced later raises StateChangedError at
the next version point, trained state of the script that the host was not given at the first one (`undeclared`).

    parameters, optimizer's tensors     change in an iteration's one update, or right after it; equal on all replicas
    parameters that it does not update  may change at any time, but equally on all replicas
    buffers                             may change at any time; may differ between ranks
    gradients                           not captured; must be zeroed between two iterations
    numbers, 0-dimensional tensors      small state ('step', learning rates)

Of several optimizers (`optimizers`) the iteration's update begins with the first step of any of them, and ends with the
loop's body.

In: model, optimizers, schedulers, data loader, functions for other state. Out: a `model.host.Host`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.nn.parallel import DistributedDataParallel

from ...base import faults
from ...config import launch_context
from ...errors import ConfigError, UnsupportedError
from ...events import say
from ...model.host import Hooks, ScalarWriter
from ...model.inventory import Inventory, Item, Role
from ...model.observation import Observer
from ...model.progress import ProgressReceiver
from ...model.reduction import ReductionControl
from ..begun_again import BegunAgain
from ..host_parts import ANYWHERE, UPDATE, local_part
from ..observed import Root, module_roots
from ..optimizers import Optimizers, scheduler_of
from ..script import undeclared_search
from ..script.undeclared import Undeclared
from ..script.undeclared_search import Given
from .early_update import EarlyUpdate, early_refusal
from .loop_reports import report_gradients, report_inputs, report_progress
from .loop_state import LoopState
from .plain import PlainLoop
from .torch_module import (
    BUCKETS,
    COMMUTES,
    NO_POSITION,
    only_updated,
    require_equal_replicas,
    require_known_parameters,
    require_module,
    require_whole_parameters,
)
from .torch_reduction import DdpReduction, ReducingHost
from .torch_watch import ChangeWatch, changed_since, identity


class TorchHost(PlainLoop, ReducingHost):
    """A model and its optimizer, with all state that training depends on. All ranks of the job build it together.

    `optimizer` and `scheduler` may be a sequence or dict of several, over one module that holds all their parameters.
    `sampler` gives the data position: the torch DataLoader of the training data (also with a DistributedSampler, whose
    `epoch` is restored before the first iteration), anything with `state_dict` and `load_state_dict`, or a list of
    several. `get_state` and `set_state` carry any other state, as plain values and tensors: a GradScaler's
    `state_dict`, counters.
    `fingerprint` is what must be equal, in addition to architecture and optimizer, for a snapshot to belong to this job
    (seed, data, batch size). `ignored` are objects with state of their own that a restart need not restore.
    """

    fault_points = {"update.begin": (), "update.end": ()}
    checkpoint_lacks = ""
    write_scalars: ScalarWriter | None = None
    placed: Callable[[], object] = bool  # sets what a library's loop sets itself, after the position

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer],
        scheduler: Any = None,
        sampler: Any = None,
        *,
        get_state: Callable[[], Any] = dict,
        set_state: Callable[[Any], None] = lambda state: None,
        fingerprint: Mapping[str, Any] | None = None,
        ignored: Iterable[Any] = (),
    ) -> None:
        """Raises ConfigError, InventoryError or UnsupportedError."""
        require_module(model)
        self._model = model
        self._parallels = [one for one in model.modules() if isinstance(one, DistributedDataParallel)]
        self._parallel = model if isinstance(model, DistributedDataParallel) else None
        self._module: torch.nn.Module = model if self._parallel is None else self._parallel.module
        self._optimizers, self._scheduler = Optimizers(optimizer), scheduler_of(scheduler)
        self._ignored = tuple(ignored)
        self._source = sampler
        self._hooks: Hooks | None = None
        self._observer: Observer | None = None
        self._updated = 0  # the iteration of the newest update
        self._stepping: torch.optim.Optimizer | None = None  # the optimizer that began it
        self._early: EarlyUpdate | None = None
        self._known: dict[str, tuple[Role, torch.Tensor]] = {}
        context = launch_context()
        started = dist.is_initialized()
        rank, world = (dist.get_rank(), dist.get_world_size()) if started else (context.rank, context.world_size)
        super().__init__(rank, world)
        self._require_parameters(f"rank {rank}")
        require_known_parameters(self._module, self._optimizers, f"rank {rank}")
        self._state = LoopState(
            self._module, self._optimizers, self._scheduler, (get_state, set_state), rank, type(self).__name__,
            self._names, self._given,
        )  # fmt: skip
        self.observed = BegunAgain(
            self._roots, lambda: self._given().tensors, lambda: (*self._ignored, *undeclared_search.ignored())
        )
        self._optimizers.plan_state()
        self._named = self._names()
        self._known = dict(self._present())
        background = only_updated(self._known, self._optimizers)
        self._background, parameters = background.keys(), dict(self._module.named_parameters())
        self._watch = ChangeWatch(background, parameters, f"rank {rank}")
        self._groups = self._optimizers.members()
        self._used = self._optimizers.used(self._names())
        self._state.follow(sampler, lambda: self._iteration)
        self._identities: dict[str, tuple[Any, ...]] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._bind(self._known)
        self._fingerprint = {"world_size": world, "architecture": self._architecture(), **(fingerprint or {})}
        if started:
            present = {name: one for name, one in self._known.items() if not one[1].is_meta}
            shared = {name: one for name, one in present.items() if one[0] is not Role.BUFFER}
            self._require_equal({name: (local_part(one[1]), self._placed(*one)[0][0]) for name, one in shared.items()})
        self._say(sampler is None and get_state is dict)

    # ---- facts ----

    def inventory(self) -> Inventory:
        return Inventory.of(self.rank, (self._item(name, *one) for name, one in self._known.items()))

    def tensors(self) -> Mapping[str, torch.Tensor]:
        if self._absent:  # by the names of then: this may be called while parameters are gathered
            self._follow({name: (Role.MOMENT, one) for name, one in self._optimizers.moments(self._named)})
        return self._tensors

    def allocate(self, absent: Collection[str]) -> None:
        self._optimizers.allocate(self._names(), absent)
        self._bind(dict(self._present()))

    def _bind(self, present: Mapping[str, tuple[Role, torch.Tensor]]) -> None:
        """Know these items as they are now."""
        self._known |= present
        self._identities |= {name: identity(tensor) for name, (_, tensor) in present.items()}
        self._tensors |= {name: local_part(tensor).detach() for name, (_, tensor) in present.items()}
        self._absent = {name for name, tensor in self._tensors.items() if tensor.is_meta}
        for name in present.keys() & self._background:
            self._watch.follow(name, present[name][1])

    def _follow(self, present: Mapping[str, tuple[Role, torch.Tensor]]) -> None:
        """Know what updates have made since. Raises UnsupportedError if it is not what was planned."""
        made = {name: present[name] for name in self._absent & present.keys() if not present[name][1].is_meta}
        for name, (_, tensor) in made.items():
            planned, now = self._tensors[name], local_part(tensor)
            if (planned.shape, planned.stride(), planned.dtype) != (now.shape, now.stride(), now.dtype):
                raise UnsupportedError(
                    f"rank {self.rank}: iteration {self._iteration}: the optimizer has made '{name}' with {now.dtype}, "
                    f"shape {tuple(now.shape)} and strides {now.stride()}, expected {planned.dtype}, "
                    f"{tuple(planned.shape)} and {planned.stride()} as in updates of a copy: use another optimizer"
                )
        if made:
            self._bind(made)

    def fingerprint(self) -> Mapping[str, Any]:
        return self._fingerprint

    def _item(self, name: str, role: Role, tensor: torch.Tensor) -> Item:
        replicas, piece = self._placed(role, tensor)
        tensor = local_part(tensor)
        dtype, nbytes = str(tensor.dtype).removeprefix("torch."), tensor.numel() * tensor.element_size()
        spans = UPDATE if name in self._background else ANYWHERE
        return Item(name, dtype, tuple(tensor.shape), nbytes, role, replicas, changed_by=spans, piece=piece)

    def _placed(self, role: Role, tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, int, int] | None]:
        """The ranks that hold replicas of an item, and its piece of the whole tensor."""
        return (self.rank,) if role is Role.BUFFER else self._replicas, None

    def admits(self, replicas: int) -> bool:
        """Only the present number: the data position depends on how the data is divided."""
        return replicas == self._world_size

    def _names(self) -> dict[torch.Tensor, str]:
        return {parameter: name for name, parameter in self._module.named_parameters()}

    def _present(self) -> Iterator[tuple[str, tuple[Role, torch.Tensor]]]:
        """Name, role and tensor of every present item. The order of the optimizer's groups does not matter."""
        names = self._names()
        for parameter, name in names.items():
            yield name, (Role.PARAMETER, parameter)
        for name, moment in self._optimizers.moments(names):
            yield name, (Role.MOMENT, moment)
        for name, buffer in self._module.named_buffers():
            yield name, (Role.BUFFER, buffer)

    def _architecture(self) -> str:
        shapes = [(name, str(one.dtype), tuple(one.shape)) for name, (_, one) in self._known.items()]
        return f"{self._optimizers.kinds} {xxhash.xxh3_64_hexdigest(repr(shapes).encode())}"

    # ---- checks ----

    def _require_parameters(self, place: str) -> None:
        require_whole_parameters(self._module, place)

    def _require_equal(self, replicas: Mapping[str, tuple[torch.Tensor, int]]) -> None:
        require_equal_replicas(self.rank, replicas, type(self).__name__)

    def _require_unchanged(self) -> None:
        """Raises StateChangedError if tensors were added, removed or replaced since the host was built."""
        items = dict(self._present())
        self._follow(items)
        present = {name: identity(tensor) for name, (_, tensor) in items.items()}
        if present != self._identities or self._optimizers.members() != self._groups:
            place = f"rank {self.rank}: iteration {self._iteration}"
            raise changed_since(self._identities, present, place, type(self).__name__)

    def _roots(self) -> Iterator[Root]:
        yield from module_roots("model", self._module, self._optimizers)
        yield from (("communication hooks", one._comm_hooks) for one in self._parallels)

    def _given(self) -> Given:
        gradients = [one.grad for one in self._module.parameters() if one.grad is not None]
        objects = self._model, *self._optimizers, self._scheduler, self._source, self._ignored
        trained = [self._known[name][1] for name in self._background if self._known[name][0] is Role.PARAMETER]
        return Given(objects, (*gradients, *(one for _, one in self._known.values())), tuple(trained))

    def _say(self, unpositioned: bool) -> None:
        if self.rank == 0 and not launch_context().restart:
            if self._world_size > COMMUTES and not all(one.find_unused_parameters for one in self._parallels):
                say(BUCKETS)
            if unpositioned:
                say(NO_POSITION)

    # ---- small state ----

    def small_state(self) -> dict[str, Any]:
        if self._early is not None:
            self._early.require_ended()
        self._require_unchanged()
        if self._iteration > 0:  # before the first iteration only the size is needed
            self._watch.mark(self._iteration)
        return {**self._state.captured(self._iteration), **self.generators()}

    def regrouped(self, small: Mapping[str, Any]) -> str:
        return self._state.regrouped(small)

    def restore(self, small: Mapping[str, Any]) -> None:
        self._state.restore(small)

    def restore_position(self, small: Mapping[str, Any]) -> None:
        self._state.place(small)
        super().restore_position(small)

    def loop_begins(self) -> None:
        self._state.undeclared.begin()

    def scalars(self) -> bytes:
        return self._state.scalars()

    def restore_scalars(self, encoded: bytes) -> None:
        self._state.restore_scalars(encoded)

    # ---- hooks ----

    def of_a_library(self, lacks: str, remedy: Callable[[list[Undeclared]], str]) -> None:
        """A library's loop calls functions of the script, also between a restore and the first iteration: values are
        set again then. `lacks`: what its own checkpoints lack. `remedy`: of `UndeclaredSearch`."""
        self.checkpoint_lacks, self._state.sets_again = lacks, True
        self._state.undeclared.remedy = remedy

    def install(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._watch.install(list(self._optimizers), {name: tensor for name, (_, tensor) in self._known.items()})
        for optimizer in self._optimizers:
            optimizer.register_step_pre_hook(lambda one, *args: self._before_step(one))
            optimizer.register_step_post_hook(lambda *args: self._after_step(hooks))

    def install_progress(self, progress: ProgressReceiver, spans: bool) -> None:
        report_progress(self._model, self._parallels, progress)

    def install_observer(self, observer: Observer) -> None:
        self._observer = observer
        report_inputs(self._model, self._module, self._parallels, observer)

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._early is not None and self._early.begun:
            self._early.before_step()
        else:
            self._begin_update(optimizer)

    @property
    def _iteration(self) -> int:
        """The present iteration, 0 before the first."""
        return 0 if self._hooks is None else self._hooks.iteration

    def _begin_update(self, optimizer: torch.optim.Optimizer) -> None:
        """The fence, at the first step of an iteration."""
        assert (hooks := self._hooks) is not None
        again = hooks.iteration == self._updated
        if again and hooks.iteration and self._optimizers.several:
            self._watch.check_gradients(hooks.iteration, self._used[optimizer])
            return
        if again:
            raise ConfigError(
                f"rank {self.rank}: optimizer.step() was called outside of an iteration, or twice in iteration "
                f"{hooks.iteration}: make one update in each iteration of `for step in session.iterations(...)`"
            )
        if self._state.position is not None:
            self._state.position.require_read()
        self._updated, self._stepping = hooks.iteration, optimizer
        if self._observer is not None and self._early is None:  # else the backward has not ended
            report_gradients(self._module, self._used[optimizer], self._observer)
        hooks.before_update(hooks.iteration)
        faults.reach("update.begin", iteration=hooks.iteration)

    def before_fence(self, step: int) -> None:
        used = self._used[self._stepping] if self._updated == step and self._stepping is not None else None
        self._watch.check(step, used, more=self._optimizers.several)

    def derive(self) -> None:
        """Accept the written tensors, whose snapshot is complete; nothing is derived from them."""
        self._watch.written()

    def _after_step(self, hooks: Hooks) -> None:
        if self._early is not None:
            self._early.after_step()
        faults.reach("update.end", iteration=hooks.iteration)
        if not self._optimizers.several:  # of several any may step again: the update lasts until the body ends
            hooks.after_update(hooks.iteration)

    def gradients(self) -> Mapping[str, torch.Tensor]:
        return {name: local_part(one.grad) for one, name in self._names().items() if one.grad is not None}

    # ---- local SGD, PAFT ----

    def _make_control(self) -> ReductionControl:
        names = [name for name, (role, _) in self._known.items() if role is Role.PARAMETER]
        return DdpReduction(self.rank, self._world_size, self._module, self._parallel, names)

    def modules(self) -> Mapping[str, str]:
        self._optimizers.single("local SGD (--sync-policy) works")
        return super().modules()

    def copies(self) -> Inventory:
        self._optimizers.single("--paft works")
        return super().copies()

    def learning_rate(self) -> float:
        self._optimizers.single("--paft works")
        return max(float(group["lr"]) for group in self._optimizers.param_groups)

    def early_refusal(self) -> str:
        return early_refusal(self._optimizers.single("--sync-order update_first works"))

    def update_modules_early(self, wanted: Callable[[], Collection[str]], updated: Callable[[str], None]) -> None:
        optimizer = self._optimizers.single("--sync-order update_first works")
        parameters = dict(self._module.named_parameters())
        members: dict[str, list[torch.nn.Parameter]] = {}
        for name, module in self.modules().items():
            members.setdefault(module, []).append(parameters[name])
        self._early = EarlyUpdate(
            self.rank, optimizer, members, lambda: self._begin_update(optimizer), lambda: self._iteration
        )
        self._early.install(wanted, updated)
