"""Control of the reduction of `fully_shard` for local SGD, and calls before parameters are gathered.

`fully_shard` reduce-scatters the gradients of a unit (the parameters that one call of it has taken) over the shards of
a replica. With `ReducedOver.ALL`, a hook then all-reduces them over the replicas.

Parameters are read where a unit is gathered, which is before the forward of its module, so that is where the `call` of
`before_modules` is called. FSDP's own hook is the first of the module's; ours is put before it. A unit may be gathered
earlier: by `set_modules_to_forward_prefetch` (then `call` is called for its modules, too, before the forward of the
unit that gathers it), or by `FSDPModule.unshard` (then it is gathered again, after the first `call` of the iteration).

Invariant: what is gathered by the first forward of an iteration are the present shards. All ranks of a replica gather
equally often: nothing here depends on values.

In: modules of torch.distributed.fsdp. Out: a `model.reduction.ReductionControl`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...errors import ConfigError
from ...model.reduction import ReducedOver
from .fsdp_layout import ShardLayout
from .torch_reduction import ModuleCalls, called_paths, compile_again, outermost


@dataclass(frozen=True)
class FsdpUnit:
    """The parameters that one call of `fully_shard` has taken. `paths` are those of the modules it was called with."""

    paths: tuple[str, ...]
    modules: tuple[Any, ...]
    state: Any  # FSDP's own

    @property
    def groups(self) -> list[Any]:
        """FSDP's groups of parameters."""
        if (groups := getattr(self.state, "_fsdp_param_groups", None)) is not None:
            return list(groups)
        return [one for one in [self.state._fsdp_param_group] if one is not None]

    def parameters(self) -> list[torch.Tensor]:
        """The sharded parameters."""
        return [one.sharded_param for group in self.groups for one in group.fsdp_params]

    @property
    def in_forward(self) -> bool:
        """Whether a forward is computing with its gathered parameters."""
        states = [getattr(group, "_training_state", None) for group in self.groups]
        return any(getattr(state, "name", "") == "FORWARD" for state in states)

    def reshard(self) -> None:
        """Forget gathered parameters: the next forward gathers the present shards. Not in a forward of the unit: what
        that computes with was gathered after `call`."""
        if self.in_forward:
            return
        if any(getattr(group, "_all_gather_result", None) is not None for group in self.groups):
            self.modules[0].unshard()  # waits for a gather that was started
        for module in self.modules:
            module.reshard()


def fsdp_units(root: torch.nn.Module) -> list[FsdpUnit]:
    """All units of `root`, in the order of its modules."""
    from torch.distributed.fsdp import FSDPModule

    members: dict[int, list[tuple[str, Any]]] = {}
    for path, module in root.named_modules():
        if isinstance(module, FSDPModule):
            members.setdefault(id(module._get_fsdp_state()), []).append((path, module))
    return [
        FsdpUnit(tuple(path for path, _ in one), tuple(module for _, module in one), one[0][1]._get_fsdp_state())
        for one in members.values()
    ]


def _all_reduce_hook(group: Any) -> Any:
    """What FSDP calls with the reduced gradients of a group; None for nothing."""
    return getattr(group, "_all_reduce_hook", None)


class FsdpReduction(ModuleCalls):
    """Control of a model that `fully_shard` has sharded over one dimension of a mesh."""

    def __init__(
        self,
        rank: int,
        root: torch.nn.Module,
        parameters: Mapping[str, torch.Tensor],
        layout: ShardLayout,
        mesh: Any,
        iteration: Callable[[], int],
    ) -> None:
        """`parameters` are all that are items, by name; `iteration` returns the number of the present one."""
        super().__init__(rank, root, parameters)
        self._layout, self._mesh, self._iteration = layout, mesh, iteration
        self._sharded = dict(parameters)
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._trained = [name for name, one in parameters.items() if one.requires_grad]
        self._units = fsdp_units(root)
        self._over = ReducedOver.ALL
        self._fresh: tuple[int, set[int]] = -1, set()  # an iteration, and the units that were resharded in it

    # ---- reduction ----

    def shard_group(self) -> tuple[int, ...]:
        return tuple(sorted(self._layout.shards))

    def prepare_reduction(self) -> None:
        layout = self._layout
        if layout.hybrid:
            self._refuse(
                "fully_shard was given the two-dimensional mesh (HSDP), so that it averages gradients over all "
                "replicas in every backward",
                "use its dimension that shards: fully_shard(..., mesh=mesh['shard'])",
            )
        ours = {self._names[id(one)] for unit in self._units for one in unit.parameters() if id(one) in self._names}
        if others := [name for name in self._trained if name not in ours]:
            self._refuse(
                f"'{others[0]}' is not sharded by fully_shard, so that nothing controls the reduction of its gradient",
                "call fully_shard on the whole model, too: fully_shard(model, mesh=mesh['shard'])",
            )
        if layout.sync_dimension is None:
            return
        group, members = self._mesh.get_group(layout.sync_dimension), len(layout.replicas)

        def average(reduced: torch.Tensor) -> None:
            if self._over is ReducedOver.ALL:
                dist.all_reduce(reduced, group=group)
                reduced.div_(members)

        for unit in self._units:
            self._require_free_all_reduce_hook(unit)
        for unit in self._units:
            unit.modules[0].set_all_reduce_hook(average)

    def require_reduced(self) -> None:
        """Raises ConfigError if nothing averages gradients over the replicas, each of which captures a part of one
        state."""
        layout = self._layout
        if layout.hybrid or len(layout.replicas) == 1:
            return
        for unit in self._units:
            trained = any(one.requires_grad for one in unit.parameters())
            if trained and not any(_all_reduce_hook(group) for group in unit.groups):
                raise ConfigError(
                    f"rank {self._rank}: fully_shard was given one dimension of the mesh, so that gradients are not "
                    f"averaged over the replicas on ranks {list(layout.replicas)}, and snapshots, which they share, "
                    "would mix them: give fully_shard the whole mesh (HSDP), or switch local SGD on (--sync-policy); a "
                    "script that averages gradients itself does so in set_all_reduce_hook"
                )

    def _require_free_all_reduce_hook(self, unit: FsdpUnit) -> None:
        name = unit.paths[0]
        if not hasattr(unit.modules[0], "set_all_reduce_hook"):
            self._refuse(
                f"torch {torch.__version__} has no FSDPModule.set_all_reduce_hook", "install torch 2.7 or newer"
            )
        if len(unit.groups) > 1:
            self._refuse(
                f"the parameters of '{name}' are sharded over several meshes", "shard all of them over one mesh"
            )
        if any(_all_reduce_hook(group) for group in unit.groups):
            self._refuse(
                f"'{name}' has an all-reduce hook of the training script", "leave set_all_reduce_hook to ft_plugins"
            )

    def require_own_pace(self) -> None:
        """Nothing couples replicas: units gather and scatter within a replica."""

    def reduce_over(self, replicas: ReducedOver) -> None:
        self._over = replicas

    # ---- modules ----

    def _parameter(self, name: str) -> torch.Tensor:
        """The sharded parameter, for which FSDP calls hooks when it has a reduced gradient. A module has the gathered
        one from its forward on."""
        return self._sharded[name]

    def before_modules(self, call: Callable[[str], None]) -> None:
        """Call right before the parameters of each module are gathered, also in evaluations."""
        self._require_hooks()
        held = [self._modules_of(unit) for unit in self._units]
        places = self._places(held)
        called = {path: [one for one in places if path in places[one]] for unit in self._units for path in unit.paths}
        for number, unit in enumerate(self._units):
            for path, part in zip(unit.paths, unit.modules, strict=True):
                part.register_forward_pre_hook(self._hook(number, called, path, call), prepend=True)
        for module, parameters in self._members().items():
            if module not in places:  # no parameter of it is sharded
                for path in called_paths(self._root, module, parameters):
                    self._call_before(self._root.get_submodule(path), [module], call)
        compile_again()

    def _modules_of(self, unit: FsdpUnit) -> list[str]:
        """The modules that have parameters in a unit."""
        names = {self._names.get(id(one)) for one in unit.parameters()}
        return [module for module, parameters in self._members().items() if names.intersection(parameters)]

    def _places(self, held: Sequence[Sequence[str]]) -> dict[str, list[str]]:
        """For each module, in the order of the forward, the paths before whose forwards it is called: those of the
        units that have parameters of it, without units inside of such units. `held`: the modules of each unit."""
        paths: dict[str, list[str]] = {module: [] for module in self._members()}
        for unit, modules in zip(self._units, held, strict=True):
            for module in modules:
                paths[module] += unit.paths
        if paths.get("") and any("" in unit.paths for unit in self._units):
            paths[""] = [""]  # FSDP begins each forward at its outermost module
        return {module: outermost(found) for module, found in paths.items() if found}

    def _hook(
        self, number: int, called: Mapping[str, Sequence[str]], path: str, call: Callable[[str], None]
    ) -> Callable[[Any, Any], None]:
        """What is called before the forward of a module of unit `number`; `called` has modules by path."""
        numbers = {id(unit.state): other for other, unit in enumerate(self._units)}

        @torch.compiler.disable
        def before(module: Any, inputs: Any) -> None:
            self._refresh(number)
            modules = dict.fromkeys(called[path])
            for state in getattr(self._units[number].state, "_states_to_forward_prefetch", ()):
                if (other := numbers.get(id(state))) is not None:  # else a unit that this host does not have
                    self._refresh(other)
                    modules.update(dict.fromkeys(m for one in self._units[other].paths for m in called[one]))
            for one in modules:
                call(one)

        return before

    def _refresh(self, number: int) -> None:
        """In the first forward of an iteration, forget what is gathered of a unit: that may be from before a change."""
        iteration = self._iteration()
        if self._fresh[0] != iteration:
            self._fresh = iteration, set()
        if number not in self._fresh[1]:
            self._fresh[1].add(number)
            self._units[number].reshard()
