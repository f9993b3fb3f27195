"""Shards of main parameters, of which each exists once, and the gathered copies that every rank computes with."""

import pytest
import torch
import torch.distributed as dist

from ft_plugins.base import faults
from ft_plugins.config import PaftConfig
from ft_plugins.errors import ConfigError, UnsupportedError
from ft_plugins.events import Events
from ft_plugins.model.inventory import Inventory, Item, Role
from ft_plugins.snapshot.segment.slots import Mark
from ft_plugins.systems.paft import Paft

from . import replicas

AUDIT = {"mode": "audit", "audit_interval": 1}
FLIP = "update.copies@iteration=4,rank=1:flip=12~5"


class Sharding(replicas.Training):
    """Each rank's optimizer holds its part of the parameters in fp32; bf16 copies of all are gathered from there."""

    def __init__(self, rank, world, recomputes=True):
        super().__init__(rank, world, optimizer="sgd", rate=0.1, recomputes=recomputes)
        whole = torch.cat([parameter.detach().view(-1) for parameter in self.named.values()])
        self.elements = len(whole) // world * world
        whole = whole[: self.elements]
        self.main = whole.chunk(world)[rank].clone()
        self.derived = 0
        self.model.bfloat16()
        self.tensors = {"flat:main": self.main}
        host, piece = self.host, (rank * len(self.main), (rank + 1) * len(self.main), self.elements)
        nbytes = self.main.numel() * 4
        shard = Item(
            "flat:main", "float32", tuple(self.main.shape), nbytes, Role.MAIN_PARAMETER, (rank,), piece=piece
        )  # fmt: skip
        host._tensors = self.tensors
        host.inventory = lambda: Inventory.of(rank, (shard,))
        host.copies = lambda: Inventory.of(rank, map(self._copy, self.named))
        host.copy_tensors = lambda: self.named
        host.derive = self.derive
        self.optimizer.step = self._step
        self.derive()

    def _copy(self, name):
        tensor, layer = self.named[name], int(name.split(".")[0])
        everyone = tuple(range(self.world))
        return Item(name, "bfloat16", tuple(tensor.shape), tensor.numel() * 2, Role.COPY, everyone, layer)

    @torch.no_grad()
    def derive(self):
        self.derived += 1
        found = [torch.empty_like(self.main) for _ in range(self.world)]
        dist.all_gather(found, self.main)
        flat, at = torch.cat(found), 0
        for parameter in self.named.values():
            part = flat[at : at + parameter.numel()]
            parameter.view(-1)[: len(part)].copy_(part)
            at += parameter.numel()

    @torch.no_grad()
    def _step(self):
        gradient = torch.cat([parameter.grad.view(-1).float() for parameter in self.named.values()])
        self.main -= 0.1 * gradient[: self.elements].chunk(self.world)[self.rank]
        self.derive()

    def backward(self, step):
        torch.manual_seed(1000 * step + self.rank)
        x, y = torch.randn(16, replicas.LAYERS[0]), torch.randn(16, replicas.LAYERS[-1])
        self.model.zero_grad()
        torch.nn.functional.mse_loss(self.model(x.bfloat16()).float(), y).backward()
        self._reduce(None, self.world)

    def digest(self):
        """Of the shard, and of the copies."""
        return super().digest(), self.parameters()


def _run(rank, world, block, armed="", recomputes=True):
    faults.arm(armed, rank=rank)
    training = Sharding(rank, world, recomputes)
    watched = replicas.Watched(training, None if block is None else PaftConfig(**block)).run(7)
    told = watched.paft.table() if watched.paft else ""
    mark = watched.paft.mark(7) if watched.paft else None
    return {**watched.end(), "derived": training.derived, "told": told, "mark": mark}


@pytest.mark.parametrize("world, chosen", [(2, "repair"), (3, "repair"), (2, "rollback")])
def test_a_wrong_copy_is_named_and_gathered_anew_and_the_run_is_bit_identical_to_a_clean_one(ranks, world, chosen):
    """Of two as well: what it is made of is not in doubt. There is nothing to go back for."""
    clean = ranks(_run, world, None)
    found = ranks(_run, world, {**AUDIT, "on_corruption": chosen}, FLIP)
    for step in range(1, 8):
        differing = [r for r in range(world) if found[r]["versions"][step] != clean[r]["versions"][step]]
        assert differing == ([1] if step == 4 else []), step
    struck = found[1]["events"]["fault.injected"][0]
    (event,) = found[0]["events"]["audit.failed"]
    assert event["iteration"] == 4 and event["ranks"] == ([1] if world == 3 else [0, 1])
    assert event["layers"] == [int(struck["item"].split(".")[0])] and ", copy (" in event["reason"]
    assert all(one["recomputed"] == [5] for one in found)
    assert all(one["derived"] == other["derived"] + 1 for one, other in zip(found, clean, strict=True))
    assert all(one["mark"] is Mark.UNAUDITED for one in found)
    assert "rebuilt from optimizer state, without a majority" in found[0]["told"] and "averaged" not in found[0]["told"]
    assert "1 tensors held by a single rank are not compared" in found[0]["told"]


def test_with_the_verdict_before_the_forward_nothing_need_be_computed_again(ranks):
    clean = ranks(_run, 2, None)
    found = ranks(_run, 2, {**AUDIT, "audit_at": "forward"}, FLIP, False)
    assert [one["versions"][7] for one in found] == [one["versions"][7] for one in clean]
    assert "gradients cannot be computed again: the host was built without `recompute`" in found[0]["told"]


def _voided(rank, world):
    """What snapshots are told after each update fence."""
    faults.arm(FLIP, rank=rank)
    watched = replicas.Watched(Sharding(rank, world), PaftConfig(**AUDIT))
    found = [watched.run(step).paft.tainted() for step in range(1, 8)]
    watched.end()
    return found


def test_snapshots_of_the_state_are_worth_what_they_were(ranks):
    assert ranks(_voided, 2) == [[None] * 7] * 2


def test_an_error_in_an_owned_shard_is_in_all_copies_alike_and_the_audit_says_beforehand_that_it_sees_none(ranks):
    found = ranks(_run, 2, AUDIT, "update.gradients@iteration=4,rank=1:gauss=0.01")
    clean = ranks(_run, 2, None)
    assert all("audit.failed" not in one["events"] for one in found)
    assert found[0]["versions"][7][1] == found[1]["versions"][7][1] != clean[0]["versions"][7][1]
    assert "an error in one reaches all replicas in the same way" in found[0]["told"]


def _refused(rank, world, block, armed):
    faults.arm(armed, rank=rank)
    try:
        Paft(Sharding(rank, world).host, PaftConfig(**block), Events())
    except (ConfigError, UnsupportedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_shards_are_not_averaged_and_what_can_be_done_instead_is_said(ranks):
    for mode in ({"mode": "dyn"}, {"mode": "sync"}, {"mode": "dyn", "audit_interval": 1}):
        for error in ranks(_refused, 2, mode, ""):
            assert error.startswith("UnsupportedError") and "it cannot diverge" in error
            assert "--paft-mode audit" in error


def test_a_fault_that_could_never_strike_is_refused_by_name(ranks):
    for error in ranks(_refused, 2, AUDIT, "reduce.gradients:nan"):
        assert "a plain torch loop reduces its gradients by itself" in error
    host = replicas.Training(0, 2).host
    faults.arm("update.copies:nan")
    with pytest.raises(ConfigError, match="update.copies: torch .* computes with the parameters themselves"):
        Paft(host, PaftConfig(), Events())
