"""Local SGD in a session on real DeepSpeed engines, against a simulation of its replicas one after another.

The reference has no session: its ranks are those of one replica, and each holds an engine for every replica, built as
a job of that replica alone. After an iteration that is a multiple of tau it combines them (`local_sgd_reference`).
Under DreamDDP it also takes means of some modules before an iteration, and writes them right before the update of each
replica. With two replicas the mean does not depend on an order, so all comparisons are bit for bit.
"""

import functools
import json
import tempfile
from collections.abc import Sequence, Set
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("deepspeed")

from harness.gang import gang  # noqa: E402
from tests.unit.adapters import test_deepspeed_reduction as reduced  # noqa: E402
from tests.unit.adapters.local_sgd_reference import Reference, mean_of  # noqa: E402

WORLD, REPLICAS, TAU, STEPS = 4, 2, 2, 7  # three synchronisations, and an iteration behind the last one
EDIT, POST = {"policy": "edit", "penalty": False}, {"policy": "post_local_sgd"}
EVEN = {"policy": "dreamddp", "schedule": "equal", "h": 2, "tau": 5}
PLAIN_TURNS = ({"4", "2"}, {"0"})  # the modules that are averaged in each iteration of a period
PIPELINE_TURNS = ({"0", "1", "5"}, {"3"})  # the tied layer is 0; by stage 1, and 3 and 5
ALL = ({"0", "1", "2", "3", "4", "5"},)


class Case(NamedTuple):
    """A job of four ranks with two replicas. `turns`: the modules that DreamDDP averages in each iteration of a
    period."""

    pp: int
    stage: int
    keys: dict[str, Any]
    apply: str
    dtype: str = "fp32"
    accumulate: str = ""
    turns: Sequence[Set[str]] = ()

    @property
    def sync(self):
        """The block of keys."""
        block = {"tau": TAU, **self.keys, "shard_ranks": self.mode.inner}
        return {**block, "apply": self.apply} if self.apply else block

    def due(self, step):
        """Whether all modules are synchronised after the update of an iteration."""
        return bool(step % self.sync["tau"] == 0)

    def turn(self, step):
        """The modules that are averaged before the update of an iteration."""
        return self.turns[(step - 1) % len(self.turns)] if self.turns and not self.due(step) else set()

    @property
    def mode(self):
        inner = WORLD // REPLICAS // max(self.pp, 1)
        return reduced.Mode(self.stage, self.dtype, inner, True, self.accumulate, pp=self.pp)


CASES = {
    "pipeline, edit, forward": Case(2, 0, EDIT, "forward"),
    "pipeline, zero1, edit, update": Case(2, 1, EDIT, "update"),
    "engine, edit, forward": Case(0, 0, EDIT, "forward"),
    "engine, bf16, edit, update": Case(0, 0, EDIT, "update", "bf16", "bf16"),
    "zero2, edit, wait": Case(0, 2, EDIT, "wait"),
    "zero1, bf16, edit, forward": Case(0, 1, EDIT, "forward", "bf16", "fp32"),
    "zero3, post local sgd, wait": Case(0, 3, POST, "wait"),
    "pipeline, dreamddp": Case(2, 0, EVEN, "", turns=PIPELINE_TURNS),
}
MORE = {
    "pipeline, post local sgd, wait": Case(2, 0, POST, "wait"),
    "pipeline, bf16, edit, update": Case(2, 0, EDIT, "update", "bf16", "bf16"),
    "zero1, post local sgd, wait": Case(0, 1, POST, "wait"),
    "zero1, bf16, edit, update": Case(0, 1, EDIT, "update", "bf16", "fp32"),
    "zero2, edit, update": Case(0, 2, EDIT, "update"),
    "pipeline, bf16, edit, forward": Case(2, 0, EDIT, "forward", "bf16", "bf16"),
    "engine, bf16, post local sgd, forward": Case(0, 0, POST, "forward", "bf16", "bf16"),
    "pipeline, zero1, edit, forward": Case(2, 1, EDIT, "forward"),
    "zero1, fp16, edit, forward": Case(0, 1, EDIT, "forward", "fp16"),
    "zero2, edit, forward": Case(0, 2, EDIT, "forward"),
    "zero3, edit, update": Case(0, 3, EDIT, "update"),
}
LAYERED = {
    "pipeline, zero1, dreamddp": Case(2, 1, EVEN, "", turns=PIPELINE_TURNS),
    "pipeline, bf16, dreamddp": Case(2, 0, EVEN, "", "bf16", "bf16", turns=PIPELINE_TURNS),
    "pipeline, dreamddp in each iteration": Case(2, 0, {**EVEN, "h": 1}, "", turns=ALL),
    "engine, dreamddp": Case(0, 0, EVEN, "", turns=PLAIN_TURNS),
    "zero1, bf16, dreamddp": Case(0, 1, EVEN, "", "bf16", "fp32", turns=PLAIN_TURNS),
    "zero2, dreamddp": Case(0, 2, EVEN, "", turns=PLAIN_TURNS),
    "zero3, dreamddp": Case(0, 3, EVEN, "", turns=PLAIN_TURNS),
    "zero3, dreamddp in each iteration": Case(0, 3, {**EVEN, "h": 1}, "", turns=ALL),
}
SETS = (CASES, MORE, LAYERED)


# ---- the job ----


def trained(rank, world, cases, folder):
    """Parameters after each iteration, and at the end, of a session whose keys are in DeepSpeed's configuration alone:
    a dictionary, or a file where the engine is built over `shard_ranks`."""
    reduced.start(rank, world)
    return [_trained(rank, world, case, folder) for case in cases]


def _trained(rank, world, case, folder):
    import deepspeed

    from ft_plugins.adapters.deepspeed.training import EngineHooks

    mode = case.mode
    stage, place = divmod(rank, world // max(mode.pp, 1))
    model, optimizer = _seeded(mode, stage, place)
    config = {**reduced.configuration(mode), "ft_plugins": {"sync": case.sync}}
    if case.stage or case.dtype != "fp32":
        path = Path(tempfile.mkstemp(suffix=".json", dir=folder)[1])
        path.write_text(json.dumps(config))
        config = str(path)
    hooks = EngineHooks()
    engine = hooks.initialize(deepspeed.initialize, model=model, optimizer=optimizer, config=config)[0]
    after = []
    for step in range(1, STEPS + 1):
        reduced.weight[0] = reduced.WEIGHTS[step % 2]
        reduced.train_once(engine, reduced.batches(place, step, next(engine.module.parameters()).dtype))
        after.append(reduced.parameters(engine))
    hooks.finish()
    return after, reduced.parameters(engine)


def _seeded(mode, stage, place):
    torch.manual_seed(7 + stage + 100 * place)
    model = reduced.layers(mode.pp)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


# ---- the reference ----


def simulated(rank, world, cases):
    """The same for every replica, by the ranks of one replica."""
    reduced.start(rank, world)
    return [Simulated(rank, world, case).run() for case in cases]


class Simulated:
    """This rank's part of all replicas."""

    def __init__(self, rank, world, case):
        import deepspeed

        from ft_plugins.adapters.deepspeed.core import DeepSpeedHost

        self._case, mode = case, case.mode
        stage, self._place = divmod(rank, mode.inner)
        self._engines, self._hosts = [], []
        for _ in range(REPLICAS):
            model, optimizer = _seeded(mode, stage, self._place)
            engine = deepspeed.initialize(model=model, optimizer=optimizer, config=reduced.configuration(mode))[0]
            host = DeepSpeedHost(engine)
            late = functools.partial(self._before_update, host)
            host.install(SimpleNamespace(before_update=late, after_update=lambda step: None))
            self._engines.append(engine)
            self._hosts.append(host)
        self._reference = Reference(case.keys, self._synchronised(0), {})
        self._pending = set()
        self._averages, self._means = False, dict[str, torch.Tensor]()  # before the update of each replica

    def _before_update(self, host, step):
        if self._case.apply == "update":
            self._write(host)
        own = self._synchronised(self._hosts.index(host))
        for name, mean in self._means.items():
            own[name].copy_(mean)
        if self._averages:  # a collective: another rank may have what is averaged
            host.derive()

    def _synchronised(self, replica):
        host = self._hosts[replica]
        roles = {item.name: item.role.value for item in host.inventory().items}
        return {name: one for name, one in host.tensors().items() if roles[name] in ("parameter", "main_parameter")}

    def run(self):
        after = [[] for _ in self._engines]
        for step in range(1, STEPS + 1):
            reduced.weight[0] = reduced.WEIGHTS[step % 2]
            due = self._case.turn(step)
            self._averages = bool(due)
            self._means = {
                name: mean_of([self._synchronised(replica)[name] for replica in range(REPLICAS)])
                for name in self._reference.anchors
                if module_of(name) in due
            }
            for replica, engine in enumerate(self._engines):
                if self._case.apply == "forward":
                    self._write(self._hosts[replica])
                place = self._place + replica * self._case.mode.inner
                reduced.train_once(engine, reduced.batches(place, step, next(engine.module.parameters()).dtype))
            if self._case.due(step):
                self._reference.combine([self._synchronised(replica) for replica in range(REPLICAS)])
                self._pending = set(range(REPLICAS))
            for replica, engine in enumerate(self._engines):
                if self._case.apply in ("wait", ""):
                    self._write(self._hosts[replica])
                after[replica].append(reduced.parameters(engine))
        for host in self._hosts:
            self._write(host)
        return [(one, reduced.parameters(engine)) for one, engine in zip(after, self._engines, strict=True)]

    def _write(self, host):
        replica = self._hosts.index(host)
        if replica in self._pending:
            self._pending.remove(replica)
            for name, one in self._synchronised(replica).items():
                one.copy_(self._reference.anchors[name].detach())
            host.derive()


def module_of(parameter):
    """The layer that has it; of a tied layer the first place."""
    return "0" if parameter.startswith("tied_modules") else parameter.split(".")[0]


def by_case(function, world, cases, *more):
    """The results of all ranks. After a pipeline, DeepSpeed cannot build a plain engine in the same process."""
    results = {}
    for pp in {case.pp for case in cases.values()}:
        own = {name: case for name, case in cases.items() if case.pp == pp}
        results |= dict(zip(own, zip(*gang(function, world, list(own.values()), *more), strict=True), strict=True))
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """By case of the set to which a name belongs: the results of all ranks of the job, and by rank of one replica
    those of all replicas. Each set is run once."""
    folder = str(tmp_path_factory.mktemp("ds"))

    @functools.cache
    def run(number):
        cases = SETS[number]
        found = by_case(trained, WORLD, cases, folder)
        expected = by_case(simulated, WORLD // REPLICAS, cases)
        return {name: (one, expected[name]) for name, one in found.items()}

    return lambda name: run(next(number for number, cases in enumerate(SETS) if name in cases))


def of_rank(expected, rank, case):
    """What a rank of the job should have."""
    stage, place = divmod(rank, WORLD // max(case.pp, 1))
    replica, at = divmod(place, case.mode.inner)
    return expected[stage * case.mode.inner + at][replica]


def first_difference(found, expected, case):
    """The iteration and rank of the first parameter that differs in any bit; the end counts as an iteration."""
    for step in range(STEPS + 1):
        for rank in range(WORLD):
            ours, theirs = (
                (after[step] if step < STEPS else end) for after, end in (found[rank], of_rank(expected, rank, case))
            )
            if not reduced.equal(ours, theirs):
                return step + 1, rank
    return None


@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(name, marks=pytest.mark.all_configurations) for name in MORE | LAYERED)]
)
def test_a_job_equals_its_replicas_simulated_one_after_another(results, name):
    case, (found, expected) = (CASES | MORE | LAYERED)[name], results(name)[name]
    assert first_difference(found, expected, case) is None
    local = [after[TAU - 2] for after, _ in found]  # after the first iteration
    assert not reduced.equal(local[0], local[case.mode.inner]), "replicas have data of their own"
