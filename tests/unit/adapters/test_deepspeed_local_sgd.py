"""Local SGD in a session on real DeepSpeed engines, against a simulation of its replicas one after another.

The reference has no session: its ranks are those of one replica, and each holds an engine for every replica, built as
a job of that replica alone. After an iteration that is a multiple of tau it combines them by its own formula: NumPy's
mean, and torch's SGD as outer optimizer. Under DreamDDP it also takes means of some modules before an iteration, and
writes them right before the update of each replica. With two replicas the mean does not depend on an order, so all
comparisons are bit for bit.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import tempfile
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("deepspeed")

from ft_plugins.errors import FtError  # noqa: E402
from ft_plugins.sync.rounds import synchronisation  # noqa: E402
from ft_plugins.systems.local_sgd import local_sgd  # noqa: E402
from harness.gang import gang  # noqa: E402

_spec = importlib.util.spec_from_file_location("reduced", Path(__file__).parent / "test_deepspeed_reduction.py")
assert _spec is not None and _spec.loader is not None
reduced = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(reduced)

WORLD, REPLICAS, TAU, STEPS = 4, 2, 2, 7  # three synchronisations, and an iteration behind the last one
EDIT, POST = {"policy": "edit", "penalty": False}, {"policy": "post_local_sgd"}
EVEN = {"policy": "dreamddp", "schedule": "equal", "h": 2, "tau": 5}
PLAIN_TURNS = ({"4", "2"}, {"0"})  # the modules that are averaged in each iteration of a period
PIPELINE_TURNS = ({"0", "1", "5"}, {"3"})  # the tied layer is 0; by stage 1, and 3 and 5
ALL = ({"0", "1", "2", "3", "4", "5"},)


class Case(NamedTuple):
    """A job of four ranks with two replicas. `turns`: the modules that DreamDDP averages in each iteration of a period.
    `wrong`: what is broken on purpose."""

    pp: int
    stage: int
    keys: dict[str, Any]
    apply: str
    dtype: str = "fp32"
    accumulate: str = ""
    wrong: str = ""
    turns: Sequence[Set[str]] = ()

    @property
    def sync(self) -> dict[str, Any]:
        """The block of keys."""
        block = {"tau": TAU, **self.keys, "shard_ranks": self.mode.inner}
        return {**block, "apply": self.apply} if self.apply else block

    def due(self, step: int) -> bool:
        """Whether all modules are synchronised after the update of an iteration."""
        return bool(step % self.sync["tau"] == 0)

    def turn(self, step: int) -> Set[str]:
        """The modules that are averaged before the update of an iteration."""
        return self.turns[(step - 1) % len(self.turns)] if self.turns and not self.due(step) else set()

    @property
    def mode(self) -> Any:
        inner = WORLD // REPLICAS // max(self.pp, 1)
        return reduced.Mode(self.stage, self.dtype, inner, True, self.accumulate, pp=self.pp)


CASES = {
    "pipeline, edit, forward": Case(2, 0, EDIT, "forward"),
    "pipeline, zero1, edit, update": Case(2, 1, EDIT, "update"),
    "engine, edit, forward": Case(0, 0, EDIT, "forward"),
    "engine, bf16, edit, update": Case(0, 0, EDIT, "update", "bf16", "bf16"),
    "zero2, edit, wait": Case(0, 2, EDIT, "wait"),
    "zero3, post local sgd, wait": Case(0, 3, POST, "wait"),
    "pipeline, dreamddp": Case(2, 0, EVEN, "", turns=PIPELINE_TURNS),
}
MORE = {
    "pipeline, post local sgd, wait": Case(2, 0, POST, "wait"),
    "pipeline, bf16, edit, update": Case(2, 0, EDIT, "update", "bf16", "bf16"),
    "zero1, post local sgd, wait": Case(0, 1, POST, "wait"),
    "zero1, bf16, edit, update": Case(0, 1, EDIT, "update", "bf16", "fp32"),
    "zero2, edit, update": Case(0, 2, EDIT, "update"),
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
WRONG = {
    "divided by another size": Case(2, 0, EDIT, "forward", wrong="divided"),
    "a parameter left out": Case(2, 0, EDIT, "forward", wrong="left out"),
    "gradients over all replicas": Case(0, 2, EDIT, "wait", wrong="gradients"),
    "gradients of a tied embedding skipped": Case(2, 0, EDIT, "forward", wrong="tied"),
}


# ---- the job ----


def trained(rank: int, world: int, cases: list[Case], folder: str) -> list[Any]:
    """Parameters after each iteration, and at the end, of a session whose keys are in DeepSpeed's configuration alone:
    a dictionary, or a file where the engine is built over `shard_ranks`."""
    reduced.start(rank, world)
    return [_trained(rank, world, case, folder) for case in cases]


def _trained(rank: int, world: int, case: Case, folder: str) -> Any:
    import deepspeed

    from ft_plugins.adapters.deepspeed.training import EngineHooks

    mode = case.mode
    stage, place = divmod(rank, world // max(mode.pp, 1))
    model, optimizer = _seeded(mode, stage, place)
    config: Any = {**reduced.configuration(mode), "ft_plugins": {"sync": case.sync}}
    if case.stage or case.dtype != "fp32":
        path = Path(tempfile.mkstemp(suffix=".json", dir=folder)[1])
        path.write_text(json.dumps(config))
        config = str(path)
    hooks = EngineHooks()
    with pytest.MonkeyPatch.context() as patch:
        _break(patch, case.wrong)
        engine = hooks._initializing(deepspeed.initialize)(model=model, optimizer=optimizer, config=config)[0]
        assert hooks.loop is not None
        after = []
        for step in range(1, STEPS + 1):
            reduced.weight[0] = reduced.WEIGHTS[step % 2]
            reduced.train_once(engine, reduced.batches(place, step, next(engine.module.parameters()).dtype))
            after.append(reduced.parameters(engine))
        hooks.finish()
    return after, reduced.parameters(engine)


def _seeded(mode: Any, stage: int, place: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(7 + stage + 100 * place)
    model = reduced.layers(mode.pp)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _break(patch: pytest.MonkeyPatch, wrong: str) -> None:
    aggregate, plan, over = synchronisation.aggregate, local_sgd.plan_modules, local_sgd.LocalSgdPolicy.reduced_over
    if wrong == "divided":  # by the ranks of the job instead of the replicas
        patch.setattr(synchronisation, "aggregate", lambda values, how: aggregate(values, how) * (REPLICAS / WORLD))
    elif wrong == "left out":
        patch.setattr(local_sgd, "plan_modules", lambda *given: plan(*given)[:-1])
    elif wrong == "gradients":
        patch.setattr(local_sgd.LocalSgdPolicy, "reduced_over", lambda policy, step: over(policy, 0))
    elif wrong == "tied":
        from deepspeed.pipe import PipelineModule

        patch.setattr(PipelineModule, "get_tied_weights_and_groups", lambda module: [])


# ---- the reference ----


def simulated(rank: int, world: int, cases: list[Case]) -> list[Any]:
    """The same for every replica, by the ranks of one replica."""
    reduced.start(rank, world)
    return [Simulated(rank, world, case).run() for case in cases]


class Simulated:
    """This rank's part of all replicas."""

    def __init__(self, rank: int, world: int, case: Case) -> None:
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
        self._anchors = {name: torch.nn.Parameter(one.clone()) for name, one in self._synchronised(0).items()}
        outer = {"lr": 0.8, "momentum": 0.85, "nesterov": True} if case.keys is EDIT else None
        self._outer = None if outer is None else torch.optim.SGD(self._anchors.values(), **outer)
        self._pending: set[int] = set()
        self._averages, self._means = False, dict[str, torch.Tensor]()  # before the update of each replica

    def _before_update(self, host: Any, step: int) -> None:
        if self._case.apply == "update":
            self._write(host)
        own = self._synchronised(self._hosts.index(host))
        for name, mean in self._means.items():
            own[name].copy_(mean)
        if self._averages:  # a collective: another rank may have what is averaged
            host.derive()

    def _synchronised(self, replica: int) -> dict[str, torch.Tensor]:
        host = self._hosts[replica]
        roles = {item.name: item.role.value for item in host.inventory().items}
        return {name: one for name, one in host.tensors().items() if roles[name] in ("parameter", "main_parameter")}

    def run(self) -> Any:
        after: list[list[Any]] = [[] for _ in self._engines]
        for step in range(1, STEPS + 1):
            reduced.weight[0] = reduced.WEIGHTS[step % 2]
            due = self._case.turn(step)
            self._averages = bool(due)
            self._means = {name: self._mean(name) for name in self._anchors if module_of(name) in due}
            for replica, engine in enumerate(self._engines):
                if self._case.apply == "forward":
                    self._write(self._hosts[replica])
                place = self._place + replica * self._case.mode.inner
                reduced.train_once(engine, reduced.batches(place, step, next(engine.module.parameters()).dtype))
            if self._case.due(step):
                self._combine()
            for replica, engine in enumerate(self._engines):
                if self._case.apply in ("wait", ""):
                    self._write(self._hosts[replica])
                after[replica].append(reduced.parameters(engine))
        for host in self._hosts:
            self._write(host)
        return [(one, reduced.parameters(engine)) for one, engine in zip(after, self._engines, strict=True)]

    def _mean(self, name: str) -> torch.Tensor:
        replicas = [self._synchronised(replica) for replica in range(REPLICAS)]
        values = np.stack([one[name].detach().numpy().astype(np.float64) for one in replicas])
        return torch.from_numpy(values.mean(0).astype(np.float32))

    def _combine(self) -> None:
        for name, anchor in self._anchors.items():
            mean = self._mean(name)
            if self._outer is None:
                anchor.data.copy_(mean)
            else:
                anchor.grad = anchor.data - mean
        if self._outer is not None:
            self._outer.step()
        self._pending = set(range(REPLICAS))

    def _write(self, host: Any) -> None:
        replica = self._hosts.index(host)
        if replica in self._pending:
            self._pending.remove(replica)
            for name, one in self._synchronised(replica).items():
                one.copy_(self._anchors[name].detach())
            host.derive()


def module_of(parameter: str) -> str:
    """The layer that has it; of a tied layer the first place."""
    return "0" if parameter.startswith("tied_modules") else parameter.split(".")[0]


def by_case(function: Any, world: int, cases: dict[str, Case], *more: Any) -> dict[str, list[Any]]:
    """The results of all ranks. After a pipeline, DeepSpeed cannot build a plain engine in the same process."""
    results = {}
    for pp in {case.pp for case in cases.values()}:
        own = {name: case for name, case in cases.items() if case.pp == pp}
        results |= dict(zip(own, zip(*gang(function, world, list(own.values()), *more), strict=True), strict=True))
    return results  # type: ignore[return-value]


Results = dict[str, tuple[list[Any], list[Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Results]:
    """By case of the set to which a name belongs: the results of all ranks of the job, and by rank of one replica
    those of all replicas. Each set is run once."""
    folder = str(tmp_path_factory.mktemp("ds"))

    @functools.cache
    def run(number: int) -> Results:
        cases = SETS[number]
        found = by_case(trained, WORLD, cases | WRONG if cases is CASES else cases, folder)
        expected = by_case(simulated, WORLD // REPLICAS, cases)
        return {name: (one, expected[name if name in cases else right(name)]) for name, one in found.items()}

    return lambda name: run(next((number for number, cases in enumerate(SETS) if name in cases), 0))


def right(name: str) -> str:
    """The case of which `name` is a wrong variant."""
    return next(each for each, one in CASES.items() if one == WRONG[name]._replace(wrong=""))


def of_rank(expected: list[Any], rank: int, case: Case) -> Any:
    """What a rank of the job should have."""
    stage, place = divmod(rank, WORLD // max(case.pp, 1))
    replica, at = divmod(place, case.mode.inner)
    return expected[stage * case.mode.inner + at][replica]


def first_difference(found: list[Any], expected: list[Any], case: Case) -> tuple[int, int] | None:
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
def test_a_job_equals_its_replicas_simulated_one_after_another(results: Callable[[str], Results], name: str) -> None:
    case, (found, expected) = (CASES | MORE | LAYERED)[name], results(name)[name]
    assert first_difference(found, expected, case) is None
    local = [after[TAU - 2] for after, _ in found]  # after the first iteration
    assert not reduced.equal(local[0], local[case.mode.inner]), "replicas have data of their own"


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_reduction_is_seen(results: Callable[[str], Results], name: str) -> None:
    found, expected = results(name)[name]
    difference = first_difference(found, expected, WRONG[name])
    assert difference is not None and difference[0] <= TAU + 1, "at the first synchronisation at the latest"


# ---- refusals ----


class Unnumbered(torch.nn.Module):
    """A model whose layers have no numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


REFUSED: dict[str, tuple[int, dict[str, Any]]] = {  # by a part of the message: stages of the pipeline, and keys
    "updates all layers together, after the whole backward; choose average_first": (
        2,
        {"h": 2, "order": "update_first"},
    ),
    "--sync-h 3: expected at most 2, because no pipeline stage has more than 2 layers": (2, {"h": 3}),
    "profile of another model: expected 4 layers, found 2 layers; profile this model": (2, {"profile": "", "h": 2}),
    "--sync-h 2: expected at most 1, because no pipeline stage has more than 1 layer that": (0, {"h": 2}),
}


def _refused(rank: int, world: int, pp: int, profile: str) -> dict[str, str]:
    import deepspeed

    from ft_plugins.adapters.deepspeed.training import EngineHooks

    reduced.start(rank, world)
    found = {}
    for message, (stages, keys) in REFUSED.items():
        if stages != pp:
            continue
        sync = {"policy": "dreamddp", **keys, **({"profile": profile} if "profile" in keys else {})}
        model = reduced.layers(pp) if pp else Unnumbered()
        config = {**reduced.configuration(reduced.Mode(0, "fp32", 1, True, pp=pp)), "ft_plugins": {"sync": sync}}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(FtError) as caught:
            initialize = EngineHooks()._initializing(deepspeed.initialize)
            engine = initialize(model=model, optimizer=optimizer, config=config)[0]
            reduced.train_once(engine, reduced.batches(0, 1, torch.float32))
        found[message] = str(caught.value)
    return found


@pytest.mark.parametrize("pp", [2, pytest.param(0, marks=pytest.mark.all_configurations)])
def test_layers_that_cannot_be_averaged_apart_are_refused_in_one_line(pp: int, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    times = {"forward_seconds": 1.0, "backward_seconds": 5.0, "communication_seconds": 1.0, "bytes": 4}
    layers = [{"name": name, **times} for name in ("1", "3")]
    path.write_text(json.dumps({"version": 1, "replicas": 2, "layers": layers}))
    for found in gang(_refused, WORLD if pp else 2, pp, str(path)):
        assert len(found) == sum(stages == pp for stages, _ in REFUSED.values())
        assert all(message in said and "\n" not in said for message, said in found.items()), found
