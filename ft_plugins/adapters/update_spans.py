"""Wrap functions of a framework in spans; in an update, separate waiting from work.

Before an update the ranks of all stages agree on infinities and on the gradient norm, so a stage that is done waits
there for the others. That part is a REDUCE span; UPDATE begins when the first torch optimizer steps. A skipped update
has no UPDATE span.

Invariant: arguments are passed on unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..model.host import Edges
from ..model.timeline import Kind


def update_spans(optimizers: Iterable[torch.optim.Optimizer], edges: Edges) -> Callable[..., Any]:
    """What is called in the place of the framework function that steps the torch `optimizers`."""
    agreeing = False

    def first_steps(*args: Any) -> None:
        nonlocal agreeing
        if agreeing:
            agreeing = False
            edges.end(Kind.REDUCE)
            edges.begin(Kind.UPDATE)

    def update(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal agreeing
        agreeing = True
        edges.begin(Kind.REDUCE)
        outcome = original(*args, **kwargs)
        edges.end(Kind.REDUCE if agreeing else Kind.UPDATE)
        agreeing = False
        return outcome

    for optimizer in optimizers:
        optimizer.register_step_pre_hook(first_steps)
    return update


def span(kind: Kind, edges: Edges) -> Callable[..., Any]:
    """What is called in the place of a function that is a span, and belongs to no microbatch."""

    def spanned(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        edges.begin(kind)
        outcome = original(*args, **kwargs)
        edges.end(kind)
        return outcome

    return spanned
