"""Small models that really learn, for runs with corrupted gradients and under local SGD: model, data and score.

    digits    a ResNet of 5 convolutions on scikit-learn's digits, SGD with momentum; score: test accuracy in %
    noisy_digits
              an MLP on the same images with new noise in each batch: the loss stays far from 0, and images cannot be
              learnt by heart, so losses can be compared
    deep_noisy_digits
              the same with 6 layers in place of 3, those within with skip connections
    wide_digits
              a ResNet of 13 convolutions on the digits: enough parameters to matter on a slow link
    text      a GPT of 2 blocks on bytes of real text, Adam; score: validation loss in nats per byte. Gradients are of
              the loss summed over the bytes of a window, so that their ratio to noise of one variance is about that of
              the digits
    deep_text
              the same with 4 blocks

Invariant: the batch of a rank depends only on seed, iteration and rank, and nothing else is random, so an iteration's
gradients can be recomputed bit for bit. Normalisation is by group or layer; a running statistic would keep traces of a
corrupt pass.

In: a name and a seed. Out: `Learner`.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ft_plugins.errors import ConfigError
from harness.forkserver import load

BYTE_TEXT = Path(__file__).resolve().parents[2] / "launch" / "examples" / "byte_text.py"
TEST_SHARE = 0.2
WARM_UP = 0.1  # share of the iterations with a linearly rising learning rate, before a cosine decay
_DIGITS_BATCH, _NOISY_BATCH, _TEXT_BATCH = 32, 256, 8  # per rank
_CLASSES = 10
_NOISE, _NOISE_SEED = 0.6, 1  # its deviation, where that of the images is 0.4
_NOISY_COPIES = 8  # of each test image
_UNSCALED = 16  # times as large: the range of scikit-learn's images
_GARBAGE_SEED = 1 << 20  # is added to the seed
_SEQUENCE, _VOCABULARY, _WIDTH, _HEADS = 24, 256, 48, 4
_TEXT_BLOCKS = {"text": 2, "deep_text": 4}
_TEXT_BYTES, _VALID_WINDOWS, _HELD_OUT_WINDOWS = 1 << 20, 64, 512


@dataclass(frozen=True)
class Learner:
    """One model with its data.

    `loss(model, iteration, rank)`: the loss of that rank's batch. `garbage`: of a batch without meaning: random bytes,
    or images that are not scaled, with random labels. `held_out(model, part, parts)`: the summed loss over a part of
    the held-out examples, which are the same for all seeds, and how many these are.
    """

    name: str
    model: nn.Module
    loss: Callable[[nn.Module, int, int], torch.Tensor]
    garbage: Callable[[nn.Module, int, int], torch.Tensor]
    held_out: Callable[[nn.Module, int, int], tuple[float, int]]
    score: Callable[[nn.Module], float]
    optimizer: str  # 'momentum' or 'adam'
    peak_rate: float

    def rate(self, iteration: int, iterations: int) -> float:
        """The learning rate of an iteration, from 1, of a run of `iterations`."""
        warm = max(1, round(WARM_UP * iterations))
        if iteration <= warm:
            return self.peak_rate * iteration / warm
        return self.peak_rate * (1 + math.cos(math.pi * (iteration - warm) / (iterations - warm + 1))) / 2


def learner(name: str, seed: int) -> Learner:
    """The learner `name` before its first iteration."""
    torch.manual_seed(seed)
    made: Mapping[str, Callable[[str, int], Learner]] = {
        **dict.fromkeys(_DIGITS, _digits), **dict.fromkeys(_TEXT_BLOCKS, _text)
    }  # fmt: skip
    return made[name](name, seed)


def prepare(names: Sequence[str]) -> None:
    """Read data and import modules once, before ranks are forked.

    Raises ConfigError if scikit-learn is needed and not installed.
    """
    torch.set_num_threads(1)  # nothing parallel before the fork
    if any("digits" in name for name in names):
        if importlib.util.find_spec("sklearn") is None:
            raise ConfigError("the digits need scikit-learn, which is not installed: pip install 'ft_plugins[bench]'")
        _read_digits()
    if any("text" in name for name in names):
        _read_text()
    dummy = nn.Parameter(torch.zeros(1))
    dummy.grad = torch.zeros(1)
    torch.optim.SGD([dummy], lr=0.0).step()  # the first step imports the compiler, which takes 1.5 s


def _batch(seed: int, iteration: int, rank: int, high: int, count: int) -> torch.Tensor:
    generator = np.random.Generator(np.random.PCG64([seed, iteration, rank]))
    return torch.from_numpy(generator.integers(0, high, count))


def _noisy(images: torch.Tensor, *source: int) -> torch.Tensor:
    generator = np.random.Generator(np.random.PCG64([*source, _NOISE_SEED]))
    return images + _NOISE * torch.from_numpy(generator.standard_normal(images.shape, dtype=np.float32))


# digits


class _Residual(nn.Module):
    """Two convolutions and a skip connection."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.first_norm = nn.GroupNorm(4, outer)
        self.second = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.second_norm = nn.GroupNorm(4, outer)
        self.around = nn.Conv2d(inner, outer, 1, stride, bias=False) if inner != outer else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(self.second_norm(self.second(y)) + self.around(x))


def _resnet() -> nn.Sequential:
    """(N, 1, 8, 8) -> (N, classes)."""
    stem = nn.Sequential(nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.GroupNorm(4, 16), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, _CLASSES))
    return nn.Sequential(stem, _Residual(16, 16, 1), _Residual(16, 32, 2), head)


@functools.cache
def _read_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images (1797, 1, 8, 8) with values from about -0.3 to 0.7, and their labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.from_numpy(data.images).float().unsqueeze(1) / 16 - 0.3, torch.from_numpy(data.target)


def _wide_resnet() -> nn.Sequential:
    """(N, 1, 8, 8) -> (N, classes)."""
    stem = nn.Sequential(nn.Conv2d(1, 32, 3, 1, 1, bias=False), nn.GroupNorm(4, 32), nn.ReLU())
    blocks = [_Residual(32, 32, 1), _Residual(32, 32, 1), _Residual(32, 64, 2), _Residual(64, 64, 1)]
    blocks += [_Residual(64, 128, 2), _Residual(128, 128, 1)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, _CLASSES))
    return nn.Sequential(stem, *blocks, head)


def _network() -> nn.Sequential:
    """(N, 1, 8, 8) -> (N, classes)."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, _CLASSES)
    )


class _ResidualLayer(nn.Module):
    """A layer and a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.relu(self.layer(self.norm(x)))


def _deep_network() -> nn.Sequential:
    """(N, 1, 8, 8) -> (N, classes)."""
    hidden = [_ResidualLayer(64) for _ in range(4)]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), *hidden, nn.Linear(64, _CLASSES))


_DIGITS: Mapping[str, tuple[Callable[[], nn.Module], float]] = {  # model, peak learning rate
    "digits": (_resnet, 0.03),
    "wide_digits": (_wide_resnet, 0.03),
    "noisy_digits": (_network, 0.4),
    "deep_noisy_digits": (_deep_network, 0.2),
}


def _digits(name: str, seed: int) -> Learner:
    noisy = "noisy" in name
    images, labels = _read_digits()
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))  # the same split for all seeds
    cut = round(len(order) * TEST_SHARE)
    test, train = order[:cut], order[cut:]
    test = test.repeat(_NOISY_COPIES) if noisy else test
    shown = _noisy(images[test], 0) if noisy else images[test]

    count = _NOISY_BATCH if noisy else _DIGITS_BATCH

    def batch(iteration: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = train[_batch(seed, iteration, rank, len(train), count)]
        return _noisy(images[chosen], seed, iteration, rank) if noisy else images[chosen], labels[chosen]

    def loss(model: nn.Module, iteration: int, rank: int) -> torch.Tensor:
        inputs, right = batch(iteration, rank)
        return functional.cross_entropy(model(inputs), right)

    def garbage(model: nn.Module, iteration: int, rank: int) -> torch.Tensor:
        wrong = _batch(_GARBAGE_SEED + seed, iteration, rank, _CLASSES, count)
        return functional.cross_entropy(model(_UNSCALED * batch(iteration, rank)[0]), wrong)

    def held_out(model: nn.Module, part: int, parts: int) -> tuple[float, int]:
        inputs, right = shown[part::parts], labels[test][part::parts]
        with torch.no_grad():
            return functional.cross_entropy(model(inputs), right, reduction="sum").item(), len(inputs)

    def score(model: nn.Module) -> float:
        with torch.no_grad():
            correct = model(shown).argmax(1) == labels[test]
        return 100 * correct.float().mean().item()

    make, peak_rate = _DIGITS[name]
    return Learner(name, make(), loss, garbage, held_out, score, "momentum", peak_rate)


# text


class _AttentionBlock(nn.Module):
    """Causal attention, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.network_norm = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.project, self.merge = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.widen, self.narrow = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(self.attention_norm(x)).unflatten(-1, (3, _HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(functional.gelu(self.widen(self.network_norm(x))))


class _Gpt(nn.Module):
    """(N, length) bytes -> (N, length, 256)."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(_VOCABULARY, _WIDTH), nn.Embedding(_SEQUENCE, _WIDTH)
        self.blocks = nn.Sequential(*(_AttentionBlock() for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _VOCABULARY)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


@functools.cache
def _read_text() -> tuple[torch.Tensor, torch.Tensor]:
    """(windows, length + 1) bytes to learn from, and held-out ones, spread evenly over the text that follows."""
    text: Any = load(f"{BYTE_TEXT}:Text").read(None)
    content = torch.from_numpy(np.array(text.content)).long()
    content = content[: len(content) // (_SEQUENCE + 1) * (_SEQUENCE + 1)].view(-1, _SEQUENCE + 1)
    first, rest = content.split([cut := _TEXT_BYTES // (_SEQUENCE + 1), len(content) - cut])
    return first, rest[:: max(1, len(rest) // _HELD_OUT_WINDOWS)][:_HELD_OUT_WINDOWS]


def _text(name: str, seed: int) -> Learner:
    windows, others = _read_text()
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(windows)))
    valid, train = windows[order[:_VALID_WINDOWS]], windows[order[_VALID_WINDOWS:]]

    def loss_of(model: nn.Module, chosen: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        logits, following = model(chosen[:, :-1]).flatten(0, 1), chosen[:, 1:].flatten()
        return functional.cross_entropy(logits, following, reduction=reduction)

    def loss(model: nn.Module, iteration: int, rank: int) -> torch.Tensor:
        return _SEQUENCE * loss_of(model, train[_batch(seed, iteration, rank, len(train), _TEXT_BATCH)])

    def garbage(model: nn.Module, iteration: int, rank: int) -> torch.Tensor:
        numbers = _batch(_GARBAGE_SEED + seed, iteration, rank, _VOCABULARY, _TEXT_BATCH * (_SEQUENCE + 1))
        return _SEQUENCE * loss_of(model, numbers.view(_TEXT_BATCH, -1))

    def held_out(model: nn.Module, part: int, parts: int) -> tuple[float, int]:
        chosen = others[part::parts]
        with torch.no_grad():
            return loss_of(model, chosen, "sum").item(), len(chosen) * _SEQUENCE

    def score(model: nn.Module) -> float:
        with torch.no_grad():
            return loss_of(model, valid).item()

    return Learner(name, _Gpt(_TEXT_BLOCKS[name]), loss, garbage, held_out, score, "adam", 0.012)
