"""Stories about gradients that stay inside a replica of a Megatron job, on several gloo ranks; see `gang_stories`."""

from types import SimpleNamespace

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron_gangs import BF16, INTERLEAVED, OVERLAPPED, SHARDED, differing, gang_job, large, shards, sum_over
from torch.distributed import get_process_group_ranks

from ft_plugins.base import faults
from ft_plugins.model.digest import state_digest
from ft_plugins.model.reduction import ReducedOver, ReductionControl
from ft_plugins.model.timeline import Kind
from harness.gang import gang

ALL, LOCAL = ReducedOver.ALL, ReducedOver.LOCAL


def _objects(job):
    """What `reduce_over` replaces."""
    names = ("data_parallel_group", "inter_distributed_optimizer_instance_group")
    return [
        (*(getattr(group, name, None) for name in names), *(one.gradient_scaling_factor for one in group.buckets))
        for group in job.bucket_groups()
    ]


def _same(left, right):
    """Whether groups are the same objects, and factors equal."""
    pairs = [pair for one in zip(left, right, strict=True) for pair in zip(*one, strict=True)]
    return all(a == b if isinstance(a, float) else a is b for a, b in pairs)


# ---- replicas of one rank or of several stages


def _keeps_them_local(rank, world, variants, ddp=None):
    """Warm-up, two local iterations, warm-up again; no update, so that an ordinary job has the same parameters."""
    for flags in variants:
        with gang_job(rank, world, *flags, ddp=ddp) as job:
            ordinary = [job.reduced() for _ in range(4)]
        with gang_job(rank, world, *flags, ddp=ddp) as job:
            host = job.host()
            assert isinstance(host, ReductionControl)
            original = _objects(job)
            host.prepare_reduction()
            assert host.shard_group() == (rank,)
            for number, over in enumerate((ALL, LOCAL, LOCAL, ALL)):
                host.reduce_over(over)
                host.reduce_over(over)
                own = job.tied(job.own())
                found = job.reduced()
                wanted = ordinary[number] if over is ALL else own
                assert differing(found, wanted) == [], (flags, number)
                assert len(differing(found, own if over is ALL else ordinary[number])) > len(own) // 2, (
                    "replicas differ"
                )
            assert _same(original, _objects(job))


def it_keeps_gradients_of_two_replicas_local_and_reduces_them_again():
    gang(_keeps_them_local, 2, [[], OVERLAPPED, ["--bf16", *OVERLAPPED]], seconds=100.0)
    gang(_keeps_them_local, 2, [["--bf16", *OVERLAPPED]], {"grad_reduce_in_fp32": False}, seconds=60.0)


@large
def it_keeps_gradients_of_every_chunk_local_and_those_of_a_tied_embedding_equal():
    gang(_keeps_them_local, 4, [INTERLEAVED, [*INTERLEAVED, *OVERLAPPED]], seconds=100.0)


@large
def it_keeps_gradients_of_four_replicas_local():
    gang(_keeps_them_local, 4, [[], OVERLAPPED, BF16, ["--tp", "2"], ["--pp", "2"]], seconds=200.0)


# ---- an instance of the distributed optimizer


def _averages_over_an_instance(rank, world, variants):
    for flags in variants:
        with gang_job(rank, world, *flags) as job:
            host = job.host()
            original = _objects(job)
            host.prepare_reduction()
            within = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
            between = parallel_state.get_inter_distributed_optimizer_instance_group()
            assert host.shard_group() == tuple(sorted(get_process_group_ranks(within)))
            for number, over in enumerate((ALL, LOCAL, LOCAL, ALL)):
                host.reduce_over(over)
                own = job.own()
                local = sum_over(own, within, 1 / len(host.shard_group()))
                both = sum_over(sum_over(own, within, 1 / job.dp), between)
                job.reduced()
                wanted, other = (both, local) if over is ALL else (local, both)
                assert differing(host.gradients(), shards(host, job.tied(wanted))) == [], (flags, number)
                assert differing(host.gradients(), shards(host, job.tied(other))), "instances differ"
            assert _same(original, _objects(job))


@large
def it_averages_over_an_instance_only():
    both = [*SHARDED, "2"]
    variants = [both, ["--bf16", *both, *OVERLAPPED], ["--bf16", *both, *OVERLAPPED, "--overlap-param-gather"]]
    gang(_averages_over_an_instance, 4, variants, seconds=100.0)


@large
def it_averages_over_an_instance_of_every_chunk():
    flags = [*INTERLEAVED, "--bf16", *SHARDED, "2"]
    variants = [flags, [*flags, *OVERLAPPED], [*flags, *OVERLAPPED, "--overlap-param-gather"]]
    gang(_averages_over_an_instance, 8, variants, seconds=250.0)


# ---- other ways to average


def _averages_in_the_collective(rank, world):
    for flags in ([], [*SHARDED, "2"]):
        with gang_job(rank, world, *flags, ddp={"average_in_collective": True}) as job:
            host = job.host()
            host.prepare_reduction()
            within = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
            host.reduce_over(LOCAL)
            own = job.own()
            job.reduced()
            local = sum_over(own, within, 0.5) if flags else own
            assert differing(host.gradients(), shards(host, local)) == [], flags


def it_keeps_averages_that_the_collective_makes():
    """The collective halves the sum of two; so does the reference, before it: exact either way."""
    gang(_averages_in_the_collective, 4, seconds=60.0)


class _Reductions:
    """Edges that count the spans of reductions."""

    def __init__(self):
        self.count = 0

    def begin(self, kind, microbatch=-1, chunk=0):
        self.count += kind is Kind.REDUCE

    def end(self, kind, microbatch=-1, chunk=0): ...


def _divides_by_its_own_tokens(rank, world, flags):
    with gang_job(rank, world, *flags, calculate_per_token_loss=True) as job:
        owns = [(job.own(), job.reduced())[0] for _ in range(4)]
    with gang_job(rank, world, *flags, calculate_per_token_loss=True) as job:
        host, edges = job.host(), _Reductions()
        host.install_edges(edges)
        host.prepare_reduction()
        distributed = "--distributed-optimizer" in flags
        group = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=distributed)
        tokens = [(3 + 2 * one) * 8 // job.dp for one in range(job.dp)]  # of each data-parallel rank
        for number, over in enumerate((LOCAL, ALL, LOCAL, LOCAL)):
            host.reduce_over(over)
            if number in (0, 3):
                job.config.finalize_model_grads_func = finalize_model_grads  # as Megatron-LM does when it begins
            own, edges.count = owns[number], 0
            job.reduced()
            assert edges.count == 1, "one span, however often the function was wrapped"
            counted = [host.topology().coords(one).dp for one in host.shard_group()] if over is LOCAL else range(job.dp)
            wanted = sum_over(own, group) if over is ALL or distributed else own
            if over is ALL and distributed:
                wanted = sum_over(wanted, parallel_state.get_inter_distributed_optimizer_instance_group())
            scale = 1.0 / torch.tensor(sum(tokens[one] for one in counted))
            found = shards(host, {name: one * scale for name, one in job.tied(wanted).items()})
            assert differing(host.gradients(), found) == [], (flags, number)


def it_divides_by_the_tokens_of_the_replica():
    gang(_divides_by_its_own_tokens, 2, [], seconds=60.0)
    gang(_divides_by_its_own_tokens, 4, ["--bf16", *OVERLAPPED, *SHARDED, "2"], seconds=60.0)
    gang(_divides_by_its_own_tokens, 4, ["--pp", "2"], seconds=60.0)


# ---- a replica on its own is a job of its own


def _trains(job, replica, replicas, local):
    """Four iterations, the third with an infinite gradient on the first replica's first rank; then the whole state."""
    for sampler in filter(None, job.train):
        sampler._replica, sampler._replicas = replica, replicas
    host = job.host()
    if local:
        host.prepare_reduction()
        host.reduce_over(LOCAL)
    host.install(SimpleNamespace(before_update=lambda step: None, after_update=lambda step: None))
    if replica == 0 and parallel_state.get_pipeline_model_parallel_rank() == 0:
        faults.arm("update.begin@iteration=3:inf")
    norms = []
    for _ in range(4):
        outcome = job.train_step(skip=lambda: None)
        norms.append(outcome["grad_norm"])
    faults.arm("")
    skipped, digest = job.skipped_updates, state_digest(host)
    with job.gathered():
        parameters = [parameter.detach().clone() for chunk in job.chunks for parameter in chunk.parameters()]
    digest["small"].pop("counters"), digest["small"].pop("position"), digest["small"].pop("scheduler")
    return norms, skipped, digest, [float(one.double().sum()) for one in parameters]


def _as_replicas(rank, world, flags):
    with gang_job(rank, world, *flags, "--global-batch", "8") as job:
        return _trains(job, parallel_state.get_data_parallel_rank(), job.dp, True)


def _as_one(rank, world, flags, first, replicas):
    with gang_job(
        rank, world, *flags, "--global-batch", str(8 // replicas * (world if "--pp" not in flags else 1))
    ) as job:
        return _trains(job, first + parallel_state.get_data_parallel_rank(), replicas, False)


def _require_jobs_of_their_own(flags, world, alone, stages, instance):
    """Ranks of one replica: `stages` x `instance`, with the default order dp, then pp."""
    together = gang(_as_replicas, world, flags, seconds=60.0)
    dp = world // stages
    for first in range(0, dp, instance):
        own = gang(_as_one, stages * instance, alone, first, dp, seconds=60.0)
        for stage in range(stages):
            for member in range(instance):
                found, wanted = together[stage * dp + first + member], own[stage * instance + member]
                assert found[:2] == wanted[:2], (first, stage, member)
                assert found == wanted, (first, stage, member)
    assert {one[1] for one in together} == {0, 1}, "one replica skipped an update, alone"
    assert len({tuple(map(str, one[0])) for one in together}) == dp // instance, "each replica has its own norm"


@large
def it_trains_a_replica_exactly_as_a_job_of_its_own():
    """Scaling, clipping, the agreement on infinities, the loss scale: all inside the replica."""
    _require_jobs_of_their_own([*BF16, *OVERLAPPED], 2, [*BF16, *OVERLAPPED], 1, 1)


@large
def it_trains_an_instance_exactly_as_a_job_of_its_own():
    flags = [*BF16, *OVERLAPPED, "--overlap-param-gather"]
    _require_jobs_of_their_own([*flags, *SHARDED, "2"], 4, [*flags, *SHARDED, "1"], 1, 2)


@large
def it_trains_the_stages_of_a_replica_exactly_as_a_job_of_its_own():
    for flags in (["--pp", "2", *BF16], [*INTERLEAVED, *BF16, *OVERLAPPED]):
        _require_jobs_of_their_own(flags, 4, flags, 2, 1)
