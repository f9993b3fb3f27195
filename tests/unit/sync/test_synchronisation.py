"""One synchronisation of replicas whose modules are divided over ranks: norms are those of whole modules."""

import weakref
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ft_plugins.errors import InventoryError
from ft_plugins.model.inventory import Inventory, Item, Role
from ft_plugins.sync.links import Links
from ft_plugins.sync.rounds import synchronisation
from ft_plugins.sync.rounds.modules import plan_groups, plan_modules
from ft_plugins.sync.rounds.outer import OuterRules
from ft_plugins.sync.rounds.penalty import PenaltyRules
from ft_plugins.sync.rounds.synchronisation import Synchronisation, SynchronisationRules
from harness.gang import gang

SYNC = ((0, 2), (1, 3), (0, 2), (1, 3))  # replicas: ranks 0 and 1, ranks 2 and 3
SIZES = ({"both.weight": 5, "first.weight": 4}, {"both.weight": 3, "second.weight": 7})  # by place in the replica
MODULES = {"both.weight": "both", "first.weight": "first", "second.weight": "second"}
CLIP = 0.5
LENGTH = 1.5  # of the changes of the second replica, over those of the first
BUCKET_BYTES = 8  # two elements: several buckets a module


def anchor(place, name):
    size = SIZES[place][name]
    return np.linspace(-1, 1, size).astype(np.float32) + np.float32(place)


def change(replica, place, name):
    size = SIZES[place][name]
    return (np.cos(np.arange(size) + 3 * place + replica) * (LENGTH if replica else 1.0)).astype(np.float32)


def built(rank, world, outer):
    """The synchronisation of one rank, its live tensors, and the order of its modules."""
    live = {name: torch.from_numpy(anchor(rank % 2, name)) for name in SIZES[rank % 2]}
    inventory = Inventory.of(
        rank,
        (Item(name, "float32", tuple(one.shape), one.nbytes, Role.PARAMETER, SYNC[rank]) for name, one in live.items()),
    )
    own = {name: MODULES[name] for name in live}
    modules = plan_modules(inventory, own, BUCKET_BYTES)
    groups = plan_groups(SYNC, [[MODULES[name] for name in SIZES[other % 2]] for other in range(world)])
    made = {ranks: dist.new_group(list(ranks)) for ranks in groups.all()}
    plan, cpu = groups.of(rank), torch.device("cpu")
    rules = SynchronisationRules(outer, PenaltyRules(alpha=0.02, threshold=3.0, warmup=0, clip=CLIP))
    links, inner = Links(rank, made, made[SYNC[rank]], cpu), Links(rank, made, made[plan.replica], cpu)
    return Synchronisation(modules, plan, links, inner, lambda: live, rules), live, plan.order


def train(rank, live, bad):
    for name, tensor in live.items():
        tensor += torch.from_numpy(change(rank // 2, rank % 2, name))
    if rank in bad:
        live["both.weight"][0] = float("nan")


def _synchronised(rank, world, bad):
    one, live, order = built(rank, world, OuterRules(1.0, 0.0))
    train(rank, live, bad)
    one.begin()
    factors = {name: one.exchange(name) for name in order}
    judgements = {name: one.apply(name) for name in order}
    return {
        "values": {name: tensor.tolist() for name, tensor in live.items()},
        "factors": factors,
        "weights": {name: judged.weights for name, judged in judgements.items() if judged is not None},
    }


def expected(module):
    """Weights, factor, values by place and name."""
    parts = [(place, name) for place in range(2) for name in SIZES[place] if MODULES[name] == module]
    changes = [np.concatenate([change(replica, *part).astype(float) for part in parts]) for replica in range(2)]
    norms = np.array([np.linalg.norm(each) for each in changes])
    weights = np.exp(norms.min() - norms)
    weights /= weights.sum()
    mean = sum(weight * each for weight, each in zip(weights, changes, strict=True))
    factor = min(1.0, CLIP / (np.linalg.norm(mean) + 1e-6))
    ends = np.cumsum([SIZES[place][name] for place, name in parts])[:-1]
    split = np.split(factor * mean, ends)
    values = {part: anchor(*part) + moved for part, moved in zip(parts, split, strict=True)}
    return tuple(weights), float(factor), values


@pytest.mark.parametrize("module", ["both", "first", "second"])
def test_norms_and_the_clip_are_those_of_the_whole_module(module):
    weights, factor, values = expected(module)
    assert 0 < factor < 1 and weights[0] > weights[1]
    results = gang(_synchronised, 4, ())
    for rank, found in enumerate(results):
        for (place, name), wanted in values.items():
            if place == rank % 2:
                assert found["weights"][module] == pytest.approx(weights, rel=1e-6)
                assert found["factors"][module] == pytest.approx(factor, rel=1e-6)
                assert np.allclose(found["values"][name], wanted, rtol=1e-6, atol=1e-6)  # rounded to float32
    assert [results[rank]["values"] for rank in (0, 1)] == [results[rank]["values"] for rank in (2, 3)]


def test_a_part_that_is_not_finite_leaves_out_the_replica_on_all_its_ranks():
    for found in gang(_synchronised, 4, (2,)):
        assert found["weights"]["both"] == (1.0, 0.0)
        assert np.isfinite(found["values"]["both.weight"]).all()


def test_if_no_replica_is_finite_the_module_goes_back_on_all_ranks():
    for rank, found in enumerate(gang(_synchronised, 4, (1, 2))):
        assert found["weights"]["both"] == (0.0, 0.0)
        assert found["values"]["both.weight"] == pytest.approx(anchor(rank % 2, "both.weight").tolist())


def test_a_parameter_with_gaps_in_memory_is_named():
    live = {"first.weight": torch.zeros(4, 2)[:, 0]}
    inventory = Inventory.of(0, (Item("first.weight", "float32", (4,), 16, Role.PARAMETER, (0,)),))
    plan, links = plan_groups(((0,),), [["first"]]).of(0), Links(0, {}, None, torch.device("cpu"))
    modules = plan_modules(inventory, MODULES, BUCKET_BYTES)
    with pytest.raises(InventoryError, match="item 'first.weight' has gaps in memory"):
        Synchronisation(modules, plan, links, links, lambda: live, SynchronisationRules(OuterRules(), None))


def _with_anchors_elsewhere(rank, world, elsewhere, bad):
    """Two synchronisations; if `elsewhere`, anchors and momentum are fetched as from another memory."""
    one, live, order = built(rank, world, OuterRules(0.8, 0.85))
    fetched = []
    peak = 0

    def on_device():
        return sum(tensor.nbytes for each in fetched if (tensor := each()) is not None)

    def fetch(tensor, device):
        nonlocal peak
        copy = tensor.clone() if elsewhere else tensor
        fetched.extend([weakref.ref(copy)] if elsewhere else [])
        peak = max(peak, on_device())
        return copy

    between = []
    with mock.patch.object(synchronisation, "_on_device", fetch):
        for these in ((), bad):
            train(rank, live, these)
            one.begin()
            for name in order:
                one.exchange(name)
            targets = sum(value.nbytes for values in one._targets.values() for value in values)
            between.append((targets, on_device()))
            for name in order:
                one.apply(name)
    states = [(state.anchors, state.momentum) for state in one.states.values()]
    tensors = [live, *(each for pair in states for each in pair)]
    return {
        "tensors": [{name: tensor.tolist() for name, tensor in each.items()} for each in tensors],
        "peak": peak,
        "between": between,
        "nbytes": sum(tensor.nbytes for tensor in live.values()),
    }


@pytest.mark.parametrize("bad", [(), (1, 2)])
def test_anchors_in_host_memory_are_on_the_device_one_bucket_at_a_time(bad):
    """Between exchange and apply the device holds the results of the exchange alone; `bad`: a module goes back."""
    here, elsewhere = (gang(_with_anchors_elsewhere, 4, each, bad) for each in (False, True))
    for one, other in zip(here, elsewhere, strict=True):
        assert other["tensors"] == one["tensors"]
        assert other["peak"] == 2 * BUCKET_BYTES, "anchors and momentum of a bucket"
        (first, held), (_, still) = other["between"]
        assert (first, held, still) == (other["nbytes"], 0, 0)
