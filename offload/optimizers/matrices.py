"""Which parameters Muon trains, and the param groups of these and of the others.

parameters=None                          matrices of blocks: Muon; embeddings, head, norms: AdamW
{"params": [...]}                        as by default, as two param groups with its numbers
{"params": [...], "use_muon": True}      all by Muon; False: all by AdamW (Keller Jordan's name)
parameter.use_muon = True                one parameter, in a group that does not say (DeepSpeed's)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from offload.tiers.errors import ConfigError
from offload.zero.groups.parameter_grouping import ParameterGrouping

if TYPE_CHECKING:
    from offload.config.optimizer import OptimizerConfig

USE_MUON = "use_muon"


def kind_of(group: Mapping[str, Any], kinds: Sequence[str]) -> str:
    """Return the type by which a param group is trained, one of `OptimizerConfig.kinds`."""
    return kinds[0] if len(kinds) == 1 or group.get(USE_MUON) else kinds[1]


@dataclass(frozen=True)
class Matrices:
    """The parameters that Muon trains."""

    names: frozenset[str] = frozenset()  # each one's first
    _ids: Collection[int] = field(default_factory=frozenset)

    @classmethod
    def of(
        cls, model: nn.Module, grouping: ParameterGrouping, given: Any, config: OptimizerConfig
    ) -> Matrices:
        """Return those of a model whose param groups are `given`. Raises ConfigError for parameters
        that are no matrices, and if there is none."""
        if config.type != "muon":
            return cls()
        embeddings = {
            id(param) for module in model.modules() if isinstance(module, nn.Embedding)
            for param in module.parameters(recurse=False)
        }  # fmt: skip
        names = {id(param): name for name, param in model.named_parameters()}
        usual = set(grouping.shape().matrices)
        chosen: set[int] = set()
        for group in _groups(model, given):
            for param in group["params"]:
                name = names.get(id(param), "")
                said = group.get(USE_MUON, getattr(param, USE_MUON, None))
                uses = said if said is not None else name in usual and id(param) not in embeddings
                if uses and param.ndim != 2:
                    raise ConfigError(
                        "Muon only supports 2D parameters whereas we found a parameter with size: "
                        f"{tuple(param.shape)}: {name or 'a parameter'}; put it in a param group "
                        "with use_muon=False, which AdamW trains"
                    )
                if uses and param.requires_grad:
                    chosen.add(id(param))
        if not chosen and given is None:
            raise ConfigError(
                "optimizer.type: muon trains matrices of blocks that repeat, and the model has "
                "none; name its matrices, parameters=[{'params': [...], 'use_muon': True}, ...], "
                "set groups.blocks, or use optimizer.type: adamw"
            )
        by_id = {id(param): its[0] for its, param in grouping.params.items()}
        return cls(frozenset(by_id[key] for key in chosen if key in by_id), frozenset(chosen))

    def param_groups(self, given: Sequence[Any], config: OptimizerConfig) -> list[dict[str, Any]]:
        """Return param groups that each say `use_muon`, those that did not cut in two. Of a group's
        own numbers AdamW's part takes an lr and a weight_decay that are not the configuration's."""
        groups: list[dict[str, Any]] = []
        for group in _groups(None, given):
            if USE_MUON in group:
                groups.append(group)
                continue
            for uses in (True, False):
                some = [each for each in group["params"] if (id(each) in self._ids) is uses]
                if some or not (uses or group["params"]):
                    own = group if uses else {
                        key: value for key, value in group.items() if key not in config.numbers
                        or (key in ("lr", "weight_decay") and value != config.numbers[key])
                    }  # fmt: skip
                    groups.append({**own, "params": some, USE_MUON: uses})
        return groups

    def __str__(self) -> str:
        """Return one line; empty if there is none."""
        said = f"Muon trains {len(self.names)} matrices, AdamW all other parameters"
        return said if self.names else ""


def _groups(model: nn.Module | None, given: Any) -> Iterator[dict[str, Any]]:
    """Yield copies of param groups as torch.optim takes them; of a model if none are given."""
    if given is None and model is not None:
        given = [param for param in model.parameters() if param.requires_grad]
    for each in given if given and isinstance(given[0], dict) else [{"params": given or []}]:
        params = each["params"]
        params = [params] if isinstance(params, nn.Parameter) else list(params)
        # torch takes pairs of a name and a parameter, too
        yield {**each, "params": [p[1] if isinstance(p, tuple) else p for p in params]}
