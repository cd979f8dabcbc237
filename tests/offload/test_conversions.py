"""Conversions of a model in tiers do what they do to any model, or are refused at the call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.errors import StateError, UnsupportedError
from tests.offload.engine_cases import HOST, NVME, config, on_the_cpu_alone, seeded

pytestmark = on_the_cpu_alone("the table is of a model on the CPU")


def build() -> Any:
    return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.LSTM(4, 4))


CALLS: dict[str, tuple[Callable[[Any], Any], str | None]] = {
    "half": (lambda m: m.half(), r"float16 on cpu, .*float32 on cpu; set precision"),
    "float": (lambda m: m.float(), None),
    "to fp32": (lambda m: m.to(torch.float32), None),
    "to meta": (lambda m: m.to("meta"), r"on meta.*close the engine"),
    "to_empty": (lambda m: m.to_empty(device="cpu"), None),
    "share_memory": (lambda m: m.share_memory(), r"\.share_memory\(\)"),
    "_apply the same": (lambda m: m._apply(lambda t: t.detach().clone()), None),
    "_apply flat": (lambda m: m._apply(lambda t: t.reshape(-1)), "would make .*shape"),
}


@pytest.mark.parametrize("placement", [HOST, NVME], ids=["host", "nvme"])
@pytest.mark.parametrize("trains", [True, False], ids=["initialize", "dispatch"])
def test_a_conversion_changes_nothing_or_is_refused_at_the_call(
    trains: bool, placement: dict[str, Any], tmp_path: Path
) -> None:
    model = seeded(build).eval()
    owner: Any
    if trains:
        owner = offload.initialize(model, config(tmp_path, placement))
    else:
        parameters = {"parameters": placement["parameters"]}
        owner = offload.dispatched(offload.dispatch(model, config(tmp_path, parameters)))
    with owner, torch.no_grad():
        x, same = torch.ones(3, 4), dict(model.named_parameters())
        expected = model(x)[0]
        for call, refusal in CALLS.values():
            for part in (model, model[0]):
                if refusal is None:
                    assert call(part) is part
                else:
                    with pytest.raises(UnsupportedError, match=refusal):
                        call(part)
            assert all(param is same[name] for name, param in model.named_parameters())
            assert torch.equal(model(x)[0], expected)


def test_a_closed_dispatched_model_is_called_that(tmp_path: Path) -> None:
    model = offload.dispatch(build(), config(tmp_path, {"parameters": "nvme"}))
    weight = next(model.parameters())
    offload.dispatched(model).close(keep="drop")
    for use in (
        lambda: model(torch.ones(2, 4)), weight.sum, model.state_dict, model.half,
        lambda: offload.dispatched(model).report(),
    ):  # fmt: skip
        with pytest.raises(
            StateError, match=r"(this dispatched model's tiers are closed.*|is not )dispatch"
        ):
            use()
