"""Reads the keys of a model's configuration file, with their defaults, and checks them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from offload.config.training import MOST_LAYERS, MOST_SIZE
from offload.tiers.errors import ConfigError
from offload.tools.memest.source.error_text import shown


class Keys:
    """Values of a configuration by key, or the family's defaults; raises ConfigError for a wrong
    one.

    An absent key has its default; `null` means that its value is derived from other keys.
    """

    def __init__(
        self, values: Mapping[str, Any], defaults: Mapping[str, Any], where: str,
        aliases: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._values = {**defaults, **values}
        for other, key in (aliases or {}).items():
            if other in values and key not in values:
                self._values[key] = values[other]
        self.where = where

    def raw(self, key: str) -> Any:
        """Return the value in the file, unchecked; None if neither file nor family has one."""
        return self._values.get(key)

    def size(self, key: str, *, most: int = MOST_SIZE) -> int:
        """Return an integer of at least 1."""
        value = self._values.get(key)
        if value is None:
            raise ConfigError(f"{self.where}: {key} is missing; the number of parameters needs it")
        return self._whole(key, value, 1, most)

    def size_or(self, key: str, otherwise: int) -> int:
        """Return an integer of at least 1, or `otherwise` if it is null or absent."""
        return otherwise if self._values.get(key) is None else self.size(key)

    def layers(self, key: str = "num_hidden_layers") -> int:
        return self.size(key, most=MOST_LAYERS)

    def flag(self, key: str) -> bool:
        """Return a boolean; null and absent are false."""
        value = self._values.get(key)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise ConfigError(f"{self.where}: {key} is {shown(value)}; it must be true or false")

    def wholes(self, key: str) -> list[int]:
        """Return a list of integers; null and absent are empty."""
        value = self._values.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise ConfigError(f"{self.where}: {key} is {shown(value)}; it must be a list")
        return [self._whole(key, item, 0, MOST_SIZE) for item in value]

    def quotient(self, whole: str, part: str) -> int:
        """Return `whole / part`, at least 1 and rounded down, as the libraries do."""
        result = self.size(whole) // self.size(part)
        if result == 0:
            raise ConfigError(
                f"{self.where}: {whole} {self.size(whole)} is smaller than {part} {self.size(part)}"
            )
        return result

    def _whole(self, key: str, value: Any, least: int, most: int) -> int:
        if isinstance(value, float) and math.isfinite(value) and value == int(value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{self.where}: {key} is {shown(value)}; it must be a whole number")
        if not least <= value <= most:
            raise ConfigError(
                f"{self.where}: {key} is {shown(value)}; it must be from {least} to {most}"
            )
        return value
