"""Find checkouts of Megatron-LM with their versions, and run them unmodified under ft-run on the CPU.

A folder named after a tag is that version; upstream's `package_info.py` must agree on the major and minor number (its
patch number is sometimes that of the next tag). Any other folder is the version in `package_info.py`, labelled with the
folder's name.

Invariant: a checkout is never edited, but at the first start Megatron compiles its data set helpers in it, as for any
user. No process outlives `ft_run`.

In: a folder with one checkout per tag, or one checkout; script and arguments. Out: `Checkout`s, oldest version first;
`MegatronLmRun`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from ft_plugins.errors import FtError
from ft_plugins.events import Event
from ft_plugins.rehearse.driven import DrivenNode
from ft_plugins.rehearse.driver import DriveError

from . import orderly_end

SCRIPT = "pretrain_gpt.py"
_INFO = Path("megatron", "core", "package_info.py")
_INFO_BYTES = 1 << 16  # read limit; upstream's file has 1 KiB
_TAG = re.compile(r"core_v(\d+)\.(\d+)\.(\d+)")
NODE = "here"
RUN_SECONDS = 400.0  # limit of one run; five times the duration of eight ranks on two idle cores
SETTINGS = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONWARNINGS": "ignore",
}
_SYSTEMS = ("--reft", "--baft", "--paft", "--sync-policy")  # flags that switch one on
_TAIL = 60  # lines of a run's output in a message
_DOCUMENTS, _TOKENS, _VOCABULARY = 60, 200, 126


class CheckoutError(FtError):
    """A folder is not the expected checkout of Megatron-LM."""


@dataclass(frozen=True, order=True)
class Checkout:
    """One checked-out version. `label` is empty for a tag, else the folder's name."""

    number: tuple[int, int, int]
    label: str
    folder: Path

    def __str__(self) -> str:
        return "-".join([".".join(map(str, self.number)), *filter(None, [self.label])])


def checkouts_in(root: Path) -> list[Checkout]:
    """The checkouts in `root`, or `root` itself. Raises CheckoutError if there is none or one is misnamed."""
    if not root.is_dir():
        raise CheckoutError(f"{root}: no such folder; expected one with a checkout of Megatron-LM per tag")
    folders = [root] if (root / SCRIPT).exists() else sorted(one for one in root.iterdir() if (one / SCRIPT).exists())
    if not folders:
        raise CheckoutError(f"{root}: expected a checkout of Megatron-LM per tag, as {root}/core_v0.16.1/{SCRIPT}")
    return sorted(read_checkout(folder.resolve()) for folder in folders)


def read_checkout(folder: Path) -> Checkout:
    """The checkout in `folder`. Raises CheckoutError."""
    stated = _package_info(folder / _INFO)
    tag = _TAG.fullmatch(folder.name)
    if tag is None:
        return Checkout(stated, re.sub(r"[^\w.-]", "_", folder.name), folder)
    number = (int(tag[1]), int(tag[2]), int(tag[3]))
    if number[:2] != stated[:2]:
        raise CheckoutError(f"{folder}: its {_INFO} states version {'.'.join(map(str, stated))}; rename the folder")
    return Checkout(number, "", folder)


def _package_info(file: Path) -> tuple[int, int, int]:
    try:
        with open(file, encoding="utf-8", errors="replace") as opened:
            text = opened.read(_INFO_BYTES)
    except OSError as error:
        raise CheckoutError(f"{file}: {error.strerror}; expected a checkout of Megatron-LM") from error
    parts = [re.search(rf"^{name} *= *(\d{{1,9}})\s*$", text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")]
    if not all(parts):
        raise CheckoutError(f"{file}: expected MAJOR, MINOR and PATCH as numbers")
    major, minor, patch = (int(part[1]) for part in parts if part)
    return major, minor, patch


@dataclass(frozen=True)
class MegatronLmRun:
    """One finished command: its exit status, its output, the folder that it saved to, its events."""

    status: int
    output: str
    saved: Path
    reported: tuple[Event, ...]

    def events(self, name: str) -> list[Event]:
        """The events of that name, in order."""
        return [event for event in self.reported if event.name == name]

    def require_success(self) -> None:
        """Raises DriveError with ft-run's last message and the end of the output unless the exit status is 0."""
        if self.status != 0:
            lines = self.output.splitlines()
            last = next((line for line in reversed(lines) if line.startswith("ft-run: ")), "ft-run: no message")
            tail = "\n".join(lines[-_TAIL:])
            raise DriveError(f"status {self.status}, expected 0: {last}\n{tail}")


def ft_run(
    script: Sequence[object],
    saved: Path,
    *arguments: object,
    job: str,
    ranks: int = 8,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> MegatronLmRun:
    """Run `ft-run ... script arguments`. Output goes to `saved`/`job`/output.log. `settings`: of the environment. A run
    without any system ends by `orderly_end`.

    Raises DriveError if it takes longer than RUN_SECONDS.
    """
    command = [str(word) for word in (*script, *arguments)]
    if not any(word.startswith(_SYSTEMS) for word in command):
        command.insert(0, orderly_end.__file__)
    words = ["--nproc-per-node", str(ranks), *command]
    node = DrivenNode(job, NODE, saved / job, words, {**SETTINGS, **settings}, protected="--reft" in words)
    try:
        node.wait(RUN_SECONDS)
        status = node.status
    finally:
        node.release()
    if status is None:
        raise DriveError(
            f"ft-run {' '.join(words)} took more than {RUN_SECONDS:.0f} s; its output:\n{node.tail(_TAIL)}"
        )
    reported = node.events() if "--reft" in words else ()
    return MegatronLmRun(status, node.log.read_text(errors="replace"), saved, reported)


def write_corpus(prefix: Path) -> Path:
    """Write a small tokenized data set with Megatron's builder. Returns its prefix, for --data-path."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    generator = np.random.default_rng(5)
    for _ in range(_DOCUMENTS):
        tokens = torch.from_numpy(generator.integers(0, _VOCABULARY, size=_TOKENS))
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    return prefix
