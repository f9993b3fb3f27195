"""The modules that local SGD synchronises: which one a parameter belongs to, their order, and when one is about to run.

    PipelineModule    a layer, named by its index among all layers of the pipeline. A tied layer is one module on all
                      stages that have it, named by the first of its indices
    other models      the part up to the first number in a parameter's path: 'transformer.h.3'
    the rest          together one module, named '': embeddings, last norm and head of a plain model

Invariant: names follow from the model's description alone, so they are equal on all ranks. Modules are in the order of
this rank's forward, the rest first: a plain model begins with its embedding.

In: names of parameters, a model. Out: names of modules; calls right before each of their forwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ...errors import UnsupportedError

REST = ""
_TIED = "tied_modules"


def module_of(model: Any, parameter: str) -> str:
    """The module that the parameter of that name belongs to."""
    parts = parameter.split(".")
    if not hasattr(model, "_layer_specs"):
        number = next((at for at, part in enumerate(parts[:-1]) if part.isdecimal()), None)
        return REST if number is None else ".".join(parts[: number + 1])
    if parts[0] == _TIED:
        return next(str(at) for at, spec in enumerate(model._layer_specs) if _key(spec) == parts[1])
    return parts[0] if parts[0].isdecimal() else REST


def in_forward_order(model: Any, modules: Iterable[str]) -> list[str]:
    """The modules of this rank, without repetition, in the order of its forward."""
    known = dict.fromkeys(modules)
    order = dict.fromkeys([REST, *(name for name, _ in _layers(model))]) if hasattr(model, "_layer_specs") else {REST}
    return [*(name for name in order if name in known), *(name for name in known if name not in order)]


def follow_forwards(model: Any, modules: Iterable[str], call: Callable[[str], None]) -> None:
    """Call `call(module)` right before each forward of one of `modules`, evaluations included.

    The rest is called at the beginning of the model's forward. Raises UnsupportedError for a module without a forward.
    """
    wanted = set(modules)
    if REST in wanted:
        _before(model, functools.partial(call, REST))
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
        _before(part, functools.partial(call, name))


def _follow_layers(model: Any, wanted: set[str], call: Callable[[str], None]) -> None:
    hooked: set[int] = set()
    for at, (name, layer) in enumerate(list(_layers(model))):
        if name not in wanted:
            continue
        if not isinstance(layer, torch.nn.Module):  # `forward_fn` of a tied layer, which need not call its module
            model.forward_funcs[at] = _announced(layer, functools.partial(call, name))
        elif id(layer) not in hooked:
            hooked.add(id(layer))
            _before(layer, functools.partial(call, name))


def _before(part: torch.nn.Module, call: Callable[[], None]) -> None:
    def pre_hook(*args: Any) -> None:
        call()

    part.register_forward_pre_hook(pre_hook, prepend=True)


def _announced(layer: Callable[..., Any], call: Callable[[], None]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        call()
        return layer(*args, **kwargs)

    return forward


def _layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Module and function of each layer of this stage."""
    specs = model._layer_specs
    first = {_key(spec): at for at, spec in reversed(list(enumerate(specs))) if _key(spec) is not None}
    for at, function in enumerate(model.forward_funcs, start=model._local_start):
        yield str(first.get(_key(specs[at]), at)), function


def _key(spec: Any) -> Any:
    """The key of a tied layer; None for others."""
    return getattr(spec, "key", None) if type(spec).__name__ == "TiedLayerSpec" else None
