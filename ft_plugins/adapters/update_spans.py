"""What adapters share about spans: the update, in which waiting and work are told apart.

Before anything is updated the ranks agree on infinities and on the gradient norm, over all stages: a stage that has
nothing more to do waits there for the others. So that is a REDUCE span, and UPDATE begins when the first optimizer
of torch steps. An update that is skipped has no UPDATE span.

Invariant: what is wrapped is called with the arguments that it was called with.
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
    """What wraps the function in which `optimizers`, torch's own, step."""
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
    """`original` as a span of no microbatch."""

    @functools.wraps(original)
    def spanned(*args: Any, **kwargs: Any) -> Any:
        edges.begin(kind)
        outcome = original(*args, **kwargs)
        edges.end(kind)
        return outcome

    return spanned
