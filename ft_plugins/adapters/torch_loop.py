"""The host for a training loop of plain torch: one process, or data-parallel replicas in torch.distributed.

    host = ft_plugins.TorchHost(model, optimizer, scheduler, loader)
    session = ft_plugins.attach(host)                     # under `ft-run ... --reft`
    for step in session.iterations(1000):                 # resumes; what is left of 1000 iterations
        inputs, targets = next(batches)
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

Invariant: the whole training state is captured, or the loop is refused by name: parameters, buffers, which of them are
trained, modes and extra state of modules, every tensor and number that the optimizer keeps, groups, scheduler, data
position, random number generators. The optimizer's state is created when the host is built, as the first update would
create it (`optimizer_state`); what is added, removed or replaced later is an error at the next version point.

    parameters, optimizer's tensors     change in an iteration's one update, or right behind it; equal on all replicas
    parameters that it does not update  may change anywhere, but equally on all replicas
    buffers                             may change anywhere; each rank's own
    gradients                           not captured: those of an iteration are zeroed before the next adds its own
    numbers and tensors without extent  small state ('step', learning rates)

In: model, optimizer, and what else the loop goes on from. Out: a `model.host.Host`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgpack
import torch
import torch.distributed as dist
import xxhash
from torch.nn.parallel import DistributedDataParallel

from .. import faults
from ..collective import Collective
from ..config import launch_context
from ..errors import ConfigError, InventoryError, ResumeError, StateChangedError, UnsupportedError
from ..events import say
from ..model.host import Hooks
from ..model.inventory import Inventory, Item, Role
from ..snapshot import codec
from ..snapshot.copiers import flat_bytes
from .host_parts import ANYWHERE, UPDATE, groups, is_item, own_copy, restore_groups, scalars_of
from .loader_position import DataPosition, position_of
from .optimizer_state import create_state
from .plain import PlainHost
from .torch_module import (
    read_modes,
    require_encodable,
    require_kinds,
    stray_tensors,
    unnamed_scheduler,
    write_modes,
)
from .torch_watch import Watch, graded, set_graded

_SCHEDULED = ("_wrapped_by_lr_sched", "_with_counter")  # on a step that a scheduler of torch counts; older: the second
_COMMUTES = 2  # replicas whose sum does not depend on the order of the summands
_BUCKETS = (
    "DistributedDataParallel puts its gradient buckets in another order after its first iteration, also after a "
    "restore: on more than 2 ranks the sums of that one iteration may differ in their last bits from those of a run "
    "without a failure; DistributedDataParallel(..., find_unused_parameters=True) keeps the order"
)
_NO_POSITION = (
    "no sampler was given: the data position is not captured, so the batches have to follow from the iteration; else "
    "give TorchHost the loader"
)
_REMEDY = (
    "build the whole model and optimizer, all parameters and groups, before TorchHost, and change tensors in place; or "
    "end the job before the change and begin another one (--ftp-job) after it"
)


class TorchHost(PlainHost):
    """A model and its optimizer, with all that training goes on from. All ranks of the job build it together.

    `sampler` is what the data position is read from: the torch DataLoader of the training data (also with a
    DistributedSampler, whose `epoch` is restored before the first iteration), or anything with `state_dict` and
    `load_state_dict`. `get_state` and `set_state` carry what else there is, as plain values and tensors: a GradScaler's
    `state_dict`, counters. `fingerprint`: what must be equal for a snapshot to belong to this job, beside architecture
    and optimizer (seed, data, batch size).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        sampler: Any = None,
        *,
        get_state: Callable[[], Any] = dict,
        set_state: Callable[[Any], None] = lambda state: None,
        fingerprint: Mapping[str, Any] | None = None,
    ) -> None:
        """Creates the optimizer's state. Raises ConfigError, InventoryError, UnsupportedError, all of them by name."""
        require_kinds(model, optimizer, scheduler)
        self._parallel = model if isinstance(model, DistributedDataParallel) else None
        self._module: torch.nn.Module = model if self._parallel is None else self._parallel.module
        self._optimizer, self._scheduler = optimizer, scheduler
        self._of_caller = get_state, set_state
        self._hooks: Hooks | None = None
        self._looked = False  # for schedulers that were not given
        self._updated = 0  # the iteration of the newest update
        self._known: dict[str, tuple[Role, torch.Tensor]] = {}
        context = launch_context()
        started = dist.is_initialized()
        rank = dist.get_rank() if started else context.rank
        self.rank = rank
        self._require_plain(rank)
        self._require_scheduler()
        require_encodable(self._module, f"rank {rank}")
        create_state(optimizer)
        self._known = dict(self._found())
        updated = {id(one) for group in optimizer.param_groups for one in group["params"]}
        self._quiet = {  # what is copied in the background
            name
            for name, (role, tensor) in self._known.items()
            if role is Role.MOMENT or (role is Role.PARAMETER and id(tensor) in updated)
        }
        self._watch = Watch(
            {name: self._known[name][1] for name in self._quiet}, dict(self._module.named_parameters()), f"rank {rank}"
        )
        self._place = {name: _place(tensor) for name, (_, tensor) in self._known.items()}
        self._groups = self._members()
        self._position: DataPosition | None = None
        if sampler is not None:
            self._position = position_of(sampler, lambda: self._hooks is not None and self._hooks.iteration > 0)
        super().__init__(
            {name: tensor.detach() for name, (_, tensor) in self._known.items()},
            rank=rank,
            world_size=dist.get_world_size() if started else context.world_size,
            replicated=True,
            fingerprint={"architecture": self._architecture(), **(fingerprint or {})},
            get_state=self._values,
            set_state=self._set_values,
            learning_rate=lambda: max(float(group["lr"]) for group in optimizer.param_groups),
            gradients=self._live_gradients,
        )
        self._require_replicas()
        self._say()

    # ---- facts ----

    def inventory(self) -> Inventory:
        """One item per tensor."""
        return Inventory.of(self.rank, (self._item(name, *one) for name, one in self._known.items()))

    def _item(self, name: str, role: Role, tensor: torch.Tensor) -> Item:
        dtype, nbytes = str(tensor.dtype).removeprefix("torch."), tensor.numel() * tensor.element_size()
        replicas = (self.rank,) if role is Role.BUFFER else self._replicas
        spans = UPDATE if name in self._quiet else ANYWHERE
        return Item(name, dtype, tuple(tensor.shape), nbytes, role, replicas, changed_by=spans)

    def admits(self, replicas: int) -> bool:
        """Only as many as there are: the data position is that of one division of the data."""
        return replicas == self._world_size

    def _names(self) -> dict[torch.Tensor, str]:
        return {parameter: name for name, parameter in self._module.named_parameters()}

    def _found(self) -> Iterator[tuple[str, tuple[Role, torch.Tensor]]]:
        """Every tensor that there is now, with what it is to training, by item name."""
        names = self._names()
        for parameter, name in names.items():
            yield name, (Role.PARAMETER, parameter)
        for parameter, state in self._optimizer.state.items():
            name = names.get(parameter, "outside of the model")
            for key, value in state.items():
                if is_item(value):
                    yield f"{name}:{key}", (Role.MOMENT, value)
        for name, buffer in self._module.named_buffers():
            yield name, (Role.BUFFER, buffer)

    def _members(self) -> list[list[int]]:
        """Which parameters each group has."""
        return [[id(one) for one in group["params"]] for group in self._optimizer.param_groups]

    def _architecture(self) -> str:
        shapes = [(name, str(one.dtype), tuple(one.shape)) for name, (_, one) in self._known.items()]
        return f"{type(self._optimizer).__name__} {xxhash.xxh3_64_hexdigest(repr(shapes).encode())}"

    # ---- what is refused ----

    def _require_plain(self, rank: int) -> None:
        """Every tensor is whole on every rank, and the optimizer updates the model's alone."""
        names = self._names()
        kinds = {type(part).__name__ for part in self._module.modules()}
        sharded = [name for one, name in names.items() if type(one.data).__name__ == "DTensor"]
        if "FullyShardedDataParallel" in kinds or sharded:
            raise UnsupportedError(
                f"rank {rank}: parameters are sharded ({sharded[0] if sharded else 'FullyShardedDataParallel'}); "
                "TorchHost follows replicas: use DistributedDataParallel, DeepSpeed or Megatron"
            )
        for number, group in enumerate(self._optimizer.param_groups):
            for parameter in group["params"]:
                if parameter not in names:
                    raise InventoryError(
                        f"rank {rank}: group {number} of the optimizer updates a parameter of shape "
                        f"{tuple(parameter.shape)} that the model does not have: give TorchHost a module that holds "
                        "all of them (torch.nn.ModuleList([model, ...]))"
                    )

    def _require_replicas(self) -> None:
        """Replicas begin with the same bytes. All ranks call together."""
        if not dist.is_initialized():
            return  # several ranks without a process group: the session says so
        shared = {name: tensor for name, (role, tensor) in self._known.items() if role is not Role.BUFFER}
        digests = {name: _digest(name, tensor) for name, tensor in shared.items()}
        gathered = [msgpack.unpackb(part) for part in Collective().gather(msgpack.packb(digests))]
        for rank, found in enumerate(gathered):
            names = found.keys() | gathered[0].keys()
            differing = sorted(name for name in names if found.get(name) != gathered[0].get(name))
            if differing:
                error = InventoryError(
                    f"rank {rank}: '{differing[0]}' is not what rank 0 has ({len(differing)} of {len(found)} tensors "
                    "differ): TorchHost follows replicas; wrap the model in DistributedDataParallel, or build it from "
                    "the same seed on all ranks"
                )
                error.echo = self.rank != rank
                raise error

    def _require_unchanged(self) -> None:
        """Raises StateChangedError where tensors were added, removed or replaced since the host was built."""
        found = dict(self._found())
        places = {name: _place(tensor) for name, (_, tensor) in found.items()}
        if places == self._place and self._members() == self._groups:
            return
        added, gone = found.keys() - self._known.keys(), self._known.keys() - found.keys()
        replaced = [name for name in found.keys() & self._known.keys() if places[name] != self._place[name]]
        for names, what in (
            (gone, "is there no more, but was when TorchHost was built"),
            (added, "was added after TorchHost was built, so that no snapshot would hold it"),
            (replaced, "was replaced by another tensor, or has other memory or shape, since TorchHost was built"),
            (["the optimizer's groups"], "have other parameters than when TorchHost was built"),
        ):
            for name in sorted(names)[:1]:
                at = self._hooks.iteration if self._hooks is not None else 0
                more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
                raise StateChangedError(f"rank {self.rank}: iteration {at}: '{name}'{more} {what}: {_REMEDY}")

    def _require_scheduler(self) -> None:
        """Raises StateChangedError where a scheduler of torch moves the learning rate that the host was not given."""
        unnamed = self._scheduler is None and any(hasattr(self._optimizer.step, mark) for mark in _SCHEDULED)
        found = "a learning rate scheduler"
        if not unnamed and self._hooks is not None and self._hooks.iteration > 0 and not self._looked:
            self._looked = True
            other = unnamed_scheduler(self._optimizer, self._scheduler)
            unnamed, found = other is not None, f"{found} ({type(other).__name__})"
        if unnamed:
            given = "none" if self._scheduler is None else "another one"
            raise StateChangedError(
                f"rank {self.rank}: {found} steps with this optimizer, but TorchHost was given {given}: what it has "
                "counted would be lost; pass it: TorchHost(model, optimizer, scheduler, ...); several as one "
                "SequentialLR or ChainedScheduler"
            )

    def _say(self) -> None:
        if self.rank != 0 or launch_context().restart:
            return
        ddp, strays = self._parallel, stray_tensors(self._module)
        if strays:
            say(
                f"'{strays[0]}' ({len(strays)} in all) is a tensor of a module, but neither parameter nor buffer: it "
                "is not captured; if training goes on from it, make it a buffer (register_buffer)"
            )
        if ddp is not None and self._world_size > _COMMUTES and not ddp.find_unused_parameters:
            say(_BUCKETS)
        if self._position is None and self._of_caller[0] is dict:
            say(_NO_POSITION)

    # ---- small state ----

    def small_state(self) -> dict[str, Any]:
        """All small state, at the version point. Raises StateChangedError."""
        self._require_unchanged()
        self._require_scheduler()
        if self._hooks is not None and self._hooks.iteration > 0:  # before the first: asked for its size alone
            self._watch.mark(self._hooks.iteration)
        return super().small_state()

    def _values(self) -> dict[str, Any]:
        return {
            "groups": groups(self._optimizer),
            "scalars": self._scalars(),
            "modes": read_modes(self._module),
            "graded": graded(dict(self._module.named_parameters())),
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "position": None if self._position is None else self._position.read(),
            "caller": self._of_caller[0](),
        }

    def _scalars(self) -> dict[str, dict[str, Any]]:
        """What the optimizer keeps without extent, by parameter."""
        names = self._names()
        return {names[one]: scalars_of(state) for one, state in self._optimizer.state.items()}

    def _set_values(self, saved: Mapping[str, Any]) -> None:
        if (saved["scheduler"] is None) != (self._scheduler is None):
            raise ResumeError(
                f"rank {self.rank}: only one of this job and the captured one has a learning rate scheduler: resume "
                "with the scheduler of the captured job, or start with --ftp-resume fresh"
            )
        if (saved["position"] is None) != (self._position is None):
            raise ResumeError(
                f"rank {self.rank}: only one of this job and the captured one has given TorchHost a sampler: resume "
                "with the sampler of the captured job, or start with --ftp-resume fresh"
            )
        if self._scheduler is not None:
            self._scheduler.load_state_dict(saved["scheduler"])
        self._set_optimizer(saved)
        write_modes(self._module, saved["modes"])
        set_graded(dict(self._module.named_parameters()), saved["graded"])
        self._of_caller[1](saved["caller"])

    def _set_optimizer(self, saved: Mapping[str, Any]) -> None:
        restore_groups(self._optimizer, saved["groups"])
        for parameter, name in self._names().items():
            for key, value in saved["scalars"].get(name, {}).items():
                kept = self._optimizer.state[parameter]
                kept[key] = own_copy(value, kept.get(key))

    def restore_position(self, small: Mapping[str, Any]) -> None:
        """The data position, then RNG last."""
        if self._position is not None:
            self._position.write(small["caller"]["position"])
        super().restore_position(small)

    def scalars(self) -> bytes:
        """Groups, and what the optimizer keeps without extent."""
        return codec.encode({"groups": groups(self._optimizer), "scalars": self._scalars()})

    def restore_scalars(self, encoded: bytes) -> None:
        """Those of another replica."""
        self._set_optimizer(codec.decode(encoded))

    # ---- hooks ----

    def install(self, hooks: Hooks) -> None:
        """Call `hooks` around every update from now on, and reach the fault points."""
        self._hooks = hooks
        self._watch.install(self._optimizer, {name: tensor for name, (_, tensor) in self._known.items()})
        self._optimizer.register_step_pre_hook(lambda *args: self._before_update(hooks))
        self._optimizer.register_step_post_hook(lambda *args: self._after_update(hooks))

    def _before_update(self, hooks: Hooks) -> None:
        if hooks.iteration == self._updated:
            raise ConfigError(
                f"rank {self.rank}: optimizer.step() outside of an iteration, or for the second time in iteration "
                f"{hooks.iteration}: each update is one iteration of `for step in session.iterations(...)`"
            )
        if self._position is not None:
            self._position.require_read()
        self._watch.settle(hooks.iteration, updates=True)
        self._updated = hooks.iteration
        hooks.before_update(hooks.iteration)
        faults.reach("update.begin", iteration=hooks.iteration)

    def before_skipped(self, step: int) -> None:
        """Iteration `step` makes no update. Raises StateChangedError where tensors were changed in it all the same."""
        self._watch.settle(step, updates=False)

    def derive(self) -> None:
        """Nothing is derived; whoever has written tensors has waited for their snapshot."""
        self._watch.written()

    def _after_update(self, hooks: Hooks) -> None:
        faults.reach("update.end", iteration=hooks.iteration)
        hooks.after_update(hooks.iteration)

    def _live_gradients(self) -> dict[str, torch.Tensor]:
        return {name: one.grad for one, name in self._names().items() if one.grad is not None}


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What stays as it is while a tensor is changed in place."""
    return id(tensor), tensor.data_ptr(), tensor.shape, tensor.dtype


def _digest(name: str, tensor: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(flat_bytes(name, tensor).cpu().numpy().data)
