"""A tree without torch is cut where the model is that it was made from."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch import nn

from offload.tiers.errors import ConfigError
from offload.zero.groups.discovery import discover, tree_of
from offload.zero.groups.module_tree import (
    SMALL_UNIT_NUMEL,
    ModuleTree,
    TreeParam,
    find_groups,
    shape_of,
)

LARGE = int(SMALL_UNIT_NUMEL**0.5) + 1


class Odd(nn.Module):
    """Parameters of its own, one module in two places, tied weights, lists of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(nn.init.ones_(nn.Linear(2, 2).weight))
        self.first = nn.Linear(LARGE, LARGE)
        self.again = self.first
        self.blocks = nn.ModuleList([nn.Linear(LARGE, LARGE), nn.Linear(LARGE, LARGE)])
        self.mixed = nn.Sequential(nn.Linear(LARGE, LARGE), nn.GELU(), nn.LayerNorm(LARGE))
        self.named = nn.ModuleDict({"a": nn.LSTM(8, 8), "b": nn.LSTM(8, 8)})
        self.listed = nn.ParameterList([self.first.weight, nn.Parameter(self.own.detach() + 1)])
        self.head = nn.Linear(LARGE, LARGE, bias=False)
        self.head.weight = self.blocks[0].weight
        self.blocks[1].bias.requires_grad_(False)


def test_a_tree_has_the_groups_of_its_model() -> None:
    model = Odd()
    assert shape_of(tree_of(model)) == discover(model).shape()
    assert shape_of(tree_of(model), ["LSTM"]) == discover(model, ["LSTM"]).shape()


def test_every_parameter_of_a_tree_is_in_one_group_with_all_its_names() -> None:
    model = Odd()
    groups, units = find_groups(tree_of(model))
    named = [name for group in groups for names, _ in group.params for name in names]
    assert sorted(named) == sorted(n for n, _ in model.named_parameters(remove_duplicate=False))
    assert {i for unit in units for i in unit.groups} == set(range(len(groups)))


def test_an_unmanaged_parameter_is_in_no_group() -> None:
    tree = ModuleTree("Mixed", {"a": TreeParam((3,)), "b": TreeParam((5,), managed=False)})
    assert [p.names for g in shape_of(tree).groups for p in g.params] == [("a",)]


def test_a_block_class_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no module of class Block .* it has Mixed"):
        shape_of(ModuleTree("Mixed", {"a": TreeParam((3,))}), ["Block"])


def test_trees_need_no_torch() -> None:
    program = (
        "import sys\nfrom offload.zero.groups.module_tree import shape_of, ModuleTree, TreeParam\n"
        "assert shape_of(ModuleTree('M', {'a': TreeParam((3, 4))})).numel == 12\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
