"""The host for a plain training loop whose model `fully_shard` has sharded (FSDP2).

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("sync", "shard"))     # or one dimension: one replica
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)          # over replicas, too (HSDP); with local SGD: mesh["shard"]
    fully_shard(model, mesh=mesh)
    host = ft_plugins.FsdpHost(model, optimizer, scheduler, loader, mesh=mesh)
    for step in ft_plugins.attach(host).iterations(1000): ...

    sharded parameters, and their tensors in the optimizer    items are local shards, equal on the replicas of a shard
    parameters that fully_shard left whole                    each rank's own
    all else                                                  as in `torch_loop.TorchHost`

Invariant: between two iterations the module's parameters are the shards. What was gathered (by an evaluation, or where
`reshard_after_backward` is off) is forgotten at every version point and whenever shards are written, so that the next
forward gathers the present ones; what a running forward has gathered are the present ones already. `fully_shard` may
replace local tensors in its first forward, to pad them; the host causes that when it is built, so that items stay in
place.

In: model, optimizer, scheduler, data loader, device mesh. Out: a `model.host.Host` and `model.reduction`'s control.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...config import launch_context
from ...errors import ConfigError, UnsupportedError
from ...model.host import Hooks
from ...model.inventory import Role
from ...model.reduction import ReductionControl
from ..host_parts import local_part
from .fsdp_layout import ShardLayout, layout_of, sharding_mesh_dimensions
from .fsdp_reduction import FsdpReduction, fsdp_units
from .torch_loop import TorchHost
from .torch_module import require_equal_replicas, require_known_wrappers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_EQUAL = "build the model from the same seed on all ranks, or load the same weights, before fully_shard"


class FsdpHost(TorchHost):
    """A model that `fully_shard` has sharded, and its optimizer. All ranks of the job build it together.

    `mesh` is the whole device mesh: all ranks of the job in one dimension, or in two, one of which shards. It may be
    left out if the mesh that `fully_shard` was given has all ranks. Other arguments as in `TorchHost`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer],
        scheduler: Any = None,
        sampler: Any = None,
        *,
        mesh: DeviceMesh | None = None,
        get_state: Callable[[], Any] = dict,
        set_state: Callable[[Any], None] = lambda state: None,
        fingerprint: Mapping[str, Any] | None = None,
        ignored: Iterable[Any] = (),
    ) -> None:
        """Raises ConfigError, InventoryError or UnsupportedError."""
        self._mesh, self._layout = mesh, ShardLayout((), (), (), 0, None, False)  # until parameters are checked
        super().__init__(
            model, optimizer, scheduler, sampler, get_state=get_state, set_state=set_state, fingerprint=fingerprint,
            ignored=ignored,
        )  # fmt: skip

    # ---- facts ----

    def fingerprint(self) -> Mapping[str, Any]:
        return {**super().fingerprint(), "mesh": list(self._layout.sizes)}

    def _require_parameters(self, place: str) -> None:
        """Note how `fully_shard` has sharded parameters. Raises ConfigError or UnsupportedError unless it has, all in
        the same way."""
        require_known_wrappers(self._module, place)
        self._units = fsdp_units(self._module)
        self._reshard()
        sharded = {name: one for name, one in self._module.named_parameters() if local_part(one) is not one}
        if not sharded or not self._units:
            raise ConfigError(
                f"{place}: fully_shard has sharded no parameter of the model: call it before FsdpHost, or use TorchHost"
            )
        for name, one in sharded.items():
            if local_part(one).is_meta:
                raise ConfigError(f"{place}: '{name}' is on the meta device: give it memory and values before FsdpHost")
        for unit in self._units:
            unit.modules[0].unshard()  # pads and replaces local tensors, as the first forward would
        self._reshard()
        layouts = {
            name: layout_of(self._mesh, one, name, self.rank, dist.get_world_size()) for name, one in sharded.items()
        }
        self._layout = next(iter(layouts.values()))
        for name, layout in layouts.items():
            if layout != self._layout:
                raise UnsupportedError(
                    f"{place}: '{name}' is sharded over {layout}, '{next(iter(layouts))}' over {self._layout}: shard "
                    "all parameters over one mesh"
                )

    def _placed(self, role: Role, tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, int, int] | None]:
        if local_part(tensor) is tensor:
            return (self.rank,), None
        placements: Any = tensor.placements  # type: ignore[attr-defined]
        dimensions = sharding_mesh_dimensions(tensor)
        if len(dimensions) != 1 or not placements[dimensions[0]].is_shard():
            raise UnsupportedError(
                f"rank {self.rank}: {self._optimizers.kinds} keeps a tensor of shape {tuple(tensor.shape)} "
                f"placed by {placements}, but only tensors that are sharded as their parameters are can be captured: "
                "use another optimizer"
            )
        piece = self._layout.piece(tensor.shape) if placements[dimensions[0]].is_shard(0) else None
        if piece is not None and piece[1] - piece[0] != local_part(tensor).numel():
            piece = None  # laid out differently
        return self._layout.replicas, piece

    def _names(self) -> dict[torch.Tensor, str]:
        self._reshard()
        return super()._names()

    def _require_equal(self, replicas: Mapping[str, tuple[torch.Tensor, int]]) -> None:
        require_equal_replicas(self.rank, replicas, "FsdpHost", _EQUAL)

    def _reshard(self) -> None:
        for unit in self._units:
            unit.reshard()

    # ---- state ----

    def restore(self, small: Mapping[str, Any]) -> None:
        self._reshard()
        super().restore(small)

    def derive(self) -> None:
        """Accept the written shards: what was gathered from the previous ones is forgotten."""
        self._reshard()
        super().derive()

    def install(self, hooks: Hooks) -> None:
        """Raises ConfigError, for a job that takes snapshots, if nothing keeps the replicas of a shard together."""
        config, control = launch_context().config, self._control
        assert isinstance(control, FsdpReduction)
        if config is not None and config.capture is not None:
            control.require_reduced()
        super().install(hooks)

    # ---- local SGD ----

    def _make_control(self) -> ReductionControl:
        """Layout and items must be known."""
        parameters = {name: tensor for name, (role, tensor) in self._known.items() if role is Role.PARAMETER}
        return FsdpReduction(
            self.rank, self._module, parameters, self._layout, self._mesh, lambda: self._iteration
        )  # fmt: skip

    def early_refusal(self) -> str:
        return "fully_shard completes the gradients of shards at the end of the backward"
