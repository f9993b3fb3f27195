"""Which program the package `megatron` belongs to: Megatron-LM, or a fork that trains a DeepSpeed engine.

Invariant: nothing is imported. All of them are called `megatron`, and Megatron-DeepSpeed carries an early
`megatron.core`, so neither the name nor a version distinguishes them; their files do.

In: the folders of the package. Out: the program."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

_SOURCE_BYTES = 1 << 20  # read limit; their training.py has 80 KB


class MegatronPackage(Enum):
    """The value is the name that its users know."""

    MEGATRON_LM = "Megatron"
    MEGATRON_DEEPSPEED = "Megatron-DeepSpeed"
    GPT_NEOX = "gpt-neox"


def package_in(folders: Iterable[Path]) -> MegatronPackage:
    """The program whose package has these folders; Megatron-LM, whose core is also a package of its own, if none."""
    for folder in folders:
        if (folder / "neox_arguments").is_dir():
            return MegatronPackage.GPT_NEOX
        training = folder / "training.py"  # Megatron-LM has a folder of that name since 0.7
        if training.is_file():
            with open(training, encoding="utf-8", errors="replace") as opened:
                if "deepspeed.initialize(" in opened.read(_SOURCE_BYTES):
                    return MegatronPackage.MEGATRON_DEEPSPEED
    return MegatronPackage.MEGATRON_LM


def importable_package() -> MegatronPackage:
    """The program whose package `import megatron` finds."""
    spec = importlib.util.find_spec("megatron")
    return package_in(map(Path, (spec and spec.submodule_search_locations) or ()))
