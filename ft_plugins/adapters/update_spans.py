"""Wrap functions of a framework in spans; in an update, separate waiting from work.

Before an update the ranks of all stages agree on infinities and on the gradient norm, so a stage that is done waits
there for the others. That part is a REDUCE span; UPDATE begins when the first torch optimizer steps. A skipped update
has no UPDATE span.

Invariant: arguments are passed on unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..model.host import Edges
from ..model.timeline import Kind


def wrap_update(
    optimizers: Iterable[torch.optim.Optimizer], edges: Edges
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A wrapper for the framework function that steps the torch `optimizers`."""
    agreeing = [False]

    def first_steps(*args: Any) -> None:
        if agreeing[0]:
            agreeing[0] = False
            edges.end(Kind.REDUCE)
            edges.begin(Kind.UPDATE)

    for optimizer in optimizers:
        optimizer.register_step_pre_hook(first_steps)

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def update(*args: Any, **kwargs: Any) -> Any:
            agreeing[0] = True
            edges.begin(Kind.REDUCE)
            outcome = original(*args, **kwargs)
            edges.end(Kind.REDUCE if agreeing[0] else Kind.UPDATE)
            agreeing[0] = False
            return outcome

        return update

    return wrap


def wrap_span(kind: Kind, original: Callable[..., Any], edges: Edges) -> Callable[..., Any]:
    """`original` as a span that belongs to no microbatch."""

    @functools.wraps(original)
    def spanned(*args: Any, **kwargs: Any) -> Any:
        edges.begin(kind)
        outcome = original(*args, **kwargs)
        edges.end(kind)
        return outcome

    return spanned
