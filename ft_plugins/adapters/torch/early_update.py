"""Update modules of a plain torch model in the backward, as soon as their own gradients are complete.

The optimizer's own step is used, with the parameters of one module as its only ones; in the loop's `optimizer.step()`
they are hidden, so each parameter is stepped once. That is the update that the loop asks for if nothing between
backward and update changes gradients, parameters or the groups' numbers: no clipping, no GradScaler, no second
backward, no learning rate that is set then. Before the loop's step this is checked: gradients by identity and sums
(GradScaler and `.data` do not count in `_version`), parameters by `_version`, groups by their values. An error there
ends the rank before the iteration becomes a version.

Invariant: with an optimizer whose step of a parameter depends on that parameter alone, parameters and state have the
same bits as after one step of all. Only torch's own optimizers are known to have one.

In: an optimizer, parameters by module. Out: updated parameters, calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import StateChangedError

_REMEDY = "choose --sync-order average_first"


def early_refusal(optimizer: torch.optim.Optimizer) -> str:
    """Why this optimizer cannot be stepped module by module; '' if it can."""
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS):
        return ""
    return f"{kind.__name__} may update a parameter by more than its own gradient and state"


@dataclass(frozen=True)
class _EarlyStep:
    """What the early update of a module depended on, and what it left."""

    module: str
    parameters: Sequence[torch.nn.Parameter]
    gradients: Sequence[torch.Tensor]
    sums: torch.Tensor  # of the gradients, as they were used
    versions: Sequence[int]  # of the parameters, afterwards
    numbers: Sequence[Mapping[str, Any]]  # of the groups


def _sums(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum and sum of squares of all elements: (2,) float64. The same values give the same bits."""
    parts = [torch.stack([one.sum(dtype=torch.float64), one.double().square().sum()]) for one in gradients]
    return _together(parts).sum(0)


def _together(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor, on the device of the first part: a model, or a module, may lie on several."""
    return torch.stack([one.to(parts[0].device) for one in parts])


class EarlyUpdate:
    """Steps modules early, on one rank."""

    def __init__(
        self, rank: int, optimizer: torch.optim.Optimizer, members: Mapping[str, Sequence[torch.nn.Parameter]],
        fence: Callable[[], None], iteration: Callable[[], int],
    ) -> None:  # fmt: skip
        """`members`: the parameters of each module. `fence` is called before the first module of an iteration;
        `iteration` gives its number."""
        self._rank, self._optimizer, self._fence, self._iteration = rank, optimizer, fence, iteration
        updated = {id(one) for group in optimizer.param_groups for one in group["params"]}
        self._members = {name: [one for one in own if id(one) in updated] for name, own in members.items()}
        self._wanted: Callable[[], Collection[str]] = tuple
        self._updated: Callable[[str], None] = lambda module: None
        self._early: set[int] = set()  # ids of the parameters that are updated in this iteration
        self._complete: dict[int, torch.Tensor] = {}  # gradients, by id of the parameter
        self._steps: list[_EarlyStep] = []  # of this iteration
        self._at = 0  # the iteration of them
        self._hidden: list[list[torch.nn.Parameter]] = []  # of each group, while the loop's step runs

    @property
    def begun(self) -> bool:
        """Whether this iteration's update has begun."""
        return bool(self._early)

    def install(self, wanted: Callable[[], Collection[str]], updated: Callable[[str], None]) -> None:
        """Update the modules in `wanted()` from the next backward on, and call `updated` with each."""
        self._wanted, self._updated = wanted, updated
        self._optimizer.register_step_pre_hook(self._require_no_closure)
        for module, parameters in self._members.items():
            for parameter in parameters:
                trained = parameter.requires_grad
                parameter.requires_grad_()  # required to register a hook; the parameter may be trained later
                parameter.register_post_accumulate_grad_hook(self._hook(module))
                parameter.requires_grad_(trained)

    def _require_no_closure(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if any(callable(one) for one in (*args[1:], *kwargs.values())):
            raise StateChangedError(
                f"rank {self._rank}: optimizer.step(closure) computes gradients within the update, which --sync-order "
                f"update_first does not allow; {_REMEDY}"
            )

    def _hook(self, module: str) -> Callable[[torch.Tensor], None]:
        def after_accumulation(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            if module not in self._wanted() or gradient is None:
                return
            if self._early and self._iteration() != self._at:
                self.require_ended()
            if id(parameter) in self._early:
                self._refuse(module, "had a second backward after its update")
            self._complete[id(parameter)] = gradient
            own = [one for one in self._members[module] if one.requires_grad]
            if all(id(one) in self._complete for one in own):
                self._step(module, own)
                self._updated(module)

        return after_accumulation

    @torch.no_grad()
    def _step(self, module: str, parameters: Sequence[torch.nn.Parameter]) -> None:
        """One step of these parameters alone."""
        if not self._early:
            self._at = self._iteration()
            self._fence()
        chosen = {id(one) for one in parameters}
        gradients = [self._complete[id(one)] for one in parameters]
        sums = _sums(gradients)
        self._early |= chosen
        self._limit(lambda one: id(one) in chosen)
        try:
            step: Any = type(self._optimizer).step
            getattr(step, "__wrapped__", step)(self._optimizer)  # without the hooks of a whole step
        finally:
            self._restore()
        versions = [one._version for one in parameters]
        self._steps.append(_EarlyStep(module, parameters, gradients, sums, versions, self._numbers()))

    def before_step(self) -> None:
        """The loop's step begins: hide what is updated already. Raises StateChangedError if the loop has changed what
        that update depended on."""
        for one in self._steps:
            if any(
                parameter.grad is not gradient
                for parameter, gradient in zip(one.parameters, one.gradients, strict=True)
            ):
                self._refuse(one.module, "had its gradient replaced between backward and update")
            if one.numbers != self._numbers():
                self._refuse(
                    one.module, "was updated before the loop set the learning rate, or another number of a group"
                )
            if [parameter._version for parameter in one.parameters] != one.versions:
                self._refuse(one.module, "had a parameter changed between backward and update")
        if self._steps:
            before = _together([one.sums for one in self._steps])
            now = _together([_sums(one.gradients) for one in self._steps])
            for place, same in enumerate((before == now).all(1).tolist()):
                if not same and bool(before[place].isfinite().all()):  # NaN is never equal: it shows no change
                    self._refuse(
                        self._steps[place].module,
                        "had its gradient changed between backward and update (clipping, GradScaler)",
                    )
        self._limit(lambda one: id(one) not in self._early)

    def _numbers(self) -> list[dict[str, Any]]:
        """What groups have besides parameters, tensors as numbers."""
        return [
            {
                key: value.tolist() if torch.is_tensor(value) else value
                for key, value in group.items()
                if key != "params"
            }
            for group in self._optimizer.param_groups
        ]

    def after_step(self) -> None:
        """The loop's step has ended."""
        self._restore()
        self._early.clear()
        self._complete.clear()
        self._steps.clear()

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
