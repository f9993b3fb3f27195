"""A loop of plain torch over a model that fully_shard has sharded: its items, and what it goes on from, bit for bit.

Four ranks are two replicas of two shards. Sizes do not divide: shards are uneven, and some are empty.
"""

import copy
import gc
import math

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ft_plugins
from ft_plugins.adapters.torch.fsdp import FsdpHost
from ft_plugins.adapters.torch.fsdp_layout import ShardLayout, placed
from ft_plugins.adapters.torch.torch_loop import TorchHost
from ft_plugins.config import Config, LaunchContext
from ft_plugins.errors import ConfigError, FtError, InventoryError, StateChangedError, UnsupportedError
from ft_plugins.model.digest import readable, state_digest
from ft_plugins.model.inventory import Role
from ft_plugins.session import attach
from harness.gang import gang
from tests.unit.adapters.torch_small import handed_over, take_over

SECONDS = 280.0  # a bound; some seconds on idle cores
ITERATIONS, DONE = 7, 5
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01, amsgrad=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.01, momentum=0.9),
}
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Net(torch.nn.Module):
    """An embedding tied to the head, uneven layers, a frozen one, a parameter of the root, smaller than the shards."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 5)
        self.shift = torch.nn.Parameter(torch.ones(1))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(5, 5) for _ in range(2))
        self.frozen = torch.nn.Linear(5, 5).requires_grad_(False)
        self.norm = torch.nn.LayerNorm(5)
        self.register_buffer("seen", torch.zeros(2))
        self.dropout = torch.nn.Dropout(0.2)
        self.head = torch.nn.Linear(5, 7)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        self.seen += tokens.sum()
        numbers = self.embedding(tokens) + self.shift
        for layer in self.layers:
            numbers = numbers + torch.tanh(layer(numbers))
        return self.head(self.dropout(self.norm(self.frozen(numbers))))


def sharded(mesh, seed=3, policy=None):
    """The same values on all ranks; each layer a unit, the rest the root's."""
    torch.manual_seed(seed)
    model, settings = Net(), {} if policy is None else {"mp_policy": policy}
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)
    return model


def meshes(kind):
    """The whole mesh, and the one for fully_shard."""
    if kind == "one replica":
        whole = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
        return whole, whole
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sync", "shard"))
    return whole, whole if kind == "hybrid" else whole["shard"]


class Loop:
    """A model, its optimizer and scheduler; each rank draws its own batches and dropout."""

    def __init__(self, rank, kind="replicas", optimizer="adamw", seed=3, **given):
        self.rank = rank
        self.mesh, mesh = meshes(kind)
        self.model = sharded(mesh, seed, **given)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        torch.manual_seed(70 + rank)

    def host(self):
        return FsdpHost(self.model, self.optimizer, self.scheduler, mesh=self.mesh)

    def iterate(self, step):
        self.model(torch.randint(7, (6,))).square().mean().backward()
        if step % 2:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        if step % 3 == 0:  # leaves the root's parameters gathered
            self.model.eval()
            with torch.no_grad():
                self.model(torch.randint(7, (6,)))
            self.model.train()

    def described(self):
        for module in (*self.model.layers, self.model):
            module.reshard()
        state = {name: one.detach() for name, one in self.model.state_dict().items()}
        tensors = {name: getattr(one, "_local_tensor", one) for name, one in state.items()}
        for name, one in self.model.named_parameters():
            kept = self.optimizer.state[one].items() if one.requires_grad else []
            tensors |= {f"{name}:{key}": getattr(value, "_local_tensor", value) for key, value in kept}
        return readable(tensors), readable(self.scheduler.state_dict()), readable(torch.get_rng_state())


def iterations(host, rank, world, until, done=0):
    """Under a session that captures nothing, but takes the small state at each version point."""
    session = attach(host, Config(), LaunchContext(None, None, 0, None, rank, rank, world, world, 0, 0))
    session.iteration_end = lambda step, ends: host.small_state()
    yield from session.iterations(until, done)


# ---- the layout, purely ----


def test_shards_and_replicas_are_read_off_the_mesh():
    grid = np.array([[0, 1, 2], [3, 4, 5]])
    found = placed(grid, [3, 4, 5], 4, hybrid=False)
    assert found == ShardLayout((2, 3), (3, 4, 5), (1, 4), 1, 0, False)
    assert placed(grid, [1, 4], 4, hybrid=False) == ShardLayout((2, 3), (1, 4), (3, 4, 5), 1, 1, False)
    assert placed(grid, [3, 4], 4, hybrid=False) is None and placed(grid, [6], 6, hybrid=False) is None
    one = placed(np.array([2, 0, 1]), [2, 0, 1], 0, hybrid=False)
    assert one is not None and (one.index, one.replicas, one.sync_dimension) == (1, (0,), None)


@pytest.mark.parametrize("rows", range(1, 12))
def test_pieces_are_those_of_torch(rows):
    whole = torch.arange(rows * 3).reshape(rows, 3)
    chunks = list(torch.chunk(whole, 4))
    for index in range(4):
        start, stop, total = ShardLayout((4,), (0, 1, 2, 3), (0,), index, None, False).piece(whole.shape)
        expected = chunks[index].reshape(-1).tolist() if index < len(chunks) else []
        assert list(range(start, stop)) == expected and total == rows * 3


# ---- items ----


def _items(rank, world, kind):
    loop = Loop(rank, kind)
    whole = {name: one.full_tensor().reshape(-1) for name, one in loop.model.named_parameters()}
    host = loop.host()
    items, tensors = {item.name: item for item in host.inventory().items}, host.tensors()
    assert host.topology().world_size == world and host.admits(world) and not host.admits(world - 1)
    assert host.fingerprint()["mesh"] == list(loop.mesh.shape)
    for name in whole:
        for item in (items[name], items[f"{name}:exp_avg"]):
            assert item.piece is not None and tuple(item.shape) == tuple(tensors[item.name].shape)
            assert item.nbytes == 4 * math.prod(item.shape) and item.piece[1] - item.piece[0] == math.prod(item.shape)
            assert item.background and item.role is (Role.PARAMETER if item.name == name else Role.MOMENT)
    for name, flat in whole.items():
        start, stop, total = items[name].piece
        assert total == flat.numel() and torch.equal(flat[start:stop], tensors[name].reshape(-1)), name
    return {name: item.replicas for name, item in items.items()}, host.fingerprint()


@pytest.mark.parametrize("kind", ["replicas", "hybrid", "one replica"])
def test_items_are_local_shards_and_replicas_have_the_same_shard(kind):
    found = gang(_items, 4, kind, seconds=SECONDS)
    for rank, (replicas, fingerprint) in enumerate(found):
        same = (rank,) if kind == "one replica" else (rank % 2, rank % 2 + 2)
        for name, ranks in replicas.items():
            assert ranks == ((rank,) if name == "seen" else same), name
        assert "head.weight" not in replicas, "it is tied to the embedding"
        assert fingerprint == found[0][1]


# ---- a round trip ----


def _golden(rank, kind, optimizer, policy):
    """The end of a loop without the package."""
    loop = Loop(rank, kind, optimizer, policy=policy)
    for step in range(1, ITERATIONS + 1):
        loop.iterate(step)
    return loop.described()


def _round_trip(rank, world, kind, optimizer, policy):
    expected = _golden(rank, kind, optimizer, policy)
    gc.freeze()  # hooks keep it alive: it is trained state that no host has

    first = Loop(rank, kind, optimizer, policy=policy)
    host = first.host()
    for step in iterations(host, rank, world, DONE):
        first.iterate(step)
    saved = handed_over(host)
    before, dtypes = state_digest(host), {one.dtype for one in host.tensors().values()}
    assert dtypes <= {torch.float32, torch.int64}, "parameters and moments stay in full precision"

    second = Loop(rank, kind, optimizer, seed=8, policy=policy)
    host = second.host()
    assert state_digest(host) != before
    take_over(host, *saved)
    assert state_digest(host) == before
    for step in iterations(host, rank, world, ITERATIONS, DONE):
        second.iterate(step)
    assert second.described() == expected


CASES = [
    ("replicas", "adamw", None),
    ("replicas", "adamw", HALF),
    ("replicas", "momentum", None),
    ("hybrid", "adamw", None),
    ("one replica", "momentum", HALF),
]


@pytest.mark.parametrize("kind, optimizer, policy", CASES)
def test_what_is_handed_over_is_gone_on_from_bit_for_bit(kind, optimizer, policy):
    gang(_round_trip, 4, kind, optimizer, policy, seconds=SECONDS)


class Gan:
    """Two sharded networks with an optimizer each; the generator learns in every second iteration."""

    def __init__(self, rank, seed=3):
        torch.manual_seed(seed)
        self.mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
        self.g = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 4))
        self.d = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Dropout(0.2), torch.nn.Linear(5, 1))
        for part in (self.g, self.d):
            fully_shard(part, mesh=self.mesh)
        self.model = torch.nn.ModuleDict({"g": self.g, "d": self.d})
        self.opt_g = torch.optim.AdamW(self.g.parameters(), 0.01)
        self.opt_d = torch.optim.SGD(self.d.parameters(), 0.05, momentum=0.9)
        torch.manual_seed(70 + rank)

    def host(self):
        return FsdpHost(self.model, {"g": self.opt_g, "d": self.opt_d}, mesh=self.mesh)

    def iterate(self, step):
        with torch.no_grad():
            fake = self.g(torch.randn(5, 3))
        self.opt_d.zero_grad()
        self.d(torch.cat([fake, torch.randn(5, 4)])).square().mean().backward()
        self.opt_d.step()
        if step % 2 == 0:
            self.opt_g.zero_grad()
            (-self.d(self.g(torch.randn(5, 3))).mean()).backward()
            self.opt_g.step()

    def described(self):
        tensors = {name: one._local_tensor for name, one in self.model.state_dict().items()}
        for key, one in (("g", self.opt_g), ("d", self.opt_d)):
            for place, state in enumerate(one.state.values()):
                tensors |= {f"{key}{place}{name}": getattr(v, "_local_tensor", v) for name, v in state.items()}
        return readable(tensors), readable(torch.get_rng_state())


def _two_optimizers(rank, world):
    golden = _unprotected_gan(rank)
    saved = _left_gan(rank, world)
    second = Gan(rank, seed=8)
    host = second.host()
    take_over(host, *saved)
    for step in iterations(host, rank, world, ITERATIONS, DONE):
        second.iterate(step)
    assert second.described() == golden


def _unprotected_gan(rank):
    gan = Gan(rank)
    for step in range(1, ITERATIONS + 1):
        gan.iterate(step)
    return copy.deepcopy(gan.described())


def _left_gan(rank, world):
    """What a job hands over that ends after DONE iterations. Its networks are gone then: they would be undeclared."""
    gan = Gan(rank)
    host = gan.host()
    for step in iterations(host, rank, world, DONE):
        gan.iterate(step)
    return handed_over(host)


def test_two_optimizers_over_sharded_networks_go_on_bit_for_bit():
    gang(_two_optimizers, 2, seconds=SECONDS)


def _restored_in_place(rank, world):
    """Also where the root's parameters are still gathered, from values that are no longer its own."""
    loop = Loop(rank)
    host = loop.host()
    for step in iterations(host, rank, world, DONE + 2):
        if step > DONE:
            saved, described = handed_over(host), copy.deepcopy(loop.described())
        loop.iterate(step)
        if step > DONE:
            break
    assert DONE % 3 == 2, "the last one has left the root's parameters gathered"
    addresses = {name: one.data_ptr() for name, one in host.tensors().items()}
    take_over(host, *saved)
    assert loop.described() == described
    assert addresses == {name: one.data_ptr() for name, one in host.tensors().items()}
    scores = loop.model.eval()(torch.arange(7))

    other = Loop(rank, seed=8)
    fresh = other.host()
    take_over(fresh, *saved)
    assert torch.equal(scores, other.model.eval()(torch.arange(7)))
    with torch.no_grad():  # an average of replicas, or a repair; the root is gathered
        for tensors in (host.tensors(), fresh.tensors()):
            tensors["embedding.weight"].mul_(0.5)
    host.derive()
    fresh.derive()
    assert torch.equal(loop.model(torch.arange(7)), other.model(torch.arange(7)))
    assert not torch.equal(loop.model(torch.arange(7)), scores)


def test_shards_are_restored_in_place_and_gathered_again():
    gang(_restored_in_place, 4, seconds=SECONDS)


# ---- changes between a version point and the update ----


def _shift(loop):
    with torch.no_grad():
        loop.model.layers[1].weight.add_(1.0)


def _shift_shard(loop):
    loop.model.layers[1].weight._local_tensor.add_(1.0)


def _replace(loop):
    state = loop.optimizer.state[loop.model.shift]
    state["exp_avg"] = state["exp_avg"].clone()


CHANGES = {"parameter": _shift, "shard": _shift_shard, "moment": _replace}
ZEROED = ("none", "zeros", "first", "never", "accumulated", "clipped", "gathered")


def _watched(rank, world):
    """What the host says to each change, and to each way to zero gradients."""
    words = {}
    for case in (*CHANGES, *ZEROED):
        loop = Loop(rank)
        try:
            for step in iterations(loop.host(), rank, world, 3):
                if step == 2 and case in CHANGES:
                    CHANGES[case](loop)
                if case == "first":
                    loop.optimizer.zero_grad(set_to_none=False)
                for _ in range(2):
                    loop.model(torch.arange(6)).square().mean().backward()
                if case == "clipped":
                    torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
                if case != "accumulated" or step % 2 == 0:
                    loop.optimizer.step()
                if case in ("none", "zeros", "gathered", *CHANGES) or (case == "accumulated" and step % 2 == 0):
                    loop.optimizer.zero_grad(set_to_none=case != "zeros")
                loop.scheduler.step()
                if case == "gathered":
                    loop.model.unshard()
            words[case] = ""
        except FtError as error:
            words[case] = f"{type(error).__name__}: {error}"
    return words


def test_changes_that_a_snapshot_would_not_hold_are_errors():
    for rank, words in enumerate(gang(_watched, 4, seconds=SECONDS)):
        changed = f"StateChangedError: rank {rank}: iteration 2: 'layers.1.weight' was changed after the version point"
        assert words["parameter"].startswith(changed) and words["shard"].startswith(changed)
        assert "iteration 2: 'shift:exp_avg' was replaced by another tensor" in words["moment"], words["moment"]
        assert "since FsdpHost was built" in words["moment"]
        assert {case: words[case] for case in ("none", "zeros", "first", "gathered")} == {
            "none": "", "zeros": "", "first": "", "gathered": ""
        }  # fmt: skip
        for case in ("never", "accumulated", "clipped"):
            assert "iteration 2: the gradient of" in words[case], (case, words[case])


# ---- what is refused ----


def _refused(rank, world):
    whole, mesh = meshes("replicas")
    words = {}

    def refuse(name, build):
        with pytest.raises(FtError) as caught:
            build()
        words[name] = f"{type(caught.value).__name__}: {caught.value}"

    def host(model, kind=FsdpHost, **given):
        return kind(model, torch.optim.SGD(model.parameters(), 0.1), **given)

    refuse("TorchHost", lambda: host(sharded(mesh), TorchHost))
    refuse("whole", lambda: host(Net(), mesh=whole))
    refuse("no mesh", lambda: host(sharded(mesh)))
    refuse("part", lambda: host(sharded(mesh), mesh=mesh))
    refuse("seed", lambda: host(sharded(mesh, seed=rank // 2), mesh=whole))
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    refuse("other", lambda: host(sharded(other), mesh=whole))

    model = Net()
    fully_shard(model.layers[0], mesh=whole["sync"])
    fully_shard(model, mesh=mesh)
    refuse("two", lambda: host(model, mesh=whole))
    model = Net()
    fully_shard(model.layers[0], mesh=whole)
    fully_shard(model, mesh=mesh)
    refuse("hybrid", lambda: host(model, mesh=whole))
    model = sharded(mesh)
    refuse("optimizer", lambda: FsdpHost(model, torch.optim.Adafactor(model.parameters()), mesh=whole))
    with torch.device("meta"):
        model = Net()
    refuse("meta", lambda: host(fully_shard(model, mesh=mesh), mesh=whole))
    assert isinstance(host(sharded(other)), FsdpHost), "the mesh may be left out where it has all ranks"
    return words


def test_what_cannot_be_captured_is_refused_by_name():
    for rank, words in enumerate(gang(_refused, 4, seconds=SECONDS)):
        assert (
            "parameters are sharded (shift)" in words["TorchHost"] and "use ft_plugins.FsdpHost" in words["TorchHost"]
        )
        assert words["whole"] == (
            f"ConfigError: rank {rank}: fully_shard has sharded no parameter of the model: call it before FsdpHost, or "
            "use TorchHost"
        )
        for case in ("no mesh", "part"):
            assert "with all 4 ranks of the job, found one of shape (2,): pass FsdpHost the whole mesh" in words[case]
        assert words["seed"].startswith("InventoryError: rank ") and "differs from rank " in words["seed"]
        assert "build the model from the same seed" in words["seed"]
        assert "sharded over ranks [0, 1, 2, 3], which are no dimension of the mesh [[0, 1], [2, 3]]" in words["other"]
        assert f"'layers.0.weight' is sharded over ranks [{rank % 2}, {rank % 2 + 2}], 'shift' over" in words["two"]
        shards = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert (
            f"'layers.0.weight' is sharded over ranks {shards} and replicated by fully_shard (HSDP), 'shift' over "
            f"ranks {shards}: shard all"
        ) in words["hybrid"]
        assert "Adafactor is not supported: what it keeps of a parameter of shape (7, 5)" in words["optimizer"]
        assert "on the meta device" in words["meta"]


def test_the_host_is_exported():
    assert ft_plugins.FsdpHost is FsdpHost and issubclass(FsdpHost, TorchHost)
    assert {ConfigError, InventoryError, StateChangedError, UnsupportedError} <= set(FtError.__subclasses__()) | {
        StateChangedError
    }
