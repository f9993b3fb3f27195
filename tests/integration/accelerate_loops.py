"""A script's own loop over accelerate's Accelerator and DeepSpeed, with accumulation and an evaluation.

    ft-run --nproc-per-node 2 accelerate_loops.py PREFIX ds.json

Its final state is written to PREFIX and the rank. With `--from-zero` its loop does not ask where the engine is. With
`--skip` it passes over the batches of the restored epoch itself, and saves. With `--kill RANK:STEP` it kills itself
after that update of its first start.
"""

import argparse
import json
import os
import random
import signal
from pathlib import Path

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset

from ft_plugins.model.digest import readable

SAMPLES, ACCUMULATE, EPOCHS = 12, 2, 3


class Points(Dataset[torch.Tensor]):
    """Samples with noise from the process's generators."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        exact = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return exact + random.random() / 8 + torch.rand(4) / 8


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("prefix")
    parser.add_argument("configuration")
    parser.add_argument("--from-zero", action="store_true")
    parser.add_argument("--skip", action="store_true")
    parser.add_argument("--kill", default="")
    given = parser.parse_args()
    rank, restart = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=given.configuration))
    set_seed(7)
    layers = torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    training = DataLoader(Points(), batch_size=2, shuffle=True)
    evaluation = DataLoader(Points(), batch_size=4)
    model, optimizer, training, evaluation, scheduler = accelerator.prepare(
        model, optimizer, training, evaluation, scheduler
    )
    seen = []
    updates = len(training) // ACCUMULATE
    first, done = (0, 0) if given.from_zero else divmod(model.global_steps, updates)
    for epoch in range(first, EPOCHS):
        model.train()
        skipped = done * ACCUMULATE if given.skip and epoch == first else 0
        for batch in accelerator.skip_first_batches(training, skipped) if skipped else training:
            with accelerator.accumulate(model):
                loss = (model(batch).squeeze(-1) - batch.sum(-1)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen.append([model.global_steps, loss.item(), readable(batch)["xxh3"]])
            if not restart and given.kill == f"{rank}:{model.global_steps}":
                os.kill(os.getpid(), signal.SIGKILL)
        if given.skip:
            accelerator.save_state(f"{given.prefix}epoch{epoch}")
        model.eval()
        with torch.no_grad():
            seen.append(["evaluation", sum(model(batch).sum().item() for batch in evaluation)])
    state = {
        "parameters": dict(model.module.named_parameters()),
        "rates": [group["lr"] for group in optimizer.param_groups],
        "scheduler": scheduler.state_dict(),
        "steps": model.global_steps,
        "seen": seen[-10:],
        "rng": [torch.get_rng_state(), list(random.getstate()[1])],
    }
    Path(f"{given.prefix}{rank}").write_text(json.dumps(readable(state)))


if __name__ == "__main__":
    main()
