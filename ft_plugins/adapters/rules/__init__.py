"""What is followed, refused, or without effect with each framework, as rules over its own arguments: one table per
framework, which jobs at their start, `ft-plugins check` and docs/limits.md read. Pure; imports neither a framework nor
torch."""

from .deepspeed import DEEPSPEED
from .hugging_face import HUGGING_FACE
from .megatron import MEGATRON
from .rule import Finding, Rule, Treatment, findings, line, refuse, refused

__all__ = [
    "DEEPSPEED", "HUGGING_FACE", "MEGATRON", "Finding", "Rule", "Treatment", "findings", "line", "refuse", "refused",
]  # fmt: skip
