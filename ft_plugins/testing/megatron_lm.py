"""Runs of an unmodified Megatron-LM checkout under ft-run, as its user starts them, on the CPU.

Invariant: the checkout is not edited; at the first start Megatron compiles its data set helpers in it, as for any user.
No run, and nothing that it started, outlives `ft_run`.

In: script and arguments. Out: a `Run`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..events import Event
from .driven import DrivenNode
from .driver import DriveError

NODE = "here"
RUN_SECONDS = 400.0  # for one run; five times what eight ranks take on two idle cores
_SETTINGS = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONWARNINGS": "ignore",
}
_TAIL = 60  # lines of a run's output in a message
_DOCUMENTS, _TOKENS, _VOCABULARY = 60, 200, 126


@dataclass(frozen=True)
class Run:
    """One finished command: its status, what it printed, the folder that it saved to, its events."""

    status: int
    output: str
    saved: Path
    reported: tuple[Event, ...]

    def events(self, name: str) -> list[Event]:
        """The events of that name, in order."""
        return [event for event in self.reported if event.name == name]

    def require_success(self) -> None:
        """Raises DriveError with ft-run's last word, then the end of the output, where it ended with an error."""
        if self.status != 0:
            lines = self.output.splitlines()
            last = next((line for line in reversed(lines) if line.startswith("ft-run: ")), "ft-run: no last word")
            tail = "\n".join(lines[-_TAIL:])
            raise DriveError(f"status {self.status}, expected 0: {last}\n{tail}")


def ft_run(script: Sequence[object], saved: Path, *arguments: object, job: str, ranks: int = 8) -> Run:
    """`ft-run ... script arguments`; its output is in `saved`/`job`/output.log while it runs.

    Raises DriveError when it takes longer than RUN_SECONDS.
    """
    words = [str(word) for word in ("--nproc-per-node", ranks, *script, *arguments)]
    node = DrivenNode(job, NODE, saved / job, words, _SETTINGS, protected="--reft" in words)
    try:
        node.wait(RUN_SECONDS)
        status = node.status
    finally:
        node.release()
    if status is None:
        raise DriveError(
            f"ft-run {' '.join(words)} took more than {RUN_SECONDS:.0f} s; it printed:\n{node.tail(_TAIL)}"
        )
    reported = node.events() if "--reft" in words else ()
    return Run(status, node.log.read_text(errors="replace"), saved, reported)


def write_corpus(prefix: Path) -> Path:
    """A small tokenized data set, by Megatron's own builder. Returns its prefix, for --data-path."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    drawn = np.random.default_rng(5)
    for _ in range(_DOCUMENTS):
        tokens = torch.from_numpy(drawn.integers(0, _VOCABULARY, size=_TOKENS))
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    return prefix
