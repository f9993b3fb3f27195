"""Control for local SGD of a plain torch loop: the reduction of DistributedDataParallel, and calls before modules.

The module of a parameter is its path up to the first number ('layers.3' of 'layers.3.mlp.weight'); all parameters
without one form the module '', which comes first, for it is called at the start of the model's forward. The others are
in the order in which the model registers them.

Invariant: with LOCAL, DistributedDataParallel communicates neither gradients nor buffers, also where the loop sets
`require_backward_grad_sync` itself; with ALL the loop's own setting and `no_sync` hold.

In: a model, wrapped in DistributedDataParallel; calls of a synchronizer. Out: a `model.reduction.ReductionControl`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ...errors import UnsupportedError
from ...model.reduction import ModuleEdges, ReducedOver, ReductionControl
from ..module_edges import follow_places


def module_of(parameter: str) -> str:
    """The path of the module that local SGD synchronises with this parameter; '' for those without a number."""
    path = parameter.split(".")[:-1]
    depth = next((depth for depth, part in enumerate(path, 1) if part.isdecimal()), 0)
    return ".".join(path[:depth])


def modules_of(parameters: Iterable[str]) -> dict[str, str]:
    """The module of each parameter, by name; '' first, the others in the order given."""
    modules = {name: module_of(name) for name in parameters}
    return dict(sorted(modules.items(), key=lambda item: item[1] != ""))


def outermost(paths: Iterable[str]) -> list[str]:
    """The paths that no other of the paths contains, in order."""
    paths = list(dict.fromkeys(paths))
    return [path for path in paths if not any(path.startswith(f"{other}.") or "" == other != path for other in paths)]


def called_paths(root: torch.nn.Module, module: str, parameters: Iterable[str]) -> list[str]:
    """The paths of the parts of `root` whose forwards, together, come before every use of the parameters of `module`.

    That is `module` itself. A container without a forward (ModuleList, ModuleDict) is replaced by the parts of it that
    hold the parameters, or, for parameters that it holds itself, by what contains it. Raises UnsupportedError if no
    part of `root` that contains a parameter has a forward.
    """
    found = []
    for parameter in parameters:
        path = parameter.split(".")[:-1]
        start = len(module.split(".")) if module else 0
        depths = [*range(start, len(path) + 1), *range(start - 1, -1, -1)]  # from the module inwards, then outwards
        with_forward = [depth for depth in depths if _has_forward(root, path[:depth])]
        if not with_forward:
            raise UnsupportedError(
                f"'{parameter}' is in no module that has a forward, so that local SGD does not know when it is used: "
                "give the module that holds it a forward, which uses it"
            )
        found.append(".".join(path[: with_forward[0]]))
    return outermost(found)


def _has_forward(root: torch.nn.Module, path: list[str]) -> bool:
    part = root.get_submodule(".".join(path))
    return isinstance(part, torch.jit.ScriptModule) or type(part).forward is not torch.nn.Module.forward


def parameters_at(
    root: torch.nn.Module, members: Mapping[str, Sequence[str]], parameter: Callable[[str], torch.Tensor]
) -> dict[str, dict[str, list[torch.Tensor]]]:
    """The paths whose calls are the calls of modules, and of each module there the parameters that it has below the
    path. `members`: the names of the parameters of each module. Raises UnsupportedError."""
    found: dict[str, dict[str, list[torch.Tensor]]] = {}
    for module, names in members.items():
        for path in called_paths(root, module, names):
            below = [parameter(name) for name in names if not path or name.startswith(f"{path}.")]
            found.setdefault(path, {})[module] = below
    return found


def compile_again() -> None:
    """Drop what torch.compile has made of calls before now: code without the hooks of today."""
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


class ModuleCalls:
    """The part of `model.reduction.ReductionControl` that knows modules."""

    def __init__(self, rank: int, root: torch.nn.Module, parameters: Iterable[str]) -> None:
        """`parameters` are the names of all parameters of `root` that are items."""
        self._rank, self._root, self._parameters = rank, root, list(parameters)

    def modules(self) -> Mapping[str, str]:
        return modules_of(self._parameters)

    def _members(self) -> dict[str, list[str]]:
        """The parameters of each module, modules in the order of the forward."""
        members: dict[str, list[str]] = {}
        for name, module in self.modules().items():
            members.setdefault(module, []).append(name)
        return members

    def before_modules(self, call: Callable[[str], None]) -> None:
        """Call right before each forward of each module, evaluations included."""
        self._require_hooks()
        for path, modules in self._parts().items():
            self._call_before(self._root.get_submodule(path), list(modules), call)
        compile_again()

    def follow_modules(self, edges: ModuleEdges) -> None:
        places = [(self._root.get_submodule(path), modules) for path, modules in self._parts().items()]
        follow_places(self._rank, places, edges)
        compile_again()

    def _parts(self) -> dict[str, dict[str, list[torch.Tensor]]]:
        return parameters_at(self._root, self._members(), self._parameter)

    def _parameter(self, name: str) -> torch.Tensor:
        """The parameter of that name that the optimizer updates."""
        return self._root.get_parameter(name)

    def _require_hooks(self) -> None:
        """Raises UnsupportedError if forwards cannot be followed."""
        for name, part in self._root.named_modules():
            if isinstance(part, torch.jit.ScriptModule):
                raise UnsupportedError(
                    f"rank {self._rank}: '{name}' is a ScriptModule, whose forward calls no hooks, so that local SGD "
                    "cannot synchronise it before it is used: pass the model without torch.jit"
                )

    def _refuse(self, reason: str, remedy: str) -> None:
        raise UnsupportedError(f"rank {self._rank}: local SGD is not supported here: {reason}; {remedy}")

    def _call_before(self, part: torch.nn.Module, modules: list[str], call: Callable[[str], None]) -> None:
        """Call `call` with each of `modules` before the forward of `part`."""

        @torch.compiler.disable
        def before(module: torch.nn.Module, inputs: Any) -> None:
            for name in modules:
                call(name)

        part.register_forward_pre_hook(before, prepend=True)


class DdpReduction(ModuleCalls):
    """Control of a model in which DistributedDataParallel, if anything, reduces gradients."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        root: torch.nn.Module,
        parallel: DistributedDataParallel | None,
        parameters: Iterable[str],
    ) -> None:
        """`root` is the model, `parallel` its DistributedDataParallel."""
        super().__init__(rank, root, parameters)
        self._world_size, self._parallel = world_size, parallel
        self._over = ReducedOver.ALL

    def shard_group(self) -> tuple[int, ...]:
        """This rank: every rank holds a whole replica."""
        return (self._rank,)

    def prepare_reduction(self) -> None:
        parallel = self._parallel
        if parallel is None:
            if self._world_size > 1:
                self._refuse(
                    "the loop reduces its gradients by itself",
                    "wrap the model in DistributedDataParallel, so that its reduction can be controlled",
                )
            return
        members = dist.get_world_size(parallel.process_group)
        for unfit, reason, remedy in (
            (
                parallel.static_graph,
                "DistributedDataParallel(..., static_graph=True) reduces gradients in its first backward in any case",
                "leave static_graph out",
            ),
            (
                getattr(parallel, "_delay_all_reduce_params", None),
                "DistributedDataParallel(..., delay_all_reduce_named_params=...) reduces them in every backward",
                "leave it out",
            ),
            (
                members != self._world_size,
                f"DistributedDataParallel reduces over {members} of {self._world_size} ranks, so that ranks are no "
                "replicas of each other",
                "use the default process group; for sharded replicas use fully_shard and ft_plugins.FsdpHost",
            ),
            (
                not parallel.require_backward_grad_sync,
                "require_backward_grad_sync of DistributedDataParallel is False, so that the loop reduces its "
                "gradients by itself",
                "leave it True outside of gradient accumulation",
            ),
        ):
            if unfit:
                self._refuse(reason, remedy)
        parallel.register_forward_pre_hook(self._before_forward, prepend=True)

    def require_own_pace(self) -> None:
        """Raises UnsupportedError for layers that communicate in each forward."""
        for name, part in self._root.named_modules():
            if isinstance(part, torch.nn.SyncBatchNorm):
                self._refuse(f"'{name}' is a SyncBatchNorm, which couples replicas in each forward", "use BatchNorm")

    def reduce_over(self, replicas: ReducedOver) -> None:
        if self._parallel is not None and replicas is not self._over:
            self._set_synced(replicas is ReducedOver.ALL)
        self._over = replicas

    def _before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        if self._over is ReducedOver.LOCAL:  # a loop that accumulates gradients may have set it to True
            self._set_synced(False)

    def _set_synced(self, synced: bool) -> None:
        """What `DistributedDataParallel.no_sync` sets, and what its forward derives from that for buffers."""
        assert self._parallel is not None
        self._parallel.require_backward_grad_sync = self._parallel.require_forward_param_sync = synced


def _passed_on(name: str) -> Any:
    return lambda host, *arguments: getattr(host._control, name)(*arguments)


class ReducingHost:
    """The `ReductionControl` of a host: it passes calls on to the control that the host makes."""

    def _make_control(self) -> ReductionControl:
        raise NotImplementedError

    @cached_property
    def _control(self) -> ReductionControl:
        return self._make_control()

    prepare_reduction = _passed_on("prepare_reduction")
    reduce_over = _passed_on("reduce_over")
    require_own_pace = _passed_on("require_own_pace")
    shard_group = _passed_on("shard_group")
    modules = _passed_on("modules")
    before_modules = _passed_on("before_modules")
    follow_modules = _passed_on("follow_modules")
