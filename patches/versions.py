"""The tested versions, as listed in docs/versions.md; patches are declared for these."""

from __future__ import annotations

TORCH = ("2.6.0", "2.11.0", "2.13.0", "2.14.1")
MEGATRON = ("0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.0")
DEEPSPEED = ("0.16.9", "0.18.9", "0.19.8")
PYTHON = ("3.10", "3.11", "3.12", "3.13")

_TESTED = {"torch": TORCH, "Megatron": MEGATRON, "DeepSpeed": DEEPSPEED}


def untested(framework: str, version: str) -> str:
    """A remark on a version whose series (0.16 of 0.16.2) is not tested; '' if it is."""
    series = version.split(".")[:2]
    if any(one.split(".")[:2] == series for one in _TESTED[framework]):
        return ""
    return f"{framework} {version} is untested with ft_plugins; tested versions: {', '.join(_TESTED[framework])}"
