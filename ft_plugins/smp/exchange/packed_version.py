"""Types of fields in requests, replies and files that hold a packed version, for pydantic."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from ...snapshot.segment.slots import Version
from ...transport.protocol import maybe_version, version_of

PackedVersion = Annotated[Version, BeforeValidator(version_of)]
MaybeVersion = Annotated[Version | None, BeforeValidator(maybe_version)]
