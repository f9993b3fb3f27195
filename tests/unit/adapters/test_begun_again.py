"""What begins again after a restore is named by its path, from values alone; loops that go on are not."""

import contextlib
import functools
import itertools
import random
import weakref
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from ft_plugins.adapters import begun_again, value_text
from ft_plugins.adapters.begun_again import BegunAgain, has_begun_again
from ft_plugins.adapters.observed import module_roots
from ft_plugins.adapters.value_text import ON_DEVICE
from ft_plugins.snapshot.capture import codec
from tests.unit.adapters import edge_log

LAST = 20


class Killed(Exception):
    pass


class Life:
    """One incarnation of a loop, which calls `step()` where an iteration ends and the next one begins. `done`: the
    restored iteration; a version point for each iteration until it is killed after `until`."""

    def __init__(self, done=0, version=None, until=7, modules=tuple, ignored=("life", "self"), captured=(), state=dict):
        self.done, self.until, self._version, self.begun = done, until, version, False
        self.observed = BegunAgain(modules, lambda: captured, lambda: ignored)
        self.versions, self.state = {}, state

    def step(self):
        if not self.begun:
            self.begun = True
            self.observed.begin()
            self.observed.restored(self._version)
            return
        self.done += 1
        self.versions[self.done] = codec.decode(codec.encode(self.observed.captured(self.done, self.state())))
        if self.done == self.until:
            raise Killed


def lived(loop, **given):
    life = Life(**given)
    with contextlib.suppress(Killed):
        loop(life)
    return life


def said_after(loop, at=6, **given):
    """What is said when a loop is restored after iteration `at`."""
    first = lived(loop, **given)
    assert first.observed.said() == ""
    return lived(loop, done=at, version=first.versions[at], until=at + 1, **given).observed.said()


# ---- loops that go on ----


def over_what_is_left(life):
    _at = 0  # as the first iteration finds it after a restore
    life.step()
    for _at in range(life.done + 1, LAST):
        life.step()


def over_epochs_that_are_left(life):
    begin = life.done
    for epoch in range(begin // 5, 4):
        for _at in range(max(0, begin - 5 * epoch), 5):
            life.step()


def with_what_each_step_sets(life):
    total = 0
    while life.done < LAST:
        total = sum(range(life.done + 3))
        life.step()
    assert total


def with_a_setting(life):
    total, names = LAST, ["loss", "norm"]
    while life.done < total and names:
        life.step()


@pytest.mark.parametrize("at", [5, 6])
@pytest.mark.parametrize(
    "loop",
    [over_what_is_left, over_epochs_that_are_left, with_what_each_step_sets, with_a_setting],
)
def test_a_loop_that_goes_on_is_not_named(loop, at):
    assert said_after(loop, at) == ""


# ---- loops that begin again ----


def over_all_again(life):
    for _number in range(LAST):
        life.step()


def by_a_counter(life):
    count = 0
    while life.done < LAST:
        life.step()
        count += 1


def by_an_average(life):
    running = 0.0
    while life.done < LAST:
        life.step()
        running = 0.9 * running + life.done


class Meter:
    """As a library of metrics has one, with a slot, and a number that all of them share."""

    __slots__ = ("count", "history")
    made = 0

    def __init__(self):
        self.count, self.history = 0, deque[int](maxlen=3)

    def update(self):
        self.count += 1
        self.history.append(self.count)

    @property
    def total(self):
        raise AssertionError("the script's code is run")


def by_a_meter(life):
    meters = {"train": [Meter()]}
    while life.done < LAST:
        life.step()
        meters["train"][0].update()


def kept(memory=[]):  # noqa: B006
    memory.append(kept)
    kept.calls = edge_log.calls = Meter.made = kept.calls + 1


def by_functions_and_modules(life):
    kept.calls, kept.__defaults__[0][:], edge_log.calls, Meter.made = 0, [], 0, 0
    while life.done < LAST:
        life.step()
        kept()


def by_containers(life):
    losses, seen, left, numbers = [], set(), iter(range(9)), itertools.count()
    while life.done < LAST:
        life.step()
        losses.append(0.0), seen.add(life.done % 3), next(left), next(numbers)


def by_a_closure(life):
    seen = 0

    def see():
        nonlocal seen
        seen += 1

    by_name = functools.partial(see)
    while life.done < LAST:
        life.step()
        by_name()


def by_a_generator(life):
    def batches():
        taken = 0
        while True:
            taken += 1
            yield taken

    some = batches()
    while life.done < LAST:
        next(some)
        life.step()


def by_a_pass(life):
    def endless():
        while True:
            yield from zip(DataLoader(list(range(30))), itertools.count(), strict=False)

    some = endless()
    next(some)
    while life.done < LAST:
        life.step()
        next(some)


def by_a_tensor(life):
    mean, large = torch.zeros(()), torch.zeros(2000)
    while life.done < LAST:
        life.step()
        mean += 1
        large.data.add_(1)


def by_dice(life):
    dice, own = random.Random(3), torch.Generator().manual_seed(4)
    while life.done < LAST:
        life.step()
        dice.random()
        torch.rand(1, generator=own)


NAMED = {
    over_all_again: ["over_all_again._number 0, was 6"],
    by_a_counter: ["by_a_counter.count 0, was 6"],
    by_an_average: ["by_an_average.running 0.0, was 13."],
    by_a_meter: ["by_a_meter.meters['train'][0].count 0, was 6", "history# 0, was 3"],
    by_a_closure: [f"by_a_closure.{path} 0, was 6" for path in ("seen", "see.seen", "by_name.0.seen")],
    by_a_pass: ["by_a_pass.some._SingleProcessDataLoaderIter# 1, was 7"],
    by_a_tensor: ["by_a_tensor.mean 0.0, was 6.0", "by_a_tensor.large (tensor)"],
    by_dice: ["by_dice.dice a Random (", "by_dice.own a Generator ("],
    by_a_generator: ["by_a_generator.some.taken 1, was 7"],
    by_functions_and_modules: [
        "test_begun_again.kept.calls 0, was 6",
        "test_begun_again.kept.defaults[0]# 0, was 6",
        "test_begun_again.Meter.made 0, was 6",
        "edge_log.calls 0, was 6",
    ],
    by_containers: [
        "by_containers.losses# 0, was 6",
        *("by_containers.seen# 0, was 3", "by_containers.seen.elements "),
        "by_containers.left a range_iterator with 9 left, was a range_iterator with 3 left",
        "by_containers.numbers count(0), was count(6)",
    ],
}


@pytest.mark.parametrize("loop", NAMED)
def test_what_begins_again_is_named_by_its_path_and_value(loop):
    words = said_after(loop)
    assert all(part in words for part in NAMED[loop]) and words.count("; ") == len(NAMED[loop]) - 1, words


def test_what_the_script_ignores_is_not_named():
    assert said_after(by_a_meter, ignored=("life", "self", "history")) == "by_a_meter.meters['train'][0].count 0, was 6"
    assert said_after(by_a_meter, ignored=("life", "self", "train")) == ""


def test_a_second_restore_knows_what_the_first_process_learnt():
    first = lived(by_a_counter)
    second = lived(by_a_counter, done=6, version=first.versions[6], until=8)
    assert second.observed.said() == "by_a_counter.count 0, was 6"
    assert said_after(by_a_counter, at=1) == "by_a_counter.count 0, was 1"  # and is 1 again at the next version point
    third = lived(by_a_counter, done=8, version=second.versions[8], until=9)
    assert third.observed.said() == "by_a_counter.count 0, was 2"


def by_a_callback(life):
    handler = type("CallbackHandler", (), {"__module__": "transformers.trainer_callback"})()
    trainer = type("Trainer", (), {"__module__": "transformers.trainer"})()
    trainer.callback_handler, handler.callbacks, callback = handler, [SimpleNamespace(best=None)], trainer
    while life.done < LAST:
        life.step()
        handler.callbacks[0].best = {"weight": torch.full((2,), float(life.done))}
    assert callback


def test_what_a_callback_of_a_trainer_keeps_is_named_and_so_is_a_kind_that_is_the_first_one_again():
    words = said_after(by_a_callback, ignored=("life", "self", "callback", "handler"))
    assert words == "by_a_callback.trainer.callback_handler.callbacks[0].best None, was a dict"


# ---- modules ----


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.zeros(2))
        self.averages = {"fast": torch.zeros(2), "slow": np.zeros(2)}
        self.act = torch.nn.functional.relu
        self.memory = [torch.zeros(2)]
        self.cache = SimpleNamespace(hits=0)
        self.helper = torch.nn.Linear(1, 1)
        self.register_forward_hook(Meter().update)


def test_what_modules_keep_is_named_but_not_what_is_captured():
    def loop(life):
        while life.done < LAST:
            life.step()
            with torch.no_grad():
                layer.weight += 1  # captured
            layer.mean.add_(1)
            layer.averages["fast"].add_(1), np.add(layer.averages["slow"], 1, layer.averages["slow"])
            layer.memory[0] = layer.memory[0] + 1
            layer.cache.hits += 1
            next(iter(layer._forward_hooks.values()))()
            if life.done == 1:
                layer.act, layer.helper = torch.nn.functional.gelu, torch.nn.ReLU()
                layer.requires_grad_(False).register_forward_hook(lambda *_: None)

    layer = Layer()
    given = {
        "modules": lambda: module_roots("model", layer),
        "ignored": ("layer", "life", "self"),
        "state": lambda: {"caller": {"caller": {"averages": layer.averages}}},  # as `get_state` returns them
    }
    first = lived(loop, captured=[layer.weight], **given)
    layer = Layer()
    again = lived(loop, done=6, version=first.versions[6], captured=[layer.weight], **given)
    named = {one.split(" ")[0] for one in again.observed.said().split("; ")}
    of_layer = ("mean", "memory[0]", "cache.hits", "act", "helper.class", "hooks", "weight.requires_grad")
    of_hook = ("hooks[0].__self__.count", "hooks[0].__self__.history#")
    assert named == {f"model.{one}" for one in (*of_layer, *of_hook)}


# ---- an iteration that is computed again ----


def recomputed(loop, at=6):
    """What is said after iteration `at` was computed again from the version before, and what else differs."""
    first = lived(loop)

    class Again(Life):
        def step(self):
            if not self.begun:
                self.begun = True
                self.observed.begin()
                self.observed.restored(first.versions[at - 1], proves=True)
                return
            assert self.observed.said() == "", "not before it is seen to matter"
            self.observed.recomputed(first.versions[at])
            super().step()

    life = Again(at - 1, until=at)
    with pytest.raises(Killed):
        loop(life)
    return life.observed.said(), life.observed.differing


def test_what_an_iteration_sets_anew_is_not_named_when_it_was_computed_again():
    def loop(life):
        loss = None
        mean = 0.0
        while life.done < LAST:
            life.step()
            loss = torch.full((3,), life.done + 1.0)
            mean += 1.5
        assert loss is not None

    assert "loop.loss None, was a tensor" in said_after(loop)
    said, differing = recomputed(loop)
    assert said == "loop.mean 0.0, was 7.5" and differing == ("loop.mean",)


def test_what_comes_into_being_in_the_iteration_is_compared_there():
    def loop(life):
        for number in itertools.count():
            life.step()
            index = number * 2
        assert index

    said, differing = recomputed(loop)
    assert "loop.index 0, was 10" in said and "loop.index" in differing


def test_a_tensor_on_a_device_that_was_not_read_is_named_if_it_was_one_at_the_restore(monkeypatch):
    """Versions between examined points have no text of it."""
    read = value_text._tensor
    monkeypatch.setattr(value_text, "_tensor", lambda one, devices: read(one, devices) if devices else ON_DEVICE)

    def loop(life):
        loss = None
        mean = torch.zeros(3)
        while life.done < LAST:
            life.step()
            loss, mean = torch.full((3,), life.done + 1.0), mean + 1
        assert loss is not None

    for at in (6, 4):  # the latter was examined
        assert recomputed(loop, at)[0] == "loop.mean (tensor)"


# ---- bounds ----


def test_a_version_has_room_for_so_many_and_it_is_said_that_others_are_left_out(capsys):
    def loop(life):
        many = [[0] * 60 for _ in range(60)]
        while life.done < LAST:
            life.step()
            for part in many:
                part[:] = [one + 1 for one in part]

    room = len(codec.encode(Life().observed.captured(0, {})))
    first = lived(loop)
    assert all(len(codec.encode(one)) <= room for one in first.versions.values()) and room < begun_again.ROOM + 100
    assert capsys.readouterr().out.count("values that are not captured change, and a version has room for") == 1
    again = lived(loop, done=6, version=first.versions[6])
    assert again.observed.said().endswith(" more")


def test_objects_that_refer_to_each_other_and_fail_when_they_are_read_are_no_error():
    class Odd:
        def __getattr__(self, name):
            raise AssertionError("the script's code is run")

        def __len__(self):
            raise AssertionError("the script's code is run")

    class Broken(random.Random):
        def getstate(self):
            raise RuntimeError("no state")

    class Lazy:
        @property
        def __class__(self):
            raise AssertionError("the script's code is run")

    def loop(life):
        odd, broken, lazy, gone, count = Odd(), Broken(), Lazy(), weakref.proxy(Odd()), 0
        odd.other, odd.me = [odd], odd
        while life.done < LAST:
            life.step()
            count += 1
        assert broken and lazy is not gone

    assert said_after(loop, captured=[torch.ones(3)]) == "loop.count 0, was 6"


@pytest.mark.parametrize(
    ("first", "was", "now", "again"),
    [
        (0, 5, 0, True), (0, 5, 2, True), (0, 5, 5, False), (0, 5, 6, False), (9, 5, 9, True), (9, 5, 7, True),
        ("a", "b", "a", True), ("a", "b", "c", False), (0, 0, 3, False), (None, 5, 0, False), (1, 5, "gone", False),
        ("a tensor of (3,) (00)", ON_DEVICE, "a tensor of (3,) (00)", True),
        ("a tensor of (3,) (00)", ON_DEVICE, "a tensor of (3,) (01)", False),
        ("a tensor of (3,) (00)", "a tensor of (3,) (01)", ON_DEVICE, False),
    ],
)  # fmt: skip
def test_what_has_begun_again(first, was, now, again):
    assert has_begun_again(first, was, now) is again
