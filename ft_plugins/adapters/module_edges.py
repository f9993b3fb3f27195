"""Report when each forward and each backward of a module begins and ends.

    forward     hooks of the module, before everything that it does and after it; also in evaluations
    backward    hooks of the graph: it begins right before the last operation of the forward is reversed, and ends when
                the gradient of the module's input is complete. A module whose input has no history (the embedding, the
                first of a pipeline stage or of a recomputed part) ends when the gradients of all of its trained
                parameters are accumulated

"Input" and "output" are the first tensor with a history in them, nested tuples, lists and mappings included. What is
left open ends with the call of backward: a module whose parameters get no gradient, or that FSDP does not reduce yet.
The backward of a module without trained parameters, whose input has no history, is not reported.

On a device, edges are those of the host, which launches the work and does not wait for it.

Activation checkpointing runs forwards within a backward, and reports them. If no backward is open then, the one of the
first module that is run again begins: its recomputation is a part of it.

Invariant: hooks read nothing and change nothing, neither numbers nor memory: they return None, and no tensor, function
of the graph or parameter is replaced. Without gradients only forwards are hooked. Inner edges lie inside outer ones:
what is registered at one function of the graph is reported in reverse order.

In: parts of a model, and the parameters of the modules at each. Out: calls of a `model.reduction.ModuleEdges`. Raises
UnsupportedError for a part whose calls run no hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..errors import UnsupportedError
from ..model.reduction import ModuleEdges

Members = Mapping[str, Sequence[torch.Tensor]]  # modules by name, each with those of its parameters that are at a place


def require_followable(rank: int, part: torch.nn.Module, modules: Members) -> None:
    """Raises UnsupportedError if the forward of `part` cannot be followed."""
    reason = ""
    if isinstance(part, torch.jit.ScriptModule):
        reason = "is a ScriptModule, whose forward calls no hooks: pass the model without torch.jit"
    elif type(part).forward is torch.nn.Module.forward:
        reason = f"is in a {type(part).__name__}, which has no forward: give it a forward, which uses its parameters"
    if reason:
        raise UnsupportedError(
            f"rank {rank}: forward and backward of '{next(iter(modules))}' cannot be followed: it {reason}"
        )


def follow_places(rank: int, places: Sequence[tuple[torch.nn.Module, Members]], edges: ModuleEdges) -> EdgeReporter:
    """Report the calls of each part as those of its modules. Raises UnsupportedError before anything is changed."""
    for part, modules in places:
        require_followable(rank, part, modules)
    reporter = EdgeReporter(edges)
    for part, modules in places:
        reporter.follow(part, modules)
    return reporter


class _Followed:
    """One module at one place."""

    def __init__(self, name: str, parameters: Sequence[torch.Tensor]) -> None:
        self.name, self.parameters = name, list(parameters)
        self.hooked: set[int] = set()  # ids of parameters
        self.awaited: set[int] = set()  # ids of parameters whose gradients end the backward that is open
        self.calls: list[bool] = []  # of each forward that is running, whether its input has a history

    def trained(self) -> list[torch.Tensor]:
        return [one for one in self.parameters if one.requires_grad]


class EdgeReporter:
    """Reports the edges of all modules of one rank to one `ModuleEdges`."""

    def __init__(self, edges: ModuleEdges) -> None:
        self._edges = edges
        self._open: list[_Followed] = []  # backwards, the outermost first

    def follow(self, part: torch.nn.Module, modules: Members) -> None:
        """Report the calls of `part` as those of `modules`."""
        followed = [_Followed(name, parameters) for name, parameters in modules.items()]

        @torch.compiler.disable
        def before(module: Any, args: Any, kwargs: Any) -> None:
            self._before(followed, (args, kwargs))

        @torch.compiler.disable
        def after(module: Any, args: Any, output: Any) -> None:
            self._after(followed, output)

        part.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        part.register_forward_hook(after, always_call=True)  # a recomputation may be broken off

    def wrapped(self, function: Callable[..., Any], modules: Members) -> Callable[..., Any]:
        """`function`, whose calls are reported as those of `modules`."""
        followed = [_Followed(name, parameters) for name, parameters in modules.items()]

        def call(*args: Any, **kwargs: Any) -> Any:
            output = None
            self._before(followed, (args, kwargs))
            try:
                output = function(*args, **kwargs)
            finally:
                self._after(followed, output)
            return output

        return call

    # ---- forward ----

    def _before(self, followed: Sequence[_Followed], inputs: Any) -> None:
        again = torch._C._current_graph_task_id() != -1  # this thread is running a backward
        if not again:
            self._end_until(None)  # of a backward that has failed
        tracked = torch.is_grad_enabled()
        node = _history(inputs) if tracked else None
        for one in followed:
            if again and tracked and not self._open:
                self._begin(one, False)
            self._edges.forward_begin(one.name)
            one.calls.append(node is not None)
            if node is not None:
                self._at(node, partial(self._end, one))
            elif tracked:
                self._hook_parameters(one)

    def _after(self, followed: Sequence[_Followed], output: Any) -> None:
        node = _history(output) if torch.is_grad_enabled() else None
        for one in reversed(followed):
            by_input = one.calls.pop()
            self._edges.forward_end(one.name)
            if node is not None and (by_input or one.trained()):
                self._at(node, partial(self._begin, one, not by_input))

    def _hook_parameters(self, one: _Followed) -> None:
        for parameter in one.trained():
            if id(parameter) not in one.hooked:
                one.hooked.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(partial(self._accumulated, one))

    def _at(self, node: Any, call: Callable[[], None]) -> None:
        """Call right before the engine runs `node`, before everything that was registered there earlier."""
        calls = node.metadata.get(self)
        if calls is None:
            calls = node.metadata[self] = []
            node.register_prehook(partial(_in_reverse, calls))
        calls.append(call)

    # ---- backward ----

    def _begin(self, one: _Followed, by_parameters: bool) -> None:
        if one not in self._open:
            self._open.append(one)
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end_until, one))
            self._edges.backward_begin(one.name)
        if by_parameters:
            one.awaited = {id(parameter) for parameter in one.trained()}

    def _accumulated(self, one: _Followed, parameter: torch.Tensor) -> None:
        if id(parameter) in one.awaited:
            one.awaited.discard(id(parameter))
            if not one.awaited:
                self._end(one)

    def _end(self, one: _Followed) -> None:
        if one in self._open:
            self._open.remove(one)
            one.awaited.clear()
            self._edges.backward_end(one.name)

    def _end_until(self, one: _Followed | None) -> None:
        """End what was begun since the backward of `one` was, which is open, and that one; of None: all."""
        while self._open and (one is None or one in self._open):
            self._end(self._open[-1])


def _in_reverse(calls: Sequence[Callable[[], None]], gradients: Any) -> None:
    for call in reversed(calls):
        call()


def _history(values: Any) -> Any:
    """The function of the graph that has computed the first tensor of `values` with one; None if there is none."""
    if isinstance(values, torch.Tensor):
        return values.grad_fn
    parts: Any = ()
    if isinstance(values, list | tuple):
        parts = values
    elif isinstance(values, Mapping):
        parts = values.values()
    return next((node for node in map(_history, parts) if node is not None), None)
