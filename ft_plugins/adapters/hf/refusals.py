"""What of a Hugging Face Trainer cannot be followed exactly, by name. Pure.

In: a Trainer. Out: UnsupportedError, or nothing."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from ...errors import UnsupportedError

_LOOP = ("_inner_training_loop", "_init_training_state", "_prepare_for_training", "_run_epoch", "_finalize_training")
HOOKED = (*_LOOP, "get_batch_samples", "_load_rng_state")
_PLACE = ("epoch", "epochs_trained", "steps_trained_in_current_epoch", "resume_from_checkpoint")  # of `_run_epoch`
_WITHIN_THE_BACKWARD = ("lomo", "adalomo")


LOCAL_SGD = (
    "cannot protect this job: local SGD (sync.policy) with Hugging Face's Trainer, which gathers losses and numbers of "
    "tokens over all ranks in each update"
)


TWICE = (
    "Trainer.train was called twice, and a second training cannot be protected: train once in a job, or start the "
    "second training as a job of its own (--ftp-job), with what the first one has trained, "
)


def require_loop(trainer: Any, version: str) -> None:
    """Raises UnsupportedError if the Trainer of this version of transformers has another loop."""
    missing = [name for name in HOOKED if not callable(getattr(trainer, name, None))]
    if missing or not set(_PLACE) <= set(inspect.signature(trainer._run_epoch).parameters):
        named = ", ".join(missing or ["way to enter an epoch"])
        raise UnsupportedError(
            f"cannot protect this job: the Trainer of transformers {version} has no {named}: use transformers 5.24"
        )


def require_followed(trainer: Any, trial: Any) -> None:
    """Raises UnsupportedError that names everything in use that is not followed."""
    problems = list(_problems(trainer, trial))
    if problems:
        raise UnsupportedError(f"cannot protect this job: {'; '.join(problems)}")


def _problems(trainer: Any, trial: Any) -> Iterator[str]:
    kind, args = type(trainer), trainer.args
    own = [name for name in _LOOP if not _module_of(getattr(kind, name)).startswith("transformers.")]
    if own:
        yield f"{kind.__name__} has a loop of its own ({', '.join(own)})"
    if trial is not None or getattr(trainer, "hp_search_backend", None) is not None:
        yield "a hyperparameter search trains several times"
    if args.auto_find_batch_size:
        yield "auto_find_batch_size begins training again"
    if args.n_gpu > 1:
        yield "torch's DataParallel (several GPUs in one process): start a process per GPU"
    if str(getattr(args.optim, "value", args.optim)) in _WITHIN_THE_BACKWARD:
        yield f"the optimizer {args.optim} updates in the backward"
    if getattr(trainer.accelerator, "parallelism_config", None) is not None or trainer.get_tp_size() > 1:
        yield "parallelism_config (tensor, context or sequence parallelism of accelerate)"
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        yield "a model that transformers has sharded when it loaded it"


def _module_of(function: Any) -> str:
    return str(getattr(function, "__module__", ""))
