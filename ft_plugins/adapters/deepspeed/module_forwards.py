"""The modules that local SGD synchronises: name that of a parameter, order modules, call back before their forwards.

    PipelineModule    a layer, named by its index among all layers of the pipeline. A tied layer is one module on all
                      stages that have it, named by the first of its indices
    other models      as in a plain torch loop, which also follows them (`torch_reduction.ModuleCalls`)
    the rest          together one module, named '': embeddings, last norm and head of a plain model

Invariant: names follow from the model's description alone, so they are equal on all ranks. The rest comes first: a
plain model begins with its embedding. The others follow: those of a PipelineModule in forward order, those of other
models in the order that the caller gives, that of registration.

In: names of parameters, a model. Out: names of modules; calls right before each of their forwards; edges of forwards
and backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch

from ...model.reduction import ModuleEdges
from ..module_edges import follow_places
from ..script.script_hooks import around
from ..torch.torch_reduction import ModuleCalls, module_of

REST = ""
_TIED = "tied_modules"


def module_in(model: Any, parameter: str) -> str:
    """The module that the parameter of that name belongs to."""
    if not hasattr(model, "_layer_specs"):
        return module_of(parameter)
    parts = parameter.split(".")
    if parts[0] == _TIED:
        return next(str(at) for at, spec in enumerate(model._layer_specs) if _key(spec) == parts[1])
    return parts[0] if parts[0].isdecimal() else REST


def in_forward_order(model: Any, modules: Iterable[str]) -> list[str]:
    """`modules` without repetition, the rest first: in forward order for a PipelineModule, else in the order given."""
    known = dict.fromkeys(modules)
    order = [REST, *(name for name, _ in _layers(model))] if hasattr(model, "_layer_specs") else [REST]
    return list(dict.fromkeys([*(name for name in order if name in known), *known]))


def calls_of(rank: int, model: Any, modules: Collection[str]) -> ModuleCalls | PipelineCalls:
    parameters = [name for name, _ in model.named_parameters() if module_in(model, name) in modules]
    if hasattr(model, "_layer_specs"):
        return PipelineCalls(rank, model, parameters)
    return ModuleCalls(rank, model, parameters)


class PipelineCalls:
    """The calls of a PipelineModule's layers, each in every microbatch, and where activation checkpointing runs it
    again. Those of the rest are those of the whole stage."""

    def __init__(self, rank: int, model: Any, parameters: Iterable[str]) -> None:
        self._rank, self._model = rank, model
        self._own: dict[str, list[torch.Tensor]] = {}  # by module
        for name in parameters:
            self._own.setdefault(module_in(model, name), []).append(model.get_parameter(name))

    def before_modules(self, call: Callable[[str], None]) -> None:
        for name, part in self._parts():
            part.register_forward_pre_hook(torch.compiler.disable(lambda *args, name=name: call(name)), prepend=True)
        for at, name in self._functions():

            def calling_first(original: Callable[..., Any], *args: Any, name: str = name, **kwargs: Any) -> Any:
                call(name)
                return original(*args, **kwargs)

            self._model.forward_funcs[at] = around(calling_first)(self._model.forward_funcs[at])

    def follow_modules(self, edges: ModuleEdges) -> None:
        places = [(part, {name: self._own[name]}) for name, part in self._parts()]
        reporter = follow_places(self._rank, places, edges)
        for at, name in self._functions():
            layer = self._model.forward_funcs[at]
            self._model.forward_funcs[at] = reporter.wrapped(layer, {name: self._own[name]})

    def _parts(self) -> list[tuple[str, torch.nn.Module]]:
        """The torch modules that are called, each once, by module."""
        parts = {id(layer): (name, layer) for name, layer in _layers(self._model) if name in self._own}
        rest = [(REST, self._model)] if REST in self._own else []
        return rest + [each for each in parts.values() if isinstance(each[1], torch.nn.Module)]

    def _functions(self) -> list[tuple[int, str]]:
        """Of the `forward_fn` of a tied layer, which need not call its module: its place on this stage, and module."""
        return [
            (at, name)
            for at, (name, layer) in enumerate(_layers(self._model))
            if name in self._own and not isinstance(layer, torch.nn.Module)
        ]


def _layers(model: Any) -> Iterator[tuple[str, Any]]:
    """(module name, callable) of each layer of this stage; the callable is an nn.Module, the `forward_fn` of a tied
    layer, or a function without parameters, whose name is in no list of modules."""
    specs = model._layer_specs
    first = {_key(spec): at for at, spec in reversed(list(enumerate(specs))) if _key(spec) is not None}
    for at, layer in enumerate(model.forward_funcs, start=model._local_start):
        yield str(first.get(_key(specs[at]), at)), layer


def _key(spec: Any) -> Any:
    """The key of a tied layer; None for others."""
    is_tied = any(kind.__name__ == "TiedLayerSpec" for kind in type(spec).__mro__)  # DeepSpeed may not be installed
    return getattr(spec, "key", None) if is_tied else None
