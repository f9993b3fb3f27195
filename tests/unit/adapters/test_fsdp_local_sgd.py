"""Local SGD in a session on FSDP2, against one process that simulates the replicas one after another.

The reference has neither FSDP nor the package: whole models, one for each replica; the batches of a replica's ranks one
after another, the mean of their gradients, torch's optimizer. After an iteration that is a multiple of tau it combines
the replicas (`local_sgd_reference`). Under DreamDDP it also writes means of some modules right before each update,
taken of what replicas had before any of them was updated. Compared are the parameters with which each iteration's
gradients were computed, and those at the end.

Sizes do not divide: shards are uneven, and one is empty.
"""

import json
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ft_plugins.adapters.host_parts import local_part
from ft_plugins.adapters.torch.fsdp import FsdpHost
from ft_plugins.config import Config, LaunchContext
from ft_plugins.session import attach
from ft_plugins.sync.rounds import synchronisation
from harness.gang import gang
from tests.unit.adapters.local_sgd_reference import Reference, mean_of

WORLD, TAU, STEPS = 4, 2, 7  # three synchronisations, and an iteration behind the last one
SECONDS = 280.0  # a bound; some seconds on idle cores
WORDS = 7
Verdict = tuple[int, str, str, int]  # iteration, what happened, module, replica (0 for all)

POST = {"policy": "post_local_sgd"}
DILOCO = {"policy": "diloco"}
EDIT = {"policy": "edit", "penalty_warmup": 2, "alpha": 0.3, "threshold": 3.0, "clip": 0.04}
EVEN = {"policy": "dreamddp", "h": 2, "schedule": "equal"}
HALVES = ({"layers.2", "layers.1"}, {"layers.0", ""})  # of the modules, in the order of the backward


class Case(NamedTuple):
    """A job of four ranks. `mesh`: replicas and shards of each. `bad`: the replica whose loss is multiplied in the
    iterations of the last synchronisation. `turns`: the modules that are averaged in each iteration of a period of
    DreamDDP."""

    keys: Mapping[str, Any]
    apply: str
    optimizer: str = "adamw"
    warmup: int = 0
    bad: int = -1
    mesh: tuple[int, int] = (2, 2)
    tied: bool = True
    tau: int = TAU
    eager: bool = False  # the root is resharded after its forward, and gathers the first layers early
    turns: Sequence[Set[str]] = ()

    @property
    def sync(self):
        """The block of keys."""
        block = {**self.keys, "tau": self.tau, "warmup": self.warmup, "shard_ranks": self.mesh[1]}
        return {**block, "apply": self.apply} if self.apply else block

    def due(self, step):
        """Whether all modules are synchronised after the update of an iteration."""
        return step > self.warmup and step % self.tau == 0

    def turn(self, step):
        """The modules that are averaged before the update of an iteration."""
        if not self.turns or step <= self.warmup or self.due(step):
            return set()
        return self.turns[(step - self.warmup - 1) % len(self.turns)]


PENALISED = {"optimizer": "sgd", "bad": 1}
CASES = {
    "post local sgd, wait": Case(POST, "wait", warmup=1),
    "post local sgd, forward": Case(POST, "forward", tied=False),
    "diloco, wait": Case(DILOCO, "wait", tied=False),
    "diloco, forward": Case(DILOCO, "forward", warmup=1),
    "edit, wait": Case(EDIT, "wait", **PENALISED),
    "edit, forward": Case(EDIT, "forward", tied=False, **PENALISED),
    "edit, update": Case(EDIT, "update", **PENALISED),
    "edit, forward, unsharded": Case(EDIT, "forward", mesh=(4, 1), **PENALISED),
    "diloco, forward, unsharded": Case(DILOCO, "forward", mesh=(4, 1)),
    "diloco, forward, eager": Case(DILOCO, "forward", warmup=1, eager=True),
    "dreamddp": Case(EVEN, "", warmup=1, tau=5, turns=HALVES),
}
CHANGES_NOTHING = {
    "prefetch": {"prefetch": False},
    "offload": {"offload": True},
    "both": {"prefetch": False, "offload": True},
}
SAME = "edit, forward"
PROFILE = {"": 1.0, "layers.0": 1.0, "layers.1": 1.0, "layers.2": 9.0}  # seconds of averaging; a backward takes 5
LAYERED = {
    "all in each iteration": Case({**EVEN, "h": 1}, "", tau=5, turns=({"layers.2", "layers.1", "layers.0", ""},)),
    "unsharded, untied": Case(EVEN, "", mesh=(4, 1), tied=False, tau=5, turns=HALVES),
    "sgd, eager": Case(EVEN, "", "sgd", warmup=2, eager=True, tau=5, turns=HALVES),
    "from a profile": Case(  # what hides is averaged in both iterations, up to the bytes of the larger one
        {"policy": "dreamddp", "h": 2}, "", warmup=1, tau=5, turns=({*PROFILE} - {""}, {*PROFILE} - {"layers.0"})
    ),
}


class Scale(torch.nn.Module):
    """A layer of which only the first shard holds a part."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.weight


class Net(torch.nn.Module):
    """An embedding, uneven layers, a head that may be tied to it, a parameter of the root that is one shard alone."""

    def __init__(self, tied):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = torch.nn.Embedding(WORDS, 5)
        self.shift = torch.nn.Parameter(torch.ones(1))
        self.layers = torch.nn.ModuleList([torch.nn.Linear(5, 5), Scale(), torch.nn.Linear(5, 5)])
        self.norm = torch.nn.LayerNorm(5)
        self.head = torch.nn.Linear(5, WORDS)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens) + self.shift
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x))


def optimizer_of(model, kind):
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), 0.01)
    return torch.optim.SGD(model.parameters(), 0.05)


def backward(model, case, rank, step):
    """On the batch of a rank in an iteration."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens, labels = torch.randint(WORDS, (2, 6), generator=generator)
    loss = torch.nn.functional.cross_entropy(model(tokens), labels)
    garbage = rank // case.mesh[1] == case.bad and step > STEPS - 1 - case.tau
    (loss * (25.0 if garbage else 1.0)).backward()


def module_of(name):
    return ".".join(name.split(".")[:2]) if name.startswith("layers.") else ""


# ---- the job ----


def trained(rank, world, cases):
    """For each case, with further keys: the rank's shards in each iteration and at the end, and its events."""
    return [_trained(rank, world, case, more) for case, more in cases]


def _trained(rank, world, case, more):
    mesh = init_device_mesh("cpu", case.mesh, mesh_dim_names=("sync", "shard"))
    model = Net(case.tied)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"], reshard_after_forward=True if case.eager else None)
    if case.eager:
        model.set_modules_to_forward_prefetch([model.layers[0], model.layers[1]])
    optimizer = optimizer_of(model, case.optimizer)
    events = []
    with pytest.MonkeyPatch.context() as patch:
        if more.get("offload"):  # tensors are in host memory anyway: copies of them stand for those on a device
            patch.setattr(synchronisation, "_on_device", lambda tensor, device: tensor.clone())
        host = FsdpHost(model, optimizer, mesh=mesh)
        session = attach(host, Config.from_json({"sync": {**case.sync, **more}}), context(rank, world))
        session._events.subscribe(events.append)
        used = []
        for step in session.iterations(STEPS):
            backward(model, case, rank, step)
            used.append(shards_of(model))
            optimizer.step()
            optimizer.zero_grad()
        used.append(shards_of(model))
    return used, [event.fields for event in events if event.name == "replicas.synchronised"]


def context(rank, world):
    return LaunchContext(None, None, 0, None, rank, rank, world, world, 0, 0)


def shards_of(model):
    for module in (*model.layers, model):
        module.reshard()
    return {name: local_part(one).detach().numpy().copy() for name, one in model.named_parameters()}


# ---- the reference ----


def simulated(rank, world, cases):
    """For each case, by replica: its parameters in each iteration and at the end. And what was judged."""
    return [Simulation(case).run() for case in cases]


class Simulation:
    """All replicas in one process."""

    def __init__(self, case):
        replicas, self.shards = case.mesh
        self.case = case
        self.models = [Net(case.tied) for _ in range(replicas)]
        self.optimizers = [optimizer_of(model, case.optimizer) for model in self.models]
        self.used = [[] for _ in self.models]
        self.judged = []
        self.remember()

    def parameters(self, replica):
        return dict(self.models[replica].named_parameters())

    def arrays(self, replica):
        return {name: one.detach().numpy().copy() for name, one in self.parameters(replica).items()}

    def remember(self):
        """The anchors, and the outer optimizer over them."""
        start = self.parameters(0)
        self.reference = Reference(self.case.keys, start, {name: module_of(name) for name in start})

    def run(self):
        case, pending = self.case, False
        for step in range(1, STEPS + 1):
            if pending and case.apply != "update":
                self.write()
            for replica, model in enumerate(self.models):
                model.zero_grad()
                for rank in range(replica * self.shards, (replica + 1) * self.shards):
                    backward(model, case, rank, step)  # gradients accumulate
                for one in model.parameters():
                    one.grad /= self.shards
                self.used[replica].append(self.arrays(replica))
            if pending and case.apply == "update":
                self.write()
            if step <= case.warmup:
                self.reduce()
            self.average(case.turn(step))
            for optimizer in self.optimizers:
                optimizer.step()
            if step == case.warmup:
                self.remember()
            pending = case.due(step)
            if pending:
                self.combine(step)
        if pending:
            self.write()
        for replica, used in enumerate(self.used):
            used.append(self.arrays(replica))
        return self.used, self.judged

    def reduce(self):
        for same in zip(*(model.parameters() for model in self.models), strict=True):
            mean = sum(one.grad for one in same) / len(same)
            for one in same:
                one.grad.copy_(mean)

    def average(self, modules):
        """All replicas get the means of these modules; no gradient changes."""
        for name in [name for name in self.reference.anchors if module_of(name) in modules]:
            same = [self.parameters(replica)[name] for replica in range(self.size)]
            mean = mean_of(same)
            for one in same:
                one.data.copy_(mean)

    def combine(self, step):
        left_out, clipped = self.reference.combine([self.parameters(replica) for replica in range(self.size)])
        for module, those in left_out.items():
            self.judged += [(step, "left out", module, replica) for replica in those]
            self.judged += [(step, "rolled back", module, 0)] if len(those) == self.size else []
        self.judged += [(step, "clipped", module, 0) for module in clipped]

    @property
    def size(self):
        return len(self.models)

    def write(self):
        for replica in range(self.size):
            for name, one in self.parameters(replica).items():
                one.data.copy_(self.reference.anchors[name].data)


# ---- comparisons ----


@pytest.fixture(scope="module")
def found():
    """By case, the results of all ranks."""
    cases = {name: (case, {}) for name, case in CASES.items()}
    cases |= {name: (CASES[SAME], more) for name, more in CHANGES_NOTHING.items()}
    ranks = gang(trained, WORLD, list(cases.values()), seconds=SECONDS)
    return dict(zip(cases, map(list, zip(*ranks, strict=True)), strict=True))


@pytest.fixture(scope="module")
def expected():
    """By case, what the reference has."""
    (results,) = gang(simulated, 1, list(CASES.values()), seconds=SECONDS)
    return dict(zip(CASES, results, strict=True))


def shard(whole, index, shards):
    """The rows of one shard of each parameter."""
    parts = {name: torch.chunk(torch.from_numpy(one), shards) for name, one in whole.items()}
    return {name: (each[index] if index < len(each) else each[0][:0]).numpy() for name, each in parts.items()}


def first_difference(found, expected, case, equal):
    """The iteration, rank and name of the first parameter that differs; the end counts as an iteration."""
    for step in range(STEPS + 1):
        for rank, (used, _) in enumerate(found):
            replica, index = divmod(rank, case.mesh[1])
            theirs = shard(expected[0][replica][step], index, case.mesh[1])
            assert used[step].keys() == theirs.keys()
            for name, one in used[step].items():
                if not equal(one, theirs[name]):
                    return step + 1, rank, name
    return None


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.keys is not EDIT])
def test_a_job_equals_its_replicas_simulated_one_after_another(found, expected, name):
    """Bit for bit: a sum of two gradients has no order, and means of parameters are rounded once, from float64."""
    require_equal(found[name], expected[name], CASES[name])


def require_equal(found, expected, case):
    """Bit for bit; and replicas have trained on data of their own."""
    assert first_difference(found, expected, case, np.array_equal) is None
    for _, events in found:
        assert [event["iteration"] for event in events] == [step for step in range(1, STEPS + 1) if case.due(step)]
    ours, theirs = (found[rank][0] for rank in (0, case.mesh[1]))
    assert any(
        not np.array_equal(one["layers.0.weight"], other["layers.0.weight"])
        for one, other in zip(ours, theirs, strict=True)
    )


def write_profile(folder, averaging):
    """A profile of layers, whose averaging takes these seconds."""
    path = folder / "profile.json"
    times = {"forward_seconds": 1.0, "backward_seconds": 5.0, "bytes": 4}
    layers = [{"name": name, "communication_seconds": seconds, **times} for name, seconds in averaging.items()]
    path.write_text(json.dumps({"version": 1, "replicas": 2, "layers": layers}))
    return str(path)


@pytest.mark.all_configurations
def test_a_job_that_averages_modules_in_different_iterations_equals_its_simulation(tmp_path):
    path = write_profile(tmp_path, PROFILE)
    more = [{} if "schedule" in case.keys else {"profile": path} for case in LAYERED.values()]
    found = gang(trained, WORLD, list(zip(LAYERED.values(), more, strict=True)), seconds=SECONDS)
    (expected,) = gang(simulated, 1, list(LAYERED.values()), seconds=SECONDS)
    for number, case in enumerate(LAYERED.values()):
        require_equal([each[number] for each in found], expected[number], case)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.keys is EDIT])
def test_under_the_penalty_a_job_equals_its_simulation(found, expected, name):
    """To the order of reductions: the reference sums a norm over a whole module, the job over each shard; a weight that
    differs in its last bit of float64 may round a parameter to the next float32 now and then."""
    case, (_, judged) = CASES[name], expected[name]
    assert (
        first_difference(
            found[name],
            expected[name],
            case,
            lambda one, other: one.shape == other.shape and np.allclose(one, other, rtol=1e-5, atol=1e-6),
        )
        is None
    )
    for used, events in found[name]:
        held = {module_of(parameter) for parameter, one in used[0].items() if one.size}
        assert sorted(verdicts(events, case.mesh[1])) == sorted(one for one in judged if one[2] in held)
    assert {what for _, what, _, _ in judged} >= {"left out", "clipped"}
    assert case.bad in {replica for _, what, _, replica in judged if what == "left out"}


def verdicts(events, shards):
    """What a rank reports, as the reference does."""
    for event in events:
        for module, ranks in event["left_out"].items():
            yield from ((event["iteration"], "left out", module, rank // shards) for rank in ranks)
        yield from ((event["iteration"], "rolled back", module, 0) for module in event["rolled_back"])
        yield from ((event["iteration"], "clipped", module, 0) for module in event["clipped"])


def test_a_module_is_rolled_back_in_one_of_the_cases(expected):
    assert "rolled back" in {what for _, judged in expected.values() for _, what, _, _ in judged}


@pytest.mark.parametrize("name", CHANGES_NOTHING)
def test_prefetch_and_host_memory_change_no_bit(found, name):
    for (ours, seen), (theirs, others) in zip(found[name], found[SAME], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert all(np.array_equal(one[key], other[key]) for key in one)
        assert [event | {"waited_seconds": 0} for event in seen] == [event | {"waited_seconds": 0} for event in others]
