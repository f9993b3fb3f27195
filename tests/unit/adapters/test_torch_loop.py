"""A loop of plain torch: what it goes on from, bit for bit, and what is refused before it would be lost."""

import functools
import itertools
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import ft_plugins
from ft_plugins.adapters.torch.torch_loop import TorchHost
from ft_plugins.config import Config, LaunchContext
from ft_plugins.errors import (
    ConfigError,
    FtError,
    InventoryError,
    ResumeError,
    StateChangedError,
    UnsupportedError,
)
from ft_plugins.model.digest import readable, state_digest
from ft_plugins.model.inventory import Role
from ft_plugins.session import attach
from ft_plugins.snapshot.capture import codec

Node = Any  # the fixture's class lives in tests/unit/conftest.py
ITERATIONS, LEFT_IN = 11, 6  # 4 iterations are an epoch
OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
    "adamw-amsgrad": lambda parameters: torch.optim.AdamW(parameters, 0.01, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.01),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, 0.01, momentum=0.9),
}


class Loop:
    """A model with dropout and batch norm, a scheduler, a loader that is shuffled; what it has read."""

    def __init__(self, optimizer="adam", workers=0):
        torch.manual_seed(5)
        numbers = torch.randn(32, 6)
        self.sampler = DistributedSampler(numbers, 1, 0)
        self.loader = DataLoader(
            TensorDataset(torch.arange(len(numbers)), numbers), 8, sampler=self.sampler, num_workers=workers,
            persistent_workers=workers > 0,
        )  # fmt: skip
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, 10), torch.nn.BatchNorm1d(10), torch.nn.ReLU(), torch.nn.Dropout(0.3),
            torch.nn.Linear(10, 3),
        )  # fmt: skip
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        torch.manual_seed(70)
        self.read = {}
        self.batches = self._endless()

    def _endless(self):
        for epoch in itertools.count(self.sampler.epoch):
            self.sampler.set_epoch(epoch)
            yield from self.loader

    @property
    def parts(self):
        return self.model, self.optimizer, self.scheduler

    def host(self, **given):
        given = {"scheduler": self.scheduler, "sampler": self.loader, **given}
        return TorchHost(self.model, self.optimizer, **given)

    def iterate(self, step):
        order, numbers = next(self.batches)
        self.read[step] = order.tolist()
        self.model(numbers).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def described(self):
        return {
            "model": readable(dict(self.model.state_dict())),
            "optimizer": readable(self.optimizer.state_dict()),
            "scheduler": readable(self.scheduler.state_dict()),
            "rng": readable(torch.get_rng_state()),
        }


def context(run_dir=None, token=0):
    return LaunchContext(None, run_dir, token, None, 0, 0, 1, 1, 0, 0)


def _plain(*made):
    loop = Loop(*made)
    for step in range(1, ITERATIONS + 1):
        loop.iterate(step)
    return loop.described(), loop.read


def run(loop, host, done, until, small=None):
    """Iterations `done` + 1 to `until`, under a session that captures nothing."""
    session = attach(host, Config(), context())
    if small is not None:
        host.restore_position(small)
    for step in session.iterations(until, done):
        loop.iterate(step)


@pytest.mark.parametrize("made", [*((one,) for one in OPTIMIZERS), ("adam", 2)], ids=str)
def test_what_is_handed_over_is_gone_on_from_bit_for_bit(made):
    """By a loop that was built again; also with workers that persist."""
    golden = _plain(*made)
    first = Loop(*made)
    host = first.host()
    run(first, host, 0, LEFT_IN)
    small = codec.decode(codec.encode(host.small_state()))
    tensors = {name: tensor.clone() for name, tensor in host.tensors().items()}

    second = Loop(*made)
    host = second.host()
    host.allocate(())
    for name, tensor in host.tensors().items():
        tensor.copy_(tensors[name])
    host.restore(small)
    run(second, host, LEFT_IN, ITERATIONS, small)
    assert (second.described(), {**first.read, **second.read}) == golden


# ---- what would be lost ----


def _replace_moment(loop, added):
    state = loop.optimizer.state[loop.model[0].weight]
    state["exp_avg"] = state["exp_avg"].clone()


CHANGES = {
    "state": (lambda loop, p: loop.optimizer.state[loop.model[0].weight].update(more=torch.ones(2)),
              "'0.weight:more' was added"),
    "model": (lambda loop, p: loop.model.register_parameter("late", p), "'late' was added"),
    "buffer": (lambda loop, p: loop.model.register_buffer("late", torch.ones(1)), "'late' was added"),
    "group": (lambda loop, p: loop.optimizer.add_param_group({"params": [p]}), "'the optimizer's groups' have other"),
    "moment": (_replace_moment, "'0.weight:exp_avg' was replaced"),
    "storage": (lambda loop, p: setattr(loop.model[0].weight, "data", torch.zeros(10, 6)),
                "'0.weight' was replaced"),
    "gone": (lambda loop, p: loop.model.__delitem__(4), "was removed after TorchHost was built"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_state_that_changes_later_is_an_error_at_the_version_point(change):
    loop = Loop()
    host = loop.host()
    run(loop, host, 0, 2)
    host.small_state()
    CHANGES[change][0](loop, torch.nn.Parameter(torch.zeros(3)))
    with pytest.raises(StateChangedError) as caught:
        host.small_state()
    words = str(caught.value)
    assert words.startswith("rank 0: iteration 2: ") and CHANGES[change][1] in words and "before TorchHost" in words


def _life(rank, world, run_dir, token, changes):
    """What it has read, and the error that ended it."""
    loop, block = Loop(), {"reft": {}, "node_name": run_dir.name}
    try:
        for step in attach(loop.host(), Config.from_json(block), context(run_dir, token)).iterations(ITERATIONS):
            loop.iterate(step)
            if step == 3 and changes:
                loop.model.register_buffer("late", torch.ones(1))
    except FtError as error:
        return loop.read, type(error), str(error)
    return loop.read, None, ""


def test_such_an_error_ends_the_loop_and_the_version_before_stays(node, ranks):
    node.start()
    [(_, kind, words)] = ranks(_life, 1, node.run_dir, node.fence(), True)
    assert kind is StateChangedError and "iteration 3: 'late' was added" in words
    assert [event.fields["iteration"] for event in node.events("snapshot.sealed")] == [1, 2]
    [(read, _, words)] = ranks(_life, 1, node.run_dir, node.fence(), False)
    assert min(read) == 3 and words == "" and node.events("protection.lost") == []


@pytest.mark.parametrize(
    "arguments, kind, words",
    [
        (lambda loop: (loop.model, None), ConfigError, "found a NoneType as the optimizer"),
        (lambda loop: (loop.optimizer, loop.model), ConfigError, "found a Adam as the model"),
        (lambda loop: (loop.model, loop.optimizer, 0.1), ConfigError, "found a float as the scheduler"),
        (lambda loop: (*loop.parts, loop.sampler), ConfigError, "pass the torch DataLoader"),
        (lambda loop: (*loop.parts, DataLoader(Stream())), ConfigError, "over an IterableDataset"),
        (lambda loop: (*loop.parts, DataLoader(loop.loader.dataset, sampler=Own())), ConfigError, "draws from a Own,"),
        (lambda loop: (loop.model[0], loop.optimizer, loop.scheduler), InventoryError, "that the model does not have"),
        (lambda loop: (loop.model, torch.optim.LBFGS(loop.model.parameters())), UnsupportedError, "LBFGS"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_by_name(arguments, kind, words):
    with pytest.raises(kind, match=words):
        TorchHost(*arguments(Loop()))


class Stream(IterableDataset[int]):
    def __iter__(self):
        return iter(range(4))


class Own:
    """A sampler that knows where it is."""

    def __init__(self):
        self.at = 0

    def __len__(self):
        return 100

    def __iter__(self):
        while True:
            self.at += 1
            yield self.at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_an_object_that_knows_its_position_is_asked_and_told():
    loop, own = Loop(), Own()
    host = loop.host(sampler=own)
    own.at = 17
    small = host.small_state()
    own.at = 0
    host.restore(small)
    host.restore_position(small)
    assert own.at == 17


def test_what_else_the_caller_has_goes_along():
    found = []
    host = Loop().host(sampler=None, get_state=lambda: {"scale": torch.tensor(2.0)}, set_state=found.append)
    host.restore(host.small_state())
    assert found == [{"scale": torch.tensor(2.0)}]


def test_buffers_are_each_ranks_own_and_may_change_anywhere():
    items = {item.name: item for item in Loop().host().inventory().items}
    assert {name for name, item in items.items() if not item.background} == {
        "1.running_mean", "1.running_var", "1.num_batches_tracked"
    }  # fmt: skip
    assert items["0.weight:exp_avg"].nbytes == 240 and "0.weight:step" not in items
    present = {name for name, item in items.items() if item.role is not Role.MOMENT}
    assert state_digest(Loop().host())["items"].keys() == present, "no update has made moments"


def _differing(rank, world):
    torch.manual_seed(rank)
    model = torch.nn.Linear(3, 2)
    try:
        TorchHost(model, torch.optim.SGD(model.parameters(), 0.1))
    except FtError as error:
        return type(error).__name__, str(error), error.echo
    return None


def test_ranks_that_are_no_replicas_are_refused(ranks):
    found = ranks(_differing, 2)
    assert [(kind, echo) for kind, _, echo in found] == [("InventoryError", True), ("InventoryError", False)]
    assert "rank 1: 'bias' differs from rank 0's (2 of 2 tensors do)" in found[1][1]


# ---- a loop that does not do as it should ----


@pytest.fixture
def loop():
    return Loop()


def iterations(loop, **given):
    return attach(loop.host(**given), Config(), context()).iterations(ITERATIONS)


def test_a_loop_that_nothing_protects_trains_as_without_the_package(loop):
    for step in iterations(loop):
        loop.iterate(step)
    assert (loop.described(), loop.read) == _plain()


def test_an_update_outside_of_an_iteration_is_refused(loop):
    steps = iterations(loop, sampler=None)
    with pytest.raises(ConfigError, match="outside of an iteration"):
        loop.iterate(1)
    next(steps)
    loop.optimizer.step()
    with pytest.raises(ConfigError, match="or twice in iteration 1"):
        loop.optimizer.step()


def test_a_batch_that_is_read_before_its_iteration_is_refused(loop):
    iterations(loop)
    with pytest.raises(ConfigError, match="a batch was read outside of an iteration"):
        next(loop.batches)


def test_a_loader_that_is_not_the_one_that_training_reads_is_refused(loop):
    next(iterations(loop, sampler=Loop().loader))
    with pytest.raises(ConfigError, match="an update came without a batch read"):
        loop.iterate(1)


def test_a_pass_in_the_middle_of_another_one_is_refused(loop):
    steps = iterations(loop)
    loop.iterate(next(steps))
    assert len(list(loop.loader)) == 4
    with pytest.raises(ConfigError, match="give evaluation a loader of its own"):
        loop.iterate(next(steps))


def test_an_update_that_is_skipped_has_its_fence_all_the_same(loop):
    """As a GradScaler skips it."""
    fences = []
    session = attach(loop.host(), Config(), context())
    for name in ("before_update", "after_update", "iteration_end"):
        setattr(session, name, functools.partial(lambda name, step, *ends: fences.append((name, step)), name))
    steps = session.iterations(ITERATIONS)
    assert [next(steps), next(steps)] == [1, 2]
    assert fences == [("before_update", 1), ("after_update", 1), ("iteration_end", 1)]


def test_an_epoch_that_is_not_the_captured_one_is_refused(loop):
    host = loop.host()
    session = attach(host, Config(), context())
    for step in itertools.islice(session.iterations(ITERATIONS), 6):
        loop.iterate(step)
    small = host.small_state()
    other = Loop()
    host = other.host()
    attach(host, Config(), context()).iteration_begin(7)
    host.restore(small)
    host.restore_position(small)
    assert other.sampler.epoch == 1
    other.sampler.set_epoch(0)
    words = "was set to 0, but epoch 1 was captured: start the loop .* at `sampler.epoch`"
    with pytest.raises(ResumeError, match=words):
        next(iter(other.loader))


# ---- attach ----


def test_a_model_and_an_optimizer_are_no_host(loop):
    call = r"call ft_plugins.attach\(ft_plugins.TorchHost\(model, optimizer, scheduler, loader\)\)"
    with pytest.raises(ConfigError, match=f"expected a host, found a Sequential: {call}"):
        ft_plugins.attach(loop.model, loop.optimizer)
    with pytest.raises(ConfigError, match=f"expected a Config after the host, found a Adam: {call}"):
        ft_plugins.attach(loop.host(), loop.optimizer)


@pytest.mark.parametrize("told", [None, Config()])
def test_attach_where_nothing_is_configured_is_refused(loop, told, monkeypatch):
    """torchrun passes no configuration; ft-run without a flag none either, or one without a system."""
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    if told is not None:
        monkeypatch.setenv("FTP_CONFIG", "{}")
    with pytest.raises(ConfigError, match="no system is switched on.*start the job with ft-run.*--reft"):
        ft_plugins.attach(loop.host())


def test_several_ranks_without_a_process_group_are_refused(loop, monkeypatch):
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="expected 2 ranks in the job, found 1: .*init_process_group"):
        attach(loop.host(), Config.from_json({"reft": {}}))
