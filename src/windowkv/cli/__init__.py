"""The `windowkv` command."""

from windowkv.cli.commands import app, main

__all__ = ["app", "main"]
