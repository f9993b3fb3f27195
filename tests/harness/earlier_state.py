"""State that an earlier version of ft_plugins left, which is kept with the tests: a checkpoint, and memory of a node.

    ARCHIVE = checkpoint/v1-4/...   as it lay in the folder of the job's checkpoints
              segments/r0, r1       as they lay in /dev/shm, the SMP having ended
              end.json              what the unfailed run of the same commit ended with: losses, digests of each rank
              tensors.json          digests of the whole tensors in the checkpoint
              about.json            what it was made with: `About`

Invariant: the jobs here are never changed; their words, their text and its name belong to what was stored. What a state
description of the package holds besides tensors is not part of the end: later versions may describe more.

In: the name of a framework. Out: its job, protected and not; its archive, unpacked.
"""

from __future__ import annotations

import json
import os
import platform
import tarfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import xxhash

from ft_plugins.rehearse.transcripts import leaves
from ft_plugins.snapshot.checkpoint.checkpoint_reader import CheckpointReader

from .deepspeed_runs import EXAMPLE as DEEPSPEED
from .deepspeed_runs import DeepSpeedConfiguration
from .forkserver import load
from .golden import losses
from .megatron_runs import EXAMPLE as MEGATRON
from .runs import EXAMPLES

ARCHIVES = Path(__file__).resolve().parents[1] / "earlier_state"
FRAMEWORKS = ("torch", "megatron", "deepspeed")
STORED, LAST, RANKS = 4, 7, 2  # iterations: of checkpoint and memory, of the run
TEXT = "text.txt"  # a relative path: the name of the data is part of a fingerprint
FLAGS = ("--reft", "--reft-bucket-mib", "1", "--reft-checkpoint-interval", "0", "--ftp-detect-seconds", "120")
_PACKAGES = ("torch", "numpy", "megatron-core", "deepspeed")
_SMALL = ("--layers", "1", "--hidden", "4", "--heads", "2", "--sequence", "16")
_ENTRIES = {
    "torch": f"{EXAMPLES / 'torch_loop.py'}:main",
    "megatron": f"{MEGATRON}:main",
    "deepspeed": f"{DEEPSPEED}:main",
}
_WORDS = {
    "torch": ("--hidden", "1", "--windows", "48", "--batch", "4", "--sequence", "16"),
    "megatron": (*_SMALL, "--bf16", "--distributed-optimizer", "--global-batch", "4", "--micro-batch", "1"),
    "deepspeed": ("--pp", "0", *_SMALL, "--deepspeed_config", "ds.json"),
}


@dataclass(frozen=True)
class About:
    """What an archive was made with. `layout`: the word by which segments of that version are known."""

    commit: str
    layout: str
    python: str
    processor: str
    packages: dict[str, str]

    def differences(self, other: About) -> list[str]:
        """What of that may make the same program compute other bits, where it differs."""
        here, there = ({**each.packages, "processor": each.processor} for each in (self, other))
        return [f"{name} {here.get(name)} -> {there.get(name)}" for name in here if here.get(name) != there.get(name)]


def about_here(commit: str = "", layout: str = "") -> About:
    """This machine and what is installed on it."""
    import torch

    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return About(
        commit, layout, platform.python_version(), f"{model}, {torch.backends.cpu.get_cpu_capability()}", packages
    )


@dataclass(frozen=True)
class EarlierJob:
    """The job of a framework, run in a folder of its own."""

    framework: str
    folder: Path

    @property
    def digests(self) -> Path:
        return self.folder / "state-"

    @property
    def loss_log(self) -> Path:
        return self.folder / "loss.jsonl"

    def fields(self, checkpoints: Path | None) -> dict[str, Any]:
        """The fields of its `JobSpec` but for the name. `checkpoints`: of a protected job."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / TEXT).write_text("".join(f"{number} times {number} is {number**2}\n" for number in range(400)))
        settings = DeepSpeedConfiguration(RANKS, 1).json()
        (self.folder / "ds.json").write_text(json.dumps(settings))
        words = ["--iterations", str(LAST), "--data", TEXT, *_WORDS[self.framework]]
        words += ["--state-digest", str(self.digests), "--loss-log", str(self.loss_log)]
        if checkpoints is None and self.framework == "torch":
            words.append("--unprotected")
        return {
            "entry": f"{__name__}:in_folder",
            "argv": (str(self.folder), _ENTRIES[self.framework], *words),
            "folder": str(self.folder),
            "nproc": RANKS,
            "flags": () if checkpoints is None else (*FLAGS, "--reft-checkpoint-dir", str(checkpoints)),
            "environment": {"OMP_NUM_THREADS": "1"},
        }

    def end(self) -> dict[str, Any]:
        """What it ended with, without what depends on how the package describes a host's state."""
        ranks = [json.loads(Path(f"{self.digests}{rank:05d}.json").read_text()) for rank in range(RANKS)]
        for each in ranks:
            each.pop("small", None)
        return {"losses": {str(at): one for at, one in losses(self.loss_log).items()}, "ranks": ranks}


def in_folder(argv: Sequence[str]) -> None:
    """One rank: the entry `argv[1]` in the folder `argv[0]`, with the other words."""
    folder, entry, *words = argv
    run = load(entry)
    os.chdir(folder)
    run(words)


def differences(stored: dict[str, Any], end: dict[str, Any]) -> list[str]:
    """Where `end` lacks something of `stored`, or has another value."""
    theirs = dict(leaves("", end))
    missing = [f"{at}: not there" for at, _ in leaves("", stored) if at not in theirs]
    return missing + [
        f"{at}: {value!r} != {theirs[at]!r}" for at, value in leaves("", stored) if theirs.get(at, value) != value
    ]


# ---- archives


@dataclass(frozen=True)
class EarlierState:
    """An unpacked archive."""

    folder: Path

    @property
    def about(self) -> About:
        return About(**json.loads((self.folder / "about.json").read_text()))

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint" / f"v1-{STORED}"

    @property
    def end(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "end.json").read_text())
        return found

    @property
    def tensors(self) -> dict[str, str]:
        """The digest of each whole tensor in the checkpoint, by name."""
        found: dict[str, str] = json.loads((self.folder / "tensors.json").read_text())
        return found

    def segment(self, rank: int) -> Path:
        return self.folder / "segments" / f"r{rank}"


def archive_of(framework: str) -> Path:
    return ARCHIVES / f"{framework}.tar.xz"


def unpack(framework: str, folder: Path) -> EarlierState:
    """Unpack the archive of a framework into a new folder."""
    folder.mkdir(parents=True)
    with tarfile.open(archive_of(framework)) as archive:
        archive.extractall(folder, filter="data")
    return EarlierState(folder)


def pack(framework: str, folder: Path) -> Path:
    """Make the archive of a folder. Times and owners are left out."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.mtime, member.uid, member.gid, member.uname, member.gname = 0, 0, 0, "", ""
        return member

    with tarfile.open(archive_of(framework), "w:xz", preset=9) as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, path.name, filter=plain)
    return archive_of(framework)


def tensors_of(checkpoint: Path) -> dict[str, str]:
    """The digest of each whole tensor in a checkpoint, by name, read without the job."""
    reader = CheckpointReader(checkpoint)
    names = sorted({name for index in reader.indices() for name in index.items})
    return {name: xxhash.xxh3_64_hexdigest(reader.whole(name, range(RANKS))[0].data) for name in names}


def describe(about: About, folder: Path, end: dict[str, Any]) -> None:
    """Write what an archive holds in addition to checkpoint and memory."""
    tensors = tensors_of(folder / "checkpoint" / f"v1-{STORED}")
    for name, content in (("about", asdict(about)), ("end", end), ("tensors", tensors)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1, sort_keys=True))
