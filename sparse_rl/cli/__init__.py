"""The command line `sparse-rl`: one file per command, the options that commands share in options.py."""

from .main import app, main

__all__ = ["app", "main"]
