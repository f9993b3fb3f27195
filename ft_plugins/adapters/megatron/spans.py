"""The spans of Megatron's schedules: 1F1B, interleaved, and the one without pipeline.

    schedules.forward_step, backward_step    FORWARD, BACKWARD; the microbatch of a backward is that of its output
    P2PCommunicator._communicate             RECV where it waits for something to arrive, else SEND
    the requests that it hands back          RECV, SEND: where the interleaved schedule waits for them
    config.finalize_model_grads_func         REDUCE; the last stage waits there for the first, by tied embeddings
    optimizer.step                           REDUCE until all agree, then UPDATE (`adapters.update_spans`)

Invariant: functions are replaced in the module, class and objects that use them, and call what was there with the
arguments that it was called with. Only this host's model is followed, and only where gradients are wanted: an
evaluation has no spans. By names that megatron-core has from 0.14 on.

In: model chunks, their optimizers. Out: edges.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import p2p_communication, schedules

from ...errors import UnsupportedError
from ...model.host import Edges
from ...model.timeline import Kind
from ..script_hooks import REPLACED
from ..script_hooks import replace_in_megatron as replace
from ..update_spans import wrap_span, wrap_update

_MODEL, _CONFIG = 2, 6  # places of these arguments of forward_step


def follow(chunks: Sequence[Any], edges: Edges, optimizer: Any, inner: Sequence[torch.optim.Optimizer]) -> None:
    """Call `edges` around the spans of this rank. Raises UnsupportedError naming what this version lacks."""
    if hasattr(schedules.forward_step, REPLACED):
        raise UnsupportedError("the spans of a model are followed already; those of a second one cannot be")
    communicator = getattr(p2p_communication, "P2PCommunicator", None)
    if communicator is None:
        raise UnsupportedError(
            "megatron.core.pipeline_parallel.p2p_communication has no P2PCommunicator: spans of this version of "
            "megatron-core cannot be followed; use 0.14 or newer"
        )
    spans = _Spans(chunks, edges)
    replace(schedules, "forward_step", spans.forward)
    replace(schedules, "backward_step", spans.backward)
    replace(communicator, "_communicate", spans.communicate)
    replace(optimizer, "step", wrap_update(inner, edges))


class _Spans:
    """Which microbatch and chunk is passing, and the edges to call."""

    def __init__(self, chunks: Sequence[Any], edges: Edges) -> None:
        self._edges = edges
        self._chunks = {id(chunk): index for index, chunk in enumerate(chunks)}
        self._config = chunks[0].config
        self._passing: dict[int, tuple[int, int]] = {}  # by output: alive until its backward, so ids are unique
        self._finalize: Any = None  # what is in the configuration, wrapped

    def forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        edges, chunks, passing = self._edges, self._chunks, self._passing

        @functools.wraps(original)
        def forward_step(*args: Any, **kwargs: Any) -> Any:
            chunk = chunks.get(id(args[_MODEL] if len(args) > _MODEL else kwargs["model"]))
            if chunk is None or not torch.is_grad_enabled():
                return original(*args, **kwargs)
            config = args[_CONFIG] if len(args) > _CONFIG else kwargs["config"]
            if config.finalize_model_grads_func is not self._finalize:
                self._follow_reduction(config)
            microbatch = kwargs.get("current_microbatch")
            place = (-1 if microbatch is None else int(microbatch), chunk)
            edges.begin(Kind.FORWARD, *place)
            outcome = original(*args, **kwargs)
            edges.end(Kind.FORWARD, *place)
            passing[_key(outcome[0])] = place
            return outcome

        return forward_step

    def _follow_reduction(self, config: Any) -> None:
        """The training loop sets it when it begins."""
        given = config.finalize_model_grads_func
        self._finalize = None if given is None else wrap_span(Kind.REDUCE, given, self._edges)
        config.finalize_model_grads_func = self._finalize

    def backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        edges, passing = self._edges, self._passing

        @functools.wraps(original)
        def backward_step(*args: Any, **kwargs: Any) -> Any:
            output = args[1] if len(args) > 1 else kwargs["output_tensor"]
            place = passing.pop(_key(output), None)
            if place is None:
                return original(*args, **kwargs)
            edges.begin(Kind.BACKWARD, *place)
            outcome = original(*args, **kwargs)
            edges.end(Kind.BACKWARD, *place)
            return outcome

        return backward_step

    def communicate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        edges, config = self._edges, self._config

        @functools.wraps(original)
        def _communicate(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or self.config is not config:
                return original(self, *args, **kwargs)
            kind = _kind(kwargs)
            if kind is None:
                found = original(self, *args, **kwargs)
            else:
                edges.begin(kind)
                found = original(self, *args, **kwargs)
                edges.end(kind)
            requests = found[-1]
            if isinstance(requests, dict):
                for name, request in requests.items():
                    requests[name] = Awaited(request, Kind.RECV if name.startswith("recv") else Kind.SEND, edges)
            return found

        return _communicate


def _kind(told: Mapping[str, Any]) -> Kind | None:
    """What a call of _communicate is; one that only asks for something to arrive later is nothing yet."""
    if told.get("wait_on_reqs", True) and (told["recv_prev"] or told["recv_next"]):
        return Kind.RECV
    sends = told["tensor_send_next"] is not None or told["tensor_send_prev"] is not None
    return Kind.SEND if sends else None


def _key(output: Any) -> int:
    """Of what a stage hands on: a tensor, or a list that begins with one."""
    return id(output[0] if isinstance(output, (list, tuple)) and output else output)


class Awaited:
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
