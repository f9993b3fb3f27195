"""Stories about several instances of the distributed optimizer, and which jobs cannot keep gradients local."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron_gangs import BF16, OVERLAPPED, SHARDED, gang_job, refused, shards

from ft_plugins.adapters.megatron.core import MegatronCoreHost
from ft_plugins.adapters.megatron.rank import instance_of, same_shard
from ft_plugins.adapters.megatron.reducing import ReplicaPlacement, local_factor, unsuitable
from ft_plugins.errors import TopologyError, UnsupportedError
from ft_plugins.model.digest import state_digest
from ft_plugins.model.inventory import Role
from ft_plugins.model.reduction import ReducedOver
from ft_plugins.model.topology import Topology
from ft_plugins.snapshot.capture import codec
from harness.gang import gang

ALL, LOCAL = ReducedOver.ALL, ReducedOver.LOCAL

# ---- items, gathers


def _holds_shards_in_all_instances(rank, world, variants, number):
    size = world // number
    for flags in variants:
        flags = [*flags, *SHARDED, str(number)]
        with gang_job(rank, world, *flags) as job:
            host = job.host()
            for _ in range(2):
                job.train_step(skip=lambda: None)
            same = tuple(range(rank % size, world, size))
            digest = state_digest(host)["items"]
            digests = [None] * world
            dist.all_gather_object(digests, digest)
            sharded = [one for one in host.inventory().items if one.role is not Role.BUFFER]
            assert sharded and {one.replicas for one in sharded} == {same} and all(one.piece for one in sharded)
            assert all(digests[other] == digest for other in same)
            assert size == 1 or any(digests[other] != digest for other in range(world))
            assert host.fingerprint()["parallel"]["optimizer_instances"] == number
            assert [host.admits(one) for one in (1, 2, 4)] == [one % number == 0 for one in (1, 2, 4)]
            _gathers_inside_an_instance(job, size)
            _refuses_to_compare(job)


def _gathers_inside_an_instance(job, size):
    """Masters of the first instance change; so do its parameters and no others'."""
    host = job.host()
    with job.gathered(), torch.no_grad():
        before = [parameter.clone() for chunk in job.chunks for parameter in chunk.parameters()]
        for name, tensor in host.tensors().items():
            if ":exp" not in name and host.rank < size:
                tensor.mul_(2.0)
        host.derive()
        after = [parameter for chunk in job.chunks for parameter in chunk.parameters()]
        factor = 2.0 if host.rank < size else 1.0
        assert all(torch.equal(old * factor, new) for old, new in zip(before, after, strict=True))


def _refuses_to_compare(job):
    host = job.host()
    for operation in (host.copies, host.keep_iterations):
        message = refused(UnsupportedError, operation)
        assert "--paft" in message and "--num-distributed-optimizer-instances" in message, message


def it_holds_each_shard_in_all_instances_and_gathers_inside_one():
    variants = [["--bf16"], [], ["--bf16", *OVERLAPPED, "--overlap-param-gather"]]
    gang(_holds_shards_in_all_instances, 4, variants, 2, seconds=100.0)
    gang(_holds_shards_in_all_instances, 4, [["--bf16"]], 4, seconds=60.0)


def _continues(rank, world):
    flags = [*BF16, *SHARDED, "2"]
    with gang_job(rank, world, *flags) as job:
        host = job.host()
        for _ in range(2):
            job.train_step(skip=lambda: None)
        tensors = {name: tensor.detach().clone() for name, tensor in host.tensors().items()}
        small = codec.decode(codec.encode(host.small_state()))
        for _ in range(2):
            job.train_step(skip=lambda: None)
        expected = state_digest(host)
    with gang_job(rank, world, *flags) as job:
        host = job.host()
        host.allocate(())
        with torch.no_grad():
            for parameter in job.chunks[0].parameters():
                parameter.fill_(float("nan"))
            for name, tensor in host.tensors().items():
                tensor.copy_(tensors[name])
        host.restore(small)
        host.restore_position(small)
        for _ in range(2):
            job.train_step(skip=lambda: None)
        assert state_digest(host) == expected


def it_continues_bit_for_bit_with_instances():
    gang(_continues, 4, seconds=60.0)


# ---- experts


class _WithExpert(MegatronModule):
    """A dense layer, and one that Megatron takes for an expert."""

    def __init__(self, config):
        super().__init__(config)
        self.dense, self.expert = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        for parameter in self.expert.parameters():
            parameter.allreduce = False

    def forward(self, x):
        return self.expert(torch.tanh(self.dense(x)))


def _reduces_experts(rank, world, distributed, average):
    count = 2 if distributed else 1
    parallel_state.initialize_model_parallel(
        1, 1, expert_model_parallel_size=2, num_distributed_optimizer_instances=count, create_gloo_process_groups=False
    )
    config = TransformerConfig(
        num_layers=1, hidden_size=4, num_attention_heads=1, num_moe_experts=2, expert_model_parallel_size=2
    )
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed, num_distributed_optimizer_instances=count, average_in_collective=average
    )
    torch.manual_seed(0)
    chunk = DistributedDataParallel(config, ddp, _WithExpert(config))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=0.1, use_distributed_optimizer=distributed), [chunk],
        use_gloo_process_groups=False,
    )  # fmt: skip
    host = MegatronCoreHost(
        [chunk], optimizer, None, topology=Topology(1, 1, 4, ep=2), completed=lambda: 0, counters={}, position={},
        identity={},
    )  # fmt: skip
    if not distributed:
        message = refused(UnsupportedError, host.prepare_reduction)
        assert "--expert-model-parallel-size" in message and f"rank {rank}" in message, message
        return
    host.prepare_reduction()
    for over in (ALL, LOCAL):
        host.reduce_over(over)
        torch.manual_seed(10 + rank)
        x = torch.randn(3, 4)
        names, parameters = zip(*chunk.module.named_parameters(), strict=True)
        own = torch.autograd.grad(_WithExpert.forward(chunk.module, x).square().mean(), parameters)
        chunk.zero_grad_buffer()
        chunk(x).square().mean().backward()
        chunk.finish_grad_sync()
        wanted = {}
        for name, gradient in zip(names, own, strict=True):
            expert = name.startswith("expert")
            ranks = (
                ({rank} if expert else {rank, rank ^ 1})
                if over is LOCAL
                else ({rank, rank ^ 2} if expert else {0, 1, 2, 3})
            )
            parts = [torch.empty_like(gradient) for _ in range(world)]
            dist.all_gather(parts, gradient)
            wanted[f"chunk0.{name}"] = sum(parts[one] for one in ranks) / (2 if over is LOCAL else 4)
        found, expected = host.gradients(), shards(host, wanted)
        assert any("expert" in name for name in found) and any("dense" in name for name in found)
        for name, gradient in found.items():  # rounding only: sums of up to four in another order
            torch.testing.assert_close(gradient, expected[name], rtol=1e-6, atol=1e-7, msg=f"{over} {name}")


def it_averages_experts_over_the_tokens_of_their_replica_or_refuses_by_name():
    for average in (False, True):
        gang(_reduces_experts, 4, True, average, seconds=60.0)
    gang(_reduces_experts, 4, False, False, seconds=60.0)


# ---- refusals


def _refuses(rank, world):
    with gang_job(rank, world, "--distributed-optimizer") as job:
        message = refused(UnsupportedError, job.host().prepare_reduction)
        assert "--num-distributed-optimizer-instances" in message and f"rank {rank}" in message, message
        assert job.host().shard_group() == (0, 1)
    with gang_job(rank, world) as job:
        host = job.host()
        assert "before prepare_reduction" in refused(UnsupportedError, lambda: host.reduce_over(LOCAL))
        job.config.moe_router_enable_expert_bias = True
        assert "--moe-router-enable-expert-bias" in refused(UnsupportedError, host.prepare_reduction)
        job.config.moe_router_enable_expert_bias = False
        (group, *_) = job.bucket_groups()
        group.buckets[0].gradient_scaling_factor = 0.25
        assert "expected 1/2" in refused(UnsupportedError, host.prepare_reduction)
        group.buckets[0].gradient_scaling_factor = 0.5
        del group.data_parallel_group
        assert "'data_parallel_group'" in refused(UnsupportedError, host.prepare_reduction)
    with gang_job(rank, world, *SHARDED, "2") as job:
        host = job.host()
        original = parallel_state.get_inter_distributed_optimizer_instance_group
        parallel_state.get_inter_distributed_optimizer_instance_group = parallel_state.get_context_parallel_group
        message = refused(TopologyError, job.host)
        parallel_state.get_inter_distributed_optimizer_instance_group = original
        assert "between instances" in message and f"[{rank}]" in message and "[0, 1]" in message, message


def it_refuses_by_name_where_replicas_cannot_train_on_their_own():
    gang(_refuses, 2, seconds=60.0)


def it_knows_which_ranks_a_replica_must_have():
    """8 ranks, two instances of 0 to 3 and 4 to 7."""
    fits = {
        "distributed": True, "replica": frozenset(range(4)), "peers": (0, 4), "expert_peers": (0, 4),
        "context": (0, 1), "experts": (0, 1, 2, 3), "agreeing": (0, 1, 2, 3),
    }  # fmt: skip

    def reasons(**other):
        return list(unsuitable(ReplicaPlacement(**{**fits, **other})))

    assert reasons() == []
    assert reasons(distributed=False) == []
    for other, words in (
        ({"context": (0, 4)}, "--context-parallel-size"),
        ({"experts": (0, 4)}, "--expert-model-parallel-size"),
        ({"expert_peers": (0, 2, 4, 6)}, "--expert-tensor-parallel-size"),
        ({"agreeing": tuple(range(8))}, "gradient norms"),
    ):
        (reason,) = reasons(**other)
        assert words in reason, reason
    assert instance_of(5, range(8), 2) == (4, 5, 6, 7)
    assert same_shard(5, (1, 3, 5, 7), 2) == (1, 5)
    assert [local_factor(1 / 49, 49, members, False) for members in (1, 7)] == [1.0, 1 / 7]
    assert local_factor(0.5, 8, 4, True) == 0.5
