"""What parity of own replicas costs: capture of a share with and without it, and what is not sent because of it.

    python benchmarks/double_capture.py [--quick] [--device cuda]

512 MiB of state, replicated over n nodes of one rank each; one rank of them captures its share, alone in its process,
in turns without parity (data_seconds) and with it. Seconds are those of the process on a processor, for this machine is
shared; with a device, where capture waits, those of the clock. Medians over turns, x = with it / without:

    double_n    from version point to seal; twice the bytes are read, digested and, but for one source, added up
    parity_n    bytes of a slot behind the data, in multiples of the data
    sent_n      what the node sends for each version in multiples of its share: digests that are compared, small state
                and digest tables; with the exchange of all of it this is 1

Claims: double <= 2.5 for every n, sent <= 0.01.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch

from figures import line
from ft_plugins.model.inventory import Inventory, Item, Role
from ft_plugins.snapshot.capture import Capture
from ft_plugins.snapshot.double import with_parity
from ft_plugins.snapshot.layout import Layout, plan_layout
from ft_plugins.snapshot.paths import path_of, remove
from ft_plugins.snapshot.segment import Segment, create
from ft_plugins.snapshot.shape import Shape
from ft_plugins.snapshot.slots import Version
from snapshot_stall import make_state

NBYTES = 512 << 20
BUCKET = 4 << 20
SMALL = 64 << 10
CHECK_BYTES = 32  # that are sent for each source of parity


class Captured:
    """A segment and the capture into it."""

    def __init__(
        self, stack: ExitStack, layout: Layout, state: dict[str, torch.Tensor], name: str, clock: Callable[[], float]
    ) -> None:
        self._clock = clock
        nbytes, parity = layout.nbytes + layout.parity_nbytes, layout.parity_nbytes
        job = f"double{os.getpid()}{name}"
        create(
            path_of(job, "n", 0), Shape(nbytes, SMALL, len(layout.ranges), 1, 3, parity, layout.checks), 0, {}
        )  # fmt: skip
        stack.callback(remove, job, "n")
        self._segment = Segment(path_of(job, "n", 0), populate=True)
        stack.callback(self._segment.close)
        self._segment.ranges, self._segment.token = layout.ranges, 1
        self._capture = Capture(self._segment, layout, lambda: state, 1)
        stack.callback(self._capture.close)
        self._iteration = 0

    def seconds(self) -> float:
        """Of one capture."""
        self._iteration += 1
        started = self._clock()
        self._capture.start(Version(1, self._iteration), b"small")
        self._capture.wait()
        return self._clock() - started


def measure(quick: bool, device: str) -> dict[str, float | bool]:
    """All figures; a table on the way."""
    torch.set_num_threads(1)
    state = {name: tensor.to(device) for name, tensor in make_state(NBYTES).items()}
    clock = time.process_time if device == "cpu" else time.perf_counter
    figures: dict[str, float | bool] = {}
    for count in (2, 4) if quick else (2, 3, 4, 8, 16):
        nodes, ranks = tuple(f"n{number}" for number in range(count)), tuple(range(count))
        items = [Item(n, "float32", tuple(t.shape), t.nbytes, Role.PARAMETER, ranks) for n, t in state.items()]
        plain = plan_layout(Inventory.of(0, items), nodes, BUCKET)
        layout = with_parity(plain, nodes, [ranks], 1, BUCKET)
        with ExitStack() as stack:
            without = Captured(stack, plain, state, "p", clock)
            with_it = Captured(stack, layout, state, "d", clock)
            pairs = [(without.seconds(), with_it.seconds()) for _ in range(8 if quick else 25)][3:]
        data, double = (statistics.median(column) for column in zip(*pairs, strict=True))
        digests = len(layout.ranges) + layout.checks
        sent = (layout.checks * CHECK_BYTES + 8 * digests + SMALL) / layout.nbytes
        print(
            f"n = {count:2d}: share {layout.nbytes >> 20:4d} MiB in {data * 1e3:7.1f} ms; with parity "
            f"{double / data:5.2f}x, {layout.parity_nbytes / layout.nbytes:5.3f} of it more; sent {sent:.5f}",
            flush=True,
        )
        figures |= {f"data_seconds_{count}": data, f"double_{count}": double / data}
        figures |= {f"parity_{count}": layout.parity_nbytes / layout.nbytes, f"sent_{count}": sent}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer groups and turns")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where the state lies")
    options = parser.parse_args()
    print(line("double_capture", measure(options.quick, options.device)))


if __name__ == "__main__":
    sys.exit(main())
