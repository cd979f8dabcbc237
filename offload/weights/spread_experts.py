"""Experts of a model that are spread over ranks (`offload.moe.MoE(ep_size=...)`), for the engine.

    world 2, ep_size 2      rank 0                     rank 1
    experts of 8            layer.experts.0 ... 3      layer.experts.4 ... 7
    groups, in order        layer, 0, 1, 2, 3          layer, 4, 5, 6, 7

All ranks have the same groups but for the experts' numbers; those groups belong to the ranks with
the same numbers (rank 0 and rank 2 of four), with the shards and collectives that they have. What
holds for every rank is said of an expert's place: its number on the first rank.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

from offload.tiers.errors import ConfigError, UnsupportedError
from offload.zero.groups.model_shape import GroupShape
from offload.zero.groups.parameter_grouping import ep_size_of, managed


class SpreadExperts:
    """Names of a model's experts on each rank. Without any, `ep_size` is 1 and names are as they
    are."""

    def __init__(self, model: nn.Module) -> None:
        """Raises UnsupportedError for experts that cannot be trained so."""
        self.ep_size = 1
        # by the prefix of their experts' names: the number of this rank's first one, and how many
        self._tables: dict[str, tuple[int, int]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            if ep_size_of(module) > 1:
                self._add(name, module)
        self._check_all_in_lists(model)

    @property
    def prefixes(self) -> list[str]:
        """Return the prefixes of the names of experts, which differ on other ranks."""
        return list(self._tables)

    def _add(self, name: str, module: Any) -> None:
        if self.ep_size not in (1, module.ep_size):
            raise UnsupportedError(
                f"{name} has ep_size {module.ep_size}, another layer {self.ep_size}: an engine "
                "spreads the experts of all layers alike; give them one ep_size"
            )
        self.ep_size = module.ep_size
        prefix = f"{name}." if name else ""
        self._tables[prefix] = module.first, len(module)

    def _check_all_in_lists(self, model: nn.Module) -> None:
        """Refuse experts' tensors that the engine does not move: checkpoints hold one rank's."""
        others = [(name, "buffer") for name, _ in model.named_buffers(remove_duplicate=False)]
        others += [
            (name, "parameter without gradients")
            for name, param in model.named_parameters(remove_duplicate=False) if not managed(param)
        ]  # fmt: skip
        for name, kind in others:
            if self._prefix_of(name) is not None:
                raise UnsupportedError(
                    f"{name} is a {kind} of an expert, and experts that are spread over "
                    f"{self.ep_size} ranks have trainable tensors alone; keep it outside of the "
                    "experts, or set ep_size=1"
                )

    def check(self, rank: int, ranks: int, *, meshed: bool) -> None:
        """Raise UnsupportedError or ConfigError for settings that do not go with spread experts.
        `meshed`: the model is parallel in other ways, too."""
        if self.ep_size == 1:
            return
        if meshed:
            raise UnsupportedError(
                f"ep_size {self.ep_size} with mesh= or parameters that are DTensors: experts are "
                "spread over all ranks of the world, each of which has to have data of its own; "
                "set ep_size=1, or leave tensor parallelism out"
            )
        for prefix, (first_here, here) in self._tables.items():
            first = rank % self.ep_size * here
            if first_here != first or ranks % self.ep_size:
                raise ConfigError(
                    f"{prefix}{first_here} is the first expert on rank {rank} of {ranks} with "
                    f"ep_size {self.ep_size}, and has to be {first}; build the model on each rank"
                )

    def check_groups(self, groups: Iterable[GroupShape]) -> None:
        """Raise UnsupportedError for experts that would be averaged with those of other ranks."""
        for group in groups:
            for param in group.params:
                if group.ep_size == 1 and self._prefix_of(param.name) is not None:
                    raise UnsupportedError(
                        f"{param.name} is of experts that are spread over {self.ep_size} ranks, "
                        "and cannot be a group of its own; give offload.initialize the model "
                        "around the list of experts"
                    )

    def _prefix_of(self, name: str) -> str | None:
        for prefix in self._tables:
            if name.startswith(prefix) and name[len(prefix) :].split(".", 1)[0].isdecimal():
                return prefix
        return None

    def name_on(self, rank: int, name: str) -> str:
        """Return the name, on another rank, of the expert at the same place as `name` here."""
        prefix = self._prefix_of(name)
        if prefix is None:
            return name
        first, here = self._tables[prefix]
        number, dot, rest = name[len(prefix) :].partition(".")
        return f"{prefix}{int(number) - first + rank * here}{dot}{rest}"

    def owners(self, name: str) -> range:
        """Return the ranks with a parameter of their own at this one's place; only the first one if
        all have the same."""
        return range(1 if self._prefix_of(name) is None else self.ep_size)
