"""Models of the DreamDDP paper as layers with parameters and times, and the ratios of its testbed. Pure.

Layers are in the order of the forward, normalisations part of them. A layer's time is in proportion to its
multiplications; the backward takes twice the forward.

    resnet18    18 layers: convolutions (a shortcut with the first one of its block) and the output layer, for images
                of 32 x 32 (CIFAR)
    resnet50    18 layers: the first convolution, 16 blocks of three, the output layer, for the same
    gpt2        26 layers: GPT-2 small, 124 M parameters, attention and feed-forward network of a block apart. The
                output layer shares the embedding's parameters, whose gradient is complete when the backward ends
    llama2      38 layers: 175 M parameters, for which the paper gives no sizes; assumed are 18 blocks of width 768 and
                an output layer of its own

Ratios come from the iteration times of the paper's table 1, of 8 and of 32 workers. With compute c, communication m and
a period of H = 10 iterations, its S-SGD takes c + m and its local SGD with full synchronisation c + m / H. Its DreamDDP
takes c at least; where the first two give a larger c, c is what DreamDDP takes.

Invariant: emulated models keep the relative sizes and times of layers; only the sum of the parameters and the seconds
of an iteration are chosen.

In: a name, seconds of compute, parameters. Out: `LayeredModel`; `PaperColumn`s."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from workloads.sleeping_replica import FORWARD, LayeredModel

H = 10  # the paper's period in table 1
LEAST_WIDTH = 64  # parameters of an emulated layer
BUCKETS = 10  # of the reduction of gradients, at most
_IMAGE, _CLASSES = 32, {"resnet18": 10, "resnet50": 100}
_STAGES = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}
_STEM = 64  # channels
_WIDTH, _TOKENS, _PLACES = 768, 50257, 1024  # of GPT-2 small; Llama-2 has the same width
_GPT_BLOCKS = 12
_LLAMA_BLOCKS, _LLAMA_TOKENS, _LLAMA_INNER = 18, 32000, 2048


@dataclass(frozen=True)
class ShapeLayer:
    """One layer of a real model: parameters, and multiplications of a forward per sample (or token)."""

    name: str
    parameters: int
    work: float


def _convolution(inner: int, outer: int, kernel: int, size: int) -> ShapeLayer:
    """With its normalisation, on outputs of `size` x `size`."""
    kernels = inner * outer * kernel**2
    return ShapeLayer("", kernels + 2 * outer, float(kernels * size**2))


def _joined(name: str, parts: Sequence[ShapeLayer]) -> ShapeLayer:
    return ShapeLayer(name, sum(part.parameters for part in parts), sum(part.work for part in parts))


def _resnet(name: str) -> list[ShapeLayer]:
    deep, inner = name == "resnet50", _STEM
    layers = [_joined("stem", [_convolution(3, _STEM, 3, _IMAGE)])]
    for stage, blocks in enumerate(_STAGES[name]):
        width, size = _STEM << stage, _IMAGE >> stage
        outer = 4 * width if deep else width
        for block in range(blocks):
            around = [_convolution(inner, outer, 1, size)] if inner != outer else []
            if deep:
                parts = [
                    _convolution(inner, width, 1, size),
                    _convolution(width, width, 3, size),
                    _convolution(width, outer, 1, size),
                ]
                layers.append(_joined(f"{stage}.{block}", parts + around))
            else:
                layers.append(_joined(f"{stage}.{block}.0", [_convolution(inner, width, 3, size), *around]))
                layers.append(_joined(f"{stage}.{block}.1", [_convolution(width, width, 3, size)]))
            inner = outer
    head = inner * _CLASSES[name]
    return [*layers, ShapeLayer("head", head + _CLASSES[name], float(head))]


def _gpt2() -> list[ShapeLayer]:
    tokens = _TOKENS * _WIDTH
    layers = [ShapeLayer("embedding", tokens + _PLACES * _WIDTH, 0.0)]
    for block in range(_GPT_BLOCKS):
        attention, network = 4 * _WIDTH**2, 8 * _WIDTH**2
        layers.append(ShapeLayer(f"{block}.attention", attention + 6 * _WIDTH, float(attention)))
        layers.append(ShapeLayer(f"{block}.network", network + 7 * _WIDTH, float(network)))
    return [*layers, ShapeLayer("head", 2 * _WIDTH, float(tokens))]


def _llama2() -> list[ShapeLayer]:
    tokens = _LLAMA_TOKENS * _WIDTH
    layers = [ShapeLayer("embedding", tokens, 0.0)]
    for block in range(_LLAMA_BLOCKS):
        attention, network = 4 * _WIDTH**2, 3 * _WIDTH * _LLAMA_INNER
        layers.append(ShapeLayer(f"{block}.attention", attention + _WIDTH, float(attention)))
        layers.append(ShapeLayer(f"{block}.network", network + _WIDTH, float(network)))
    return [*layers, ShapeLayer("head", tokens + _WIDTH, float(tokens))]


_LAYERS: Mapping[str, Callable[[], list[ShapeLayer]]] = {
    "resnet18": lambda: _resnet("resnet18"),
    "resnet50": lambda: _resnet("resnet50"),
    "gpt2": _gpt2,
    "llama2": _llama2,
}
SHAPES = tuple(_LAYERS)


def shape(name: str) -> list[ShapeLayer]:
    """The layers of a real model."""
    return _LAYERS[name]()


def emulated(name: str, compute: float, parameters: int) -> LayeredModel:
    """The model with that many float32 parameters in all, and `compute` seconds of forward and backward."""
    layers = shape(name)
    every, work = sum(layer.parameters for layer in layers), sum(layer.work for layer in layers)
    widths = tuple(max(LEAST_WIDTH, round(parameters * layer.parameters / every)) for layer in layers)
    seconds = [compute * layer.work / work for layer in layers]
    forwards = tuple(FORWARD * each for each in seconds)
    backwards = tuple(each - forward for each, forward in zip(seconds, forwards, strict=True))
    return LayeredModel(widths, forwards, backwards, 0.0, 4 * parameters // BUCKETS)


@dataclass(frozen=True)
class PaperColumn:
    """A column of the paper's table 1: seconds of an iteration."""

    shape: str
    workers: int
    plain: float  # without overlap
    overlapped: float  # ASC-WFBP
    full: float
    equal: float
    dreamddp: float

    @property
    def name(self) -> str:
        return f"{self.shape}_{self.workers}"

    @property
    def compute(self) -> float:
        """Seconds of forward and backward."""
        return min(self.full - (self.plain - self.full) / (H - 1), self.dreamddp)

    @property
    def ratio(self) -> float:
        """Communication of the whole model over compute."""
        return (self.plain - self.compute) / self.compute

    @property
    def overlapped_of_compute(self) -> float:
        """What the paper's overlapped baseline takes, over compute."""
        return self.overlapped / self.compute


COLUMNS = (
    PaperColumn("resnet18", 8, 1.31, 0.99, 0.66, 0.58, 0.57),
    PaperColumn("resnet18", 32, 2.40, 1.75, 0.57, 0.46, 0.38),
    PaperColumn("resnet50", 8, 3.08, 2.33, 1.59, 1.37, 1.33),
    PaperColumn("resnet50", 32, 4.52, 3.39, 0.94, 0.69, 0.65),
    PaperColumn("gpt2", 8, 2.63, 1.72, 0.80, 0.70, 0.66),
    PaperColumn("gpt2", 32, 8.67, 5.38, 2.08, 1.99, 1.60),
    PaperColumn("llama2", 8, 2.80, 1.83, 0.86, 0.77, 0.72),
    PaperColumn("llama2", 32, 8.75, 5.36, 1.96, 1.89, 1.55),
)
