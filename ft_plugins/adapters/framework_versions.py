"""Judge the installed versions of torch and of the frameworks, without importing the frameworks.

In: the metadata of installed packages. Out: what is older than this package accepts, and what is untested, in words.
"""

from __future__ import annotations

import re
from importlib import metadata

from ..patches import untested

_FRAMEWORKS = {"torch": "torch", "megatron-core": "Megatron", "deepspeed": "DeepSpeed"}


def judged_versions() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What is installed and too old, and what is installed and untested."""
    needed = "\n".join(metadata.requires("ft_plugins") or ())
    too_old, remarks = [], []
    for package, framework in _FRAMEWORKS.items():
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        least = re.search(rf"^{package}>=([0-9.]+)", needed, re.MULTILINE)
        if least and _numbers(version) < _numbers(least[1]):
            too_old.append(f"{package} {version} is older than {least[1]}")
        elif remark := untested(framework, version):
            remarks.append(remark)
    return tuple(too_old), tuple(remarks)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]+", version.partition("+")[0])[:3])
