"""One rank of a GPT pretraining job, built from megatron-core's parts like Megatron's training loop.

Invariant: only `host`, which shows the job to ft_plugins, knows of protection. In: parsed flags, an initialised process
group. Out: `Job` with `train_step` and `host`.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from byte_text import VOCABULARY, Sampler, Text

from ft_plugins.adapters.megatron import prepare
from ft_plugins.config import LaunchContext
from ft_plugins.model.topology import Topology

ON_CPU = prepare()  # selects the CPU if no CUDA device is visible; a job for GPUs does not need this

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.num_microbatches_calculator import (  # noqa: E402
    destroy_num_microbatches_calculator,
    get_num_microbatches,
    init_num_microbatches_calculator,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402

from ft_plugins.adapters.megatron.core import MegatronCoreHost, StateEntry  # noqa: E402


class Job:
    """One rank's model, optimizer, scheduler, data and counters, as Megatron builds them."""

    def __init__(self, args: argparse.Namespace, context: LaunchContext) -> None:
        self.args = args
        self.iteration = 0  # completed, skipped ones included
        self.consumed_samples = 0
        self.skipped_updates = 0
        self.topology = Topology(
            *(args.tp, args.pp, max(1, context.world_size // (args.tp * args.pp))),
            vpp=args.virtual_stages,
            order=args.order,
        )
        text = Text.read(args.data)
        self._text = text.fingerprint()
        train, valid = text.split(0.05, args.sequence)
        self._init_parallel(context)
        self.chunks = self._build_chunks()
        self.optimizer, self.scheduler = self._build_optimizer()
        self._connect()
        self.train, self.valid = self._samplers(train), self._samplers(valid)

    def _init_parallel(self, context: LaunchContext) -> None:
        args, virtual = self.args, self.args.virtual_stages
        parallel_state.initialize_model_parallel(
            args.tp, args.pp, virtual if virtual > 1 else None, order=args.order, create_gloo_process_groups=False,
            num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        )  # fmt: skip
        self.dp = parallel_state.get_data_parallel_world_size()
        init_num_microbatches_calculator(context.rank, None, args.global_batch, args.micro_batch, self.dp, False)
        seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)

    def _build_chunks(self) -> list[DistributedDataParallel]:
        args, interleaved = self.args, self.args.virtual_stages > 1
        dtype = torch.bfloat16 if args.bf16 else torch.float32
        self.config = TransformerConfig(
            num_layers=args.layers,
            hidden_size=args.hidden,
            num_attention_heads=args.heads,
            attention_dropout=args.dropout,
            hidden_dropout=args.dropout,
            tensor_model_parallel_size=args.tp,
            pipeline_model_parallel_size=args.pp,
            virtual_pipeline_model_parallel_size=args.virtual_stages if interleaved else None,
            sequence_parallel=args.sequence_parallel,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=args.bf16,
            overlap_p2p_comm=interleaved,
            batch_p2p_comm=not interleaved,
            deallocate_pipeline_outputs=True,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
        )
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=args.distributed_optimizer,
            num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
            overlap_grad_reduce=args.overlap_grad_reduce,
            overlap_param_gather=args.overlap_param_gather,
            grad_reduce_in_fp32=True,
            bucket_size=args.bucket_size,
        )
        chunks = []
        for index in range(args.virtual_stages):
            stage = {"ignore_virtual": False, "vp_stage": index} if interleaved else {}
            model: torch.nn.Module = GPTModel(
                self.config,
                get_gpt_layer_local_spec(),
                VOCABULARY,
                args.sequence,
                pre_process=parallel_state.is_pipeline_first_stage(**stage),
                post_process=parallel_state.is_pipeline_last_stage(**stage),
                share_embeddings_and_output_weights=True,
                vp_stage=index if interleaved else None,
            ).cuda(torch.cuda.current_device())
            if args.bf16:
                model = Float16Module(self.config, model)
            chunks.append(DistributedDataParallel(self.config, ddp, model, disable_bucketing=index > 0))
        return chunks

    def _build_optimizer(self) -> tuple[Any, OptimizerParamScheduler]:
        args = self.args
        config = OptimizerConfig(
            optimizer=args.optimizer,
            lr=args.lr,
            min_lr=args.lr / 10,
            weight_decay=0.1,
            clip_grad=1.0,
            bf16=args.bf16,
            params_dtype=self.config.params_dtype,
            loss_scale=args.loss_scale,
            use_distributed_optimizer=args.distributed_optimizer,
            overlap_param_gather=args.overlap_param_gather,
        )
        optimizer = get_megatron_optimizer(config, self.chunks, use_gloo_process_groups=False)
        batch = args.global_batch
        scheduler = OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=args.lr,
            min_lr=args.lr / 10,
            lr_warmup_steps=args.warmup * batch,
            lr_decay_steps=max(args.iterations, args.warmup + 1) * batch,
            lr_decay_style="cosine",
            start_wd=0.1,
            end_wd=0.1,
            wd_incr_steps=args.iterations * batch,
            wd_incr_style="constant",
        )
        return optimizer, scheduler

    def _connect(self) -> None:
        """Connect schedule, DDP and optimizer, like Megatron's training loop."""

        def of_chunks(name: str) -> Any:
            each = [getattr(chunk, name) for chunk in self.chunks]
            return each if len(each) > 1 else each[0]

        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads
        if self.args.overlap_grad_reduce:
            self.config.no_sync_func = of_chunks("no_sync")

    def _samplers(self, text: Text) -> list[Sampler | None]:
        """One per model chunk. Only the first and the last stage read data."""
        reads = [self._reads(index) for index in range(len(self.chunks))]
        replica = {"replica": parallel_state.get_data_parallel_rank(), "replicas": self.dp}
        sizes = {"sequence": self.args.sequence, "micro_batch": self.args.micro_batch}
        return [Sampler(text, seed=self.args.seed, **replica, **sizes) if needed else None for needed in reads]

    def _reads(self, chunk: int) -> bool:
        stage = {"ignore_virtual": False, "vp_stage": chunk} if len(self.chunks) > 1 else {}
        return bool(parallel_state.is_pipeline_first_stage(**stage) or parallel_state.is_pipeline_last_stage(**stage))

    # one iteration

    def forward_backward(self, samplers: list[Sampler | None], forward_only: bool = False) -> list[Any]:
        """Run one iteration of the schedule. Returns the losses of its micro-batches on the last stage, else none."""
        several = len(self.chunks) > 1
        return get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=samplers if several else samplers[0],
            model=self.chunks if several else self.chunks[0],
            num_microbatches=get_num_microbatches(),
            seq_length=self.args.sequence,
            micro_batch_size=self.args.micro_batch,
            forward_only=forward_only,
        )

    def _mean(self, losses: list[Any]) -> float | None:
        """The mean loss over micro-batches and replicas; None on other stages."""
        if not losses:
            return None
        mean = torch.stack([loss["lm loss"] for loss in losses]).mean()
        dist.all_reduce(mean, group=parallel_state.get_data_parallel_group())
        return float(mean) / self.dp

    def _forward_step(self, samplers: Iterator[Any] | None, chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        device = torch.cuda.current_device()
        tokens, labels = (part.cuda(device) for part in next(samplers)) if samplers else (None, None)
        positions = torch.arange(self.args.sequence, device=device).expand(self.args.micro_batch, -1)
        output = chunk(tokens, positions, self._mask(device), labels=labels)

        def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            mean = output.float().mean()
            return mean, {"lm loss": mean.detach().clone()}  # the schedule divides `mean` in place

        return output, loss

    def _mask(self, device: Any) -> torch.Tensor:
        ones = torch.ones(self.args.sequence, self.args.sequence, dtype=torch.bool, device=device)
        return torch.triu(ones, 1)[None, None]

    def train_step(self, skip: Callable[[], None]) -> dict[str, Any]:
        """Run one iteration, like Megatron's train_step and its bookkeeping. Returns the values to log."""
        current = self.iteration + 1
        outcome: dict[str, Any] = {"iteration": current, "loss": None, "grad_norm": None, "skipped": False}
        if current in self.args.iterations_to_skip:
            for sampler in filter(None, self.train):
                sampler.skip(get_num_microbatches())
            skip()
            updated = False
        else:
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            losses = self.forward_backward(self.train)
            updated, outcome["grad_norm"], _ = self.optimizer.step()
            outcome["loss"] = self._mean(losses)  # after the update, as in Megatron's train_step
        if updated:
            self.scheduler.step(self.args.global_batch)
        self.skipped_updates += not updated
        outcome["skipped"] = not updated
        self.consumed_samples += self.args.global_batch
        self.iteration = current
        if self.args.eval_at and current % self.args.eval_at == 0:
            outcome["valid_loss"] = self.evaluate()
        return outcome

    def evaluate(self) -> float | None:
        """The validation loss without dropout. Continues in the validation part after the last evaluation."""
        with self.gathered(), torch.no_grad():
            for chunk in self.chunks:
                chunk.eval()
            iterations = range(self.args.eval_iterations)
            losses = [self._mean(self.forward_backward(self.valid, forward_only=True)) for _ in iterations]
            for chunk in self.chunks:
                chunk.train()
        return None if losses[0] is None else sum(losses) / len(losses)  # type: ignore[arg-type]

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Make model parameters those of the last update, even if their gather is deferred to the next forward."""
        if self.args.overlap_param_gather:
            for chunk in self.chunks:
                chunk.disable_forward_pre_hook()
        yield
        if self.args.overlap_param_gather:
            for chunk in self.chunks:
                chunk.enable_forward_pre_hook()

    @staticmethod
    def close() -> None:
        """Reset what `__init__` set up in megatron.core."""
        destroy_num_microbatches_calculator()
        parallel_state.destroy_model_parallel()

    # for the host

    def host(self) -> MegatronCoreHost:
        """The host of this rank for ft_plugins."""

        def counter(name: str) -> StateEntry:
            return StateEntry(lambda: getattr(self, name), lambda value: setattr(self, name, value))

        def positions(samplers: list[Sampler | None]) -> StateEntry:
            def write(values: Sequence[int | None]) -> None:
                for sampler, value in zip(samplers, values, strict=True):
                    if sampler is not None:
                        sampler.position = value

            return StateEntry(lambda: [sampler and sampler.position for sampler in samplers], write)

        args = self.args
        return MegatronCoreHost(
            self.chunks,
            self.optimizer,
            self.scheduler,
            topology=self.topology,
            completed=lambda: self.iteration,
            counters={name: counter(name) for name in ("iteration", "consumed_samples", "skipped_updates")},
            position={"train": positions(self.train), "valid": positions(self.valid)},
            identity={
                "seed": args.seed,
                "batch": [args.global_batch, args.micro_batch],
                "sequence": args.sequence,
                "data": self._text,
            },
            consumed_samples=lambda: self.consumed_samples,
        )
