"""What a Trainer and its callbacks count: captured whole, except for what differs from run to run."""

import random
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ft_plugins.adapters.data.loaders import state_of
from ft_plugins.adapters.hf.log_history import LogHistory, expected_bytes
from ft_plugins.adapters.hf.plain_attributes import LIMIT, PlainAttributes
from ft_plugins.adapters.hf.refusals import require_followed, require_loop
from ft_plugins.adapters.hf.trainer_state import TrainerProgress
from ft_plugins.errors import UnsupportedError
from ft_plugins.model.digest import WALL_TIMES, readable
from ft_plugins.snapshot.capture import codec
from ft_plugins.systems.iteration_ledger import small_digests

# ---- the log history ----

LOGGED = [
    {"loss": 4.25, "grad_norm": np.float32(0.5), "step": 1},
    {"eval_loss": 3.5, "eval_runtime": 0.25, "eval_steps_per_second": 8.0, "step": 1},
]


def test_a_log_history_comes_back_whole_and_goes_on():
    history = [dict(entry) for entry in LOGGED]
    saved = codec.decode(codec.encode(LogHistory().read(history)))
    restored = [{"loss": 99.0}]
    again = LogHistory()
    again.write(saved, restored)
    assert restored == LOGGED and type(restored[0]["grad_norm"]) is np.float32

    for one, known in ((history, LogHistory()), (restored, again)):
        known.read(one)
        one.append({"loss": 4.0, "step": 2})
    assert LogHistory().read(history)["entries"] == again.read(restored)["entries"]


def test_times_in_a_log_history_are_not_compared():
    slower = [LOGGED[0], {**LOGGED[1], "eval_runtime": 60.0, "eval_steps_per_second": 0.1}]
    worse = [{**LOGGED[0], "loss": 4.5}, LOGGED[1]]
    ours, theirs, other = ({"client": LogHistory().read(one)} for one in (LOGGED, slower, worse))
    assert ours["client"][WALL_TIMES] != theirs["client"][WALL_TIMES]
    assert readable(ours) == readable(theirs) != readable(other)
    assert small_digests(ours) == small_digests(theirs) != small_digests(other)


def test_memory_is_claimed_for_the_history_of_the_whole_run():
    usual = {"grad_norm": 1.0, "learning_rate": 1e-3}
    history = [{"loss": 1 / n, **usual, "epoch": n / 7, "step": n} for n in range(1, 501)]
    history += [{"eval_loss": 1.0, "eval_runtime": 1.0, "epoch": 1.0, "step": n} for n in range(1, 51)]
    assert len(codec.encode(LogHistory().read(history))) < expected_bytes(1000, 2, 20)


def test_a_history_that_callbacks_trim_and_edit_comes_back_as_it_is():
    known, history = LogHistory(), [{"loss": float(n), "per class": [1.0], "step": n} for n in range(6)]
    edits = [
        lambda: history.__delitem__(slice(0, 2)),
        lambda: history.append({"loss": 9.0}),
        lambda: history.__setitem__(1, {"loss": 0.5}),
        lambda: history[0].update(best=True),
        lambda: history[0]["per class"].append(2.0),
        lambda: history.append({"scores": np.zeros(3), "nan": float("nan")}),
        lambda: history.append({"loss": 7.0}),
        history.clear,
    ]
    for edit in edits:
        known.read(history)
        edit()
        restored = []
        known.write(codec.decode(codec.encode(known.read(history))), restored)
        assert readable(restored) == readable(history)


def test_a_restored_history_is_encoded_as_it_was_also_if_the_trainer_has_loaded_an_equal_one():
    """With its keys in another order, as a Trainer's own checkpoint has them."""
    saved, known = LogHistory().read(LOGGED), LogHistory()
    history = [dict(sorted(entry.items())) for entry in LOGGED]
    assert known.read(history) != saved
    known.write(saved, history)
    assert known.read(history) == saved


def test_a_history_that_outgrows_its_room_loses_its_oldest_entries_which_is_named_once(capsys):
    history = [{"confusion": "x" * 1000, "step": n} for n in range(20)]
    known = LogHistory(room=5000)
    restored = []
    for _ in range(2):
        saved = known.read(history)
        assert len(codec.encode(saved)) < 5200
        known.write(saved, restored)
        assert restored == history[-4:]
    said = capsys.readouterr().err
    assert said.count("log_history has outgrown the 5000 bytes that are reserved: its oldest entries are not cap") == 1


class Compared(dict[str, Any]):
    """An entry that counts how often one is compared."""

    times = 0

    def __eq__(self, other):
        Compared.times += 1
        return super().__eq__(other)


def test_a_long_history_costs_what_is_new_of_it():
    known, history = LogHistory(), [Compared(loss=float(n)) for n in range(10_000)]
    known.read(history)
    Compared.times = 0
    for number in range(3):
        history.append(Compared(loss=-float(number)))
        saved = known.read(history)
    assert Compared.times < 10_000
    restored = []
    LogHistory().write(saved, restored)
    assert restored == [dict(entry) for entry in history]


def test_an_old_entry_that_is_edited_in_a_long_history_is_captured_later_and_named(capsys):
    known, history = LogHistory(), [{"loss": float(n)} for n in range(5000)]
    known.read(history)
    history[2500]["best"] = 1.0
    restored = []
    for _ in range(5):
        saved = known.read(history)
    LogHistory().write(saved, restored)
    assert restored == history
    assert capsys.readouterr().err.count("edited when more than 1024 newer ones have come are captured some iter") == 1


def test_values_of_a_history_that_cannot_be_encoded_are_named_once(capsys):
    known = LogHistory()
    history = [{"loss": 1.0, "seen": {3}}, {"loss": 2.0, "seen": {4}}]
    restored = []
    known.write(known.read(history), restored)
    assert restored == [{"loss": 1.0}, {"loss": 2.0}]
    assert capsys.readouterr().err.count("log_history: values of 'seen' (") == 1


# ---- attributes ----


def test_plain_attributes_of_callbacks_come_back_in_place(capsys):
    losses = [1.0, 2.0]
    one = SimpleNamespace(steps=3, losses=losses, mean=torch.tensor(1.5), writer=object(), called=print)
    attributes = PlainAttributes(lambda: {"counting": one}, lambda owner, name: False)
    saved = codec.decode(codec.encode(attributes.read()))
    assert saved == {}, "nothing has changed yet"
    one.steps, one.losses[:], one.later = 9, [7.0], 1
    one.mean += 1
    attributes.write(saved)
    assert (one.steps, one.mean.item()) == (3, 1.5) and one.losses is losses and losses == [1.0, 2.0]
    assert capsys.readouterr().out == ""


def test_a_counter_that_is_again_what_it_was_built_with_is_restored_too():
    """A callback sets it to 0 when training begins."""
    one = SimpleNamespace(left=2)
    attributes = PlainAttributes(lambda: {"mine": one}, lambda owner, name: False)
    one.left, one.began = 0, 5
    changed = attributes.read()
    one.left = 2
    saved = attributes.read()
    one.left, one.began = 0, 6
    attributes.write(saved)
    assert (one.left, one.began) == (2, 5)
    attributes.write(changed)
    assert (one.left, one.began) == (0, 5)


def test_an_attribute_that_was_plain_at_first_and_is_an_object_by_now_is_left_alone():
    """A Trainer's scheduler, with DeepSpeed, is made after its state is asked for."""
    one = SimpleNamespace(scheduler=None)
    attributes = PlainAttributes(lambda: {"trainer": one}, lambda owner, name: True)
    one.scheduler = made = object()
    attributes.write(attributes.read())
    assert one.scheduler is made


@dataclass
class Best:
    loss: float = 9.0
    steps: list[int] = field(default_factory=list)


class Counting:
    """A callback that counts in its class."""

    seen = 0
    losses = []

    def on_step_end(self):
        Counting.seen += 1
        Counting.losses.append(0.5)


def test_what_callbacks_keep_in_their_classes_comes_back_in_place(monkeypatch, tmp_path):
    transformers = pytest.importorskip("transformers")
    kept_losses = []
    monkeypatch.setattr(Counting, "seen", 0)
    monkeypatch.setattr(Counting, "losses", kept_losses)
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    trainer = transformers.Trainer(torch.nn.Linear(2, 2), args)
    trainer.callback_handler.callbacks.append(Counting())
    kept = TrainerProgress(trainer, type(None))
    Counting().on_step_end()
    saved = codec.decode(codec.encode(kept.read()))
    Counting.seen = 0
    kept_losses.clear()
    TrainerProgress(trainer, type(None)).write(saved)
    assert (Counting.seen, Counting.losses) == (1, [0.5]) and Counting.losses is kept_losses


def test_deques_and_dataclasses_of_plain_values_come_back_in_place(capsys):
    def built():
        return SimpleNamespace(window=deque([1.0], maxlen=2), best=Best(), bests=[], later=None)

    first, second = built(), built()
    kept, again = (PlainAttributes(lambda one=one: {"mine": one}, lambda *_: False) for one in (first, second))
    first.window.extend([2.0, 3.0])
    first.best.loss, first.later = 0.5, Best(0.25, [7])
    first.best.steps.append(4)
    first.bests.append((3, Best(0.125)))
    window, best, steps = second.window, second.best, second.best.steps
    again.write(codec.decode(codec.encode(kept.read())))
    assert vars(second) == vars(first) and second.window.maxlen == 2
    assert second.window is window and second.best is best and second.best.steps is steps
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("captured", "present"),
    [
        (lambda: np.random.default_rng(3), lambda: random.Random(5)),
        (lambda: np.random.default_rng(3), lambda: np.random.Generator(np.random.MT19937(5))),
        (lambda: random.Random(3), lambda: np.random.RandomState(5)),
        (lambda: torch.Generator().manual_seed(3), lambda: random.SystemRandom()),
    ],
)
def test_a_generator_in_the_place_of_one_of_another_kind_draws_as_the_captured_one(captured, present):
    first, second = SimpleNamespace(drawing=None), SimpleNamespace(drawing=None)
    kept, again = (PlainAttributes(lambda one=one: {"mine": one}, lambda *_: False) for one in (first, second))
    first.drawing, second.drawing = captured(), present()
    again.write(codec.decode(codec.encode(kept.read())))
    expected, found = state_of(first.drawing), state_of(second.drawing)
    assert type(second.drawing) is type(first.drawing) and codec.encode(found) == codec.encode(expected)


def test_a_dataclass_that_is_captured_elsewhere_is_not_captured_twice():
    """The TrainerState, also if a callback keeps it."""
    state = Best()
    trainer, one = SimpleNamespace(state=state), SimpleNamespace(kept=state)
    owners = {"trainer": trainer, "mine": one}
    attributes = PlainAttributes(lambda: owners, lambda owner, name: owner == "trainer")
    state.loss = 0.5
    assert attributes.read() == {}


GENERATORS = [
    lambda: random.Random(3),
    lambda: np.random.default_rng(3),
    lambda: np.random.RandomState(3),
    lambda: torch.Generator().manual_seed(3),
]


@pytest.mark.parametrize("made", GENERATORS, ids=["random", "numpy", "legacy", "torch"])
@pytest.mark.parametrize("late", [False, True], ids=["built", "late"])
def test_a_generator_that_a_callback_draws_from_draws_the_same_after_a_restart(made, late):
    def drawn(one):
        if isinstance(one, torch.Generator):
            return float(torch.rand((), generator=one))
        return one.random() if hasattr(one, "random") else one.rand()

    first, second = (SimpleNamespace(rng=None if late else made()) for _ in range(2))
    kept, again = (PlainAttributes(lambda one=one: {"own": one}, lambda *_: False) for one in (first, second))
    first.rng = first.rng or made()
    drawn(first.rng)
    present = second.rng
    again.write(codec.decode(codec.encode(kept.read())))
    assert late or second.rng is present
    assert [drawn(first.rng) for _ in range(3)] == [drawn(second.rng) for _ in range(3)]
    assert again.read() == kept.read()


def test_a_large_list_of_a_callback_is_not_read_whole_in_each_iteration():
    read = []

    class Samples(list[int]):
        def __iter__(self):
            return (read.append(number) or number for number in super().__iter__())

    one = SimpleNamespace(samples=Samples(range(1 << 17)))
    attributes = PlainAttributes(lambda: {"mine": one}, lambda owner, name: False)
    attributes.read()
    assert len(read) < 1000


def test_of_attributes_that_are_too_large_together_the_smaller_ones_are_captured():
    one = SimpleNamespace(steps=0, **{f"text{n}": "x" for n in range(6)})
    attributes = PlainAttributes(lambda: {"mine": one}, lambda owner, name: False)
    assert attributes.read() == {}
    for name in vars(one):
        setattr(one, name, 1 if name == "steps" else "y" * 60_000)
    captured = attributes.read()
    assert sum(map(len, captured.values())) <= 4 * LIMIT and "mine.steps" in captured


# ---- refusals ----


class _Trainer:
    """The parts of a Trainer that are looked at; in a module of that name."""

    def __init__(self, **args):
        usual = {"auto_find_batch_size": False, "n_gpu": 1, "optim": "adamw_torch"}
        self.args = SimpleNamespace(**{**usual, **args})
        self.accelerator = SimpleNamespace(parallelism_config=None)

    def _inner_training_loop(self): ...
    def _init_training_state(self): ...
    def _prepare_for_training(self): ...
    def _finalize_training(self): ...
    def get_batch_samples(self): ...
    def _load_rng_state(self): ...
    def get_tp_size(self):
        return 1

    def _run_epoch(self, epoch, epochs_trained, steps_trained_in_current_epoch, resume_from_checkpoint): ...


for _function in vars(_Trainer).values():
    if callable(_function):
        _function.__module__ = "transformers.trainer"


def test_a_trainer_of_the_known_shape_is_followed():
    require_loop(_Trainer(), "5.24.0")
    require_followed(_Trainer(), None)


@pytest.mark.parametrize(
    ("args", "trial", "named"),
    [
        ({"auto_find_batch_size": True}, None, r"\(--auto_find_batch_size\): it begins training again"),
        ({"n_gpu": 2}, None, r"torch's DataParallel \(2\)"),
        ({"optim": "lomo"}, None, r"\(--optim lomo\): it updates in the backward"),
        ({}, object(), "a hyperparameter search: it trains several times"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(args, trial, named):
    with pytest.raises(UnsupportedError, match=f"cannot protect this job: .*{named}"):
        require_followed(_Trainer(**args), trial)


def test_a_subclass_with_a_loop_of_its_own_and_another_version_are_refused_by_name():
    class Mine(_Trainer):
        def _inner_training_loop(self): ...

    with pytest.raises(UnsupportedError, match=r"own Trainer \(Mine: _inner_training_loop\)"):
        require_followed(Mine(), None)

    class Older(_Trainer):
        get_batch_samples = None

    with pytest.raises(UnsupportedError, match=r"\(transformers 4.9 has no get_batch_samples\).*Use transformers 5.24"):
        require_loop(Older(), "4.9")
