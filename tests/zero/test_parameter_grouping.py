"""Groups and units: repeated blocks, the rest by module, tied weights once."""

import pytest
import torch
from torch import nn

from offload.tiers.errors import ConfigError
from offload.zero.groups.model_shape import SMALL_UNIT_NUMEL
from offload.zero.groups.parameter_grouping import group_parameters

LARGE = int(SMALL_UNIT_NUMEL**0.5) + 1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(LARGE, LARGE)
        self.second = nn.Linear(LARGE, LARGE)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(LARGE, LARGE)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(LARGE)
        self.head = nn.Linear(LARGE, LARGE, bias=False)


def names(model: nn.Module, *classes: str) -> list[str]:
    return [group.name for group in group_parameters(model, classes).groups]


def test_a_tied_weight_is_in_one_group_that_both_units_need():
    model = Model()
    model.head.weight = model.embed.weight
    grouping = group_parameters(model)
    assert [group.name for group in grouping.groups][-1] == "norm"
    assert grouping.groups[0].params[0].names == ("embed.weight", "head.weight")
    needs = {unit.name: unit.groups for unit in grouping.units}
    assert needs["head"] == needs["embed"] == [0]


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


def test_every_parameter_is_in_one_group_with_all_its_names():
    model = Odd()
    for classes in ((), ["LSTM"]):
        grouping = group_parameters(model, classes)
        named = [name for group in grouping.groups for p in group.params for name in p.names]
        assert sorted(named) == sorted(n for n, _ in model.named_parameters(remove_duplicate=False))
        used = {index for unit in grouping.units for index in unit.groups}
        assert used == set(range(len(grouping.groups)))


def test_named_block_classes_replace_the_search():
    assert "layers.0.first" in names(Model(), "Linear")
    assert "layers.0" not in names(Model(), "Linear")


def test_a_class_that_is_not_in_the_model_is_an_error_naming_those_that_are():
    with pytest.raises(ConfigError, match=r"no module of class Blok .* Block, "):
        group_parameters(Model(), ["Blok"])


def test_integer_and_complex_parameters_are_left_where_they_are():
    model = nn.Module()
    model.codes = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    model.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64), requires_grad=False)
    assert group_parameters(model).groups == []


@pytest.mark.parametrize("beside", [nn.Dropout(), nn.Identity(), None])
def test_an_expert_of_a_list_is_a_group_whatever_without_parameters_is_beside_it(beside):
    """NLLB-MoE has a dropout in the dictionary of its experts."""
    model = Model()
    model.experts = nn.ModuleDict({str(i): nn.Linear(LARGE, LARGE) for i in range(2)})
    if beside is not None:
        model.experts["beside"] = beside
    grouping = group_parameters(model)
    assert [g.name for g in grouping.groups if g.table] == ["experts.0", "experts.1"]
    assert [u.name for u in grouping.units if u.table] == ["experts.0", "experts.1"]
