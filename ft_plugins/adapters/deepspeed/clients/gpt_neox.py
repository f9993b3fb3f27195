"""gpt-neox's `pretrain`: its loop continues from neox_args.iteration, its samplers skip the batches that were read.

    neox_args.iteration        set after setup_model_and_optimizer; the loader of training is moved there later
    validation                 gpt-neox guesses how many batches were read, which is wrong with accumulation; here they
                               are counted
    lr_scheduler, trackers     captured with the engine

Invariant: a loader is read once: `itertools.cycle` keeps the batches of its first pass and repeats them, and a restart
lacks those before it. Training data that end earlier are refused at the start, validation data at a restart.

`train.py` gets its configuration from deepy.py, which starts DeepSpeed's own launcher. Under ft-run it takes deepy.py's
arguments itself: the yml files, in which `ft_plugins` is our block.

In: its megatron/training.py. Out: a client."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ....config.deepspeed_json import BLOCK
from ....errors import ResumeError, UnsupportedError
from ....model.host import ScalarWriter
from ....patches import MegatronPackage, package_in
from ...rules.megatron_forks import GPT_NEOX
from ...scalar_writers import of_neox
from ...script.script_hooks import replace_in_deepspeed, replaced
from . import EngineClients
from .megatron_loop import ForkLoop, follow_setup

_EXTRA = "deepspeed_extra_args"  # of gpt-neox: what it hands to DeepSpeed as it is
_CONFIGURATION = "--megatron_config"


class GptNeox(ForkLoop):
    """The loop of `megatron.training.train`. `read`: batches of validation that were read since iteration 0."""

    name = MegatronPackage.GPT_NEOX.value
    rules = GPT_NEOX

    def __init__(self, module: ModuleType, arguments: Any) -> None:
        super().__init__(module, arguments)
        self._read = 0
        self._valid: Any = None  # the iterator of validation

    def follow(self, engine: Any, begin: Callable[[], None]) -> None:
        super().follow(engine, begin)
        replace_in_deepspeed(self._module, "shift_and_wrap_data_loaders", self._wrapping)
        replace_in_deepspeed(self._module, "evaluate", self._evaluating)

    @property
    def write_scalars(self) -> ScalarWriter | None:
        return of_neox(self.arguments)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "validation": self._read}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._read = state["validation"]

    def _wrapping(
        self, original: Callable[..., Any], neox_args: Any, data_loaders: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        valid = data_loaders["valid"]
        require_one_pass("training", data_loaders["train"], neox_args.train_iters * self._accumulation)
        if not (self.restored and valid is not None):
            iterators = original(neox_args, data_loaders, *args, **kwargs)
            self._read = 0 if valid is None else valid.batch_sampler.start_iter
        else:
            if self._read >= len(valid):
                raise ResumeError(one_pass("validation", len(valid), self._read))
            # it skips iteration * accumulation // eval_interval * eval_iters batches: with these 1 * self._read
            interval = neox_args.iteration * self._accumulation
            with replaced(neox_args, "eval_interval", interval), replaced(neox_args, "eval_iters", self._read):
                iterators = original(neox_args, data_loaders, *args, **kwargs)
        self._valid = iterators[1]
        return iterators

    def _evaluating(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        outcome = original(*args, **kwargs)
        given = kwargs.get("data_iterator", args[2] if len(args) > 2 else None)
        if given is self._valid:
            self._read += self.arguments.eval_iters * self._accumulation
        return outcome

    @property
    def _accumulation(self) -> int:
        return int(self.arguments.gradient_accumulation_steps)


def require_one_pass(what: str, loader: Any, batches: int) -> None:
    """Raises UnsupportedError if a loader ends before it has been read as often as asked for."""
    if loader is not None and batches > len(loader):
        raise UnsupportedError(f"cannot protect this job of gpt-neox: {one_pass(what, len(loader), batches)}")


def one_pass(what: str, has: int, batches: int) -> str:
    return (
        f"its data for {what} have {has} batches, but {batches} are read, and a restart cannot repeat those of a pass "
        "that began before it: lengthen the data, or build more epochs of them"
    )


# configuration


def _consuming(original: Callable[..., Any], overwrite_values: Any = None, input_args: Any = None) -> Any:
    """NeoXArgs.consume_neox_args: without deepy.py's encoded configuration the arguments are those of deepy.py."""
    words: Sequence[str] = sys.argv[1:] if input_args is None else input_args
    if not any(word.partition("=")[0] == _CONFIGURATION for word in words):
        neox_args = original.__self__.consume_deepy_args([sys.argv[0], *words])  # type: ignore[attr-defined]
        input_args = neox_args.get_deepspeed_main_args()
    return original(overwrite_values=overwrite_values, input_args=input_args)


def _building(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    """NeoXArgs.__init__: our block goes to DeepSpeed as it is; the number of ranks is the launcher's."""
    block = kwargs.pop(BLOCK, None)
    if block is not None:
        kwargs[_EXTRA] = {**(kwargs.get(_EXTRA) or {}), BLOCK: block}
    if "WORLD_SIZE" in os.environ:
        kwargs.setdefault("global_num_gpus", int(os.environ["WORLD_SIZE"]))
    original(self, *args, **kwargs)


def follow(module: ModuleType, clients: EngineClients) -> None:
    """Follow the loop, if the module is gpt-neox's."""
    if package_in([Path(str(module.__file__)).parent]) is not MegatronPackage.GPT_NEOX:
        return
    kind = sys.modules["megatron.neox_arguments"].NeoXArgs
    replace_in_deepspeed(kind, "consume_neox_args", _consuming)
    replace_in_deepspeed(kind, "__init__", _building)
    follow_setup(module, clients, lambda neox_args, *_, **__: GptNeox(module, neox_args))
