"""What a script changes of a model that no snapshot can put back is named: where it happens, and after a restore."""

from __future__ import annotations

import functools
import logging
import random
import sys
import threading
import tracemalloc
import uuid
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from enum import Enum
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed._composable import contract

from ft_plugins.adapters import module_parts
from ft_plugins.adapters.held_objects import read_parts
from ft_plugins.adapters.module_modes import ModuleNumbers
from ft_plugins.adapters.module_parts import ModuleParts
from ft_plugins.adapters.module_shape import ModuleShape
from ft_plugins.snapshot.capture import codec
from tests.unit.adapters.torch_small import Small, handed_over, take_over


class Configured:
    def __init__(self) -> None:
        self.kind, self.step, self.held = "eager", 0, torch.zeros(2)


class Layer(torch.nn.Module):
    """A module with a function, an object and a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Callable[..., Any] = torch.tanh
        self.configured = Configured()
        self.drawing = np.random.default_rng(3)
        self.inner = torch.nn.Linear(3, 3)
        self.act = torch.nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.inner(self.scale(x)))


def doubled(*call: Any) -> Any:
    return 2 * call[-1]


def halved(gradient: torch.Tensor) -> torch.Tensor:
    return gradient / 2


def swap(layer: Layer) -> None:
    layer.act = torch.nn.GELU()  # type: ignore[assignment]


def other_class(layer: Layer) -> None:
    layer.inner.__class__ = type("Scaled", (torch.nn.Linear,), {"__module__": "scaled"})


def hook(layer: Layer) -> None:
    layer.register_forward_hook(doubled)


def nameless_hook(layer: Layer) -> None:
    layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def backward_hook(layer: Layer) -> None:
    layer.inner.register_full_backward_hook(lambda *call: None)


def gradient_hook(layer: Layer) -> None:
    layer.inner.weight.register_hook(halved)


def function(layer: Layer) -> None:
    layer.scale = torch.sin


def partial(layer: Layer) -> None:
    layer.scale = functools.partial(torch.clamp, min=0.5)


def own_forward(layer: Layer) -> None:
    layer.inner.forward = MethodType(lambda self, x: x, layer.inner)  # type: ignore[method-assign]


def object_in_it(layer: Layer) -> None:
    layer.configured.kind = "flash"


CHANGES = {
    swap: "class of '1.act' is activation.GELU, and was activation.ReLU",
    other_class: "class of '1.inner' is scaled.Scaled, and was linear.Linear",
    hook: "forward hooks of '1' is tests.unit.adapters.test_module_shape.doubled, and was nothing",
    nameless_hook: "forward pre hooks of '1' is tests.unit.adapters.test_module_shape.nameless_hook.<locals>.<lambda>",
    backward_hook: "backward hooks of '1.inner' is ",
    gradient_hook: "backward hooks of weight of '1.inner' is tests.unit.adapters.test_module_shape.halved",
    function: "scale of '1' is ",
    partial: "scale of '1' is ",
    own_forward: "forward of '1.inner' is ",
    object_in_it: "configured of '1' is tests.unit.adapters.test_module_shape.Configured (",
}


def small() -> Small:
    def network() -> torch.nn.Module:
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(4, 3), Layer(), torch.nn.Linear(3, 2))

    return Small(network=network)


def step(one: Small) -> None:
    one.backward()
    one.optimizer.step()
    one.optimizer.zero_grad()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_of_a_model_is_named_where_it_happens_and_after_a_restore(
    change: Callable[[Layer], None], capsys: pytest.CaptureFixture[str]
) -> None:
    first, words = small(), CHANGES[change]

    def body(iteration: int) -> None:
        step(first)
        if iteration == 2:
            change(first.model[1])  # type: ignore[index]

    first.run(body, until=3)
    said = capsys.readouterr().err
    assert said.count("iteration 2: ") == 1 and said.count(words) == 1, said
    again = small()
    take_over(again.host, *handed_over(first.host))
    assert words.partition(" is ")[0] not in capsys.readouterr().err  # the script may do it now
    again.backward()
    said = capsys.readouterr().err
    assert said.count(f"after the restore {words.partition(' is ')[0]}") == 1, said


def test_a_script_that_decides_by_the_iteration_is_not_named_after_a_restore(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, again = small(), small()
    for one in (first, again):
        one.backward()
    swap(first.model[1])  # type: ignore[index]
    first.run(lambda iteration: step(first), until=1)
    take_over(again.host, *handed_over(first.host))
    capsys.readouterr()
    swap(again.model[1])  # type: ignore[index]
    again.backward()
    assert "after the restore" not in capsys.readouterr().err


def test_another_state_dict_of_a_module_is_no_change() -> None:
    """Megatron-DeepSpeed gives its model another `state_dict` when it saves for the first time."""
    model = torch.nn.Linear(2, 2)
    parts = ModuleParts(model, [])
    before = parts.read()[""].digest
    model.state_dict = model.load_state_dict = doubled  # type: ignore[method-assign,assignment]
    assert parts.read()[""].digest == before
    model.doubled = doubled  # type: ignore[assignment]
    assert parts.read()[""].digest != before


def test_a_hook_of_an_optimizer_is_a_hook_too() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parts = ModuleParts(model, [optimizer])
    before = parts.read()
    assert parts.read()[""] is before[""]
    optimizer.register_step_pre_hook(doubled)
    assert parts.read()[""].digest != before[""].digest


def test_a_module_is_read_again_only_if_something_of_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(Layer(), *(torch.nn.Dropout(0.1) for _ in range(3)))
    parts, read = ModuleParts(model), []
    parts.read()
    of = ModuleParts._described
    monkeypatch.setattr(
        ModuleParts, "_described", lambda self, name, one, *rest: read.append(one) or of(self, name, one, *rest)
    )  # type: ignore[func-returns-value]
    del model[0].drawing  # a generator is read each time
    parts.read()
    assert read == [model[0]]
    for change, changed in (
        (lambda: setattr(model[1], "p", 0.2), model[1]),
        (lambda: setattr(model[0].configured, "kind", "flash"), model[0]),
        (lambda: setattr(model[0].configured, "held", torch.ones(3)), None),
        (lambda: setattr(model[0].configured, "step", 7), None),
    ):
        read.clear()
        change()
        parts.read()
        assert read == ([] if changed is None else [changed])


def test_a_generator_and_a_small_object_of_a_module_go_on_where_they_were() -> None:
    trained, again = Layer(), Layer()
    numbers, others = ModuleNumbers(trained), ModuleNumbers(again)
    trained.drawing.random(5)
    for one in (trained, again):
        one.rates = np.ones(3)  # type: ignore[assignment]
    trained.rates[1] = 0.5  # type: ignore[index, operator]
    others.restore(codec.decode(codec.encode(numbers.captured(True))))
    assert again.drawing.random() == trained.drawing.random()
    assert again.rates.tolist() == [1.0, 0.5, 1.0]  # type: ignore[union-attr, operator]


def test_a_forward_that_is_put_into_a_class_is_seen() -> None:
    class Own(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input

    parts = ModuleParts(Own(2, 2))
    before = parts.read()[""]
    Own.forward = doubled  # type: ignore[method-assign]
    assert {**parts.read()[""].shape, "forward": ""} == {**before.shape, "forward": ""}
    assert parts.read()[""].shape["forward"].endswith(".doubled")


def test_room_is_claimed_for_generators_before_they_have_drawn() -> None:
    layers = Layer(), Layer()
    del layers[0].drawing
    without, claimed = (len(codec.encode(ModuleShape(ModuleNumbers(one), speaks=False).captured(0))) for one in layers)
    assert claimed - without >= len(codec.encode(layers[1].drawing.bit_generator.state))


def test_what_libraries_hook_is_left_out() -> None:
    model = torch.nn.Linear(2, 2)
    before = ModuleParts(model).read()[""].digest
    model.register_forward_pre_hook(torch.nn.functional.relu)
    model.register_forward_hook(functools.partial(module_parts.parts_of))
    assert ModuleParts(model).read()[""].digest == before


def test_what_torch_keeps_under_a_name_of_its_process_is_not_compared() -> None:
    model = torch.nn.Linear(2, 2)
    before = ModuleParts(model).read()[""].shape
    contract()(lambda module: module)(model)  # as `fully_shard` does
    assert len(vars(model)) > len(vars(torch.nn.Linear(2, 2))) and ModuleParts(model).read()[""].shape == before


def test_generators_in_lists_and_dicts_go_on_where_they_were() -> None:
    def built() -> torch.nn.Module:
        module = torch.nn.Linear(2, 2)
        module.drawing = {"noise": [torch.Generator().manual_seed(1)], "mask": (random.Random(2),)}  # type: ignore[assignment]
        return module

    trained, again = built(), built()
    numbers, others = ModuleNumbers(trained), ModuleNumbers(again)

    def draw(module: Any) -> tuple[float, float]:
        return torch.rand(1, generator=module.drawing["noise"][0]).item(), module.drawing["mask"][0].random()

    draw(trained)
    others.restore(codec.decode(codec.encode(numbers.captured(True))))
    assert draw(again) == draw(trained)


def test_a_generator_that_a_forward_makes_later_is_named_after_a_restore(capsys: pytest.CaptureFixture[str]) -> None:
    trained, again = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    numbers, others = ModuleNumbers(trained), ModuleNumbers(again)
    trained.drawing = torch.Generator()  # type: ignore[assignment]
    others.restore(numbers.captured(True))
    assert "after the restore 'drawing' has 0 random number generators, and had 1" in capsys.readouterr().err


class Slotted:
    __slots__ = ("unset", "rate", "step")

    def __init__(self) -> None:
        self.rate, self.step = 0.1, 0


class Holding:
    def __init__(self, held: Any) -> None:
        self.held = held


KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a namespace": (lambda: SimpleNamespace(rate=0.1), lambda kept: setattr(kept, "rate", 0.5)),
    "a set": (lambda: {1, 2}, lambda kept: kept.add(3)),
    "a large array": (lambda: np.zeros(4096), lambda kept: kept.fill(1.0)),
    "an element of an array": (lambda: np.zeros(4096), lambda kept: kept.__setitem__(77, 1.0)),
    "a deque that grows": (deque, lambda kept: kept.extend(range(4096))),
    "a dict that grows": (OrderedDict, lambda kept: kept.update(enumerate(range(4096)))),
    "an object in a list": (lambda: [Configured()], lambda kept: setattr(kept[0], "kind", "flash")),
    "an object in a dict in a tuple": (lambda: ({"a": Slotted()},), lambda kept: setattr(kept[0]["a"], "rate", 0.5)),
    "an object with slots": (Slotted, lambda kept: setattr(kept, "rate", 0.5)),
    "an object in an object": (lambda: Holding(Configured()), lambda kept: setattr(kept.held, "kind", "flash")),
    "a number next to a tensor": (lambda: {"m": torch.ones(2), "rate": 0.1}, lambda kept: kept.update(rate=0.5)),
    "bytes that change": (lambda: bytearray(8), lambda kept: kept.__setitem__(3, 1)),
    "an array of Python": (lambda: array("d", [0.0] * 8), lambda kept: kept.__setitem__(3, 1.0)),
    "bytes in a list": (lambda: [bytearray(8)], lambda kept: kept[0].extend(b"more")),
    "a list that was long": (lambda: [0.0] * 1000, lambda kept: kept.reverse() or kept.append(1.0)),
    "a function in a list": (lambda: [torch.relu], lambda kept: kept.append(torch.tanh)),
}


def recorded(module: torch.nn.Module, iterations: int, each: Callable[[], None], saved: Any = None) -> Any:
    """What the last version point of a module that is trained has, from `saved` on."""
    numbers = ModuleNumbers(module)
    shape = ModuleShape(numbers, speaks=True)
    shape.install([module])
    shape.restored(saved)
    for iteration in range(iterations):
        module(torch.ones(2, 2)).sum().backward()
        numbers.captured(True)
        saved = codec.decode(codec.encode(shape.captured(iteration + 1)))
        each()
    return saved


@pytest.mark.parametrize("kind", KEPT)
def test_what_changes_and_is_not_captured_is_named_where_it_happens_and_after_a_restore(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make, change = KEPT[kind]

    def built() -> torch.nn.Module:
        module = torch.nn.Linear(2, 2)
        module.kept = make()
        return module

    trained = built()
    saved = recorded(trained, 2, lambda: change(trained.kept))
    assert "kept" in "".join(capsys.readouterr())
    recorded(built(), 1, lambda: None, saved)
    assert "after the restore kept" in capsys.readouterr().err
    trained = built()
    change(trained.kept)  # before training
    saved = recorded(trained, 2, lambda: None)
    again = built()
    change(again.kept)
    recorded(again, 2, lambda: None, saved)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda counting: counting, "1.kept.step"),
        (lambda counting: [None, counting], "1.kept[1].step"),
        (lambda counting: {"a": counting, "m": torch.ones(2)}, "1.kept['a'].step"),
    ],
)
@pytest.mark.parametrize("kind", [Configured, Slotted])
def test_a_whole_number_of_an_object_that_begins_again_is_named_after_a_restore(
    kind: type, make: Callable[[Any], Any], path: str, continues: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(begin: int, saved: Any = None) -> Any:
        counting: Any = kind()
        counting.step = begin
        module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Identity())
        module[1].kept = make(counting)
        return recorded(module, 4, lambda: setattr(counting, "step", counting.step + 1), saved)

    saved = run(1)
    run(5 if continues else 1, saved)
    said = capsys.readouterr().err
    named = f"after the restore `{path}` is 1, and was 4 when that version was captured" in said
    assert named == (not continues) and bool(said) == named, said


def test_numbers_for_which_a_version_has_no_room_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    module = torch.nn.Linear(2, 2)
    module.kept = counting = Configured()
    vars(counting).update({f"n{number}": 0 for number in range(300)})
    recorded(module, 3, lambda: vars(counting).update({f"n{number}": counting.n1 + 1 for number in range(300)}))  # type: ignore[attr-defined]
    said = capsys.readouterr().err
    assert said.count("300 whole numbers of objects in modules change") == 1


def test_an_attribute_of_a_hundred_megabytes_is_read_by_samples() -> None:
    module, size = torch.nn.Linear(2, 2), 100 << 20
    module.bytes, module.constant, module.array = bytearray(size), bytes(size), np.zeros(size, np.uint8)  # type: ignore[assignment]
    module.items, module.held = [0.5] * (size // 8), Holding(["x" * size])  # type: ignore[assignment]
    parts = ModuleParts(module)
    first = parts.read()
    tracemalloc.start()
    try:
        assert parts.read() is first
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    module.bytes[-1] = 1  # type: ignore[operator, index]
    assert parts.read() is not first


def test_what_differs_in_each_process_or_is_a_cache_is_no_difference(capsys: pytest.CaptureFixture[str]) -> None:
    class Own(logging.LoggerAdapter):  # type: ignore[type-arg]
        pass

    class Traps:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

        def __len__(self) -> int:
            raise RuntimeError("len")

    def built() -> torch.nn.Module:
        module = torch.nn.Linear(2, 2)
        gone = Configured()
        kept: dict[str, Any] = {
            "run": Holding(str(uuid.uuid4())), "runs": [uuid.uuid4(), Holding({"id": uuid.uuid4().hex})],
            "logged": [logging.getLogger(uuid.uuid4().hex), Own(logging.getLogger("of_a_module"))],
            "refs": [weakref.ref(gone), weakref.proxy(gone)], "objects": np.array([object(), None]),
            "masks": {}, "holding": Holding({}), "trap": [Traps()], "lock": Holding(threading.Lock()),
        }  # fmt: skip
        vars(module).update(kept)
        kept["loop"] = kept["trap"].append(kept["trap"])
        return module

    def fill(module: torch.nn.Module) -> None:
        for cache in (module.masks, module.holding.held):
            cache[(2, len(cache))] = torch.ones(2), 3  # type: ignore[operator, arg-type]
        module.logged[1].debug("")  # type: ignore[index, union-attr]

    trained, again = built(), built()
    saved = recorded(trained, 3, lambda: fill(trained))
    recorded(again, 1, lambda: None, saved)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "change", [lambda n: n + 1, lambda n: 0.5**n, lambda n: n > 1, lambda n: "late" if n else None]
)
@pytest.mark.parametrize("kind", [list, tuple, deque])
def test_a_value_next_to_a_tensor_that_begins_again_is_named(
    kind: Any, change: Callable[[int], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def built() -> torch.nn.Module:
        module, table = torch.nn.Linear(2, 2), torch.ones(2)
        calls = [0]

        def count(*call: Any) -> None:
            module.kept = {"memory": kind([table, change(calls[0])])}
            calls[0] += 1

        module.register_forward_pre_hook(count)
        return module

    saved = recorded(built(), 3, lambda: None)
    assert "not what" not in (said := capsys.readouterr().err) and "captured" not in said
    recorded(built(), 1, lambda: None, saved)
    expected = f"`kept['memory'][1]` is {change(0)!r}, and was {change(2)!r} when that version was captured"
    assert expected in capsys.readouterr().err


def test_the_length_of_a_cache_that_rises_and_falls_is_not_named(capsys: pytest.CaptureFixture[str]) -> None:
    def built(lengths: list[int]) -> torch.nn.Module:
        module = torch.nn.Linear(2, 2)

        def prepare(*call: Any) -> None:
            module.mask_cache = (length := lengths.pop(0)), torch.ones(length)

        module.register_forward_pre_hook(prepare)
        return module

    saved = recorded(built([512, 1024, 768, 1024]), 4, lambda: None)
    recorded(built([512]), 1, lambda: None, saved)
    assert "mask_cache[0]" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", [list, deque])
def test_a_container_that_another_thread_changes_is_read_as_it_was_at_some_time(kind: Any) -> None:
    changing, over = kind(range(500)), threading.Event()

    def change() -> None:
        while not over.is_set():
            changing.pop()
            changing.append(1)

    thread, interval = threading.Thread(target=change), sys.getswitchinterval()
    thread.start()
    try:
        sys.setswitchinterval(1e-6)
        for _ in range(2000):
            keys, values, _ = read_parts(changing)
            assert len(keys) == len(values) > 200
    finally:
        sys.setswitchinterval(interval)
        over.set()
        thread.join()


def test_objects_that_cannot_be_read_end_nothing() -> None:
    class Computing:
        @property
        def __class__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("computed")

    class Gone:
        pass

    class Act(Enum):
        RELU = functools.partial(torch.relu)

    module = torch.nn.Linear(2, 2)
    vars(module).update(computing=Computing(), gone=weakref.proxy(Gone()), act=Act.RELU, drawing=random.SystemRandom())
    shape = ModuleNumbers(module).read()[""].shape
    assert shape.keys() == {"class", "act", "computing"} and "0x" not in shape["act"]


def test_a_logger_that_has_logged_is_what_it_was() -> None:
    module = torch.nn.Linear(2, 2)
    module.logger = logging.getLogger("of_a_module")  # type: ignore[assignment]
    parts = ModuleParts(module)
    before = parts.read()
    module.logger.debug("")  # type: ignore[union-attr, operator]
    assert parts.read() is before


class Lazy(torch.nn.Module):
    """Makes an object and a function in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "helper"):
            self.helper, self.scale = Configured(), torch.tanh
        return self.scale(self.inner(x))


@pytest.mark.parametrize("lost", [False, True])
def test_what_a_first_forward_makes_is_named_only_where_it_does_not(
    lost: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def iteration(number: int, saved: Any = None) -> Any:
        model = Lazy()
        numbers = ModuleNumbers(model)
        shape = ModuleShape(numbers, speaks=True)
        shape.install([model])
        shape.restored(saved)
        model(torch.ones(2, 4)).sum().backward()
        if lost and saved is not None:
            del model.helper
        numbers.captured(True)
        return shape.captured(number)

    saved = iteration(1)
    assert "helper" not in capsys.readouterr().err
    iteration(2, saved)
    assert ("after the restore helper of the model is nothing" in capsys.readouterr().err) == lost
