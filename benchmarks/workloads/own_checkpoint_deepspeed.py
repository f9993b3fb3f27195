"""A rank of the DeepSpeed example as it would be without ft_plugins: under torchrun, with DeepSpeed's own checkpoints.

    torchrun ... own_checkpoint_deepspeed.py --checkpoints DIR --every K <arguments of launch/examples/deepspeed_gpt.py>

Every K iterations the ranks call `engine.save_checkpoint`; after a start `engine.load_checkpoint`, which finds the
newest complete one. The data position and random numbers do not continue, which costs no time.

In: the folder. Out: the loss log of the example; `saves.jsonl` in the folder, with the seconds of each save.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from ft_plugins.adapters.deepspeed import prepare

prepare()  # without a CUDA device DeepSpeed would compile an extension at each start, as ft-run prevents too

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch" / "examples"))

import deepspeed  # noqa: E402
import deepspeed_gpt  # type: ignore[import-not-found]  # noqa: E402
from byte_text import Text  # type: ignore[import-not-found]  # noqa: E402
from deepspeed_layers import Sizes  # type: ignore[import-not-found]  # noqa: E402


def main(argv: Sequence[str]) -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--every", type=int, required=True)
    own, words = parser.parse_known_args(argv)
    args = deepspeed_gpt.parse(words)
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    train, valid = Text.read(args.data).split(0.05, args.sequence)
    sizes = Sizes(args.layers, args.hidden, args.heads, args.sequence, args.dropout)
    steps = deepspeed_gpt.pipeline(args, sizes, train, valid)
    engine = next(steps)["engine"]
    if (own.checkpoints / "latest").exists():
        engine.load_checkpoint(str(own.checkpoints))
    for outcome in steps:
        deepspeed_gpt.log(args, engine, outcome)
        if engine.global_steps % own.every == 0:
            began = time.monotonic()
            engine.save_checkpoint(str(own.checkpoints))
            if dist.get_rank() == 0:
                with (own.checkpoints / "saves.jsonl").open("a") as lines:
                    lines.write(json.dumps(time.monotonic() - began) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
