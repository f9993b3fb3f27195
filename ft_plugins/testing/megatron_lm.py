"""Checkouts of Megatron-LM: which versions they are, and unmodified runs of them under ft-run on the CPU.

A folder that is named after a tag is that version; upstream's `package_info.py` must agree on the major and the minor
number (its patch number is sometimes that of the next tag). Any other folder is the version that `package_info.py`
states, labelled with the folder's name.

Invariant: a checkout is never edited; at the first start Megatron compiles its data set helpers in it, as for any user.
No run, and nothing that it started, outlives `ft_run`.

In: a folder with one checkout per tag, or one checkout; script and arguments. Out: `Checkout`s, the oldest version
first; `MegatronLmRun`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..errors import FtError
from ..events import Event
from .driven import DrivenNode
from .driver import DriveError

SCRIPT = "pretrain_gpt.py"
_INFO = Path("megatron", "core", "package_info.py")
_INFO_BYTES = 1 << 16  # upstream's has 1 KiB
_TAG = re.compile(r"core_v(\d+)\.(\d+)\.(\d+)")
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


class CheckoutError(FtError):
    """A folder that should be a checkout of Megatron-LM is something else."""


@dataclass(frozen=True, order=True)
class Checkout:
    """One version. `label` is empty for a tag, else the folder's name."""

    number: tuple[int, int, int]
    label: str
    folder: Path

    def __str__(self) -> str:
        return "-".join([".".join(map(str, self.number)), *filter(None, [self.label])])


def checkouts_in(root: Path) -> list[Checkout]:
    """Of each checkout in `root`, or of `root` itself. Raises CheckoutError when there is none, or one is misnamed."""
    if not root.is_dir():
        raise CheckoutError(f"{root}: there is no such folder; expected one with a checkout of Megatron-LM per tag")
    folders = [root] if (root / SCRIPT).exists() else sorted(one for one in root.iterdir() if (one / SCRIPT).exists())
    if not folders:
        raise CheckoutError(f"{root}: expected a checkout of Megatron-LM per tag, as {root}/core_v0.16.1/{SCRIPT}")
    return sorted(read_checkout(folder.resolve()) for folder in folders)


def read_checkout(folder: Path) -> Checkout:
    """The one in `folder`. Raises CheckoutError."""
    said = _package_info(folder / _INFO)
    tag = _TAG.fullmatch(folder.name)
    if tag is None:
        return Checkout(said, re.sub(r"[^\w.-]", "_", folder.name), folder)
    number = (int(tag[1]), int(tag[2]), int(tag[3]))
    if number[:2] != said[:2]:
        raise CheckoutError(f"{folder}: expected version {'.'.join(map(str, said))}, which its {_INFO} says")
    return Checkout(number, "", folder)


def _package_info(file: Path) -> tuple[int, int, int]:
    try:
        with open(file, encoding="utf-8", errors="replace") as opened:
            text = opened.read(_INFO_BYTES)
    except OSError as error:
        raise CheckoutError(f"{file}: {error.strerror}; expected a checkout of Megatron-LM") from error
    parts = [re.search(rf"^{name} *= *(\d{{1,9}})\s*$", text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")]
    if not all(parts):
        raise CheckoutError(f"{file}: expected MAJOR, MINOR and PATCH, each a number")
    major, minor, patch = (int(part[1]) for part in parts if part)
    return major, minor, patch


@dataclass(frozen=True)
class MegatronLmRun:
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


def ft_run(script: Sequence[object], saved: Path, *arguments: object, job: str, ranks: int = 8) -> MegatronLmRun:
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
    return MegatronLmRun(status, node.log.read_text(errors="replace"), saved, reported)


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
