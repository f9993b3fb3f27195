"""Find what TransformerEngine's modules keep between iterations to scale fp8 numbers.

Invariant: a job whose modules keep such state is never captured without it. Recipes that scale by the current tensor
keep none; delayed scaling keeps a history of maxima, and attention may do so next to another recipe. TransformerEngine
makes it in the first forward, so the arguments cannot show all of it.

In: model chunks. Out: UnsupportedError, or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ...errors import UnsupportedError

_META, _HISTORY = "fp8_meta", "amax_history"


def require_no_history(chunks: Sequence[torch.nn.Module], rank: int) -> None:
    """Raises UnsupportedError that names a module with a history of maxima."""
    for chunk in chunks if getattr(chunks[0].config, "fp8", None) else ():
        for name, part in chunk.named_modules():
            if any(isinstance(getattr(one, _HISTORY, None), torch.Tensor) for one in _kept(vars(part).get(_META))):
                raise UnsupportedError(
                    f"rank {rank}: '{name}' ({type(part).__name__}) keeps a history of maxima for fp8, which is not "
                    "captured: choose --fp8-recipe tensorwise, blockwise or mxfp8, without fp8 in attention"
                )


def _kept(meta: Any) -> Iterator[Any]:
    values = meta.values() if isinstance(meta, Mapping) else ()
    for value in values:
        yield from value if isinstance(value, list | tuple) else (value,)
