"""Report what a plain torch loop computes and reads: forwards, saves, inputs.

In: the model that the loop has, the modules in it. Out: calls of a `ProgressReceiver` and of an `Observer`.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from ...model.observation import Observer
from ...model.progress import ProgressReceiver
from ..data.observed_inputs import ObservedForwards, digest_of_gradients
from ..forward_edges import Saving, follow_forwards
from ..host_parts import local_part

_CONTAINERS = (torch.nn.ModuleDict, torch.nn.ModuleList)


def called_by_loop(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that a loop calls: the model, or those that it holds if it cannot be called."""
    return list(model.children()) if isinstance(model, _CONTAINERS) else [model]


def report_progress(
    model: torch.nn.Module, parallels: Sequence[DistributedDataParallel], progress: ProgressReceiver
) -> None:
    """Report forwards, and calls of torch's functions that save."""
    follow_forwards(called_by_loop(model), progress)
    within = [one.module for one in parallels]  # evaluations often call it
    follow_forwards(within, progress, evaluations_only=True)
    buffers = any(one.broadcast_buffers and next(one.buffers(), None) is not None for one in parallels)
    if buffers or any(local_part(one) is not one for one in model.parameters()):
        progress.shares_forward()
    saving = Saving(progress)
    saving.follow(torch, ("save",))
    saving.follow(sys.modules.get("torch.distributed.checkpoint"), ("save", "async_save"))


def report_inputs(
    model: torch.nn.Module, module: torch.nn.Module, parallels: Sequence[DistributedDataParallel], observer: Observer
) -> None:
    """Report what forwards of the model read; of a container's parts, if the loop calls those."""
    within = [module, *(one.module for one in parallels)]
    ObservedForwards(dict.fromkeys([*called_by_loop(model), *within]), observer)


def report_gradients(module: torch.nn.Module, used: Collection[str], observer: Observer) -> None:
    """Report the gradients that a step uses: other parameters may have those of an iteration before."""
    digest = digest_of_gradients(one for name, one in module.named_parameters() if name in used)
    if digest is not None:
        observer.graded(digest)
