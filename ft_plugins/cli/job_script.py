"""What kind of job a training script is, by what it and the modules next to it import. Nothing is executed.

In: the file of a script. Out: its `ScriptKind`, and why nothing can be said of it before it starts, if nothing can.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

from ..launcher.preload.what_to_import import texts

_TRAINERS = ("transformers.", "trl.")
_REHEARSE = "nothing can be said of it before it starts; `ft-plugins rehearse` shows what is followed"
_SEE = "docs/hugging_face.md says what to do"


class ScriptKind(Enum):
    """Whose loop a script has, as clients of DeepSpeed are named."""

    MEGATRON = "Megatron-DeepSpeed"
    TRAINER = "Hugging Face's Trainer"
    LIGHTNING = "PyTorch Lightning"
    ACCELERATE = "a script over accelerate"
    OWN = ""


_BY_PACKAGE = (  # in this order: what is imported, the kind, and why nothing can be said of it without a configuration
    ("lightning", ScriptKind.LIGHTNING, f"nothing protects PyTorch Lightning without DeepSpeed; {_SEE}"),
    ("pytorch_lightning", ScriptKind.LIGHTNING, f"nothing protects PyTorch Lightning without DeepSpeed; {_SEE}"),
    ("megatron", ScriptKind.OWN, f"a loop of its own over megatron.core: {_REHEARSE}"),
    (
        "accelerate",
        ScriptKind.ACCELERATE,
        f"nothing protects a loop over accelerate without DeepSpeed by itself; {_SEE}",
    ),
    (
        "deepspeed",
        ScriptKind.OWN,
        "no DeepSpeed configuration is among its arguments: give it with --deepspeed_config FILE",
    ),
    ("ft_plugins", ScriptKind.OWN, f"a loop of its own over ft_plugins: {_REHEARSE}"),
)
_UNKNOWN = (
    "unknown: it imports none of Megatron-LM, DeepSpeed, transformers' Trainer, accelerate and ft_plugins, so nothing "
    "protects it, unless what it calls does: `ft-plugins rehearse` shows that"
)


def kind_of(script: Path) -> tuple[ScriptKind, str]:
    """The kind of a script; why nothing can be said of it without a DeepSpeed configuration, '' if something can."""
    try:
        names = set(_names(script))
    except (OSError, SyntaxError, ValueError) as error:
        return ScriptKind.OWN, f"cannot be read as Python ({error}), so nothing can be said of it"
    if any(f"{name}.".startswith("megatron.training.") for name in names):
        return ScriptKind.MEGATRON, ""
    if any(name.startswith(_TRAINERS) and name.endswith("Trainer") for name in names):
        return ScriptKind.TRAINER, ""
    packages = {name.partition(".")[0] for name in names}
    return next(((kind, why) for package, kind, why in _BY_PACKAGE if package in packages), (ScriptKind.OWN, _UNKNOWN))


def _names(script: Path) -> Iterator[str]:
    """Dotted names that are imported anywhere, and those used of them."""

    def adjacent(package: str) -> str | None:
        file = script.with_name(f"{package}.py")
        return file.read_text(errors="replace") if file.is_file() else None

    read = texts(script.read_text(errors="replace"), adjacent)
    for node in [node for text in read for node in ast.walk(ast.parse(text))]:
        match node:
            case ast.Import(names=names):
                yield from (one.name for one in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield from (f"{module}.{one.name}" for one in names)
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if f"{owner}." in _TRAINERS:
                yield f"{owner}.{name}"
