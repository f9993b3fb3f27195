"""One rank of a DeepSpeed job that iterates torch loaders of its own, in epochs, as scripts without ft_plugins do.

    --loader shuffled | distributed | stream | augmented <flags of the DeepSpeed example>

`--frozen` layers: all embeddings.

An epoch has three iterations of two batches each, and an evaluation that is broken off. `--skip-at` has the gradients
of these iterations overflow. `--mode eval` trains in evaluation mode, `--mode module` calls the module rather than the
engine and reads from a list; neither evaluates.
"""

import argparse
import math
import random
from itertools import islice
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from byte_text import Text
from deepspeed_gpt import Windows, log, parse, seed, write_digest
from deepspeed_layers import Plain, Sizes
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset
from torch.utils.data.distributed import DistributedSampler

EPOCH = 3  # iterations


class Stream(IterableDataset):
    """Samples in an order by lot, that nobody can know without reading."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        for index in torch.randperm(len(self.data)).tolist():
            yield self.data[index]


class Augmented(Dataset[Any]):
    """Samples of which worker processes change a token by lot."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        tokens, labels = self.data[index]
        tokens = tokens.clone()
        tokens[random.randrange(len(tokens))] = int(torch.randint(0, 64, ()))
        return tokens, labels


def main(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--loader", default="shuffled")
    parser.add_argument("--mode", default="train")
    parser.add_argument("--skip-at", type=int, nargs="*", default=[])
    parser.add_argument("--frozen", action="store_true")
    parser.add_argument("--load")
    parser.add_argument("--save")
    parser.add_argument("--save-at", type=int, default=0)
    own, words = parser.parse_known_args(argv)
    args = parse(words)
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    train, valid = (Windows(text, args.sequence) for text in Text.read(args.data).split(0.05, args.sequence))
    seed(args.seed, args.seed + 2718)
    module = Plain(Sizes(args.layers, args.hidden, args.heads, args.sequence, args.dropout))
    module.embedding.requires_grad_(not own.frozen)
    trained = [each for each in module.parameters() if each.requires_grad]
    engine, *_ = deepspeed.initialize(args=args, model=module, model_parameters=trained)
    if own.load:
        engine.load_checkpoint(own.load)
    micro, ranks = engine.train_micro_batch_size_per_gpu(), dist.get_world_size()
    each = EPOCH * micro * engine.gradient_accumulation_steps()
    training = loader(own.loader, Subset(train, range(each * (ranks if own.loader == "distributed" else 1))), micro)
    if own.mode == "module":
        training = [tuple(each.unsqueeze(0) for each in train[index]) for index in range(2 * EPOCH)]
    if own.mode == "eval":
        engine.eval()
    validation = DataLoader(Subset(valid, range(8)), micro, shuffle=True)
    epoch = engine.global_steps // EPOCH
    while engine.global_steps < args.iterations:
        if own.loader == "distributed":
            training.sampler.set_epoch(epoch)
        for outcome in iterations(engine, training, own.skip_at, engine.module if own.mode == "module" else engine):
            log(args, engine, outcome)
            if own.save and engine.global_steps == own.save_at:
                engine.save_checkpoint(own.save)
            if engine.global_steps == args.iterations:
                break
        if own.mode == "train":
            evaluate(engine, validation)
        epoch += 1
    if args.state_digest:
        write_digest(args, engine)
    dist.barrier()
    dist.destroy_process_group()


def loader(kind, data, micro):
    if kind == "distributed":
        return DataLoader(data, micro, sampler=DistributedSampler(data, seed=5))
    if kind == "stream":
        return DataLoader(Stream(data), micro)
    if kind == "augmented":
        return DataLoader(Augmented(data), micro, shuffle=True, num_workers=2)
    return DataLoader(data, micro, shuffle=True, generator=torch.Generator().manual_seed(6 + dist.get_rank()))


def iterations(engine, training, skipped, model):
    """The epoch's, each with its loss."""
    total = torch.zeros(())
    each = engine.gradient_accumulation_steps()
    done = engine.global_steps % EPOCH * each if isinstance(training, list) else 0
    for tokens, labels in islice(iter(training), done, None):
        before = engine.global_steps
        mean = model(tokens, labels)
        engine.backward(mean * (math.inf if before + 1 in skipped else 1.0))
        engine.step()
        total += mean.detach().float()
        if engine.global_steps != before:
            dist.all_reduce(total)
            yield {"loss": float(total)}
            total.zero_()


@torch.no_grad()
def evaluate(engine, validation):
    engine.eval()
    for tokens, labels in islice(iter(validation), 2):
        engine(tokens, labels)
    engine.train()
