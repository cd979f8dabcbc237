"""What a description of a family of architectures consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from offload.tools.memest.source.config_keys import Keys
from offload.zero.module_tree import ModuleTree


def _always(keys: Keys) -> bool:
    return True


@dataclass(frozen=True)
class Family:
    """A `model_type`: the class that is trained, the keys' defaults, and its modules.

    Names, shapes and tying are those of transformers' modules (5.17), without modules that have no
    parameters; a test builds both and compares them.
    """

    architecture: str
    build: Callable[[Keys], ModuleTree]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)  # another name of a key -> the key
    covers: Callable[[Keys], bool] = _always  # false: an option that is not described here

    def keys(self, values: Mapping[str, Any], where: str) -> Keys:
        return Keys(values, self.defaults, where, self.aliases)
