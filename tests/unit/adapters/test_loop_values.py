"""What loops carry on in variables, objects and functions is read, without a call of anything of the script."""

from __future__ import annotations

import ast
import gc
import linecache
import random
import site
import sysconfig
import weakref
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from ft_plugins.adapters.script.loop_counters import LoopCounters, decided_otherwise, loop_counters
from ft_plugins.adapters.script.loop_values import NOTHING, comparable, value_of
from ft_plugins.adapters.script.own_counters import OwnCounters
from ft_plugins.base import installed
from ft_plugins.snapshot.capture import codec


class Slotted:
    __slots__ = ("empty", "step")
    total = 9

    def __init__(self) -> None:
        self.step = 4


class Trap:
    """Would notice if it were called."""

    @property
    def step(self) -> int:
        raise AssertionError("called")

    def __getattr__(self, name: str) -> int:
        raise AssertionError("called")

    def __getitem__(self, key: Any) -> int:
        raise AssertionError("called")


class Trapped(dict[str, int]):
    def __getitem__(self, key: str) -> int:
        raise AssertionError("called")


class Progress(NamedTuple):
    epoch: int
    best: float


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("slotted.step", 4),
        ("slotted.empty", None),
        ("slotted.total", 9),
        ("counts[1]", 7),
        ("counts[-1]", 8),
        ("counts[5]", None),
        ("names['b'][at]", 6),
        ("names[which]", [5, 6]),
        ("args.iteration", 3),
        ("trapped['step']", 2),
        ("trap.step", None),
        ("trap[0]", None),
        ("missing.step", None),
        ("counts[at:]", None),
    ],
)
def test_where_a_script_may_keep_a_counter(expression: str, value: Any) -> None:
    space = {
        **{"slotted": Slotted(), "trap": Trap(), "trapped": Trapped(step=2), "args": Namespace(iteration=3)},
        **{"counts": [6, 7, 8], "names": {"b": [5, 6]}, "at": 1, "which": "b"},
    }
    found = value_of(ast.parse(expression, mode="eval").body, (space,))
    assert (None if isinstance(found, property) or found is NOTHING else found) == value


@dataclass
class State:
    step: int = 0
    losses: list[float] = field(default_factory=list)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1.5, 1.25),
        (float("inf"), 1.0),
        (True, False),
        ("warm", "decay"),
        (None, 0.5),
        ("x" * 100 + "a", "x" * 100 + "b"),
        ([0.5, 0.25], [0.5, 0.75]),
        (deque([1, 2], 2), deque([1, 3], 2)),
        ({"loss": [1.0]}, {"loss": [1.0, 2.0]}),
        ({1, 2}, {1, 3}),
        (Progress(1, 0.5), Progress(2, 0.5)),
        (State(1, [0.5]), State(1, [0.25])),
        (Namespace(at=1), Namespace(at=2)),
        (torch.tensor(0.5), torch.tensor([0.75])),
        (np.float32(0.5), np.float32(0.75)),
        ([object()], [object(), object()]),
        ({"weights": torch.zeros(3)}, {"weights": torch.tensor([0.0, 0.0, 1.0])}),
        (Namespace(shadow={"w": torch.ones(2, 2)}), Namespace(shadow={"w": torch.ones(4)})),
        ([torch.zeros(2, dtype=torch.bfloat16).requires_grad_()], [torch.ones(2, dtype=torch.bfloat16)]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_differ_are_told_from_each_other_and_equal_ones_are_not(one: Any, other: Any) -> None:
    assert comparable(one) == comparable(one) is not None
    assert comparable(one) != comparable(other)
    assert len(str(comparable(one))) < 80


@pytest.mark.parametrize(
    "value", [torch.zeros(2), object(), torch, len, Trap()], ids=["tensor", "object", "module", "function", "trap"]
)
def test_what_cannot_be_compared_has_no_value(value: Any) -> None:
    assert comparable(value) is None


# ---- loops that carry on what they count elsewhere ----


class Meter:
    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.sum += value
        self.count += 1

    def average(self) -> float:
        return self.sum / max(self.count, 1)


class Stopper:
    def __init__(self) -> None:
        self.best, self.bad = float("inf"), 0

    def __call__(self, loss: float) -> bool:
        better = loss < self.best
        self._note(loss, better)
        return self.bad > 9

    def _note(self, loss: float, better: bool) -> None:
        self.best, self.bad = (loss, 0) if better else (self.best, self.bad + 1)


TOTALS = {"tokens": 0}


def in_methods(restored: dict[str, Any]) -> Iterator[LoopCounters]:
    meter, stopper = Meter(), Stopper()
    vars(meter).update(restored)
    for step in range(4):
        yield loop_counters()
        meter.update(0.5 + step)
        if stopper(0.5 + step):
            break


def in_a_closure(restored: dict[str, Any]) -> Iterator[LoopCounters]:
    seen, TOTALS["tokens"] = restored.get("seen", 0), restored.get("tokens", 0)
    ema = restored.get("ema", 0.0)

    def train_step() -> None:
        nonlocal seen, ema
        seen += 3
        ema = 0.5 * ema + 1
        TOTALS["tokens"] += 2

    for _ in range(4):
        yield loop_counters()
        train_step()


def in_an_argument(restored: dict[str, Any]) -> Iterator[LoopCounters]:
    def train_step(state: State, loss: float) -> None:
        state.step += 1
        state.losses.append(loss)

    job = Namespace(state=State(**restored))
    for _ in range(4):
        yield loop_counters()
        train_step(job.state, loss=0.5)


CARRIED: list[tuple[Callable[[dict[str, Any]], Iterator[LoopCounters]], dict[str, Any], set[str]]] = [
    (in_methods, {"sum": 2.0, "count": 2}, {"meter.sum", "meter.count", "stopper.bad", "stopper.best"}),
    (in_a_closure, {"seen": 6, "ema": 1.5, "tokens": 4}, {"seen", "ema", "TOTALS['tokens']"}),
    (in_an_argument, {"step": 2, "losses": [0.5, 0.5]}, {"job.state.step", "job.state.losses"}),
]


@pytest.mark.parametrize(("loop", "state", "names"), CARRIED)
def test_what_a_function_carries_on_that_a_loop_calls_is_compared(
    loop: Callable[[dict[str, Any]], Iterator[LoopCounters]], state: dict[str, Any], names: set[str]
) -> None:
    first, _, version, _ = loop({})
    lost = decided_otherwise(first, version, next(loop({})), within=False) or ""
    found = {*version.deciding, *version.counters}
    assert {f"`{name}` in {loop.__name__}()" for name in names} <= found
    assert all(f"`{name}` in" in lost for name in names - {"stopper.bad"})
    again = decided_otherwise(first, version, next(loop(state)), within=False) or ""
    assert not any(name in again for name in names if not name.startswith("stopper"))


def test_what_a_call_counts_by_which_a_loop_ends_is_a_counter() -> None:
    _, _, version, _ = in_methods({})
    assert version.counters["`stopper.bad` in in_methods()"] == 1


@pytest.mark.parametrize(("total", "kind"), [(torch.zeros(2), "Tensor"), (np.zeros(2), "ndarray")])
def test_a_tensor_or_array_that_a_loop_carries_on_is_named(total: Any, kind: str) -> None:
    versions = {}
    for step in range(3):
        versions[step] = loop_counters()
        total += 1
    place = "test_a_tensor_or_array_that_a_loop_carries_on_is_named()"
    assert versions[0].unread == {f"`total` in {place}": kind}
    said = decided_otherwise(versions[0], versions[2], versions[0], within=False)
    assert f"what cannot be compared is what the script has set: `total` in {place} ({kind})" in (said or "")
    assert (
        decided_otherwise(versions[0], versions[2], versions[0], False, ignored={"total", "step", "versions"}) is None
    )


def test_tensors_in_a_container_that_are_too_large_to_compare_are_named() -> None:
    """But not if the script restores what holds them."""
    shadow, plain, versions = {"w": torch.zeros(2000)}, [0.5], {}
    for step in range(3):
        versions[step] = loop_counters()
        shadow["w"] = shadow["w"] + 1
        shadow[f"at {step % 1}"] = torch.zeros(2000)
        plain[0] = 0.25
    versions[0] = versions[1]  # as many
    said = decided_otherwise(versions[0], versions[2], versions[0], within=False, ignored={"step"}) or ""
    assert "`shadow` in " in said and "() (dict of 2, with tensors)" in said and "plain" not in said
    assert "with tensors" not in (decided_otherwise(*[versions[2]] * 3, within=False, set_back={"shadow"}) or "")


class Balanced(torch.nn.Module):
    """A loss with a number, and with a part whose own are not followed."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.part = 1.0, Halved()

    def forward(self, loss: float) -> float:
        self.scale = 0.5 * self.scale + 2.0 * loss
        return float(self.part(loss))


class Halved(torch.nn.Module):
    calls = 0

    def forward(self, loss: float) -> float:
        self.calls += 1
        return loss / 2


def test_what_the_forward_of_a_loss_changes_is_compared() -> None:
    criterion, versions = Balanced(), {}
    for step in range(3):
        versions[step] = loop_counters()
        criterion(0.5)
    said = decided_otherwise(versions[0], versions[2], versions[0], within=False) or ""
    assert "`criterion.scale` in " in said and "calls" not in said


class Flagged(Stopper):
    stop = False

    def step(self, loss: float) -> None:
        self.stop = self(loss)


def test_what_sets_the_flag_of_an_object_by_which_a_loop_ends_is_a_counter() -> None:
    stopper, versions = Flagged(), []
    for step in range(3):
        versions += [loop_counters()]
        stopper.step(1.0 + step)
        if stopper.stop:
            break
    place = "test_what_sets_the_flag_of_an_object_by_which_a_loop_ends_is_a_counter()"
    assert [one.counters[f"`stopper.bad` in {place}"] for one in versions] == [0, 0, 1]


def test_what_each_callback_of_a_list_counts_is_compared() -> None:
    seen, meters, versions = {"losses": 0}, (Meter(), Meter()), {}

    def count(loss: float) -> None:
        seen["losses"] += 1

    callbacks = [count, lambda loss: None, meters[1].update]
    for step in range(3):
        versions[step] = loop_counters()
        for callback in callbacks:
            callback(0.5)
        for meter in meters:
            meter.update(step)
    changed = decided_otherwise(versions[0], versions[2], versions[0], within=False) or ""
    names = "seen['losses']", "callbacks[2].count", "meters[0].sum", "meters[1].sum"
    assert [name for name in names if f"`{name}` in" not in changed] == ["meters[1].sum"], "known by another name"
    assert "`callbacks[2].sum` in" in changed


@pytest.mark.parametrize(
    "draw",
    [
        lambda: (np.random.default_rng(3), lambda one: one.uniform()),
        lambda: (random.Random(3), lambda one: one.random()),
        lambda: (torch.Generator().manual_seed(3), lambda one: torch.rand(2, generator=one)),
    ],
)
def test_a_generator_that_a_loop_draws_from_is_compared(draw: Callable[[], Any]) -> None:
    (generator, call), versions = draw(), {}
    for step in range(3):
        versions[step] = loop_counters()
        call(generator)
    changed = decided_otherwise(versions[0], versions[2], versions[0], within=False) or ""
    assert f"`generator` in {test_a_generator_that_a_loop_draws_from_is_compared.__name__}() is a " in changed


def test_a_version_has_room_for_what_the_largest_loop_carries_on() -> None:
    """The room is claimed by a version before the first iteration, and by twice its size."""
    own, many = OwnCounters(), {f"a_name_of_some_length_{number}": 0.5 for number in range(200)}
    claimed = 2 * len(codec.encode(own.captured()))
    source = "def loop(own):\n  for step in range(3):\n    own.begin(False, ())\n    yield own.captured()\n"
    source += "".join(f"    {name} = step + {value}\n" for name, value in many.items())
    file = "a_large_loop.py"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    space: dict[str, Any] = {}
    exec(compile(source, file, "exec"), space)  # noqa: S102
    *_, last = space["loop"](own)
    assert len(last["last"]["deciding"]) == 64
    assert len(codec.encode(last)) < claimed


def test_a_closure_that_a_loop_makes_in_each_step_is_not_kept() -> None:
    """With the batch that it refers to."""

    def loss_of(batch: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: batch.sum()

    def step_of(batch: torch.Tensor) -> Callable[[], torch.Tensor]:
        def closure() -> torch.Tensor:
            return batch.sum()

        return closure

    kept = []
    for made_by in (loss_of, step_of):
        for _ in range(3):
            batch = torch.ones(2)
            kept.append(weakref.ref(batch))
            closure = made_by(batch)
            closure()
            loop_counters()
    del batch, closure
    gc.collect()
    assert [one() for one in kept] == [None] * 6


def test_an_element_that_is_read_whole_is_no_list_of_functions() -> None:
    """As h5py reads: `file["tokens"][...]`."""
    file = {"tokens": np.ones(3)}
    for _ in range(1):
        torch.from_numpy(file["tokens"][...])
        assert "`_`" in str(loop_counters().counters)


def test_objects_in_a_set_are_not_asked_for_their_text() -> None:
    class Trap:
        def __repr__(self) -> str:
            raise AssertionError("called")

    assert comparable({Trap()}) == "a set of 1"
    assert comparable({(1, Trap())}) == "a set of 1"
    assert comparable({(1, 2), 3}) == comparable({3, (1, 2)}) != comparable({(1, 2), 4})


class Shuffled(list[int]):
    """Draws when it is read, as a list of samples may."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(list(range(list.__len__(self))), list.__len__(self)))


class Unsized(dict[str, int]):
    def __len__(self) -> int:
        raise AssertionError("called")

    def __contains__(self, key: object) -> bool:
        raise AssertionError("called")

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("called")


class Disguised:
    """As a lazy proxy is: what it pretends to be costs a call."""

    @property
    def __class__(self) -> Any:
        raise AssertionError("called")

    @__class__.setter
    def __class__(self, kind: Any) -> None: ...


class Written(tuple[int, ...]):
    def __repr__(self) -> str:
        raise AssertionError("called")


def test_containers_of_a_script_are_read_by_the_methods_of_pythons_own() -> None:
    shuffled, unsized, holder = Shuffled([3, 1, 2]), Unsized(step=2), Slotted.__new__(Slotted)
    before = random.getstate()
    assert comparable(shuffled) == comparable(Shuffled([3, 1, 2])) != comparable(Shuffled([1, 2, 3]))
    assert comparable([shuffled]) == comparable([Shuffled([3, 1, 2])])
    assert random.getstate() == before, "reading a value drew a random number of the script"
    assert comparable(unsized) == comparable(Unsized(step=2)) != comparable(Unsized(step=3))
    assert comparable({Written((1, 2))}) == comparable({Written((1, 2))}) != comparable({Written((1, 3))})
    assert comparable(Disguised()) is comparable(holder) is None
    owner = Namespace()
    owner.__dict__ = unsized
    assert read("owner.step", owner=owner) == 2


def read(expression: str, **space: Any) -> Any:
    found = value_of(ast.parse(expression, mode="eval").body, (space,))
    return None if found is NOTHING else found


def test_a_number_may_be_below_zero_unless_it_is_an_exponent() -> None:
    space = {"at": 5, "back": -2}
    assert [read(one, **space) for one in ("at + back", "at - back", "at * back")] == [3, 7, -10]
    assert (read("at ** back", **space), read("back ** at", **space)) == (None, -32)


class Key:
    """Equal to its name, by a comparison of the script."""

    def __hash__(self) -> int:
        return hash("step")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("called")


def test_what_only_the_script_can_compare_is_not_looked_up() -> None:
    assert read("counts['step']", counts={Key(): 1}) is None
    assert read("counts['step']", counts={"step": 1, 4: 2}) == 1


def test_slots_read_from_their_class_have_no_value() -> None:
    assert read("kind.step", kind=Slotted) is None
    assert read("kind.total", kind=Slotted) == 9


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo])
def test_a_sparse_tensor_of_one_element_has_no_value(layout: torch.layout) -> None:
    assert comparable(torch.ones(1, 1).to_sparse(layout=layout)) is None


SITE = sysconfig.get_path("purelib")


@pytest.mark.parametrize(
    ("folder", "bounds"),
    [
        (SITE, False),
        (site.getusersitepackages(), False),
        ("/usr/lib/python3/dist-packages", False),
        (f"{sysconfig.get_path('stdlib')}-of-mine", True),
        ("/home/me", True),
    ],
    ids=["environment", "user", "system", "almost", "elsewhere"],
)
def test_a_loop_is_the_scripts_unless_its_file_is_installed_wherever_that_is(
    folder: str, bounds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bounds of a progress bar's own loop say nothing about the script."""
    monkeypatch.setattr(site, "getsitepackages", lambda: [SITE, "/usr/lib/python3/dist-packages"])  # as on Debian
    installed.is_installed.cache_clear()
    file, source = f"{folder}/bar.py", "def bar(total):\n    for _ in range(total):\n        yield loop_counters()\n"
    monkeypatch.setitem(linecache.cache, file, (len(source), None, source.splitlines(keepends=True), file))
    space: dict[str, Any] = {"loop_counters": loop_counters}
    exec(compile(source, file, "exec"), space)  # noqa: S102
    found = next(space["bar"](3))
    installed.is_installed.cache_clear()
    assert ("`total` in bar()" in found.bounds) == bounds
