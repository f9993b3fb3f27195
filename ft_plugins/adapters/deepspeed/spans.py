"""The spans of DeepSpeed's pipeline schedule, from its instructions.

    ForwardPass, BackwardPass         FORWARD, BACKWARD; counted, as microbatches pass through a stage in order
    SendActivation, SendGrad          SEND
    RecvActivation, RecvGrad          RECV: all of it is spent waiting
    ReduceTiedGrads, ReduceGrads      REDUCE
    OptimizerStep                     REDUCE until all stages agree, then UPDATE (`adapters.update_spans`)

A step of the schedule without a command needs no span: the time until the next command is a bubble.

Invariant: only one engine is hooked, by an `_INSTRUCTION_MAP` of its own while it trains; evaluation runs unchanged.
Hooked instructions call those of the class's map.

In: a PipelineEngine. Out: edges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import UnsupportedError
from ...model.host import Edges
from ...model.timeline import Kind
from ..script.script_hooks import around
from ..script.script_hooks import replace_in_deepspeed as replace
from ..update_spans import span, update_spans

_COUNTED = {"ForwardPass": Kind.FORWARD, "BackwardPass": Kind.BACKWARD}
_OTHERS = {
    "SendActivation": Kind.SEND,
    "SendGrad": Kind.SEND,
    "RecvActivation": Kind.RECV,
    "RecvGrad": Kind.RECV,
    "ReduceTiedGrads": Kind.REDUCE,
    "ReduceGrads": Kind.REDUCE,
}


def follow(engine: Any, edges: Edges, inner: torch.optim.Optimizer) -> None:
    """Call `edges` around the spans of `engine`; `inner` is its torch optimizer. Raises UnsupportedError."""
    kinds: dict[Any, Callable[..., Any]] | None = getattr(type(engine), "_INSTRUCTION_MAP", None)
    if kinds is None:
        raise UnsupportedError(
            f"{type(engine).__name__} has no _INSTRUCTION_MAP: only a pipeline's schedule has spans; pass a "
            "PipelineModule to deepspeed.initialize"
        )
    names = {kind.__name__ for kind in kinds}
    missing = sorted((_COUNTED.keys() | _OTHERS.keys()) - names)
    if missing:
        raise UnsupportedError(
            f"the schedule of {type(engine).__name__} has no instruction {', '.join(missing)}: this version of "
            "DeepSpeed is not supported; use 0.19.8"
        )
    passed = dict.fromkeys(_COUNTED.values(), 0)
    hooked = {kind: _hooked(kind.__name__, original, edges, passed) for kind, original in kinds.items()}

    def exec_schedule(original: Callable[..., Any], schedule: Any) -> Any:
        if not engine.module.training:
            return original(schedule)
        passed.update(dict.fromkeys(passed, 0))
        engine._INSTRUCTION_MAP = hooked
        try:
            return original(schedule)
        finally:
            del engine._INSTRUCTION_MAP

    replace(engine, "_exec_schedule", exec_schedule)
    replace(engine, "_take_model_step", update_spans([inner], edges))


def _hooked(name: str, original: Callable[..., Any], edges: Edges, passed: dict[Kind, int]) -> Callable[..., Any]:
    """An instruction that calls `edges`; `passed` counts microbatches."""
    kind = _COUNTED.get(name)
    if kind is None:
        return around(span(_OTHERS[name], edges))(original) if name in _OTHERS else original

    def counted(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        microbatch = passed[kind]
        edges.begin(kind, microbatch)
        outcome = original(*args, **kwargs)
        edges.end(kind, microbatch)
        passed[kind] = microbatch + 1
        return outcome

    return around(counted)(original)
