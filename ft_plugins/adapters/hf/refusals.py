"""Refuse what of Hugging Face's libraries cannot be followed exactly: what `adapters.rules.hugging_face` names.

In: a Trainer, or facts of a loader or a loop. Out: UnsupportedError, one line, or nothing."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from ..rules import HUGGING_FACE, refuse
from ..rules.hugging_face import OTHERWISE

_LOOP = ("_inner_training_loop", "_init_training_state", "_prepare_for_training", "_run_epoch", "_finalize_training")
HOOKED = (*_LOOP, "get_batch_samples", "_load_rng_state")
_PLACE = ("epoch", "epochs_trained", "steps_trained_in_current_epoch", "resume_from_checkpoint")  # of `_run_epoch`


def refuse_built(built: dict[str, Any], *arguments: Any, systems: Iterable[str] = (), more: str = "") -> None:
    """Raises UnsupportedError that names everything in use that is not followed, and ends with `more`."""
    refuse(HUGGING_FACE, OTHERWISE, *arguments, {"built": built}, systems=systems, more=more)


def require_loop(trainer: Any, version: str) -> None:
    """Raises UnsupportedError if the Trainer of this version of transformers has another loop."""
    missing = [name for name in HOOKED if not callable(getattr(trainer, name, None))]
    if not missing and not set(_PLACE) <= set(inspect.signature(trainer._run_epoch).parameters):
        missing = ["way to enter an epoch"]
    refuse_built({"shape": missing and f"transformers {version} has no {missing[0]}"})


def require_followed(trainer: Any, trial: Any, systems: Iterable[str] = ()) -> None:
    """Raises UnsupportedError that names everything in use that is not followed."""
    kind, args = type(trainer), trainer.args
    own = [name for name in _LOOP if not str(getattr(kind, name).__module__).startswith("transformers.")]
    parallel = getattr(trainer.accelerator, "parallelism_config", None) is not None or trainer.get_tp_size() > 1
    built = {
        "trainer": True,
        "own_loop": own and f"{kind.__name__}: {', '.join(own)}",
        "search": trial is not None or getattr(trainer, "hp_search_backend", None) is not None,
        "devices": args.n_gpu > 1 and args.n_gpu,
        "parallelism": parallel,
        "sharded": getattr(trainer, "is_distributed_loading_by_transformers", False),
    }
    refuse_built(built, args, systems=systems)
