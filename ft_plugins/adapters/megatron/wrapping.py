"""`adapters.wrapping` for Megatron-LM, with the versions that are tested."""

from __future__ import annotations

from functools import partial

from ...patches.versions import MEGATRON
from .. import wrapping

replace = partial(wrapping.replace, framework="Megatron-LM", tested=f"one of {', '.join(MEGATRON)}")
