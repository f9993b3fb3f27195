"""Runs Megatron-LM's pretrain_gpt.py and writes down what a restart finds: arguments and objects after the load, random
number generators and the first batch at the first forward.

    megatron_probe.py <checkout> <folder> <pretrain_gpt.py's own arguments>
"""

import functools
import os
import random
import runpy
import sys
from pathlib import Path

checkout, folder = Path(sys.argv[1]), Path(sys.argv[2])
sys.argv = [str(checkout / "pretrain_gpt.py"), *sys.argv[3:]]
sys.path[0] = str(checkout)

import megatron.training.training as training  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from megatron.core import tensor_parallel  # noqa: E402
from megatron.core.num_microbatches_calculator import (  # noqa: E402
    get_current_global_batch_size,
    get_num_microbatches,
)


def objects(chunks, optimizer, scheduler):
    """Everything that Megatron's load_checkpoint sets, but the random number generators."""
    machine = training.get_rerun_state_machine()
    return {
        "args": dict(vars(training.get_args())),
        "scheduler": scheduler.state_dict(),
        "lr": [group["lr"] for group in optimizer.param_groups],
        "weight_decay": [group["weight_decay"] for group in optimizer.param_groups],
        "optimizer": optimizer.state_dict(),
        "optimizer_state": [
            [dict(state) for state in o.optimizer.state.values()]
            for o in getattr(optimizer, "chained_optimizers", [optimizer])
        ],
        "parameters": [{name: p.detach().clone() for name, p in chunk.named_parameters()} for chunk in chunks],
        "microbatches": [get_num_microbatches(), get_current_global_batch_size()],
        "rerun": [machine.state.name, dict(machine.large_value_counts), dict(machine.max_values)],
    }


def generators():
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def probing(original):
    @functools.wraps(original)
    def setup_model_and_optimizer(*args, **kwargs):
        built = original(*args, **kwargs)
        if training.get_args().iteration > 0:
            found = objects(*built)

            def at_first_forward(chunk, inputs):
                handle.remove()
                rank = os.environ["RANK"]
                torch.save({**found, "generators": generators(), "inputs": list(inputs)}, folder / f"rank{rank}.pt")

            handle = built[0][0].register_forward_pre_hook(at_first_forward)
        return built

    return setup_model_and_optimizer


training.setup_model_and_optimizer = probing(training.setup_model_and_optimizer)
runpy.run_path(sys.argv[0], run_name="__main__")
