"""What a synchronisation of local SGD does, written from the papers, without the package: the reference of simulations.

    EDiT, Algorithm 2; Lin et al. and DiLoCo for the mean and the outer step

    G_i = |theta_i - anchor| over a module, each parameter once         outlier: (G - mean) / deviation > threshold
    weights softmax(-G) of the others                                   clip: the mean change to a norm of at most phi
    anchor <- torch's SGD (Nesterov), whose gradient is anchor - target

The mean is rounded to fp32 before it is clipped, because that is what ranks send to each other.
"""

import math

import torch

OUTER = {"diloco": (0.7, 0.9), "edit": (0.8, 0.85)}  # rate and momentum


def mean_of(values):
    """In float64, rounded once."""
    return (sum(one.detach().double() for one in values) / len(values)).float()


class Reference:
    """The anchors of all parameters that a rank holds. `modules`: that of each; `norms`: of changes, by module, over
    all ranks of a replica."""

    def __init__(self, keys, start, modules, norms=None):
        self._keys, self._modules, self._norms = keys, modules, norms or self._own_norms
        self.anchors = {name: torch.nn.Parameter(one.detach().clone()) for name, one in start.items()}
        outer, self._outer = OUTER.get(keys["policy"]), None
        if outer is not None:
            self._outer = torch.optim.SGD(self.anchors.values(), lr=outer[0], momentum=outer[1], nesterov=True)
        self._statistics = {}

    def combine(self, replicas):
        """Move the anchors. Returns the replicas that were left out, and factors of clipped means, by module."""
        left_out, factors = dict[str, list[int]](), dict[str, float]()
        if self._keys["policy"] == "edit" and self._keys.get("penalty", True):
            left_out, factors, targets = self._penalised(replicas)
        else:
            targets = {name: mean_of([one[name] for one in replicas]) for name in self.anchors}
        for name, anchor in self.anchors.items():
            anchor.grad = None  # a module that goes back is not stepped
            if name in targets and self._outer is not None:
                anchor.grad = anchor.detach() - targets[name]
            elif name in targets:
                anchor.data.copy_(targets[name])
        if self._outer is not None:
            self._outer.step()
        held = set(self._modules.values())
        return (
            {module: those for module, those in left_out.items() if those and module in held},
            {module: factor for module, factor in factors.items() if factor < 1 and module in held},
        )

    def _penalised(self, replicas):
        values = [{name: one[name].detach().double() for name in self.anchors} for one in replicas]
        norms = [self._norms(self._changes(one)) for one in values]
        weights = {module: self._weights(module, [one[module] for one in norms]) for module in sorted(norms[0])}
        means = {
            name: sum(weight * one[name] for weight, one in zip(weights[module], values, strict=True)).float()
            for name, module in self._modules.items()
            if any(weights[module])
        }
        lengths = self._norms(self._changes({name: mean.double() for name, mean in means.items()}))
        factors = {module: min(1.0, self._keys["clip"] / (length + 1e-6)) for module, length in lengths.items()}
        for name, mean in means.items():
            before, factor = self.anchors[name].detach().double(), factors.get(self._modules[name], 1.0)
            means[name] = mean if factor == 1.0 else (before + factor * (mean.double() - before)).float()
        left_out = {
            module: [one for one, weight in enumerate(those) if not weight] for module, those in weights.items()
        }
        return left_out, factors, means

    def _changes(self, values):
        return {name: value - self.anchors[name].detach().double() for name, value in values.items()}

    def _own_norms(self, changes):
        squares = {}
        for name, change in changes.items():
            squares.setdefault(self._modules[name], []).append(float(change.square().sum()))
        return {module: math.sqrt(math.fsum(those)) for module, those in squares.items()}

    def _weights(self, module, norms):
        """Of the replicas; 0 for outliers."""
        sound = {one: norm for one, norm in enumerate(norms) if not self._outlier(module, one, norm)}
        for one, norm in (sound or dict(enumerate(norms))).items():
            mean, deviation, count = self._statistics.get((module, one), (norm, 0.0, 0))
            alpha, mean = self._keys["alpha"], mean + self._keys["alpha"] * (norm - mean)
            deviation = math.sqrt((1 - alpha) * deviation**2 + alpha * (norm - mean) ** 2)
            self._statistics[module, one] = mean, deviation, count + 1
        powers = {one: math.exp(min(sound.values()) - norm) for one, norm in sound.items()}
        return [powers.get(one, 0.0) / sum(powers.values()) if powers else 0.0 for one in range(len(norms))]

    def _outlier(self, module, replica, norm):
        mean, deviation, count = self._statistics.get((module, replica), (0.0, 0.0, 0))
        judged = count >= self._keys["penalty_warmup"] and deviation > 0
        return judged and (norm - mean) / deviation > self._keys["threshold"]
