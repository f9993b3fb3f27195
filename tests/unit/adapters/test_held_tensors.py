"""Tensors of modules that no version has are named once they have changed, and only then."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from ft_plugins.adapters import held_tensors
from ft_plugins.adapters.held_objects import read_parts
from ft_plugins.adapters.held_tensors import HeldTensors
from ft_plugins.adapters.host_parts import local_part
from ft_plugins.adapters.module_parts import parts_of

Ranks = Callable[..., list[Any]]


class Holding:
    def __init__(self, held: Any) -> None:
        self.held = held


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


class Own(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))


def memory(model: Any) -> Callable[[], None]:
    def forward() -> None:
        model.inner.memory = torch.ones(2)

    forward()
    return forward


def average(model: Any) -> Callable[[], None]:
    model.average = torch.zeros(2)
    return lambda: model.average.add_(1)


def bank(model: Any) -> Callable[[], None]:
    model.bank = {"keys": [torch.zeros(2), 0]}
    return lambda: model.bank["keys"][0].add_(1)


def in_an_object(model: Any) -> Callable[[], None]:
    model.kept = Holding([Slotted(torch.zeros(2))])
    return lambda: model.kept.held[0].held.mul_(2)


def hidden_teacher(model: Any) -> Callable[[], None]:
    model.teacher = [copy.deepcopy(model.inner)]
    return lambda: model.teacher[0].weight.data.mul_(0.5)


def in_no_grad(model: Any) -> Callable[[], None]:
    vars(model)["teacher"] = teacher = torch.nn.Sequential(copy.deepcopy(model.inner))

    def follow() -> None:
        with torch.no_grad():
            teacher[0].bias.add_(1)

    return follow


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (memory, "inner.memory"), (average, "average"), (bank, "bank['keys'][0]"),
        (hidden_teacher, "teacher[0].weight"), (in_an_object, "kept.held[0].held"),
        (in_no_grad, "teacher.0.bias"),
    ],
)  # fmt: skip
def test_tensors_that_training_changes_are_found(make: Callable[[Any], Callable[[], None]], path: str) -> None:
    model = Own()
    forward, held = make(model), HeldTensors()
    found = []
    for _ in range(8):
        found.append(held.changed(parts_of(model), ()))
        forward()
    assert found == [[], [path], [], [path], [], [], [], [path]]


def test_what_is_made_once_or_is_captured_is_not_found() -> None:
    model, table = Own(), torch.ones(2)
    optimized = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *optimized.parameters()], 0.1, momentum=0.9)
    held = HeldTensors()
    model.table, model.view, model.hidden = table, model.inner.weight.detach(), [optimized]  # type: ignore[assignment]
    model.optimizer, model.root, model.masks = optimizer, [model], {}  # type: ignore[assignment]
    for number in range(8):
        assert held.changed(parts_of(model), (optimizer,)) == []
        model.masks[(2, number)] = torch.ones(2), number  # type: ignore[operator, index]
        optimized(model.inner(table)).sum().backward()
        optimizer.step()
        model.mean.add_(1)  # type: ignore[operator]


@pytest.mark.parametrize("registered", [False, True], ids=["declared empty", "registered later"])
def test_a_buffer_that_was_made_later_is_found_once_it_changes(registered: bool) -> None:
    model, held = Own(), HeldTensors()
    if not registered:
        model.register_buffer("late", None)
    items = {name for name, _ in model.named_buffers()}
    found = []
    for number in range(8):
        found.append(held.changed(parts_of(model), (), lambda: items))
        if number == 0:
            model.register_buffer("late", torch.zeros(2))
            model.inner.register_buffer("table", torch.ones(2))
            model.inner.register_buffer("same", model.mean)  # type: ignore[arg-type]
        model.late.add_(1)  # type: ignore[operator]
        model.mean.add_(1)  # type: ignore[operator]
    assert found == [[], [], [], ["late"], [], [], [], ["late"]]


def test_a_tensor_in_the_memory_of_another_one_that_is_gone_is_another_one() -> None:
    model, held = Own(), HeldTensors()
    model.memory = torch.ones(2)  # type: ignore[assignment]
    held.changed(parts_of(model), ())
    at = id(model.memory)
    for _ in range(64):  # until the allocator gives that place again, as it does at once or never
        del model.memory
        model.memory = torch.ones(2)  # type: ignore[assignment]
        if id(model.memory) == at:
            break
    assert held.changed(parts_of(model), ()) == ["memory"]


def test_one_large_attribute_is_read_in_part() -> None:
    model, held = Own(), HeldTensors()
    model.many = [[torch.zeros(1) for _ in range(64)] for _ in range(1000)]  # type: ignore[assignment]
    assert held.changed(parts_of(model), ()) == []
    for row in model.many:  # type: ignore[union-attr]
        row[0].add_(1)
    assert 0 < len(held.changed(parts_of(model), ())) < 256


def test_what_cannot_be_read_ends_nothing_and_hides_no_other() -> None:
    class Unhashed(type):
        def __eq__(cls, other: object) -> bool:
            return False

    class Strange(metaclass=Unhashed):
        pass

    class Unbuilt(torch.nn.Module):
        def __init__(self) -> None:
            pass

    model, held = Own(), HeldTensors()
    model.strange, model.average = Strange(), torch.zeros(2)  # type: ignore[assignment]
    vars(model)["unbuilt"] = Unbuilt()
    vars(model)["last"] = torch.zeros(2)
    assert held.changed(parts_of(model), ()) == []
    model.average.add_(1)  # type: ignore[operator]
    model.last.add_(1)  # type: ignore[operator]
    assert held.changed(parts_of(model), ()) == ["average", "last"]


def test_a_change_through_data_of_a_tensor_in_another_order_of_dimensions_is_seen() -> None:
    model, held = Own(), HeldTensors()
    model.average = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)  # type: ignore[assignment]
    held.changed(parts_of(model), ())
    model.average.data.mul_(0.5)  # type: ignore[union-attr, operator]
    assert held.changed(parts_of(model), ()) == ["average"]


def test_a_weight_that_torch_derives_in_each_forward_is_not_named() -> None:
    model, held = torch.nn.Sequential(torch.nn.utils.weight_norm(torch.nn.Linear(2, 2))), HeldTensors()
    for _ in range(2):
        assert held.changed(parts_of(model), ()) == []
        model(torch.ones(1, 2)).sum().backward()


def test_an_object_that_many_modules_share_is_read_once() -> None:
    shared = Holding([[torch.zeros(1)] for _ in range(200)])
    model = torch.nn.Sequential(*(torch.nn.Identity() for _ in range(200)))
    for one in model:
        one.shared = shared  # type: ignore[assignment]
    with pytest.MonkeyPatch.context() as patch:
        read: list[Any] = []
        patch.setattr(held_tensors, "read_parts", lambda one: (read.append(one), read_parts(one))[1])
        HeldTensors().changed(parts_of(model), ())
    assert sum(one is shared for one in read) == 1


def _hides_a_sharded_teacher(rank: int, world: int) -> bool:
    """Only one rank reads: a collective would never end."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (world,))
    model = Own()
    model.teacher = [torch.nn.Linear(4, 4)]  # type: ignore[assignment]
    fully_shard(model.teacher[0], mesh=mesh)  # type: ignore[operator, index, union-attr]
    held = HeldTensors()
    if rank:
        return True
    first = held.changed(parts_of(model), ())
    local_part(model.teacher[0].weight).data.mul_(2)  # type: ignore[operator, index, union-attr]
    return first == [] and held.changed(parts_of(model), ()) == ["teacher[0].weight"]


def test_a_hidden_module_that_is_sharded_is_read_without_a_collective(ranks: Ranks) -> None:
    assert ranks(_hides_a_sharded_teacher, 2) == [True, True]
