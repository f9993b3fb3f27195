"""Checkouts of Megatron-LM in a folder: which versions they are.

Invariant: nothing in a checkout is imported or changed. A folder that is named after a tag is that version; upstream's
`package_info.py` must agree on major and minor number (its patch number is sometimes that of the next tag). Any other
folder is the version that `package_info.py` says, with the folder's name.

In: a folder with one checkout per tag, or one checkout. Out: `Checkout`s, the oldest version first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import FtError

SCRIPT = "pretrain_gpt.py"
_INFO = Path("megatron", "core", "package_info.py")
_INFO_BYTES = 1 << 16  # upstream's has 1 KiB
_TAG = re.compile(r"core_v(\d+)\.(\d+)\.(\d+)")


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


def under(root: Path) -> list[Checkout]:
    """Of each checkout in `root`, or of `root` itself. Raises CheckoutError when there is none, or one is misnamed."""
    if not root.is_dir():
        raise CheckoutError(f"{root}: there is no such folder; expected one with a checkout of Megatron-LM per tag")
    folders = [root] if (root / SCRIPT).exists() else sorted(one for one in root.iterdir() if (one / SCRIPT).exists())
    if not folders:
        raise CheckoutError(f"{root}: expected a checkout of Megatron-LM per tag, as {root}/core_v0.16.1/{SCRIPT}")
    return sorted(checkout(folder.resolve()) for folder in folders)


def checkout(folder: Path) -> Checkout:
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
