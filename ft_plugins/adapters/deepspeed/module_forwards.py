"""The modules that local SGD synchronises: name that of a parameter, order modules, call back before their forwards.

    PipelineModule    a layer, named by its index among all layers of the pipeline. A tied layer is one module on all
                      stages that have it, named by the first of its indices
    other models      as in a plain torch loop, the part up to the first number in a parameter's path: 'transformer.h.3'
    the rest          together one module, named '': embeddings, last norm and head of a plain model

Invariant: names follow from the model's description alone, so they are equal on all ranks. The rest comes first: a
plain model begins with its embedding. The others follow: those of a PipelineModule in forward order, those of other
models in the order that the caller gives, that of registration.

In: names of parameters, a model. Out: names of modules; calls right before each of their forwards; edges of forwards
and backwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ...errors import UnsupportedError
from ...model.reduction import ModuleEdges
from ..module_edges import follow_places
from ..torch.torch_reduction import module_of, parameters_at

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


def follow_forwards(model: Any, modules: Iterable[str], call: Callable[[str], None]) -> None:
    """Call `call(module)` right before each forward of one of `modules`: in evaluations too, and again where activation
    checkpointing recomputes the forward.

    For the rest, `call('')` runs at the beginning of the model's forward. Raises UnsupportedError for a module without
    a forward.
    """
    wanted = set(modules)
    if REST in wanted:
        _call_before_forward(model, functools.partial(call, REST))
    if hasattr(model, "_layer_specs"):
        _follow_layers(model, wanted, call)
        return
    for name in sorted(wanted - {REST}):
        part = model.get_submodule(name)
        if type(part).forward in (torch.nn.Module.forward, torch.nn.ModuleList.forward, torch.nn.ModuleDict.forward):
            raise UnsupportedError(
                f"the module '{name}' is a {type(part).__name__}, whose parts the model calls one by one: their "
                "forwards cannot be followed; use --sync-apply wait"
            )
        _call_before_forward(part, functools.partial(call, name))


def follow_edges(rank: int, model: Any, modules: Iterable[str], edges: ModuleEdges) -> None:
    """Report the edges of each of `modules`. Raises UnsupportedError."""
    members: dict[str, list[str]] = {module: [] for module in modules}
    for name, _ in model.named_parameters():
        if (module := module_in(model, name)) in members:
            members[module].append(name)
    if not hasattr(model, "_layer_specs"):
        by_path = parameters_at(model, members, model.get_parameter)
        follow_places(rank, [(model.get_submodule(path), one) for path, one in by_path.items()], edges)
        return
    # of each module, what a place takes: the parameters by module, here of this module alone
    own = {module: {module: [model.get_parameter(name) for name in names]} for module, names in members.items()}
    layers = {id(layer): (layer, own[name]) for name, layer in _layers(model) if name in own}
    parts = [(model, own[REST])] if REST in own else []
    parts += [(layer, one) for layer, one in layers.values() if isinstance(layer, torch.nn.Module)]
    reporter = follow_places(rank, parts, edges)
    for at, layer in enumerate(model.forward_funcs):  # the `forward_fn` of a tied layer need not call its module
        if id(layer) in layers and not isinstance(layer, torch.nn.Module):
            model.forward_funcs[at] = reporter.wrapped(*layers[id(layer)])


def _follow_layers(model: Any, wanted: set[str], call: Callable[[str], None]) -> None:
    hooked: set[int] = set()
    for local, (name, layer) in enumerate(list(_layers(model))):  # counted from the first layer of this stage
        if name not in wanted:
            continue
        if not isinstance(layer, torch.nn.Module):
            # `forward_fn` of a tied layer, which need not call its module; plain functions were skipped above
            model.forward_funcs[local] = _calling_first(layer, functools.partial(call, name))
        elif id(layer) not in hooked:
            hooked.add(id(layer))
            _call_before_forward(layer, functools.partial(call, name))


def _call_before_forward(part: torch.nn.Module, call: Callable[[], None]) -> None:
    @torch.compiler.disable
    def pre_hook(*args: Any) -> None:
        call()

    part.register_forward_pre_hook(pre_hook, prepend=True)


def _calling_first(layer: Callable[..., Any], call: Callable[[], None]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        call()
        return layer(*args, **kwargs)

    return forward


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
