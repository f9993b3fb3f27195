"""Name the module of each parameter for local SGD, and the torch modules whose forwards use it.

    embedding   what is below a module `embedding`, and its copy that a tied output layer has on the last stage
    layer N     what is below the outermost module with `layer_number` N, counted over all stages
    head        the rest: final layernorm, output layer

Invariant: a name follows from the parameter's path and Megatron's mark of tied embeddings alone, so all ranks agree.
Modules are in the order of the forward; on a last stage with a copy of the embedding that one comes last.

In: parameters by name, model chunks. Out: names, places for hooks. Raises UnsupportedError for a model whose order
cannot be read from the order in which it registers modules, where the order matters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ...errors import UnsupportedError
from . import state

EMBEDDING, HEAD = "embedding", "head"


def module_for(name: str, layer: int | None, tied: bool) -> str:
    """The module of the parameter `name`, which is in `layer`, if any; `tied`: it equals the embedding of a stage."""
    if layer is not None:
        return f"layer {layer}"
    return EMBEDDING if tied or EMBEDDING in name.split(".") else HEAD


def is_tied(parameter: torch.nn.Parameter) -> bool:
    """Whether two stages hold this embedding weight."""
    return bool(getattr(parameter, "shared_embedding", False))


def in_forward_order(modules: Mapping[str, str]) -> dict[str, str]:
    """`modules` by item, ordered as the forward of a rank that has these items uses them."""
    embeds = any(EMBEDDING in name.split(".") for name in modules)

    def place(entry: tuple[str, str]) -> tuple[int, int, str]:
        name, module = entry
        if module == EMBEDDING:
            return (0 if embeds else 3), 0, name
        return (2, 0, name) if module == HEAD else (1, int(module.rpartition(" ")[2]), name)

    return dict(sorted(modules.items(), key=place))


def places(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[torch.nn.Module, str]]:
    """The torch modules before whose forward a module must be ready, each with the module's name. Raises
    UnsupportedError."""
    layers = state.layers_by_module(chunks)
    for index, chunk in enumerate(chunks):
        found: dict[int, tuple[torch.nn.Module, str]] = {}
        last = ""
        for name, parameter in chunk.named_parameters():
            owner, module = _owner(index, name, parameter, layers)
            if last == HEAD and module.startswith("layer"):
                raise UnsupportedError(
                    f"chunk {index}: '{name}' of {module} comes after parameters that belong neither to an embedding "
                    "nor to a layer, so that the order of the forward is unknown; synchronise with --sync-apply wait"
                )
            if module != HEAD or last != HEAD:
                submodule = chunk.get_submodule(owner)
                found.setdefault(id(submodule), (submodule, module))
            last = HEAD if module == HEAD or last == HEAD else module
        yield from found.values()


def calling_parts(
    chunks: Sequence[torch.nn.Module],
) -> list[tuple[torch.nn.Module, dict[str, list[torch.nn.Parameter]]]]:
    """The torch modules whose forwards use parameters, each with these by the name of their module."""
    layers = state.layers_by_module(chunks)
    found: dict[int, tuple[torch.nn.Module, dict[str, list[torch.nn.Parameter]]]] = {}
    for index, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            owner, module = _owner(index, name, parameter, layers)
            part = chunk.get_submodule(owner)
            found.setdefault(id(part), (part, {}))[1].setdefault(module, []).append(parameter)
    return list(found.values())


def _owner(index: int, name: str, parameter: Any, layers: Mapping[str, int]) -> tuple[str, str]:
    """The path of the module whose forward uses the parameter `name` of a chunk first, and the name of its module."""
    parts = name.split(".")
    for length in range(1, len(parts)):
        path = ".".join(parts[:length])
        layer = layers.get(f"chunk{index}.{state.unwrapped(path)}")
        if layer is not None:
            return path, module_for(name, layer, False)
        if parts[length - 1] == EMBEDDING:
            return path, EMBEDDING
    return ".".join(parts[:-1]), module_for(name, None, is_tied(parameter))
