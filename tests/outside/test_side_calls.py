"""Modules that are called from the side compute what plain PyTorch computes, to the last bit.

Each case is drawn: a module and its input, the way it is called, train or eval, how gradients are
recorded, what is cut into groups, where parameters are, `initialize` or `dispatch`.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from tests.offload.engine_cases import HOST, NVME, bits, config, gradients_of
from tests.outside.side_calls import (
    WAYS,
    Recipe,
    built,
    copied,
    info_recipes,
    own_recipes,
    seed,
    tensors_in,
)

CASES, LONG_SETS, SET = 40, 24, 100
MODES = ("grad", "no_grad", "inference", "frozen")
PLACES = {"host": HOST, "nvme": NVME}
BUDGET = {"host": "4MiB", "nvme": "16MiB"}


@dataclass(frozen=True)
class Case:
    recipe: Recipe
    way: str
    mode: str
    training: bool
    place: str
    begin: str
    cut: int  # which of the classes in the model is the one of blocks; 0: none is named

    def __str__(self) -> str:
        mode = "train" if self.training else "eval"
        return (
            f"{self.recipe.name}, {self.way}, {mode}, {self.mode}, {self.place}, {self.begin}, "
            f"cut {self.cut}"
        )  # fmt: skip


@dataclass
class Outcome:
    """What a call gave and left behind."""

    outputs: list[Tensor]
    slopes: list[Tensor]
    gradients: dict[str, Tensor]
    values: dict[str, Tensor]

    def compare(self, expected: Outcome) -> Iterator[str]:
        for what in ("outputs", "slopes"):
            own, theirs = getattr(self, what), getattr(expected, what)
            if [_described(x) for x in own] != [_described(x) for x in theirs]:
                yield what
        for what in ("gradients", "values"):
            own, theirs = getattr(self, what), getattr(expected, what)
            if {n: bits(x) for n, x in own.items()} != {n: bits(x) for n, x in theirs.items()}:
                yield what


def _described(x: Tensor) -> Any:
    if x.is_nested:
        return [_described(each) for each in x.unbind()]
    x = x.dequantize() if x.is_quantized else x.to_dense() if x.is_sparse else x
    return tuple(x.shape), x.dtype, x.stride(), bits(x.contiguous())


def drawn(number: int, count: int) -> Iterator[Case]:
    """Set `number`. Modules that ask are drawn more often than all of PyTorch's cases."""
    own = list(own_recipes())
    infos = {training: list(info_recipes(training)) for training in (True, False)}
    classes = {training: {r.name.split()[0]: [] for r in infos[training]} for training in infos}
    for training, recipes in infos.items():
        for recipe in recipes:
            classes[training][recipe.name.split()[0]].append(recipe)
    draw = random.Random(number)
    for _ in range(count):
        training = draw.random() < 0.3
        if draw.random() < 0.6:
            recipe = draw.choice(own)
        else:
            recipe = draw.choice(draw.choice(list(classes[training].values())))
        yield Case(
            recipe, draw.choice(list(WAYS)), draw.choice(MODES), training,
            draw.choice(("nvme", "nvme", "host")), draw.choice(("initialize", "dispatch")),
            draw.choice((0, 0, 1, 2, 3)),
        )  # fmt: skip


def run(model: nn.Module, case: Case, *, backward: bool) -> tuple[list[Tensor], list[Tensor]]:
    args, kwargs = copied(case.recipe.inputs())
    inputs = [x for x in tensors_in([args, kwargs]) if x.is_floating_point()]
    if case.mode in ("grad", "frozen"):
        for x in inputs:
            x.requires_grad_()
    seed()
    contexts: dict[str, Any] = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
    with contexts.get(case.mode, torch.enable_grad)():
        outputs = tensors_in(WAYS[case.way](model, args, kwargs))
    loss = [x.float().square().sum() for x in outputs if x.requires_grad]
    if loss and backward:
        torch.stack(loss).sum().backward()
    return [x.detach() for x in outputs], [x.grad for x in inputs if x.grad is not None]


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: copy.deepcopy(value) for name, value in model.state_dict().items()
        if isinstance(value, Tensor)
    }  # fmt: skip


def blocks_of(model: nn.Module, cut: int) -> dict[str, Any]:
    names = sorted(
        {type(m).__name__ for m in model.modules() if next(m.parameters(), None) is not None}
    )
    return {"groups": {"blocks": [names[cut % len(names)]]}} if cut and names else {}


def compare(case: Case, folder: Path) -> list[str] | str:
    """What differs, or why the case cannot be used."""
    plain, offloaded = (built(case.recipe, case.way).train(case.training) for _ in range(2))
    if case.mode == "frozen":
        plain.requires_grad_(False), offloaded.requires_grad_(False)
    if not any(p.is_floating_point() for p in offloaded.parameters()):
        return "no parameters"
    backward = case.begin == "initialize"
    if backward and not any(p.requires_grad for p in offloaded.parameters()):
        offloaded.dummy = nn.Parameter(torch.zeros(1))
        plain.dummy = nn.Parameter(torch.zeros(1))
    try:
        outputs, slopes = run(plain, case, backward=backward)
    except Exception as error:  # noqa: BLE001 - a case that PyTorch itself cannot run
        return f"plain PyTorch raises {type(error).__name__}"
    gradients = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    expected = Outcome(outputs, slopes, gradients, values_of(plain))
    place = PLACES[case.place]
    keys = config(folder, place, budget=BUDGET, **blocks_of(offloaded, case.cut))
    if case.begin == "initialize":
        with offload.initialize(offloaded, keys) as engine:
            outputs, slopes = run(offloaded, case, backward=True)
            actual = Outcome(outputs, slopes, gradients_of(engine), values_of(offloaded))
            engine.check_integrity()
    else:
        keys["placement"] = {"parameters": place["parameters"]}
        offload.dispatch(offloaded, keys)
        with offload.dispatched(offloaded):
            outputs, slopes = run(offloaded, case, backward=False)
            actual = Outcome(outputs, slopes, {}, values_of(offloaded))
    return list(actual.compare(expected))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("one_thread")
@pytest.mark.sample("0")
@pytest.mark.parametrize("number", range(LONG_SETS))
def test_modules_called_from_the_side_have_the_bits_of_plain_pytorch(
    tmp_path: Path, number: int, long: bool
) -> None:
    outcomes: Counter[str] = Counter()
    wrong = []
    for case in drawn(number, SET if long else CASES):
        try:
            outcome = compare(case, tmp_path)
        except Exception as error:  # noqa: BLE001 - all that do not fit are named together
            outcome = [f"{type(error).__name__}: {error}"]
        if isinstance(outcome, str):
            outcomes[outcome] += 1
        elif outcome:
            wrong.append(f"{case}: {', '.join(outcome)}")
        else:
            outcomes["equal"] += 1
    print(dict(outcomes), "wrong:", len(wrong))
    assert not wrong, "\n".join(wrong)
    assert outcomes["equal"] >= 0.8 * outcomes.total(), outcomes
