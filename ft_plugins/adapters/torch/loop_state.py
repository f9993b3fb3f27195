"""What a plain torch loop has besides tensors: read at the version point, set after a restore.

Invariant: what is set again is what was captured: numbers of the optimizer, groups, scheduler, data position, modes and
values of modules, what the caller returns. Trained state that nothing captures is named.

In: what a host was given. Out: plain values for the codec, and back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...errors import ResumeError
from ...events import say
from ...snapshot.capture import codec
from ..believed_state import BelievedState
from ..data.loader_position import DataPosition, position_of
from ..module_modes import ModuleNumbers, read_modes, require_encodable_modes, write_modes
from ..optimizers import Optimizers, Schedulers
from ..parameter_groups import packed, regrouped
from ..script.undeclared_search import Given, UndeclaredSearch, lines_to_add
from .torch_module import require_encodable_caller
from .torch_watch import set_zero_gradients, with_gradient


class LoopState:
    """Of one host. `names()`: of the module's parameters."""

    sets_again = False  # whether functions of the script are called between a restore and the first iteration

    def __init__(
        self, module: torch.nn.Module, optimizers: Optimizers, scheduler: Any,
        caller: tuple[Callable[[], Any], Callable[[Any], None]], rank: int, host: str,
        names: Callable[[], dict[torch.Tensor, str]], given: Callable[[], Given],
    ) -> None:  # fmt: skip
        """Raises UnsupportedError. `host` is for messages."""
        require_encodable_modes(module, rank)
        self._module, self._optimizers, self._scheduler, self._caller = module, optimizers, scheduler, caller
        self._rank, self._names = rank, names
        self._numbers = ModuleNumbers(module)
        remedy = functools.partial(lines_to_add, host)
        self.undeclared = UndeclaredSearch(given, remedy, f"rank {rank}")
        every = scheduler.schedulers if isinstance(scheduler, Schedulers) else [scheduler]
        self._believed = [BelievedState(one, "scheduler", functools.partial(say, alarm=True)) for one in every if one]
        self.position: DataPosition | None = None
        self._groups = ""  # the optimizer's, when the host was built

    def follow(self, sampler: Any, iteration: Callable[[], int]) -> None:
        """The optimizer's state is there: note its groups, and follow what the loop reads. Raises ConfigError."""
        self._groups = packed(self._optimizers.named_groups(self._names()))
        if sampler is not None:
            self.position = position_of(sampler, iteration, lambda: self._module.training)

    def captured(self, iteration: int) -> dict[str, Any]:
        """At a version point; 0: only the size is asked for. Raises InventoryError or StateChangedError."""
        values = {
            **self._optimizers.values(self._names()),
            "members": self._groups,
            "numbers": self._numbers.captured(),
            "modes": read_modes(self._numbers.parts.modules),
            "graded": with_gradient(dict(self._module.named_parameters())),
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "position": None if self.position is None else self.position.read(),
            "caller": self._caller[0](),
        }
        if not iteration:
            require_encodable_caller(values["caller"], f"rank {self._rank}")
        else:
            self.undeclared.check(iteration, values["caller"])
            for one in (one for one in self._believed if not one.over):
                one.look(iteration, one.source.state_dict())
        return {"caller": values}

    def regrouped(self, small: Mapping[str, Any]) -> str:
        return regrouped(small["caller"].get("members"), self._groups)

    def restore(self, small: Mapping[str, Any]) -> None:
        """All but what `place` sets. Raises ResumeError."""
        saved = small["caller"]
        if (saved["scheduler"] is None) != (self._scheduler is None):
            raise ResumeError(
                f"rank {self._rank}: only one of this job and the captured job has a learning rate scheduler: resume "
                "with the scheduler of the captured job, or start with --ftp-resume fresh"
            )
        if (saved["position"] is None) != (self.position is None):
            raise ResumeError(
                f"rank {self._rank}: only one of this job and the captured job passed TorchHost a sampler: resume "
                "with the sampler of the captured job, or start with --ftp-resume fresh"
            )
        self._set_values(saved)
        set_zero_gradients(dict(self._module.named_parameters()), saved["graded"])
        self._caller[1](saved["caller"])

    def _set_values(self, saved: Mapping[str, Any]) -> None:
        if self._scheduler is not None:
            self._scheduler.load_state_dict(saved["scheduler"])
        self._optimizers.restore(saved, self._names())

    def place(self, small: Mapping[str, Any]) -> None:
        """Right before the first iteration, and before generators are set. Raises ResumeError."""
        saved = small["caller"]
        if self.sets_again:
            self._set_values(saved)
        if self.position is not None:
            self.position.write(saved["position"])
        self._numbers.restore(saved["numbers"])
        write_modes(self._module, saved["modes"])

    def scalars(self) -> bytes:
        """Parameter groups, and the numbers and 0-dimensional tensors of the optimizer's state."""
        return codec.encode(self._optimizers.values(self._names()))

    def restore_scalars(self, encoded: bytes) -> None:
        self._optimizers.restore(codec.decode(encoded), self._names())
