"""Loops as scripts write them, over an engine that was restored or not: they are followed exactly, or refused by name.

The engine computes nothing; loaders, data positions and the loop's hooks are the real ones.
"""

import threading
from collections.abc import Callable
from itertools import islice
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

pytest.importorskip("deepspeed")

from ft_plugins.adapters.begun_again import BegunAgain  # noqa: E402
from ft_plugins.adapters.deepspeed import core, training  # noqa: E402
from ft_plugins.adapters.deepspeed.continuing import CounterReads  # noqa: E402
from ft_plugins.adapters.deepspeed.position import Positions  # noqa: E402
from ft_plugins.adapters.deepspeed.training import DeepSpeedLoop  # noqa: E402
from ft_plugins.adapters.schedulers import SchedulerRestore  # noqa: E402
from ft_plugins.adapters.script import undeclared_search  # noqa: E402
from ft_plugins.config import Config  # noqa: E402
from ft_plugins.errors import ResumeError, UnsupportedError  # noqa: E402

STEPS, EPOCH = 8, 4  # iterations of the job, of an epoch
ITERATE = DataLoader.__iter__
Loop = Callable[[Any, Any], None]


class Counting(nn.Module):
    """An engine's counters; every `accumulation`th micro-step is an update. Before training it reads none of them."""

    def __init__(self, at, accumulation=1):
        super().__init__()
        self.module, self.accumulation = nn.Linear(1, 1), accumulation
        self.global_steps = at
        self.global_samples, self.micro_steps = 2 * at, accumulation * at

    def forward(self, batch):
        self.module(batch.float().reshape(-1, 1))

    def is_gradient_accumulation_boundary(self):
        return (self.micro_steps + 1) % self.accumulation == 0

    def step(self):
        if self.is_gradient_accumulation_boundary():
            self.global_steps += 1
            self.global_samples += 2
        self.micro_steps += 1

    def load_checkpoint(self, at):
        self.global_steps = at
        return (str(at) if at else None), {"iteration": at}


class Pipelined(Counting):
    """Reads its batches itself."""

    def __init__(self, at):
        super().__init__(at)
        self.data_iterator = None

    def set_dataiterator(self, iterator):
        self.data_iterator = iterator

    def _next_batch(self):
        return next(self.data_iterator)

    def train_batch(self, data_iter=None):
        self._next_batch()
        self.step()


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(2 * EPOCH)


@pytest.fixture
def start(monkeypatch):
    """Begins to follow an engine; `restored`: the iteration of the version in memory, 0 for none."""
    monkeypatch.setattr(DataLoader, "__iter__", ITERATE)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda group=None: None)

    def start(restored, engine=None, captured=True, positions=None, versions=None):
        monkeypatch.setattr(DataLoader, "__iter__", ITERATE)  # not followed for an engine before
        engine = Counting(restored) if engine is None else engine
        begun = []
        own = ("ended", "paces", "said", "begun", "batch")  # of this function, which does not restore data
        observed, said = BegunAgain(tuple, tuple, lambda: (*own, *undeclared_search.ignored())), list[str]()
        of_host = {"rank": 0, "restored": False, "silent": False, "pace": None}
        host = SimpleNamespace(**of_host, find_tensors=lambda loaded: None, schedule=SchedulerRestore(None))
        ended = {}  # what each version has of the loop
        paces = {}

        def resume(loaded):
            host.restored = restored > 0
            engine.global_steps = max(vars(engine)["global_steps"], restored)
            return vars(engine)["global_steps"]

        def iteration_end(iteration, ends):
            ended[iteration], paces[iteration] = observed.captured(iteration, {}), host.pace
            said.append(observed.said())

        def iteration_begin(iteration):
            if not begun:
                observed.begin()
                observed.restored((versions or {}).get(restored))
            begun.append(iteration)

        at_the_end = {"iteration_end": iteration_end, "wait_for_capture": lambda: None, "shutdown": lambda: None}
        session = SimpleNamespace(resume=resume, iteration_begin=iteration_begin, **at_the_end)
        monkeypatch.setattr(core, "DeepSpeedHost", lambda *args: host)
        monkeypatch.setattr(training, "attach", lambda *args: session)
        config = Config.from_json({"reft": {}} if captured else {"paft": {}})
        loop = DeepSpeedLoop(engine, config, None, positions or Positions(), lambda in_order: None)
        loop.resume()
        return SimpleNamespace(engine=engine, begun=begun, loop=loop, versions=ended, paces=paces, said=said)

    return start


def loader(stream=False):
    return DataLoader(Stream() if stream else list(range(2 * EPOCH)), batch_size=2)


def train(engine, batch):
    engine(batch)
    engine.step()


# ---- a checkpoint that the script loads when it has trained ----


def test_what_a_script_loads_when_it_has_trained_is_its_own_matter(start):
    """The last iteration has its version point before: what is loaded, and evaluated, is in no version."""
    run = start(0)
    until_the_last_step(run.engine, loader())
    path, _ = run.engine.load_checkpoint(2)
    assert path and list(run.versions) == list(range(1, STEPS + 1))
    assert run.engine.global_steps == 2, "nothing is restored over it"
    run.engine.module.eval()
    run.engine(next(iter(loader())))
    run.loop.shutdown()
    assert len(run.versions) == STEPS and run.begun == list(range(1, STEPS + 1))


def test_a_script_that_trains_on_from_what_it_has_loaded_amid_training_is_refused(start):
    run, batches = start(0), iter(loader())
    assert run.engine.global_steps == 0
    for _ in range(3):
        train(run.engine, next(batches))
    run.engine.load_checkpoint(2)
    with pytest.raises(UnsupportedError, match="rank 0: iteration 3 cannot be followed: the script trains on from"):
        train(run.engine, next(batches))
    assert list(run.versions) == [1, 2, 3] == run.begun


# ---- loops that continue, and loops that begin at their own start ----


def until_the_last_step(engine, batches):
    while engine.global_steps < STEPS:
        for batch in batches:
            train(engine, batch)


def over_the_steps_that_are_left(engine, batches):
    data = iter(batches)
    for _ in range(engine.global_steps, EPOCH):
        train(engine, next(data))


def over_the_epochs_that_are_left(engine, batches):
    for _ in range(engine.global_samples // (2 * EPOCH), STEPS // EPOCH):
        for batch in batches:
            train(engine, batch)


def over_all_epochs(engine, batches):
    for _ in range(STEPS // EPOCH):
        for batch in batches:
            train(engine, batch)
            assert engine.global_steps  # too late: the first batch was read


def from_its_own_state(engine, batches):
    _, state = engine.load_checkpoint(2)
    data = iter(batches)
    for _ in range(state["iteration"], EPOCH):
        train(engine, next(data))


@pytest.mark.parametrize("loop", [until_the_last_step, over_the_steps_that_are_left, over_the_epochs_that_are_left])
@pytest.mark.parametrize("restored", [0, 3])
def test_a_loop_that_reads_where_it_is_goes_on(start, capsys, loop, restored):
    job = start(restored)
    loop(job.engine, loader())
    assert job.begun[0] == restored + 1
    assert "will be refused" not in capsys.readouterr().out


@pytest.mark.parametrize("loop", [over_all_epochs, from_its_own_state])
def test_a_loop_that_begins_at_its_own_start_is_warned_first_and_refused_when_restored(start, capsys, loop):
    first = start(0)
    loop(first.engine, loader())
    said = capsys.readouterr().out
    assert said.count("a restart will be refused") == 1 and "`start = engine.global_steps`" in said
    job = start(3)
    with pytest.raises(
        ResumeError, match="rank 0: iteration 3 was restored, but the loop begins at its own start"
    ) as e:
        loop(job.engine, loader())
    assert "`start = engine.global_steps`" in str(e.value)
    assert ("returned the client state of iteration" in str(e.value)) == (loop is from_its_own_state)
    assert job.begun == [], "nothing was computed"


def test_a_loop_that_takes_the_restored_iteration_from_its_checkpoint_goes_on(start):
    job = start(2)
    from_its_own_state(job.engine, loader())
    assert job.begun == [3, 4]


def test_a_loop_over_a_pipeline_is_asked_as_well(start):
    job = start(3, Pipelined(3))
    with pytest.raises(ResumeError, match="begins at its own start"):
        job.engine.train_batch(iter(loader()))
    job = start(3, Pipelined(3))
    assert job.engine.global_steps == 3
    job.engine.train_batch(iter(loader()))
    assert job.begun == [4]


def test_a_job_without_snapshots_may_begin_where_it_likes(start, capsys):
    over_all_epochs(start(0, captured=False).engine, loader())
    assert "will be refused" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("module", "script"),
    [("__main__", True), ("deepspeed_gpt", True), ("deepspeed.runtime.engine", False), ("ft_plugins.session", False)],
)
def test_deepspeeds_own_reads_are_not_the_scripts(module, script):
    engine = Counting(5)
    kind = type(engine)
    reads = CounterReads(engine)
    exec("engine.global_steps", {"__name__": module, "engine": engine})  # noqa: S102
    assert isinstance(engine, Counting) and type(engine).__name__ == "Counting"
    assert reads.end() == script
    assert type(engine) is kind and engine.global_steps == 5


def test_a_counter_that_was_read_before_it_was_set_says_nothing():
    engine = Counting(0)
    reads = CounterReads(engine)
    assert engine.global_steps == 0
    engine.global_steps = 5
    assert not reads.end()


# ---- loops that read where the engine is only to print it ----


def printed_by_epochs(engine, batches):
    print(engine.global_steps)
    for _epoch in range(3):
        for batch in batches:
            train(engine, batch)


def printed_by_steps(engine, batches):
    print(engine.global_steps)
    data, step = cycle(batches), 0
    while step < STEPS:
        train(engine, next(data))
        step += 1


def printed_by_a_callback(engine, batches):
    state = SimpleNamespace(step=0, seen=engine.global_steps)
    while True:
        for batch in batches:
            train(engine, batch)
            state.step, state.seen = state.step + 1, engine.global_steps
            if state.step == STEPS:
                return


def printed_by_a_generator(engine, batches):
    print(engine.global_steps)

    def some():
        for _taken in range(STEPS):
            yield next(data)

    data = cycle(batches)
    for batch in some():
        train(engine, batch)


def cycle(batches):
    while True:
        yield from batches


def sliced(engine, batches):
    for batch in islice(cycle(batches), STEPS - engine.global_steps):
        train(engine, batch)


def from_the_steps_until_a_break(engine, batches):
    step = engine.global_steps
    for _ in range(step // EPOCH, 100):
        for batch in batches:
            train(engine, batch)
            step += 1
            if step == 2 * EPOCH + 1:
                return


def once(engine, batches):
    print(engine.global_steps)
    for number, batch in enumerate(batches):  # ends with the batches, whose position is restored
        train(engine, batch)
        if number % 2 == 0:
            print(number)


PRINTED = {
    printed_by_epochs: "printed_by_epochs._epoch 0, was 1",
    printed_by_steps: "printed_by_steps.step 0, was {at}",
    printed_by_a_callback: "printed_by_a_callback.state.step 0, was {at}",
    printed_by_a_generator: "some._taken 0, was {at}",
}


@pytest.mark.parametrize("at", [EPOCH, EPOCH + 2])
@pytest.mark.parametrize("loop", PRINTED)
def test_a_loop_that_only_prints_where_the_engine_is_is_named_by_what_begins_again(start, loop, at):
    first = start(0)
    loop(first.engine, loader())
    job = start(at, versions=first.versions)
    loop(job.engine, loader())
    assert PRINTED[loop].format(at=at) in job.said[0] and not any(job.said[1:])
    assert not any(first.said)


@pytest.mark.parametrize("at", [1, EPOCH - 1, EPOCH, EPOCH + 1])
@pytest.mark.parametrize(
    "loop",
    [until_the_last_step, over_the_epochs_that_are_left, sliced, from_the_steps_until_a_break, once],
)
def test_a_loop_whose_counters_are_where_they_were_goes_on_from_each_iteration_and_twice(start, loop, at):
    first = start(0)
    loop(first.engine, loader())
    versions = first.versions
    if at not in versions:
        return  # a single epoch
    again = start(at, versions=versions)
    loop(again.engine, loader())
    named = loop is once  # `number`, which it prints
    assert again.begun[0] == at + 1 and (named or not any(again.said))
    later = min(again.versions)
    twice = start(later, versions=again.versions)
    loop(twice.engine, loader())
    assert twice.begun[0] == later + 1 and (named or not any(twice.said))


def evaluating_by_own_steps(engine, batches):
    step = 0
    for _ in range(engine.global_steps // EPOCH, STEPS // EPOCH):
        for batch in batches:
            train(engine, batch)
            step += 1
            if step % 2 == 1:
                engine.module.eval()
                engine.module.train()


@pytest.mark.parametrize("loop", [evaluating_by_own_steps])
@pytest.mark.parametrize("at", [EPOCH - 1, EPOCH + 2])
def test_what_a_loop_decides_by_counters_that_are_not_restored_is_named(start, loop, at):
    first = start(0)
    loop(first.engine, loader())
    job = start(at, versions=first.versions)
    loop(job.engine, loader())
    assert job.begun[0] == at + 1
    assert f"{loop.__name__}.step 0, was" in job.said[0]


def test_plain_epochs_that_are_restored_in_their_first_one_are_right(start):
    first = start(0)
    printed_by_epochs(first.engine, loader())
    job = start(2, versions=first.versions)
    printed_by_epochs(job.engine, loader())
    assert job.begun[0] == 3


def test_a_longer_run_may_be_asked_for_at_a_restart(start):
    def until(engine, total):
        step = engine.global_steps
        while step < total:
            train(engine, torch.ones(2))
            step += 1

    first = start(0)
    until(first.engine, STEPS)
    job = start(5, versions=first.versions)
    until(job.engine, 2 * STEPS)
    assert job.begun[-1] == 2 * STEPS


def test_a_counter_that_need_not_continue_is_passed_over_by_name(start, monkeypatch):
    monkeypatch.setattr(undeclared_search, "_ignored", [])
    first = start(0)
    printed_by_steps(first.engine, loader())
    undeclared_search.ignore("step")
    job = start(3, versions=first.versions)
    printed_by_steps(job.engine, loader())
    assert job.begun[0] == 4 and not any(job.said)


# ---- batches that are read ahead ----


def drawn_by_the_script(engine, batches):
    while engine.global_steps < EPOCH:
        train(engine, torch.rand(2))


def one_ahead(engine, batches):
    data = iter(batches)
    held = next(data)
    for batch in data:
        train(engine, held)
        held = batch
    train(engine, held)


def before_the_update(engine, batches):
    data = iter(batches)
    batch = next(data)
    while engine.global_steps < EPOCH:
        engine(batch)
        batch = next(data, batch)
        engine.step()


def twice_each(engine, batches):
    for batch in batches:
        train(engine, batch)
        train(engine, batch)


def by_a_thread(engine, batches):
    queue = Queue()
    reader = threading.Thread(target=lambda: [queue.put(batch) for batch in batches])
    reader.start()
    reader.join()
    for _ in range(EPOCH):
        train(engine, queue.get(timeout=300))


def only_some(engine, batches):
    for number, batch in enumerate(batches):
        if number % 3 != 1:
            train(engine, batch)


@pytest.mark.parametrize(
    ("loop", "at", "why"),
    [
        (one_ahead, 2, "it read 1 batches for 1 micro-steps, but an earlier one 2 for 1"),
        (before_the_update, 2, "no batch was read since the last update"),
        (twice_each, 2, "no batch was read since the last update"),
        (by_a_thread, 1, "a thread other than the one that trains has read a batch"),
        (only_some, 2, "it read 2 batches for 1 micro-steps, but an earlier one 1 for 1"),
        (drawn_by_the_script, 2, "random numbers were drawn after the last update, but no batch was read"),
    ],
)
def test_a_loop_whose_data_position_is_not_that_of_training_is_refused_when_it_shows(start, loop, at, why):
    job = start(0)
    with pytest.raises(UnsupportedError, match=f"rank 0: iteration {at} cannot be followed: .*{why}") as refused:
        loop(job.engine, loader())
    advised = "Draw them in" if loop is drawn_by_the_script else "Read each batch after engine.step() of the one before"
    assert advised in str(refused.value)


def a_look_first(engine, batches):
    print(engine.global_steps)
    next(iter(batches))
    for batch in batches:
        train(engine, batch)


def ended_before_training(engine, batches):
    for _ in range(engine.global_steps // 3, 3):
        for number, batch in enumerate(batches):
            if number >= 3:
                break
            train(engine, batch)


def is_enough(number):
    return number >= 3


def ended_by_a_function(engine, batches):
    for _ in range(engine.global_steps // 3, 3):
        for number, batch in enumerate(batches):
            if is_enough(number):
                break
            train(engine, batch)


def ended_by_the_engine(engine, batches):
    for _ in range(engine.global_steps // 3, 3):
        for batch in batches:
            train(engine, batch)
            if engine.global_steps % 3 == 0:
                break


@pytest.mark.parametrize("loop", [a_look_first, ended_before_training, ended_by_a_function])
def test_a_pass_that_is_left_with_a_batch_ends_no_job(start, loop):
    job = start(0)
    loop(job.engine, loader())
    assert job.begun[:9] == list(range(1, job.engine.global_steps + 1))


@pytest.mark.parametrize("at", [1, 3, 4])
def test_a_pass_that_is_ended_where_the_engine_is_goes_on(start, at):
    first = start(0)
    ended_by_the_engine(first.engine, loader())
    job = start(at, versions=first.versions)
    ended_by_the_engine(job.engine, loader())
    assert first.begun == list(range(1, 10)) and job.begun == list(range(at + 1, 10))


def test_a_loader_of_accelerate_reads_ahead(start):
    shard = pytest.importorskip("accelerate.data_loader").DataLoaderShard
    job = start(0)
    with pytest.raises(UnsupportedError, match="iteration 2 cannot be followed: it read 1 batches"):
        over_all_epochs(job.engine, shard(list(range(2 * EPOCH)), batch_size=2))


def all_of_an_iteration(engine, batches):
    data = iter(batches)
    while engine.global_steps < EPOCH // 2:
        for batch in [next(data) for _ in range(2)]:
            train(engine, batch)


def in_halves(engine, batches):
    for batch in batches:
        for half in batch.split(1):
            train(engine, half)


def two_loaders(engine, batches):
    for left, right in zip(batches, loader(), strict=True):
        for batch in (left, right):
            train(engine, batch)


@pytest.mark.parametrize("loop", [all_of_an_iteration, in_halves, two_loaders])
def test_a_loop_that_reads_what_it_trains_on_is_followed(start, loop):
    job = start(0, Counting(0, accumulation=2))
    loop(job.engine, loader())
    assert job.begun and job.begun == list(range(1, job.engine.global_steps + 1))


def test_epochs_of_a_loader_without_length_are_followed(start):
    job = start(0)
    until_the_last_step(job.engine, loader(stream=True))
    assert job.engine.global_steps == STEPS


def test_an_iterator_that_is_made_before_the_engine_is_followed_unless_it_was_read(start, monkeypatch):
    for early in (0, 1):
        monkeypatch.setattr(DataLoader, "__iter__", ITERATE)
        positions = Positions()
        positions.follow_torch()  # as the import of deepspeed does
        data = iter(loader())
        held = [next(data) for _ in range(early)]
        job = start(0, positions=positions)
        if early:
            with pytest.raises(UnsupportedError, match="read before deepspeed.initialize already"):
                train(job.engine, [*held, next(data)][0])
        else:
            train(job.engine, next(data))
            assert positions.read()["train"]["read"] == 1


@pytest.mark.parametrize("evaluates", [True, False])
def test_batches_from_elsewhere_are_followed_unless_the_script_draws_them(start, capsys, evaluates):
    job = start(0)
    while job.engine.global_steps < EPOCH:
        train(job.engine, torch.ones(2))
        if evaluates:
            job.engine.module.eval()
            job.engine(torch.rand(2))
            job.engine.module.train()
    assert job.begun == [1, 2, 3, 4]
    assert capsys.readouterr().out.count("the data position is not tracked") == 1


def test_evaluations_are_not_counted(start):
    job = start(0)
    for batch in loader():
        train(job.engine, batch)
        job.engine.module.eval()
        for other in loader():
            job.engine(other)
        job.engine.module.train()
    assert job.begun == [1, 2, 3, 4]
