"""Measure what the ledger of iterations costs training.

    python benchmarks/ledger_cost.py [--quick]

One process trains a model of 12 transformer layers whose state is not captured: only the ledger works, as in a
protected job. Within the same iterations the seconds of its calls in the training thread are added up, the hooks around
each forward included. Medians over iterations; shares are of that same iteration:

    share           of an iteration as it is on this machine, some seconds
    microseconds    of all calls in an iteration
    per_second      the same as a share of an iteration of one second

Claim: per_second <= 0.001.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ft_plugins.adapters.data import observed_inputs
from ft_plugins.adapters.torch.torch_loop import TorchHost
from ft_plugins.events import Events
from ft_plugins.snapshot.segment.ledger import Ledger
from ft_plugins.snapshot.segment.shape import LEDGER_ROOM
from ft_plugins.systems.iteration_ledger import IterationLedger, learning_rate_of
from workloads.running import PROGRESS, Figures, arguments, run

LAYERS, HIDDEN, HEADS, BATCH, SEQUENCE, VOCABULARY = 12, 256, 4, 8, 512, 8192


class Model(torch.nn.Module):
    """A transformer that takes tokens, positions and a mask, as Megatron's does."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words, self.places = torch.nn.Embedding(VOCABULARY, HIDDEN), torch.nn.Embedding(SEQUENCE, HIDDEN)
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(HIDDEN, HEADS, 4 * HIDDEN, batch_first=True) for _ in range(layers)
        )
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens) + self.places(positions)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask)
        result: torch.Tensor = self.head(hidden)
        return result


class Timed:
    """Adds up the seconds of calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, owner: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started

        setattr(owner, name, call)


def measure(chosen: argparse.Namespace) -> Figures:
    """The figures."""
    torch.set_num_threads(1)
    iterations = 4 if chosen.quick else 9
    model = Model(2 if chosen.smoke else LAYERS)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    host = TorchHost(model, optimizer, scheduler)
    ledger = IterationLedger(0, "auto", Events("benchmark", 0))
    ledger.open(Ledger(np.zeros(LEDGER_ROOM // 8, dtype=np.uint64)), None)
    timed = Timed()
    for name in ("begin", "fence", "end"):
        timed.wrap(ledger, name)
    timed.wrap(observed_inputs.ObservedForwards, "enter")
    timed.wrap(observed_inputs.ObservedForwards, "leave")
    timed.wrap(observed_inputs, "digest_of_gradients")
    host.install_observer(ledger)
    rate = learning_rate_of(host)
    positions = torch.arange(SEQUENCE).repeat(BATCH, 1)
    mask = torch.triu(torch.full((SEQUENCE, SEQUENCE), float("-inf")), 1)
    calls, shares = [], []
    PROGRESS.plan(iterations)
    for step in range(1, iterations + 1):
        PROGRESS.step(f"iteration {step}")
        tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE))
        timed.seconds, started = 0.0, time.perf_counter()
        ledger.begin(step)
        scores = model(tokens, positions, mask)
        torch.nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten()).backward()
        ledger.graded(observed_inputs.digest_of_gradients(model.parameters()) or 0)
        ledger.fence(rate())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        small = host.small_state()
        ledger.end(step, small)
        calls.append(timed.seconds)
        shares.append(timed.seconds / (time.perf_counter() - started))
    seconds, share = statistics.median(calls), statistics.median(shares)
    return {"share": share, "microseconds": seconds * 1e6, "per_second": seconds}


if __name__ == "__main__":
    run("ledger_cost", measure, arguments(__doc__, "fewer iterations"))
