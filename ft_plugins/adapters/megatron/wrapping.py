"""`adapters.wrapping` for Megatron-LM, with the version that is tested."""

from __future__ import annotations

from functools import partial

from .. import wrapping

replace = partial(wrapping.replace, framework="Megatron-LM", tested="core_v0.16.1")
