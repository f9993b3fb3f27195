"""Hook one call of Hugging Face's `Trainer.train`, without an edit to the script.

Invariant: the Trainer's own loop trains. It is entered at the captured place by its own way to resume: in its epoch,
behind the updates that were made. An iteration is an update. Its version point is right before the next one reads its
batches, or where training ends: what the loop does in between (logging, evaluation, saving, callbacks, the end of an
epoch) belongs to the update before.

    _init_training_state      returns where to begin, which is known only once the state is restored
    _prepare_for_training     builds the engine or the wrapped model; protection begins; state is restored
    _run_epoch                enters the captured epoch behind the updates that were made
    get_batch_samples         the previous iteration ends, the next one begins; the batches that the loop takes. What
                              callbacks have changed since the restore, as they did when training and its epoch began,
                              is set again; tensors are compared
    _finalize_training        the last iteration ends

A checkpoint that the Trainer itself loads is replaced by what was restored: see `own_checkpoint`.

In: a Trainer, and what protects it. Out: calls of `TrainerProtection`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Protocol

import torch

from ...errors import ResumeError
from ...events import say
from ..script.script_hooks import replaced, wrap
from ..script.script_state import Marks
from ..script.undeclared_search import ignore, ignore_alone
from .batches_ahead import BatchesAhead
from .refusals import refuse_built, require_followed, require_loop
from .trainer_state import TrainerProgress

_TO_ENTER = ("ignore_data_skip", "eval_on_start")  # what would keep the loop from where it is entered


class TrainerProtection(Protocol):
    """What protects the state of a Trainer's model and optimizer, and carries the Trainer's own."""

    def building(self, run: TrainerRun) -> AbstractContextManager[None]:
        """Around the function that builds the wrapped model. In it, or at its end, `run.protected` is called if the job
        is protected, then `run.restore` if it was restored."""

    def tensors(self) -> Collection[torch.Tensor]:
        """Those that are restored, and that callbacks may not change before the first iteration. Called when the
        wrapped model is built, and right before that iteration."""

    def begin(self) -> None:
        """The next iteration begins, the previous one has ended. The first call restores generators, last."""

    def end(self) -> None:
        """Training has ended: the version point of the last iteration, unless it was restored: then its generators."""


class _Later:
    """A number that is known when it is used."""

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read

    def __index__(self) -> int:
        return self._read()

    def __str__(self) -> str:
        return str(self._read())


class TrainerRun:
    """One call of `train`."""

    def __init__(
        self, trainer: Any, module: ModuleType, protection: TrainerProtection, version: str, trial: Any,
        incomplete: str = "",
    ) -> None:  # fmt: skip
        """`module` is transformers.trainer. `incomplete`: a checkpoint of its own that it does not load, and why.
        Raises UnsupportedError if its loop has another shape."""
        require_loop(trainer, version)
        self._incomplete = incomplete
        self.trainer, self._module, self._protection = trainer, module, protection
        self._trial = trial
        self._given: Any = None  # the loader that the Trainer has built
        self._begins = [0, 0]  # epoch, and batches of it, at which the Trainer itself would begin
        self._saved: Mapping[str, Any] | None = None  # what was restored; None once it is placed
        self._restored: Mapping[str, Any] | None = None  # where the loop is entered
        self._progress: TrainerProgress | None = None
        self._batches: BatchesAhead | None = None
        self._epoch = 0
        self._over = False  # whether training has ended
        self._marks = Marks()  # of what callbacks may not change before the first iteration
        ignore("gather_function")  # which the Trainer replaces in each evaluation
        wrap(trainer, "_init_training_state", self._initializing)
        wrap(trainer, "_prepare_for_training", self._preparing)

    @property
    def iteration(self) -> int:
        return int(self.trainer.state.global_step)

    @property
    def loader(self) -> BatchesAhead:
        """The data position."""
        assert self._batches is not None
        return self._batches

    # ---- state ----

    def require_followed(self, systems: Collection[str] = ()) -> None:
        """Raises UnsupportedError."""
        require_followed(self.trainer, self._trial, systems)

    def state(self) -> dict[str, Any]:
        """At a version point; before the loop has begun, something of at least that size."""
        if self._saved is not None:
            return dict(self._saved)
        place = {"epoch": self._epoch, "over": self._over}
        if self._progress is None or self._batches is None:
            return {"place": place}
        first = {} if self._progress.begun else {"reserve": bytes(self._progress.expected_bytes())}
        return {"place": place, "progress": self._progress.read(), "position": self._batches.read(), **first}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """The state is restored, except for generators."""
        assert self._progress is not None and self._batches is not None
        self._saved = self._restored = saved
        self._progress.write_state(saved["progress"])
        self._batches.write(saved["position"])
        vars(self.trainer.args).update(dict.fromkeys(_TO_ENTER, False))  # until `_progress.write`

    # ---- the loop ----

    def _initializing(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._begins = list(original(*args, **kwargs))
        return _Later(lambda: self._entered()[0]), _Later(lambda: self._entered()[1])

    def _entered(self) -> tuple[int, int]:
        """The epoch in which the loop is entered, and the batches of it that are passed over."""
        if self._restored is None:
            return self._begins[0], self._begins[1]
        place = self._restored["place"]
        at = self._restored["position"]["pass"]
        if place["over"]:
            return int(self.trainer.state.num_train_epochs), 0
        return int(place["epoch"]), 0 if at is None else int(at["taken"])

    def _preparing(
        self, original: Callable[..., Any], max_steps: int, train_dataloader: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._given, self.last = train_dataloader, max_steps
        with self._protection.building(self):
            prepared = original(max_steps, train_dataloader, *args, **kwargs)
        if self._incomplete:
            self._require_restored()
        if self._progress is not None:
            self._marks.mark(self._protection.tensors())
        return prepared

    def _require_restored(self) -> None:
        """Raises ResumeError if nothing takes the place of a checkpoint that cannot be loaded."""
        if self._restored is None:
            raise ResumeError(
                f"{self._incomplete}, and nothing newer of this job was restored: remove it, or name a complete one"
            )
        if self.trainer.is_world_process_zero():
            say(f"{self._incomplete}: it is not loaded; iteration {self.iteration} was restored")

    def protected(self) -> None:
        """The state of this job is captured: follow the loop. Called once, when the model is wrapped."""
        trainer = self.trainer
        self._batches = BatchesAhead(self._given)
        self._progress = TrainerProgress(trainer, self._module.ExportableState)
        for name, call in (
            ("_run_epoch", self._running_epoch),
            ("get_batch_samples", self._taking_batches),
            ("_load_rng_state", self._loading_generators),
            ("_finalize_training", self._finalizing),
        ):
            wrap(trainer, name, call)

    def _running_epoch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        self._epoch = given["epoch"]
        self.loader.turning()
        epoch, batches = self._entered()
        entered: dict[str, Any] = {"epochs_trained": epoch, "steps_trained_in_current_epoch": batches}
        if self._restored is not None:
            entered["resume_from_checkpoint"] = "memory" if batches else None  # None: nothing to pass over
        with replaced(self._module, "skip_first_batches", self._skipping(self._module.skip_first_batches)):
            return original(**{**given, **entered})

    def _skipping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def skip(loader: Any, batches: int = 0) -> Any:
            if self._restored is not None:  # the loader begins behind them by itself
                return loader
            skipping = original(loader, batches)
            self.loader.skipping(skipping, batches)
            return skipping

        return skip

    def _taking_batches(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._protection.begin()
        self.place()
        taken = original(*args, **kwargs)
        self.loader.taking(len(taken[0]))
        if self.loader.ahead not in (0, 1):
            kind, step = type(self.trainer).__name__, self.iteration + 1
            counted = f"{len(taken[0])} returned, {self.loader.ahead} more read"
            refuse_built({"dropped": f"{kind}, iteration {step}: {counted}"})
        return taken

    def place(self) -> None:
        """After the generators: what the loop and its callbacks count."""
        if self._progress is not None and not self._progress.begun:
            self._progress.begun = True
            if any(map(self._marks.changed, self._protection.tensors())):
                self._report_changed()
            ignore_alone(self.trainer, self.trainer.accelerator, self.trainer.lr_scheduler)
        if self._saved is not None and self._progress is not None:
            saved, self._saved = self._saved, None
            self.loader.write(saved["position"])
            self._progress.write(saved["progress"])

    def _report_changed(self) -> None:
        """Raises ResumeError if what callbacks have changed was restored."""
        rank = self.trainer.args.process_index
        changed = (
            f"rank {rank}: a callback has changed parameters, buffers or the optimizer's tensors in on_train_begin or "
            "on_epoch_begin, which are called again after a restart"
        )
        remedy = "change them before Trainer.train, or at the end of a step or an epoch"
        if self._restored is not None:
            raise ResumeError(f"{changed}, as now, after iteration {self.iteration} was restored: {remedy}")
        say(f"{changed}: a restart will be refused; {remedy}", alarm=True)

    def _loading_generators(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return None if self._restored is not None else original(*args, **kwargs)

    def _finalizing(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._over = True
        self._protection.end()
        self.place()
        return original(*args, **kwargs)
