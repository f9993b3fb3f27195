"""A loop of plain torch that keeps state where nothing captures it: one habit per `--case`.

ft-run --nproc-per-node 1 tests/scenarios/loops_to_rehearse.py --reft --case exact
"""

import argparse
import os
import random

import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import ft_plugins

CASES = ("exact", "generator", "curriculum", "from_zero", "rate", "unseeded", "kernel", "later")


class Later(TensorDataset):
    """Makes what it draws from when its first sample is read, and keeps more with every one."""

    def __init__(self, *tensors):
        super().__init__(*tensors)
        self.state = {}

    def __getitem__(self, index):
        if not hasattr(self, "noise"):
            self.noise = random.Random(3)
        self.state.setdefault(f"shard {index % 7}", []).append(self.noise.random())
        return (self.tensors[0][index] + self.state[f"shard {index % 7}"][-1] + 0.01 * len(self.state),)


def batches(loader):
    while True:
        yield from loader


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=CASES, default="exact")
    case = parser.parse_args().case
    torch.manual_seed(1)
    samples = torch.arange(40 * 8, dtype=torch.float32).reshape(40, 8).sin()
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    data = (Later if case == "later" else TensorDataset)(samples)
    order = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "little") if case == "unseeded" else 5)
    loader = DataLoader(data, 4, sampler=RandomSampler(data, generator=order))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 8) if case == "later" else None
    host = ft_plugins.TorchHost(model, optimizer, scheduler, None if case == "from_zero" else loader)
    session = ft_plugins.attach(host)
    noise, reader = torch.Generator().manual_seed(9), batches(loader)
    running = 0.0  # is printed only
    for seen, step in enumerate(session.iterations(30)):  # `seen` begins again at each start
        if case == "from_zero":
            (batch,) = data[[(4 * seen + number) % 40 for number in range(4)]]
        else:
            (batch,) = next(reader)
        if case == "generator":
            batch = batch + torch.randn(batch.shape, generator=noise)
        if case == "rate":
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + seen)
        if case == "kernel":
            with torch.no_grad():
                batch[0, 0] += 0.0  # what is read is the same
        loss = model(batch).square().mean()
        if case == "curriculum":
            loss = loss * (1 + 0.1 * seen)
        if case == "kernel":
            loss = loss * (1 + int.from_bytes(os.urandom(1), "little") * 1e-4)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
            running = 0.9 * running + 0.1 * loss.item()
            print("running loss", running)
        if step % 4 == 0:
            model.eval()
            with torch.no_grad():
                model(samples[:4])
            model.train()


if __name__ == "__main__":
    main()
