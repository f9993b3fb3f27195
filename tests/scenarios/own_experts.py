"""One rank of a DeepSpeed job with MoE layers, over expert groups of `--experts-over` ranks.

--experts-over 2 <flags of the DeepSpeed example>
"""

import argparse

import deepspeed
import torch
import torch.distributed as dist
from byte_text import Text
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed_gpt import Windows, log, parse, seed, write_digest
from deepspeed_layers import Plain, Sizes, logits, loss

EXPERTS = 4


class Mixture(Plain):
    """The model, with a mixture of experts behind its blocks; gates draw random numbers."""

    def __init__(self, sizes, over):
        super().__init__(sizes)
        self.blocks = self.blocks[:1]
        expert = torch.nn.Sequential(
            torch.nn.Linear(sizes.hidden, 16), torch.nn.GELU(), torch.nn.Linear(16, sizes.hidden)
        )
        self.mixture = MoE(sizes.hidden, expert, EXPERTS, over, k=1, noisy_gate_policy="RSample", min_capacity=2)

    def forward(self, tokens, labels):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        mixed, balance, _ = self.mixture(x)
        return loss(logits(self.embedding, self.norm(x + mixed)), labels) + 0.01 * balance


def main(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--experts-over", type=int, required=True)
    own, words = parser.parse_known_args(argv)
    args = parse(words)
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    seed(args.seed, args.seed + 2718)
    module = Mixture(Sizes(args.layers, args.hidden, args.heads, args.sequence, args.dropout), own.experts_over)
    for number, one in enumerate(one for one in module.parameters() if not getattr(one, "allreduce", True)):
        torch.nn.init.normal_(one, 0, 0.1, generator=torch.Generator().manual_seed(number + 100 * dist.get_rank()))
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(module.parameters()), "name": "all"})
    text = Text.read(args.data).split(0.05, args.sequence)[0]
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=module, model_parameters=groups, training_data=Windows(text, args.sequence)
    )
    batches = iter(deepspeed.utils.RepeatingLoader(loader))
    while engine.global_steps < args.iterations:
        before, total = engine.global_steps, torch.zeros(())
        while engine.global_steps == before:
            mean = engine(*next(batches))
            engine.backward(mean)
            engine.step()
            total += mean.detach().float()
        dist.all_reduce(total)
        log(args, engine, {"loss": float(total)})
    if args.state_digest:
        write_digest(args, engine)
    dist.barrier()
    dist.destroy_process_group()
