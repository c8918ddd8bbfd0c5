"""The `windowkv` command."""

from windowkv.cli.app import app, main

__all__ = ["app", "main"]
