"""A rank that meets all others in a loop of all-reduces until a file tells them to end; torch alone.

In: the journal, the file, in which 'refuse' makes ranks refuse to go on; a node that ends early, once, and one that
never ends otherwise. Out: one line in the journal for each incarnation of each rank, once all have met.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ft_plugins.errors import EXIT_REFUSED
from ft_plugins.launcher.preload.new_process import bind_to_agent
from harness.fills import write


def main(argv):
    """`journal`, `end`, [`early`, `never`]."""
    bind_to_agent(os.getppid())
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    place = {name.lower(): int(os.environ[name]) for name in ("GROUP_RANK", "RANK", "WORLD_SIZE")}
    write(Path(argv[0]), {**place, "node": os.environ.get("NODE", ""), "total": int(total), "pid": os.getpid()})
    early, never = (*argv[2:], "", "")[:2]
    node, first = os.environ.get("NODE"), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if node == never:
        while not (Path(argv[1]).exists() and Path(argv[1]).read_text() == "refuse"):
            time.sleep(0.05)
        raise SystemExit(EXIT_REFUSED)
    if first and node == early:
        return
    ended = torch.zeros(1)
    while not ended:
        ended = torch.tensor([float(Path(argv[1]).exists())])
        dist.all_reduce(ended)
    dist.destroy_process_group()
    if Path(argv[1]).read_text() == "refuse":
        raise SystemExit(EXIT_REFUSED)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
