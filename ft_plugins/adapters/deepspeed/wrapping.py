"""`adapters.wrapping` for DeepSpeed, with the version that is tested."""

from __future__ import annotations

from functools import partial

from .. import wrapping

replace = partial(wrapping.replace, framework="DeepSpeed", tested="0.16.9, 0.18.9 or 0.19.8")
