"""What a plain torch loop has besides tensors: read at the version point, set after a restore.

Invariant: what is set again is what was captured: numbers of the optimizer, groups, scheduler, data position, modes and
values of modules, what the caller returns. What cannot be set is compared, and named: what the loop carries on, the
shape of the model, trained state that nothing captures.

In: what a host was given. Out: plain values for the codec, and back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...errors import ResumeError
from ...events import say
from ...snapshot.capture import codec
from ..data.loader_position import DataPosition, position_of
from ..module_modes import ModuleNumbers, read_modes, require_encodable_modes, write_modes
from ..module_shape import ModuleShape
from ..optimizers import Optimizers
from ..parameter_groups import packed, regrouped
from ..script.own_counters import OwnCounters
from ..script.script_state import names_in
from ..script.suspended import SuspendedValues
from ..script.undeclared_search import Given, UndeclaredSearch, lines_to_add
from .torch_module import require_encodable_caller
from .torch_watch import set_zero_gradients, with_gradient

_CARRY = (
    "return it from get_state and take it back in set_state, or name it, TorchHost(..., ignored=['its name']), if a "
    "restart need not restore it"
)


class LoopState:
    """Of one host. `names()`: of the module's parameters."""

    sets_again = False  # whether functions of the script are called between a restore and the first iteration

    def __init__(
        self, module: torch.nn.Module, optimizers: Optimizers, scheduler: Any,
        caller: tuple[Callable[[], Any], Callable[[Any], None]], ignored: Sequence[Any], rank: int, host: str,
        names: Callable[[], dict[torch.Tensor, str]], given: Callable[[], Given],
    ) -> None:  # fmt: skip
        """Raises UnsupportedError. `host` is for messages."""
        require_encodable_modes(module, rank)
        self._module, self._optimizers, self._scheduler, self._caller = module, optimizers, scheduler, caller
        self._rank, self._names = rank, names
        self._ignored = frozenset(one for one in ignored if isinstance(one, str))
        self._numbers = ModuleNumbers(module, optimizers)
        self.shape = ModuleShape(self._numbers, rank == 0)
        self._counted = OwnCounters(bounded=False)  # what the session's own loop runs over is the same in every start
        self._suspended = SuspendedValues()
        remedy = functools.partial(lines_to_add, host)
        self.undeclared = UndeclaredSearch(given, remedy, f"rank {rank}", rank == 0)
        self.position: DataPosition | None = None
        self._groups = ""  # the optimizer's, when the host was built

    def follow(self, sampler: Any, iteration: Callable[[], int]) -> None:
        """The optimizer's state is there: note its groups, and follow what the loop reads. Raises ConfigError."""
        self._groups = packed(self._optimizers.named_groups(self._names()))
        if sampler is not None:
            self.position = position_of(sampler, iteration, lambda: self._module.training)

    def captured(self, iteration: int) -> dict[str, Any]:
        """At a version point; 0: only the size is asked for. Raises InventoryError or StateChangedError."""
        values = self._values(iteration)
        if not iteration:
            require_encodable_caller(values["caller"], f"rank {self._rank}")
        else:
            self.undeclared.check(iteration, values["caller"], *self._caller)
        lost, suspended = self.undeclared.lost(), self._suspended.captured(not iteration)
        self._say_remark(self._suspended.remark)
        return {"caller": values, "loop": self._counted.captured(), "suspended": suspended, "lost": lost}

    def _values(self, iteration: int) -> dict[str, Any]:
        return {
            **self._optimizers.values(self._names()),
            "members": self._groups,
            "numbers": self._numbers.captured(self._rank == 0),
            "modes": read_modes(self._numbers.parts.modules),
            "shape": self.shape.captured(iteration),
            "graded": with_gradient(dict(self._module.named_parameters())),
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "position": None if self.position is None else self.position.read(),
            "caller": self._caller[0](),
        }

    def regrouped(self, small: Mapping[str, Any]) -> str:
        return regrouped(small["caller"].get("members"), self._groups)

    def restore(self, small: Mapping[str, Any]) -> None:
        """All but what `place` sets. Raises ResumeError."""
        if "lost" not in small:
            raise ResumeError(
                f"rank {self._rank}: an earlier version of ft_plugins captured this, which did not note what it lacks: "
                "resume with that version, or start with --ftp-resume fresh"
            )
        self.undeclared.require_kept(small["lost"])
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
        self.shape.restored(saved.get("shape"))

    def begin(self) -> None:
        self._counted.begin(False, ())

    def begin_restored(self, small: Mapping[str, Any]) -> None:
        """Raises ResumeError if what ends the loop is not what it was in the captured version; other counters that the
        script carries on are named."""
        self._counted.restored(small.get("loop"), within=False)
        self._suspended.begin(small.get("suspended"), self._ignored)
        self._say_remark(self._suspended.remark)
        if problem := self._counted.begin(True, self._ignored, names_in(self._caller[1])):
            raise ResumeError(f"rank {self._rank}: the loop does not continue: {problem}; {_CARRY}")
        self._say_remark(self._counted.remark)

    def _say_remark(self, remark: str) -> None:
        if remark and self._rank == 0:
            say(f"{remark}: if training depends on it, results differ; {_CARRY}", alarm=True)

    def scalars(self) -> bytes:
        """Parameter groups, and the numbers and 0-dimensional tensors of the optimizer's state."""
        return codec.encode(self._optimizers.values(self._names()))

    def restore_scalars(self, encoded: bytes) -> None:
        self._optimizers.restore(codec.decode(encoded), self._names())
