"""The `offload` command. Each subcommand imports what it needs when it runs."""

from offload.cli.app import main

__all__ = ["main"]
