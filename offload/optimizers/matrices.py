"""Which parameters Muon trains, and the param groups of these and of the others.

parameters=None                          matrices of blocks: Muon; embeddings, head, norms: AdamW
{"params": [...]}                        as by default, as two param groups with its numbers
{"params": [...], "use_muon": True}      all by Muon; False: all by AdamW (Keller Jordan's name)
parameter.use_muon = True                one parameter, in a group that does not say (DeepSpeed's)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
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

    names: Collection[str] = ()  # each one's first
    _ids: Collection[int] = ()

    @classmethod
    def of(
        cls, model: nn.Module, grouping: ParameterGrouping, given: Any, config: OptimizerConfig,
        block_classes: Sequence[str] = (),
    ) -> Matrices:  # fmt: skip
        """Return those of a model whose param groups are `given`. Raises ConfigError for parameters
        that are no matrices, and if there is none."""
        if config.type != "muon":
            return cls()
        names = {id(param): name for name, param in model.named_parameters()}
        shape, in_blocks = grouping.shape(), _in_blocks(model, block_classes)
        # an expert moves as a whole, and rows of packed experts are no parameters
        experts = {param.name for group in shape.groups if group.table for param in group.params}
        apart = {name for each in grouping.packed for name in each.names}
        apart |= experts - set(shape.matrices)
        chosen: set[int] = set()
        for group in _groups(model, given):
            for param in group["params"]:
                name = names.get(id(param), "")
                said = group.get(USE_MUON, getattr(param, USE_MUON, None))
                usual = id(param) in in_blocks and param.ndim == 2 and name not in apart
                uses = usual if said is None else said
                if uses and param.ndim != 2:
                    raise ConfigError(
                        "Muon only supports 2D parameters whereas we found a parameter with size: "
                        f"{tuple(param.shape)}: {name or 'a parameter'}; put it in a param group "
                        "with use_muon=False, which AdamW trains"
                    )
                if uses and param.requires_grad:
                    chosen.add(id(param))
        if not chosen and any(param.requires_grad for param in model.parameters()):
            raise ConfigError(
                "optimizer.type: muon trains matrices of blocks that repeat, and no such parameter "
                "is trained; name its matrices, parameters=[{'params': [...], 'use_muon': True}, "
                "...], set groups.blocks, or use optimizer.type: adamw"
            )
        managed = grouping.params.items()
        return cls({its[0] for its, param in managed if id(param) in chosen}, chosen)

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


def _in_blocks(model: nn.Module, classes: Sequence[str]) -> set[int]:
    """Return the ids of parameters in blocks, but for embeddings. Blocks are modules with parts,
    more than one of a class in a list, or of one of the `classes`. (Small models are one unit.)"""
    blocks = [module for module in model.modules() if type(module).__name__ in classes]
    for parent in model.modules():
        if isinstance(parent, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            children = [
                each for each in parent.children() if next(each.children(), None) is not None
            ]
            counts = Counter(map(type, children))
            blocks += [each for each in children if counts[type(each)] > 1]
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    apart = {id(param) for each in embeddings for param in each.parameters(recurse=False)}
    return {id(param) for block in blocks for param in block.parameters()} - apart


def _groups(model: nn.Module | None, given: Any) -> Iterator[dict[str, Any]]:
    """Yield copies of param groups as torch.optim takes them; of a model if none are given."""
    if given is None and model is not None:
        given = [param for param in model.parameters() if param.requires_grad]
    for each in given if given and isinstance(given[0], dict) else [{"params": given or []}]:
        params = each["params"]
        params = [params] if isinstance(params, nn.Parameter) else list(params)
        # torch takes pairs of a name and a parameter, too
        yield {**each, "params": [p[1] if isinstance(p, tuple) else p for p in params]}
