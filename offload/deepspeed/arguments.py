"""The command-line arguments that DeepSpeed's programs have."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config FILE` to a parser, for `initialize(args=...)`."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="Has no effect.")
    group.add_argument("--deepspeed_config", help="The configuration of DeepSpeed, JSON.")
    return parser
