"""Runs Megatron-LM's pretrain_gpt.py and writes down what each rank holds when training has ended: what its optimizer
updates, with state and settings; buffers, random number generators, scheduler and counters.

    megatron_end.py <checkout> <folder> <pretrain_gpt.py's own arguments>

Megatron's own checkpoints do not serve: those of torch's FSDP2 cannot be saved with tensor parallelism.
"""

import functools
import os
import runpy
import sys
from pathlib import Path

checkout, folder = Path(sys.argv[1]), Path(sys.argv[2])
sys.argv = [str(checkout / "pretrain_gpt.py"), *sys.argv[3:]]
sys.path[0] = str(checkout)

import megatron.training.training as training  # noqa: E402
import torch  # noqa: E402
from megatron.core import tensor_parallel  # noqa: E402


def held(value):
    """This rank's part, as a copy."""
    return getattr(value, "_local_tensor", value).detach().clone()


def updated(inner):
    """By group: its settings, and each parameter of which this rank has elements, with its state."""
    return [
        {
            "settings": {key: value for key, value in group.items() if key != "params"},
            "parameters": [
                [held(one), {key: held(value) for key, value in inner.state[one].items()}]
                for one in group["params"]
                if held(one).numel()
            ],
        }
        for group in inner.param_groups
    ]


def ending(original):
    @functools.wraps(original)
    def train(step, chunks, optimizer, scheduler, *args, **kwargs):
        outcome = original(step, chunks, optimizer, scheduler, *args, **kwargs)
        given = training.get_args()
        state = {
            "updated": [updated(one.optimizer) for one in getattr(optimizer, "chained_optimizers", [optimizer])],
            "buffers": [{name: held(one) for name, one in chunk.named_buffers()} for chunk in chunks],
            "generators": [torch.get_rng_state(), tensor_parallel.get_cuda_rng_tracker().get_states()],
            "scheduler": scheduler.state_dict(),
            "counters": [given.consumed_train_samples, given.consumed_valid_samples, given.skipped_train_samples],
        }
        torch.save(state, folder / f"rank{os.environ['RANK']}.pt")
        return outcome

    return train


training.train = ending(training.train)
runpy.run_path(sys.argv[0], run_name="__main__")
