"""Report the spans of Megatron's schedules: 1F1B, interleaved, and the one without pipeline.

    schedules.forward_step, backward_step    FORWARD, BACKWARD; the microbatch of a backward is that of its output
    P2PCommunicator._communicate             RECV if it waits for data to arrive, else SEND
    the requests that it returns             RECV, SEND, when the interleaved schedule waits for them
    config.finalize_model_grads_func         REDUCE; with tied embeddings the last stage waits there for the first
    optimizer.step                           REDUCE until all agree, then UPDATE (`adapters.update_spans`)

Invariant: functions are replaced in the module, class and objects that use them, and pass their arguments on. Only this
host's model is followed, and only with gradients enabled: an evaluation has no spans. Needs megatron-core 0.14 or
newer.

In: model chunks, their optimizers. Out: calls of `Edges`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import p2p_communication, schedules

from ...errors import UnsupportedError
from ...model.host import Edges
from ...model.timeline import Kind
from ..rules import refuse
from ..rules.megatron import COMBINED, OTHERWISE
from ..script.script_hooks import REPLACED, around, is_within
from ..script.script_hooks import replace_in_megatron as replace
from ..update_spans import span, update_spans

_MODEL, _CONFIG = 2, 6  # places of these arguments of forward_step


def follow(chunks: Sequence[Any], edges: Edges, optimizer: Any, inner: Sequence[torch.optim.Optimizer]) -> None:
    """Call `edges` around the spans of this rank from now on. Raises UnsupportedError, naming what a version lacks."""
    refuse((COMBINED,), OTHERWISE, chunks[0].config, systems=COMBINED.systems)
    if hasattr(schedules.forward_step, REPLACED):
        raise UnsupportedError("the spans of a second model in one process cannot be followed")
    spans = _Spans(chunks, edges)
    replace(schedules, "forward_step", spans.forward)
    replace(schedules, "backward_step", spans.backward)
    replace(getattr(p2p_communication, "P2PCommunicator", None), "_communicate", spans.communicate)
    replace(optimizer, "step", update_spans(inner, edges))


class _Spans:
    """The wrappers of the functions above, with the microbatches between their forward and backward."""

    def __init__(self, chunks: Sequence[Any], edges: Edges) -> None:
        self._edges = edges
        self._chunks = {id(chunk): index for index, chunk in enumerate(chunks)}
        self._config = chunks[0].config
        # (microbatch, chunk) by id of the output, which stays alive until its backward, so that ids are unique
        self._in_flight: dict[int, tuple[int, int]] = {}
        self._finalize: Any = None  # the wrapped function that is in the configuration

    def forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        chunk = self._chunks.get(id(args[_MODEL] if len(args) > _MODEL else kwargs["model"]))
        if chunk is None or not torch.is_grad_enabled():
            return original(*args, **kwargs)
        config = args[_CONFIG] if len(args) > _CONFIG else kwargs["config"]
        if not is_within(self._finalize, config.finalize_model_grads_func):
            self._follow_reduction(config)
        microbatch = kwargs.get("current_microbatch")
        place = (-1 if microbatch is None else int(microbatch), chunk)
        self._edges.begin(Kind.FORWARD, *place)
        outcome = original(*args, **kwargs)
        self._edges.end(Kind.FORWARD, *place)
        self._in_flight[_key(outcome[0])] = place
        return outcome

    def _follow_reduction(self, config: Any) -> None:
        """Wrap the reduction, which the training loop sets only when it begins."""
        given = config.finalize_model_grads_func
        self._finalize = None if given is None else around(span(Kind.REDUCE, self._edges))(given)
        config.finalize_model_grads_func = self._finalize

    def backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = args[1] if len(args) > 1 else kwargs["output_tensor"]
        place = self._in_flight.pop(_key(output), None)
        if place is None:
            return original(*args, **kwargs)
        self._edges.begin(Kind.BACKWARD, *place)
        outcome = original(*args, **kwargs)
        self._edges.end(Kind.BACKWARD, *place)
        return outcome

    def communicate(self, original: Callable[..., Any], communicator: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or communicator.config is not self._config:
            return original(communicator, *args, **kwargs)
        kind = _kind(kwargs)
        call = original if kind is None else around(span(kind, self._edges))(original)
        outcome = call(communicator, *args, **kwargs)
        requests = outcome[-1]
        if isinstance(requests, dict):
            for name, request in requests.items():
                sort = Kind.RECV if name.startswith("recv") else Kind.SEND
                requests[name] = SpannedRequest(request, sort, self._edges)
        return outcome


def _kind(arguments: Mapping[str, Any]) -> Kind | None:
    """The kind of a call of _communicate; None for one that only posts a receive."""
    if arguments.get("wait_on_reqs", True) and (arguments["recv_prev"] or arguments["recv_next"]):
        return Kind.RECV
    sends = arguments["tensor_send_next"] is not None or arguments["tensor_send_prev"] is not None
    return Kind.SEND if sends else None


def _key(output: Any) -> int:
    """The id of a stage's output: a tensor, or a list that begins with one."""
    return id(output[0] if isinstance(output, (list, tuple)) and output else output)


class SpannedRequest:
    """A request of torch.distributed whose wait is a span."""

    __slots__ = ("_edges", "_kind", "_request")

    def __init__(self, request: Any, kind: Kind, edges: Edges) -> None:
        self._request, self._kind, self._edges = request, kind, edges

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        self._edges.begin(self._kind)
        outcome = self._request.wait(*args, **kwargs)
        self._edges.end(self._kind)
        return outcome

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)
