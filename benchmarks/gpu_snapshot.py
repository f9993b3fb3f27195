"""Measure snapshots of device memory: how fast they are, and what they cost a GPT that keeps the device busy.

    python benchmarks/gpu_snapshot.py [--quick] [--gib 1 8 40]

For each size, in one run, relative to a copy of the same bytes from the device into pinned memory:

    registered_x   the copier into a registered part of a segment (1: as fast as pinned memory)
    committed_x    version point -> sealed in shared memory, digests included
    restore_x      segment -> device, digests checked

Then a GPT trains in bfloat16 with AdamW in fp32; blocks of steps with a snapshot after each and without alternate.
`slowdown` is the median of paired ratios minus 1. Claims: registered_x >= 0.9, slowdown <= 0.01.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from baselines import GIB, seconds
from ft_plugins.snapshot.capture.copiers import copier_for
from ft_plugins.snapshot.segment.paths import memory_limits
from snapshot_stall import Ours, make_state
from workloads.running import PROGRESS, Figures, arguments, run, say

SLOTS = 3
STEPS_PER_BLOCK = 3


@dataclass(frozen=True)
class Size:
    """A GPT, and the micro-batches of one step."""

    layers: int
    hidden: int
    sequence: int
    batch: int
    accumulate: int


WHOLE, SMALL, SMOKE = Size(16, 2048, 2048, 4, 16), Size(8, 1024, 1024, 8, 8), Size(2, 64, 32, 2, 1)
VOCABULARY = 32768


class Block(torch.nn.Module):
    """One layer: causal attention and a feed-forward part, each after a norm and added to its input."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = hidden // 64
        self.before = torch.nn.LayerNorm(hidden)
        self.between = torch.nn.LayerNorm(hidden)
        self.attend = torch.nn.Linear(hidden, 3 * hidden)
        self.project = torch.nn.Linear(hidden, hidden)
        self.widen = torch.nn.Linear(hidden, 4 * hidden)
        self.narrow = torch.nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, hidden) to the same."""
        batch, sequence, hidden = x.shape
        heads = self.attend(self.before(x)).view(batch, sequence, 3, self.heads, 64).permute(2, 0, 3, 1, 4)
        seen = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(batch, sequence, hidden))
        return x + self.narrow(torch.nn.functional.gelu(self.widen(self.between(x))))


class Training:
    """A GPT on random tokens. Its state is that of AdamW: three fp32 numbers per parameter."""

    def __init__(self, size: Size, device: str) -> None:
        torch.manual_seed(1)
        self.size = size
        self.embed = torch.nn.Embedding(VOCABULARY, size.hidden)
        self.model = torch.nn.Sequential(self.embed, *(Block(size.hidden) for _ in range(size.layers))).to(device)
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(parameters, 1e-4, fused=device == "cuda")
        shape = (size.batch, size.sequence)
        self.tokens = torch.randint(VOCABULARY, shape, device=device)
        self.device = device
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        """The tensors of the state, by name."""
        state: dict[str, torch.Tensor] = {}
        for index, (parameter, kept) in enumerate(self.optimizer.state.items()):
            state[f"{index}.parameter"] = parameter.detach()
            state |= {f"{index}.{name}": value for name, value in kept.items()}
        return state

    def accumulate(self) -> None:
        """Forward and backward of all micro-batches."""
        for _ in range(self.size.accumulate):
            with torch.autocast(self.device, torch.bfloat16):
                out = torch.nn.functional.linear(self.model(self.tokens), self.embed.weight)
            torch.nn.functional.cross_entropy(out.flatten(0, 1).float(), self.tokens.flatten()).backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)


def wait(device: str) -> None:
    """Until everything launched is done."""
    if device == "cuda":
        torch.cuda.synchronize()


def copies(nbytes: int, device: str) -> tuple[float, float]:
    """Seconds of a copy of `nbytes` into pinned memory, and by our copier into a registered part of a file in memory;
    measured with at most 1 GiB."""
    part = min(nbytes, GIB)
    source = torch.ones(part // 8, dtype=torch.int64, device=device)
    pinned = torch.empty(part // 8, dtype=torch.int64, pin_memory=device == "cuda")
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="ftp-gpu-snapshot-") as file:
        mapped = torch.from_file(file.name, shared=True, size=part // 8, dtype=torch.int64)
    mapped.zero_()
    copier = copier_for(source.device)
    copier.use(mapped.data_ptr(), part)

    def plain() -> None:
        pinned.copy_(source, non_blocking=True)
        wait(device)

    try:
        copier.ready()
        plain()
        copier.copy([mapped], [source])
        both = seconds(plain), seconds(lambda: copier.copy([mapped], [source]))
    finally:
        copier.close()
    return both[0] * nbytes / part, both[1] * nbytes / part


def of_size(nbytes: int, device: str, repeats: int) -> Figures:
    """The figures of one size."""
    pinned, registered = copies(nbytes, device)
    with ExitStack() as stack:
        state = {name: tensor.to(device) for name, tensor in make_state(nbytes).items()}
        nbytes = sum(tensor.nbytes for tensor in state.values())
        wait(device)
        free = torch.cuda.mem_get_info()[0] if device == "cuda" else 0
        ours = Ours(state, stack)
        started = time.perf_counter()
        ours.snapshot()
        ours.fence()
        first = time.perf_counter() - started
        ours.snapshot()
        ours.fence()
        added = free - torch.cuda.mem_get_info()[0] if device == "cuda" else 0

        def snapshot() -> None:
            for tensor in state.values():
                tensor.add_(1)
            ours.snapshot()
            ours.fence()

        committed = []
        for _ in range(repeats):
            snapshot()
            committed.append(ours.committed())
        expected = {name: tensor.clone() for name, tensor in list(state.items())[:4]}
        restored = []
        for _ in range(2):
            for tensor in state.values():
                tensor.zero_()
            wait(device)
            started = time.perf_counter()
            ours.start()
            wait(device)
            restored.append(time.perf_counter() - started)
            if not all(torch.equal(state[name], tensor) for name, tensor in expected.items()):
                raise AssertionError("what was restored is not what was captured")
    gib = nbytes / GIB
    name = f"{gib:.2g}gib"
    figures: Figures = {
        f"{name}_pinned_gib_per_s": gib / pinned,
        f"{name}_registered_x": pinned / registered,
        f"{name}_committed_x": statistics.median(committed) / pinned,
        f"{name}_committed_seconds": statistics.median(committed),
        f"{name}_first_seconds": first,
        f"{name}_restore_x": min(restored) / pinned,
        f"{name}_restore_seconds": min(restored),
        f"{name}_device_mib_added": added / (1 << 20),
    }
    for key, value in figures.items():
        say(f"  {key:<32} {value:10.3f}")
    return figures


def slowdown(size: Size, device: str, blocks: int) -> Figures:
    """What a snapshot after every step costs this GPT."""
    training = Training(size, device)
    state = training.state()
    gib = sum(tensor.nbytes for tensor in state.values()) / GIB
    with ExitStack() as stack:
        ours = Ours(state, stack)
        waited: list[float] = []

        def block(captured: bool) -> float:
            wait(device)
            started = time.perf_counter()
            for _ in range(STEPS_PER_BLOCK):
                training.accumulate()
                if captured:
                    before = time.perf_counter()
                    ours.fence()
                    waited.append(time.perf_counter() - before)
                training.update()
                if captured:
                    ours.snapshot()
            wait(device)
            took = (time.perf_counter() - started) / STEPS_PER_BLOCK
            if captured:
                ours.fence()
            return took

        for captured in (False, True, True):
            block(captured)
        waited.clear()
        pairs = [(block(index % 2 == 0), block(index % 2 == 1)) for index in range(blocks)]
        with_capture = [pair[index % 2] for index, pair in enumerate(pairs)]
        without = [pair[1 - index % 2] for index, pair in enumerate(pairs)]
        committed = ours.committed()
    ratios = [one / other for one, other in zip(with_capture, without, strict=True)]
    figures: Figures = {
        "gpt_state_gib": gib,
        "gpt_step_seconds": statistics.median(without),
        "gpt_committed_seconds": committed,
        "gpt_host_waited_seconds": statistics.median(waited),
        "slowdown": statistics.median(ratios) - 1,
        "slowdown_worst": max(ratios) - 1,
    }
    for key, value in figures.items():
        say(f"  {key:<32} {value:10.4f}")
    return figures


def measure(chosen: argparse.Namespace) -> Figures:
    """All figures. Prints a table."""
    device = "cpu" if chosen.smoke or not torch.cuda.is_available() else "cuda"
    sizes: list[float] = chosen.gib or ([1, 4] if chosen.quick else [1, 8, 40])
    gpt, repeats, blocks = (SMALL, 3, 4) if chosen.quick else (WHOLE, 5, 8)
    if chosen.smoke:
        sizes, repeats, blocks = [1 / 64], 1, 1
    if device == "cpu":  # where the others take hours
        gpt = SMOKE
    PROGRESS.plan(len(sizes) + 1)
    figures: Figures = {"on_a_device": device == "cuda"}
    for gib in sizes:
        PROGRESS.step(f"{gib:g} GiB")
        times = SLOTS if device == "cuda" else SLOTS + 2  # without a device the state, made of parts, is here as well
        if min(limit.free for limit in memory_limits()) < times * gib * GIB * 1.05:
            say(f"  {gib:g} GiB: left out, this machine has no room for {times} times that")
            continue
        figures |= of_size(int(gib * GIB), device, repeats)
    PROGRESS.step("a GPT")
    return figures | slowdown(gpt, device, blocks)


def _parser() -> argparse.ArgumentParser:
    parser = arguments(__doc__, "sizes of 1 and 4 GiB, a smaller GPT")
    parser.add_argument("--gib", type=float, nargs="+", help="the sizes, in place of 1, 8 and 40")
    return parser


if __name__ == "__main__":
    run("gpu_snapshot", measure, _parser())
