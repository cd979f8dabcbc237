"""PyTorch's own optimizer cases (OptimizerInfo) for Adam and AdamW, run against the engine's.

Every input trains like torch's optimizer to rounding. Every error input raises the error that it
raises in torch, given through param groups. What speaks only of torch's ways to compute (`foreach`,
`capturable`) is listed below with the reason.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from tests.offload.engine_cases import NVME, config

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

STEPS = 10
INFOS = [info for info in optim_db if info.optim_cls in (torch.optim.Adam, torch.optim.AdamW)]
INPUTS = [(info, case) for info in INFOS for case in info.optim_inputs_func("cpu")]
ERRORS = [(info, case) for info in INFOS for case in info.optim_error_inputs_func("cpu", None)]
NOT_OURS = {
    "lr as Tensor doesn't work with foreach & not capturable": "foreach is no key here: a tensor "
    "lr works",
    r"betas\[0\] as a Tensor is not supported for capturable=False and foreach=True": "foreach is "
    "no key here: tensor betas work",
}


def test_torch_has_as_many_cases_as_are_run_here() -> None:
    assert {info.optim_cls.__name__ for info in INFOS} == {"Adam", "AdamW"}
    assert len(INPUTS) >= 2 * 5
    assert len(ERRORS) >= 2 * 12
    assert {case.optimizer_error_input.desc for _, case in ERRORS} >= NOT_OURS.keys()


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        model(torch.randn(5, 7, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def with_torch(info: OptimizerInfo, kwargs: dict[str, Any]) -> dict[str, Tensor]:
    model = small()
    train(model, info.optim_cls(model.parameters(), **kwargs))
    return dict(model.named_parameters())


def defaults(info: OptimizerInfo) -> dict[str, Any]:
    return {"type": info.optim_cls.__name__.lower()}


@pytest.mark.sample(5)
@pytest.mark.parametrize("through", ["config", "param groups"])
@pytest.mark.parametrize(
    ("info", "case"), INPUTS, ids=[f"{i.optim_cls.__name__} {c.desc}" for i, c in INPUTS]
)
def test_every_input_trains_as_with_torch(
    info: OptimizerInfo, case: Any, through: str, tmp_path: Path
) -> None:
    model = small()
    kwargs = dict(case.kwargs)
    keys = defaults(info)
    parameters: Any = None
    if through == "config":
        keys |= kwargs
    else:
        keys |= {key: kwargs.pop(key) for key in ("amsgrad",) if key in kwargs}  # for all groups
        parameters = [{"params": list(model.parameters()), **kwargs}]
    settings = config(tmp_path, NVME, optimizer=keys)
    with offload.initialize(model, settings, parameters=parameters) as engine:
        train(model, engine.optimizer)
        with engine.gathered():
            found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, expected in with_torch(info, case.kwargs).items():
        distance = (found[name] - expected.detach()).norm() / expected.detach().norm()
        assert distance <= 1e-6, (name, distance.item())


def params_of(value: Any) -> list[nn.Parameter]:
    if isinstance(value, nn.Parameter):
        return [value]
    if isinstance(value, dict):
        return params_of(value["params"])
    if isinstance(value, (list, tuple)):
        return [param for each in value for param in params_of(each)]
    return []


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("info", "case"), ERRORS,
    ids=[f"{i.optim_cls.__name__} {c.optimizer_error_input.desc}" for i, c in ERRORS],
)  # fmt: skip
def test_every_error_input_raises_what_torch_raises(
    info: OptimizerInfo, case: Any, tmp_path: Path
) -> None:
    given = copy.deepcopy(case.optimizer_error_input)  # cases share parameters
    if given.desc in NOT_OURS:
        assert "foreach" in given.kwargs
        return
    model = small()
    parameters = given.params
    if parameters is None:
        parameters = [{"params": list(model.parameters()), **given.kwargs}]
    model.more = nn.ParameterList(dict.fromkeys(params_of(parameters)))
    settings = config(tmp_path, NVME, optimizer=defaults(info))
    expected = (
        pytest.warns(case.error_type, match=case.error_regex)
        if issubclass(case.error_type, Warning)
        else pytest.raises(case.error_type, match=case.error_regex)
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(expected)
        stack.enter_context(offload.initialize(model, settings, parameters=parameters))
