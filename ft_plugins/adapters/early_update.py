"""Update modules of a plain torch model in the backward, as soon as their own gradients are complete.

The optimizer's own step is used, with the parameters of one module as its only ones; in the loop's `optimizer.step()`
they are hidden, so each parameter is stepped once. That is the update that the loop asks for if nothing changes
gradients between backward and update: no clipping, no GradScaler, no second backward. This is checked by identity and
`_version` of each gradient before the loop's step; an error there ends the rank before the iteration becomes a version.

Invariant: with an optimizer whose step of a parameter depends on that parameter alone, parameters and state have the
same bits as after one step of all. Only torch's own optimizers are known to have one.

In: an optimizer, parameters by module. Out: updated parameters, calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ..errors import StateChangedError

_REMEDY = "choose --sync-order average_first"


def early_refusal(optimizer: torch.optim.Optimizer) -> str:
    """Why this optimizer cannot be stepped module by module; '' if it can."""
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS):
        return ""
    return f"{kind.__name__} may update a parameter by more than its own gradient and state"


class EarlyUpdate:
    """Steps modules early, on one rank."""

    def __init__(
        self, rank: int, optimizer: torch.optim.Optimizer, members: Mapping[str, Sequence[torch.nn.Parameter]],
        fence: Callable[[], None],
    ) -> None:  # fmt: skip
        """`members`: the parameters of each module. `fence` is called before the first module of an iteration."""
        self._rank, self._optimizer, self._fence = rank, optimizer, fence
        updated = {id(one) for group in optimizer.param_groups for one in group["params"]}
        self._members = {name: [one for one in own if id(one) in updated] for name, own in members.items()}
        self._wanted: Callable[[], Collection[str]] = tuple
        self._updated: Callable[[str], None] = lambda module: None
        self._early: set[int] = set()  # ids of the parameters that are updated in this iteration
        self._gradients: dict[int, tuple[torch.Tensor, int]] = {}  # complete ones by id of the parameter; version
        self._hidden: list[list[torch.nn.Parameter]] = []  # of each group, while the loop's step runs

    @property
    def begun(self) -> bool:
        """Whether this iteration's update has begun."""
        return bool(self._early)

    def install(self, wanted: Callable[[], Collection[str]], updated: Callable[[str], None]) -> None:
        """Update the modules in `wanted()` from the next backward on, and call `updated` with each."""
        self._wanted, self._updated = wanted, updated
        for module, parameters in self._members.items():
            for parameter in parameters:
                trained = parameter.requires_grad
                parameter.requires_grad_()  # required to register a hook; the parameter may be trained later
                parameter.register_post_accumulate_grad_hook(self._hook(module))
                parameter.requires_grad_(trained)

    def _hook(self, module: str) -> Callable[[torch.Tensor], None]:
        def after_accumulation(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            if module not in self._wanted() or gradient is None:
                return
            if id(parameter) in self._early:
                self._refuse(module, "had a second backward after its update")
            self._gradients[id(parameter)] = gradient, gradient._version
            own = [one for one in self._members[module] if one.requires_grad]
            if all(id(one) in self._gradients for one in own):
                self._step(own)
                self._updated(module)

        return after_accumulation

    def _step(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """One step of these parameters alone."""
        if not self._early:
            self._fence()
        chosen = {id(one) for one in parameters}
        self._early |= chosen
        self._limit(lambda one: id(one) in chosen)
        try:
            step: Any = type(self._optimizer).step
            getattr(step, "__wrapped__", step)(self._optimizer)  # without the hooks of a whole step
        finally:
            self._restore()

    def before_step(self) -> None:
        """The loop's step begins: hide what is updated already. Raises StateChangedError if a gradient is not the one
        by which its parameter was updated."""
        for module, parameters in self._members.items():
            for parameter in parameters:
                gradient, version = self._gradients.get(id(parameter), (None, 0))
                if gradient is not None and (parameter.grad is not gradient or gradient._version != version):
                    self._refuse(module, "had its gradient changed between backward and update (clipping, GradScaler)")
        self._limit(lambda one: id(one) not in self._early)

    def after_step(self) -> None:
        """The loop's step has ended."""
        self._restore()
        self._early.clear()
        self._gradients.clear()

    def require_ended(self) -> None:
        """Raises StateChangedError if modules were updated and the loop's step did not follow."""
        if self._early:
            raise StateChangedError(
                f"rank {self._rank}: modules were updated in the backward, and optimizer.step() did not follow in this "
                f"iteration: {_REMEDY}"
            )

    def _limit(self, has: Callable[[torch.nn.Parameter], bool]) -> None:
        groups = self._optimizer.param_groups
        self._hidden = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [one for one in group["params"] if has(one)]

    def _restore(self) -> None:
        for group, parameters in zip(self._optimizer.param_groups, self._hidden, strict=False):
            group["params"] = parameters
        self._hidden = []

    def _refuse(self, module: str, what: str) -> None:
        raise StateChangedError(
            f"rank {self._rank}: module '{module}' {what}, which --sync-order update_first does not allow; {_REMEDY}"
        )
