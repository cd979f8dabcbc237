"""A closed model's way back: whatever is done with it, it computes and trains as plain PyTorch."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import offload
from offload.errors import StateError
from tests.offload.engine_cases import (
    HOST,
    NVME,
    TinyLM,
    assert_same_bits,
    batches,
    config,
    losses_of,
    on_the_cpu_alone,
    seeded,
)

pytestmark = on_the_cpu_alone("what is given back is on the CPU")
FEW, MANY = 6, 150  # orders that are drawn

Values = dict[str, torch.Tensor]


def loads(model: Any, values: Values, _: Path) -> Any:
    model.load_state_dict(values)
    return model


def assigns(model: Any, values: Values, _: Path) -> Any:
    model.load_state_dict({name: value.clone() for name, value in values.items()}, assign=True)
    return model


def empties(model: Any, values: Values, folder: Path) -> Any:
    return loads(model.to_empty(device="cpu"), values, folder)


def empties_and_assigns(model: Any, values: Values, folder: Path) -> Any:
    return assigns(model.to_empty(device="cpu"), values, folder)


def sets_data(model: Any, values: Values, _: Path) -> Any:
    for name, param in model.named_parameters():
        param.data = values[name].clone()
    return model


def reads_files(model: Any, values: Values, folder: Path) -> Any:
    distinct = {name: value for name, value in values.items() if name != "head.weight"}
    save_file(distinct, folder / "values.safetensors")
    offload.dispatch(model, config(folder), weights=folder / "values.safetensors")
    offload.dispatched(model).close("host")
    return model


def moves(model: Any, *_: Any) -> Any:
    assert model.to("cpu") is model
    return model


def copies(model: Any, *_: Any) -> Any:
    return copy.deepcopy(model)


def pickles(model: Any, *_: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def through_meta(model: Any, values: Values, folder: Path) -> Any:
    return empties(model.to("meta"), values, folder)


FILLS: list[Callable[..., Any]] = [
    loads, assigns, empties, empties_and_assigns, sets_data, reads_files
]  # fmt: skip
USES = [*FILLS, moves, copies, pickles, through_meta]
FLAGS: list[Callable[[bool], None]] = [
    lambda _: None,
    torch.__future__.set_overwrite_module_params_on_conversion,
]


def life(model: Any, draw: random.Random, folder: Path) -> tuple[Values, str]:
    """The model in tiers and out of them: the values that it had, and how it was closed."""
    placement, keep = draw.choice([HOST, NVME]), draw.choice(["host", "drop"])
    owner: Any
    if draw.random() < 0.5:
        owner = offload.initialize(model, config(folder, placement))
        losses_of(owner, batches(1))
    else:
        placement = {"parameters": placement["parameters"]}
        owner = offload.dispatched(offload.dispatch(model, config(folder, placement)))
        with torch.no_grad():
            model(batches(1)[0][:, :-1])
    values = {name: value.clone() for name, value in model.state_dict().items()}
    owner.close(keep)
    return values, keep


def trained(model: Any) -> Values:
    """After a step of plain PyTorch."""
    model.zero_grad()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model.loss(batches(1)[0]).backward()
    optimizer.step()
    return dict(model.state_dict())


def test_a_closed_model_is_filled_used_and_given_to_tiers_in_any_order(
    tmp_path: Path, long: bool
) -> None:
    for seed in range(MANY if long else FEW):
        draw = random.Random(seed)
        model, order = seeded(TinyLM), []
        for _ in range(draw.randint(1, 3)):
            values, keep = life(model, draw, tmp_path)
            flag = draw.choice(FLAGS)
            uses = [draw.choice(FILLS)] if keep == "drop" else []
            uses += draw.choices(USES, k=draw.randint(0, 2))
            order += [keep, *(use.__name__ for use in uses)]
            for use in uses:
                flag(True)
                try:
                    model = use(model, values, tmp_path)
                    model.head.weight = model.embed.weight  # plain PyTorch, too, may lose the tie
                finally:
                    flag(False)
            assert_same_bits(model.state_dict(), values)
            assert {type(param) for param in model.parameters()} == {nn.Parameter}, order
            plain = seeded(TinyLM)
            plain.load_state_dict(values)
            assert_same_bits(trained(model), trained(plain))


@pytest.mark.parametrize("trains", [True, False], ids=["initialize", "dispatch"])
def test_a_model_that_is_partly_filled_says_that_values_are_missing(
    trains: bool, tmp_path: Path
) -> None:
    model = seeded(TinyLM)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    owner: Any
    if trains:
        owner = offload.initialize(model, config(tmp_path))
    else:
        owner = offload.dispatched(offload.dispatch(model, config(tmp_path)))
    owner.close("drop")
    some = {name: value for name, value in values.items() if name.startswith("blocks.0.")}
    model.load_state_dict(some, strict=False)
    x = torch.ones(1, 2, 32)
    assert torch.isfinite(model.blocks[0](x)).all()
    for use in (
        lambda: model(batches(1)[0][:, :-1]), lambda: model.blocks[1](x), model.norm.weight.sum,
        lambda: model.to("meta"), lambda: model.norm.weight.data.zero_(),
        lambda: offload.dispatch(model, config(tmp_path)), lambda: copy.deepcopy(model),
        lambda: model.norm.weight.detach().copy_(values["norm.weight"]),
    ):  # fmt: skip
        with pytest.raises(StateError, match=r"load_state_dict"):
            use()
    with torch.no_grad(), pytest.raises(StateError, match=r"load_state_dict"):
        model.norm.weight.copy_(1)
    model.load_state_dict(values)
    assert_same_bits(model.state_dict(), values)
