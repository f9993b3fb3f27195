"""Layers of a small GPT for DeepSpeed, split over the tensor-parallel ranks by hand.

Invariant: parameters that every tensor-parallel rank holds whole (embeddings, norms, biases after a sum) are equal on
all of them, and so are their gradients: `_Copied` sums them in the backward pass, `_Summed` sums activations in the
forward pass. Split weights, and dropout inside them, use DeepSpeed's model-parallel random stream.

In: sizes and a tensor-parallel group. Out: layers for a `PipelineModule`, or the model in one piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from byte_text import VOCABULARY
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker
from torch.nn import functional


@dataclass(frozen=True)
class Sizes:
    """The sizes of the model."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    dropout: float


class _Copied(torch.autograd.Function):
    """Identity on all ranks of the group; gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Summed(torch.autograd.Function):
    """The sum over the ranks of the group; its gradient is the same on all."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Cut:
    """Splits weights over a tensor-parallel group; None: no split."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)

    def copied(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.size == 1 else _Copied.apply(x, self.group)

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.size == 1 else _Summed.apply(x, self.group)

    def parameter(self, rows: int, columns: int) -> torch.nn.Parameter:
        """A weight whose parts are on different ranks."""
        with get_cuda_rng_tracker().fork():
            weight = torch.nn.Parameter(torch.randn(rows, columns) * 0.02)
        weight.model_parallel = self.size > 1  # type: ignore[attr-defined]  # DeepSpeed's gradient norm reads this
        return weight


class Embedding(torch.nn.Module):
    """Bytes and their positions, (batch, sequence) -> (batch, sequence, hidden). Tied to the output layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(VOCABULARY, sizes.hidden) * 0.02)
        self.place = torch.nn.Parameter(torch.randn(sizes.sequence, sizes.hidden) * 0.02)
        self.dropout = torch.nn.Dropout(sizes.dropout)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.dropout(functional.embedding(tokens, self.weight) + self.place)
        return embedded


def logits(embedding: Embedding, x: torch.Tensor) -> torch.Tensor:
    """The tied output layer, as `TiedLayerSpec(forward_fn=...)` calls it."""
    return functional.linear(x, embedding.weight)


class Block(torch.nn.Module):
    """Attention and MLP, each split over the tensor-parallel ranks: first by columns, then by rows."""

    def __init__(self, sizes: Sizes, cut: Cut) -> None:
        super().__init__()
        hidden, part = sizes.hidden, sizes.hidden // cut.size
        self.cut, self.heads, self.rate = cut, sizes.heads // cut.size, sizes.dropout
        self.before_attention, self.before_mlp = torch.nn.LayerNorm(hidden), torch.nn.LayerNorm(hidden)
        self.qkv, self.out = cut.parameter(3 * part, hidden), cut.parameter(hidden, part)
        self.up, self.down = cut.parameter(4 * part, hidden), cut.parameter(hidden, 4 * part)
        self.bias = torch.nn.Parameter(torch.zeros(hidden))
        self.dropout = torch.nn.Dropout(sizes.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self._attention(self.cut.copied(self.before_attention(x))))
        inner = functional.gelu(functional.linear(self.cut.copied(self.before_mlp(x)), self.up))
        output: torch.Tensor = x + self.dropout(self.cut.summed(functional.linear(inner, self.down)) + self.bias)
        return output

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = functional.linear(x, self.qkv).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        ahead = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = torch.softmax(scores.float().masked_fill(ahead, float("-inf")), dim=-1).to(x.dtype)
        if self.training and self.rate:
            with get_cuda_rng_tracker().fork():  # heads are split: each rank has its own mask
                weights = functional.dropout(weights, self.rate)
        mixed = (weights @ v).transpose(1, 2).reshape(batch, length, -1)
        return self.cut.summed(functional.linear(mixed, self.out))


class Norm(torch.nn.LayerNorm):
    """The final norm."""


def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy over all bytes of a micro-batch."""
    return functional.cross_entropy(outputs.float().view(-1, VOCABULARY), labels.reshape(-1))


class Plain(torch.nn.Module):
    """The same model in one piece, (tokens, labels) -> loss."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        cut = Cut(None)
        self.embedding = Embedding(sizes)
        self.blocks = torch.nn.ModuleList(Block(sizes, cut) for _ in range(sizes.layers))
        self.norm = Norm(sizes.hidden)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return loss(logits(self.embedding, self.norm(x)), labels)
