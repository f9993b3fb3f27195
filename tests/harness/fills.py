"""A job whose state shows its version: every tensor on every rank is filled with the iteration number. Torch only.

Invariant: after `iteration_end(k)` each element of each tensor is k, so restored state is either one complete version
or visibly torn.

In: flags. Out: JSON lines in `--journal`: what was restored and which iterations ran.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ft_plugins import session
from ft_plugins.base import faults
from ft_plugins.config import launch_context
from ft_plugins.smp.serve.client import Client

from .plain_host import PlainHost


def check(tensors: Mapping[str, torch.Tensor], iteration: int) -> list[str]:
    """Names of the tensors that are not filled with `iteration` from end to end."""
    return [name for name, tensor in tensors.items() if not bool((tensor == iteration).all())]


def slots_of(run_dir: Path, rank: int) -> list[str]:
    """States of the rank's slots as the previous incarnation left them; empty without a segment."""
    with Client(run_dir) as client:
        segments = client.status()["segments"]
    return [slot["state"] for segment in segments if segment["rank"] == rank for slot in segment["slots"]]


def write(journal: Path, entry: Mapping[str, Any]) -> None:
    """Append one line to the journal."""
    fd = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, (json.dumps(entry) + "\n").encode())
    finally:
        os.close(fd)


def main(argv: list[str]) -> None:
    """Run one rank up to `--iterations`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--mib", type=int, default=256, help="MiB of state per rank")
    parser.add_argument("--tensors", type=int, default=37)
    parser.add_argument("--replicated", action="store_true", help="all ranks hold the same tensors")
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=0.0, help="compute time of an iteration, emulated by sleeping")
    options = parser.parse_args(argv)
    context = launch_context()
    if context.world_size > 1:
        dist.init_process_group("gloo")
    count = (options.mib << 20) // 4 // options.tensors
    # Uneven sizes make tensors straddle buckets and shares.
    tensors = {f"layer{i:03d}": torch.zeros(count + 13 * i - 6 * options.tensors) for i in range(options.tensors)}
    counters = {"completed": 0}
    slots = slots_of(context.run_dir, context.rank) if context.run_dir else []
    host = PlainHost(
        tensors,
        rank=context.rank,
        world_size=context.world_size,
        replicated=options.replicated,
        fingerprint={"mib": options.mib, "tensors": options.tensors},
        get_state=lambda: dict(counters),
        set_state=lambda state: counters.update(state),
    )
    host.fault_points = {"iteration.forward": (), "update.begin": ()}  # that the loop below reaches
    protection = session.attach(host)
    done = protection.resume(last=options.iterations)
    write(
        options.journal,
        {
            "restored": done,
            "counter": counters["completed"],
            "torn": check(tensors, done),
            "rank": context.rank,
            "restart": context.restart,
            "found": slots,
        },
    )
    for step in range(done + 1, options.iterations + 1):
        protection.iteration_begin(step)
        faults.reach("iteration.forward", iteration=step)
        time.sleep(options.seconds)
        protection.before_update(step)
        faults.reach("update.begin", iteration=step)
        for tensor in tensors.values():
            tensor.fill_(step)
        protection.after_update(step)
        counters["completed"] = step
        if context.world_size > 1:
            dist.barrier()
        protection.iteration_end(step)
    protection.shutdown()
    write(
        options.journal,
        {"ended": options.iterations, "torn": check(tensors, options.iterations), "rank": context.rank},
    )
    if context.world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
