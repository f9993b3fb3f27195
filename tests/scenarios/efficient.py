"""One rank of a DeepSpeed job with a feature for efficiency, whose schedule moves in every iteration.

    --feature sampling | random_ltd | layer_drop <flags of the DeepSpeed example>

`sampling`: a curriculum over the lengths of sequences, and one over samples, in clusters so small that they are
shuffled and written again. `random_ltd`: a layer leaves tokens out; its kernels are those of `harness.kernels`.
`layer_drop`: layers are left out, by DeepSpeed's own schedule, up to 0.18.
"""

import argparse
import json
from pathlib import Path

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from byte_text import Text
from deepspeed.runtime.data_pipeline.data_routing.helper import convert_to_random_ltd
from deepspeed.runtime.data_pipeline.data_sampling import utils
from deepspeed_gpt import Windows, log, parse, seed, write_digest
from deepspeed_layers import Block, Plain, Sizes, logits, loss
from torch.utils.data import Subset

from harness import kernels

SAMPLES = 24  # which are less than what is trained on


class Dropping(Plain):
    """The model, of which layers are left out as the engine says."""

    def forward(self, tokens, labels, progressive_layer_drop=False, pld_theta=1.0):
        x = self.embedding(tokens)
        for block in self.blocks:
            if not progressive_layer_drop or float(torch.rand(())) < pld_theta:
                x = block(x) * pld_theta
        return loss(logits(self.embedding, self.norm(x)), labels)


def settings(feature, folder, sequence):
    """What the configuration has in addition."""
    if feature == "layer_drop":
        return {"progressive_layer_drop": {"enabled": True, "theta": 0.3, "gamma": 0.2}}
    metric = {"schedule_type": "fixed_linear", "min_difficulty": 4}
    length = {**metric, "difficulty_type": "value", "clustering_type": "single_cluster", "max_difficulty": sequence}
    length["schedule_config"] = {"total_curriculum_step": 5, "difficulty_step": 4}
    hardness = {**metric, "difficulty_type": "value", "clustering_type": "schedule_based", "max_difficulty": SAMPLES}
    hardness["schedule_config"] = {"total_curriculum_step": 9, "difficulty_step": 4}
    hardness |= {"index_to_sample_path": f"{folder}/samples", "index_to_metric_path": f"{folder}/metrics"}
    curriculum = {"enabled": feature == "sampling", "data_cluster_path": f"{folder}/clusters"}
    curriculum["curriculum_metrics"] = {"length": length, "hardness": hardness}
    schedule = {"min_value": 4, "max_value": sequence, "schedule_type": "fixed_linear"}
    schedule["schedule_config"] = {"require_steps": 5, "seq_per_step": 2}
    drop = {
        "enabled": feature == "random_ltd",
        "total_layer_num": 2,
        "random_ltd_layer_num": 1,
        "model_type": "decoder",
    }
    drop |= {"random_ltd_layer_id": [1], "model_mask_name": None, "hidden_state_order": "batch_seq_dim"}
    drop |= {"random_ltd_schedule": schedule, "layer_token_lr_schedule": {"enabled": False}}
    sampling = {"enabled": feature == "sampling", "num_epochs": 3, "curriculum_learning": curriculum}
    routing = {"enabled": feature == "random_ltd", "random_ltd": drop}
    return {"data_efficiency": {"enabled": True, "seed": 9, "data_sampling": sampling, "data_routing": routing}}


def write_metrics(folder):
    """The files of an analysed data set: sample n is as hard as n says."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("samples", "metrics"):
        builder = utils.create_mmap_dataset_builder(f"{folder}/{name}", np.int32)
        for number in range(SAMPLES):
            builder.add_item_numpy(np.array([number], dtype=np.int32))
        utils.close_mmap_dataset_builder(builder, f"{folder}/{name}")


def shortened(batch, sampler):
    """The batch, at the length that the curriculum is at."""
    return [one[:, : sampler["current_difficulties"]["length"]] for one in batch]


class Short(Plain):
    """The model, for sequences of any length up to that of its embedding."""

    def forward(self, tokens, labels):
        embedding = self.embedding
        x = embedding.dropout(
            torch.nn.functional.embedding(tokens, embedding.weight) + embedding.place[: tokens.shape[1]]
        )
        for block in self.blocks:
            x = block(x)
        return loss(logits(embedding, self.norm(x)), labels)


def main(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--feature", required=True)
    own, words = parser.parse_known_args(argv)
    args = parse(words)
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    kernels.for_deepspeed()
    folder = Path(args.deepspeed_config).parent / "data"
    if dist.get_rank() == 0 and not folder.exists():
        write_metrics(folder)
    dist.barrier()
    given = json.loads(Path(args.deepspeed_config).read_text()) | settings(own.feature, folder, args.sequence)
    args.deepspeed_config = None
    seed(args.seed, args.seed + 2718)
    kind = {"layer_drop": Dropping, "sampling": Short}.get(own.feature, Plain)
    module = kind(Sizes(args.layers, args.hidden, args.heads, args.sequence, args.dropout))
    text = Text.read(args.data).split(0.05, args.sequence)[0]
    data = Subset(Windows(text, args.sequence), range(SAMPLES))
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=module, model_parameters=module.parameters(), training_data=data, config=given
    )
    if own.feature == "sampling":
        engine.set_data_post_process_func(shortened)
    if own.feature == "random_ltd":
        convert_to_random_ltd(engine, Block)
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
