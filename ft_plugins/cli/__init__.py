"""The command `ft-plugins`."""

from .commands import app, main

__all__ = ["app", "main"]
