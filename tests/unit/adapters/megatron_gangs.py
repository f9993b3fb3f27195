"""Jobs of several gloo ranks for the stories about reductions of a Megatron job.

In: flags of the example, and what a gang's function receives. Out: `GangJob`, whose gradients before any reduction can
be computed, and references for what a reduction makes of them.
"""

import functools
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import gpt_job
import megatron_gpt
import torch
import torch.distributed as dist
from gpt_job import Job
from megatron.core import parallel_state
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from ft_plugins.adapters.megatron.replay import restore_rng, rng_state
from ft_plugins.config import launch_context

torch.set_num_threads(1)  # before a fork
SMALL = ["--hidden", "16", "--heads", "2", "--sequence", "16", "--micro-batch", "1", "--warmup", "1"]
OVERLAPPED = ["--overlap-grad-reduce", "--bucket-size", "1500"]  # several buckets
BF16 = ["--bf16", "--loss-scale", "4"]
INTERLEAVED = ["--pp", "2", "--virtual-stages", "2", "--layers", "4"]
SHARDED = ["--distributed-optimizer", "--num-distributed-optimizer-instances"]


class GangJob(Job):
    """One rank's job; four micro-batches a replica and two layers, if `flags` do not say otherwise."""

    def __init__(self, rank, world, *flags):
        words = [*SMALL, *("" if "--layers" in flags else "--layers 2").split(), *flags]
        if "--global-batch" not in flags:
            words += ["--global-batch", "8"]
        super().__init__(megatron_gpt.parse(words), replace(launch_context(), rank=rank, world_size=world))

    def _forward_step(self, samplers, chunk):
        """With per-token loss, only the first tokens of a sample count: on each replica another number of them."""
        output, loss = super()._forward_step(samplers, chunk)
        if not self.config.calculate_per_token_loss:
            return output, loss
        used = self.tokens

        def loss_of_tokens(output):
            total = output.float()[:, :used].sum()
            return total, torch.tensor(used, dtype=torch.int), {"lm loss": total.detach().clone()}

        return output, loss_of_tokens

    @property
    def tokens(self):
        """The tokens of a micro-batch with per-token loss."""
        return 3 + 2 * int(parallel_state.get_data_parallel_rank())

    def bucket_groups(self):
        for chunk in self.chunks:
            yield from [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]

    def zero(self):
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def gradients(self):
        """A copy of this rank's whole gradients, by chunk and parameter."""
        return {
            f"chunk{index}.{name.removeprefix('module.').removeprefix('module.')}": parameter.main_grad.clone()
            for index, chunk in enumerate(self.chunks)
            for name, parameter in chunk.named_parameters()
        }

    def reduced(self):
        """Compute the gradients of the next batch as the job does, without an update."""
        self.zero()
        self.forward_backward(self.train)
        return self.gradients()

    def own(self):
        """The gradients that `reduced` is going to reduce: neither the buckets nor `finalize_model_grads` do anything.
        Data, random numbers and gradients are left as they are."""
        positions, generators = [one and one.position for one in self.train], rng_state()
        groups, finalize = list(self.bucket_groups()), self.config.finalize_model_grads_func
        for group in groups:
            group.register_grad_ready = lambda *args, **kwargs: None
        self.config.finalize_model_grads_func = None
        found = self.reduced()
        for group in groups:
            del group.register_grad_ready
        self.config.finalize_model_grads_func = finalize
        self.zero()
        restore_rng(generators)
        for sampler, position in zip(self.train, positions, strict=True):
            if sampler is not None:
                sampler.position = position
        return found

    def tied(self, gradients):
        """`gradients` with those of an embedding that two stages hold summed over both."""
        found = dict(gradients)
        for name in found:
            if parallel_state.get_pipeline_model_parallel_world_size() > 1 and name.endswith(
                ("word_embeddings.weight", "output_layer.weight")
            ):
                dist.all_reduce(found[name], group=parallel_state.get_embedding_group())
        return found


@contextmanager
def gang_job(rank, world, *flags, ddp=None, gpt=None, **config):
    """A job, closed afterwards. `ddp`, `gpt`, `config`: more of its DDP configuration, model and TransformerConfig."""
    kinds = ("TransformerConfig", config), ("DistributedDataParallelConfig", ddp or {}), ("GPTModel", gpt or {})
    originals = {name: getattr(gpt_job, name) for name, _ in kinds}
    for name, more in kinds:
        setattr(gpt_job, name, functools.partial(_made, originals[name], more))
    try:
        job = GangJob(rank, world, *flags)
    finally:
        for name, original in originals.items():
            setattr(gpt_job, name, original)
    yield job
    job.close()


@contextmanager
def norms_over_sequences():
    """torch's LayerNorm, also with sequence parallelism: marked as that of apex and Transformer Engine is, so that its
    gradients are summed over the tensor-parallel ranks."""

    def new(kind, config, hidden_size, eps=1e-5, **more):
        norm = torch.nn.LayerNorm(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    with patch.object(WrappedTorchNorm, "__new__", new):
        yield


def refused(kind, call):
    """The message with which `call` is refused."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")


def large(story):
    """Mark a story that runs with `--all` only."""
    return story


def _made(kind, more, *args, **kwargs):
    return kind(*args, **{**kwargs, **more})


def sum_over(gradients, group, scale=1.0):
    """The sum over the ranks of `group` (two, whose sum has one order only), scaled before, as Megatron does."""
    found = {name: gradient * scale for name, gradient in gradients.items()}
    for gradient in found.values():
        dist.all_reduce(gradient, group=group)
    return found


def shards(host, whole):
    """The part of `whole`, by parameter, that each item of `gradients` has."""
    items = {item.name: item for item in host.inventory().items}
    found = {}
    for name in host.gradients():
        start, stop, _ = items[name].piece or (0, None, 0)
        gradient = whole[name.removesuffix(":main")]
        found[name] = gradient.view(-1)[start:stop] if items[name].piece else gradient
    return found


def differing(left, right):
    """The names whose tensors are not equal bit for bit."""
    assert left.keys() == right.keys(), (sorted(left), sorted(right))
    return [name for name in left if not torch.equal(left[name], right[name])]
