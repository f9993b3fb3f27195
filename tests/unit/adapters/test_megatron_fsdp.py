"""What the Megatron host knows of parameters that FSDP divides, with stand-ins for their tensors."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

from ft_plugins.adapters.megatron import core, export, fsdp
from ft_plugins.adapters.megatron.rank import MegatronRank
from ft_plugins.errors import ResumeError, UnsupportedError


def shard_of(whole, ranks, rank, dimension=0):
    """As `fully_shard` divides a parameter: in equally many rows, except for the last ranks."""
    parts = whole.chunk(ranks, dimension)
    local = parts[rank] if rank < len(parts) else whole.narrow(dimension, 0, 0)
    mesh = SimpleNamespace(size=lambda: ranks, get_local_rank=lambda: rank)
    return SimpleNamespace(shape=whole.shape, placements=(Shard(dimension),), device_mesh=mesh, _local_tensor=local)


@given(rows=st.integers(1, 9), width=st.integers(1, 3), ranks=st.integers(1, 5))
def test_the_pieces_of_all_ranks_are_the_flattened_parameter(rows, width, ranks):
    whole = torch.arange(rows * width).view(rows, width)
    for rank in range(ranks):
        parameter = shard_of(whole, ranks, rank)
        assert fsdp.is_shard(parameter)
        start, stop, total = fsdp.piece(parameter) or (0, 0, 0)
        assert total == rows * width and whole.flatten()[start:stop].equal(parameter._local_tensor.flatten())


def test_a_shard_has_no_replica_also_if_it_is_frozen():
    rank = SimpleNamespace(rank=3)
    assert MegatronRank._replicas(rank, shard_of(torch.ones(4, 4), 2, 1)) == (3,)


def test_what_is_divided_by_columns_is_no_piece():
    assert fsdp.piece(shard_of(torch.ones(4, 4), 2, 1, dimension=1)) is None


def test_megatrons_own_shards_say_which_elements_they_are():
    parameter = SimpleNamespace(megatron_fsdp_slice=slice(3, 9), orig_param=torch.ones(4, 5))
    assert fsdp.piece(parameter) == (3, 9, 20)


def test_parameters_of_megatron_fsdp_are_those_that_the_optimizer_updates():
    model, shard = torch.nn.Linear(2, 2), torch.nn.Parameter(torch.ones(1))
    assert [name for name, _ in fsdp.named_parameters(model)] == ["weight", "bias"]
    model.ddp_config = SimpleNamespace(use_megatron_fsdp=True)
    with pytest.raises(UnsupportedError, match="--use-megatron-fsdp"):
        list(fsdp.named_parameters(model))
    model.param_and_grad_buffer = SimpleNamespace(optimizer_named_parameters=[("w", shard)])
    assert list(fsdp.named_parameters(model)) == [("w", shard)]


def test_a_bias_that_the_first_forward_converts_is_converted_before_it_is_listed():
    class Router(torch.nn.Module):
        def _maintain_float32_expert_bias(self):
            self.bias = self.bias.float()

    router = Router()
    router.bias = torch.ones(2, dtype=torch.bfloat16)
    assert "FSDP" in fsdp.without_names([torch.nn.Sequential(router)])["problem"]
    assert router.bias.dtype == torch.float32


@pytest.mark.parametrize("divided", [True, False])
def test_a_job_whose_parameters_are_divided_keeps_its_number_of_ranks(monkeypatch, divided):
    host = object.__new__(core.MegatronCoreHost)
    vars(host).update(rank=1, chunks=(), optimizers=(), _topology=SimpleNamespace(dp=2, cp=1), _instances=1)
    monkeypatch.setattr(core.MegatronCoreHost, "sharded", divided)
    monkeypatch.setattr(core, "get_current_global_batch_size", lambda: None)
    assert host.admits(2) and host.admits(4) is not divided
    parts = [{"scalars": {}}]
    if not divided:
        assert host.merged(parts) == parts[0]
        return
    with pytest.raises(ResumeError, match="rank 1: with parameters that FSDP divides the number of ranks"):
        host.merged(parts)


def test_a_checkpoint_of_divided_parameters_is_not_exported():
    names = fsdp.without_names([torch.nn.Linear(1, 1)])
    shares = SimpleNamespace(folder="saved", indices=lambda: [SimpleNamespace(rank=0, names=names)])
    with pytest.raises(UnsupportedError, match="saved: cannot be exported, because rank 0 .*FSDP"):
        list(export._described(shares))
