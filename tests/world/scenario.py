"""What is drawn from a seed: a job, and the faults that strike it. Pure.

In: a seed. Out: a `Scenario`; smaller ones.
"""

import dataclasses
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """`kind`, to the node or pair of `nodes`, for so many seconds: `delay` after something has happened for the n-th
    time, `after` = (what, n): an iteration that a rank was the first to complete, or one of EVENTS."""

    after: tuple[str, int]
    delay: float
    kind: str
    nodes: tuple[int, ...]
    seconds: float = 0.0

    def __str__(self):
        where = f"{self.kind} {self.nodes} for {self.seconds:.2f} s"
        return f"{where}, {self.delay:.3f} s after {self.after[0]} {self.after[1]}"


@dataclass(frozen=True)
class Scenario:
    """A job, and what happens to it."""

    seed: int
    nodes: int
    spares: int
    per_node: int
    losses: int
    iterations: int
    detect: float
    step: tuple[float, float]
    capture: tuple[float, float]
    preempted: float
    stored: int  # iterations between two checkpoints; 0: none
    interval: int  # iterations between two versions that nodes exchange
    free: int  # slots of a rank that are never pinned
    parity: bool  # ranks compute parity themselves
    faults: tuple[Fault, ...]

    def plain(self):
        """As plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, values):
        """From plain values."""
        faults = tuple(
            Fault(**{**one, "after": tuple(one["after"]), "nodes": tuple(one["nodes"])}) for one in values["faults"]
        )
        return cls(**{**values, "step": tuple(values["step"]), "capture": tuple(values["capture"]), "faults": faults})


EVENTS = {"round": 3, "rebuild": 3, "node.lost": 2, "version.committed": 2, "resumed": 2, "exchange.started": 1}
KINDS = {
    "kill rank": 5, "kill smp": 4, "lose node": 3, "restart node": 2, "cut": 2, "cut one way": 1, "slow": 1,
    "stop smp": 2, "stop rank": 1, "kill ft-run": 1, "stop ft-run": 1, "full disk": 1, "flip": 1,
    "slow storage": 2, "full storage": 1, "lose all": 0.5, "lie": 1, "poison": 0.7,
    "short memory": 1,
}  # fmt: skip


def draw(seed):
    """The scenario of a seed."""
    chance = random.Random(seed)
    nodes = min(40, max(2, round(chance.lognormvariate(2.08, 0.5))))
    per_node = chance.choice((1, 1, 1, 2))
    losses = 2 if nodes >= 5 and chance.random() < 0.3 else 1
    spares = chance.choice((0, 0, 1, 2))
    iterations = max(5, round(chance.gauss(30, 10))) * chance.choice((1, 1, 1, 1, 1, 4))
    step, detect = chance.uniform(0.02, 0.15), chance.choice((0.5, 1.0, 2.0))
    count = min(12, round(chance.expovariate(1 / 3.5)))
    faults = []
    for _ in range(count):
        kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
        among = tuple(chance.sample(range(nodes + spares), 2))
        delay = chance.random() * chance.choice((0.01, step, detect, 2 * detect, 6.0))
        after = ("iteration", chance.randrange(0, iterations))
        if faults and chance.random() < 0.4:
            after = (chance.choices(list(EVENTS), list(EVENTS.values()))[0], 1 + min(9, round(chance.expovariate(0.5))))
            delay *= chance.choice((0, 0.1))
        seconds = chance.choice((0.1, 0.5, 2.0, 6.0)) * chance.uniform(0.5, 1.5)
        faults.append(Fault(after, delay, kind, among, seconds))
    if faults and chance.random() < 0.3:  # two at once
        last = faults[-1]
        faults.append(
            dataclasses.replace(last, delay=last.delay + chance.choice((0, 0.01, 0.3)), nodes=last.nodes[::-1])
        )
    return Scenario(
        seed, nodes, spares, per_node, losses, iterations, detect, (step, step * 1.2),
        (0.0, step * chance.choice((0.2, 0.9, 1.5))), chance.choice((0.0, 0.0, 0.02)),
        stored := chance.choice((0, 0, 3, 7)), chance.choice((1, 1, 1, 2, 5)),
        3 if stored else chance.choice((3, 3, 1, 0)), chance.random() < 0.3, tuple(sorted(faults, key=str)),
    )  # fmt: skip


def smaller(scenario):
    """Scenarios with less in them, the smallest first."""
    for at in range(len(scenario.faults)):
        yield dataclasses.replace(scenario, faults=scenario.faults[:at] + scenario.faults[at + 1 :])
    for nodes in (2, 3, 4, scenario.nodes // 2, scenario.nodes - 1):
        if max(2, 5 * (scenario.losses - 1)) <= nodes < scenario.nodes:
            yield dataclasses.replace(scenario, nodes=nodes)
    if scenario.iterations > 5:
        yield dataclasses.replace(scenario, iterations=scenario.iterations // 2 + 1)
    least = {"per_node": 1, "spares": 0, "preempted": 0.0, "stored": 0, "interval": 1, "parity": False}
    for name, value in least.items():
        if getattr(scenario, name) != value:
            yield dataclasses.replace(scenario, **{name: value})
