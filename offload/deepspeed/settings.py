"""The settings of an engine, from a DeepSpeed configuration."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from offload.config import OffloadConfig
from offload.config.paths import StrPath
from offload.deepspeed.migration import Batches, Migration, migrate, read_ds_config
from offload.optimizers.client import CLASSES, ClientOptimizer
from offload.tiers.errors import ConfigError, UnsupportedError

_log = logging.getLogger("offload")
# Keys of the optimizer section on how states are kept, which no client's optimizer has.
_OF_STATES = ("master", "states", "chunk", "in_backward")


@dataclass(frozen=True)
class Settings:
    """The settings of one engine."""

    given: dict[str, Any]  # the configuration as it came
    made: Migration
    batches: Batches
    client: ClientOptimizer | None
    config: OffloadConfig

    @classmethod
    def of(
        cls, source: StrPath | Mapping[str, Any], ranks: int,
        optimizer: torch.optim.Optimizer | None,
    ) -> Settings:  # fmt: skip
        """Read a configuration. Raise ConfigError for keys that are unknown, refused or left to the
        Trainer; log those that are dropped."""
        given = read_ds_config(source)
        made = migrate(given, ranks)
        unfilled = made.unfilled
        if unfilled:
            raise ConfigError(
                f"{', '.join(unfilled)}: auto is filled in by transformers' Trainer only; "
                "write the number"
            )
        if made.batches is None:
            raise ConfigError("train_batch_size: missing; set it or train_micro_batch_size_per_gpu")
        for warning in made.warnings:
            _log.warning("%s", warning)
        client = None if optimizer is None else ClientOptimizer.of(optimizer, CLASSES)
        if client is not None:
            kept = {
                key: value for key, value in made.values.get("optimizer", {}).items()
                if key in _OF_STATES
            }  # fmt: skip
            for key in made.get("offload", {}).get("optimizer", {}):
                if key not in _OF_STATES:
                    raise ConfigError(
                        f"offload.optimizer.{key}: the program has an optimizer of its own, which "
                        "says that; remove one of them"
                    )
            made.values["optimizer"] = {**client.section, **kept}
        config = made.config
        if config.optimizer.in_backward is True:
            raise UnsupportedError(
                "optimizer.in_backward: updates begin in the first backward, and step() decides "
                "here when a step is due; use offload.initialize for it"
            )
        return cls(given, made, made.batches, client, config)

    @property
    def has_optimizer(self) -> bool:
        return self.client is not None or self.made.has_optimizer
