"""Run the GPT examples with their spans recorded and compute time emulated by sleeping.

Invariant: every number equals that of the plain example with the same flags. The schedules are the frameworks' own;
only the lengths of a forward and a backward are emulated, so that pipeline bubbles are visible on a machine with fewer
cores than ranks.

In: `--profile FILE`, `--forward` and `--backward` in seconds, before the example's own flags. Out: the profile as JSON,
written by rank 0; final state and losses as the example writes them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from ft_plugins.bubbles.profile import Profiling
from ft_plugins.bubbles.timeline.timeline_values import pack, unpack
from ft_plugins.config import Config, launch_context
from ft_plugins.model.timeline import Profile
from ft_plugins.session import Session, attach

from . import deepspeed_runs, megatron_runs
from .forkserver import JobSpec, load
from .runs import ExampleRun

MEASURED = Profiling(warmup=1, iterations=5, watch_every=1, ask_every=2)
ITERATIONS = MEASURED.warmup + MEASURED.iterations + 4  # three for the messages, one watched


def megatron(argv: Sequence[str]) -> None:
    """Run one rank of the megatron-core example."""
    own, rest = _parse(argv)
    example, context = load(str(megatron_runs.EXAMPLE)), launch_context()
    args = example.parse(rest)
    torch.set_num_threads(1)
    torch.cuda.set_device(context.local_rank)
    dist.init_process_group("gloo")
    job = example.Job(args, context)
    host = job.host()
    session = attach(host, Config(), context, MEASURED)
    hooks = _emulate(job.chunks, own)
    for step in range(1, args.iterations + 1):
        session.iteration_begin(step)
        outcome = job.train_step(skip=partial(host.skip_update, session))
        example.log(job, outcome, context)
        session.iteration_end(step)
    _write(session, own, hooks)
    example.write_digest(job, host)
    session.shutdown()
    dist.barrier()
    job.close()
    dist.destroy_process_group()


def deepspeed(argv: Sequence[str]) -> None:
    """Run one rank of the DeepSpeed example as a pipeline."""
    from ft_plugins.adapters.deepspeed.core import DeepSpeedHost

    own, rest = _parse(argv)
    example = load(str(deepspeed_runs.EXAMPLE))
    args = example.parse(rest)
    torch.set_num_threads(1)
    example.deepspeed.init_distributed()
    train, valid = example.Text.read(args.data).split(0.05, args.sequence)
    sizes = example.Sizes(args.layers, args.hidden, args.heads, args.sequence, args.dropout)
    steps = example.pipeline(args, sizes, train, valid)
    engine = next(steps)["engine"]
    session = attach(DeepSpeedHost(engine), Config(), launch_context(), MEASURED)
    hooks = _emulate([engine.module], own)
    for step in range(1, args.iterations + 1):
        session.iteration_begin(step)
        example.log(args, engine, next(steps))
        session.iteration_end(step)
    _write(session, own, hooks)
    example.write_digest(args, engine)
    session.shutdown()
    dist.barrier()
    example.get_cuda_rng_tracker().reset()
    dist.destroy_process_group()


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--forward", type=float, default=0.0)
    parser.add_argument("--backward", type=float, default=0.0)
    return parser.parse_known_args(argv)


def _emulate(chunks: Iterable[torch.nn.Module], lengths: argparse.Namespace) -> list[RemovableHandle]:
    """Make each forward and backward of `chunks` sleep in addition to its computation, until the hooks are removed."""

    def sleep(chunk: torch.nn.Module, args: Any, output: Any) -> None:
        if chunk.training:
            time.sleep(lengths.forward)
            first = output[0] if isinstance(output, (list, tuple)) else output
            first.register_hook(lambda gradient: time.sleep(lengths.backward))

    return [chunk.register_forward_hook(sleep) for chunk in chunks]


def _write(session: Session, own: argparse.Namespace, hooks: list[RemovableHandle]) -> None:
    """Write the profile; and leave modules as they were, whose hooks are compared."""
    for hook in hooks:
        hook.remove()
    assert session.measured is not None
    profile = session.measured.profile
    if profile is not None and dist.get_rank() == 0:
        own.profile.write_text(json.dumps([pack(timeline) for timeline in profile.timelines]))


@dataclass(frozen=True)
class ProfiledRun(ExampleRun):
    """A recorded run. `entry`: 'megatron' or 'deepspeed'; `argv`: the example's own flags."""

    entry: str
    argv: tuple[str, ...]
    ranks: int = 4
    forward: float = 0.0  # seconds
    backward: float = 0.0
    recorded: bool = True  # False: the plain example

    @property
    def profile(self) -> Profile:
        """The recorded profile."""
        values = json.loads((self.folder / "profile.json").read_text())
        return Profile(tuple(unpack(packed) for packed in values))

    def spec(self, **fields: object) -> JobSpec:
        words = [*self.argv, "--iterations", str(ITERATIONS)]
        example = {"megatron": megatron_runs.EXAMPLE, "deepspeed": deepspeed_runs.EXAMPLE}[self.entry]
        entry = f"{example}:main"
        if self.recorded:
            entry = f"{__name__}:{self.entry}"
            lengths = ["--forward", str(self.forward), "--backward", str(self.backward)]
            words = ["--profile", str(self.folder / "profile.json"), *lengths, *words]
        return self.job(entry, words, (), fields)
