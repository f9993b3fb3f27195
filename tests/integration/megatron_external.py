"""Trains Megatron-LM's GPT on loaders of this script's own, as multimodal recipes do: `--dataloader-type external`.

    megatron_external.py <checkout> stateful | stateless <pretrain_gpt.py's own arguments>

Both kinds draw their samples from a generator of their own. Only the first training rank of a tensor-parallel group has
loaders, and only on the first and the last pipeline stage.
"""

import random
import sys
from functools import partial
from pathlib import Path

checkout, kind = Path(sys.argv[1]), sys.argv[2]
sys.argv = [str(checkout / "pretrain_gpt.py"), *sys.argv[3:]]
sys.path[0] = str(checkout)

import torch  # noqa: E402
from gpt_builders import gpt_builder  # noqa: E402
from megatron.core import mpu  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.training import get_args, pretrain  # noqa: E402
from model_provider import model_provider  # noqa: E402
from pretrain_gpt import forward_step  # noqa: E402


class Samples:
    """Endless batches, read one ahead, as a loader that hides the time of reading does."""

    def __init__(self, seed):
        self._generator = random.Random(seed)
        self._before = self._generator.getstate()
        self._ahead = None

    def __next__(self):
        batch = self._ahead or self._drawn()
        self._before = self._generator.getstate()  # what is ahead has not been handed out
        self._ahead = self._drawn()
        return batch

    def _drawn(self):
        args = get_args()
        drawn = [self._generator.randrange(args.vocab_size) for _ in range(args.seq_length + 1)]
        drawn = torch.tensor(drawn * args.micro_batch_size).reshape(args.micro_batch_size, -1)
        shape = drawn[:, 1:].shape
        return {
            "tokens": drawn[:, :-1].contiguous(),
            "labels": drawn[:, 1:].contiguous(),
            "loss_mask": torch.ones(shape),
            "attention_mask": torch.ones(shape[0], 1, shape[1], shape[1]).tril() < 0.5,
            "position_ids": torch.arange(shape[1]).expand(shape).contiguous(),
        }


class StatefulSamples(Samples):
    def state_dict(self):
        return {"generator": self._before}

    def load_state_dict(self, state):
        self._generator.setstate(state["generator"])
        self._before, self._ahead = state["generator"], None


def loaders(numbers):
    stage, last = mpu.get_pipeline_model_parallel_rank(), mpu.get_pipeline_model_parallel_world_size() - 1
    if mpu.get_tensor_model_parallel_rank() or stage not in (0, last):
        return None, None, None
    made = StatefulSamples if kind == "stateful" else Samples
    own = 100 * mpu.get_data_parallel_rank()
    return made(own + 1), made(own + 2), made(own + 3)


loaders.is_distributed = True  # Megatron asks every rank

if __name__ == "__main__":
    pretrain(loaders, partial(model_provider, gpt_builder), ModelType.encoder_or_decoder, forward_step)
