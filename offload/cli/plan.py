"""`offload plan`: the resolved placement and the bytes it is expected to take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from offload.cli.located import located
from offload.config import OffloadConfig


def print_plan(file: Path, overrides: Sequence[str]) -> None:
    """Describe the run of `file` without starting it."""
    config = OffloadConfig.load(file, overrides)
    from offload.planning.plan_text import describe
    from offload.train.model import build_meta_model

    with located(file, overrides):
        description = describe(config, build_meta_model(config))
    Console().print(description)
